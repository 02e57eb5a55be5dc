"""gmm-registry bench, as a user runs it. No test looks at how long anything took."""

import json
import re
import struct
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from io import StringIO

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from gmm_registry.cli.app import app
from gmm_registry.cli.bench import cells, plan, plot
from gmm_registry.cli.bench import run as running
from gmm_registry.cli.bench.results import DIRECTIONS, Report
from gmm_registry.cli.bench.table import show_cell
from gmm_registry.measure import DISTRIBUTIONS, Ceilings

TINY = ("--rows", 256, "--k", 128, "--n", 128, "--groups", 4)
UNIFORM = ("--distribution", "uniform")
ENTRY_POINT = {"cpu.fake": "fake_gmm:Fake"}
FAKE = """
from gmm_backends.eager import Eager

class Fake(Eager):
    calls = 0

    def priority(self, problem):
        return 50

    def forward(self, *args, **kwargs):
        Fake.calls += 1
        return super().forward(*args, **kwargs)

    def weight_grad(self, *args, **kwargs):
        grad = super().weight_grad(*args, **kwargs)
        {fault}
        return grad
"""


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(running, "ceilings", lambda *_: Ceilings(1e11, 1e9))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that share their cores wait for one another on products this small

    def run(*arguments):
        seconds = () if {"--from", "--seconds"} & set(arguments) else ("--seconds", 0)
        return CliRunner().invoke(app, ["bench", *map(str, (*seconds, *arguments))])

    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def fake(distribution):
    """Install a backend cpu.fake whose weight_grad has a fault; return the class."""

    def install(fault):
        distribution("fake-gmm", ENTRY_POINT, {"fake_gmm": FAKE.format(fault=fault)})
        from fake_gmm import Fake

        return Fake

    return install


def test_a_table_for_each_distribution_with_every_backend(run):
    result = run("--device", "cpu", *TINY)
    assert result.exit_code == 0, result.output
    assert "float32 on cpu" in result.stdout
    assert f"torch {version('torch')}" in " ".join(result.stdout.split())
    assert "100 GFLOP/s in a dense product, 1 GB/s in a copy" in result.stdout
    for distribution in DISTRIBUTIONS:
        assert f"custom, {distribution}: 256 rows in 4 groups, K 128, N 128" in result.stdout
    for row in ("any.eager ", "cpu.megablocks_sparse ", "automatic ", "roofline limit "):
        assert result.stdout.count(f"\n{row}") == len(DISTRIBUTIONS)
    assert re.search(r"\nautomatic: any\.\w+\n", result.stdout)
    assert result.stderr == ""  # no progress bar where nobody watches


def test_the_file_holds_what_its_module_says(run, tmp_path):
    file = tmp_path / "bench.json"
    assert run("--device", "cpu", *TINY, "--dtype", "bfloat16", "--json", file).exit_code == 0
    found = json.loads(file.read_text())
    assert set(found) == {"schema", "device", "dtype", "environment", "ceilings", "skipped", "cells"}
    assert (found["schema"], found["device"], found["dtype"]) == (1, "cpu", "bfloat16")
    assert found["ceilings"] == {"flops_per_second": 1e11, "bytes_per_second": 1e9}
    assert [cell["distribution"] for cell in found["cells"]] == list(DISTRIBUTIONS)
    for cell in found["cells"]:
        assert cell["shape"] == {"name": "custom", "rows": 256, "k": 128, "n": 128, "groups": 4}
        assert cell["largest"] >= 64
        assert cell["empty"] == (2 if cell["distribution"] == "half_empty" else 0)
        assert set(cell["chosen"]) == set(cell["limit_ms"]) == set(DIRECTIONS)
        assert "any.eager" not in cell["refusals"]
        assert {entry["backend"] for entry in cell["entries"]} >= {"any.eager", "automatic"}
        for entry in cell["entries"]:
            assert entry["fault"] == ""
            for direction, ms in entry["ms"].items():
                assert entry["error"][direction] < 1e-2
                assert entry["tflops"][direction] == pytest.approx(2 * 256 * 128 * 128 / ms / 1e9)
                assert entry["of_limit"][direction] == pytest.approx(cell["limit_ms"][direction] / ms)
            assert set(entry["ms"]) == set(DIRECTIONS)
        # Moving the operands takes longest: x, result, and the matrices that have rows, or every gradient.
        matrices = {"forward": 4 - cell["empty"], "grad_x": 4 - cell["empty"], "grad_w": 4}
        for direction, count in matrices.items():
            bytes_moved = (256 * (128 + 128) + count * 128**2) * 2
            assert cell["limit_ms"][direction] == pytest.approx(bytes_moved / 1e9 * 1e3)
    assert Report.load(file).cells[0].shape.groups == 4


