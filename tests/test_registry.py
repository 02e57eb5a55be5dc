"""How a backend is chosen, what is said about the choice, and what holds after it.

A test that comes from a fault somebody met names where it was reported.
"""

import asyncio
import contextvars
import gc
import itertools
import logging
import re
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from gmm_backends.eager import Eager
from gmm_registry import (
    Accepted,
    BackendKey,
    BackendUnavailableError,
    BatchSizes,
    GroupedMatmulBackend,
    Problem,
    Rejected,
    UnknownBackendError,
    explain,
    get_backend,
    gmm,
    list_backends,
    use_backend,
)
from gmm_registry.registry import choice, refresh, request
from gmm_registry.registry.explanation import Explanation, rank, winner
from gmm_registry.registry.request import ENVIRONMENT, requested

pytestmark = pytest.mark.usefixtures("fresh_registry")

CPU_PROBLEM = Problem("cpu", None, torch.float32, rows=3, groups=2, k=8, n=16)
ran: list[tuple[str, str]] = []  # the implementation and the method of every call of a stub


class Stub(Eager):
    """The loop over groups, noting what is called; it comes before the backends of this repository."""

    def priority(self, problem: Problem) -> int:
        return 50

    def rejections(self, problem: Problem) -> list[str]:
        ran.append((self.impl, "rejections"))
        return super().rejections(problem)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        ran.append((self.impl, "forward"))
        return super().forward(*args, **kwargs)

    def weight_grad(self, *args: Any, **kwargs: Any) -> Tensor:
        ran.append((self.impl, "weight_grad"))
        return super().weight_grad(*args, **kwargs)


class Better(Stub):
    """It comes before a stub."""

    def priority(self, problem: Problem) -> int:
        return 90


class Picky(Better):
    """It refuses everything, for two reasons."""

    def rejections(self, problem: Problem) -> list[str]:
        return [f"{problem.rows} rows < 4096", f"{problem.dtype} is not torch.float8_e4m3fn"]


class ForwardMissing(Better):
    """It says yes, but its kernel is not there."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        ran.append((self.impl, "forward"))
        raise NotImplementedError("no kernel for sm_89")


class BackwardMissing(Better):
    """It says yes, but half of its kernels are not there."""

    def weight_grad(self, *args: Any, **kwargs: Any) -> Tensor:
        ran.append((self.impl, "weight_grad"))
        raise NotImplementedError("no kernel for sm_89")


class Faulty(Better):
    """Its kernel fails."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("an illegal memory access was encountered")


Offer = Callable[..., None]


@pytest.fixture
def offer(distribution: Callable[..., object]) -> Iterator[Offer]:
    """Return a function that installs classes of this file as backends of the CPU, by name."""

    def offer(**plugins: type[GroupedMatmulBackend]) -> None:
        distribution("stubs", {f"cpu.{impl}": f"{__name__}:{cls.__name__}" for impl, cls in plugins.items()})

    ran.clear()
    yield offer
    ran.clear()


@pytest.fixture
def stubs(offer: Offer) -> None:
    """Install four stubs, of which "best" is the automatic choice."""
    offer(a=Stub, b=Stub, c=Stub, best=Better)


def operands(rows: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, list[int]]:
    return torch.ones(rows, 8, dtype=dtype), torch.ones(2, 8, 16, dtype=dtype), [1, rows - 1]


def products() -> list[tuple[str, str]]:
    """Return the calls of kernels since the last time."""
    calls = [call for call in ran if call[1] != "rejections"]
    ran.clear()
    return calls


def impl_of(**kwargs: Any) -> str:
    """Return the implementation that a call of gmm runs on."""
    products()
    gmm(*operands(), **kwargs)
    ((impl, _),) = products()
    return impl


# --- who is asked ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("stubs")
def test_argument_before_block_before_environment_before_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    assert impl_of() == get_backend("cpu").impl == "best"
    monkeypatch.setenv(ENVIRONMENT, "a")
    assert impl_of() == get_backend("cpu").impl == explain("cpu").request == "a"
    with use_backend("b"):
        assert impl_of() == get_backend("cpu").impl == explain("cpu").request == "b"
        assert impl_of(backend="c") == get_backend("cpu", "c").impl == "c"


