"""What is trained, and in which precision."""

import types

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from peft.tuners.lora import LoraLayer

from blockwise.plan import MemoryPlan
from blockwise.stock import install_plan
from pipelines.qwen_image import QwenImage, model_fn_qwen_image, never_trained_modules
from runtime.errors import RefusedError
from train_qwen_image import VALUES
from training.module import (
    DiffusionTrainingModule,
    add_lora,
    find_lora_targets,
    lora_layers,
    make_trainable,
    trainable_parameters,
)
from training.optimizers import MasterWeights, find_optimizer


WIDTH, TOKENS = 48, 64
CPU = torch.device("cpu")


def tiny_transformer(num_layers=2, dtype=torch.float32):
    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=num_layers,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
    ).to(dtype)


def default_targets(transformer):
    names = VALUES["lora_target_modules"].split(",")
    return find_lora_targets(transformer, names, never_trained=never_trained_modules(transformer))


def with_lora(transformer, rank=4, alpha=4, dropout=0.0, seed=0):
    args = types.SimpleNamespace(lora_rank=rank, lora_alpha=alpha, lora_dropout=dropout, seed=seed)
    add_lora(transformer, default_targets(transformer), args)
    return transformer


def predict(transformer, **memory):
    generator = torch.Generator().manual_seed(2)
    dtype = transformer.proj_out.weight.dtype
    return model_fn_qwen_image(
        transformer,
        hidden_states=torch.randn(1, TOKENS, 64, generator=generator).to(dtype),
        timestep=torch.tensor([600.0]),
        encoder_hidden_states=torch.randn(1, 5, 32, generator=generator).to(dtype),
        encoder_hidden_states_mask=None,
        img_shapes=[[(1, 8, 8)]],
        **memory,
    )


# ---------------------------------------------------------------- LoRA targets


def test_default_targets_are_attention_and_mlp_of_each_block():
    transformer = tiny_transformer(num_layers=3)
    targets = default_targets(transformer)
    attention = "to_q to_k to_v to_out.0 add_q_proj add_k_proj add_v_proj to_add_out".split()
    mlp = [f"{stream}_mlp.net.{end}" for stream in ("img", "txt") for end in ("0.proj", "2")]
    expected = {
        f"transformer_blocks.{block}.{name}"
        for block in range(3)
        for name in [f"attn.{end}" for end in attention] + mlp
    }
    last_text_branch = {"attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2"}
    assert set(targets) == expected - {f"transformer_blocks.2.{name}" for name in last_text_branch}
    assert len(targets) == len(set(targets))


@pytest.mark.parametrize(
    "names, said",
    [
        (["to_q", "to_addd_out", "nonsense"], ["'to_addd_out' is no", "to_add_out", "'nonsense' is no"]),
        (["q"], ["'q' is no Linear layer"]),
        (["img_norm1"], ["'img_norm1' is no Linear layer"]),
        (["transformer_blocks.1.txt_mlp.net.2"], ["that gets a gradient"]),
    ],
)
def test_targets_that_cannot_be(names, said):
    transformer = tiny_transformer()
    with pytest.raises(RefusedError) as error:
        find_lora_targets(transformer, names, never_trained=never_trained_modules(transformer))
    assert all(text in str(error.value) for text in said), error.value


def test_targets_outside_of_blocks():
    transformer = tiny_transformer()
    targets = find_lora_targets(transformer, ["img_in", "norm_out.linear"], never_trained=[])
    assert targets == ["img_in", "norm_out.linear"]


# ---------------------------------------------------------------- precision of a LoRA


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_fp32_and_start_equal_on_every_process(dtype):
    first = with_lora(tiny_transformer(dtype=dtype))
    torch.manual_seed(77)
    second = with_lora(tiny_transformer(dtype=dtype))
    others = trainable_parameters(second)
    for name, ours in trainable_parameters(first).items():
        assert ours.dtype == torch.float32 and torch.equal(ours, others[name]), name
        assert bool(ours.any()) == ("lora_A" in name)
    assert all(p.dtype == dtype for n, p in first.named_parameters() if "lora_" not in n)
    assert not any(p.requires_grad for n, p in first.named_parameters() if "lora_" not in n)