def test_a_refusal_is_named_below_the_table(run):
    narrow = ("--rows", 64, "--k", 96, "--n", 128, "--groups", 2, *UNIFORM)
    result = run("--device", "cpu", *narrow)
    assert result.exit_code == 0
    assert "\ncpu.megablocks_sparse refused: inner or outer dimension 96" in result.stdout
    asked = run("--device", "cpu", *narrow, "--backend", "eager", "--backend", "megablocks_sparse")
    assert asked.exit_code == 1
    assert "\nany.eager " in asked.stdout
    assert "automatic" not in asked.stdout
    assert "torch_grouped_mm" not in asked.stdout


def test_a_wrong_backend_is_an_error_and_never_timed(run, fake, tmp_path):
    wrong = fake("grad *= 1.5")
    result = run("--device", "cpu", *TINY, *UNIFORM, "--json", tmp_path / "bench.json")
    assert result.exit_code == 1
    said = " ".join(result.stdout.split())
    assert (
        "cpu.fake not timed: grad_w is wrong: a row is off from any.eager's by 5.0e-01 of the largest" in said
    )
    (cell,) = Report.load(tmp_path / "bench.json").cells
    entries = {entry.backend: entry for entry in cell.entries}
    assert entries["cpu.fake"].ms == {}
    assert entries["cpu.fake"].error["grad_w"] == pytest.approx(0.5)
    assert entries["any.eager"].ms
    # Its priority is the highest here, so the automatic choice is it, and wrong as well.
    assert entries["automatic"].fault == entries["cpu.fake"].fault
    assert wrong.calls == 2 * 2  # forward and grad_x, once by name and once by choice


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("grad[0, 0, 0] = float('nan')", "grad_w is wrong: a row is off from any.eager's by nan of"),
        ("raise RuntimeError('out of luck')", "grad_w raised RuntimeError: out of luck"),
        ("raise NotImplementedError('not here')", "grad_w raised NotImplementedError: not here"),
    ],
)
def test_no_number_and_no_result_are_errors_too(run, fake, tmp_path, fault, message):
    fake(fault)
    result = run("--device", "cpu", *TINY, *UNIFORM, "--backend", "fake", "--json", tmp_path / "bench.json")
    assert result.exit_code == 1
    assert f"cpu.fake not timed: {message}" in result.stdout
    assert "NaN" not in (tmp_path / "bench.json").read_text()  # which is no JSON


def test_the_choice_is_named_by_direction_where_it_differs(run, tmp_path):
    run("--device", "cpu", *TINY, *UNIFORM, "--json", tmp_path / "bench.json")
    report = Report.load(tmp_path / "bench.json")
    chosen = {"forward": "any.eager", "grad_x": "any.eager", "grad_w": "cpu.acme"}
    console = Console(file=StringIO(), width=120)
    show_cell(console, replace(report.cells[0], chosen=chosen), report.unit)
    assert "automatic: any.eager (forward and grad_x), cpu.acme (grad_w)" in console.file.getvalue()


def size_of_png(file):
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


