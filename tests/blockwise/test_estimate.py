"""The predicted peak of a step against the bytes that are really alive, followed tensor by tensor on the CPU."""

import argparse
import functools
import time

import bitsandbytes
import pytest
import torch
from accelerate import init_empty_weights
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, WanTransformer3DModel
from torch import nn
from transformers.optimization import Adafactor

from blockwise import offload
from blockwise.checkpointing import gradient_checkpoint_forward
from blockwise.estimate import (
    ShrunkModel,
    StepProfile,
    fake_tensors,
    optimizer_bytes,
    peak_of,
    shrink,
    without_content,
)
from blockwise.plan import MemoryPlan, Mode
from blockwise.stock import block_lists, install_plan
from blockwise.tracking import LiveBytes
from pipelines.qwen_image import QwenImage, never_trained_modules
from pipelines.wan_video import WanVideo
from train_qwen_image import VALUES
from training.module import DiffusionTrainingModule, find_lora_targets, make_trainable


WAN_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]


def qwen_image(num_layers):
    axes = {"attention_head_dim": 32, "num_attention_heads": 4, "axes_dims_rope": (8, 12, 12)}
    return QwenImageTransformer2DModel(num_layers=num_layers, joint_attention_dim=64, **axes)


def wan_video(num_layers):
    sizes = {"num_attention_heads": 4, "attention_head_dim": 32, "text_dim": 32, "freq_dim": 32, "ffn_dim": 256}
    return WanTransformer3DModel(num_layers=num_layers, cross_attn_norm=True, **sizes)


FAMILIES = {
    "qwen": (qwen_image, QwenImage, "transformer_blocks", (16,), (20, 64)),
    "wan": (wan_video, WanVideo, "blocks", (16, 3), (512, 32)),
}


def prepared(family, num_layers, mode, dropout):
    make, *_ = FAMILIES[family]
    transformer = make(num_layers)
    never_trained = never_trained_modules(transformer) if family == "qwen" else []
    names = never_trained
    if mode == "lora":
        wanted = VALUES["lora_target_modules"].split(",") if family == "qwen" else WAN_TARGETS
        names = find_lora_targets(transformer, wanted, never_trained=never_trained)
    args = argparse.Namespace(training_mode=mode, lora_rank=8, lora_alpha=8.0, lora_dropout=dropout, seed=0)
    make_trainable(transformer, args, names)
    return transformer


def batch_of(family, batch_size, side):
    *_, latents, text = FAMILIES[family]
    tensors = {name: torch.zeros(batch_size, *latents, side, side) for name in ("latents", "noise")}
    embeds = {"prompt_embeds": torch.zeros(batch_size, *text), "prompt_embeds_mask": None}
    return tensors | embeds | {"sigmas": torch.full((batch_size,), 0.5)}


@pytest.fixture(autouse=True)
def park_small_tensors(monkeypatch):
    monkeypatch.setattr(offload, "MIN_PARKED_BYTES", 4096)
    yield
    offload.set_limit(None)


def step_of(family, transformer, batch_size, side):
    """Return a function from nothing to a loss."""
    module = DiffusionTrainingModule(object.__new__(FAMILIES[family][1]), transformer).train()
    batch = batch_of(family, batch_size, side)
    return lambda: module(batch)


@functools.cache
def profile_of(family, mode, num_layers, *, batch_size, side, dropout):
    with init_empty_weights():
        skeleton = prepared(family, num_layers, mode, dropout)
    small = shrink(skeleton, {FAMILIES[family][2]: num_layers})
    return StepProfile(small, lambda transformer: step_of(family, transformer, batch_size, side), device_type="cpu")


def measured(transformer, step, plan, gradients_exist=False):
    """Return the peak of a step, and what it parks."""
    transformer.zero_grad()
    with LiveBytes() as live, install_plan(transformer, plan):
        for _ in range(2):  # in the first step tables are cached, and shared tensors are not known yet
            offload.reset_counters()
            if not gradients_exist:
                transformer.zero_grad()
            live.peak_bytes = live.live_bytes
            step().backward()
    if gradients_exist:  # they were made in the first step, and are not of the second
        live.peak_bytes -= sum(p.grad.nbytes for p in transformer.parameters() if p.grad is not None)
    return live.peak_bytes, offload.counters()["parked_bytes"]


