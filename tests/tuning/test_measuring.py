"""What is measured, and which is the fastest. No test here depends on a time."""

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning_stubs import (
    DIRECTIONS,
    PROBLEM,
    EvenOnly,
    Faulty,
    ForwardOnly,
    Missing,
    Offer,
    Preferred,
    Refusing,
    Shapeless,
    Slow,
    Stub,
    Times,
    Unwritten,
    Wrong,
    chosen,
    impls,
    operands,
    ran,
)
from typer.testing import CliRunner

from gmm_registry import BackendKey, BackendUnavailableError, Problem, autotune, explain, gmm, measure
from gmm_registry.cli.app import app
from gmm_registry.registry import refresh, trial

# --- the direction ---------------------------------------------------------------------------------


def test_each_direction_is_ranked_for_itself_and_asked_about_once(offer: Offer) -> None:
    offer(one=ForwardOnly, other=Stub)
    ForwardOnly.asked.clear()
    assert impls() == ["one", "other", "other"]
    assert ForwardOnly.asked == ["forward"]
    x, weight, sizes = operands()
    ran.clear()
    gmm(x, weight.mT.contiguous(), sizes, trans_b=True)
    gmm(x, weight.mT.contiguous().mT, sizes)
    assert ran == ["other", "other"]


def test_a_backend_may_rank_itself_by_the_skew(offer: Offer) -> None:
    offer(even=EvenOnly, other=Stub)
    x, weight, _ = operands()
    ran.clear()
    for counts in ([16, 16, 16, 16], [61, 1, 1, 1], [16, 16, 16, 16]):
        gmm(x, weight, counts)
    assert ran == ["even", "other", "even"]


def test_a_problem_says_its_direction() -> None:
    x, weight, _ = operands()
    assert Problem.of(x, weight) == PROBLEM
    stored = weight.mT.contiguous()
    transposed = Problem("cpu", None, torch.float32, rows=64, groups=4, k=16, n=8, direction="grad_x")
    assert Problem.of(x, stored, trans_b=True) == Problem.of(x, stored.mT) == transposed
    assert Problem.of(x, stored.mT, trans_b=True).direction == "forward"
    assert str(transposed) == "float32, 64 rows, weight (4, 16, 8) on cpu, grad_x"
    assert str(PROBLEM) == "float32, 64 rows, weight (4, 8, 16) on cpu"


# --- what is measured ------------------------------------------------------------------------------


def test_the_fastest_of_each_direction_is_chosen(offer: Offer, times: Times, file: Path) -> None:
    offer(preferred=Preferred, a=Stub, b=Stub)
    assert impls() == ["preferred"] * 3
    times["a"] = {"forward": 1.0, "grad_w": 1.0}
    times["b"] = {"grad_x": 1.0, "grad_w": 2.0}
    tuning = autotune(replace(PROBLEM, direction="grad_w"))
    assert {direction: key.impl for direction, key in tuning.chosen.items()} == {
        "forward": "a",
        "grad_x": "b",
        "grad_w": "a",
    }
    assert tuning.saved == file
    assert impls() == ["a", "b", "a"]
    assert explain("cpu", PROBLEM).place == str(file)
    for direction, impl in zip(DIRECTIONS, "aba", strict=True):
        assert chosen(replace(PROBLEM, direction=direction)) == (f"cpu.{impl}", "cache")
    refresh()  # as another process
    assert impls() == ["a", "b", "a"]


