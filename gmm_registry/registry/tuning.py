"""Measure every backend on a problem, and go by what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import get_args

from gmm_registry import measure
from gmm_registry.contract import Accepted, BackendKey, Direction, Problem, Rejected
from gmm_registry.errors import BackendUnavailableError
from gmm_registry.registry import cache, pins
from gmm_registry.registry.choice import changed
from gmm_registry.registry.discovery import candidates
from gmm_registry.registry.explanation import rank, reasons
from gmm_registry.registry.records import Choice
from gmm_registry.registry.trial import DISTRIBUTIONS, REFERENCE, Timing, Trial
from gmm_registry.registry.verdicts import instance, judge, require_problem


@dataclass(frozen=True)
class Tuning:
    """Hold what `autotune` measured; prints as a report.

    ``timings`` has for each direction every backend that took part, the fastest first, those excluded last.
    ``saved`` is the file that future processes find it in, None if there is none.
    """

    problem: Problem
    device_name: str
    timings: dict[Direction, tuple[Timing, ...]]
    refused: tuple[Rejected, ...]
    seconds: float
    saved: Path | None

    @property
    def chosen(self) -> dict[Direction, BackendKey]:
        """The fastest backend of each direction."""
        return {direction: timings[0].key for direction, timings in self.timings.items()}

    def __str__(self) -> str:
        width = max(len(str(timing.key)) for timings in self.timings.values() for timing in timings)
        lines = [f"{self.problem} ({self.device_name}), measured in {self.seconds:.1f} s"]
        for direction, timings in self.timings.items():
            lines += [f"  {direction:{width + 2}}" + "".join(f"{name:>12}" for name in DISTRIBUTIONS)]
            for timing in timings:
                times = "".join(f"{ms:>9.3f} ms" for ms in timing.ms.values())
                slower = f"{timing.mean / timings[0].mean:.2f} times as long"
                state = timing.excluded or ("chosen" if timing is timings[0] else slower)
                lines += [f"    {timing.key!s:{width}}{times}  {state}"]
        for verdict in self.refused:
            lines += [f"  {verdict.key}: refused"]
            lines += [f"    - {reason}" for reason in verdict.reasons]
        lines += [f"saved in {self.saved}" if self.saved else "holds for this process only"]
        return "\n".join(lines)

    __repr__ = __str__


def autotune(problem: Problem, *, seconds: float = 10.0, save: bool = True) -> Tuning:
    """Measure every backend that accepts a problem, and choose the fastest from now on.

    Forward, grad_x and grad_w are measured on random data, with equal and with very unequal groups, and the
    backend of each is chosen by the geometric mean of the two. A backend that raises, or whose result is not
    that of any.eager, is excluded. The choice comes before the backends' own table, for problems of the same
    device, dtype, groups, k and n, and about as many rows: the same power of two in a group, rounded.

    Args:
        problem: for example ``Problem.of(x, weight)``; its direction does not matter.
        seconds: how long all of it may take, if a few calls of each backend do not take longer.
        save: write the choice to the cache, for this and every later process.

    Raises:
        TypeError: it is no problem.
        ValueError: the problem has nothing to multiply, or the seconds are negative or not finite.
        BackendUnavailableError: no backend can do it; the message gives every reason.
    """
    require_problem(problem)
    measure.check_seconds(seconds)
    if min(problem.rows, problem.groups, problem.k, problem.n) < 1:
        raise ValueError(f"there is nothing to measure in {problem}")
    begin = perf_counter()
    verdicts = rank(judge(key, problem) for key in candidates(problem.device))
    accepted = [verdict.key for verdict in verdicts if isinstance(verdict, Accepted)]
    refused = tuple(verdict for verdict in verdicts if isinstance(verdict, Rejected))
    if REFERENCE not in accepted:
        raise BackendUnavailableError(f"{REFERENCE} cannot check {problem}:\n{reasons(refused)}")
    backends = [instance(key, problem.device) for key in accepted]
    trial = Trial(problem)
    problem = replace(problem, index=trial.device.index, direction="forward", skew=None)
    timings: dict[Direction, tuple[Timing, ...]] = {}
    directions: tuple[Direction, ...] = get_args(Direction)
    for done, direction in enumerate(directions):
        share = (begin + seconds - perf_counter()) / (len(directions) - done)
        timings[direction] = trial.time(direction, backends, share)
    choices = [
        Choice.of(replace(problem, direction=direction), found[0].key, "tuned", round(found[0].mean, 6))
        for direction, found in timings.items()
    ]
    saved = cache.keep(choices, save=save)
    signatures = {choice.signature for choice in choices}
    pins.unmake(lambda signature, _: signature in signatures)
    changed()
    device = choices[0].machine.device_name
    return Tuning(problem, device, timings, refused, perf_counter() - begin, saved)
