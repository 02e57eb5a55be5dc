"""Reasons that several backends have to refuse a problem."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch

from gmm_registry.contract import Problem


def other_dtype(problem: Problem, name: str, dtypes: Sequence[torch.dtype]) -> list[str]:
    """Say that a kernel called ``name`` takes these dtypes only, if the problem's is another."""
    if problem.dtype in dtypes:
        return []
    return [f"{name} takes {', '.join(map(str, dtypes))}, not {problem.dtype}"]


def odd_widths(problem: Problem, multiple: int, need: str) -> list[str]:
    """Say of K and N, where they are no such multiples, that ``need``."""
    widths = dict.fromkeys((problem.k, problem.n))
    return [f"inner or outer dimension {width}{need}" for width in widths if width % multiple]


def not_importable(package: str, install: str, question: str) -> list[str]:
    """Import a package, and say what is wrong with it, if anything is.

    Args:
        package: its import name.
        install: the command that installs it.
        question: what to look at if it is there and cannot be imported.
    """
    try:
        import_module(package)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            return [f"{package} is not installed: {install}"]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return [f"{package} cannot be imported ({question}): {text}"]
    return []


def late_import(module: str, package: str) -> ModuleType:
    """Import a module where it computes, since asking for a refusal must not import its package.

    Raises:
        NotImplementedError: it cannot be imported. Nothing was computed: under automatic choice the next
            backend takes over.
    """
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:
        raise NotImplementedError(f"{package} cannot be imported ({error!r})") from error
