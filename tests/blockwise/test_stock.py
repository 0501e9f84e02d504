"""Plans in the forward of stock diffusers transformers: every mode gives the bits of the plain step."""

import math

import diffusers
import pytest
import torch
from torch import nn

from blockwise import offload
from blockwise.plan import MemoryPlan, Mode
from blockwise.stock import block_lists, install_plan
from pipelines.qwen_image import model_fn_qwen_image
from pipelines.wan_video import model_fn_wan_video


R = torch.randn
TIMES = torch.tensor([0.25, 0.75])
HEADS = {"num_attention_heads": 4, "attention_head_dim": 32}
FLUX = {"in_channels": 16, "num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 64, **HEADS}


def image(channels=16, **further):
    return {"hidden_states": R(2, 16, channels), "encoder_hidden_states": R(2, 5, 64), "timestep": TIMES, **further}


def ids(width, num_tokens=16):
    return {"img_ids": R(num_tokens, width), "txt_ids": R(5, width)}


# Name of a class -> its config, what makes its inputs, and the block lists that its forward hands over.
MODELS = {
    "FluxTransformer2DModel": (
        FLUX | {"pooled_projection_dim": 24, "axes_dims_rope": (8, 12, 12)},
        lambda: image(**ids(3), pooled_projections=R(2, 24)),
        {"transformer_blocks": 2, "single_transformer_blocks": 3},
    ),
    "SD3Transformer2DModel": (
        {"sample_size": 8, "patch_size": 1, "in_channels": 4, "num_layers": 3, "joint_attention_dim": 64, **HEADS}
        | {"caption_projection_dim": 128, "pooled_projection_dim": 24, "out_channels": 4},
        lambda: image() | {"hidden_states": R(2, 4, 8, 8), "pooled_projections": R(2, 24), "timestep": 1000 * TIMES},
        {"transformer_blocks": 3},
    ),
    "ZImageTransformer2DModel": (
        {"in_channels": 16, "dim": 128, "n_layers": 3, "n_refiner_layers": 2, "n_heads": 4, "n_kv_heads": 4}
        | {"cap_feat_dim": 32, "axes_dims": [8, 12, 12], "axes_lens": [512, 64, 64]},
        lambda: {"x": [R(16, 1, 8, 8), R(16, 1, 8, 8)], "t": TIMES, "cap_feats": [R(6, 32), R(6, 32)]},
        {"noise_refiner": 2, "context_refiner": 2, "layers": 3},
    ),
    "Flux3Transformer2DModel": (
        {"in_channels": 16, "cond_in_channels": 16, "num_layers": 2, "num_single_layers": 3, **HEADS}
        | {"joint_attention_dim": 64, "timestep_channels": 32, "axes_dims_rope": (8, 8, 8, 8)},
        lambda: image(**ids(4)),
        {"txt_mode_blocks": 2, "mode_blocks.image": 2, "single_transformer_blocks": 3},
    ),
    "Flux2Transformer2DModel": (
        FLUX | {"timestep_guidance_channels": 32, "axes_dims_rope": (8, 8, 8, 8), "guidance_embeds": False},
        lambda: image(**ids(4)),
        {"transformer_blocks": 2, "single_transformer_blocks": 3},
    ),
    "ChromaTransformer2DModel": (
        FLUX
        | {"axes_dims_rope": (8, 12, 12), "approximator_num_channels": 8, "approximator_hidden_dim": 16}
        | {"approximator_layers": 1},
        lambda: image(**ids(3)),
        {"transformer_blocks": 2, "single_transformer_blocks": 3},
    ),
    "Krea2Transformer2DModel": (
        {"in_channels": 16, "num_layers": 3, "num_key_value_heads": 2, "intermediate_size": 256, **HEADS}
        | {"timestep_embed_dim": 32, "text_hidden_dim": 32, "num_text_layers": 3, "text_num_attention_heads": 2}
        | {"text_num_key_value_heads": 2, "text_intermediate_size": 64, "axes_dims_rope": (8, 12, 12)},
        lambda: (
            image()
            | {"encoder_hidden_states": R(2, 5, 3, 32), "position_ids": torch.zeros(21, 3)}
            | {"encoder_attention_mask": torch.ones(2, 5).bool()}
        ),
        {"transformer_blocks": 3},
    ),
    "CosmosTransformer3DModel": (
        {"in_channels": 16, "out_channels": 16, "num_layers": 3, "mlp_ratio": 4.0, "text_embed_dim": 64, **HEADS}
        | {"adaln_lora_dim": 16, "max_size": (4, 64, 64), "extra_pos_embed_type": None}
        | {"concat_padding_mask": False},
        lambda: {"hidden_states": R(1, 16, 1, 8, 8), "timestep": TIMES[:1], "encoder_hidden_states": R(1, 5, 64)},
        {"transformer_blocks": 3},
    ),
    "LTX2VideoTransformer3DModel": (
        {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 128, "audio_in_channels": 4, **HEADS}
        | {"audio_out_channels": 4, "audio_num_attention_heads": 2, "audio_attention_head_dim": 16}
        | {"audio_cross_attention_dim": 32, "num_layers": 3, "caption_channels": 24},
        lambda: (
            {"hidden_states": R(1, 16, 8), "audio_hidden_states": R(1, 8, 4), "timestep": 1000 * TIMES[:1]}
            | {"encoder_hidden_states": R(1, 5, 24), "audio_encoder_hidden_states": R(1, 5, 24), "num_frames": 1}
            | {"height": 4, "width": 4, "audio_num_frames": 8}
        ),
        {"transformer_blocks": 3},
    ),
    "QwenImageTransformer2DModel": (
        {"num_layers": 3, "joint_attention_dim": 64, "axes_dims_rope": (8, 12, 12), **HEADS},
        lambda: image(64) | {"encoder_hidden_states_mask": None, "img_shapes": [[(1, 4, 4)]] * 2},
        {"transformer_blocks": 3},
    ),
    "WanTransformer3DModel": (
        {"num_layers": 3, "text_dim": 64, "freq_dim": 32, "ffn_dim": 64, "cross_attn_norm": True, **HEADS},
        lambda: image() | {"hidden_states": R(2, 16, 2, 8, 8), "timestep": 1000 * TIMES},
        {"blocks": 3},
    ),
    "WanVACETransformer3DModel": (
        {"num_layers": 3, "text_dim": 64, "freq_dim": 32, "ffn_dim": 64, "vace_layers": [0, 2], **HEADS}
        | {"vace_in_channels": 24},
        lambda: (
            image()
            | {
                "hidden_states": R(2, 16, 2, 8, 8),
                "timestep": 1000 * TIMES,
                "control_hidden_states": R(2, 24, 2, 8, 8),
            }
            | {"control_hidden_states_scale": torch.ones(2)}
        ),
        {"vace_blocks": 2, "blocks": 3},
    ),
    "LTXVideoTransformer3DModel": (
        {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 128, "num_layers": 3, "caption_channels": 24}
        | HEADS,
        lambda: (
            {"hidden_states": R(2, 16, 8), "encoder_hidden_states": R(2, 5, 24), "timestep": 1000 * TIMES}
            | {"encoder_attention_mask": torch.ones(2, 5), "num_frames": 1, "height": 4, "width": 4}
        ),
        {"transformer_blocks": 3},
    ),
    "AuraFlowTransformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "num_mmdit_layers": 2, "num_single_dit_layers": 2, **HEADS}
        | {"joint_attention_dim": 64, "caption_projection_dim": 128, "out_channels": 4, "pos_embed_max_size": 64},
        lambda: image() | {"hidden_states": R(2, 4, 8, 8)},
        {"joint_transformer_blocks": 2, "single_transformer_blocks": 2},
    ),
    "SanaTransformer2DModel": (
        {"in_channels": 4, "out_channels": 4, "num_layers": 3, "caption_channels": 64, "sample_size": 8, **HEADS}
        | {"cross_attention_dim": 128, "num_cross_attention_heads": 4, "cross_attention_head_dim": 32},
        lambda: image() | {"hidden_states": R(2, 4, 8, 8)},
        {"transformer_blocks": 3},
    ),
    "CogVideoXTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_layers": 3, "text_embed_dim": 64, "max_text_seq_length": 5}
        | {"sample_width": 8, "sample_height": 8, "sample_frames": 5, "time_embed_dim": 8, **HEADS},
        lambda: image() | {"hidden_states": R(2, 2, 4, 8, 8), "timestep": 1000 * TIMES},
        {"transformer_blocks": 3},
    ),
    "PixArtTransformer2DModel": (
        {"num_layers": 3, "cross_attention_dim": 128, "sample_size": 8, "caption_channels": 64, **HEADS}
        | {"norm_type": "ada_norm_single", "use_additional_conditions": False},
        lambda: image() | {"hidden_states": R(2, 4, 8, 8), "timestep": 1000 * TIMES, "added_cond_kwargs": {}},
        {"transformer_blocks": 3},
    ),
    "Lumina2Transformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "hidden_size": 96, "num_layers": 3, "num_refiner_layers": 2}
        | {"num_attention_heads": 3, "num_kv_heads": 1, "axes_dim_rope": (8, 12, 12), "cap_feat_dim": 64},
        lambda: image() | {"hidden_states": R(2, 4, 8, 8), "encoder_attention_mask": torch.ones(2, 5).bool()},
        {"layers": 3},
    ),
    "MochiTransformer3DModel": (
        {"num_layers": 3, "pooled_projection_dim": 16, "text_embed_dim": 64, "time_embed_dim": 8, **HEADS}
        | {"in_channels": 4, "max_sequence_length": 5},
        lambda: (
            image()
            | {"hidden_states": R(2, 4, 2, 8, 8), "timestep": 1000 * TIMES, "encoder_attention_mask": torch.ones(2, 5)}
        ),
        {"transformer_blocks": 3},
    ),
    "HunyuanVideoTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 3, "num_refiner_layers": 1}
        | {"text_embed_dim": 64, "pooled_projection_dim": 8, "rope_axes_dim": (8, 12, 12), "patch_size": 2, **HEADS}
        | {"patch_size_t": 1, "guidance_embeds": False},
        lambda: (
            image()
            | {"hidden_states": R(2, 4, 1, 8, 8), "pooled_projections": R(2, 8), "timestep": (1000 * TIMES).long()}
            | {"encoder_attention_mask": torch.ones(2, 5).bool()}
        ),
        {"transformer_blocks": 2, "single_transformer_blocks": 3},
    ),
    "UNet2DConditionModel": (
        {"sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 2, "cross_attention_dim": 64}
        | {"attention_head_dim": 8, "norm_num_groups": 16}
        | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
        | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        lambda: {"sample": R(2, 4, 8, 8), "timestep": 500, "encoder_hidden_states": R(2, 5, 64)},
        None,
    ),
}
FEW = ("FluxTransformer2DModel", "SD3Transformer2DModel", "ZImageTransformer2DModel", "Flux3Transformer2DModel")


