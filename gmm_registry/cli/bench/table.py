"""The tables of `gmm-registry bench`."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gmm_registry.cli.bench.results import AUTOMATIC, DIRECTIONS, Cell, Entry, Report, Unit


def show(console: Console, report: Report) -> None:
    """Print all of a report."""
    show_header(console, report)
    for cell in report.cells:
        show_cell(console, cell, report.unit)
    for shape, reason in report.skipped.items():
        show_skipped(console, shape, reason)


def show_header(console: Console, report: Report) -> None:
    """Print what was measured where, and what the device did at most."""
    described = ", ".join(f"{name} {value}" for name, value in report.environment.items())
    _print(console, f"grouped matmul in {report.dtype} on {report.device}", "bold")
    _print(console, described)
    _print(console, f"the device at most: {report.measured}\n")


def show_cell(console: Console, cell: Cell, unit: Unit) -> None:
    """Print a table, and below it what the choice was, and who refused or was wrong and why."""
    console.print(_table(cell, unit))
    if cell.chosen:
        ran: dict[str, list[str]] = {}
        for direction, key in cell.chosen.items():
            ran.setdefault(key, []).append(direction)
        where = ", ".join(f"{key} ({' and '.join(directions)})" for key, directions in ran.items())
        _print(console, f"{AUTOMATIC}: {where if len(ran) > 1 else next(iter(ran))}")
    for backend, reasons in cell.refusals.items():
        for reason in reasons:
            _print(console, f"{backend} refused: {reason}", "yellow")
    for entry in cell.entries:
        if entry.fault:
            _print(console, f"{entry.backend} not timed: {entry.fault}", "red")
    console.print()


def show_skipped(console: Console, shape: str, reason: str) -> None:
    """Print why a shape has no table."""
    _print(console, f"{shape} skipped: {reason}\n", "yellow")


def _print(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False)


def _table(cell: Cell, unit: Unit) -> Table:
    groups = f"largest {cell.largest}, {cell.empty} empty"
    table = Table(
        title=escape(f"{cell.shape.name}, {cell.distribution}: {cell.shape}; {groups}"),
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("\nbackend", no_wrap=True)
    for direction in DIRECTIONS:
        for heading in (f"{direction}\n{unit.prefix}FLOP/s", "of the\nlimit", "of the\nbest"):
            table.add_column(heading, justify="right", no_wrap=True)
    timed = [entry.ms for entry in cell.entries if entry.ms]
    best: dict[str, float] = {d: min(ms[d] for ms in timed) for d in DIRECTIONS if timed}
    for entry in cell.entries:
        table.add_row(escape(entry.backend), *_figures(cell, entry, best, unit))
    limits = [text for ms in cell.limit_ms.values() for text in (unit.show(cell.rate(ms)), "", "")]
    table.add_row("roofline limit", *limits, style="dim")
    return table


def _figures(cell: Cell, entry: Entry, best: dict[str, float], unit: Unit) -> list[str]:
    if not entry.ms:
        return ["[red]error[/]", "", ""] * len(DIRECTIONS)
    found = []
    for direction, ms in entry.ms.items():
        share = f"{best[direction] / ms:.2f}"
        found += [
            unit.show(cell.rate(ms)),
            f"{cell.limit_ms[direction] / ms:.0%}",
            f"[bold]{share}[/]" if ms == best[direction] else share,
        ]
    return found
