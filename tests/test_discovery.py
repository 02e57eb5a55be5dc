"""How backends are found and imported, and that one broken package harms nobody else.

A test that comes from a fault somebody met names where it was reported.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gmm_registry import BackendUnavailableError, DuplicateBackendError, Rejected
from gmm_registry.registry import discovery, explain, get_backend, list_backends, refresh, use_backend

GOOD = """
from gmm_backends.eager import Eager

class Good(Eager):
    def priority(self, problem):
        return 50
"""
MARKED = f"""
import pathlib

pathlib.Path(__file__).with_suffix(".imported").touch()
{GOOD}
"""
Distribution = Callable[..., Path]


def names(device: str | None = None) -> list[str]:
    return [str(key) for key in list_backends(device)]


def refusal(name: str) -> str:
    """Return the reasons for which `explain` refuses a backend on the CPU."""
    (verdict,) = [verdict for verdict in explain("cpu").verdicts if str(verdict.key) == name]
    assert isinstance(verdict, Rejected)
    return "\n".join(verdict.reasons)


def run_python(source: str, *path: Path) -> str:
    """Run a program in a fresh interpreter, with folders on `sys.path`; return what it prints."""
    search = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- what listing and loading import ---------------------------------------------------------------


def test_import_and_listing_cost_nothing() -> None:
    """TransformerEngine 872, xgrammar 231: import initialised CUDA, or imported optional libraries.

    An attempt counts, so that the test needs none of them. What torch has imported already does not.
    """
    source = """
import json, sys, torch

class Watch:
    asked = set()

    def find_spec(self, name, path=None, target=None):
        self.asked.add(name.partition(".")[0])

def refuse():
    raise AssertionError("a device was initialised")

torch.cuda._lazy_init = refuse
sys.meta_path.insert(0, Watch())
import gmm_registry
gmm_registry.list_backends()
gmm_registry.list_backends("cuda")
assert not torch.cuda.is_initialized()
print(json.dumps(sorted(Watch.asked)))
"""
    asked = set(json.loads(run_python(source)))
    assert {"gmm_registry", "stevedore"} <= asked
    accelerators = {"torch_npu", "triton", "grouped_gemm", "megablocks", "quack", "cutlass"}
    extras = {"transformers", "typer", "rich", "safetensors", "numpy", "matplotlib", "pytest"}
    assert asked & ({"gmm_backends"} | accelerators | extras) == set()


def test_listing_and_naming_import_no_plugin(distribution: Distribution) -> None:
    folder = distribution("acme", {"cpu.marked": "marked:Good"}, {"marked": MARKED})
    marker = folder / "marked.imported"
    assert "cpu.marked" in names()
    assert "cpu.marked" in names("cpu:0")
    with use_backend("marked"):
        pass
    assert not marker.exists()
    get_backend("cpu", "marked")
    assert marker.exists()


def test_loading_one_plugin_imports_no_other(distribution: Distribution) -> None:
    entry_points = {"cpu.marked": "marked:Good", "cpu.good": "good:Good"}
    folder = distribution("acme", entry_points, {"marked": MARKED, "good": GOOD})
    assert get_backend("cpu", "good").impl == "good"
    assert not (folder / "marked.imported").exists()


def test_a_plugin_is_imported_once(distribution: Distribution) -> None:
    """vllm 10443: plugins were loaded twice."""
    distribution("acme", {"cpu.good": "good:Good"}, {"good": GOOD})
    assert get_backend("cpu", "good") is get_backend("cpu", "good")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
def test_a_forked_child_has_the_plugins(third_party: Path) -> None:
    """vllm 27940: plugins that the parent had loaded were missing in a forked child."""
    source = """
import os, torch
from gmm_registry import get_backend, gmm, list_backends

x, weight = torch.ones(3, 2), torch.ones(2, 2, 4)
keys, out = list_backends(), gmm(x, weight, [1, 2], backend="acme")
child = os.fork()
if child == 0:
    code = 1
    try:
        assert list_backends() == keys
        assert str(get_backend("cpu").key) == "cpu.acme"
        assert torch.equal(gmm(x, weight, [1, 2], backend="acme"), out)
        code = 0
    finally:
        os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *keys)
