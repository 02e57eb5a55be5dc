"""A registry that forgets, backends by name, clocks and a cache, for each test here."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning_stubs import DIRECTIONS, PROBLEM, Clock, Offer, Preferred, Stub, Times, ran

from gmm_registry import GroupedMatmulBackend, Tuning, autotune, measure
from gmm_registry.registry import trial
from gmm_registry.registry.cache import ENVIRONMENT


@pytest.fixture(autouse=True)
def _forgetful(fresh_registry: None) -> None:
    """Start each test here with nothing loaded or chosen."""


@pytest.fixture
def offer(distribution: Callable[..., object]) -> Iterator[Offer]:
    """Return a function that installs classes as backends of the CPU, by name."""

    def offer(version: str = "1.0", **plugins: type[GroupedMatmulBackend]) -> None:
        points = {f"cpu.{impl}": f"{cls.__module__}:{cls.__name__}" for impl, cls in plugins.items()}
        distribution("stubs", points, version=version)

    ran.clear()
    yield offer
    ran.clear()


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Replace the clocks; return the milliseconds of each implementation, by direction: 9 unless set."""
    found: Times = {}

    def interleaved(functions: list[Any], device: torch.device, *, seconds: float) -> list[float]:
        assert device == torch.device("cpu")
        assert seconds > 0
        return [found.get(f.func.__self__.impl, {}).get(direction(f), 9.0) for f in functions]

    def direction(function: Any) -> str:
        if function.func.__name__ == "weight_grad":
            return "grad_w"
        return "grad_x" if function.keywords["trans_b"] else "forward"

    monkeypatch.setattr(measure, "interleaved", interleaved)
    monkeypatch.setattr(trial, "perf_counter", Clock())
    return found


@pytest.fixture
def file(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Name a cache that is not there yet, in a folder that is not there yet."""
    path = tmp_path_factory.mktemp("home") / "cache" / "choices.json"
    monkeypatch.setenv(ENVIRONMENT, str(path))
    return path


@pytest.fixture
def tuned(offer: Offer, times: Times, file: Path) -> Tuning:
    """Tune where the table prefers one backend and the clock another."""
    offer(preferred=Preferred, quick=Stub)
    times["quick"] = dict.fromkeys(DIRECTIONS, 1.0)
    return autotune(PROBLEM)