def test_the_geometric_mean_over_the_distributions_decides(
    offer: Offer, times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(steady=Stub, uneven=Stub)
    turns = itertools.cycle([{"steady": 3.0, "uneven": 1.0}, {"steady": 3.0, "uneven": 8.0}])

    def interleaved(functions: list[Any], device: torch.device, *, seconds: float) -> list[float]:
        found = next(turns)
        return [found.get(f.func.__self__.impl, 9.0) for f in functions]

    monkeypatch.setattr(measure, "interleaved", interleaved)
    tuning = autotune(PROBLEM)
    assert set(tuning.chosen.values()) == {BackendKey("cpu", "uneven")}  # 8 < 9, though 4.5 > 3
    assert tuning.timings["forward"][0].ms == {"uniform": 1.0, "zipf": 8.0}
    assert tuning.timings["forward"][0].mean == pytest.approx(8**0.5)


@pytest.mark.parametrize(
    ("backend", "direction", "reason"),
    [
        (Wrong, "forward", "wrong: a row is off from any.eager's by "),
        (
            Unwritten,
            "grad_x",
            "wrong: a row is off from any.eager's by nan of the largest, allowed are 1e-04",
        ),
        (Shapeless, "forward", "wrong: returned (63, 16) torch.float32, not (64, 16) torch.float32"),
        (Faulty, "grad_w", "raised RuntimeError: out of luck"),
        (Missing, "forward", "raised NotImplementedError: no kernel for sm_89"),
        (Slow, "forward", "not measured: "),
    ],
)
def test_what_is_wrong_or_raises_or_is_hopeless_is_never_chosen(
    offer: Offer, times: Times, backend: type[Stub], direction: str, reason: str
) -> None:
    offer(bad=backend, good=Stub)
    times["bad"], times["good"] = dict.fromkeys(DIRECTIONS, 0.1), dict.fromkeys(DIRECTIONS, 1.0)
    tuning = autotune(PROBLEM)
    timings: Any = tuning.timings
    bad = next(timing for timing in timings[direction] if timing.key.impl == "bad")
    assert bad.excluded.startswith(reason)
    assert timings[direction][0].key.impl == "good"
    assert bad.excluded in str(tuning)
    if backend is Faulty:  # its forward is right
        assert tuning.chosen["forward"].impl == "bad"


def test_where_time_is_short_a_few_calls_must_do(
    offer: Offer, times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(stub=Stub)
    monkeypatch.setattr(measure, "interleaved", partial(pytest.fail, "it was called"))
    tuning = autotune(PROBLEM, seconds=0)
    for timing in tuning.timings["forward"]:
        assert timing.excluded or timing.ms == pytest.approx({"uniform": 0.1, "zipf": 0.1})


def test_where_every_backend_fails_that_is_the_error(
    offer: Offer, times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_once", partial(pytest.fail, "out of memory"))
    with pytest.raises(BackendUnavailableError, match=r"measured on forward:\n(.*\n)* *any\.eager: raised "):
        autotune(PROBLEM)


def test_what_refuses_is_reported(offer: Offer, times: Times) -> None:
    offer(refusing=Refusing)
    tuning = autotune(PROBLEM)
    assert "  cpu.refusing: refused\n    - closed today" in str(tuning)
    assert "cpu.refusing" not in {str(timing.key) for timing in tuning.timings["forward"]}


def test_nothing_to_measure() -> None:
    for change in ({"rows": 0}, {"groups": 0}, {"k": 0}, {"n": 0}):
        with pytest.raises(ValueError, match="there is nothing to measure in float32, "):
            autotune(replace(PROBLEM, **change))
    with pytest.raises(BackendUnavailableError, match=r"any\.eager cannot check float32, .* on cuda:99:"):
        autotune(replace(PROBLEM, device="cuda", index=99))


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_a_time_that_is_none(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.Trial, "__init__", partial(pytest.fail, "it measures"))
    with pytest.raises(ValueError, match=f"must be finite and not negative, not {seconds}"):
        autotune(PROBLEM, seconds=seconds)
    result = CliRunner().invoke(app, ["tune", "--device", "cpu", "--seconds", str(seconds)])
    assert result.exit_code == 2
    assert "seconds" in result.stderr  # the least is typer's to say


def test_a_real_measurement(file: Path) -> None:
    tuning = autotune(replace(PROBLEM, rows=48), seconds=0.2)
    assert json.loads(file.read_text())["choices"]
    for direction in DIRECTIONS:
        timings: Any = tuning.timings[direction]
        assert {str(timing.key) for timing in timings} >= {"any.eager"}
        assert all(ms > 0 for timing in timings for ms in timing.ms.values())
        assert chosen(replace(PROBLEM, rows=48, direction=direction)) == (str(timings[0].key), "cache")
    report = str(tuning).splitlines()
    assert report[0].startswith("float32, 48 rows, weight (4, 8, 16) on cpu (")
    assert report[1].split() == ["forward", "uniform", "zipf"]
    assert report[2].endswith("chosen")
    assert report[-1] == f"saved in {file}"