def test_the_figure_is_drawn_here_and_elsewhere(run, fake, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    fake("grad *= 1.5")
    file, here, there = (tmp_path / name for name in ("bench.json", "here.png", "there.png"))
    measured = run("--device", "cpu", *TINY, "--json", file, "--plot", here)
    assert measured.exit_code == 1  # for the wrong backend, and is drawn all the same
    width, height = size_of_png(here)
    assert 1200 <= width <= 2400
    assert 400 <= height <= 1200

    def measure(*_):
        raise AssertionError("--from measures")

    monkeypatch.setattr(running, "measure", measure)
    shown = run("--from", file, "--plot", there)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == measured.stdout
    assert size_of_png(there) == (width, height)


def test_nothing_measured_is_not_drawn(run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(cells, "_memory", lambda _: 2**20)
    file = tmp_path / "bench.json"
    result = run("--device", "cpu", "--shape", "small", "--json", file, "--plot", tmp_path / "x.png")
    assert result.exit_code == 2
    assert "nothing was measured" in result.stderr
    assert "small skipped: needs about 0.1 GiB, and cpu has 0.0 GiB" in result.stdout
    assert json.loads(file.read_text())["skipped"] == {"small": "needs about 0.1 GiB, and cpu has 0.0 GiB"}
    assert run("--device", "cpu", "--shape", "small").exit_code == 1


def test_a_shape_that_runs_out_of_memory_is_skipped_and_the_others_are_not(run, monkeypatch):
    draw = cells.Operands.draw

    def short(rows, *args):
        if rows == plan.SHAPES["small"].rows:
            raise torch.OutOfMemoryError("out of memory")
        return draw(rows, *args)

    monkeypatch.setattr(cells.Operands, "draw", short)
    result = run("--device", "cpu", "--shape", "small", *TINY, *UNIFORM)
    assert result.exit_code == 0
    assert "small skipped: out of memory" in result.stdout
    assert "custom, uniform" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "smal"), "no shape 'smal'; known: qwen35b"),
        (("--shape", "smal"), "did you mean 'small'?"),
        (("--distribution", "zip"), "no distribution 'zip'; known: uniform, zipf, half_empty"),
        (("--rows", 5, "--k", 8), "give all four"),
        (("--backend", "egaer"), "did you mean 'eager'?"),
        (("--device", "npu"), "knows no device 'npu'"),
        (("--device", "c pu"), "names no device"),
        (("--json", "/nowhere/at.json"), "/nowhere/at.json cannot be written"),
        (("--plot", "/"), "its name must end in one of .png"),
        (("--plot", "figure.gif"), "its name must end in one of .png, .pdf, .svg"),
        (("--from", "/nowhere/at.json"), "is no result of gmm-registry bench"),
        (("--from", "x.json", "--device", "cpu", "--rows", 3), "so --device, --rows cannot be with it"),
        (("--from", "x.json", "--seconds", 3), "so --seconds cannot be with it"),
        (("--seconds", "inf"), "must be finite and not negative, not inf"),
        (("--seconds", "nan"), "seconds"),
        (("--seconds", -1), "--seconds"),
        (("--groups", 0), "--groups"),
        (("--dtype", "int8"), "--dtype"),
    ],
)
def test_a_bad_question_is_answered_without_a_traceback(run, arguments, message):
    device = () if "--from" in arguments or "--device" in arguments else ("--device", "cpu")
    result = run(*device, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.fixture
def document():
    """What bench writes of one backend on one shape."""
    ms = dict.fromkeys(DIRECTIONS, 1.0)
    entry = {"backend": "any.eager", "ms": ms, "error": {**ms, "grad_w": None}, "fault": ""}
    cell = {
        "shape": {"name": "custom", "rows": 8, "k": 4, "n": 4, "groups": 2},
        "distribution": "uniform",
        "largest": 4,
        "empty": 0,
        "limit_ms": ms.copy(),
        "chosen": {},
        "refusals": {"cpu.acme": ["closed today"]},
        "entries": [entry],
    }
    return {
        "schema": 1,
        "device": "cpu",
        "dtype": "float32",
        "environment": {"python": "3.11"},
        "ceilings": {"flops_per_second": 1e9, "bytes_per_second": 1e9},
        "skipped": {"small": "no time"},
        "cells": [cell],
    }


CELL = ("cells", 0)
ENTRY = (*CELL, "entries", 0)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("device",), 3),
        (("environment",), []),
        (("environment", "python"), 3),
        (("ceilings",), "fast"),
        (("ceilings", "flops_per_second"), "fast"),
        (("ceilings", "bytes_per_second"), 0),
        (("skipped",), []),
        (("cells",), 3),
        ((*CELL, "shape", "rows"), 1.5),
        ((*CELL, "shape", "k"), 10**400),
        ((*CELL, "largest"), -1),
        ((*CELL, "limit_ms"), {"forward": 1.0}),
        ((*CELL, "limit_ms"), list(DIRECTIONS)),
        ((*CELL, "limit_ms", "forward"), 0),
        ((*CELL, "chosen"), {"forward": []}),
        ((*CELL, "refusals"), {"any.eager": "closed today"}),
        ((*CELL, "entries"), None),
        ((*ENTRY, "ms"), {"forward": 1.0, "grad_x": 1.0}),
        ((*ENTRY, "ms"), [1.0, 1.0, 1.0]),
        ((*ENTRY, "ms", "grad_w"), 0),
        ((*ENTRY, "ms", "grad_w"), float("nan")),
        ((*ENTRY, "ms", "grad_w"), float("inf")),
        ((*ENTRY, "ms", "grad_w"), 10**400),
        ((*ENTRY, "error", "grad_w"), "none"),
        ((*ENTRY, "fault"), None),
        ((*ENTRY, "backend"), "\ud800"),
    ],
)
def test_a_figure_that_bench_cannot_have_written_is_refused(run, tmp_path, document, place, value):
    *folders, name = place
    part = document
    for folder in folders:
        part = part[folder]
    part[name] = value
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(document))
    result = run("--from", file)
    assert result.exit_code == 2, result.output
    assert f"{file} is no result of gmm-registry bench --json: " in result.stderr
    assert result.stdout == ""


