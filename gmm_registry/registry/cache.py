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
_FILE = "choices.json"
_UNUSED = "neither read nor written"


def location() -> Path | None:
    """Return where the file is; None if there is to be none, or none can be, which a warning says."""
    named = os.environ.get(ENVIRONMENT)
    if named == "":
        return None
    try:
        return Path(named).expanduser() if named else _default()
    except RuntimeError as error:  # there is no such home
        _warn(Path(named or _FILE), _UNUSED, error)
        return None


def _default() -> Path:
    from platformdirs import user_cache_path  # here, since nothing else needs it

    path = user_cache_path("gmm_registry", appauthor=False) / _FILE
    if not path.is_absolute():  # "~/.cache" where the user has no home
        raise RuntimeError(f"{path.parent} is no absolute path")
    return path


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


def _renew_lock() -> None:
    """Begin a child of fork with a lock that no thread holds which is not there."""
    global _lock
    _lock = Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)


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
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError("it is no regular file")
        return records.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        _warn(path, _UNUSED, error, "remove it, or " if isinstance(error, ValueError) else "")
        return None


def _merge(path: Path, choices: Sequence[Choice]) -> bool:
    """Add choices to the file, with what others have written meanwhile; say whether that worked."""
    if _read(path) is None:  # and nothing is to be left beside what is not ours
        return False
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


def _warn(path: Path, state: str, error: Exception, remedy: str = "") -> None:
    cause = str(getattr(error, "strerror", None) or error).rstrip(".")
    if (path, cause) not in _warned:
        _warned.add((path, cause))
        remedy += f"name another file in {ENVIRONMENT}, or leave that empty to have none"
        _log.warning("the cache of tuned choices, %s, is %s: %s; %s", path, state, cause, remedy)
