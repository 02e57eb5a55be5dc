"""Measure, and show and keep each result as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from gmm_registry import environment
from gmm_registry.cli.bench.cells import Skipped, measure
from gmm_registry.cli.bench.plan import Plan
from gmm_registry.cli.bench.results import Cell, Report
from gmm_registry.cli.bench.table import show_cell, show_header, show_skipped
from gmm_registry.contract import dtype_name
from gmm_registry.measure import ceilings


def run(console: Console, plan: Plan, json_file: Path | None) -> Report:
    """Carry out a plan. The file, if any, is written anew after every table."""
    bar = _bar()
    task = bar.add_task("what the device can do", total=len(plan.shapes) * len(plan.distributions))
    with bar:
        most = ceilings(plan.device, plan.dtype)
    report = Report(plan.device, dtype_name(plan.dtype), environment.describe(plan.device), most)
    show_header(console, report)
    cells = measure(plan, most, lambda text: bar.update(task, description=text, refresh=True))
    for found in _while_shown(bar, cells):
        if isinstance(found, Skipped):
            report.skipped[found.shape.name] = found.reason
            show_skipped(console, found.shape.name, found.reason)
        else:
            report.cells.append(found)
            show_cell(console, found, report.unit)
        bar.update(task, completed=len(report.cells))
        if json_file:
            report.save(json_file)
    return report


def _bar() -> Progress:
    """Return a progress bar that is on a terminal only, and not on stdout, where the tables go."""
    console = Console(stderr=True)
    return Progress(
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        auto_refresh=False,  # in a thread, which would take time from what is measured
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    )


def _while_shown(bar: Progress, cells: Iterator[Cell | Skipped]) -> Iterator[Cell | Skipped]:
    """Show the bar while a result is awaited, and not while it is printed."""
    while True:
        with bar:
            found = next(cells, None)
        if found is None:
            return
        yield found