@pytest.mark.usefixtures("stubs")
@pytest.mark.parametrize(
    ("spec", "impl"),
    [
        ("a", "a"),
        ("cpu.a", "a"),
        ("cuda=triton,cpu=a", "a"),
        (" cpu = a , b", "a"),
        ("cuda=triton,a", "a"),
        ("cuda=triton", "best"),
        ("", "best"),
    ],
)
def test_grammar_of_the_environment(spec: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, spec)
    assert impl_of() == impl


@pytest.mark.parametrize(
    "spec",
    ["=", "=eager", "cpu=", "eager,", ",eager", "a,eager", "cpu=a,cpu=eager", "cpu:0=eager", "x=cpu=eager"],
)
def test_malformed_requests_are_named(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is read in half and then ignored."""
    with pytest.raises(UnknownBackendError, match=re.escape(repr(spec))):
        use_backend(spec).__enter__()
    monkeypatch.setenv(ENVIRONMENT, spec)
    with pytest.raises(UnknownBackendError, match=re.escape(repr(spec))):
        gmm(*operands())


@pytest.mark.parametrize("spec", ["eagre", "cpu=eagre", "eager,npu=eagre", ""])
def test_a_block_checks_its_name_at_entry(spec: str) -> None:
    with pytest.raises(UnknownBackendError, match=repr(spec.rpartition("=")[2])), use_backend(spec):
        pytest.fail("the block was entered")


@pytest.mark.usefixtures("stubs")
def test_blocks_nest_and_end() -> None:
    with use_backend("a"):
        with suppress(ZeroDivisionError), use_backend("b"):
            assert impl_of() == "b"
            raise ZeroDivisionError
        assert impl_of() == "a"
    assert impl_of() == "best"


@pytest.mark.usefixtures("stubs")
def test_a_block_changes_only_the_devices_it_names(distribution: Callable[..., object]) -> None:
    """What the block around it asks for on other devices still holds."""
    distribution("acme", {"cuda.fast": "no_such_module:Fast"})
    with use_backend("a"):
        with use_backend("cuda=fast"):
            assert (impl_of(), explain("cuda").request) == ("a", "fast")
            with use_backend("cpu=b"):
                assert (impl_of(), explain("cuda").request) == ("b", "fast")
            with use_backend("eager"):
                assert (explain("cpu").request, explain("cuda").request) == ("eager", "eager")
        assert impl_of() == "a"


@pytest.mark.usefixtures("stubs")
def test_a_block_is_of_its_thread() -> None:
    with use_backend("a"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: get_backend("cpu").impl).result() == "best"


@pytest.mark.usefixtures("stubs")
def test_a_block_is_of_its_task() -> None:
    async def task(name: str) -> str:
        with use_backend(name):
            await asyncio.sleep(0)  # the other one enters its block
            return get_backend("cpu").impl

    async def both() -> list[str]:
        return await asyncio.gather(task("a"), task("b"))

    assert asyncio.run(both()) == ["a", "b"]


# --- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["argument", "block", "environment"])
def test_what_is_asked_for_by_name_never_falls_back(
    offer: Offer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(picky=Picky, stub=Stub)
    if how == "environment":
        monkeypatch.setenv(ENVIRONMENT, "picky")
    block = use_backend("picky") if how == "block" else nullcontext()
    argument = "picky" if how == "argument" else None
    with block, pytest.raises(BackendUnavailableError) as caught:
        gmm(*operands(), backend=argument)
    assert str(caught.value).splitlines() == [
        "backend 'picky', asked for by name, cannot compute float32, 3 rows, weight (2, 8, 16) on cpu:",
        "  cpu.picky: 3 rows < 4096",
        "  cpu.picky: torch.float32 is not torch.float8_e4m3fn",
    ]
    assert products() == []


def test_an_unknown_name_lists_the_known_ones(distribution: Callable[..., object]) -> None:
    distribution("acme", {"cuda.fast": "no_such_module:Fast"})
    known = ", ".join(map(str, list_backends("cpu")))
    with pytest.raises(UnknownBackendError) as caught:
        get_backend("cpu", "eagre")
    assert str(caught.value) == f"no backend 'eagre' for cpu; known: {known}; did you mean 'eager'?"
    with pytest.raises(UnknownBackendError, match=r"there is cuda\.fast for another device"):
        gmm(*operands(), backend="fast")


def test_one_name_for_any_device_and_for_this_one(distribution: Callable[..., object]) -> None:
    """The one made for the device is meant; the other can be had by its full name."""
    value = f"{__name__}:Stub"
    distribution("acme", {"any.x": value, "cpu.x": value})
    assert get_backend("cpu", "x").key == BackendKey("cpu", "x")
    assert get_backend("cpu", "any.x").key == BackendKey("any", "x")


def test_a_bound_backend_knows_its_names() -> None:
    backend = get_backend(torch.device("cpu"), "eager")
    assert (backend.device, backend.impl, str(backend.key)) == ("cpu", "eager", "any.eager")


def test_a_bound_backend_refuses_another_device() -> None:
    x, weight, counts = operands()
    with pytest.raises(
        ValueError, match=r"bound to cpu, but x is on meta: use get_backend\('meta', 'eager'\)"
    ):
        get_backend("cpu", "eager").gmm(x.to("meta"), weight.to("meta"), counts)


@pytest.mark.skipif(hasattr(torch, "npu"), reason="torch_npu is imported")
def test_an_absent_device_is_explained() -> None:
    """Every candidate is listed, each with its reason."""
    with pytest.raises(BackendUnavailableError, match="no backend can run on npu") as caught:
        get_backend("npu")
    for key in list_backends("npu"):
        assert f"\n  {key}: " in str(caught.value)
    assert "knows no device 'npu' here" in str(caught.value)


# --- the choice, without any hardware --------------------------------------------------------------


def test_rank_and_winner() -> None:
    """Priority decides, then the device before any, then the name, whatever order they come in."""
    broken = Rejected(BackendKey("cuda", "broken"), 90, ("no",))
    first = Accepted(BackendKey("cuda", "a"), 50)
    second = Accepted(BackendKey("cuda", "b"), 50)
    general = Accepted(BackendKey("any", "a"), 50)
    last = Accepted(BackendKey("any", "eager"), 0)
    for order in itertools.permutations([broken, first, second, general, last]):
        assert rank(order) == (broken, first, second, general, last)
    assert winner([broken, first, last]) == first
    assert winner([broken]) is None
    assert winner([]) is None


def test_explanation_prints() -> None:
    verdicts = (
        Rejected(
            BackendKey("cuda", "fast"), 90, ("compute capability 8.0 < 9.0", "n = 12 is not a multiple of 16")
        ),
        Accepted(BackendKey("cuda", "good"), 50),
        Accepted(BackendKey("any", "eager"), 0),
    )
    assert str(Explanation("a problem", verdicts, "", BackendKey("cuda", "good"))) == (
        "a problem (automatic choice, from the backends' own table)\n"
        "  cuda.fast: refused\n"
        "    - compute capability 8.0 < 9.0\n"
        "    - n = 12 is not a multiple of 16\n"
        "  cuda.good: chosen, priority 50\n"
        "  any.eager: accepted, priority 0"
    )
    assert str(Explanation("a problem", verdicts[:1], "fast", None, "environment")) == (
        "a problem (asked for by name in GMM_REGISTRY_BACKEND: fast)\n"
        "  cuda.fast: refused\n"
        "    - compute capability 8.0 < 9.0\n"
        "    - n = 12 is not a multiple of 16\n"
        "  nothing can run this"
    )


def test_explain_gives_every_candidate_in_order(offer: Offer) -> None:
    offer(picky=Picky, stub=Stub)
    problem = Problem.of(*operands(dtype=torch.float64)[:2])
    for explanation in (explain("cpu"), explain("cpu", problem)):
        keys = [verdict.key for verdict in explanation.verdicts]
        assert sorted(keys) == list_backends("cpu")
        assert list(map(str, keys[:2])) == ["cpu.picky", "cpu.stub"]
        assert str(explanation.chosen) == "cpu.stub"
    assert explanation.subject == "float64, 3 rows, weight (2, 8, 16) on cpu"
    reasons = {str(v.key): v.reasons for v in explanation.verdicts if isinstance(v, Rejected)}
    assert reasons["cpu.picky"] == ("3 rows < 4096", "torch.float64 is not torch.float8_e4m3fn")
    assert any("torch.float64" in reason for reason in reasons["any.torch_grouped_mm"])


def test_explain_says_what_a_call_would_do(offer: Offer) -> None:
    """Where a name is asked for, it is that or nothing, as for the call."""
    offer(picky=Picky, stub=Stub)
    with use_backend("picky"):
        assert explain("cpu").chosen is None
        assert "nothing can run this" in str(explain("cpu", CPU_PROBLEM))
    with use_backend("eager"):
        assert str(explain("cpu", CPU_PROBLEM).chosen) == "any.eager"


@pytest.mark.usefixtures("stubs")
def test_explain_says_who_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    def by(**kwargs: Any) -> tuple[str, str]:
        whole, one = (explain("cpu", problem, **kwargs) for problem in (None, CPU_PROBLEM))
        assert whole.source == one.source
        first, second = (str(found).splitlines()[0].rpartition(" (")[2] for found in (whole, one))
        assert first == second
        return one.source, first

    assert by() == ("table", "automatic choice, from the backends' own table)")
    monkeypatch.setenv(ENVIRONMENT, "a")
    environment = "environment", "asked for by name in GMM_REGISTRY_BACKEND: a)"
    assert by() == environment
    with use_backend("cuda=eager"):
        assert by() == environment
    with use_backend("b"):
        assert by() == ("use_backend", "asked for by name in use_backend: b)")
        assert by(backend="c") == ("argument", "asked for by name in the argument backend: c)")


def test_explain_of_a_device_names_what_no_dtype_changes(offer: Offer) -> None:
    """A reason that holds for one dtype only is not why a backend cannot run there."""
    offer(picky=Picky)
    (verdict,) = [v for v in explain("cpu").verdicts if v.key.impl == "picky"]
    assert isinstance(verdict, Rejected)
    assert verdict.reasons == ("256 rows < 4096",)


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no nn.functional.grouped_mm"
)
@pytest.mark.parametrize(
    ("dtype", "slow", "n", "impl"),
    [
        (torch.bfloat16, True, 64, "eager"),
        (torch.float16, True, 64, "eager"),
        (torch.float32, True, 64, "torch_grouped_mm"),
        (torch.bfloat16, False, 64, "torch_grouped_mm"),
        (torch.bfloat16, False, 65, "eager"),
    ],
)
def test_choice_on_a_cpu(
    dtype: torch.dtype, slow: bool, n: int, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the CPU has no hardware for a dtype, and where rows would be copied, the loop is faster."""
    monkeypatch.setattr("gmm_backends.torch_grouped_mm.is_slow", lambda dtype: slow and dtype.itemsize == 2)
    chosen = explain("cpu", Problem("cpu", None, dtype, rows=256, groups=4, k=64, n=n)).chosen
    assert chosen == BackendKey("any", impl)


# --- what a choice costs and what is logged --------------------------------------------------------


def test_a_problem_is_judged_once(offer: Offer) -> None:
    """Forward and backward of one signature share one judgement."""
    offer(stub=Stub)
    x, weight, counts = operands()
    for _ in range(3):
        gmm(x.requires_grad_(), weight.requires_grad_(), counts).sum().backward()
    assert ran.count(("stub", "rejections")) == 1
    gmm(*operands(rows=4))
    assert ran.count(("stub", "rejections")) == 2


def test_a_fallback_is_logged_once_a_cause(offer: Offer, caplog: pytest.LogCaptureFixture) -> None:
    """vllm 56543: the same warning 56,264 times. Other numbers in a reason do not make it another."""
    offer(picky=Picky, stub=Stub)
    with caplog.at_level(logging.INFO, "gmm_registry"):
        for call in range(1000):
            gmm(*operands(rows=1 + call % 100))
    (pick,) = [record for record in caplog.records if record.levelno == logging.INFO]
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert pick.getMessage() == "grouped matmul on cpu (float32): cpu.stub"
    assert warning.getMessage().splitlines() == [
        "grouped matmul on cpu (float32) falls back to cpu.stub, since these refuse:",
        "  cpu.picky: 1 rows < 4096",
        "  cpu.picky: torch.float32 is not torch.float8_e4m3fn",
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, "gmm_registry"):
        gmm(*operands(dtype=torch.float64))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_what_is_asked_for_by_name_is_not_logged(offer: Offer, caplog: pytest.LogCaptureFixture) -> None:
    offer(picky=Picky, stub=Stub)
    with caplog.at_level(logging.INFO, "gmm_registry"):
        gmm(*operands(), backend="stub")
    assert caplog.records == []


# --- kernels that fail -----------------------------------------------------------------------------


def test_a_kernel_that_is_not_there_is_a_refusal(offer: Offer, caplog: pytest.LogCaptureFixture) -> None:
    """Transformers 46743: the attribute existed, the kernel did not."""
    offer(absent=ForwardMissing, stub=Stub)
    x, weight, counts = operands()
    out = gmm(x, weight, counts)
    assert products() == [("absent", "forward"), ("stub", "forward")]
    assert torch.equal(out, torch.full((3, 16), 8.0))
    gmm(x, weight, counts)
    assert products() == [("stub", "forward")]
    reason = "its kernel raised NotImplementedError: no kernel for sm_89"
    assert f"cpu.absent: refused\n    - {reason}" in str(explain("cpu", CPU_PROBLEM))
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert f"cpu.absent: {reason}" in warning.getMessage()


def test_a_backward_that_is_not_there_is_a_refusal(offer: Offer) -> None:
    offer(absent=BackwardMissing, stub=Stub)
    x, weight, counts = operands()
    gmm(x, weight.requires_grad_(), counts).sum().backward()
    assert products() == [("absent", "forward"), ("absent", "weight_grad"), ("stub", "weight_grad")]
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.tensor([1.0, 2.0]).view(2, 1, 1).expand(2, 8, 16))


