"""BatchSizes: which counts are taken, and how often they cross between host and device."""

import copy
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gmm_registry import BatchSizes, batch_sizes, gmm
from gmm_registry.accelerator import current_stream

META = torch.device("meta")


class Crossings(TorchDispatchMode):
    """Count the copies between devices. "meta" stands for any device; nothing can come back from it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.device != args[0].device:
            self.count += 1
        return out


@pytest.mark.parametrize(
    "counts",
    [[2, 0, 3], (2, 0, 3), torch.tensor([2, 0, 3]), torch.tensor([2, 0, 3], dtype=torch.int32)],
)
def test_forms(counts):
    sizes = BatchSizes(counts)
    assert len(sizes) == 3
    assert sizes.host.tolist() == [2, 0, 3]
    assert sizes.host.dtype == sizes.on("cpu").dtype == torch.int64
    assert sizes.ends("cpu").tolist() == [2, 2, 5]
    assert sizes.offsets("cpu").tolist() == [0, 2, 2, 5]
    assert sizes.ends("cpu").dtype == sizes.offsets("cpu").dtype == torch.int32
    assert repr(sizes) == "BatchSizes([2, 0, 3])"


def test_numpy_integers_are_integers():
    np = pytest.importorskip("numpy")
    assert BatchSizes(np.array([2, 0, 3])).host.tolist() == [2, 0, 3]


def test_each_form_is_made_once():
    sizes = BatchSizes([2, 0, 3])
    for form in (sizes.on, sizes.ends, sizes.offsets):
        assert form("cpu") is form(torch.device("cpu"))
    assert sizes.host is sizes.on("cpu")


def test_each_stream_has_forms_of_its_own(monkeypatch):
    """No stream waits for what another is still making, or keeps what another has freed."""
    sizes, made = BatchSizes([2, 0, 3]), []
    forms = []
    for stream in (0, 7, 0, 7):
        monkeypatch.setattr(batch_sizes, "current_stream", lambda device, stream=stream: stream)
        forms.append((sizes.ends("meta"), sizes.derived("mine", lambda: made.append(1) or object(), META)))
    assert len(made) == 2
    for first, again in (forms[::2], forms[1::2]):
        assert all(a is b for a, b in zip(first, again, strict=True))
    assert forms[0][0] is not forms[1][0]


def test_there_is_one_stream_where_torch_knows_of_none():
    for device in ("cpu", "meta", "npu:0" if hasattr(torch, "npu") else "xla:0"):
        assert current_stream(torch.device(device)) == 0


def test_the_host_counts_cross_once_for_all_forms():
    with Crossings() as crossings:
        sizes = BatchSizes([2, 0, 3])
        for _ in range(6):
            sizes.on("meta"), sizes.ends("meta"), sizes.offsets("meta")
    assert crossings.count == 1


def test_device_counts_do_not_cross_until_the_host_asks():
    counts = torch.empty(3, dtype=torch.int32, device="meta")
    with Crossings() as crossings:
        sizes = BatchSizes.from_device(counts)
        sizes.on("meta"), sizes.ends("meta"), sizes.offsets("meta"), sizes.check(5)
    assert crossings.count == 0
    with pytest.raises(NotImplementedError, match="meta"):  # the crossing itself
        _ = sizes.host


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"), reason="counts the forms that torch's grouped_mm uses"
)
def test_a_backward_finds_the_forms_of_its_forward(monkeypatch):
    made = []
    original = BatchSizes._form

    def counted(self, name, device, make):
        return original(self, name, device, lambda d: made.append(name) or make(d))

    monkeypatch.setattr(BatchSizes, "_form", counted)
    x = torch.randn(5, 8, requires_grad=True)
    up, down = torch.randn(3, 8, 16, requires_grad=True), torch.randn(3, 16, 8, requires_grad=True)
    sizes = BatchSizes([2, 0, 3])
    hidden = gmm(x, up, sizes, backend="torch_grouped_mm")
    gmm(hidden, down, sizes, backend="torch_grouped_mm").sum().backward()
    assert made == ["ends"]  # for six products


@pytest.mark.parametrize(
    ("counts", "error", "match"),
    [
        (torch.tensor([[1], [2]]), ValueError, r"shape \(2, 1\)"),
        (torch.tensor(3), ValueError, r"shape \(\)"),
        (torch.tensor([1.0]), TypeError, "torch.float32"),
        (torch.tensor([1], dtype=torch.int16), TypeError, "torch.int16"),
        (torch.tensor([True]), TypeError, "torch.bool"),
        ([1.5], TypeError, r"list \[1.5\]"),
        (None, TypeError, "NoneType"),
        (7, TypeError, "int 7"),
        ("12", TypeError, "str"),
        ({1, 2}, TypeError, "set"),
        (b"12", TypeError, "bytes"),
        (torch.tensor([1, 2]).to_sparse(), TypeError, "sparse"),
    ],
)
def test_what_is_no_count_is_refused(counts, error, match):
    """DeepGEMM 97, grouped_gemm 21: counts of another dtype or shape."""
    with pytest.raises(error, match=match):
        BatchSizes(counts)


def test_bare_counts_on_a_device_are_refused_with_a_hint():
    """DeepGEMM 97, grouped_gemm 21: counts on a device."""

    class OnDevice(torch.Tensor):
        device = torch.device("cuda", 0)

    counts = torch.tensor([1, 2]).as_subclass(OnDevice)
    with pytest.raises(ValueError, match=r"cuda:0.*BatchSizes\.from_device\(counts\)"):
        BatchSizes(counts)


def test_counts_from_a_device_are_checked_when_the_host_sees_them():
    class Away(BatchSizes):
        """Counts that say they are elsewhere until they are fetched."""

        def on(self, device):
            return self._form("counts", torch.device("cpu"), self._to)

    sizes = Away.from_device(torch.tensor([2, 2]))
    sizes._forms["checked"] = 5
    with pytest.raises(ValueError, match="sum to 4, but x has 5 rows"):
        _ = sizes.host


def test_rows_that_int32_offsets_cannot_count_are_refused():
    with pytest.raises(ValueError, match="at most 2147483647"):
        BatchSizes(torch.tensor([2**31])).check(2**31)
    for size in (2**31, 2**70, -(2**70)):
        with pytest.raises(ValueError, match="beyond 2147483647"):
            BatchSizes([size])


def test_lists_are_host_counts_whatever_the_default_device_is():
    torch.set_default_device("meta")
    try:
        assert BatchSizes([2, 0, 3]).counts.is_cpu
    finally:
        torch.set_default_device(None)


def test_ends_are_recognised():
    with pytest.raises(ValueError, match="sum to 9, but x has 5 rows; they look like the ends"):
        BatchSizes([2, 2, 5]).check(5)


def test_other_rows_are_checked_anew():
    """pytorch 154557, torchtitan 1237: counts that were right for one x are wrong for another."""
    sizes, weight = BatchSizes([2, 0, 3]), torch.randn(3, 8, 16)
    gmm(torch.randn(5, 8), weight, sizes)
    with pytest.raises(ValueError, match="sum to 5, but x has 64 rows"):
        gmm(torch.randn(64, 8), weight, sizes)


def test_copies_work():
    sizes = BatchSizes([2, 0, 3])
    sizes.ends("cpu")
    for clone in (copy.deepcopy(sizes), pickle.loads(pickle.dumps(sizes))):
        assert clone.offsets("cpu").tolist() == [0, 2, 2, 5]


@pytest.mark.parametrize(
    ("counts", "skew"),
    [([4, 4, 4], 1), ([5, 4, 4], 2), ([8, 0], 2), ([9, 0, 0], 4), ([0, 0], 1), ([7], 1), ([100, 1, 1], 4)],
)
def test_skew(counts, skew):
    assert BatchSizes(counts).skew == skew
    assert BatchSizes(torch.tensor(counts)).skew == skew


def test_the_skew_of_device_counts_is_not_asked_for():
    """It would wait for the device."""
    assert BatchSizes.from_device(torch.tensor([1, 2], device="meta")).skew is None
