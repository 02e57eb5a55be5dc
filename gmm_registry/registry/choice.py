"""Choose a backend for a problem and explain the choice."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import RLock
from typing import Any

import torch

from gmm_registry.contract import (
    Accepted,
    BackendKey,
    GroupedMatmulBackend,
    Problem,
    Rejected,
    Verdict,
)
from gmm_registry.errors import BackendUnavailableError, DuplicateBackendError
from gmm_registry.registry import discovery
from gmm_registry.registry.discovery import ANY, FATAL, find, list_backends, parse_device
from gmm_registry.registry.request import requested

_log = logging.getLogger("gmm_registry")
# Whether a backend runs on a device at all is asked with an ordinary problem in each of these.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_UNKNOWN_PRIORITY = 50  # of a plugin that could not be asked: that of a backend made for one device


# --- verdicts: what each backend says -------------------------------------------------------------


_instances: dict[tuple[BackendKey, str], GroupedMatmulBackend | BaseException] = {}
_making = RLock()


def _bound(key: BackendKey, device: str) -> GroupedMatmulBackend | BaseException:
    """Return the one instance for a device type, or why there is none."""
    with _making:
        if (key, device) not in _instances:
            _instances[key, device] = _make(key, device)
        return _instances[key, device]


def _make(key: BackendKey, device: str) -> GroupedMatmulBackend | BaseException:
    plugin = discovery.load(str(key))
    if isinstance(plugin, BaseException):
        return plugin
    try:
        return plugin().bind(key, device)
    except FATAL:
        raise
    except BaseException as error:
        return error


def _missing_device(device: str, index: int | None) -> tuple[str, ...]:
    if device == "cpu" and not index:
        return ()
    module: Any = getattr(torch, device, None)
    try:
        torch.device(device)
        known = hasattr(module, "is_available")
    except RuntimeError:
        known = False
    if not known:
        return (
            f"torch {torch.__version__} knows no device {device!r} here; the package that brings it "
            "is not installed or not imported",
        )
    if not module.is_available():
        return (f"torch.{device}.is_available() is False: no {device} device on this machine",)
    if index is not None and index >= module.device_count():
        return (f"there is no {device}:{index}: this machine has {module.device_count()} of them",)
    return ()


_refused_late: dict[tuple[BackendKey, str, torch.dtype], str] = {}


def _judge(key: BackendKey, problem: Problem) -> Verdict:
    """Ask one backend about one problem. Whatever a plugin raises becomes a reason."""
    backend = _bound(key, problem.device)
    if isinstance(backend, BaseException):
        missing = _missing_device(problem.device, problem.index)
        return Rejected(key, _UNKNOWN_PRIORITY, (f"not loaded: {describe(backend)}", *missing))
    late = _refused_late.get((key, problem.device, problem.dtype))
    try:
        said, priority = backend.rejections(problem), backend.priority(problem)
    except FATAL:
        raise
    except BaseException as error:
        missing = _missing_device(problem.device, problem.index)
        reason = f"its capability check raised {describe(error)}"
        return Rejected(key, _UNKNOWN_PRIORITY, (*missing, reason))
    missing = _missing_device(problem.device, problem.index)  # now that the backend's package is imported
    if not (isinstance(said, (list, tuple)) and all(isinstance(reason, str) for reason in said)):
        reason = f"its rejections must be a list of str, not {said!r}"
        return Rejected(key, _UNKNOWN_PRIORITY, (*missing, reason))
    if not isinstance(priority, int):
        reason = f"its priority must be an int, not {priority!r}"
        return Rejected(key, _UNKNOWN_PRIORITY, (*missing, reason))
    reasons = (*missing, *([late] if late else []), *said)
    return Rejected(key, priority, reasons) if reasons else Accepted(key, priority)


def _judge_device(key: BackendKey, device: str, index: int | None) -> Verdict:
    """Ask whether a backend takes an ordinary problem on a device, in any dtype."""
    refusals = []
    for dtype in _DTYPES:
        verdict = _judge(key, replace(_ordinary(device, index), dtype=dtype))
        if isinstance(verdict, Accepted):
            return verdict
        refusals.append(verdict)
    union = dict.fromkeys(reason for refusal in refusals for reason in refusal.reasons)
    common = [reason for reason in union if all(reason in refusal.reasons for refusal in refusals)]
    return Rejected(key, refusals[0].priority, tuple(common or union))


def _ordinary(device: str, index: int | None) -> Problem:
    return Problem(device, index, _DTYPES[0], rows=256, groups=4, k=128, n=128)


def describe(error: BaseException) -> str:
    """Put an exception's type and text on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# --- the choice: pure functions over verdicts -----------------------------------------------------


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


