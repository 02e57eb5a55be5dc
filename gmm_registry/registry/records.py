"""What was chosen for what, and files of that: of one format, whether as a cache or to repeat a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cache
from math import log2
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints
from uuid import uuid4

import torch

from gmm_registry.contract import BackendKey, Problem, dtype_name
from gmm_registry.environment import device_name, versions
from gmm_registry.registry.discovery import ANY, offers

_FORMAT = "gmm_registry choices 1"


class Signature(NamedTuple):
    """What problems share that one choice serves: all but the exact number of rows."""

    device: str  # device type
    dtype: str
    groups: int
    rows_per_group: int | float  # on average, as the nearest power of two: rows vary from step to step
    k: int
    n: int
    direction: str

    @classmethod
    def of(cls, problem: Problem) -> Signature:
        """Round a problem."""
        mean = problem.rows / problem.groups if problem.groups else 0
        rounded = 2 ** round(log2(mean)) if mean else 0
        dtype = dtype_name(problem.dtype)
        return cls(problem.device, dtype, problem.groups, rounded, problem.k, problem.n, problem.direction)


class Machine(NamedTuple):
    """What a measurement depends on, beside the backend's own version."""

    device_name: str
    torch: str
    triton: str  # "": not installed

    @classmethod
    def of(cls, problem: Problem) -> Machine:
        """Describe the device of a problem, and what is installed."""
        index = "" if problem.index is None else f":{problem.index}"
        return cls(device_name(f"{problem.device}{index}"), torch.__version__, _triton())


@cache
def _triton() -> str:
    return versions().get("triton", "")


class Choice(NamedTuple):
    """A backend for a signature, and where that comes from."""

    signature: Signature
    machine: Machine
    backend: BackendKey
    distribution: str  # that offers it, with its version
    source: str  # "tuned", or as in `Explanation`
    ms: float | None = None  # the geometric mean of what was measured

    @classmethod
    def of(cls, problem: Problem, backend: BackendKey, source: str, ms: float | None = None) -> Choice:
        """Note a choice that was made here, with the versions that are here."""
        signature, machine = Signature.of(problem), Machine.of(problem)
        return cls(signature, machine, backend, offered_by(backend), source, ms)


def offered_by(key: BackendKey) -> str:
    """Name the distribution that offers a backend, and its version; "" if none does."""
    return next((f"{offer.distribution} {offer.version}" for offer in offers().get(str(key), ())), "")


_TYPES: dict[str, Any] = {
    **get_type_hints(Signature),
    **get_type_hints(Machine),
    "backend": str,
    "distribution": str,
    "source": str,
    "ms": int | float | None,
}


def write(path: Path, choices: Iterable[Choice]) -> None:
    """Write a file that others see in whole or not at all."""
    lines = ",\n".join(f"  {json.dumps(_entry(choice))}" for choice in choices)
    path = Path(os.path.realpath(path))  # a link is to stay one
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}")
    unfinished = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        unfinished.write_text(f'{{"format": "{_FORMAT}", "choices": [\n{lines}\n]}}\n', "utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _entry(choice: Choice) -> dict[str, object]:
    flat = choice._asdict()
    signature, machine = flat.pop("signature"), flat.pop("machine")
    return {**signature._asdict(), **machine._asdict(), **flat, "backend": str(choice.backend)}


def read(path: Path) -> list[Choice]:
    """Read what `write` wrote.

    Raises:
        ValueError: the file holds anything else.
        OSError: it cannot be read.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no file of choices: it is not JSON ({error})") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ValueError(f"{path} is no file of choices: it does not say that its format is {_FORMAT!r}")
    entries = found.get("choices")
    if not isinstance(entries, list):
        raise ValueError(f"{path} is no file of choices: it has no list of them")
    try:
        return [_choice(entry) for entry in entries]
    except ValueError as error:
        raise ValueError(f"{path} is no file of choices: {error}") from error


def _choice(entry: object) -> Choice:
    if not (
        isinstance(entry, dict)
        and entry.keys() == _TYPES.keys()
        and all(isinstance(value, _TYPES[name]) for name, value in entry.items())
    ):
        raise ValueError(f"{entry!r} is not of the form {', '.join(_TYPES)}")
    signature = Signature(**{name: entry.pop(name) for name in Signature._fields})
    machine = Machine(**{name: entry.pop(name) for name in Machine._fields})
    backend = BackendKey.parse(entry.pop("backend"))
    if backend.device not in (signature.device, ANY):
        raise ValueError(f"{backend} does not serve {signature.device}")
    return Choice(signature, machine, backend, **entry)
