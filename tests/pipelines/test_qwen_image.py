"""Qwen-Image against the stock pipeline and transformer of diffusers."""

import gc
import itertools
import shutil

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import nn

from blockwise import offload
from blockwise.plan import MemoryPlan, Mode
from blockwise.stock import install_plan
from pipelines import loading, qwen_image
from pipelines.qwen_image import model_fn_qwen_image


def tiny_transformer(seed=0, num_layers=3, **config):
    torch.manual_seed(seed)
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=num_layers,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
        **config,
    )


def make_inputs(batch_size=1, height=4, width=6, lengths=(9, 4), reference=False, controlnet=0, seed=1):
    """Inputs in the spelling of `model_fn_qwen_image`; `lengths` are those of the captions."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = height * width + (16 if reference else 0)
    lengths = torch.tensor(lengths[:batch_size])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    residuals = [torch.randn(batch_size, num_tokens, 48, generator=generator) for _ in range(controlnet)]
    return {
        "hidden_states": torch.randn(batch_size, num_tokens, 64, generator=generator),
        "timestep": torch.tensor([987.3, 12.5])[:batch_size],
        "encoder_hidden_states": torch.randn(batch_size, mask.shape[1], 32, generator=generator) * mask[..., None],
        "encoder_hidden_states_mask": None if mask.all() else mask,
        "img_shapes": [[(1, height, width)] + [(1, 4, 4)] * reference] * batch_size,
        "controlnet_block_samples": residuals or None,
    }


def stock(transformer, inputs):
    return transformer(**inputs | {"timestep": inputs["timestep"] / 1000}, return_dict=False)[0]


CASES = {
    "one sample": {},
    "two captions of unequal length": {"batch_size": 2},
    "two captions of equal length": {"batch_size": 2, "lengths": (5, 5)},
    "odd sides": {"batch_size": 2, "height": 5, "width": 7},
    "references": {"reference": True, "batch_size": 2},
    "ControlNet, one residual per block": {"controlnet": 3},
    "ControlNet, two residuals for three blocks": {"controlnet": 2, "batch_size": 2},
}
MODES = {
    "plain": (False, False),
    "recompute": (True, False),
    "park": (True, True),
    "mixed": ([True, False, True],) * 2,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_fn_equals_stock_forward_and_gradients(case, mode, dtype, monkeypatch):
    monkeypatch.setattr(offload, "MIN_PARKED_BYTES", 1024)
    transformer = tiny_transformer(zero_cond_t="references" in case).to(dtype)
    inputs = {
        key: value.to(dtype) if key in ("hidden_states", "encoder_hidden_states") else value
        for key, value in make_inputs(**CASES[case]).items()
    }
    if inputs["controlnet_block_samples"]:
        inputs["controlnet_block_samples"] = [sample.to(dtype) for sample in inputs["controlnet_block_samples"]]
    memory = dict(zip(("use_gradient_checkpointing", "use_gradient_checkpointing_offload"), MODES[mode], strict=True))
    with torch.no_grad():
        assert torch.equal(model_fn_qwen_image(transformer, **inputs, **memory), stock(transformer, inputs))

    grads = []
    for forward in (stock, lambda *a: model_fn_qwen_image(a[0], **a[1], **memory)):
        transformer.zero_grad()
        output = forward(transformer, inputs)
        output.float().square().mean().backward()
        grads.append([output.detach()] + [p.grad for p in transformer.parameters()])
    for expected, ours in zip(*grads, strict=True):
        assert (expected is None and ours is None) or torch.equal(expected, ours)


def test_model_fn_with_additional_condition():
    transformer = tiny_transformer(use_additional_t_cond=True)
    inputs = make_inputs() | {"additional_t_cond": torch.tensor([1])}
    assert torch.equal(model_fn_qwen_image(transformer, **inputs), stock(transformer, inputs))


def test_memory_argument_of_wrong_length():
    with pytest.raises(ValueError, match="2 entries for 3 blocks"):
        model_fn_qwen_image(tiny_transformer(), **make_inputs(), use_gradient_checkpointing=[True, False])


def test_padded_batch_gives_each_sample_what_it_gets_alone():
    transformer, both = tiny_transformer(), make_inputs(batch_size=2)
    together = model_fn_qwen_image(transformer, **both)
    (grad_together,) = torch.autograd.grad(together.square().mean(), transformer.img_in.weight)
    grad_alone = 0
    for index, length in enumerate((9, 4)):
        alone = {
            "hidden_states": both["hidden_states"][index : index + 1],
            "timestep": both["timestep"][index : index + 1],
            "encoder_hidden_states": both["encoder_hidden_states"][index : index + 1, :length],
            "encoder_hidden_states_mask": None,
            "img_shapes": both["img_shapes"][:1],
        }
        output = model_fn_qwen_image(transformer, **alone)
        torch.testing.assert_close(together[index : index + 1], output, rtol=1e-5, atol=2e-6)
        grad_alone = grad_alone + torch.autograd.grad(output.square().mean(), transformer.img_in.weight)[0] / 2
    torch.testing.assert_close(grad_together, grad_alone, rtol=1e-4, atol=1e-6)
    unmasked = model_fn_qwen_image(transformer, **both | {"encoder_hidden_states_mask": None})
    assert (unmasked[1] - together[1]).abs().max() > 1e-3, "the mask makes a difference here"


# ---------------------------------------------------------------- where the activations live


def count_block_calls(transformer):
    calls = [0] * len(transformer.transformer_blocks)
    for index, block in enumerate(transformer.transformer_blocks):
        block.register_forward_pre_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    return calls


@pytest.mark.parametrize("checkpointing, offloading, calls", [(0, 0, 1), (1, 0, 2), (0, 1, 2), (1, 1, 2)])
def test_block_forward_calls(checkpointing, offloading, calls):
    transformer = tiny_transformer()
    counted = count_block_calls(transformer)
    output = model_fn_qwen_image(
        transformer,
        **make_inputs(),
        use_gradient_checkpointing=bool(checkpointing),
        use_gradient_checkpointing_offload=bool(offloading),
    )
    output.sum().backward()
    assert counted == [calls] * 3


def test_parked_bytes_of_a_plan(monkeypatch):
    """Both streams of every block but the last are parked; time embedding, rotary tables and mask are not."""
    monkeypatch.setattr(offload, "MIN_PARKED_BYTES", 512)
    transformer, inputs = tiny_transformer(num_layers=5), make_inputs(batch_size=2, height=16, width=16)
    plan = MemoryPlan({"transformer_blocks": (Mode("park"),) * 4 + (Mode("recompute"),)})
    assert plan.describe()[0] == "transformer_blocks: 5 of 5 blocks checkpointed, 4 offloaded"
    for _ in range(2):  # the first step learns what is shared
        offload.reset_counters()
        with install_plan(transformer, plan):
            output = model_fn_qwen_image(transformer, **inputs)
        counters = offload.counters()
        output.sum().backward()
    streams = 2 * (16 * 16 + 9) * 48 * 4
    assert counters["parked_bytes"] == counters["pool_bytes"] == 4 * streams
    assert counters["parked_tensors"] == 8
    del output
    gc.collect()
    assert offload.counters()["pool_bytes"] == 0


# ---------------------------------------------------------------- encoders


@pytest.fixture(scope="module")
def stock_pipeline(tiny_qwen_image):
    return DiffusionPipeline.from_pretrained(tiny_qwen_image, dtype=torch.bfloat16)


PROMPTS = ["a cat", "", " ", "Ein Schild: «Grüße» 猫 \n new line", "long " * 1200]


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_prompt_embeddings_equal_the_stock_pipeline(prompt, stock_pipeline, tiny_qwen_image):
    encoder = qwen_image.QwenImage(tiny_qwen_image).load_prompt_encoder("cpu")
    with torch.no_grad():
        expected, mask = stock_pipeline.encode_prompt(prompt)
    ours = qwen_image.encode_prompt(encoder, prompt)["prompt_embeds"]
    assert mask is None and torch.equal(ours, expected[0])
    assert not ours.requires_grad
    num_tokens, num_kept = qwen_image.count_prompt_tokens(encoder, prompt)
    assert num_kept == len(ours) and (num_tokens > num_kept) == (len(prompt) > 1000)


def test_latents_decode_as_the_stock_pipeline_expects(tiny_qwen_image):
    """What `encode_image` makes is what the pipeline, given latents, takes back to the VAE's own."""
    vae = qwen_image.QwenImage(tiny_qwen_image).load_media_encoder("cpu")
    assert vae.dtype == torch.float32
    pixels = torch.rand(2, 3, 48, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = torch.stack([qwen_image.encode_image(vae, image)["latents"] for image in pixels])
    assert latents.shape == (2, 16, 6, 4) and latents.dtype == torch.float32
    pipeline = DiffusionPipeline.from_pretrained(tiny_qwen_image)
    decoded = []
    pipeline.vae.decode = lambda z, **_: (decoded.append(z) or torch.zeros(2, 3, 1, 48, 32),)
    # A transformer that predicts no change: the latents reach the VAE as they were given.
    pipeline.transformer.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states),)
    given = {"latents": qwen_image.pack_latents(latents), "height": 48, "width": 32, "num_images_per_prompt": 2}
    pipeline("", **given, num_inference_steps=2, output_type="pt")
    with torch.no_grad():
        expected = vae.encode(pixels.unsqueeze(2)).latent_dist.mode()
    torch.testing.assert_close(decoded[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("height, width", [(8, 12), (12, 8), (2, 2), (6, 10)])
def test_pack_and_unpack(height, width, stock_pipeline):
    latents = torch.randn(2, 16, height, width)
    tokens = qwen_image.pack_latents(latents)
    assert tokens.shape == (2, height // 2 * (width // 2), 64)
    assert torch.equal(qwen_image.unpack_latents(tokens, height, width), latents)
    by_pipeline = stock_pipeline._unpack_latents(tokens, height * 8, width * 8, stock_pipeline.vae_scale_factor)
    assert torch.equal(by_pipeline.squeeze(2), latents)
    for channel, y, x in itertools.product((0, 15), (0, height - 1), (0, width - 1)):
        token, place = y // 2 * (width // 2) + x // 2, channel * 4 + y % 2 * 2 + x % 2
        assert tokens[1, token, place] == latents[1, channel, y, x]


@pytest.mark.parametrize("side, factor", [(512, 1.71), (1024, 2.00), (1328, 2.30)])
def test_sigma_shift_is_that_of_the_scheduler(side, factor, tiny_qwen_image):
    scheduler = qwen_image.QwenImage(tiny_qwen_image).scheduler
    shift = qwen_image.sigma_shift(scheduler, side, side)
    assert round(shift, 2) == factor
    reference = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config, shift_terminal=None)
    sigmas = torch.linspace(1, 0.1, 10)
    reference.set_timesteps(sigmas=sigmas.tolist(), mu=torch.tensor(shift).log().item())
    torch.testing.assert_close(reference.sigmas[:-1], shift * sigmas / (1 + (shift - 1) * sigmas))


# ---------------------------------------------------------------- transformer


def test_transformer_from_a_folder_and_from_one_file(tiny_qwen_image, tmp_path):
    model = str(tiny_qwen_image)
    original = loading.load_transformer(qwen_image.QwenImage.parts["transformer"][0], model, dtype=torch.float32)
    weights = {name: tensor + 1 for name, tensor in original.state_dict().items()}
    changed = QwenImageTransformer2DModel.from_config(original.config)
    changed.load_state_dict(weights)
    changed.save_pretrained(tmp_path / "transformer")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "one.safetensors")
    for path in ("transformer", "one.safetensors"):
        loaded = loading.load_transformer(
            qwen_image.QwenImage.parts["transformer"][0],
            model,
            dtype=torch.float32,
            transformer_path=str(tmp_path / path),
        )
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, weights[name]), name
    assert set(load_file(tmp_path / "one.safetensors")) == set(weights)