def predicted_and_measured(family, mode, modes, *, batch_size, side, dropout=0.0, gradients_exist=False):
    profile = profile_of(family, mode, len(modes), batch_size=batch_size, side=side, dropout=dropout)
    plan = MemoryPlan({FAMILIES[family][2]: modes})
    transformer = prepared(family, len(modes), mode, dropout)
    step = step_of(family, transformer, batch_size, side)
    return profile, plan, *measured(transformer, step, plan, gradients_exist)


def pattern(letters):
    return tuple(Mode({"k": "keep", "r": "recompute", "p": "park"}[letter]) for letter in letters)


def wan_plan(letters):
    return MemoryPlan({"blocks": pattern(letters)})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize(
    "letters, batch_size, side",
    [(letters, 2, 16) for letters in ("kkkkkk", "rrrrrr", "rrrkkk", "pppppr", "pprrkk", "ppkkkk")]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in (("kk", 1, 24), ("rrr", 1, 32), ("ppr", 1, 16))],
)
def test_peak_of_a_step(family, mode, letters, batch_size, side):
    """Within half a percent, and to the byte what is parked; nothing in the prediction was fitted to a measurement."""
    profile, plan, peak_bytes, parked_bytes = predicted_and_measured(
        family, mode, pattern(letters), batch_size=batch_size, side=side
    )
    assert profile.peak(plan).num_bytes == pytest.approx(peak_bytes, rel=0.006)
    assert profile.parked_bytes(plan) == parked_bytes
    assert (parked_bytes > 0) == ("p" in letters)


def test_peak_in_the_first_block_before_its_parked_input_is_gone():
    profile, plan, peak_bytes, _ = predicted_and_measured("wan", "lora", pattern("ppr"), batch_size=1, side=16)
    assert profile.peak(plan).num_bytes == pytest.approx(peak_bytes, rel=0.006)


@pytest.mark.parametrize("family", [pytest.param("qwen", marks=pytest.mark.slow), "wan"])
def test_peak_with_dropout_and_with_gradients_of_an_earlier_micro_batch(family):
    for changes in ({"dropout": 0.2}, {"gradients_exist": True}):
        for mode in ("lora", "full") if "gradients_exist" in changes else ("lora",):
            profile, plan, peak_bytes, _ = predicted_and_measured(
                family, mode, pattern("rrrkkk"), batch_size=2, side=16, **changes
            )
            peak = profile.peak(plan, gradient_factor=0 if changes.get("gradients_exist") else 1)
            assert peak.num_bytes == pytest.approx(peak_bytes, rel=0.006), changes
            assert peak.gradient_bytes == 0 or "gradients_exist" not in changes


def test_gradients_of_which_the_backward_pass_leaves_twice_their_bytes():
    """By hand, of a model whose gradients are most of what it takes: at the end all of them are there."""
    profile = profile_of("wan", "full", 6, batch_size=1, side=2, dropout=0.0)
    once, twice, never = (profile.peak(wan_plan("rrrrrr"), gradient_factor=f) for f in (1, 2, 0))
    assert twice.gradient_bytes == 2 * once.gradient_bytes and never.gradient_bytes == 0
    assert twice.num_bytes - once.num_bytes == once.gradient_bytes
    assert never.num_bytes < once.num_bytes < never.num_bytes + once.gradient_bytes


def test_the_place_of_the_peak():
    """By hand: what is kept is highest at the end of the forward pass, what is recomputed at the first block after."""
    profile = profile_of("wan", "lora", 6, batch_size=2, side=16, dropout=0.0)
    assert profile.peak(wan_plan("kkkkkk")).place.endswith("blocks.5")
    assert profile.peak(wan_plan("rrrrrr")).place == "backward of blocks.5"
    assert profile.peak(wan_plan("rrrkkk")).num_bytes < profile.peak(wan_plan("rrkkkk")).num_bytes