"""
    code, *keys = run_python(source, third_party).split()
    assert code == "0"
    assert len(set(keys)) == len(keys)


# --- finding ---------------------------------------------------------------------------------------


def test_discovering_twice_gives_the_same(distribution: Distribution) -> None:
    """vllm 10443: the second discovery doubled what the first had found."""
    distribution("acme", {"cpu.good": "good:Good"}, {"good": GOOD})
    first = names()
    refresh()
    assert names() == first
    assert first.count("cpu.good") == 1


def test_a_package_installed_meanwhile_is_found(distribution: Distribution) -> None:
    """After refresh() no cache hides it: not stevedore's, not those that compare the folder's time."""
    folder = distribution("acme", {"cpu.good": "good:Good"}, {"good": GOOD})
    get_backend("cpu", "good")
    before = folder.stat()
    shutil.copytree(folder / "acme-1.0.dist-info", folder / "late-1.0.dist-info")
    (folder / "late-1.0.dist-info" / "METADATA").write_text("Name: late\nVersion: 1.0\n")
    entry_points = folder / "late-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text(entry_points.read_text().replace("good", "late"))
    (folder / "late.py").write_text(GOOD)
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))  # within one tick of the clock
    refresh()
    assert get_backend("cpu", "late").impl == "late"
    del sys.modules["late"]


def test_an_upgraded_plugin_is_asked_anew(distribution: Distribution) -> None:
    """Refresh forgets a failure, so that installing what was missing mends it."""
    folder = distribution("acme", {"cpu.good": "good:Good"}, {"good": "import not_yet_installed" + GOOD})
    assert "No module named 'not_yet_installed'" in refusal("cpu.good")
    (folder / "not_yet_installed.py").touch()
    refresh()
    assert get_backend("cpu", "good").impl == "good"
    del sys.modules["not_yet_installed"]


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("second", ["two:Good", "one:Good"], ids=["other value", "same value"])
def test_one_name_from_two_packages(distribution: Distribution, order: str, second: str) -> None:
    """stevedore bf0b6d1: which of two packages a name meant hung on the order of the path."""
    values = {"a": "one:Good", "b": second}
    for name in order:
        distribution(
            name, {"cpu.x": values[name], f"cpu.only_{name}": "one:Good"}, {"one": GOOD, "two": GOOD}
        )
    assert names().count("cpu.x") == 1
    assert str(get_backend("cpu").key) == "cpu.only_a"
    both = f"a 1.0 (one:Good), b 1.0 ({second})"
    assert both in refusal("cpu.x")
    assert get_backend("cpu", "only_b").impl == "only_b"
    with pytest.raises(DuplicateBackendError) as caught:
        get_backend("cpu", "x")
    assert both in str(caught.value)


def test_a_conflict_imports_neither(distribution: Distribution) -> None:
    folders = [distribution(name, {"cpu.x": "marked:Good"}, {"marked": MARKED}) for name in "ab"]
    with pytest.raises(DuplicateBackendError):
        get_backend("cpu", "x")
    assert [folder for folder in folders if (folder / "marked.imported").exists()] == []


@pytest.mark.parametrize("older", ["acme-gmm", "Acme_GMM", "acme.gmm"])
def test_one_distribution_found_twice_is_one(distribution: Distribution, older: str) -> None:
    """As for Python itself the first on the path counts, and what only the second offers is gone."""
    distribution(older, {"cpu.x": "one:Good", "cpu.old": "one:Good"}, {"one": GOOD}, version="1.0")
    distribution("acme-gmm", {"cpu.x": "two:Good"}, {"two": GOOD}, version="2.0")
    assert type(get_backend("cpu", "x")).__module__ == "two"
    assert "cpu.old" not in names()


def test_stale_metadata_hides_nothing(distribution: Distribution) -> None:
    """importlib_metadata 457: an empty z-0.9.dist-info hid the entry points of z-1.0 beside it."""
    folder = distribution("z", {"cpu.good": "good:Good"}, {"good": GOOD})
    stale = folder / "z-0.9.dist-info"
    stale.mkdir()
    refresh()
    assert get_backend("cpu", "good").impl == "good"
    assert stale in discovery.stale_metadata()
    assert folder / "z-1.0.dist-info" not in discovery.stale_metadata()


@pytest.mark.parametrize("name", ["nodot", "cpu.", ".x"])
def test_a_name_that_is_no_key_is_kept_apart(distribution: Distribution, name: str) -> None:
    """It is no candidate, and the cause can be had."""
    before = names()
    distribution("acme", {name: "good:Good", "cpu.good": "good:Good"}, {"good": GOOD})
    assert names() == sorted([*before, "cpu.good"])
    assert get_backend("cpu", "good").impl == "good"
    assert f"{name!r} is not of the form 'device.impl'" in str(discovery.load(name))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("entry_points.txt", b"[gmm_registry.backends]\nno equals sign\n"),
        ("entry_points.txt", b"[gmm_registry.backends]\ncpu.x = \xff\n"),
        ("METADATA", None),
        ("METADATA", b""),
    ],
    ids=["no equals sign", "not UTF-8", "no METADATA", "empty METADATA"],
)
def test_unreadable_metadata_harms_nobody(
    distribution: Distribution, file: str, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """llm 1351, on the level of the package: its metadata cannot be read."""
    distribution("fine", {"cpu.good": "good:Good"}, {"good": GOOD})
    folder = distribution("damaged", {"cpu.x": "good:Good"})
    path = folder / "damaged-1.0.dist-info" / file
    path.write_bytes(content) if content is not None else path.unlink()
    refresh()
    with caplog.at_level(logging.WARNING, "gmm_registry"):
        assert get_backend("cpu", "good").impl == "good"
    assert "cpu.x" in names() or "damaged-1.0.dist-info" in caplog.text


# --- plugins that cannot be loaded -----------------------------------------------------------------


def test_broken_entries_harm_nobody(distribution: Distribution) -> None:
    """vllm-ascend 3403, llm 1351: one broken entry point ended discovery."""
    entry_points = {"cpu.nope": "json:nope", "cpu.garbled": "not valid!!", "cpu.good": "good:Good"}
    distribution("acme", entry_points, {"good": GOOD})
    assert str(get_backend("cpu").key) == "cpu.good"
    assert "'json' has no attribute 'nope'" in refusal("cpu.nope")
    assert "'not valid!!'" in refusal("cpu.garbled")


def test_a_failure_does_not_end_an_ordered_list(distribution: Distribution) -> None:
    """stevedore 1218ab6: a plugin that failed took those after it in the list with it."""
    entry_points = {"cpu.c": "good:Good", "cpu.bad": "bad:Good", "cpu.a": "good:Good"}
    distribution("acme", entry_points, {"good": GOOD, "bad": "raise RuntimeError('boom')"})
    loaded = {name: discovery.load(f"cpu.{name}") for name in ("c", "bad", "a")}
    assert loaded["c"] is loaded["a"]
    assert str(loaded["bad"]) == "boom"
    assert {"cpu.c", "cpu.bad", "cpu.a"} <= set(names())


@pytest.mark.parametrize(
    ("statement", "cause"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise ImportError('libacme.so.1: cannot open')", "ImportError: libacme.so.1: cannot open"),
        ("assert False, 'needs a driver'", "AssertionError: needs a driver"),
        ("raise SystemExit('no driver')", "SystemExit: no driver"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("def", "SyntaxError: invalid syntax"),
    ],
)
def test_a_plugin_that_raises_at_import(distribution: Distribution, statement: str, cause: str) -> None:
    """Its cause is kept and shown, and only who asks for it by name is stopped."""
    distribution("acme", {"cpu.bad": "bad:Good"}, {"bad": statement})
    assert cause in refusal("cpu.bad")
    assert get_backend("cpu").impl != "bad"
    with pytest.raises(BackendUnavailableError, match="'bad', asked for by name") as caught:
        get_backend("cpu", "bad")
    assert cause in str(caught.value)
    assert type(caught.value.__cause__).__name__ == cause.partition(":")[0]


def test_a_keyboard_interrupt_passes_through(distribution: Distribution) -> None:
    distribution("acme", {"cpu.bad": "bad:Good"}, {"bad": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        get_backend("cpu")


HALF = """
from gmm_registry.contract import GroupedMatmulBackend