def test_a_kernel_that_is_not_there_raises_by_name(offer: Offer) -> None:
    offer(absent=ForwardMissing, stub=Stub)
    with pytest.raises(NotImplementedError, match="no kernel for sm_89"):
        gmm(*operands(), backend="absent")
    with pytest.raises(NotImplementedError, match="no kernel for sm_89"):
        get_backend("cpu", "absent").gmm(*operands())


def test_a_fault_in_a_kernel_is_not_swallowed(offer: Offer) -> None:
    """It goes to nobody else, and is not held against the backend."""
    offer(faulty=Faulty, stub=Stub)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="an illegal memory access"):
            gmm(*operands())
    assert products() == []
    assert str(explain("cpu", CPU_PROBLEM).chosen) == "cpu.faulty"


# --- forward and backward --------------------------------------------------------------------------

FORWARD_AND_BACKWARD = ["forward", "forward", "weight_grad"]


@pytest.mark.usefixtures("stubs")
@pytest.mark.parametrize("asked", ["a", None])
def test_backward_stays_with_the_backend_of_the_forward(asked: str | None) -> None:
    """Whatever is asked for by then, and on whatever thread it runs."""
    x, weight, counts = operands()
    x.requires_grad_(), weight.requires_grad_()

    def forward() -> Tensor:
        products()
        with use_backend(asked) if asked else nullcontext():
            return gmm(x, weight, counts).sum()

    want = [(asked or "best", method) for method in FORWARD_AND_BACKWARD]
    forward().backward()
    assert products() == want
    out = forward()
    with use_backend("b"):
        out.backward()
    assert products() == want
    out = forward()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(out.backward).result()
    assert products() == want