def set_random_b(transformer):
    generator = torch.Generator().manual_seed(5)
    for layer in lora_layers(transformer).values():
        weight = layer.lora_B["default"].weight
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.05)


def test_adapter_computes_what_stock_peft_computes_with_adapters_of_the_base_dtype():
    """In bf16 the matmuls of a trained adapter are those of the file that is loaded for inference."""
    ours = with_lora(tiny_transformer(dtype=torch.bfloat16), alpha=8)
    set_random_b(ours)
    stock = with_lora(tiny_transformer(dtype=torch.bfloat16), alpha=8)
    set_random_b(stock)
    for layer in lora_layers(stock).values():
        for adapters in (layer.lora_A, layer.lora_B):
            linear = torch.nn.Linear(adapters["default"].in_features, adapters["default"].out_features, bias=False)
            linear.weight.data.copy_(adapters["default"].weight.data)
            adapters["default"] = linear.to(torch.bfloat16)
        layer.cast_input_dtype_enabled = True
    assert torch.equal(predict(ours), predict(stock))


def saved_fp32_sizes(transformer):
    """Sizes of the fp32 tensors that autograd keeps for the backward pass, of the size of tokens x width or more."""
    sizes = []

    def pack(tensor):
        if (
            tensor.dtype == torch.float32
            and tensor.numel() >= 5 * WIDTH
            and not isinstance(tensor, torch.nn.Parameter)
        ):
            sizes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        predict(transformer).float().sum()
    return sorted(sizes)


def test_adapters_save_no_fp32_copy_of_their_input():
    """The stock block itself saves some in its q/k norm; the adapters must not add one."""
    base = tiny_transformer(dtype=torch.bfloat16)
    base.requires_grad_(False)
    adapted = with_lora(tiny_transformer(dtype=torch.bfloat16))
    for transformer in (base, adapted):
        # So that the whole graph of both streams is recorded in both.
        transformer.img_in.weight.requires_grad_(True)
        transformer.txt_in.weight.requires_grad_(True)
    assert saved_fp32_sizes(adapted) == saved_fp32_sizes(base)


@pytest.mark.parametrize("memory", [{}, {"use_gradient_checkpointing": True},
                                    {"use_gradient_checkpointing_offload": True}])  # fmt: skip
def test_lora_dropout_gives_equal_gradients_in_every_memory_mode(memory):
    def grads(**memory):
        transformer = with_lora(tiny_transformer(), dropout=0.5)
        set_random_b(transformer)
        transformer.train()
        torch.manual_seed(3)
        predict(transformer, **memory).square().sum().backward()
        return [p.grad for p in trainable_parameters(transformer).values()]

    plain, ours = grads(), grads(**memory)
    assert all(grad.any() for grad in plain) and all(map(torch.equal, plain, ours))


# ---------------------------------------------------------------- full


def test_full_mode_trains_all_but_the_excluded_even_if_frozen_before():
    transformer = tiny_transformer()
    transformer.requires_grad_(False)
    make_trainable(transformer, types.SimpleNamespace(training_mode="full"), never_trained_modules(transformer))
    excluded = tuple(name + "." for name in never_trained_modules(transformer))
    expected = {name for name, _ in transformer.named_parameters() if not name.startswith(excluded)}
    assert set(trainable_parameters(transformer)) == expected


def test_master_weights_keep_updates_that_bf16_would_round_away():
    parameter = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    weights = MasterWeights(torch.nn.ParameterList([parameter]))
    optimizer = torch.optim.SGD(weights.masters, lr=1e-3)
    for _ in range(50):
        for _ in range(2):  # two micro-batches, added up in fp32
            parameter.grad = torch.full_like(parameter, 0.5)
            weights.take_gradients()
            assert parameter.grad is None
        optimizer.step()
        optimizer.zero_grad()
        weights.write_back()
    torch.testing.assert_close(weights.masters[0].detach(), torch.full((64,), 0.95))
    assert torch.equal(parameter.detach(), torch.full((64,), 0.95).to(torch.bfloat16))


