"""gmm-registry tune, and explain after it."""

from pathlib import Path

import pytest
from tuning_stubs import DIRECTIONS, PROBLEM, Offer, Preferred, Stub, Times, command, operands
from typer.testing import CliRunner

from gmm_registry import autotune, explain, save_choices
from gmm_registry.cli.app import app


def test_tune_and_explain(offer: Offer, times: Times, file: Path) -> None:
    offer(preferred=Preferred, quick=Stub)
    times["quick"] = dict.fromkeys(DIRECTIONS, 1.0)
    shape = ("--dtype", "float32", "--rows", "64", "--k", "8", "--n", "16", "--groups", "4")
    report = command("tune", "--device", "cpu", *shape, "--no-save")
    assert "cpu.quick" in report
    assert "holds for this process only" in report
    assert not file.exists()
    assert f"saved in {file}" in command("tune", "--device", "cpu", "--seconds", "1", *shape)
    report = command("explain", "cpu", *shape, "--direction", "grad_w")
    assert report.startswith(f"{PROBLEM}, grad_w (automatic choice, from the cache {file})\n")
    assert "  cpu.quick: chosen, priority 50" in report


def test_tune_on_a_device_that_is_not_there() -> None:
    result = CliRunner().invoke(app, ["tune", "--device", "cuda:99"])
    assert result.exit_code == 2
    assert "any.eager cannot check bfloat16, 4096 rows, weight (8, 1024, 1024) on cuda:99:" in result.stderr


def test_what_is_no_problem_is_named() -> None:
    x, *_ = operands()
    for ask in (lambda: autotune(x), lambda: explain("cpu", x)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"not Tensor: make one with Problem.of\(x, weight\)"):
            ask()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"run.json cannot be written: there is no folder .*absent"):
        save_choices(tmp_path / "absent" / "run.json")
