"""The figure of `gmm-registry bench`: a row a shape, a panel a direction, bars by backend below the limit.

Lengths are in inches.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from gmm_registry.cli.bench.results import AUTOMATIC, DIRECTIONS, Cell, Report, Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_FORMATS = (".png", ".pdf", ".svg")
# Okabe and Ito's colours, which people tell apart whatever colours they see.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_INK, _FAINT, _GRID, _WRONG = "#222222", "#666666", "#e6e6e6", "#C00000"
_WIDTH, _ROW, _HEAD, _FOOT, _MARGIN = 11, 2.6, 0.8, 0.65, 0.15
_LIMIT = "roofline limit"
_IN_LINE = 5  # entries of the legend
_TAKEN = 0.84  # of the room of a distribution, by its bars


def check_image(file: Path) -> None:
    """Raise ValueError if this cannot be drawn here, before anything is measured."""
    if file.suffix not in _FORMATS:
        raise ValueError(f"{file} cannot be drawn: its name must end in one of {', '.join(_FORMATS)}")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'gmm_registry[plot]'")


def draw(report: Report, file: Path) -> None:
    """Draw a report into a file.

    Raises:
        ValueError: there is nothing to draw.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if not report.cells:
        raise ValueError(f"{file} was not drawn: nothing was measured")
    shapes = list(dict.fromkeys(cell.shape for cell in report.cells))
    backends = list(dict.fromkeys(entry.backend for cell in report.cells for entry in cell.entries))
    height = _HEAD + _ROW * len(shapes) + _FOOT
    side = _MARGIN / _WIDTH
    panels = (side, _FOOT / height, 1 - 2 * side, _ROW * len(shapes) / height)
    figure = Figure(figsize=(_WIDTH, height), dpi=160, layout=ConstrainedLayoutEngine(rect=panels))
    rows = figure.subfigures(len(shapes), 1, squeeze=False)[:, 0]
    for row, shape in zip(rows, shapes, strict=True):
        _draw_shape(row, [cell for cell in report.cells if cell.shape == shape], backends, report)
    _write_head(figure, report, height)
    _write_legend(figure, rows, backends)
    figure.savefig(file)


def _write_head(figure: Figure, report: Report, height: float) -> None:
    versions = (
        f"{name} {version}"
        for name, version in report.environment.items()
        if name in ("gmm_registry", "torch")
    )
    title = f"Grouped matmul in {report.dtype} on {report.environment.get('device', report.device)}"
    x = _MARGIN / _WIDTH
    figure.text(x, 1 - _MARGIN / height, title, va="top", fontsize=14, fontweight="bold", color=_INK)
    figure.text(
        x,
        1 - 3 * _MARGIN / height,
        ", ".join((f"roofline limit by {report.measured}", *versions)),
        va="top",
        fontsize=8,
        color=_FAINT,
    )


def _write_legend(figure: Figure, rows: Iterable[SubFigure], backends: list[str]) -> None:
    drawn = {
        label: handle
        for row in rows
        for axes in row.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    labels = [label for label in (_LIMIT, *backends) if label in drawn]
    figure.legend(
        [drawn[label] for label in labels],
        labels,
        loc="lower center",
        ncols=ceil(len(labels) / ceil(len(labels) / _IN_LINE)),
        frameon=False,
        fontsize=8.5,
        handlelength=1.4,
        columnspacing=1.4,
        labelcolor=_INK,
    )


def _draw_shape(row: SubFigure, cells: list[Cell], backends: list[str], report: Report) -> None:
    shape = cells[0].shape
    row.suptitle(f"{shape.name}: {shape}", x=0, ha="left", fontsize=10, fontweight="bold", color=_INK)
    panels = row.subplots(1, len(DIRECTIONS), sharey=True, squeeze=False)[0]
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        _draw_direction(axes, direction, cells, backends, report.unit)
    panels[0].set_ylabel(f"{report.unit.prefix}FLOP/s", fontsize=9, color=_INK)


def _draw_direction(axes: Axes, direction: str, cells: list[Cell], backends: list[str], unit: Unit) -> None:
    width = _TAKEN / len(backends)
    for place, cell in enumerate(cells):
        limit = cell.rate(cell.limit_ms[direction]) / unit.scale
        ends = (place - _TAKEN / 2, place + _TAKEN / 2)
        axes.hlines(limit, *ends, colors=_INK, linewidth=1.6, label=_LIMIT)
        for entry in cell.entries:
            slot = backends.index(entry.backend)
            x = place + (slot + 0.5) * width - _TAKEN / 2
            if not entry.ms:
                _write(axes, x, 0, "error", _WRONG)
                continue
            rate = cell.rate(entry.ms[direction])
            colour = _COLOURS[slot % len(_COLOURS)]
            chosen = entry.backend == AUTOMATIC
            axes.bar(
                x,
                rate / unit.scale,
                0.92 * width,
                linewidth=0.6,
                label=entry.backend,
                color="white" if chosen else colour,
                edgecolor=_INK if chosen else colour,
                hatch="/////" if chosen else None,
            )
            _write(axes, x, rate / unit.scale, unit.show(rate), _INK)
    axes.set_title(direction, fontsize=9, color=_INK)
    axes.set_xticks(range(len(cells)), [cell.distribution.replace("_", " ") for cell in cells])
    axes.tick_params(colors=_INK, labelsize=8.5, length=0)
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _write(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    """Write upwards, from above a bar; a line behind the text is cut."""
    from matplotlib.patheffects import withStroke

    axes.text(
        x,
        y,
        f" {text}",
        rotation=90,
        ha="center",
        va="bottom",
        fontsize=6,
        color=colour,
        path_effects=[withStroke(linewidth=2, foreground="white")],
    )
