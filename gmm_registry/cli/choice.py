"""gmm-registry list and explain: what backends there are, and which one a call would run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Annotated

import torch
import typer

from gmm_registry import registry
from gmm_registry.contract import Problem
from gmm_registry.errors import GmmRegistryError
from gmm_registry.registry.discovery import parse_device


class Dtype(str, Enum):
    """The dtypes that a problem can have on the command line."""

    bf16 = "bfloat16"
    fp16 = "float16"
    fp32 = "float32"
    fp64 = "float64"


class Product(str, Enum):
    """The directions that a problem can have on the command line."""

    forward = "forward"
    grad_x = "grad_x"
    grad_w = "grad_w"


Rows = Annotated[int, typer.Option(min=0, help="Rows of x, over all groups.")]
Inner = Annotated[int, typer.Option("--k", min=0, help="Inner dimension.")]
Outer = Annotated[int, typer.Option("--n", min=0, help="Outer dimension.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Dtype of x and weight.")]


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print an error of ours as one message, without a traceback, and exit with 2."""
    try:
        yield
    except (GmmRegistryError, ValueError) as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error


def given(context: typer.Context, *others: str) -> str:
    """Name the options that the command line has, but for the parameters that are named ``others``."""
    sources = {
        parameter.opts[0]: context.get_parameter_source(parameter.name or "")
        for parameter in context.command.params
        if parameter.name not in others
    }
    return ", ".join(option for option, source in sources.items() if source and source.name == "COMMANDLINE")


def list_(
    device: Annotated[str | None, typer.Option(help="Only those that serve this device type.")] = None,
) -> None:
    """List the backends that installed packages offer, importing none of them."""
    with plain_errors():
        for key in registry.list_backends(device):
            typer.echo(key)


def explain(
    context: typer.Context,
    device: Annotated[str, typer.Argument(help="Such as cpu, cuda:1 or npu.")],
    groups: Annotated[
        int | None, typer.Option(min=1, help="Number of groups; asks about one problem.")
    ] = None,
    rows: Rows = 4096,
    k: Inner = 1024,
    n: Outer = 1024,
    dtype: DtypeOption = Dtype.bf16,
    direction: Annotated[
        Product, typer.Option(help="Rows by the weight, rows by its transpose, or rows by rows.")
    ] = Product.forward,
    skew: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rows of the longest group over the mean, up to a power of two; default: not known."
        ),
    ] = None,
) -> None:
    """Say of every backend whether it accepts, with all its reasons where it does not, and who chose.

    Without --groups the question is whether a backend runs on the device at all.
    """
    with plain_errors():
        problem = None
        if groups is None:
            if options := given(context, "device"):
                raise ValueError(f"one problem is asked about with --groups, and {options} without it")
        else:
            problem = problem_of(device, dtype, rows, groups, k, n)
            problem = replace(problem, direction=direction.value, skew=skew)
        typer.echo(registry.explain(device, problem))


def problem_of(device: str, dtype: Dtype, rows: int, groups: int, k: int, n: int) -> Problem:
    """Make a problem of what was given on the command line."""
    kind, index = parse_device(device)
    return Problem(kind, index, getattr(torch, dtype.value), rows, groups, k, n)
