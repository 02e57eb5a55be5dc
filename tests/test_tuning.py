"""What is measured, what is kept of it, and what repeats a run. No test here depends on a time."""

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from gmm_backends.eager import Eager
from gmm_registry import (
    Accepted,
    BackendKey,
    BackendUnavailableError,
    GroupedMatmulBackend,
    Problem,
    Rejected,
    Tuning,
    autotune,
    explain,
    gmm,
    measure,
    save_choices,
    use_backend,
    use_choices,
)
from gmm_registry.cli.app import app
from gmm_registry.registry import cache, choice, pins, records, refresh, trial, verdicts
from gmm_registry.registry.cache import ENVIRONMENT
from gmm_registry.registry.records import Machine, Signature

pytestmark = pytest.mark.usefixtures("fresh_registry")

PROBLEM = Problem("cpu", None, torch.float32, rows=64, groups=4, k=8, n=16)
DIRECTIONS = ("forward", "grad_x", "grad_w")
FAST = {"uniform": 1.0, "zipf": 1.0}
ran: list[str] = []  # the implementation of every product of a stub


class Stub(Eager):
    """The loop over groups, noting that it was called."""

    def priority(self, problem: Problem) -> int:
        return 50

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        ran.append(self.impl)
        return super().forward(*args, **kwargs)

    def weight_grad(self, *args: Any, **kwargs: Any) -> Tensor:
        ran.append(self.impl)
        return super().weight_grad(*args, **kwargs)


class Preferred(Stub):
    """What the table chooses."""

    def priority(self, problem: Problem) -> int:
        return 90


class EvenOnly(Stub):
    def rejections(self, problem: Problem) -> list[str]:
        assert problem.skew is None
        return super().rejections(problem)

    def priority(self, problem: Problem) -> int:
        return 90 if problem.skew == 1 else 10


class ForwardOnly(Preferred):
    """It says itself that it is slow backward."""

    asked: ClassVar[list[str]] = []

    def rejections(self, problem: Problem) -> list[str]:
        self.asked.append(problem.direction)
        return []

    def priority(self, problem: Problem) -> int:
        return 90 if problem.direction == "forward" else 10


class Refusing(Stub):
    """It has changed its mind since it was measured."""

    def rejections(self, problem: Problem) -> list[str]:
        return ["closed today"]


class Missing(Stub):
    """It says yes, but its kernel is not there."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError("no kernel for sm_89")


class Faulty(Stub):
    """Half of its kernels fail."""

    def weight_grad(self, *args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("out of\nluck")


class Wrong(Stub):
    """One row of its result is wrong."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        result = super().forward(*args, **kwargs)
        result[-1] *= 1.1
        return result


class Unwritten(Stub):
    """It leaves a row as it was."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        result = super().forward(*args, **kwargs)
        result[-1] = torch.nan
        return result


class Shapeless(Stub):
    """It returns something else."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)[1:]


class Slow(Stub):
    """It takes a second, by the clock of these tests."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        Clock.now += 1
        return super().forward(*args, **kwargs)


class Clock:
    """Everything else takes a tenth of a millisecond."""

    now = 0.0

    def __call__(self) -> float:
        Clock.now += 1e-4
        return Clock.now


Offer = Callable[..., None]
Times = dict[str, dict[str, float]]


@pytest.fixture
def offer(distribution: Callable[..., object]) -> Iterator[Offer]:
    """Return a function that installs classes of this file as backends of the CPU, by name."""

    def offer(version: str = "1.0", **plugins: type[GroupedMatmulBackend]) -> None:
        points = {f"cpu.{impl}": f"{__name__}:{cls.__name__}" for impl, cls in plugins.items()}
        distribution("stubs", points, version=version)

    ran.clear()
    yield offer
    ran.clear()


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Replace the clocks; return the milliseconds of each implementation, by direction: 9 unless set."""
    found: Times = {}

    def interleaved(functions: list[Any], device: torch.device, *, seconds: float) -> list[float]:
        assert device == torch.device("cpu")
        assert seconds > 0
        return [found.get(f.func.__self__.impl, {}).get(direction(f), 9.0) for f in functions]

    def direction(function: Any) -> str:
        if function.func.__name__ == "weight_grad":
            return "grad_w"
        return "grad_x" if function.keywords["trans_b"] else "forward"

    monkeypatch.setattr(measure, "interleaved", interleaved)
    monkeypatch.setattr(trial, "perf_counter", Clock())
    return found