def test_incomplete_weights_are_noticed_before_they_load(tiny_qwen_image, tmp_path):
    model = str(tiny_qwen_image)
    loading.check_weights(qwen_image.QwenImage.parts, model, ("transformer",))
    weights = load_file(tiny_qwen_image / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file(
        {f"model.diffusion_model.{name}": tensor for name, tensor in weights.items()}, tmp_path / "p.safetensors"
    )
    del weights["proj_out.bias"]
    save_file(weights, tmp_path / "cut.safetensors")
    (tmp_path / "text.safetensors").write_text("not weights")
    (tmp_path / "empty").mkdir()
    for path, said in [("p", "lacks"), ("cut", "lacks 1 of .* proj_out.bias"), ("text", "not a safetensors file")]:
        with pytest.raises(ValueError, match=said):
            loading.check_weights(
                qwen_image.QwenImage.parts,
                model,
                ("transformer",),
                transformer_path=str(tmp_path / f"{path}.safetensors"),
            )
    with pytest.raises(OSError, match="there is no .*empty.config.json"):
        loading.check_weights(
            qwen_image.QwenImage.parts, model, ("transformer",), transformer_path=str(tmp_path / "empty")
        )


@pytest.mark.parametrize("name", ["[a]", "a*b", "a?b"])
def test_the_path_of_weights_is_no_pattern(tiny_qwen_image, tmp_path, name):
    shutil.copytree(tiny_qwen_image, tmp_path / name)
    loading.check_pipeline(qwen_image.QwenImage.pipelines, qwen_image.QwenImage.parts, str(tmp_path / name))
    here = loading.check_weights(qwen_image.QwenImage.parts, str(tmp_path / name), ("transformer",), required=True)
    path = str(tmp_path / name / "transformer")
    assert here == loading.check_weights(
        qwen_image.QwenImage.parts, str(tiny_qwen_image), ("transformer",), transformer_path=path
    )


def test_never_trained_modules_are_those_without_gradient():
    """Independent reference: what one backward pass leaves without gradient, or with zeros only."""
    transformer = tiny_transformer()
    model_fn_qwen_image(transformer, **make_inputs(batch_size=2)).square().mean().backward()
    silent = {name for name, p in transformer.named_parameters() if p.grad is None or not p.grad.any()}
    listed = tuple(name + "." for name in qwen_image.never_trained_modules(transformer))
    assert silent == {name for name, _ in transformer.named_parameters() if name.startswith(listed)}
    assert silent and all(isinstance(transformer.get_submodule(name[:-1]), nn.Module) for name in listed)


def test_skeleton_has_the_names_without_the_weights(tiny_qwen_image):
    skeleton = loading.load_transformer_skeleton(qwen_image.QwenImage.parts["transformer"][0], str(tiny_qwen_image))
    whole = loading.load_transformer(
        qwen_image.QwenImage.parts["transformer"][0], str(tiny_qwen_image), dtype=torch.float32
    )
    assert list(skeleton.state_dict()) == list(whole.state_dict())
    assert all(parameter.is_meta for parameter in skeleton.parameters())
