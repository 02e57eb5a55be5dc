"""gmm-registry tune: measure every backend on a problem, and choose the fastest from then on."""

from __future__ import annotations

from typing import Annotated

import typer

from gmm_registry import environment, registry
from gmm_registry.cli.choice import Dtype, DtypeOption, Inner, Outer, Rows, plain_errors, problem_of


def tune(
    device: Annotated[
        str | None, typer.Option(help="Where to measure; by default the accelerator that torch sees.")
    ] = None,
    dtype: DtypeOption = Dtype.bf16,
    rows: Rows = 4096,
    k: Inner = 1024,
    n: Outer = 1024,
    groups: Annotated[int, typer.Option(min=1, help="Number of groups.")] = 8,
    seconds: Annotated[
        float,
        typer.Option(
            min=0, help="How long to measure, about; a few calls of each backend are made in any case."
        ),
    ] = 10,
    save: Annotated[
        bool, typer.Option("--save/--no-save", help="Keep the choice for later processes.")
    ] = True,
) -> None:
    """Measure every backend on a problem, forward and backward, and choose the fastest from then on."""
    with plain_errors():
        problem = problem_of(device or environment.default_device(), dtype, rows, groups, k, n)
        typer.echo(registry.autotune(problem, seconds=seconds, save=save))
