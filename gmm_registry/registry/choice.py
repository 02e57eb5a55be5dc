"""Choose a backend for a problem and explain the choice."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from gmm_registry.contract import (
    BackendKey,
    GroupedMatmulBackend,
    Problem,
    Verdict,
    dtype_name,
)
from gmm_registry.errors import BackendUnavailableError, DuplicateBackendError
from gmm_registry.registry import cache, discovery, pins, verdicts
from gmm_registry.registry.discovery import candidates, find, parse_device
from gmm_registry.registry.explanation import Explanation, Source, rank, reasons, winner
from gmm_registry.registry.request import origin, requested
from gmm_registry.registry.verdicts import bound, instance, judge, judge_device, require_problem

_log = logging.getLogger("gmm_registry")


# --- what users call ------------------------------------------------------------------------------


def explain(
    device: str | torch.device, problem: Problem | None = None, *, backend: str | None = None
) -> Explanation:
    """Say of every candidate for a device whether it accepts, and all reasons where it does not.

    Args:
        device: "cuda", "npu:1", ...
        problem: what is to be computed (`Problem.of`); by default, whether a backend runs there at all.
        backend: what the call would get as its argument ``backend``.

    >>> print(explain("npu"))  # doctest: +ELLIPSIS
    npu: any dtype (automatic choice, from the backends' own table)
      npu.npu_fused: refused
        - torch ... knows no device 'npu' here; the package that brings it is not installed or not imported
    ...
    """
    kind, index = parse_device(device)
    name = requested(backend, kind)
    source = origin(backend, kind) if name else "table"
    if problem is not None:
        require_problem(problem)
        problem = replace(problem, device=kind, index=problem.index if index is None else index)
        return _explain(problem, _wanted(problem, name, source), candidates(kind))
    said = rank(judge_device(key, kind, index) for key in candidates(kind))
    best = winner(said if not name else [verdict for verdict in said if verdict.key == find(kind, name)])
    return Explanation(f"{device}: any dtype", said, name, best.key if best else None, source)


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
    keys = [find(kind, request)] if request else candidates(kind)
    said = rank(judge_device(key, kind, index) for key in keys)
    best = winner(said)
    if best is None:
        _fail(said, kind, request, "", f"run on {device}")
    return instance(best.key, kind)


def use_choices(path: str | os.PathLike[str]) -> None:
    """Repeat in this process the automatic choices that `save_choices` wrote down in another.

    They come after what is asked for by name, and before the cache. A problem is found in the file by device
    type, dtype, groups, k, n, direction, and the rows of a group, rounded as by `autotune`. One that is not
    there is chosen for as always. Where the backend that is there cannot compute it, the call raises
    `BackendUnavailableError`. Another file replaces this one; `gmm_registry.registry.refresh` forgets it.

    Raises:
        ValueError: it is no such file; the message says why.
        OSError: it cannot be read.
    """
    pins.pin(Path(path))
    changed()


# --- the choice for one problem -------------------------------------------------------------------


def choose(request: str, problem: Problem) -> GroupedMatmulBackend:
    """Return the backend for a problem; after the first time this costs one look-up.

    Raises as `get_backend` does.
    """
    return _choose(state, request, problem)


@lru_cache(maxsize=4096)
def _choose(before: object, request: str, problem: Problem) -> GroupedMatmulBackend:
    found = _explain(problem, _wanted(problem, request))
    if before is not state:  # something has changed the answers meanwhile
        return choose(request, problem)
    if found.chosen is None:
        _fail(found.verdicts, problem.device, found.request, found.place, f"compute {problem}")
    if not request:
        pins.note(problem, found.chosen, found.source)
        _report(found, problem)
    return instance(found.chosen, problem.device)


class _Wanted(NamedTuple):
    """The backends that a problem may run on, and who says so, as in `Explanation`."""

    keys: Sequence[BackendKey]
    request: str = ""
    source: Source = "table"
    place: str = ""


def _wanted(problem: Problem, request: str, source: Source = "argument") -> _Wanted:
    if request:
        return _Wanted([find(problem.device, request)], request, source)
    keys, place = pins.pinned(problem)
    if keys:
        return _Wanted(keys, " or ".join(map(str, keys)), "file", place)
    return _Wanted(candidates(problem.device))


def _explain(problem: Problem, wanted: _Wanted, others: Iterable[BackendKey] = ()) -> Explanation:
    """Choose among those wanted; the ``others`` are only asked for their verdicts."""
    keys, request, source, place = wanted
    said = rank(judge(key, problem) for key in dict.fromkeys([*others, *keys]))
    best, measured = winner(verdict for verdict in said if verdict.key in keys), None
    if source == "table" and (tuned := cache.look_up(problem)):
        measured, place = tuned
        if fastest := winner(verdict for verdict in said if verdict.key == measured):
            best, source = fastest, "cache"
    return Explanation(str(problem), said, request, best.key if best else None, source, place, measured)


def _fail(said: Iterable[Verdict], device: str, request: str, place: str, purpose: str) -> NoReturn:
    """Raise with every reason. Where a name was asked for, the cause is why it could not be loaded."""
    if not request:
        raise BackendUnavailableError(f"no backend can {purpose}:\n{reasons(said)}")
    asked = f"asked for by name{f' in {place}' if place else ''}"
    error = BackendUnavailableError(f"backend {request!r}, {asked}, cannot {purpose}:\n{reasons(said)}")
    for verdict in said:
        cause = bound(verdict.key, device)
        if isinstance(cause, DuplicateBackendError):
            raise cause
        if isinstance(cause, BaseException):
            raise error from cause
    raise error


# --- what is logged -------------------------------------------------------------------------------

_logged: set[str] = set()


def _report(explanation: Explanation, problem: Problem) -> None:
    """Log the pick once, and once for each cause that a better one was passed over."""
    what = f"grouped matmul on {problem.device} ({dtype_name(problem.dtype)})"
    chosen, source, said = explanation.chosen, explanation.source, explanation.verdicts
    if source != "table":
        _once(logging.INFO, f"{what}: {chosen}, from the {source} {explanation.place}", "")
        return
    _once(logging.INFO, f"{what}: {chosen}", "")
    better = {verdict.key for verdict in takewhile(lambda verdict: verdict.key != chosen, said)}
    passed_over = reasons(v for v in said if v.key in better or v.key == explanation.measured)
    if passed_over:
        _once(logging.WARNING, f"{what} falls back to {chosen}", passed_over)


def _once(level: int, headline: str, causes: str) -> None:
    # The numbers of a shape do not make another cause of it.
    cause = f"{headline}{re.sub(r'[0-9]+', '#', causes)}"
    if cause not in _logged:
        _logged.add(cause)
        _log.log(level, "%s", f"{headline}, since these refuse:\n{causes}" if causes else headline)


# --- what changes the answers ---------------------------------------------------------------------

state = object()  # another one after every change: part of the key under which an answer is kept
kept: dict[Hashable, Any] = {}  # what callers keep together with answers, by keys that have the state in them


def changed() -> None:
    """Forget every choice, and those that other threads are making."""
    global state
    state = object()
    _choose.cache_clear()
    kept.clear()


def refuse(key: BackendKey, problem: Problem, reason: str) -> None:
    """Remember what a kernel said when it was called: that it is not implemented for a device and dtype."""
    verdicts.refused_late[key, problem.device, problem.index, problem.dtype] = reason
    there = (key, problem.device, dtype_name(problem.dtype))
    pins.unmake(lambda signature, backend: (backend, signature.device, signature.dtype) == there)
    changed()


def forgive(keys: Iterable[BackendKey], problem: Problem) -> None:
    """Take back what `refuse` remembered."""
    for key in keys:
        verdicts.refused_late.pop((key, problem.device, problem.index, problem.dtype), None)
    changed()


def refresh() -> None:
    """Forget all that was found, loaded and chosen: a package was installed into this process.

    The cache is read again when it is needed next, and a file given to `use_choices` must be given again.
    """
    for module in (discovery, verdicts, cache, pins):
        module.forget()
    changed()
    _logged.clear()
