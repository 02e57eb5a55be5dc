"""What can go wrong, by name. Bad shapes and counts are ValueError, bad types TypeError."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GmmRegistryError(Exception):
    """Base of every error that is about backends rather than about one call's arguments."""


class UnknownBackendError(GmmRegistryError, LookupError):
    """A backend was asked for by a name that no installed distribution offers."""


class BackendUnavailableError(GmmRegistryError, RuntimeError):
    """Every backend that could have served was refused; the message gives all reasons of each."""


class DuplicateBackendError(GmmRegistryError, RuntimeError):
    """Two distributions offer one key, so asking for that key is ambiguous."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the name that was likely meant, to end a message with; "" if none is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