@pytest.mark.usefixtures("stubs")
def test_backward_stays_when_the_environment_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, counts = operands()
    monkeypatch.setenv(ENVIRONMENT, "a")
    out = gmm(x.requires_grad_(), weight.requires_grad_(), counts).sum()
    monkeypatch.setenv(ENVIRONMENT, "b")
    out.backward()
    assert products() == [("a", method) for method in FORWARD_AND_BACKWARD]


# --- torch.compile ---------------------------------------------------------------------------------


@pytest.fixture
def compiled_run(stubs: None) -> Iterator[Callable[..., list[tuple[str, str]]]]:
    """Return a function that runs the compiled gmm, forward and backward, and returns the calls."""
    torch._dynamo.reset()
    compiled = torch.compile(gmm, fullgraph=True, backend="aot_eager")
    x, weight, counts = operands()
    sizes = torch.tensor(counts)
    x.requires_grad_(), weight.requires_grad_()

    def run(ended: Callable[[], None] = lambda: None, **kwargs: Any) -> list[tuple[str, str]]:
        products()
        out = compiled(x, weight, sizes, **kwargs)
        ended()
        torch.autograd.grad(out.sum(), (x, weight))
        return products()

    yield run
    torch._dynamo.reset()


def all_on(impl: str) -> list[tuple[str, str]]:
    return [(impl, method) for method in FORWARD_AND_BACKWARD]


