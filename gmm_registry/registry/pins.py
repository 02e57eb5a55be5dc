"""The automatic choices of this process, to be saved, and those of another, to be repeated."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gmm_registry.contract import BackendKey, Problem
from gmm_registry.registry import records
from gmm_registry.registry.records import Choice, Signature

_made: dict[tuple[Signature, BackendKey], Choice] = {}
_pinned: dict[Signature, list[BackendKey]] = {}
_place = ""  # the file that they are from


def save_choices(path: str | os.PathLike[str]) -> None:
    """Write down every automatic choice that this process has made and still goes by, for `use_choices`.

    A line of the JSON file says for a problem, its rows rounded as in the cache, which backend was chosen,
    from where (``source``, as in `Explanation`), on what device, and the versions.

    Raises:
        OSError: the file cannot be written.
    """
    records.write(Path(path), sorted(_made.values(), key=lambda choice: choice[:3]))


def note(problem: Problem, backend: BackendKey, source: str) -> None:
    """Remember an automatic choice; one entry for all problems of a signature."""
    key = Signature.of(problem), backend
    made = _made.get(key)  # one look, since another thread may unmake it
    if made is None or made.source != source:
        _made[key] = Choice.of(problem, backend, source)


def unmake(outdated: Callable[[Signature, BackendKey], bool]) -> None:
    """Forget choices that are no longer gone by."""
    for signature, backend in list(_made):
        if outdated(signature, backend):
            _made.pop((signature, backend), None)  # another thread may have been first


def pin(path: Path) -> None:
    """Read the choices to repeat, in place of those read before."""
    global _pinned, _place
    found: dict[Signature, list[BackendKey]] = {}
    for choice in records.read(path):
        found.setdefault(choice.signature, []).append(choice.backend)
    _pinned, _place = found, str(path)
    unmake(lambda signature, _: signature in found)


def pinned(problem: Problem) -> tuple[list[BackendKey], str]:
    """Return the backends that a problem may run on, and the file that says so; none: any.

    There are two where problems were chosen differently that the rounding of rows has put together.
    """
    return (_pinned.get(Signature.of(problem), []) if _pinned else []), _place


def forget() -> None:
    """Forget what was chosen, and what was to be repeated."""
    _made.clear()
    _pinned.clear()
