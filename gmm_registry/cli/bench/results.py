"""What `gmm-registry bench` finds, and the file that holds it.

The file is one JSON object, written anew after every table:

- ``schema``: 1.
- ``device``: as asked for, such as "cuda".
- ``dtype``: such as "bfloat16".
- ``environment``: versions, platform and the device's name, each a string.
- ``ceilings``: ``flops_per_second`` and ``bytes_per_second``, as measured.
- ``skipped``: an object, from the name of a shape to the reason why it was not measured.
- ``cells``: a list with one object for each shape and distribution:

  - ``shape``: ``name``, ``rows``, ``k``, ``n``, ``groups``.
  - ``distribution``, and of the groups it gave ``largest`` (rows) and ``empty`` (how many have none).
  - ``limit_ms``: the roofline limit of each direction ("forward", "grad_x", "grad_w").
  - ``chosen``: the key that the automatic choice ran on in each direction; empty if it was not measured.
  - ``refusals``: an object, from a backend to a list of its reasons.
  - ``entries``: a list with one object for each backend that accepted:

    - ``backend``: its key, or "automatic".
    - ``ms``: the median of each direction; empty if there is a fault.
    - ``tflops``, ``of_limit``: what follows from ``ms``, for each direction. The limit is 1.
    - ``error``: in each direction, how far the row that is off most is off from any.eager's, over the length
      of the largest row; null if it is not finite.
    - ``fault``: what was wrong; empty if nothing was.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from gmm_registry.cli.bench.shapes import Shape
from gmm_registry.contract import Direction
from gmm_registry.measure import Ceilings

DIRECTIONS: tuple[Direction, ...] = ("forward", "grad_x", "grad_w")
AUTOMATIC = "automatic"
_SCHEMA = 1


class Unit(NamedTuple):
    """In which FLOP/s and B/s are shown: a prefix and what it stands for."""

    prefix: str
    scale: float

    def show(self, per_second: float) -> str:
        """Print three digits, or all before the point."""
        value = per_second / self.scale
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class Entry:
    """One backend on one cell."""

    backend: str
    ms: dict[str, float]
    error: dict[str, float | None]
    fault: str = ""


@dataclass(frozen=True)
class Cell:
    """One shape under one distribution; the limits in milliseconds."""

    shape: Shape
    distribution: str
    largest: int
    empty: int
    limit_ms: dict[str, float]
    chosen: dict[str, str]
    refusals: dict[str, list[str]]
    entries: list[Entry]

    def rate(self, ms: float) -> float:
        """Return the FLOP/s of a product that takes so many milliseconds."""
        return self.shape.flops / ms * 1e3

    def as_json(self) -> dict[str, Any]:
        """Return the cell with what follows from its times."""
        found = asdict(self)
        for entry in found["entries"]:
            entry["tflops"] = {name: self.rate(ms) / 1e12 for name, ms in entry["ms"].items()}
            entry["of_limit"] = {name: self.limit_ms[name] / ms for name, ms in entry["ms"].items()}
        return found

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Cell:
        """Read what `as_json` returned."""
        entries = [
            Entry(**{name: entry[name] for name in Entry.__dataclass_fields__}) for entry in found["entries"]
        ]
        for times in (found["limit_ms"], *(entry.ms for entry in entries if entry.ms)):
            if tuple(times) != DIRECTIONS:
                raise ValueError(f"{times!r} has not the directions {', '.join(DIRECTIONS)}")
        return cls(**{**found, "shape": Shape(**found["shape"]), "entries": entries})


@dataclass
class Report:
    """A whole run; cells and skipped shapes are added as they come."""

    device: str
    dtype: str
    environment: dict[str, str]
    ceilings: Ceilings
    cells: list[Cell] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def unit(self) -> Unit:
        """The one for this device."""
        return Unit("T", 1e12) if self.ceilings.flops_per_second >= 1e12 else Unit("G", 1e9)

    @property
    def measured(self) -> str:
        """What the device did at most, as text."""
        unit, most = self.unit, self.ceilings
        rate, traffic = unit.show(most.flops_per_second), unit.show(most.bytes_per_second)
        return f"{rate} {unit.prefix}FLOP/s in a dense product, {traffic} {unit.prefix}B/s in a copy"

    def save(self, file: Path) -> None:
        """Write the file that the module describes."""
        cells = [cell.as_json() for cell in self.cells]
        report = {"schema": _SCHEMA, **vars(self), "ceilings": asdict(self.ceilings), "cells": cells}
        file.write_text(json.dumps(report, indent=1))

    @classmethod
    def load(cls, file: Path) -> Report:
        """Read it again.

        Raises:
            ValueError: it cannot be read, or is something else.
        """
        try:
            found = json.loads(file.read_text())
            json.dumps(found, ensure_ascii=False).encode()  # else it cannot be printed
            if found.pop("schema") != _SCHEMA:
                raise ValueError(f"its schema is not {_SCHEMA}")
            cells = [Cell.from_json(cell) for cell in found["cells"]]
            report = cls(**{**found, "ceilings": Ceilings(**found["ceilings"]), "cells": cells})
            _check(report, cls, "report")
            return report
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{file} is no result of gmm-registry bench --json: {type(error).__name__}: {error}"
            ) from error


def _check(value: Any, kind: Any, what: str) -> None:
    """Raise ValueError if a value of a file, or any part of it, is not of a type, or is no measurement."""
    if is_dataclass(kind):
        for name, of in get_type_hints(kind).items():
            _check(getattr(value, name), of, name)
    elif not _fits(value, kind):
        raise ValueError(f"its {what} cannot be {value!r}")
    elif get_origin(kind) in (dict, list):
        for part in value.values() if isinstance(value, dict) else value:
            _check(part, get_args(kind)[-1], what)


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, float | int) and 0 < value <= sys.float_info.max
    if kind is int:
        return isinstance(value, int) and 0 <= value <= sys.maxsize
    return isinstance(value, get_origin(kind) if get_origin(kind) in (dict, list) else kind)
