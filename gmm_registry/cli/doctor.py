"""gmm-registry doctor: versions, devices, every plugin with its state, and what is wrong with any."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import torch
import typer

from gmm_registry import environment, registry
from gmm_registry.errors import GmmRegistryError
from gmm_registry.registry import cache, discovery
from gmm_registry.registry.request import ENVIRONMENT
from gmm_registry.registry.verdicts import describe


def doctor() -> None:
    """Show versions, devices, what is chosen there, and every plugin; exit with 1 if any is broken."""
    typer.echo("versions")
    for package, version in environment.versions().items():
        typer.echo(f"  {package} {version}")
    typer.echo(f"  interpreter {sys.executable}")

    typer.echo("devices")
    for device in _devices():
        typer.echo(f"  {device}: {environment.device_name(device)}")

    broken = False
    asked = os.environ.get(ENVIRONMENT)
    typer.echo(f"chosen ({ENVIRONMENT}{f'={asked}' if asked else ' is not set'})")
    for device in _devices():
        try:
            typer.echo(f"  {device}: {registry.get_backend(device).key}")
        except GmmRegistryError as error:
            broken = True
            typer.secho(f"  {device}: {error}", fg="red")

    typer.echo("cache of measured choices")
    typer.echo(f"  {cache.location() or 'off'}")

    typer.echo("plugins")
    for name, offers in discovery.offers().items():
        loaded = discovery.load(name)
        failed = isinstance(loaded, BaseException)
        broken |= failed
        typer.secho(f"  {name}: {'broken' if failed else 'loaded'}", fg="red" if failed else None)
        for offer in offers:
            typer.echo(f"    from {offer}")
        if isinstance(loaded, BaseException):
            typer.echo(f"    - {describe(loaded)}")

    stale = discovery.stale_metadata()
    if stale:
        typer.secho("leftovers without METADATA, which can hide a package of the same name", fg="yellow")
        for folder in stale:
            typer.echo(f"  {folder.name.partition('-')[0]}: remove {folder}")
    if broken:
        raise typer.Exit(1)


def _devices() -> Iterator[str]:
    yield "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator:
        yield from (f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count()))