def test_names_of_a_file_are_no_markup(run, tmp_path, document):
    """And the file that the others are made of is one."""
    cell = document["cells"][0]
    cell["shape"]["name"] = cell["distribution"] = cell["entries"][0]["backend"] = "[/x]"
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(document))
    result = run("--from", file)
    assert result.exit_code == 0, result.output
    assert "\n[/x] " in result.stdout
    assert "[/x], [/x]: 8 rows" in result.stdout


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "cells": [{}]}', "[" * 100_000, "9" * 5000],
    ids=lambda content: content[:9],
)
def test_a_file_that_bench_did_not_write_is_refused(run, tmp_path, content):
    file = tmp_path / "bench.json"
    file.write_text(content)
    result = run("--from", file)
    assert result.exit_code == 2
    assert "is no result of gmm-registry bench --json" in result.stderr


def test_a_missing_matplotlib_is_named_before_anything_is_measured(run, monkeypatch):
    monkeypatch.setattr(plot, "find_spec", lambda _: None)
    result = run("--device", "cpu", "--plot", "figure.png")
    assert result.exit_code == 2
    assert "pip install 'gmm_registry[plot]'" in result.stderr


def test_matplotlib_is_imported_for_a_figure_only():
    script = "import sys, gmm_registry.cli.app; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_what_is_measured_if_nothing_is_asked_for(monkeypatch):
    nothing = ((), (None,) * 4, (), (), 1)
    small = plan.Plan.of("cpu", None, *nothing)
    assert ([shape.name for shape in small.shapes], small.dtype) == (["small"], torch.float32)
    assert small.distributions == list(DISTRIBUTIONS)
    assert small.automatic
    monkeypatch.setattr(plan, "get_backend", lambda *_: None)
    large = plan.Plan.of("npu", None, *nothing)
    assert large.dtype == torch.bfloat16
    assert [shape.name for shape in large.shapes] == [name for name in plan.SHAPES if name != "small"]
