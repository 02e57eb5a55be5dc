"""The clock, the groups and the roofline. No test looks at how long anything took."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from gmm_registry import measure
from gmm_registry.measure import DISTRIBUTIONS, Ceilings, ceilings, group_sizes, interleaved


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless a function lets time pass: ``clock(name, ms)`` makes one."""
    now, calls = [0], []
    monkeypatch.setattr(measure, "perf_counter_ns", lambda: now[0])

    def make(name, *ms):
        def function():
            calls.append(name)
            now[0] += int(ms[min(calls.count(name), len(ms)) - 1] * 1e6)

        return function

    make.calls = calls
    return make


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("rows", "groups"), [(0, 3), (1, 1), (7, 3), (512, 128), (5, 64), (65536, 256)])
def test_groups_sum_to_the_rows_and_are_the_same_each_time(distribution, rows, groups):
    sizes = group_sizes(distribution, rows, groups, seed=3)
    assert len(sizes) == groups
    assert sum(sizes) == rows
    assert min(sizes) >= 0
    assert sizes == group_sizes(distribution, rows, groups, seed=3)


def test_uniform_is_as_equal_as_can_be():
    assert group_sizes("uniform", 11, 4) == [3, 3, 3, 2]


def test_zipf_gives_each_rank_its_share():
    sizes = sorted(group_sizes("zipf", 100_000, 8), reverse=True)
    harmonic = sum(1 / rank for rank in range(1, 9))
    assert sizes == pytest.approx([100_000 / rank / harmonic for rank in range(1, 9)], rel=0.05)


