"""The command line, as a user runs it."""

import json
import re
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from gmm_registry.cli.app import app
from gmm_registry.testing import CASES

FEW = tuple(case for case in CASES if case.name in ("bfloat16", "float32, trans_b", "last group empty"))


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr("gmm_registry.cli.parity.CASES", FEW)

    def run(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


def test_list_prints_keys(run):
    keys = ["any.eager", "any.torch_grouped_mm", "cpu.megablocks_sparse"]
    assert run("list", "--device", "cpu").stdout.split() == keys


def test_explain_prints_every_candidate_with_its_reasons(run):
    report = run("explain", "npu").stdout
    assert report.count("knows no device 'npu'") == report.count(": refused") >= 2
    report = run("explain", "cpu", "--groups", "8", "--dtype", "float64").stdout
    assert "any.eager: chosen" in report
    assert "not torch.float64" in report


def test_doctor_shows_versions_devices_and_plugins(run):
    result = run("doctor")
    assert result.exit_code == 0
    for text in (f"torch {torch.__version__}", "cpu: ", "any.eager: loaded", "gmm_backends.eager:Eager"):
        assert text in result.stdout


def test_doctor_names_the_cause_of_a_broken_plugin(run, distribution):
    distribution("z", {"cpu.broken": "no_such_module:Backend"})
    result = run("doctor")
    assert result.exit_code == 1
    assert "cpu.broken: broken" in result.stdout
    assert "ModuleNotFoundError: No module named 'no_such_module'" in result.stdout


def test_parity_passes_on_the_cpu(run, tmp_path):
    result = run("parity", "--device", "cpu", "--json", tmp_path / "result.json")
    assert result.exit_code == 0, result.output
    assert "6 passed, 0 failed, 0 raised, 3 refused" in result.stdout
    assert "inner or outer dimension 80 is no multiple of the block, 128" in " ".join(result.stdout.split())
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["environment"]["torch"] == torch.__version__
    results = [row for row in report["results"] if row["backend"] != "cpu.megablocks_sparse"]
    assert {row["backend"] for row in results} == {"any.eager", "any.torch_grouped_mm"}
    for row in results:
        assert row["status"] == "passed"
        assert row["median_ms"] > 0
        assert set(row["differences"]) == {"out", "grad_x", "grad_weight"}


def test_a_narrow_terminal_still_shows_case_and_result(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    result = run("parity", "--device", "cpu", "--backend", "eager")
    assert re.search(r"float32, trans_b .* passed", result.stdout)


def test_parity_of_one_backend(run):
    result = run("parity", "--device", "cpu", "--backend", "eager")
    assert "3 passed" in result.stdout
    assert "torch_grouped_mm" not in result.stdout


def test_a_refusal_fails_only_where_it_was_asked_for(run, third_party, monkeypatch):
    import acme_gmm

    monkeypatch.setattr(acme_gmm.Acme, "rejections", lambda self, problem: ["closed today"])
    everything = run("parity", "--device", "cpu")
    assert everything.exit_code == 0
    assert "6 passed, 0 failed, 0 raised, 6 refused" in everything.stdout
    assert "closed today" in everything.stdout
    assert run("parity", "--device", "cpu", "--backend", "acme").exit_code == 1


def test_a_wrong_backend_fails(run, third_party, monkeypatch):
    import acme_gmm

    right = acme_gmm.Acme.weight_grad
    monkeypatch.setattr(acme_gmm.Acme, "weight_grad", lambda *args, **kwargs: right(*args, **kwargs) * 1.5)
    result = run("parity", "--device", "cpu", "--backend", "acme")
    assert result.exit_code == 1
    assert "cpu.acme failed 'bfloat16' against fp64 reference: grad_weight" in result.stdout


def test_a_raising_backend_fails_and_the_run_goes_on(run, third_party, monkeypatch):
    import acme_gmm

    def broken(*args, **kwargs):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(acme_gmm.Acme, "forward", broken)
    result = run("parity", "--device", "cpu")
    assert result.exit_code == 1
    assert "6 passed, 0 failed, 3 raised, 3 refused" in result.stdout
    assert "RuntimeError: out of luck" in result.stdout


def test_an_absent_device_is_refused_with_reasons(run):
    result = run("parity", "--device", "npu")
    assert result.exit_code == 2
    assert "no backend can run on npu" in result.stderr
    assert "knows no device 'npu'" in result.stderr


def test_doctor_says_what_is_chosen_and_what_was_asked_for(run, monkeypatch):
    assert "  cpu: any." in run("doctor").stdout
    monkeypatch.setenv("GMM_REGISTRY_BACKEND", "eagr")
    result = run("doctor")
    assert result.exit_code == 1
    assert "GMM_REGISTRY_BACKEND=eagr: no backend 'eagr' for cpu" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("parity", "--device", "cpu", "--save", "/nowhere/at/all"), "no folder /nowhere/at"),
        (("parity", "--device", "cpu", "--json", "/"), "/ cannot be written"),
        (("parity", "--device", "cpu", "--json", "same", "--save", "same"), "both name same"),
        (("parity", "--device", "cpu", "--backend", "egaer"), "did you mean 'eager'?"),
        (("parity", "--device", "c pu"), "names no device"),
        (("explain", "cuda:x"), "names no device"),
        (
            ("explain", "cpu", "--direction", "grad_w"),
            "is asked about with --groups, and --direction without",
        ),
        (("explain", "cpu", "--skew", 2, "--rows", 4096), "and --rows, --skew without it"),
        (("explain", "cpu", "--k", 8, "--n", 8, "--dtype", "float32"), "and --k, --n, --dtype without it"),
    ],
)
def test_a_bad_question_is_answered_without_a_traceback(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_parity_of_layers(run, tmp_path, monkeypatch):
    """The whole table, a shorter training run."""
    from gmm_registry.testing import layers

    monkeypatch.setattr(
        "gmm_registry.cli.layers.layer_parity", partial(layers.layer_parity, steps=30, seconds=0.01)
    )
    result = run("parity", "--layers", "--device", "cpu", "--json", tmp_path / "layers.json")
    assert result.exit_code == 0, result.output
    for text in ("grad_w of expert 7", "permute and unpermute, ms", "step, ms", "strays from eager's by"):
        assert text in result.stdout
    report = json.loads((tmp_path / "layers.json").read_text())
    assert {row["backend"] for row in report["results"]} >= {"any.eager", "cpu.megablocks_sparse"}
    for row in report["results"]:
        assert len(row["grad_weights"]["w1"]) == 8
        assert row["losses"][-1] < row["losses"][0]


def test_a_wrong_layer_is_named(run, third_party, monkeypatch):
    import acme_gmm

    from gmm_registry.testing import layers

    right = acme_gmm.Acme.weight_grad
    monkeypatch.setattr(acme_gmm.Acme, "weight_grad", lambda *args, **kwargs: right(*args, **kwargs) * 1.5)
    monkeypatch.setattr(
        "gmm_registry.cli.layers.layer_parity", partial(layers.layer_parity, steps=0, seconds=0.01)
    )
    result = run("parity", "--layers", "--device", "cpu", "--backend", "acme")
    assert result.exit_code == 1
    assert "cpu.acme: grad_w1 of expert 0" in result.stdout


class TestAcrossMachines:
    """--save on one machine, --against on another."""

    @pytest.fixture
    def golden(self, run, tmp_path):
        path = tmp_path / "golden.safetensors"
        result = run("parity", "--device", "cpu", "--save", path)
        assert result.exit_code == 0, result.output
        return path

    def rewrite(self, path, tensors=None, metadata=None):
        """Change tensors or metadata, and leave everything else as it was."""
        with safe_open(path, "pt") as file:
            old = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            told = file.metadata()
        save_file({**old, **(tensors or {})}, path, {**told, **(metadata or {})})
        return old, told

    def test_the_same_machine_agrees(self, run, golden):
        result = run("parity", "--device", "cpu", "--against", golden)
        assert result.exit_code == 0, result.output
        assert "18 passed" in result.stdout  # two with the reference, two by two with the file

    def test_one_changed_number_is_caught_and_its_case_named(self, run, golden):
        name = "any.eager|float32, trans_b|grad_x"
        with safe_open(golden, "pt") as file:
            changed = file.get_tensor(name)
        changed[3, 4] += 1e-6
        self.rewrite(golden, {name: changed})
        result = run("parity", "--device", "cpu", "--against", golden)
        assert result.exit_code == 2
        assert "any.eager, float32, trans_b, grad_x" in result.stderr

    def test_a_different_result_is_caught_and_its_case_named(self, run, golden):
        from gmm_registry.testing.cases import digest

        name = "any.eager|float32, trans_b|grad_x"
        with safe_open(golden, "pt") as file:
            changed = file.get_tensor(name)
            digests = json.loads(file.metadata()["digests"])
        changed[3, 4] += 1e-3
        digests[name] = digest(changed)
        self.rewrite(golden, {name: changed}, {"digests": json.dumps(digests)})
        result = run("parity", "--device", "cpu", "--against", golden)
        assert result.exit_code == 1
        assert "failed 'float32, trans_b' against any.eager on" in result.stdout

    def test_other_inputs_are_refused(self, run, golden):
        with safe_open(golden, "pt") as file:
            inputs = json.loads(file.metadata()["inputs"])
        inputs["bfloat16"] = "0" * 64
        self.rewrite(golden, metadata={"inputs": json.dumps(inputs)})
        result = run("parity", "--device", "cpu", "--against", golden)
        assert result.exit_code == 2
        assert "case 'bfloat16' was computed from other inputs" in result.stderr

    def test_a_file_with_part_of_its_metadata_or_outputs_is_refused(self, run, golden):
        with safe_open(golden, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            told = file.metadata()
        required = ("digests", "inputs", "environment")
        parts = [{k: v for k, v in told.items() if k != name} for name in required]
        for changed in (*parts, *({**told, name: "1"} for name in (*required, "refused"))):
            save_file(tensors, golden, changed)
            result = run("parity", "--device", "cpu", "--against", golden)
            assert result.exit_code == 2, (changed.keys(), result.output)
            assert "metadata cannot be read" in result.stderr
        kept = {name: tensor for name, tensor in tensors.items() if "|bfloat16|" in name}
        digests = {name: digest for name, digest in json.loads(told["digests"]).items() if name in kept}
        save_file(kept, golden, {**told, "digests": json.dumps(digests)})
        result = run("parity", "--device", "cpu", "--against", golden)
        assert result.exit_code == 2
        assert "holds no outputs of case" in result.stderr

    def test_a_case_that_was_refused_there_is_not_compared(self, run, golden):
        with safe_open(golden, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            told = file.metadata()
        kept = {name: tensor for name, tensor in tensors.items() if "|last group empty|" not in name}
        digests = {name: digest for name, digest in json.loads(told["digests"]).items() if name in kept}
        assert told["refused"] == "[]"
        save_file(kept, golden, {**told, "digests": json.dumps(digests), "refused": '["last group empty"]'})
        result = run("parity", "--device", "cpu", "--backend", "eager", "--against", golden)
        assert result.exit_code == 0, result.output
        theirs = result.stdout.partition("any.eager on cpu against any.eager")[2]
        assert "float32, trans_b" in theirs
        assert "last group empty" not in theirs

    def test_a_file_that_says_nothing_of_refusals_has_none(self, run, golden):
        """As earlier versions wrote it."""
        with safe_open(golden, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            told = file.metadata()
        save_file(tensors, golden, {name: text for name, text in told.items() if name != "refused"})
        result = run("parity", "--device", "cpu", "--backend", "eager", "--against", golden)
        assert result.exit_code == 0, result.output

    def test_a_file_without_outputs_is_refused(self, run, golden):
        with safe_open(golden, "pt") as file:
            save_file({}, golden, {**file.metadata(), "digests": "{}"})
        result = run("parity", "--device", "cpu", "--against", golden)
        assert result.exit_code == 2
        assert "holds no outputs" in result.stderr

    def test_what_is_no_result_is_refused(self, run, tmp_path):
        text = tmp_path / "text"
        text.write_text("not a tensor in sight")
        weights = tmp_path / "weights"
        save_file({"weight": torch.ones(2)}, weights)
        for path, message in (
            (text, "cannot be read"),
            (weights, "not written by"),
            (tmp_path / "nothing", "cannot be read"),
        ):
            result = run("parity", "--device", "cpu", "--against", path)
            assert result.exit_code == 2
            assert message in result.stderr