def test_nothing_keeps_a_backend_that_was_forgotten() -> None:
    x, weight = torch.ones(2, 2), torch.ones(1, 2, 2)
    gmm(x, weight, [2], backend="eager")
    backend = weakref.ref(get_backend("cpu", "eager"))
    refresh()
    gc.collect()
    assert backend() is None


def test_a_choice_that_was_overtaken_by_a_change_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The change comes when the choice is made, but not yet kept."""
    refresh()
    explained, explain = [], choice._explain
    report = choice._report

    def count(*args: Any) -> Explanation:
        explained.append(1)
        return explain(*args)

    def overtake(*args: Any) -> None:
        report(*args)
        if len(explained) == 1:
            choice.changed()

    monkeypatch.setattr(choice, "_explain", count)
    monkeypatch.setattr(choice, "_report", overtake)
    for _ in range(3):
        gmm(torch.ones(2, 2), torch.ones(1, 2, 2), [2])
    assert len(explained) == 2


def test_a_block_reaches_what_was_compiled_before(compiled_run: Callable[..., Any]) -> None:
    assert compiled_run() == all_on("best")
    with use_backend("a"):
        assert compiled_run() == all_on("a")
        assert compiled_run(backend="b") == all_on("b")
    assert compiled_run() == all_on("best")
    block = use_backend("c")
    block.__enter__()
    assert compiled_run(ended=lambda: block.__exit__(None, None, None)) == all_on("c")


def test_blocks_of_other_threads_leave_no_trace_in_compiled_code(compiled_run: Callable[..., Any]) -> None:
    """What is compiled while blocks of two threads overlap must not be kept under the wrong name."""
    with ThreadPoolExecutor(1) as pool:
        theirs = use_backend("a")
        pool.submit(theirs.__enter__).result()
        compiled_run()
        with use_backend("b"):
            pool.submit(theirs.__exit__, None, None, None).result()
            assert compiled_run() == all_on("b")
        assert compiled_run() == all_on("best")
        with use_backend("a"):
            assert compiled_run() == all_on("a")


def test_a_block_that_ends_in_another_context_leaves_nothing_behind() -> None:
    """A generator that is closed elsewhere; compiled code went on with the block's backend for good."""

    def generator() -> Iterator[None]:
        with use_backend("eager"):
            yield

    opened = generator()
    contextvars.copy_context().run(next, opened)
    with pytest.raises(ValueError, match="different Context"):
        opened.close()
    assert request.scope == ""