class Mixed(nn.Module):
    """A list in a part of the model that runs before the main one; in it blocks of two kinds take turns."""

    def __init__(self, num_side, num_blocks):
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.side = nn.ModuleList(
            nn.Sequential(nn.Linear(64, width := 128 << index % 2), nn.GELU(), nn.Linear(width, 64))
            for index in range(num_side)
        )
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(num_blocks))

    def forward(self, hidden_states):
        for block in (*self.encoder.side, *self.blocks):
            hidden_states = gradient_checkpoint_forward(block, False, False, hidden_states)
        return hidden_states.square().mean()


@pytest.mark.parametrize("side, blocks", [("kk", "kkkkk"), ("rrrr", "kkkk"), ("pppp", "pprr"), ("pkkkkkk", "ppkr")])
def test_several_block_lists_of_several_kinds(side, blocks):
    plan = MemoryPlan({"encoder.side": pattern(side), "blocks": pattern(blocks)})
    lists = {name: len(modes) for name, modes in plan.modes.items()}

    def make_step(model):
        x = torch.empty(256, 64)
        return lambda: model(x * 1)

    with init_empty_weights():
        small = shrink(Mixed(len(side), len(blocks)), lists)
    assert {name: len(small.transformer.get_submodule(name)) for name in lists} == {
        "encoder.side": min(len(side), 4),
        "blocks": 3,
    }
    profile = StepProfile(small, make_step, device_type="cpu")
    model = Mixed(len(side), len(blocks))
    install_plan(model, plan)
    x = torch.randn(256, 64)
    with LiveBytes() as live:
        model(x * 1).backward()
    assert profile.peak(plan).num_bytes == pytest.approx(live.peak_bytes, rel=0.006)


