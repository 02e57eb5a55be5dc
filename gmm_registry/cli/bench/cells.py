"""Check and time every backend, one cell after another: a shape under a distribution of its rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from gmm_registry import BatchSizes, Problem, Rejected, explain
from gmm_registry.cli.bench.plan import Plan
from gmm_registry.cli.bench.products import Products, check, products
from gmm_registry.cli.bench.results import AUTOMATIC, DIRECTIONS, Cell, Entry
from gmm_registry.cli.bench.shapes import Shape
from gmm_registry.measure import Ceilings, group_sizes, interleaved
from gmm_registry.operands import Operands

# Operands, references, and a result that its check needs twice: each at most as large as the operands.
_COPIES = 4
Say = Callable[[str], None]  # takes what is done next


class Skipped(NamedTuple):
    """A shape that was not measured to its end, and why."""

    shape: Shape
    reason: str


def measure(plan: Plan, ceilings: Ceilings, say: Say) -> Iterator[Cell | Skipped]:
    """Yield each cell of a plan when it is done, and why a shape has none."""
    device = torch.device(plan.device)
    for shape in plan.shapes:
        need, have = (size / 2**30 for size in (_COPIES * shape.bytes(plan.dtype), _memory(device)))
        if need > have:
            yield Skipped(shape, f"needs about {need:.1f} GiB, and {device} has {have:.1f} GiB")
            continue
        try:
            yield from _cells(shape, plan, ceilings, say)
        except torch.OutOfMemoryError as error:
            yield Skipped(shape, str(error))
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()


def _cells(shape: Shape, plan: Plan, ceilings: Ceilings, say: Say) -> Iterator[Cell]:
    operands = Operands.draw(shape.rows, shape.groups, shape.k, shape.n, plan.dtype, plan.device)
    for distribution in plan.distributions:
        yield _cell(shape, distribution, operands, plan, ceilings, say)


@torch.no_grad()
def _cell(
    shape: Shape, distribution: str, operands: Operands, plan: Plan, ceilings: Ceilings, say: Say
) -> Cell:
    where = f"{shape.name}, {distribution}"
    rows = group_sizes(distribution, shape.rows, shape.groups)
    sizes = BatchSizes(rows)  # one for all calls: the check leaves every form of the counts there
    problem = Problem.of(operands.x, operands.weight, sizes)
    verdicts = [verdict for verdict in explain(plan.device, problem).verdicts if verdict.key in plan.keys]
    refusals = {str(v.key): list(v.reasons) for v in verdicts if isinstance(v, Rejected)}
    names = [name for verdict in verdicts if (name := str(verdict.key)) not in refusals]
    contenders = {name: products(operands, sizes, name) for name in names}
    if plan.automatic:
        contenders[AUTOMATIC] = products(operands, sizes, None)

    say(f"{where}: checking")
    checked = _checked(contenders, products(operands, sizes, "any.eager"))
    right = {name: calls for name, calls in contenders.items() if not checked[name][1]}
    times: dict[str, dict[str, float]] = {name: {} for name in contenders}
    limits: dict[str, float] = {}
    chosen: dict[str, str] = {}
    for direction in DIRECTIONS:
        say(f"{where}: timing {direction}")
        functions = [calls[direction] for calls in right.values()]
        found = interleaved(functions, plan.device, seconds=plan.seconds / len(DIRECTIONS))
        for name, milliseconds in zip(right, found, strict=True):
            times[name][direction] = milliseconds
        limits[direction] = 1e3 * ceilings.least_seconds(
            rows, shape.k, shape.n, plan.dtype, weight_grad=direction == "grad_w"
        )
        if plan.automatic:
            called = replace(problem, direction=direction)
            chosen[direction] = str(explain(plan.device, called).chosen)
    entries = [Entry(name, times[name], *checked[name]) for name in contenders]
    return Cell(shape, distribution, max(rows), rows.count(0), limits, chosen, refusals, entries)


def _checked(
    contenders: dict[str, Products], reference: Products
) -> dict[str, tuple[dict[str, float | None], str]]:
    """Return by backend what `check` says; the reference results are gone when the clock starts."""
    want = {direction: product() for direction, product in reference.items()}
    return {name: check(calls, want) for name, calls in contenders.items()}


def _memory(device: torch.device) -> float:
    """Return the free bytes of an accelerator, or all bytes of the machine; infinity where nothing tells."""
    module: Any = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        return float(module.mem_get_info(device)[0])
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float("inf")
