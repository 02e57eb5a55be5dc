"""Run tests under Triton's interpreter, which must be chosen before triton is imported."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest


def run_interpreted(*arguments: str) -> int:
    """Run pytest in a process of its own, where kernels run on the CPU; return how many tests passed."""
    pytest.importorskip("numpy", reason="Triton's interpreter needs NumPy")
    if version("triton").startswith("3.6."):
        pytest.skip("the interpreter of triton 3.6 converts arrays as NumPy has ceased to allow")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    return int(passed[1])
