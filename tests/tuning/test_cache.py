"""The file that measured choices are kept in: where it is, who writes it, what damages it."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tuning_stubs import (
    DAMAGED,
    DIRECTIONS,
    PROBLEM,
    Offer,
    Preferred,
    Stub,
    Times,
    chosen,
    command,
    damage,
    document,
    impls,
    valid,
    warnings,
)

from gmm_registry import BackendKey, autotune, explain
from gmm_registry.registry import cache, records, refresh
from gmm_registry.registry.cache import ENVIRONMENT


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import platformdirs

    monkeypatch.delenv(ENVIRONMENT)
    found = cache.location()
    assert found is not None
    assert str(found.parent).startswith(str(platformdirs.user_cache_path()))
    assert (found.parent.name, found.name) == ("gmm_registry", "choices.json")
    monkeypatch.setenv(ENVIRONMENT, "")
    assert cache.location() is None
    monkeypatch.setenv(ENVIRONMENT, "~/here.json")
    assert cache.location() == Path.home() / "here.json"


@pytest.mark.parametrize("kind", ["nobody's home", "relative", "no home"])
def test_a_place_that_is_nowhere_costs_a_warning(
    offer: Offer,
    times: Times,
    kind: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache is optional, so no call raises for it."""
    import platformdirs

    offer(preferred=Preferred, quick=Stub)
    times["quick"] = dict.fromkeys(DIRECTIONS, 1.0)
    if kind == "nobody's home":
        monkeypatch.setenv(ENVIRONMENT, "~nosuchuser/c")
    else:
        monkeypatch.delenv(ENVIRONMENT)
        found = Path("~/.cache") if kind == "relative" else Path("~nosuchuser/.cache")
        monkeypatch.setattr(
            platformdirs,
            "user_cache_path",
            lambda *_, **__: found if kind == "relative" else found.expanduser(),
        )
    assert impls() == ["preferred"] * 3
    assert autotune(PROBLEM).saved is None
    assert impls() == ["quick"] * 3
    assert "cache of measured choices\n  off\n" in command("doctor")
    (warning,) = warnings(caplog)
    name = "~nosuchuser/c" if kind == "nobody's home" else "choices.json"
    assert f"the cache of tuned choices, {name}, is neither read nor written: " in warning
    assert not Path("~").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_of_fork_waits_for_no_thread_of_its_parent() -> None:
    source = """
import os, signal
from gmm_registry.registry import cache
with cache._lock:  # as a thread that reads the file
    child = os.fork()
    if not child:
        signal.alarm(10)
        cache.keep([], save=False)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120)


@pytest.mark.parametrize("how", ["empty variable", "save=False"])
def test_what_is_not_saved_holds_for_this_process(
    offer: Offer, times: Times, file: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(preferred=Preferred, quick=Stub)
    times["quick"] = dict.fromkeys(DIRECTIONS, 1.0)
    if how == "empty variable":
        monkeypatch.setenv(ENVIRONMENT, "")
    tuning = autotune(PROBLEM, save=how != "save=False")
    assert tuning.saved is None
    assert str(tuning).endswith("\nholds for this process only")
    assert "(automatic choice, from the cache of this process)" in str(explain("cpu", PROBLEM))
    assert impls() == ["quick"] * 3
    assert not file.exists()
    refresh()
    assert impls() == ["preferred"] * 3


@pytest.mark.usefixtures("tuned")
def test_a_second_measurement_adds_to_the_first(file: Path, times: Times) -> None:
    autotune(replace(PROBLEM, rows=4096))
    times["preferred"] = dict.fromkeys(DIRECTIONS, 0.5)
    autotune(PROBLEM)
    assert len(records.read(file)) == 6
    refresh()
    assert chosen(replace(PROBLEM, rows=4096)) == ("cpu.quick", "cache")
    assert chosen() == ("cpu.preferred", "cache")


def test_a_link_to_the_file_stays_one(offer: Offer, times: Times, file: Path, tmp_path: Path) -> None:
    file.parent.mkdir()
    file.symlink_to(tmp_path / "elsewhere.json")
    assert autotune(PROBLEM).saved == file
    assert file.is_symlink()
    assert len(records.read(tmp_path / "elsewhere.json")) == 3


def test_a_file_that_could_not_be_written_is_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "choices.json"
    records.write(path, [])
    before = path.read_bytes()

    def replace(unfinished: Path, target: Path) -> Path:
        assert path.read_bytes() == before  # what others see meanwhile
        assert len(records.read(unfinished)) == 1
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="no space left"):
        records.write(path, [records.Choice.of(PROBLEM, BackendKey("any", "eager"), "tuned")])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_costs_a_warning(
    offer: Offer, times: Times, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    offer(preferred=Preferred, quick=Stub)
    times["quick"] = dict.fromkeys(DIRECTIONS, 1.0)
    file.parent.write_text("where the folder should be")
    tuning = autotune(PROBLEM)
    (warning,) = warnings(caplog)
    assert f"choices, {file}, is not written, and what was measured holds for this process only: " in warning
    assert tuning.saved is None
    assert impls() == ["quick"] * 3


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_ignored_with_one_warning(
    offer: Offer, times: Times, file: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And it stays as it is: it may be somebody's, or of a later version."""
    offer(preferred=Preferred, quick=Stub)
    times["quick"] = dict.fromkeys(DIRECTIONS, 1.0)
    damage(file, kind)
    assert impls() == ["preferred"] * 3
    assert chosen() == ("cpu.preferred", "table")
    assert impls(rows=4096) == ["preferred"] * 3
    assert autotune(PROBLEM).saved is None
    assert impls() == ["quick"] * 3
    (warning,) = warnings(caplog)
    assert f"the cache of tuned choices, {file}, is neither read nor written: " in warning
    assert "remove it, or name another file in GMM_REGISTRY_CACHE" in warning
    assert file.read_bytes() == DAMAGED[kind]
    assert list(file.parent.iterdir()) == [file]
    file.unlink()
    refresh()
    assert autotune(PROBLEM).saved == file