def test_fp32_parameters_are_their_own_masters():
    parameter = torch.nn.Parameter(torch.ones(4))
    assert MasterWeights(torch.nn.ParameterList([parameter])).masters[0] is parameter


# ---------------------------------------------------------------- optimizers


def optimizer_flags(optimizer, weight_decay=0.01, **optimizer_args):
    return types.SimpleNamespace(
        optimizer=optimizer,
        learning_rate=1e-3,
        weight_decay=weight_decay,
        optimizer_args=optimizer_args,
        lr_scheduler="constant",
        lr_warmup_steps=0,
        lr_num_cycles=None,
        lr_power=None,
    )


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "prodigy", "torch.optim.SGD"])
def test_learning_rate_reaches_every_optimizer(name):
    optimizer_class, arguments = find_optimizer(optimizer_flags(name), CPU)
    parameter = torch.nn.Parameter(torch.full((64, 64), 1e-3))  # small, since prodigy's first steps are
    optimizer = optimizer_class([parameter], **arguments)
    assert optimizer.param_groups[0]["lr"] == 1e-3 and optimizer.param_groups[0]["weight_decay"] == 0.01
    parameter.grad = torch.ones(64, 64)
    optimizer.step()
    assert (parameter < 1e-3).all()
    if name not in ("prodigy", "torch.optim.SGD"):  # they move by about the rate, whatever the size of weight
        moved = 1e-3 - parameter.detach()
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=0.05, atol=0)


def test_adamw_is_that_of_the_defaults():
    optimizer_class, arguments = find_optimizer(optimizer_flags("adamw"), CPU)
    group = optimizer_class([torch.nn.Parameter(torch.ones(1))], **arguments).param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-8)


@pytest.mark.parametrize(
    "flags, said",
    [
        (optimizer_flags("torch.optim.SDG"), "torch.optim.SDG"),
        (optimizer_flags("nowhere.Optimizer"), "nowhere"),
        (optimizer_flags("torch.nn.Linear"), "not a torch optimizer"),
        (optimizer_flags("adamw", beta=0.9), "unexpected keyword argument 'beta'"),
        (optimizer_flags("adamw", lr=1.0), "--learning_rate"),
        (optimizer_flags("torch.optim.Rprop", weight_decay=0.1), "--weight_decay"),
        (optimizer_flags("adamw", betas=(2, 3)), "betas"),
        (optimizer_flags("adamw", betas=0.9), "betas"),
        (optimizer_flags("adamw", betas={0.9, 0.99}), "JSON"),
        (optimizer_flags("torch.optim.LBFGS", weight_decay=None), "LBFGS"),
    ],
)
def test_optimizers_that_cannot_be(flags, said):
    with pytest.raises(RefusedError, match=said):
        find_optimizer(flags, CPU)


def test_every_trainable_tensor_gets_a_gradient_after_two_steps():
    transformer = with_lora(tiny_transformer())
    install_plan(transformer, MemoryPlan.uniform({"transformer_blocks": 2}, "recompute"))
    module = DiffusionTrainingModule(object.__new__(QwenImage), transformer)
    optimizer = torch.optim.AdamW(trainable_parameters(module).values(), lr=1e-3, weight_decay=0)
    batch = {
        "latents": torch.randn(2, 16, 8, 12),
        "noise": torch.randn(2, 16, 8, 12),
        "sigmas": torch.tensor([0.3, 0.8]),
        "prompt_embeds": torch.randn(2, 6, 32),
        "prompt_embeds_mask": None,
    }
    before = {name: p.detach().clone() for name, p in trainable_parameters(module).items()}
    for _ in range(2):
        optimizer.zero_grad()
        module(batch).backward()
        optimizer.step()
    for name, parameter in trainable_parameters(module).items():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name
        assert not torch.equal(parameter, before[name]), name
    assert all(isinstance(layer, LoraLayer) for layer in lora_layers(transformer).values())