def test_any_is_every_device() -> None:
    with use_backend("any=eager"):
        assert explain("cpu").chosen == BackendKey("any", "eager")


def test_a_result_that_breaks_the_contract_is_named(
    fresh_registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = get_backend("cpu", "eager")
    x, weight = torch.ones(2, 4), torch.ones(1, 4, 8)
    for wrong in (torch.ones(2, 3), torch.ones(2, 8, dtype=torch.float64), None):
        monkeypatch.setattr(eager, "forward", lambda *args, wrong=wrong, **kwargs: wrong)
        with pytest.raises(RuntimeError, match=r"any\.eager returned"):
            gmm(x, weight, [2], backend="eager")


def test_explain_sees_autocast() -> None:
    x, weight = torch.ones(2, 16), torch.ones(1, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert Problem.of(x, weight).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="float16"):
        Problem.of(x, weight.half())
    with pytest.raises(ValueError, match=r"\(16, 16\)"):
        Problem.of(x, weight[0])


@pytest.mark.parametrize("name", [3, None, BackendKey("any", "eager")])
def test_a_name_is_a_str(name: object) -> None:
    with pytest.raises(TypeError, match="a str such as 'eager'"), use_backend(name):  # type: ignore[arg-type]
        pass


def test_a_task_started_in_a_block_goes_by_it_after_its_end():
    x, weight = torch.ones(4, 2), torch.ones(2, 2, 3)
    with use_backend("eager"):
        context = contextvars.copy_context()
    assert requested(None, "cpu") == ""
    assert context.run(requested, None, "cpu") == "eager"
    assert context.run(gmm, x, weight, [4, 0]).shape == (4, 3)


def test_explain_knows_the_skew_if_it_gets_the_counts():
    x, weight = torch.ones(4, 2), torch.ones(2, 2, 3)
    assert Problem.of(x, weight).skew is None
    assert Problem.of(x, weight, [4, 0]).skew == 2
    assert Problem.of(x, weight, BatchSizes([2, 2])).skew == 1
