"""gmm-registry parity --layers: a whole dMoE layer on each backend, and a training run."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from gmm_registry import environment
from gmm_registry.contract import BackendKey
from gmm_registry.testing.layers import LayerResult, layer_parity
from gmm_registry.testing.tolerances import Difference


def show_layers(
    console: Console, device: str, keys: list[BackendKey], json_file: Path | None, *, strict: bool
) -> bool:
    """Run and print; return whether all passed, with refusals as failures if ``strict``."""
    found = list(
        track(layer_parity(device, keys), "backends", len(keys), console=Console(stderr=True), transient=True)
    )
    ran = [result for result in found if not result.reasons]
    described = environment.describe(device)
    if ran:
        console.print(_comparison(device, ran), "")
    if ran and ran[0].losses:
        console.print(_training(ran), "")
    console.print(", ".join(f"{name} {value}" for name, value in described.items()), highlight=False)
    for result in found:
        for text in (*(f"refused: {reason}" for reason in result.reasons), *result.faults):
            console.print(f"{result.backend}: {text}", markup=False, highlight=False)
    if json_file:
        results = [result.as_json() for result in found]
        report = {"device": device, "environment": described, "results": results}
        json_file.write_text(json.dumps(report, indent=1))
    faulty = sum(bool(result.faults) for result in ran)
    refused = len(found) - len(ran)
    console.print(f"{len(ran) - faulty} passed, {faulty} failed, {refused} refused", highlight=False)
    return bool(ran) and not faulty and not (strict and refused)


def _comparison(device: str, results: list[LayerResult]) -> Table:
    """A row a quantity and a column a backend, as in the test report that this command fills in."""
    table = _table(f"dMoE GLU layer on {device}, largest difference from a dense fp64 reference", results)
    table.add_row("dtype", *(result.dtype for result in results))
    table.add_row("output", *(_absolute(result.output) for result in results))
    table.add_row("grad_x", *(_absolute(result.grad_x) for result in results))
    for expert in range(len(results[0].grad_weights["w2"])):
        table.add_row(f"grad_w of expert {expert}", *(_of_expert(result, expert) for result in results))
    for name in results[0].times_ms:
        table.add_row(f"{name}, ms", *(f"{result.times_ms[name]:.3f}" for result in results))
    for name in results[0].saved_bytes:
        label = f"kept for the backward, {name}, KiB"
        table.add_row(label, *(f"{result.saved_bytes[name] / 1024:.0f}" for result in results))
    return table


def _training(results: list[LayerResult]) -> Table:
    table = _table(f"byte-level language model, {len(results[0].losses)} steps, loss in nats a byte", results)
    table.add_row("first loss", *(f"{result.losses[0]:.4f}" for result in results))
    table.add_row("last loss", *(f"{result.losses[-1]:.4f}" for result in results))
    table.add_row("strays from eager's by", *(f"{r.loss_difference:.1e}" for r in results))
    return table


def _table(title: str, results: list[LayerResult]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for result in results:
        table.add_column(result.backend.partition(".")[2], justify="right")
    return table


def _absolute(difference: Difference | None) -> str:
    return "" if difference is None else f"{difference.absolute:.1e}"


def _of_expert(result: LayerResult, expert: int) -> str:
    return f"{max(each[expert].absolute for each in result.grad_weights.values()):.1e}"