@pytest.mark.parametrize("groups", [8, 9, 256])
def test_half_of_the_groups_are_empty_and_not_the_first_half(groups):
    sizes = group_sizes("half_empty", 100_000, groups)
    assert sizes.count(0) == groups // 2
    assert any(sizes[: groups // 2])


def test_another_seed_draws_other_groups():
    assert group_sizes("zipf", 1000, 16, seed=0) != group_sizes("zipf", 1000, 16, seed=1)


def test_an_unknown_distribution_is_named():
    with pytest.raises(ValueError, match="no distribution 'ziph'; known: uniform, zipf, half_empty"):
        group_sizes("ziph", 1, 1)


def test_medians_without_the_rounds_that_warm_up(clock):
    # Two calls warm up; of the five that count the median is 4.
    slow, fast = clock("slow", 900, 500, 9, 4, 1, 4, 7), clock("fast", 800, 2)
    assert interleaved([slow, fast], "cpu", seconds=0) == [4, 2]


def test_every_function_is_called_once_a_round_and_each_is_first_in_turn(clock):
    interleaved([clock(name, 1) for name in "abc"], "cpu", seconds=0)
    rounds = ["".join(clock.calls[at : at + 3]) for at in range(0, len(clock.calls), 3)]
    assert rounds == ["abc", "bca", "cab", "abc", "bca", "cab", "abc"]


@pytest.mark.parametrize(("seconds", "rounds"), [(0, 5), (0.001, 5), (0.1, 20), (3, 600)])
def test_as_many_rounds_as_fit_and_at_least_five(clock, seconds, rounds):
    interleaved([clock("a", 2), clock("b", 3)], "cpu", seconds=seconds)
    warm_up = 2
    assert clock.calls.count("a") == clock.calls.count("b") == warm_up + rounds


def test_a_function_that_slows_down_does_not_run_on(clock):
    interleaved([clock("a", *[1] * 7, *[50] * 1000)], "cpu", seconds=1)
    # After 5 rounds of 1 ms the budget looks like 995 more; a look after 100 of 50 ms ends it.
    assert clock.calls.count("a") == 2 + 5 + 100


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_a_time_that_is_none(clock, seconds):
    with pytest.raises(ValueError, match=f"must be finite and not negative, not {seconds}"):
        interleaved([clock("a", 1)], "cpu", seconds=seconds)
    assert clock.calls == []


def test_the_longest_time_is_one(clock):
    class EnoughError(Exception):
        pass

    def function():
        clock.calls.append("a")
        if len(clock.calls) >= 50:
            raise EnoughError

    ticking = clock("b", 1)
    with pytest.raises(EnoughError):
        interleaved([function, ticking], "cpu", seconds=1e308)


def test_nothing_to_time():
    assert interleaved([], "cpu") == []


def test_the_limit_is_arithmetic_or_traffic():
    sizes, k, n = [3, 0, 1], 8, 16
    flops = 2 * 4 * 8 * 16
    traffic = 2 * (4 * (8 + 16) + 2 * 8 * 16)  # bytes of bf16; the empty group's matrix stays where it is
    written = 2 * (4 * (8 + 16) + 3 * 8 * 16)  # its gradient is written
    slow_arithmetic, slow_memory = Ceilings(1.0, 1e9), Ceilings(1e9, 1.0)
    assert slow_arithmetic.least_seconds(sizes, k, n, torch.bfloat16) == flops
    assert slow_memory.least_seconds(sizes, k, n, torch.bfloat16) == traffic
    assert slow_memory.least_seconds(sizes, k, n, torch.bfloat16, weight_grad=True) == written
    assert slow_memory.least_seconds(sizes, k, n, torch.float32) == 2 * traffic


def test_ceilings_are_operations_and_bytes_over_the_times(monkeypatch):
    def interleaved(functions, device, *, seconds):
        for function in functions:
            function()
        return [2.0, 4.0]

    monkeypatch.setattr(measure, "interleaved", interleaved)
    found = ceilings("cpu", torch.float32)
    assert found.flops_per_second == pytest.approx(2 * 1024**3 / 2e-3)
    assert found.bytes_per_second == pytest.approx(2 * 2**28 / 4e-3)


def test_measuring_needs_torch_only():
    script = """
import sys, types
import torch
package = types.ModuleType("gmm_registry")
package.__path__ = [{path!r}]
sys.modules["gmm_registry"] = package
import gmm_registry.measure
ours = [name for name in sys.modules if name.startswith(("gmm_registry.", "gmm_backends"))]
assert ours == ["gmm_registry.measure"], ours
"""
    path = measure.__file__.rpartition("/")[0]
    subprocess.run([sys.executable, "-c", script.format(path=path)], check=True)


class Device:
    """What torch has for an accelerator, played with a clock of its own."""

    def __init__(self):
        self.now, self.waits, self.flushed = 0, 0, []

    def work(self, ms):
        self.now += ms

    def synchronize(self, device):
        self.waits += 1

    def current_stream(self, device):
        return "stream"

    def get_device_properties(self, device):
        return SimpleNamespace(L2_cache_size=2**29)

    def empty(self, size, **kwargs):
        def zero():
            self.flushed.append(size)
            self.work(ms=100)

        return SimpleNamespace(zero_=zero)

    def Event(self, *, enable_timing):  # noqa: N802
        assert enable_timing
        event = SimpleNamespace()

        def record(stream):
            assert stream == "stream"
            event.at = self.now

        def elapsed_time(end):
            assert self.waits  # no event is read before the device was waited for
            return end.at - event.at

        event.record, event.elapsed_time = record, elapsed_time
        return event


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(torch, "empty", device.empty)
    return device


def test_an_accelerator_is_timed_by_its_events_and_waited_for_once_a_batch(device):
    found = interleaved([lambda: device.work(3), lambda: device.work(7)], "cuda", seconds=0)
    assert found == [3, 7]  # the flush stands outside
    assert device.waits == 2  # after the warm-up and after the five rounds
    assert device.flushed == [2 * 2**29] * 2 * (2 + 5)  # twice the cache


def test_the_cache_is_left_alone_on_request(device):
    interleaved([lambda: None], "cuda", seconds=0, flush=False)
    assert device.flushed == []
