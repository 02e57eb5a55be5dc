"""What `autotune` measured, in this process and in a file that outlives it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TypeAlias

from gmm_registry.contract import BackendKey, Problem
from gmm_registry.registry import records
from gmm_registry.registry.records import Choice, Machine, Signature, offered_by

ENVIRONMENT = "GMM_REGISTRY_CACHE"
HERE = "of this process"  # the place of what is in no file
_PATIENCE = 10  # seconds to wait for another process that writes

_log = logging.getLogger("gmm_registry")
_Key: TypeAlias = tuple[Signature, Machine]
_known: dict[_Key, tuple[Choice, str]] | None = None  # with the place it came from; None: not read yet
_warned: set[tuple[Path, str]] = set()
_lock = Lock()


def location() -> Path | None:
    """Return where the file is, or None if there is to be none."""
    named = os.environ.get(ENVIRONMENT)
    if named is not None:
        return Path(named).expanduser() if named else None
    from platformdirs import user_cache_path  # here, since nothing else needs it

    return user_cache_path("gmm_registry", appauthor=False) / "choices.json"


def look_up(problem: Problem) -> tuple[BackendKey, str] | None:
    """Return what was the fastest, with the versions that are here, and the place that it is known from."""
    known = _all()
    found = known.get((Signature.of(problem), Machine.of(problem))) if known else None
    if found is None or offered_by(found[0].backend) != found[0].distribution:
        return None
    return found[0].backend, found[1]


def keep(choices: Sequence[Choice], *, save: bool) -> Path | None:
    """Go by these choices from now on; return the file that they were saved in, if they could be."""
    path = location() if save else None
    saved = path if path and _merge(path, choices) else None
    known = _all()
    with _lock:
        known.update((_key(choice), (choice, str(saved or HERE))) for choice in choices)
    return saved


def forget() -> None:
    """Read the file again at the next choice."""
    global _known
    _known = None
    _warned.clear()


def _all() -> dict[_Key, tuple[Choice, str]]:
    global _known
    with _lock:
        if _known is None:
            path = location()
            found = (path and _read(path)) or []
            _known = {_key(choice): (choice, str(path)) for choice in found}
        return _known


def _key(choice: Choice) -> _Key:
    return choice.signature, choice.machine


def _read(path: Path) -> list[Choice] | None:
    """Return what the file holds, nothing if there is none; None if it is no file of ours."""
    try:
        return records.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        _warn(path, "neither read nor written", error, "remove it, or ")
        return None


def _merge(path: Path, choices: Sequence[Choice]) -> bool:
    """Add choices to the file, with what others have written meanwhile; say whether that worked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _one_writer(path):
            others = _read(path)
            if others is None:
                return False
            merged = {_key(choice): choice for choice in (*others, *choices)}
            records.write(path, merged.values())
            return True
    except OSError as error:
        _warn(path, "not written, and what was measured holds for this process only", error)
        return False


@contextmanager
def _one_writer(path: Path) -> Iterator[None]:
    from filelock import FileLock  # here, since nothing else needs it

    lock = FileLock(f"{path}.lock", timeout=_PATIENCE)
    try:
        lock.acquire()
    except NotImplementedError:  # a file system without locks: of two at once, one may lose its choices
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _warn(path: Path, state: str, error: OSError | ValueError, remedy: str = "") -> None:
    cause = str(getattr(error, "strerror", None) or error)
    if (path, cause) not in _warned:
        _warned.add((path, cause))
        remedy += f"name another file in {ENVIRONMENT}, or leave that empty to have none"
        _log.warning("the cache of tuned choices, %s, is %s: %s; %s", path, state, cause, remedy)