def flux(num_layers, num_single_layers):
    heads = {"num_attention_heads": 4, "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12)}
    widths = {"in_channels": 16, "joint_attention_dim": 64, "pooled_projection_dim": 24}
    return FluxTransformer2DModel(num_layers=num_layers, num_single_layers=num_single_layers, **heads, **widths)


def flux_step(transformer):
    inputs = {"hidden_states": torch.zeros(2, 256, 16), "encoder_hidden_states": torch.zeros(2, 64, 64)}
    inputs |= {"pooled_projections": torch.zeros(2, 24), "timestep": torch.tensor([0.3, 0.7])}
    inputs |= {"img_ids": torch.zeros(256, 3), "txt_ids": torch.zeros(64, 3)}
    return lambda: transformer(**inputs, return_dict=False)[0].square().mean()


def test_two_block_lists_in_a_stock_forward():
    """Five and seven blocks are predicted from three and three, as from all of them, and as they are measured."""
    with init_empty_weights():
        skeleton = flux(5, 7)
    small = shrink(skeleton, block_lists(skeleton))
    assert block_lists(small.transformer) == {"transformer_blocks": 3, "single_transformer_blocks": 3}
    assert block_lists(skeleton) == {"transformer_blocks": 5, "single_transformer_blocks": 7}
    every = {name: list(range(count)) for name, count in block_lists(skeleton).items()}
    whole = ShrunkModel(skeleton, every, every)
    found, expected = (StepProfile(model, flux_step, device_type="cpu") for model in (small, whole))
    assert found.inference_bytes == expected.inference_bytes
    transformer = flux(5, 7)
    step = flux_step(transformer)
    for joint, single in (("kkkkk", "kkkkkkk"), ("rrrrr", "rrrrrrr"), ("ppprr", "pprrkkk")):
        plan = MemoryPlan({"transformer_blocks": pattern(joint), "single_transformer_blocks": pattern(single)})
        peak_bytes, parked_bytes = measured(transformer, step, plan)
        assert found.peak(plan).num_bytes == pytest.approx(peak_bytes, rel=0.006)
        assert found.parked_bytes(plan) == parked_bytes == expected.parked_bytes(plan)
        assert found.peak(plan) == expected.peak(plan) and found.costs([plan]) == expected.costs([plan])


def test_which_blocks_stand_for_a_model():
    """By hand: the first, the last, and one of each kind; what is trained in a block is part of its kind."""
    names = ["proj_out", "blocks.0.0", "blocks.4.0", "blocks.9.0", "blocks.10.0", "encoder.side.1.0"]
    with init_empty_weights():
        model = Mixed(2, 11)
    lists = {"encoder.side": 2, "blocks": 11}
    small = shrink(model, lists, names)
    assert small.kept == {"encoder.side": [0, 1], "blocks": [0, 1, 4, 10]}
    assert small.stand_ins == {"encoder.side": [0, 1], "blocks": [0, 1, 1, 1, 2, 1, 1, 1, 1, 2, 3]}
    assert small.names(names) == ["proj_out", "blocks.0.0", "blocks.2.0", "blocks.3.0", "encoder.side.1.0"]
    assert len(model.blocks) == 11 and shrink(model, {"blocks": 11}).kept == {"blocks": [0, 1, 10]}
    model.blocks[5].requires_grad_(False)
    assert shrink(model, {"blocks": 11}).kept == {"blocks": [0, 1, 5, 10]}


def test_a_plan_for_a_budget_of_sixty_blocks_in_five_modes_takes_less_than_two_seconds(monkeypatch):
    """With the costs of a step; one forward pass more is as fast as one that waits for the link."""
    with init_empty_weights():
        skeleton = Mixed(20, 40)
    lists = {"encoder.side": 20, "blocks": 40}
    profile = StepProfile(
        shrink(skeleton, lists), lambda model: lambda: model(torch.empty(256, 64)), device_type="cpu"
    )
    uniform = {mode: profile.costs([MemoryPlan.uniform(lists, mode)])[0] for mode in ("park", "recompute", "keep")}
    modes = [Mode(activations) for activations in ("park", "park", "recompute", "recompute", "keep")]
    spans, budgets = [], torch.linspace(uniform["park"].peak_bytes, uniform["keep"].peak_bytes, 3).long().tolist()
    seconds = []
    for budget in budgets:
        start = time.process_time()
        plan = MemoryPlan.from_budget(lists, budget, profile.costs, modes=modes)
        spans.append(time.process_time() - start)
        (cost,) = profile.costs([plan])
        assert cost.peak_bytes <= budget
        seconds.append(cost.seconds)
    assert max(spans) < 2
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] == 0


def test_each_tensor_of_an_operation_on_lists_is_looked_at_once(monkeypatch):
    """Compared with their number: clipping takes the norms of all gradients in one operation."""
    looked_at, see = [], LiveBytes._see
    monkeypatch.setattr(LiveBytes, "_see", lambda live, tensor, _: looked_at.append(tensor) or see(live, tensor, _))
    gradients = [torch.ones(16) for _ in range(100)]
    with LiveBytes() as live:
        norms = torch._foreach_norm(gradients)
        assert live.live_bytes == 4 * len(norms)
    assert len(looked_at) == 2 * len(gradients)


# ---------------------------------------------------------------- what accelerators do otherwise


def saved_bytes(function, device_type):
    with fake_tensors(device_type):
        x = torch.empty(1000, 64, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(64, dtype=torch.bfloat16, requires_grad=True)
        with LiveBytes() as live:
            result = function(x, weight)
            return live.live_bytes - result.nbytes


def test_fused_rms_norm_saves_its_input_and_one_number_per_row():
    def function(x, weight):
        return nn.functional.rms_norm(x, (64,), weight, 1e-6)

    assert saved_bytes(function, "cuda") == 1000 * 4
    assert saved_bytes(function, "cpu") > 1000 * 64 * 4, "the CPU's keeps copies in fp32"


def attention_peak(shape, dtype, num_mask_rows=None):
    """Most bytes that attention's backward pass has alive in addition to what it was given."""
    with fake_tensors("cuda"):
        query, key, value = (torch.empty(shape, dtype=dtype, requires_grad=True) for _ in range(3))
        mask = None if num_mask_rows is None else torch.empty(1, 1, 1, num_mask_rows, dtype=torch.bool)
        result = nn.functional.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=mask)
        gradient = torch.empty_like(result)
        with LiveBytes() as live:
            result.backward(gradient)
            return live.peak_bytes