@pytest.fixture(autouse=True)
def park_small_tensors(monkeypatch):
    monkeypatch.setattr(offload, "MIN_PARKED_BYTES", 1)
    yield
    assert offload.counters()["pool_bytes"] == 0


def make(name):
    """Return a transformer with random weights, and inputs."""
    torch.manual_seed(0)
    config, inputs, _ = MODELS[name]
    model = getattr(diffusers, name)(**config).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5 / math.sqrt(parameter.shape[-1]) if parameter.ndim > 1 else 0.1)
    return model, inputs()


def step(model, inputs):
    """Return output and gradients."""
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**inputs, return_dict=False)
    tensors = [t for part in output for t in (part if isinstance(part, (list, tuple)) else [part]) if t is not None]
    sum(tensor.float().square().mean() for tensor in tensors).backward()
    return [*tensors, *(parameter.grad for parameter in model.parameters())]


def equal(found, expected):
    pairs = zip(found, expected, strict=True)
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def count_calls(model, lists):
    """Return a dict from each block to how often it runs from now on."""
    calls = {block: 0 for name in lists for block in model.get_submodule(name)}
    for block in calls:
        block.register_forward_pre_hook(lambda block, *_: calls.update({block: calls[block] + 1}))
    return calls


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_every_mode_gives_the_bits_of_the_plain_step(name):
    model, inputs = make(name)
    state = {module: dict(vars(module)) for module in model.modules()}
    plain, lists = step(model, inputs), block_lists(model, **inputs)
    if MODELS[name][2] is not None:
        assert list(lists.items()) == list(MODELS[name][2].items())
        named = block_lists(model)
        assert lists.items() <= named.items()
        if named != lists:
            first = min(named.keys() - lists.keys())
            with install_plan(model, MemoryPlan.uniform(named, "keep")):
                with pytest.raises(RuntimeError, match=f"no effect on .*{first}.0.*: the forward does not hand them"):
                    model(**inputs)
    for module, values in state.items():
        assert vars(module).keys() == values.keys()
    plans = {mode: MemoryPlan.uniform(lists, mode) for mode in ("keep", "recompute", "park")}
    mixed = [Mode(mode) for mode in ("keep", "park", "recompute")]
    plans["mixed"] = MemoryPlan(
        {name: tuple(mixed[index % 3] for index in range(count)) for name, count in lists.items()}
    )
    for mode, plan in plans.items():
        with install_plan(model, plan):
            step(model, inputs)  # the first step learns what is shared
            calls = count_calls(model, lists)
            offload.reset_counters()
            assert equal(step(model, inputs), plain), mode
        expected = [2 - (each.activations == "keep") for modes in plan.modes.values() for each in modes]
        assert list(calls.values()) == expected, mode
        assert (offload.counters()["parked_tensors"] > 0) == (mode in ("park", "mixed"))
    for module, values in state.items():
        assert {name: value for name, value in vars(module).items() if not name.endswith("_hooks")} == {
            name: value for name, value in values.items() if not name.endswith("_hooks")
        }
    assert equal(step(model, inputs), plain)