# --- what users call ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """Hold the verdict of every candidate, best first; prints as a report.

    ``chosen`` is what a call would run on now; ``request`` the name that was asked for, if any.
    """

    subject: str
    verdicts: tuple[Verdict, ...]
    request: str
    chosen: BackendKey | None

    def __str__(self) -> str:
        by = f"asked for by name: {self.request}" if self.request else "automatic choice"
        lines = [f"{self.subject} ({by})"]
        for verdict in self.verdicts:
            if isinstance(verdict, Rejected):
                lines += [f"  {verdict.key}: refused"]
                lines += [f"    - {reason}" for reason in verdict.reasons]
            else:
                state = "chosen" if verdict.key == self.chosen else "accepted"
                lines += [f"  {verdict.key}: {state}, priority {verdict.priority}"]
        if self.chosen is None:
            lines += ["  nothing can run this"]
        return "\n".join(lines)

    __repr__ = __str__


def explain(device: str | torch.device, problem: Problem | None = None) -> Explanation:
    """Say of every candidate for a device whether it accepts, and all reasons where it does not.

    Args:
        device: "cuda", "npu:1", ...
        problem: what is to be computed (`Problem.of`); by default, whether a backend runs there at all.

    >>> print(explain("npu"))  # doctest: +ELLIPSIS
    npu: any dtype (automatic choice)
      npu.npu_fused: refused
        - torch ... knows no device 'npu' here; the package that brings it is not installed or not imported
    ...
    """
    kind, index = parse_device(device)
    keys = _candidates(kind)
    if problem is None:
        subject = f"{device}: any dtype"
        verdicts = rank(_judge_device(key, kind, index) for key in keys)
    else:
        problem = replace(problem, device=kind, index=problem.index if index is None else index)
        subject = str(problem)
        verdicts = rank(_judge(key, problem) for key in keys)
    request = requested(None, kind)
    wanted = verdicts if not request else [v for v in verdicts if v.key == find(kind, request)]
    best = winner(wanted)
    return Explanation(subject, verdicts, request, best.key if best else None)


def get_backend(device: str | torch.device, impl: str | None = None) -> GroupedMatmulBackend:
    """Return a backend bound to a device: the best available there, or the one named.

    Args:
        device: "cpu", "cuda:1", "npu", ...
        impl: an implementation ("eager"); by default what `use_backend` or the environment asks for,
            else the one of highest priority.

    Raises:
        UnknownBackendError: no backend of that name; the message lists those there are.
        BackendUnavailableError: none can run there; the message gives every reason.
        DuplicateBackendError: two distributions offer it.
    """
    kind, index = parse_device(device)
    request = requested(impl, kind)
    keys = [find(kind, request)] if request else _candidates(kind)
    verdicts = rank(_judge_device(key, kind, index) for key in keys)
    return _instance(_accepted(verdicts, kind, request, f"run on {device}"), kind)


@lru_cache(maxsize=4096)
def choose(
    request: str, device: torch.device, dtype: torch.dtype, rows: int, groups: int, k: int, n: int
) -> GroupedMatmulBackend:
    """Return the backend for a problem; after the first time this costs one look-up.

    Raises as `get_backend` does.
    """
    problem = Problem(device.type, device.index, dtype, rows, groups, k, n)
    keys = [find(device.type, request)] if request else _candidates(device.type)
    verdicts = rank(_judge(key, problem) for key in keys)
    chosen = _accepted(verdicts, device.type, request, f"compute {problem}")
    if not request:
        _report(chosen, verdicts, problem)
    return _instance(chosen, device.type)


def _candidates(device: str) -> list[BackendKey]:
    """List the keys for a device, its own backends first: what they import may bring the device."""
    return sorted(list_backends(device), key=lambda key: key.device == ANY)


def _accepted(verdicts: tuple[Verdict, ...], device: str, request: str, purpose: str) -> BackendKey:
    chosen = winner(verdicts)
    if chosen:
        return chosen.key
    for verdict in verdicts if request else ():
        cause = _bound(verdict.key, device)
        if isinstance(cause, DuplicateBackendError):
            raise cause
        if isinstance(cause, BaseException):
            raise BackendUnavailableError(
                f"backend {request!r}, asked for by name, cannot {purpose}:\n{reasons(verdicts)}"
            ) from cause
    who = f"backend {request!r}, asked for by name," if request else "no backend"
    verb = "cannot" if request else "can"
    raise BackendUnavailableError(f"{who} {verb} {purpose}:\n{reasons(verdicts)}")


def _instance(key: BackendKey, device: str) -> GroupedMatmulBackend:
    backend = _bound(key, device)
    assert isinstance(backend, GroupedMatmulBackend)  # it was accepted
    return backend


_logged: set[str] = set()


def _report(chosen: BackendKey, verdicts: tuple[Verdict, ...], problem: Problem) -> None:
    """Log the pick once, and once for each cause that a better one was passed over."""
    place = f"{problem.device} ({str(problem.dtype).removeprefix('torch.')})"
    _once(logging.INFO, f"grouped matmul on {place}: {chosen}", "")
    better = verdicts[: [verdict.key for verdict in verdicts].index(chosen)]
    if better:
        _once(logging.WARNING, f"grouped matmul on {place} falls back to {chosen}", reasons(better))


def _once(level: int, headline: str, causes: str) -> None:
    # The numbers of a shape do not make another cause of it.
    cause = f"{headline}{re.sub(r'[0-9]+', '#', causes)}"
    if cause not in _logged:
        _logged.add(cause)
        _log.log(level, "%s", f"{headline}, since these refuse:\n{causes}" if causes else headline)


def refuse(key: BackendKey, device: torch.device, dtype: torch.dtype, reason: str) -> None:
    """Remember what a kernel said when it was called: that it is not implemented there."""
    _refused_late[key, device.type, dtype] = reason
    choose.cache_clear()


def forgive(keys: Iterable[BackendKey], device: torch.device, dtype: torch.dtype) -> None:
    """Take back what `refuse` remembered."""
    for key in keys:
        _refused_late.pop((key, device.type, dtype), None)
    choose.cache_clear()


def refresh() -> None:
    """Forget all that was found, loaded and chosen: a package was installed into this process."""
    discovery.forget()
    choose.cache_clear()
    _instances.clear()
    _refused_late.clear()
    _logged.clear()
