"""gmm-registry bench: how fast every backend is, and how far from the limit of the device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gmm_registry.cli.bench.plan import Plan
from gmm_registry.cli.bench.plot import check_image, draw
from gmm_registry.cli.bench.results import Report
from gmm_registry.cli.bench.run import run
from gmm_registry.cli.bench.shapes import SHAPES
from gmm_registry.cli.bench.table import show
from gmm_registry.cli.choice import Dtype, given, plain_errors
from gmm_registry.cli.console import console_of
from gmm_registry.cli.files import check_writable
from gmm_registry.measure import DISTRIBUTIONS

_NARROWEST = 104  # columns that the tables need


def bench(
    context: typer.Context,
    device: Annotated[
        str | None, typer.Option(help="Device to measure; by default the accelerator that torch sees.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"One of {', '.join(SHAPES)}; may be repeated. By default small on a CPU, else all others.",
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of x, for a shape of your own.")] = None,
    k: Annotated[int | None, typer.Option(min=1, help="Its inner dimension.")] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Its outer dimension.")] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="Its number of groups.")] = None,
    distribution: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"How rows fall into groups: {', '.join(DISTRIBUTIONS)}; may be repeated. By default all.",
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of every operand; by default float32 on a CPU, else bfloat16.")
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="Only this one; may be repeated. Its refusals then fail.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long to time, for each table.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure to this file.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the figures into this .png, .pdf or .svg file.")
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option("--from", help="Measure nothing: show what --json wrote, here or elsewhere."),
    ] = None,
) -> None:
    """Compare how fast every backend is, forward and backward, and what the device's limit is.

    The device's dense rate and its bandwidth are measured first. A backend is timed only if it is right.

    Exits with 1 if one was wrong or nothing was measured, 2 if the question cannot be answered.
    """
    console = console_of(_NARROWEST)
    with plain_errors():
        if plot_file:
            check_image(plot_file)
        check_writable(json=json_file, plot=plot_file)
        if from_file:
            if options := given(context, "from_file", "plot_file"):
                raise ValueError(f"--from measures nothing, so {options} cannot be with it")
            report = Report.load(from_file)
        else:
            plan = Plan.of(
                device,
                dtype.value if dtype else None,
                shape or (),
                (rows, k, n, groups),
                distribution or (),
                backend or (),
                seconds,
            )
    if from_file:
        show(console, report)
    else:
        report = run(console, plan, json_file)
    if plot_file:
        with plain_errors():
            draw(report, plot_file)
    if not from_file and not _passed(report, strict=bool(backend)):
        raise typer.Exit(1)


def _passed(report: Report, *, strict: bool) -> bool:
    """Say whether something was measured and nothing wrong; a refusal is wrong if ``strict``."""
    entries = [entry for cell in report.cells for entry in cell.entries]
    refused = strict and any(cell.refusals for cell in report.cells)
    return bool(entries) and not refused and not any(entry.fault for entry in entries)
