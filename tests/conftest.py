"""Packages for the tests: none is installed, each lies as files in a folder on `sys.path`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from gmm_registry.registry import refresh
from gmm_registry.registry.discovery import GROUP
from gmm_registry.registry.request import ENVIRONMENT

THIRD_PARTY = Path(__file__).parent / "third_party"

# Collecting the doctests of a package for tests would put it on sys.path for good.
collect_ignore = ["third_party", "npu/support", "npu/stand_in", "npu_wheel/run.py"]
if find_spec("npu_memory") is None:  # these run in processes of their own: test_npu.py, npu_wheel/run.py
    collect_ignore += ["npu", "npu_wheel"]
if os.environ.get("TRITON_INTERPRET") != "1":  # and these: test_triton_grouped.py
    collect_ignore += ["interpreted"]


def pytest_configure() -> None:
    """Forget the choice of the developer who runs the tests, and leave their cache alone."""
    os.environ.pop(ENVIRONMENT, None)
    os.environ["GMM_REGISTRY_CACHE"] = ""


@contextmanager
def _packages() -> Iterator[Callable[[Path, list[str]], None]]:
    """Give a function that puts a folder with modules on `sys.path`; undo all of it in the end."""
    imported: list[str] = []
    with pytest.MonkeyPatch.context() as patch:

        def add(folder: Path, modules: list[str]) -> None:
            patch.syspath_prepend(folder)
            imported.extend(modules)
            refresh()

        yield add
    for module in imported:
        sys.modules.pop(module, None)
    refresh()  # not before sys.path is what it was


@pytest.fixture
def fresh_registry() -> Iterator[None]:
    """Start with nothing loaded, chosen or logged, and leave nothing behind."""
    refresh()
    yield
    refresh()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch be one for CUDA, that finds no device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.fixture
def third_party() -> Iterator[Path]:
    """Install somebody else's distribution acme-gmm; return its folder."""
    with _packages() as add:
        add(THIRD_PARTY, ["acme_gmm"])
        yield THIRD_PARTY


@pytest.fixture
def distribution(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that writes a distribution and puts it first on `sys.path`.

    Its arguments: the name, the entry points of our group (name to value), the source of each module,
    the version. It returns the distribution's folder.
    """
    with _packages() as add:

        def write(
            name: str,
            entry_points: Mapping[str, str],
            modules: Mapping[str, str] | None = None,
            version: str = "1.0",
        ) -> Path:
            folder = tmp_path / f"site-{len(list(tmp_path.iterdir()))}"
            write_metadata(folder, name, entry_points, version)
            for module, source in (modules or {}).items():
                (folder / f"{module}.py").write_text(source)
            add(folder, list(modules or {}))
            return folder

        yield write


def write_metadata(folder: Path, name: str, entry_points: Mapping[str, str], version: str) -> None:
    """Write the dist-info that an installer would leave in a site-packages ``folder``."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"[{GROUP}]", *(f"{key} = {value}" for key, value in entry_points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
