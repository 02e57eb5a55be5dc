"""The simulated device refuses what the hardware refuses, and shows what the hardware leaves unwritten."""

import pytest
import torch
import torch_npu
from npu_memory import record

X = torch.ones(4, 8, dtype=torch.bfloat16)
WEIGHT = torch.ones(2, 8, 6, dtype=torch.bfloat16)
GRAD = torch.ones(4, 6, dtype=torch.bfloat16)
COUNTS = torch.tensor([1, 3])


def by_rows(x=X, weight=WEIGHT, counts=COUNTS, to=lambda t: t.to("npu"), **options):
    given = {"split_item": 2, "group_type": 0, "group_list_type": 1, **options}
    (out,) = torch_npu.npu_grouped_matmul([to(x)], [to(weight)], group_list=to(counts), **given)
    return out


def by_columns(x=X, grad=GRAD, counts=COUNTS, transpose=True, **options):
    given = {"split_item": 3, "group_type": 2, "group_list_type": 1, **options}
    x, grad = x.to("npu"), grad.to("npu")
    (out,) = torch_npu.npu_grouped_matmul(
        [x.T if transpose else x], [grad], group_list=counts.to("npu"), **given
    )
    return out


def add(main_grad=None, x=X, grad=GRAD, ends=(1, 4), **options):
    main_grad = torch.zeros(2, 8, 6) if main_grad is None else main_grad
    arguments = (t.to("npu") for t in (main_grad, x, grad, torch.tensor(ends)))
    return torch_npu.npu_grouped_matmul_add_(*arguments, **options)


def test_takes_what_it_should():
    assert (by_rows().cpu() == 8).all()
    assert (by_rows(weight=WEIGHT.transpose(1, 2).contiguous().transpose(1, 2)).cpu() == 8).all()
    assert by_columns().cpu()[:, 0, 0].tolist() == [1, 3]
    assert add().cpu()[:, 0, 0].tolist() == [1, 3]
    assert by_rows(torch.ones(1, 1), torch.ones(2, 1, 6), torch.tensor([0, 1])).shape == (1, 6)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: by_rows(group_type=None), "Requires manual passing group_type"),
        (lambda: by_rows(counts=COUNTS.int()), "group_list is torch.int32"),
        (lambda: by_rows(counts=torch.tensor([[1, 3]])), "one packed dimension"),
        (lambda: by_rows(counts=torch.tensor([4]), weight=WEIGHT[:1]), "1 groups"),
        (
            lambda: by_rows(counts=torch.tensor([0] * 1025), weight=WEIGHT[:1].repeat(1025, 1, 1)),
            "1025 groups",
        ),
        (lambda: by_rows(counts=torch.tensor([2, 3])), "more than 4 rows"),
        (lambda: by_rows(counts=torch.tensor([-1, 3])), "negative"),
        (lambda: by_rows(X.double(), WEIGHT.double()), "float64"),
        (lambda: by_rows(X.float()), "differ in dtype"),
        (lambda: by_rows(X.T.contiguous().T), "x can not be transposed"),
        (lambda: by_rows(torch.ones(4, 65536), torch.ones(2, 65536, 1)), "inner axes"),
        (lambda: by_rows(torch.ones(4, 1), torch.ones(2, 1, 65536)), "inner axes"),
        (lambda: by_rows(split_item=0), "split_item=0"),
        (lambda: by_rows(group_type=1), "group_type=1"),
        (lambda: by_rows(group_list_type=0), "no counts"),
        (lambda: by_rows(bias=[torch.ones(6).to("npu")]), "not used so far"),
        (lambda: by_columns(transpose=False), "should be transposed"),
        (
            lambda: by_columns(X[:1], torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([0, 1])),
            "same time",
        ),
        (lambda: by_columns(counts=torch.tensor([2, 3])), "more than 4 rows"),
        (lambda: add(X.new_zeros(2, 8, 6)), "input is torch.bfloat16"),
        (lambda: add(x=X.float(), grad=GRAD.float()), "x is torch.float32"),
        (lambda: add(ends=(3, 1)), "no ends of groups"),
        (lambda: add(ends=(3, 1), group_list_type=1), "no ends of groups"),
        (lambda: add(transpose_x=False), "only x is transposed"),
    ],
)
def test_refuses(call, text):
    with pytest.raises(RuntimeError, match=text):
        call()


def test_refuses_a_list_on_the_host():
    x, weight = X.to("npu"), WEIGHT.to("npu")
    with pytest.raises(RuntimeError, match="group_list is on cpu"):
        torch_npu.npu_grouped_matmul(
            [x], [weight], group_list=COUNTS, split_item=2, group_type=0, group_list_type=1
        )


def test_refuses_a_layout_that_would_be_copied():
    wide = torch.ones(2, 8, 12, dtype=torch.bfloat16).to("npu")
    with pytest.raises(RuntimeError, match="would be copied"):
        torch_npu.npu_grouped_matmul(
            [X.to("npu")],
            [wide[:, :, ::2]],
            group_list=COUNTS.to("npu"),
            split_item=2,
            group_type=0,
            group_list_type=1,
        )


def test_what_is_not_written_is_nan():
    out = by_rows(counts=torch.tensor([1, 2])).cpu()
    assert not out[:3].isnan().any()
    assert out[3].isnan().all()
    assert by_columns(X[:0], GRAD[:0], torch.tensor([0, 0])).cpu().isnan().all()
    assert not by_columns(counts=torch.tensor([0, 4])).cpu()[0].any()
    assert torch.empty(3, device="npu").isnan().all()
    assert torch.empty_strided((2, 3), (1, 2), device="npu").isnan().all()


def test_notes_what_crosses():
    with record() as log:
        there = torch.ones(5).to("npu")
        there.clone()
        there.sum().item()
        there.cpu()
        there.nonzero()
    assert [event.numbers for event in log.crossings("to device")] == [5]
    assert [event.name for event in log.crossings("to host")] == [
        "aten::_local_scalar_dense",
        "copy",
        "aten::nonzero",
    ]
    assert log.reading(there) == ["copy", "aten::sum.IntList_out", "copy", "aten::nonzero"]
    with record() as log:
        torch.empty(5).copy_(there, non_blocking=True)
    assert [event.non_blocking for event in log.events] == [True]
    with record() as log:
        there.view(1, 5).transpose(0, 1)[2:].detach()
    assert log.events == []


def test_refuses_tensors_of_the_host():
    there = torch.ones(3).to("npu")
    for mixed in (lambda: there + torch.ones(3), lambda: there[torch.tensor([0])]):
        with pytest.raises(RuntimeError, match=r"on the same device|all tensors on npu"):
            mixed()


def test_frees_memory():
    import sim_npu

    for _ in range(2000):
        torch.empty(1000, device="npu")
    assert len(sim_npu._owners) < 1000