class Plugin(GroupedMatmulBackend):
    def rejections(self, problem):
        return []

    def forward(self, x, weight, batch_sizes, *, trans_b, out=None):
        raise AssertionError
"""


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (HALF, "TypeError: plugin:Plugin does not implement weight_grad"),
        (
            "class Plugin: pass",
            "plugin:Plugin is not a subclass of gmm_registry.contract.GroupedMatmulBackend",
        ),
        (
            "def Plugin(): pass",
            "plugin:Plugin is not a subclass of gmm_registry.contract.GroupedMatmulBackend",
        ),
        (GOOD + "class Plugin(Good):\n    def __init__(self): raise OSError('no chip')", "OSError: no chip"),
        (GOOD + "class Plugin(Good):\n    def __init__(self): raise SystemExit(3)", "SystemExit: 3"),
        (
            GOOD + "class Plugin(Good):\n    def rejections(self, problem): raise OSError('no chip')",
            "its capability check raised OSError: no chip",
        ),
        (
            GOOD + "class Plugin(Good):\n    def rejections(self, problem): raise SystemExit(3)",
            "its capability check raised SystemExit: 3",
        ),
        (
            GOOD + "class Plugin(Good):\n    def rejections(self, problem): return None",
            "its rejections must be a list of str, not None",
        ),
        (
            GOOD + "class Plugin(Good):\n    def priority(self, problem): raise OSError('no chip')",
            "its capability check raised OSError: no chip",
        ),
    ],
    ids=[
        "misses a method",
        "not a subclass",
        "not a class",
        "__init__ raises",
        "__init__ exits",
        "rejections raises",
        "rejections exits",
        "rejections returns None",
        "priority raises",
    ],
)
def test_a_plugin_that_breaks_the_contract(distribution: Distribution, source: str, cause: str) -> None:
    """It is passed over with the cause; asked for by name, it raises with the cause."""
    distribution("acme", {"cpu.plugin": "plugin:Plugin"}, {"plugin": source})
    assert cause in refusal("cpu.plugin")
    assert get_backend("cpu").impl != "plugin"
    with pytest.raises(BackendUnavailableError) as caught:
        get_backend("cpu", "plugin")
    assert cause in str(caught.value)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("def rejections(self, problem): return 'no gpu'", "rejections must be a list of str, not 'no gpu'"),
        ("def rejections(self, problem): return [None]", "rejections must be a list of str, not [None]"),
        ("def priority(self, problem): return None", "priority must be an int, not None"),
        ("def priority(self, problem): return float('nan')", "priority must be an int, not nan"),
        ("def priority(self, problem): raise Panic('out')", "its capability check raised Panic: out"),
        ("def __init__(self): raise Panic('out')", "not loaded: Panic: out"),
    ],
)
def test_a_plugin_that_answers_nonsense_harms_nobody(distribution: Distribution, method: str, reason: str):
    source = f"""
from gmm_backends.eager import Eager

class Panic(BaseException):
    pass

class Bad(Eager):
    {method}
"""
    distribution("bad", {"cpu.bad": "bad_module:Bad"}, {"bad_module": source})
    assert reason in refusal("cpu.bad")
    assert get_backend("cpu").impl in ("eager", "torch_grouped_mm")


def test_all_threads_get_one_instance(distribution: Distribution) -> None:
    source = """
import time
from gmm_backends.eager import Eager

class Slow(Eager):
    def __init__(self):
        time.sleep(0.05)
"""
    distribution("slow", {"cpu.slow": "slow_module:Slow"}, {"slow_module": source})
    with ThreadPoolExecutor(8) as pool:
        backends = list(pool.map(lambda _: get_backend("cpu", "slow"), range(8)))
    assert len({id(backend) for backend in backends}) == 1


@pytest.mark.parametrize("device", ["distributed", "ops", "nn", "cpu:3"])
def test_a_module_of_torch_is_no_device(device: str) -> None:
    with pytest.raises(BackendUnavailableError, match=r"no device|there is no"):
        get_backend(device)


def test_a_place_that_cannot_be_read_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("x" * 5000)
    assert discovery.stale_metadata() == []