@pytest.fixture
def file(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Name a cache that is not there yet, in a folder that is not there yet."""
    path = tmp_path_factory.mktemp("home") / "cache" / "choices.json"
    monkeypatch.setenv(ENVIRONMENT, str(path))
    return path


@pytest.fixture
def tuned(offer: Offer, times: Times, file: Path) -> Tuning:
    """Tune where the table prefers one backend and the clock another."""
    offer(preferred=Preferred, quick=Stub)
    times["quick"] = dict.fromkeys(DIRECTIONS, 1.0)
    return autotune(PROBLEM)


def operands(rows: int = 64, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, list[int]]:
    return torch.ones(rows, 8, dtype=dtype), torch.ones(4, 8, 16, dtype=dtype), [1, 2, 0, rows - 3]


def impls(rows: int = 64, **kwargs: Any) -> list[str]:
    """Return the implementations of forward, grad_x and grad_w."""
    ran.clear()
    x, weight, sizes = operands(rows)
    gmm(x.requires_grad_(), weight.requires_grad_(), sizes, **kwargs).sum().backward()
    return ran[:]


def chosen(problem: Problem = PROBLEM) -> tuple[str, str]:
    explanation = explain("cpu", problem)
    return str(explanation.chosen), explanation.source


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


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


# --- what it holds for -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "groups", "rounded"),
    [(64, 4, 16), (46, 4, 16), (90, 4, 16), (91, 4, 32), (45, 4, 8), (1, 32, 1 / 32), (0, 4, 0), (4, 0, 0)],
)
def test_rows_of_a_group_are_rounded(rows: int, groups: int, rounded: float) -> None:
    assert Signature.of(replace(PROBLEM, rows=rows, groups=groups)).rows_per_group == rounded


@pytest.mark.usefixtures("tuned")
def test_a_choice_holds_for_about_as_many_rows() -> None:
    for rows in (46, 64, 90):
        assert impls(rows) == ["quick"] * 3
        assert chosen(replace(PROBLEM, rows=rows)) == ("cpu.quick", "cache")
    others: list[dict[str, Any]] = [
        {"rows": 91},
        {"groups": 3},
        {"k": 7},
        {"n": 17},
        {"dtype": torch.float64},
    ]
    for other in others:
        assert chosen(replace(PROBLEM, **other)) == ("cpu.preferred", "table")


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize("field", Machine._fields)
def test_a_choice_is_of_its_device_and_versions(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Machine.of(PROBLEM)
    monkeypatch.setattr(Machine, "of", lambda problem: here._replace(**{field: "another"}))
    assert chosen() == ("cpu.preferred", "table")


@pytest.mark.usefixtures("tuned")
def test_a_choice_is_of_its_backends_version(offer: Offer) -> None:
    offer(version="1.1", preferred=Preferred, quick=Stub)
    assert chosen() == ("cpu.preferred", "table")


@pytest.mark.usefixtures("tuned")
def test_a_backend_that_is_gone_is_not_chosen(offer: Offer) -> None:
    offer(preferred=Preferred)
    assert impls() == ["preferred"] * 3
    assert "quick" not in str(explain("cpu", PROBLEM))


@pytest.mark.usefixtures("tuned")
def test_a_backend_that_refuses_now_is_named(
    offer: Offer, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    offer(preferred=Preferred, quick=Refusing)
    assert impls() == ["preferred"] * 3
    report = str(explain("cpu", PROBLEM))
    assert f"  cpu.quick: refused, though named by the cache {file}\n    - closed today" in report
    assert report.splitlines()[0].endswith("(automatic choice, from the backends' own table)")
    assert warnings(caplog) == [
        "grouped matmul on cpu (float32) falls back to cpu.preferred, since these refuse:\n"
        "  cpu.quick: closed today"
    ]


@pytest.mark.usefixtures("tuned")
def test_a_kernel_that_is_gone_sends_the_call_to_the_table(offer: Offer, tmp_path: Path) -> None:
    offer(preferred=Preferred, quick=Missing)
    assert impls() == ["preferred"] * 3
    assert "its kernel raised NotImplementedError" in str(explain("cpu", PROBLEM))
    save_choices(tmp_path / "run.json")
    assert "cpu.quick" not in (tmp_path / "run.json").read_text()


@pytest.mark.usefixtures("tuned")
def test_what_is_asked_for_by_name_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GMM_REGISTRY_BACKEND", "any.eager")
    assert chosen() == ("any.eager", "environment")
    with use_backend("preferred"):
        assert chosen() == ("cpu.preferred", "use_backend")
        assert impls() == ["preferred"] * 3
        assert impls(backend="quick") == ["quick"] * 3


@pytest.mark.usefixtures("tuned")
def test_who_chose_is_printed_and_logged(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gmm_registry"):
        impls()
    assert [record.getMessage() for record in caplog.records] == [
        f"grouped matmul on cpu (float32): cpu.quick, from the cache {file}"
    ]
    first, *rest = str(explain("cpu", PROBLEM)).splitlines()
    assert first == f"{PROBLEM} (automatic choice, from the cache {file})"
    assert rest[:2] == ["  cpu.preferred: accepted, priority 90", "  cpu.quick: chosen, priority 50"]


# --- the file --------------------------------------------------------------------------------------


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


def valid(**changes: object) -> dict[str, object]:
    """Return an entry of a file, changed."""
    entry: dict[str, object] = {
        **Signature.of(PROBLEM)._asdict(),
        **Machine.of(PROBLEM)._asdict(),
        "backend": "cpu.quick",
        "distribution": "stubs 1.0",
        "source": "tuned",
        "ms": 1.0,
    }
    return {**entry, **changes}


def document(*entries: object) -> bytes:
    return json.dumps({"format": records._FORMAT, "choices": entries}).encode()


DAMAGED = {
    "empty": b"",
    "not JSON": b'{"format": "gmm_registry choices 1", "choices": [',
    "binary": bytes(range(256)),
    "deep": b"[" * 100_000,
    "another document": b'{"name": "left-pad", "version": "1.3.0"}',
    "a list": b"[]",
    "a later format": b'{"format": "gmm_registry choices 2", "choices": []}',
    "no choices": json.dumps({"format": records._FORMAT}).encode(),
    "an entry that is none": document(3),
    "a field missing": document({"device": "cpu"}),
    "a field of another type": document(valid(groups=[4])),
    "a field too many": document(valid(extra=1)),
    "a key that is none": document(valid(backend="quick")),
    "a key for another device": document(valid(backend="cuda.quick")),
}


def damage(path: Path, kind: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(DAMAGED[kind])


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


# --- runs that are repeated ------------------------------------------------------------------------


@pytest.fixture
def run(tuned: Tuning, file: Path, tmp_path: Path) -> Path:
    """Save the choices of a run, and forget everything else: the next run would go by the table."""
    path = tmp_path / "run.json"
    impls()
    impls(rows=4096)
    save_choices(path)
    file.unlink()
    refresh()
    return path


def test_a_run_is_repeated(run: Path) -> None:
    assert impls() == ["preferred"] * 3
    use_choices(run)
    assert impls() == ["quick"] * 3
    explanation = explain("cpu", replace(PROBLEM, rows=50))
    assert (explanation.source, explanation.place) == ("file", str(run))
    assert str(explanation).startswith(
        f"float32, 50 rows, weight (4, 8, 16) on cpu (asked for by name in {run}: cpu.quick)\n"
    )
    assert chosen(replace(PROBLEM, rows=4096)) == ("cpu.preferred", "file")
    assert chosen(replace(PROBLEM, k=9)) == ("cpu.preferred", "table")
    with use_backend("eager"):
        assert chosen() == ("any.eager", "use_backend")
    refresh()
    assert chosen() == ("cpu.preferred", "table")


def test_the_file_of_a_run_says_where_each_choice_came_from(run: Path, tmp_path: Path) -> None:
    entries = [(c.signature.direction, c.backend.impl, c.source) for c in records.read(run)]
    assert sorted(entries) == sorted(
        (direction, *found)
        for direction in DIRECTIONS
        for found in (("quick", "cache"), ("preferred", "table"))
    )
    assert {c.distribution for c in records.read(run)} == {"stubs 1.0"}
    assert {c.machine for c in records.read(run)} == {Machine.of(PROBLEM)}
    use_choices(run)
    impls()
    save_choices(tmp_path / "again.json")
    again = records.read(tmp_path / "again.json")
    assert [(c.backend.impl, c.source) for c in again] == [("quick", "file")] * 3


def test_what_was_measured_since_takes_the_place_of_what_was_chosen(
    offer: Offer, times: Times, tmp_path: Path
) -> None:
    offer(preferred=Preferred, quick=Stub)
    times["quick"] = dict.fromkeys(DIRECTIONS, 1.0)
    impls(), autotune(PROBLEM), impls()
    save_choices(tmp_path / "run.json")
    assert {choice.backend.impl for choice in records.read(tmp_path / "run.json")} == {"quick"}


def test_what_is_repeated_takes_the_place_of_what_was_chosen(run: Path, tmp_path: Path) -> None:
    impls()
    use_choices(run)
    save_choices(tmp_path / "again.json")
    assert records.read(tmp_path / "again.json") == []
    impls()
    save_choices(tmp_path / "again.json")
    assert {choice.backend.impl for choice in records.read(tmp_path / "again.json")} == {"quick"}


def test_two_threads_may_forget_a_choice_at_once(offer: Offer, tmp_path: Path) -> None:
    def outdated(signature: Signature, backend: BackendKey) -> bool:
        pins.forget()  # as the other thread does
        return True

    impls()
    pins.unmake(outdated)
    save_choices(tmp_path / "run.json")
    assert records.read(tmp_path / "run.json") == []


class Overtaken(Preferred):
    """While it is asked, another thread finds that it has no kernel."""

    def priority(self, problem: Problem) -> int:
        if not verdicts.refused_late:
            choice.refuse(self.key, problem, "its kernel is gone")
        return 90


def test_a_choice_that_is_outdated_once_made_is_made_again(offer: Offer, tmp_path: Path) -> None:
    offer(overtaken=Overtaken, other=Stub)
    assert impls() == ["other"] * 3
    save_choices(tmp_path / "run.json")
    assert {choice.backend.impl for choice in records.read(tmp_path / "run.json")} == {"other"}


def test_a_late_refusal_is_of_one_device(offer: Offer) -> None:
    offer(stub=Stub)
    key, first, second = BackendKey("cpu", "stub"), replace(PROBLEM, index=0), replace(PROBLEM, index=None)
    choice.refuse(key, first, "no kernel for sm_89")
    refused = verdicts.judge(key, first)
    assert isinstance(refused, Rejected)
    assert refused.reasons == ("no kernel for sm_89",)
    assert isinstance(verdicts.judge(key, second), Accepted)
    choice.forgive([key], second)
    assert isinstance(verdicts.judge(key, first), Rejected)
    choice.forgive([key], first)
    assert isinstance(verdicts.judge(key, replace(PROBLEM, index=0)), Accepted)


def test_a_repeated_choice_comes_before_the_cache(run: Path, times: Times) -> None:
    times["preferred"] = dict.fromkeys(DIRECTIONS, 0.5)
    autotune(PROBLEM)
    assert impls() == ["preferred"] * 3
    use_choices(run)
    assert impls() == ["quick"] * 3


@pytest.mark.parametrize(
    ("plugins", "reason"),
    [({}, "no installed package offers it"), ({"quick": Refusing}, "cpu.quick: closed today")],
)
def test_a_choice_that_cannot_be_repeated_raises(
    run: Path, offer: Offer, plugins: dict[str, type[Stub]], reason: str
) -> None:
    offer(preferred=Preferred, **plugins)
    use_choices(run)
    with pytest.raises(BackendUnavailableError) as caught:
        impls()
    message = str(caught.value)
    assert message.startswith(f"backend 'cpu.quick', asked for by name in {run}, cannot compute {PROBLEM}:")
    assert reason in message
    assert ran == []
    explanation = explain("cpu", PROBLEM)
    assert explanation.chosen is None
    assert reason.removeprefix("cpu.quick: ") in str(explanation)


def test_a_kernel_that_cannot_be_repeated_raises(run: Path, offer: Offer) -> None:
    offer(preferred=Preferred, quick=Missing)
    use_choices(run)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="no kernel for sm_89"):
            impls()


class FewRows(Preferred):
    """It takes 60 rows, and not 64."""

    def rejections(self, problem: Problem) -> list[str]:
        return [] if problem.rows <= 60 else [f"{problem.rows} rows > 60"]


def test_what_rounding_puts_together_is_repeated_too(offer: Offer, tmp_path: Path) -> None:
    offer(few=FewRows, stub=Stub)
    assert (impls(60), impls(64)) == (["few"] * 3, ["stub"] * 3)
    save_choices(tmp_path / "run.json")
    refresh()
    use_choices(tmp_path / "run.json")
    assert (impls(60), impls(64)) == (["few"] * 3, ["stub"] * 3)
    assert explain("cpu", PROBLEM).request == "cpu.few or cpu.stub"


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_malformed_file_is_refused_and_changes_nothing(run: Path, tmp_path: Path, kind: str) -> None:
    use_choices(run)
    other = tmp_path / "other.json"
    damage(other, kind)
    with pytest.raises(ValueError, match=r"other\.json is no file of choices: "):
        use_choices(other)
    assert chosen() == ("cpu.quick", "file")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        use_choices(tmp_path / "nothing.json")
    with pytest.raises(OSError, match="nowhere"):
        save_choices(tmp_path / "nowhere" / "run.json")


# --- the command line ------------------------------------------------------------------------------


def command(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


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
