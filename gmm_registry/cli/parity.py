"""gmm-registry parity: compare backends with the reference, or with another machine's results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gmm_registry import environment
from gmm_registry.cli.choice import plain_errors
from gmm_registry.cli.console import console_of
from gmm_registry.cli.files import check_writable
from gmm_registry.cli.layers import show_layers
from gmm_registry.registry import get_backend
from gmm_registry.testing.cases import CASES
from gmm_registry.testing.golden import check_inputs, compare_golden, load, save
from gmm_registry.testing.parity import Outputs, Result, candidates
from gmm_registry.testing.parity import parity as run_parity

_NARROWEST = 88  # columns that the tables need


def parity(
    device: Annotated[
        str | None, typer.Option(help="Device to test; by default the accelerator that torch sees.")
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="Only this one; may be repeated. Its refusals then fail.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the whole result to this file.")
    ] = None,
    save_file: Annotated[
        Path | None, typer.Option("--save", help="Keep every output for another machine to compare with.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Compare also with what --save wrote on another machine.")
    ] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Compare, time and train a whole dMoE layer instead.")
    ] = False,
) -> None:
    """Compare every backend with an fp64 reference, forward and backward, on every case.

    Exits with 1 if anything fails, 2 if the question cannot be answered.
    """
    console = console_of(_NARROWEST)
    with plain_errors():
        check_writable(json=json_file, save=save_file)
    if layers:
        with plain_errors():
            if save_file or against:
                raise ValueError("--save and --against are for cases, not for --layers")
            device = device or environment.default_device()
            keys = candidates(device, backend or ())
            passed = show_layers(console, device, keys, json_file, strict=bool(backend))
        raise typer.Exit(0 if passed else 1)
    with plain_errors():
        device = device or environment.default_device()
        if not backend:
            get_backend(device)  # one answer rather than a refusal of every case
        keys = candidates(device, backend or ())
        golden = load(against) if against else None
        if golden:
            check_inputs(golden, CASES)
        results: list[Result] = []
        outputs: dict[tuple[str, str], Outputs] = {}
        runs = run_parity(device, keys, CASES)
        for result, output in track(
            runs, "cases", total=len(keys) * len(CASES), console=Console(stderr=True), transient=True
        ):
            results.append(result)
            if output:
                outputs[result.backend, result.case] = output
        if golden:
            results += compare_golden(golden, CASES, outputs)
        if save_file:
            save(save_file, device, CASES, outputs)
    described = environment.describe(device)
    for table in _tables(device, results):
        console.print(table, "")
    console.print(", ".join(f"{name} {value}" for name, value in described.items()), highlight=False)
    if json_file:
        report: dict[str, Any] = {"device": device, "environment": described}
        report["results"] = [result.as_json() for result in results]
        json_file.write_text(json.dumps(report, indent=1))
    _summarise(console, results, strict=bool(backend))


def _tables(device: str, results: list[Result]) -> Iterator[Table]:
    """One table for each backend and what it is compared with; differences are absolute/relative."""
    for (backend, against), group in groupby(
        sorted(results, key=lambda r: (r.against != Result.against, r.backend, r.against)),
        key=lambda r: (r.backend, r.against),
    ):
        table = Table(
            title=f"{backend} on {device} against {against}", title_justify="left", box=None, pad_edge=False
        )
        table.add_column("case")
        for column in ("forward", "grad_x", "grad_w", "ms"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("result")
        for result in group:
            colour = {"passed": "green", "refused": "yellow"}.get(result.status, "red")
            table.add_row(
                result.case,
                *(_difference(result, name) for name in Outputs._fields),
                "" if result.median_ms is None else f"{result.median_ms:.3f}",
                f"[{colour}]{result.status}[/]",
            )
        yield table


def _difference(result: Result, name: str) -> str:
    found = result.differences.get(name)
    if found is None:
        return ""
    text = f"{found.absolute:.0e}/{found.relative:.0e}"
    return text if found.passed else f"[red]{text}[/]"


def _summarise(console: Console, results: list[Result], *, strict: bool) -> None:
    """Print every reason once and the counts; exit with 1 on a failure, and on a refusal if ``strict``."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        for reason in result.reasons:
            reasons.setdefault((result.backend, result.status, reason), []).append(result.case)
    for (backend, status, reason), cases in reasons.items():
        where = f"{len(cases)} cases" if len(cases) > 1 else repr(cases[0])
        console.print(f"{backend} {status} {where}: {reason}", markup=False, highlight=False)
    for result in results:
        if result.status == "failed":
            wrong = ", ".join(name for name, found in result.differences.items() if not found.passed)
            console.print(
                f"{result.backend} failed {result.case!r} against {result.against}: {wrong}",
                markup=False,
                highlight=False,
            )
    counts = {
        status: sum(r.status == status for r in results)
        for status in ("passed", "failed", "raised", "refused")
    }
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()), highlight=False)
    if strict and counts["refused"]:
        console.print("a backend that is asked for with --backend must not refuse")
    if counts["failed"] or counts["raised"] or (strict and counts["refused"]) or not counts["passed"]:
        raise typer.Exit(1)
