"""Arguments: MegaBlocks' names and defaults, and every combination that cannot work refused at once."""

import dataclasses
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import gelu
from torch.testing._internal.distributed.fake_pg import FakeStore

from gmm_registry.layers.arguments import Arguments

# Every field of MegaBlocks 0.10 with its default, but those that are compared in another way below.
MEGABLOCKS = {
    "hidden_size": 1024,
    "ffn_hidden_size": 4096,
    "num_layers": 1,
    "bias": True,
    "return_bias": True,
    "moe_num_experts": 1,
    "moe_top_k": 1,
    "moe_capacity_factor": 1,
    "moe_normalize_expert_weights": None,
    "moe_loss_weight": 0.1,
    "moe_jitter_eps": None,
    "moe_lbl_in_fp32": False,
    "moe_expert_model_parallelism": False,
    "expert_parallel_group": None,
    "pipeline_model_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": None,
    "memory_optimized_mlp": False,
    "mlp_type": "mlp",
    "fp16": True,
    "bf16": False,
    "uniform_expert_assignment": False,
    "shared_expert": False,
    "fc_cls": torch.nn.Linear,
    "fc_kwargs": {},
    "remat_act_fn": True,
    "shared_expert_weighted_sum": False,
    "moe_zloss_weight": 0,
    "moe_zloss_in_fp32": False,
}


@pytest.fixture
def ranks():
    """Return a function that makes this process one of so many ranks."""

    def start(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def test_defaults_are_those_of_megablocks():
    args = Arguments()
    assert {name: getattr(args, name) for name in MEGABLOCKS} == MEGABLOCKS
    assert args.shared_expert_hidden_size == args.ffn_hidden_size
    x = torch.linspace(-3, 3, 7)
    assert torch.equal(args.activation_fn(x), gelu(x, approximate="tanh"))
    for init in (args.init_method, args.output_layer_init_method):
        weight = torch.empty(400, 400)
        init(weight)
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)
        assert weight.mean().abs() < 1e-3


def test_two_defaults_differ_from_megablocks():
    assert Arguments().mlp_impl == "grouped"
    assert Arguments().device is None


def test_megablocks_fields_come_first_so_that_positions_agree():
    names = [field.name for field in dataclasses.fields(Arguments)]
    assert names[:6] == [
        "hidden_size",
        "ffn_hidden_size",
        "num_layers",
        "bias",
        "return_bias",
        "activation_fn",
    ]
    assert names.index("moe_zloss_in_fp32") < names.index("dtype")


def test_arguments_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Arguments().hidden_size = 2


def test_arguments_travel_to_another_process():
    args = Arguments(hidden_size=8, moe_num_experts=4)
    copy = pickle.loads(pickle.dumps(args))
    assert (copy.hidden_size, copy.moe_num_experts) == (8, 4)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float16),
        ({"fp16": False}, torch.float32),
        ({"fp16": False, "bf16": True}, torch.bfloat16),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"fp16": True, "bf16": True, "dtype": torch.float64}, torch.float64),
    ],
)
def test_parameter_dtype(options, dtype):
    assert Arguments(**options).parameter_dtype == dtype