@pytest.mark.parametrize("kind", ["a folder", "a device", "a pipe"])
def test_what_is_no_file_is_left_alone(
    offer: Offer,
    times: Times,
    file: Path,
    kind: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "read", lambda path: pytest.fail("a pipe would be waited for"))
    file.parent.mkdir()
    make: dict[str, Callable[[Path], object]] = {
        "a folder": Path.mkdir,
        "a device": lambda path: path.symlink_to(os.devnull),
        "a pipe": os.mkfifo,
    }
    make[kind](file)
    impls()
    assert autotune(PROBLEM).saved is None
    (warning,) = [said for said in warnings(caplog) if str(file) in said]  # of backends there may be others
    assert f"{file}, is neither read nor written: it is no regular file; name another file in " in warning
    assert list(file.parent.iterdir()) == [file]


def test_what_was_valid_is(offer: Offer, file: Path) -> None:
    """The entry that the damaged ones are made of."""
    offer(preferred=Preferred, quick=Stub)
    file.parent.mkdir()
    file.write_bytes(document(valid()))
    assert chosen() == ("cpu.quick", "cache")


def test_the_file_is_read_once_and_not_before_it_is_needed(
    offer: Offer, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(preferred=Preferred)
    reads = []
    monkeypatch.setattr(records, "read", lambda path: reads.append(path) or [])
    impls(backend="preferred")
    explain("cpu")
    assert reads == []
    for rows in (64, 128, 256):
        impls(rows)
    assert reads == [file]
    refresh()
    impls()
    assert reads == [file, file]


def test_import_reads_no_cache() -> None:
    source = """
import sys
import gmm_registry, torch
gmm_registry.gmm(torch.ones(2, 4), torch.ones(1, 4, 4), [2], backend="eager")
assert not {"platformdirs", "filelock"} & (set(sys.modules) - before), "something was read"
"""
    source = f"import sys, torch\nbefore = set(sys.modules)\n{source}"
    environment = {key: value for key, value in os.environ.items() if key != ENVIRONMENT}
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120, env=environment)


WRITER = """
import sys
from pathlib import Path
import torch
from gmm_registry import BackendKey, Problem
from gmm_registry.registry import cache
from gmm_registry.registry.records import Choice

print("ready", flush=True)
sys.stdin.readline()
for k in range(25):
    problem = Problem("cpu", None, torch.float32, 64, 4, k + 1, int(sys.argv[1]))
    assert cache.keep([Choice.of(problem, BackendKey("any", "eager"), "tuned", 1.0)], save=True)
"""


def test_processes_that_write_at_once_keep_what_the_others_wrote(file: Path) -> None:
    def start(number: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", WRITER, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    writers = [start(1), start(2)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=120)
        assert writer.returncode == 0
    found = {(choice.signature.k, choice.signature.n) for choice in records.read(file)}
    assert found == set(itertools.product(range(1, 26), (1, 2)))
    assert {path.name for path in file.parent.iterdir()} <= {"choices.json", "choices.json.lock"}
