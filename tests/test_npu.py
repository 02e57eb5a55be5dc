"""npu.npu_fused where there is no NPU: all its tests on a simulated device, and what `explain` says.

The device's name is given once for a process, so whatever needs the device runs in one of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

from gmm_backends.npu_fused import NpuFused
from gmm_registry import Problem, explain, get_backend
from gmm_registry.errors import BackendUnavailableError
from gmm_registry.registry import refresh

ROOT = Path(__file__).parents[1]
AT_LEAST = 270  # tests on the simulated device
PROBLEM = Problem("npu", None, torch.bfloat16, 8, 4, 16, 16)

on_simulator = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"torch {torch.__version__} knows no device made in Python",
)
without_npu = pytest.mark.skipif(hasattr(torch, "npu"), reason="torch_npu is imported")


def simulate(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the simulated device, which `import torch` brings as it would bring the real one."""
    path = [str(ROOT / "tests" / "npu" / folder) for folder in ("stand_in", "support")]
    variables = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@on_simulator
@pytest.mark.slow
def test_everything_on_the_simulated_device(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=-ra --strict-markers"]
    done = simulate("-m", "pytest", *options, "tests/npu")
    closing = (done.stdout.strip().splitlines() or [""])[-1]
    with capsys.disabled():
        print(f"\ntests/npu on the simulated device: {closing}")
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", closing)
    assert passed
    assert int(passed[1]) >= AT_LEAST


class TestExplain:
    """The answers of `explain("npu")`, each naming what is missing and what to do."""

    @without_npu
    @pytest.mark.usefixtures("fresh_registry")
    def test_without_torch_npu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch_npu", None)  # as if it were not installed
        report = str(explain("npu"))
        first = "npu: any dtype (automatic choice, from the backends' own table)"
        assert report.startswith(f"{first}\n  npu.npu_fused: refused\n")
        assert "\n    - torch_npu is not installed: pip install 'gmm_registry[npu]'\n" in report
        assert report.endswith("\n  nothing can run this")

    @without_npu
    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (
                "ImportError('libhccl.so: cannot open shared object file: No such file or directory')",
                "ImportError: libhccl.so: cannot open shared object file: No such file or directory",
            ),
            ("AssertionError('no SoC')", "AssertionError: no SoC"),
            ("SystemExit('no driver')", "SystemExit: no driver"),
            ("ModuleNotFoundError('yaml', name='yaml')", "ModuleNotFoundError: yaml"),
        ],
    )
    def test_with_torch_npu_and_without_cann(self, distribution, error: str, text: str) -> None:
        distribution("torch_npu", {}, {"torch_npu": f"raise {error}"})
        report = str(explain("npu"))
        assert f"torch_npu cannot be imported (is CANN's set_env.sh sourced?): {text}\n" in report
        assert "pip install" not in report
        assert report.endswith("\n  nothing can run this")
        with pytest.raises(BackendUnavailableError) as caught:
            get_backend("npu", "npu_fused")
        assert text in str(caught.value)

    @on_simulator
    def test_on_the_simulated_device(self) -> None:
        done = simulate("-c", "from gmm_registry import explain; print(explain('npu'))")
        assert done.returncode == 0, done.stderr
        first, second, *rest = done.stdout.splitlines()
        assert first == "npu: any dtype (automatic choice, from the backends' own table)"
        assert second == "  npu.npu_fused: chosen, priority 50"
        assert "refused" not in "".join(rest)

    @on_simulator
    def test_with_torch_npu_and_no_device(self) -> None:
        done = simulate("-c", "from gmm_registry import explain; print(explain('npu'))", SIM_NPU_DEVICES="0")
        assert done.returncode == 0, done.stderr
        reason = "torch.npu.is_available() is False: no npu device on this machine"
        assert f"  npu.npu_fused: refused\n    - {reason}\n" in done.stdout

    def test_with_an_old_torch_npu(self) -> None:
        """The operator is asked what it takes; the version number is not."""
        source = """
import sys, types, torch
from gmm_registry import explain
from gmm_registry.registry import refresh
sys.modules["torch_npu"] = types.ModuleType("torch_npu")
print(explain("npu"))
library = torch.library.Library("npu", "DEF")
library.define("npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, int[]? group_list=None) -> Tensor[]")
refresh()
print(explain("npu"))
"""
        done = subprocess.run(
            [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        reason = "this torch_npu has no npu_grouped_matmul with group_list_type, update it: pip install"
        assert done.stdout.count(reason) == 2


@without_npu
def test_torch_npu_is_imported_once_and_again_after_refresh(distribution) -> None:
    module = """
from pathlib import Path
count = Path(__file__).with_suffix(".count")
count.write_text(count.read_text() + "." if count.exists() else ".")
raise ImportError("broken")
"""
    imports = distribution("torch_npu", {}, {"torch_npu": module}) / "torch_npu.count"
    NpuFused().rejections(Problem("cpu", None, torch.bfloat16, 8, 4, 16, 16))
    assert not imports.exists()
    for _ in range(3):
        explain("npu", PROBLEM)
    assert imports.read_text() == "."
    refresh()
    explain("npu", PROBLEM)
    assert imports.read_text() == ".."