@pytest.mark.parametrize("deterministic, num_sums", [(False, 1), (True, 4)])
def test_scratch_of_the_backward_pass_of_attention(deterministic, num_sums, monkeypatch):
    """Wan 14B, 1280x720, 81 frames, by hand: 75,600 tokens are 591 tiles of 128; 132 multiprocessors do 40 heads."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    tokens, gradients = 591 * 128, 3 * 40 * 75600 * 128 * 2
    scratch = attention_peak((1, 40, 75600, 128), torch.bfloat16) - gradients
    assert scratch == 4 * 40 * tokens * (num_sums * 128 + 1)
    assert scratch / 2**30 == pytest.approx(5.78 if deterministic else 1.45, abs=0.01)


@pytest.mark.parametrize("dtype, num_mask_rows", [(torch.bfloat16, 1000), (torch.float32, None)])
def test_attention_that_is_not_flash_has_one_sum(dtype, num_mask_rows, monkeypatch):
    """With a mask, or in fp32. The width of a head is rounded up to 32, rows to 128."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    scratch = attention_peak((2, 3, 1000, 40), dtype, num_mask_rows) - 3 * 2 * 3 * 1000 * 40 * dtype.itemsize
    assert scratch == 4 * 2 * 3 * 1024 * (64 + 1)


def test_attention_keeps_what_the_fused_kernels_keep():
    """Query, key, value, the result, and one number in fp32 for each row of each head."""

    def function(x, weight):
        parts = [(x * weight).view(1, 1000, 2, 32).transpose(1, 2) for _ in range(3)]
        return nn.functional.scaled_dot_product_attention(*parts)

    saved = saved_bytes(function, "cuda")
    assert saved == 3 * 1000 * 64 * 2 + 2 * 1000 * 4 == saved_bytes(function, "cpu")


def test_dropout_keeps_a_mask_of_one_byte():
    def function(x, weight):
        return nn.functional.dropout(x, 0.1)

    assert saved_bytes(function, "cuda") == 1000 * 64
    assert saved_bytes(function, "cpu") == 1000 * 64 * 2


# ---------------------------------------------------------------- optimizers


@pytest.mark.parametrize(
    "optimizer_class, arguments",
    [
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
        (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
        (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 1e-3}),
        (bitsandbytes.optim.AdamW8bit, {"lr": 1e-3}),
        (Adafactor, {"lr": 1e-3, "scale_parameter": False, "relative_step": False}),
    ],
)
def test_optimizer_state_of_large_matrices(optimizer_class, arguments):
    """Against a real step at the real size, which the prediction never makes."""
    shapes = [(700, 900), (700, 900), (1100, 300), (1100, 300), (900,), (24, 16)]
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = optimizer_class(parameters, **arguments)
    optimizer.step()
    state = {}
    for values in optimizer.state.values():
        for value in values.values():
            if isinstance(value, torch.Tensor):
                state[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
    with LiveBytes() as live:
        optimizer.step()
    predicted_state, predicted_transient = optimizer_bytes(optimizer_class, arguments, shapes)
    assert predicted_state == pytest.approx(sum(state.values()), rel=0.01, abs=4096)
    assert predicted_transient == pytest.approx(live.peak_bytes, rel=0.02, abs=4096)


def test_a_module_without_content_keeps_shapes_dtypes_and_plain_tensors():
    with init_empty_weights():
        transformer = qwen_image(2)
    shapes = {name: (p.shape, p.dtype, p.requires_grad) for name, p in transformer.named_parameters()}
    with fake_tensors("cpu"):
        without_content(transformer)
        assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in transformer.named_parameters()} == shapes
        assert all(p.device.type == "cpu" for p in transformer.parameters())
        assert transformer.pos_embed.pos_freqs.dtype == torch.complex64
        assert peak_of(lambda: torch.empty(1000)) == 4000
