"""The commands, each in a module of its own."""

import typer

from gmm_registry.cli.bench.command import bench
from gmm_registry.cli.choice import explain, list_
from gmm_registry.cli.doctor import doctor
from gmm_registry.cli.parity import parity
from gmm_registry.cli.tune import tune

app = typer.Typer(
    help="Grouped matmul for Mixture-of-Experts training: what runs here, why, and whether it is right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("list")(list_)
app.command()(explain)
app.command()(tune)
app.command()(parity)
app.command()(bench)
app.command()(doctor)