def test_shared_expert_keeps_a_width_of_its_own():
    assert Arguments(shared_expert_hidden_size=48).shared_expert_hidden_size == 48


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mlp_type": "gated"}, "mlp_type='gated' is unknown; there are 'mlp', 'glu'"),
        ({"mlp_impl": "dense"}, "mlp_impl='dense' is unknown; there are 'grouped', 'sparse'"),
        ({"moe_router_score": "relu"}, "moe_router_score='relu' is unknown; there are 'softmax', 'sigmoid'"),
        ({"moe_top_k": 3, "moe_num_experts": 2}, "moe_top_k=3 is more than moe_num_experts=2"),
        ({"moe_top_k": 0}, "moe_top_k=0 must be at least 1"),
        ({"moe_num_experts": 0}, "moe_num_experts=0 must be at least 1"),
        ({"hidden_size": 0}, "hidden_size=0 must be at least 1"),
        ({"ffn_hidden_size": -4}, "ffn_hidden_size=-4 must be at least 1"),
        ({"shared_expert_hidden_size": 0}, "shared_expert_hidden_size=0 must be at least 1"),
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
        ({"pipeline_model_parallel_size": 0}, "pipeline_model_parallel_size=0 must be at least 1"),
        (
            {"num_layers_per_virtual_pipeline_stage": 0},
            "num_layers_per_virtual_pipeline_stage=0 must be at least 1",
        ),
        ({"fp16": True, "bf16": True}, "fp16=True and bf16=True"),
        ({"bf16": True}, "fp16=True is the default"),
        ({"dtype": torch.int8}, r"dtype=torch.int8 is not a floating-point type"),
        ({"moe_jitter_eps": 1.0}, "moe_jitter_eps=1.0 must be at least 0 and below 1"),
        ({"moe_jitter_eps": -0.1}, "moe_jitter_eps=-0.1 must be at least 0 and below 1"),
        ({"moe_normalize_expert_weights": -1}, "moe_normalize_expert_weights=-1 must be a positive p"),
        (
            {"moe_softmax_after_top_k": True, "moe_router_score": "sigmoid"},
            "moe_softmax_after_top_k=True needs moe_router_score='softmax', not 'sigmoid'",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_values(options, match):
    with pytest.raises(ValueError, match=match):
        Arguments(**options)


@pytest.mark.parametrize("name", ["hidden_size", "ffn_hidden_size"])
def test_sparse_needs_whole_blocks(name):
    """megablocks 114: sparse, ffn 192."""
    with pytest.raises(ValueError, match=f"{name}=192 is not a multiple of 128"):
        Arguments(mlp_impl="sparse", **{name: 192})
    assert getattr(Arguments(mlp_impl="grouped", **{name: 192}), name) == 192
    assert getattr(Arguments(mlp_impl="sparse", **{name: 256}), name) == 256


@pytest.mark.parametrize("option", [{"moe_normalize_expert_weights": 1}, {"moe_softmax_after_top_k": True}])
def test_top_1_weights_that_are_always_1_are_warned_about(option):
    """megablocks 87: the weights are all 1, and the router gets no gradient."""
    with pytest.warns(UserWarning, match="the router no gradient") as caught:
        Arguments(moe_num_experts=4, moe_top_k=1, **option)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Arguments(moe_num_experts=4, moe_top_k=2, **option)
        Arguments(moe_num_experts=4, moe_top_k=1)


@pytest.mark.parametrize(("experts", "world_size"), [(3, 2), (2, 4)])
def test_experts_must_divide_among_the_ranks(ranks, experts, world_size):
    """vllm 52435, DeepSpeed 7551: E=3 on two ranks, E=2 on four."""
    ranks(world_size)
    assert Arguments(moe_num_experts=experts).experts_per_rank == experts  # no expert parallelism
    with pytest.raises(ValueError, match=f"moe_num_experts={experts} .* among the {world_size} ranks"):
        Arguments(moe_num_experts=experts, moe_expert_model_parallelism=True)


def test_experts_are_shared_out_among_the_group_not_the_world(ranks):
    ranks(4)
    args = Arguments(
        moe_num_experts=6, moe_expert_model_parallelism=True, expert_parallel_group=dist.new_group([0, 1])
    )
    assert (args.expert_parallel_world_size, args.experts_per_rank) == (2, 3)


def test_expert_parallelism_needs_a_process_group():
    with pytest.raises(ValueError, match="call init_process_group first"):
        Arguments(moe_num_experts=2, moe_expert_model_parallelism=True)


def test_options_are_taken_over_from_megablocks():
    init = torch.nn.init.zeros_
    theirs = SimpleNamespace(
        **{
            **MEGABLOCKS,
            "hidden_size": 256,
            "moe_num_experts": 8,
            "moe_top_k": 2,
            "mlp_type": "glu",
            "mlp_impl": "sparse",
            "fp16": False,
            "bf16": True,
            "device": 3,  # torch.cuda.current_device()
            "init_method": init,
            "shared_expert_hidden_size": 512,
            "something_of_megatron": object(),
        }
    )
    args = Arguments.from_megablocks(theirs)
    assert (args.hidden_size, args.moe_num_experts, args.moe_top_k) == (256, 8, 2)
    assert (args.mlp_type, args.mlp_impl, args.device) == ("glu", "sparse", 3)
    assert args.init_method is init
    assert args.parameter_dtype == torch.bfloat16
    assert args.shared_expert_hidden_size == 512
    changed = Arguments.from_megablocks(theirs, mlp_impl="grouped", device="cpu")
    assert (changed.mlp_impl, changed.device, changed.hidden_size) == ("grouped", "cpu", 256)


def test_an_object_of_another_kind_is_not_taken_for_defaults():
    with pytest.raises(TypeError, match="dict has none of the attributes"):
        Arguments.from_megablocks({"hidden_size": 256})


def test_wrong_options_of_megablocks_are_refused_too():
    with pytest.raises(ValueError, match="ffn_hidden_size=192"):
        Arguments.from_megablocks(SimpleNamespace(mlp_impl="sparse", ffn_hidden_size=192))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "float32"}, "dtype='float32' must be a torch.dtype"),
        ({"hidden_size": "128"}, "hidden_size='128' must be an int"),
        ({"activation_fn": "silu"}, "activation_fn='silu' must be a function"),
    ],
)
def test_refuses_other_types(options, match):
    with pytest.raises(TypeError, match=match):
        Arguments(**options)
