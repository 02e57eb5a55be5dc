"""Ask each backend about a problem; whatever a plugin answers or raises becomes a verdict."""

from __future__ import annotations

from dataclasses import replace
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
from gmm_registry.registry import discovery
from gmm_registry.registry.discovery import FATAL

# Whether a backend runs on a device at all is asked with an ordinary problem in each of these.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_UNKNOWN_PRIORITY = 50  # of a plugin that could not be asked: that of a backend made for one device

_instances: dict[tuple[BackendKey, str], GroupedMatmulBackend | BaseException] = {}
_making = RLock()
# What kernels said when they were called: on one device, of which the others may be of another kind.
refused_late: dict[tuple[BackendKey, str, int | None, torch.dtype], str] = {}


def bound(key: BackendKey, device: str) -> GroupedMatmulBackend | BaseException:
    """Return the one instance for a device type, or why there is none."""
    with _making:
        if (key, device) not in _instances:
            _instances[key, device] = _make(key, device)
        return _instances[key, device]


def instance(key: BackendKey, device: str) -> GroupedMatmulBackend:
    """Return the one instance of a backend that could be made."""
    backend = bound(key, device)
    assert isinstance(backend, GroupedMatmulBackend)
    return backend


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


def require_problem(problem: object) -> None:
    """Raise TypeError for what is no problem, such as the tensors of one."""
    if not isinstance(problem, Problem):
        raise TypeError(
            f"a problem is a Problem, not {type(problem).__name__}: make one with Problem.of(x, weight)"
        )


def judge(key: BackendKey, problem: Problem) -> Verdict:
    """Ask one backend about one problem. Whatever a plugin raises becomes a reason."""
    backend = bound(key, problem.device)
    if isinstance(backend, BaseException):
        missing = _missing_device(problem.device, problem.index)
        return Rejected(key, _UNKNOWN_PRIORITY, (f"not loaded: {describe(backend)}", *missing))
    late = refused_late.get((key, problem.device, problem.index, problem.dtype))
    try:
        said = _rejections(key, replace(problem, direction="forward", skew=None))
        priority = backend.priority(problem)
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


@lru_cache(maxsize=16384)
def _rejections(key: BackendKey, problem: Problem) -> list[str]:
    """Ask once for every direction and skew of a problem, for all of which the answer holds."""
    return instance(key, problem.device).rejections(problem)


def judge_device(key: BackendKey, device: str, index: int | None) -> Verdict:
    """Ask whether a backend takes an ordinary problem on a device, in any dtype."""
    refusals = []
    for dtype in _DTYPES:
        verdict = judge(key, Problem(device, index, dtype, rows=256, groups=4, k=128, n=128))
        if isinstance(verdict, Accepted):
            return verdict
        refusals.append(verdict)
    union = dict.fromkeys(reason for refusal in refusals for reason in refusal.reasons)
    common = [reason for reason in union if all(reason in refusal.reasons for refusal in refusals)]
    return Rejected(key, refusals[0].priority, tuple(common or union))


def describe(error: BaseException) -> str:
    """Put an exception's type and text on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def forget() -> None:
    """Make every instance again, and ask every question again."""
    _instances.clear()
    _rejections.cache_clear()
    refused_late.clear()