@pytest.mark.parametrize(
    "name, model_fn, scale",
    [("QwenImageTransformer2DModel", model_fn_qwen_image, 1000), ("WanTransformer3DModel", model_fn_wan_video, 1)],
)
def test_a_model_function_and_the_stock_forward_follow_one_plan(name, model_fn, scale):
    model, inputs = make(name)
    lists = block_lists(model)
    plan = MemoryPlan({name: (Mode("park"), Mode("keep"), Mode("recompute")) for name in lists})
    calls = count_calls(model, lists)

    def gradients(predict):
        model.zero_grad()
        calls.update(dict.fromkeys(calls, 0))
        predict().square().mean().backward()
        assert list(calls.values()) == [2, 1, 2]
        return [parameter.grad for parameter in model.parameters()]

    own = inputs | {"timestep": scale * inputs["timestep"]}
    switches = {"use_gradient_checkpointing": [True, False, True]}
    switches["use_gradient_checkpointing_offload"] = [True, False, False]
    expected = gradients(lambda: model_fn(model, **own, **switches))
    with install_plan(model, plan):
        assert equal(gradients(lambda: model(**inputs, return_dict=False)[0]), expected)
        assert equal(gradients(lambda: model_fn(model, **own)), expected)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_planned_block_that_is_never_handed_over_is_an_error():
    """By the first forward with gradients; the others hand nothing over."""
    handle = install_plan(model := Plain(), MemoryPlan.uniform({"blocks": 2}, "recompute"))
    with torch.no_grad():
        model(torch.ones(1, 8))
    with pytest.raises(RuntimeError, match=r"no effect on blocks.0, blocks.1: the forward does not hand them over"):
        model(torch.ones(1, 8))
    handle.remove()
    model(torch.ones(1, 8))


def test_plans_that_do_not_fit():
    model, _ = make("FluxTransformer2DModel")
    lists = block_lists(model)
    for wrong, says in (
        ({"transformer_blocks": 3}, "3 modes .* 2 blocks"),
        ({"blocks": 1}, "blocks, which has 0 blocks"),
    ):
        with pytest.raises(ValueError, match=says):
            install_plan(model, MemoryPlan.uniform(wrong, "keep"))
    with install_plan(model, MemoryPlan.uniform(lists, "keep")):
        with pytest.raises(ValueError, match=r"There is a plan on these blocks; remove\(\) it first"):
            install_plan(model, MemoryPlan.uniform(lists, "keep"))
    install_plan(model, MemoryPlan.uniform(lists, "keep"))


def test_block_lists_that_are_not_found():
    with pytest.raises(ValueError, match="No block lists in a Plain: it names no class of blocks; give inputs"):
        block_lists(Plain())
    with pytest.raises(ValueError, match="No block lists in a Plain: its forward hands none over"):
        block_lists(Plain(), x=torch.ones(1, 8))
