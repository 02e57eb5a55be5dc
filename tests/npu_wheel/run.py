"""Run the tests of npu.npu_fused on the real torch_npu, without an NPU and without CANN.

    python tests/npu_wheel/run.py [FOLDER]

Makes an environment of its own in FOLDER (by default a temporary one): torch, torch_npu and this package by
pip, and CANN's libraries, to which torch_npu links, as stubs. Then pytest runs there: tests/npu but for the
simulator's own tests, and what lies beside this file. Needs pip's index, a C compiler and nm. If anything of
that cannot be had, it ends with an error; nothing is skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
TORCH_NPU = "torch_npu==2.13.0"
AT_LEAST = 255  # tests

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Libraries that torch_npu's own name; they are one file, so that there is one state.
LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
OF_CANN = re.compile(r"acl|rt[A-Z]|Msprof|msprof|Hccl|hccl")


def step(text: str) -> None:
    print(f"== {text}", flush=True)


def install(folder: Path) -> Path:
    """Make the environment; return its interpreter."""
    venv.create(folder / "venv", with_pip=True, clear=True, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    build = folder / "build.cfg"  # away from the tree, where an earlier build may have left files
    build.write_text(f"[build]\nbuild_base = {folder / 'build'}\n")
    for wanted in ([TORCH], [TORCH_NPU], [str(ROOT), "pytest>=8.2"]):
        step(f"pip install {' '.join(wanted)}")
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted],
            env={**os.environ, "DIST_EXTRA_CONFIG": str(build)},
            check=False,
        )
        if done.returncode:
            sys.exit(f"pip cannot install {' '.join(wanted)}, so that no test ran on the real torch_npu")
    return python


def symbols(library: Path, kind: str) -> set[str]:
    """Return the names of a library's dynamic symbols, "undefined" or "defined" ones."""
    command = ["nm", "--dynamic", f"--{kind}-only", str(library)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines()}


def stub_cann(site: Path, folder: Path) -> Path:
    """Compile CANN's libraries: what stub_cann.c defines, and no-ops for all else that torch_npu links to."""
    folder.mkdir(exist_ok=True)
    package = site / "torch_npu"
    linked = [*package.glob("lib/*.so"), *package.glob("_C*.so")]
    wanted = {name for library in linked for name in symbols(library, "undefined") if OF_CANN.match(name)}
    source = (HERE / "stub_cann.c").read_text()
    written = set(re.findall(r"(?m)^(?:const )?\w+ \*?(\w+)\(", source)) | set(
        re.findall(r"(?m)^NOOP\((\w+)\)", source)
    )
    given = {name for library in linked for name in symbols(library, "defined")}
    noops = sorted(wanted - written - given)
    step(f"stubs: {len(wanted)} functions of CANN are linked to, {len(noops)} of them do nothing")
    (folder / "noops.h").write_text("".join(f"NOOP({name})\n" for name in noops))
    first, *others = (folder / f"lib{name}.so" for name in LIBRARIES)
    compiler = os.environ.get("CC", "cc")
    options = ["-shared", "-fPIC", "-Wall", "-Wno-unused-parameter", f"-I{folder}"]
    subprocess.run([compiler, *options, "-o", str(first), str(HERE / "stub_cann.c")], check=True)
    for other in others:
        other.unlink(missing_ok=True)
        other.symlink_to(first.name)
    return folder


def test(python: Path, cann: Path) -> int:
    """Run pytest; return the exit status."""
    step("pytest")
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(cann),
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests/npu/support", HERE))),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # as without it `import torch` would fail where CANN is missing
    }
    options = ["-p", "real_npu", "-p", "no:cacheprovider", "-o", "addopts=-ra", "-W", "default"]
    tests = ["tests/npu", "tests/npu_wheel", "--ignore-glob=*/test_simulator*.py"]
    command = [str(python), "-m", "pytest", "--quiet", "--color=no", *options, *tests]
    closing = ""
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout or ():
            print(line, end="", flush=True)
            closing = line.strip() or closing
    passed = int((re.search(r"(\d+) passed", closing) or ["", "0"])[1])
    step(f"{TORCH_NPU}, real but for its kernels: {closing}")
    if not running.returncode and passed < AT_LEAST:
        step(f"only {passed} tests passed; there are at least {AT_LEAST}")
        return 1
    return running.returncode


def main(folder: Path) -> int:
    python = install(folder)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    return test(python, stub_cann(site, folder / "cann"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        sys.exit(main(Path(sys.argv[1]).resolve()))
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(Path(temporary)))
