"""The trace of a choice, and the pure functions that make it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gmm_registry.contract import Accepted, BackendKey, Rejected, Verdict
from gmm_registry.registry.discovery import ANY
from gmm_registry.registry.request import ENVIRONMENT

Source: TypeAlias = Literal["argument", "use_backend", "environment", "file", "cache", "table"]

_NAMED_IN = {
    "argument": "the argument backend",
    "use_backend": "use_backend",
    "environment": ENVIRONMENT,
}


@dataclass(frozen=True)
class Explanation:
    """Hold the verdict of every candidate, best first; prints as a report.

    ``chosen`` is what a call would run on now; ``request`` the name that was asked for, if any. ``source``
    says who decided: "argument", "use_backend" or "environment", where that name was given; "file", the one
    given to `use_choices`; "cache", what `autotune` measured; "table", the priorities of the backends.
    ``place`` is the path of that file or cache.
    """

    subject: str
    verdicts: tuple[Verdict, ...]
    request: str
    chosen: BackendKey | None
    source: Source = "table"
    place: str = ""
    measured: BackendKey | None = None  # what the cache names, also where that refuses now

    def __str__(self) -> str:
        lines = [f"{self.subject} ({self._by()})"]
        for verdict in self.verdicts:
            if isinstance(verdict, Rejected):
                named = f", though named by the cache {self.place}" if verdict.key == self.measured else ""
                lines += [f"  {verdict.key}: refused{named}"]
                lines += [f"    - {reason}" for reason in verdict.reasons]
            else:
                state = "chosen" if verdict.key == self.chosen else "accepted"
                lines += [f"  {verdict.key}: {state}, priority {verdict.priority}"]
        if self.chosen is None:
            lines += ["  nothing can run this"]
        return "\n".join(lines)

    __repr__ = __str__

    def _by(self) -> str:
        if self.source == "table":
            return "automatic choice, from the backends' own table"
        if self.source == "cache":
            return f"automatic choice, from the cache {self.place}"
        return f"asked for by name in {_NAMED_IN.get(self.source, self.place)}: {self.request}"


def rank(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Sort by priority, the highest first; between equals, one made for the device before ``any``."""
    return tuple(sorted(verdicts, key=lambda v: (-v.priority, v.key.device == ANY, v.key)))


def winner(verdicts: Iterable[Verdict]) -> Accepted | None:
    """Return the first that accepts."""
    return next((verdict for verdict in verdicts if isinstance(verdict, Accepted)), None)


def reasons(verdicts: Iterable[Verdict]) -> str:
    """Print the refusals among the verdicts, a line for each reason."""
    return "\n".join(
        f"  {verdict.key}: {reason}"
        for verdict in verdicts
        if isinstance(verdict, Rejected)
        for reason in verdict.reasons
    )
