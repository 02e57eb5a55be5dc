"""gmm-registry list and explain: what backends there are, and which one a call would run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print an error of ours as one message, without a traceback, and exit with 2."""
    try:
        yield
    except (GmmRegistryError, ValueError) as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error


def list_(
    device: Annotated[str | None, typer.Option(help="Only those that serve this device type.")] = None,
) -> None:
    """List the backends that installed packages offer, importing none of them."""
    with plain_errors():
        for key in registry.list_backends(device):
            typer.echo(key)


def explain(
    device: Annotated[str, typer.Argument(help="Such as cpu, cuda:1 or npu.")],
    groups: Annotated[
        int | None, typer.Option(min=1, help="Number of groups; asks about one problem.")
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows of x, over all groups.")] = 4096,
    k: Annotated[int, typer.Option(min=0, help="Inner dimension.")] = 1024,
    n: Annotated[int, typer.Option(min=0, help="Outer dimension.")] = 1024,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of x and weight.")] = Dtype.bf16,
) -> None:
    """Say of every backend whether it accepts, with all its reasons where it does not.

    Without --groups the question is whether a backend runs on the device at all.
    """
    with plain_errors():
        problem = None
        if groups is not None:
            kind, index = parse_device(device)
            problem = Problem(kind, index, getattr(torch, dtype.value), rows, groups, k, n)
        typer.echo(registry.explain(device, problem))
