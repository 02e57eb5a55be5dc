"""The plain kernels of cuda.triton on the CPU: run by test_triton_grouped.py under Triton's interpreter."""

import pytest
import torch
from triton_operands import DTYPES, dirty, operands, outer, product

from gmm_backends.triton_grouped import TritonGrouped, launch_plain, schedule
from gmm_backends.triton_grouped.launch_plain import Tile
from gmm_registry import BackendKey, BatchSizes
from gmm_registry.testing import compare

COUNTS = {
    "unequal": (5, 0, 40, 0, 1, 17, 0),
    "first and last empty": (0, 33, 7, 0),
    "all but one empty": (0, 0, 9, 0),
    "one group": (70,),
    "equal": (16, 16, 16),
    "many": tuple(e % 3 for e in range(40)),
}


@pytest.mark.parametrize("tall", [1, 16, 128])
@pytest.mark.parametrize("counts", [*COUNTS.values(), (2**31 - 1,), (3, 2**31 - 4)], ids=str)
def test_schedule(counts, tall):
    sizes = torch.tensor(counts)
    made = schedule.of(BatchSizes(sizes), torch.device("cpu"), tall)
    tiles = (sizes + tall - 1) // tall
    assert torch.equal(made[:-1, 0].long(), sizes.cumsum(0) - sizes)
    assert torch.equal(made[:-1, 1].long(), sizes)
    assert torch.equal(made[:-1, 2].long(), tiles.cumsum(0) - tiles)
    assert torch.equal(made[:-1, 3].long(), sizes.sort(descending=True, stable=True).indices)
    assert made[-1, 2] == tiles.sum()


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_rows(counts, dtype, trans_b):
    for k, n, tall in ((20, 13, 16), (40, 33, 32)):
        x, weight, _ = operands(counts, k, n, dtype, "cpu", trans_b)
        out = dirty(len(x), n, dtype=dtype, device="cpu")
        tile = Tile(tall, 16, 16, 4, 2)
        launch_plain.rows(x, weight, BatchSizes(counts), trans_b, out, tile=tile)
        assert compare(out, product(x, weight, counts, trans_b), dtype).passed


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("part", [0, 16])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_products(counts, dtype, out_dtype, part, accumulate):
    k, n, tile = 20, 18, Tile(16, 16, 16, 4, 2)
    x, _, grad_out = operands(counts, k, n, dtype, "cpu")
    sizes = BatchSizes(counts)
    out = dirty(len(counts), k, n, dtype=out_dtype, device="cpu")
    want = outer(x, grad_out, counts)
    if accumulate:
        out.fill_(1)
        want += 1
    if part:
        parts = dirty(len(x) // part + len(counts), k, n, dtype=torch.float32, device="cpu")
        launch_plain.products(x, grad_out, sizes, parts, False, part, tile=tile)
        launch_plain.add_parts(parts, sizes, part, out, accumulate)
    else:
        launch_plain.products(x, grad_out, sizes, out, accumulate, tile=tile)
    assert compare(out, want, out_dtype).passed
    if not accumulate:
        assert not out[[e for e, size in enumerate(counts) if not size]].any()


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_backend_writes_whatever_the_strides(accumulate):
    """Through the adapter: transposed storage, and a part of a wider tensor, whose rest stays as it is."""
    counts, k, n = (5, 0, 3), 20, 18
    x, weight, grad_out = operands(counts, k, n, torch.float32, "cpu")
    backend = TritonGrouped().bind(BackendKey("cuda", "triton"), "cpu")
    wide = torch.full((3, k, n + 6), 7.0)
    for out in (torch.ones(3, n, k).mT, wide[..., :n].fill_(1)):
        got = backend.weight_grad(x, grad_out, BatchSizes(counts), out=out, accumulate=accumulate)
        assert got is out
        assert compare(out, outer(x, grad_out, counts) + accumulate, torch.float32).passed
    assert (wide[..., n:] == 7).all()
    out = torch.ones(n, 8).T
    assert backend.forward(x, weight, BatchSizes(counts), trans_b=False, out=out) is out
    assert compare(out, product(x, weight, counts), torch.float32).passed
