"""Wan-Video against the stock pipelines and transformer of diffusers."""

import csv
import pathlib

import pytest
import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from blockwise import offload
from pipelines import loading, wan_video
from pipelines.wan_video import model_fn_wan_video


FAMILIES = ["wan_t2v", "wan_i2v", "wan_flf2v", "wan_ti2v", "wan_t2v_a14b", "wan_i2v_a14b"]


def tiny_transformer(kind, seed=0):
    torch.manual_seed(seed)
    channels = {"t2v": 16, "i2v": 36, "flf2v": 36, "i2v without CLIP": 36, "ti2v": 48}[kind]
    with_images = {"image_dim": 20, "added_kv_proj_dim": 24} if kind in ("i2v", "flf2v") else {}
    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=48 if kind == "ti2v" else 16,
        text_dim=16,
        freq_dim=32,
        ffn_dim=48,
        num_layers=3,
        rope_max_seq_len=32,
        pos_embed_seq_len=10 if kind == "flf2v" else None,
        **with_images,
    )
    if kind == "flf2v":
        nn.init.normal_(transformer.condition_embedder.image_embedder.pos_embed)
    return transformer


def make_inputs(kind, batch_size=1, frames=3, height=4, width=6, per_token=False, seed=1):
    """Inputs in the spelling of `model_fn_wan_video`."""
    generator = torch.Generator().manual_seed(seed)
    channels = {"t2v": 16, "ti2v": 48}.get(kind, 36)
    timestep = torch.tensor([987.25, 12.5])[:batch_size]
    if per_token:
        timestep = timestep[:, None].repeat(1, frames * height * width // 4)
        timestep[:, : height * width // 4] = 0
    images = {"i2v": 1, "flf2v": 2}.get(kind)
    return {
        "hidden_states": torch.randn(batch_size, channels, frames, height, width, generator=generator),
        "timestep": timestep,
        "encoder_hidden_states": torch.randn(batch_size, 512, 16, generator=generator),
        "encoder_hidden_states_image": images and torch.randn(batch_size * images, 5, 20, generator=generator),
    }


# ---------------------------------------------------------------- model function


MODES = {
    "plain": (False, False),
    "recompute": (True, False),
    "park": (True, True),
    "mixed": ([True, False, True],) * 2,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("kind", ["t2v", "i2v", "flf2v", "i2v without CLIP", "ti2v", "ti2v per token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_fn_equals_stock_forward_and_gradients(kind, batch_size, mode, dtype, monkeypatch):
    monkeypatch.setattr(offload, "MIN_PARKED_BYTES", 1024)
    kind, per_token = kind.removesuffix(" per token"), kind.endswith(" per token")
    transformer = tiny_transformer(kind).to(dtype)
    inputs = {
        name: value.to(dtype) if value is not None and name != "timestep" else value
        for name, value in make_inputs(kind, batch_size, per_token=per_token).items()
    }
    memory = dict(zip(("use_gradient_checkpointing", "use_gradient_checkpointing_offload"), MODES[mode], strict=True))
    with torch.no_grad():
        expected = transformer(**inputs, return_dict=False)[0]
        assert torch.equal(model_fn_wan_video(transformer, **inputs, **memory), expected)

    offload.reset_counters()
    grads = []
    for forward in (lambda: transformer(**inputs, return_dict=False)[0],
                    lambda: model_fn_wan_video(transformer, **inputs, **memory)):  # fmt: skip
        transformer.zero_grad()
        output = forward()
        output.float().square().mean().backward()
        grads.append([output.detach()] + [p.grad for p in transformer.parameters()])
    assert all(grad is not None for grad in grads[0]), "every parameter of Wan gets a gradient"
    for stock, ours in zip(*grads, strict=True):
        assert torch.equal(stock, ours)
    assert (offload.counters()["parked_tensors"] > 0) == (mode in ("park", "mixed"))


@pytest.mark.parametrize("family", FAMILIES)
def test_model_fn_equals_stock_forward_in_bf16_as_loaded(family, tiny_model):
    """`from_pretrained` keeps some modules in fp32."""
    transformer = loading.load_transformer(
        wan_video.WanVideo.parts["transformer"][0], str(tiny_model(family)), dtype=torch.bfloat16
    )
    assert {p.dtype for p in transformer.parameters()} == {torch.bfloat16, torch.float32}
    config = transformer.config
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(2, config.in_channels, 2, 4, 4, generator=generator).bfloat16(),
        "timestep": torch.tensor([987.25, 12.5]),
        "encoder_hidden_states": torch.randn(2, 512, config.text_dim, generator=generator).bfloat16(),
    }
    if config.image_dim is not None:
        images = 4 if config.pos_embed_seq_len else 2
        image_embeds = torch.randn(images, 257, config.image_dim, generator=generator)
        inputs["encoder_hidden_states_image"] = image_embeds.bfloat16()
    with torch.no_grad():
        assert torch.equal(model_fn_wan_video(transformer, **inputs), transformer(**inputs, return_dict=False)[0])


def test_each_block_runs_once_or_twice():
    transformer, calls = tiny_transformer("t2v"), [0, 0, 0]
    for index, block in enumerate(transformer.blocks):
        block.attn1.register_forward_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    modes = {"use_gradient_checkpointing": [True, False, True]}
    model_fn_wan_video(transformer, **make_inputs("t2v"), **modes).mean().backward()
    assert calls == [2, 1, 2]


def test_memory_argument_of_wrong_length():
    with pytest.raises(ValueError, match="2 entries for 3 blocks"):
        model_fn_wan_video(tiny_transformer("t2v"), **make_inputs("t2v"), use_gradient_checkpointing=[True, False])


def test_one_timestep_per_sample_equals_one_per_token(tiny_model):
    """TI2V-5B from text: stock sampling repeats the timestep per token; the bound is 1e-5 of the output, in fp32."""
    transformer = loading.load_transformer(
        wan_video.WanVideo.parts["transformer"][0], str(tiny_model("wan_ti2v")), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(2, 48, 3, 4, 6, generator=generator),
        "encoder_hidden_states": torch.randn(2, 512, transformer.config.text_dim, generator=generator),
    }
    timestep = torch.tensor([987.25, 12.5])
    with torch.no_grad():
        per_sample = model_fn_wan_video(transformer, timestep=timestep, **inputs)
        per_token = model_fn_wan_video(transformer, timestep=timestep[:, None].repeat(1, 3 * 2 * 3), **inputs)
    assert (per_sample - per_token).norm() < 1e-5 * per_token.norm()


# ---------------------------------------------------------------- variants


@pytest.mark.parametrize(
    "family, tasks, boundary, divisor, size",
    [
        ("wan_t2v", ("t2v",), None, 16, (480, 832, 81, 16)),
        ("wan_i2v", ("i2v",), None, 16, (480, 832, 81, 16)),
        ("wan_flf2v", ("flf2v",), None, 16, (480, 832, 81, 16)),
        ("wan_ti2v", ("t2v", "i2v"), None, 32, (704, 1280, 121, 24)),
        ("wan_t2v_a14b", ("t2v",), 0.875, 16, (480, 832, 81, 16)),
        ("wan_i2v_a14b", ("i2v",), 0.9, 16, (480, 832, 81, 16)),
    ],
)
def test_variant(family, tasks, boundary, divisor, size, tiny_model):
    variant = wan_video.WanVideo(str(tiny_model(family))).variant
    assert (variant.tasks, variant.boundary_ratio, variant.divisor) == (tasks, boundary, divisor)
    assert (variant.height, variant.width, variant.num_frames, variant.fps) == size
    assert variant.expand_timesteps == (family == "wan_ti2v")
    assert variant.experts == (("high_noise", "low_noise") if boundary else ())
    assert variant.sigma_range(None) == (0, 1)
    if boundary:
        assert variant.sigma_range("high_noise") == (boundary, 1) and variant.sigma_range("low_noise") == (0, boundary)
    task = tasks[-1]
    fixed = family not in ("wan_t2v", "wan_i2v")
    assert variant.sigma_shift(480, 832, task) == variant.sigma_shift(832, 480, task) == (5 if fixed else 3)
    assert variant.sigma_shift(720, 1280, task) == 5


def test_experts_are_where_the_stock_pipeline_has_them(tiny_model):
    """`transformer` at and above the boundary, `transformer_2` below: seen from inside a stock sampling."""
    folder = tiny_model("wan_t2v_a14b")
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    used = {"transformer": [], "transformer_2": []}
    for name, timesteps in used.items():
        getattr(pipeline, name).register_forward_pre_hook(
            lambda _, args, kwargs, timesteps=timesteps: timesteps.append(float(kwargs["timestep"][0])),
            with_kwargs=True,
        )
    pipeline("", height=16, width=16, num_frames=1, num_inference_steps=12, output_type="latent")
    variant = wan_video.WanVideo(str(folder)).variant
    for expert in variant.experts:
        low, high = variant.sigma_range(expert)
        timesteps = used[wan_video.transformer_subfolder(expert)]
        assert timesteps and all(low * 1000 <= timestep <= high * 1000 for timestep in timesteps)


@pytest.mark.parametrize("family", FAMILIES)
def test_default_lora_targets_are_in_every_block_and_only_there(family, tiny_model):
    skeleton = loading.load_transformer_skeleton(wan_video.WanVideo.parts["transformer"][0], str(tiny_model(family)))
    targets = wan_video.default_lora_targets(skeleton)
    found = {n for n, m in skeleton.named_modules() if any(n.endswith("." + target) for target in targets)}
    assert all(isinstance(skeleton.get_submodule(name), nn.Linear) and name.startswith("blocks.") for name in found)
    per_block = 12 if family in ("wan_i2v", "wan_flf2v") else 10
    assert len(found) == per_block * len(skeleton.blocks)


def test_other_pipelines_are_refused(tiny_qwen_image, tiny_model, tmp_path):
    with pytest.raises(ValueError, match="QwenImagePipeline; allowed are WanPipeline"):
        wan_video.WanVideo(str(tiny_qwen_image))
    with pytest.raises(ValueError, match="QwenImageTransformer2DModel; allowed is WanTransformer3DModel"):
        loading.load_transformer_skeleton(wan_video.WanVideo.parts["transformer"][0], str(tiny_qwen_image))


# ---------------------------------------------------------------- text


PROMPTS = [
    "a cat",
    "",
    "two\n\nlines   and\ttabs \u00a0 and &amp; entities, broken â€œquotesâ€\x9d",
    "a very long caption " * 200,
    "une forêt 森林 🌲",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_embeds_equal_those_of_the_stock_call(prompt, tiny_model):
    """What reaches the transformer in a stock sampling, which also says how long the text is padded."""
    encoder = wan_video.WanVideo(tiny_model("wan_t2v")).load_parts(("text_encoder", "tokenizer"))
    ours = wan_video.encode_prompt(encoder, prompt)["prompt_embeds"]
    pipeline = DiffusionPipeline.from_pretrained(tiny_model("wan_t2v"))
    pipeline.set_progress_bar_config(disable=True)
    seen = []
    pipeline.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["encoder_hidden_states"]), with_kwargs=True
    )
    size = {"height": 16, "width": 16, "num_frames": 1, "num_inference_steps": 1, "output_type": "latent"}
    pipeline(prompt, guidance_scale=1.0, **size)
    assert ours.shape[0] == 512 and torch.equal(ours, seen[0][0]) and not ours.requires_grad
    num_tokens, num_kept = wan_video.count_prompt_tokens(encoder, prompt)
    assert num_kept == min(num_tokens, 512) and (num_tokens > 512) == (len(prompt) > 1000)
    # From the true length on there are zeros, and only there.
    assert not ours[num_kept:].any() and ours[:num_kept].any(dim=1).all()


def test_text_encoder_is_in_bf16_by_default(tiny_model):
    encoder = wan_video.WanVideo(tiny_model("wan_t2v")).load_prompt_encoder("cpu")
    assert wan_video.encode_prompt(encoder, "a cat")["prompt_embeds"].dtype == torch.bfloat16


# ---------------------------------------------------------------- clips


def random_clip(num_frames, height, width, seed=0):
    """A clip (3, N, height, width) of values that a decoder can give: whole bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, num_frames, height, width), generator=generator).float() / 127.5 - 1


def as_image(frame):
    return Image.fromarray(((frame + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())


def stock_inputs(folder, clip, task):
    """Return what the stock image-to-video pipeline gives to its transformer for the first frame (and last) of `clip`.

    Args:
        clip (`torch.Tensor` of shape (3, N, height, width))
    """
    pipeline = WanImageToVideoPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    seen = []
    for transformer in filter(None, (pipeline.transformer, pipeline.transformer_2)):
        transformer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    num_frames, height, width = clip.shape[1:]
    pipeline(
        image=as_image(clip[:, 0]),
        last_image=as_image(clip[:, -1]) if task == "flf2v" else None,
        prompt="a cat",
        **{"height": height, "width": width, "num_frames": num_frames, "num_inference_steps": 2},
        guidance_scale=1.0,
        output_type="latent",
    )
    return seen[0]


@pytest.mark.parametrize("num_frames", [1, 5, 9, 17])
@pytest.mark.parametrize("family", ["wan_i2v", "wan_flf2v", "wan_i2v_a14b"])
def test_condition_equals_that_of_a_stock_sampling(family, num_frames, tiny_model):
    task = "flf2v" if family == "wan_flf2v" else "i2v"
    if task == "flf2v" and num_frames == 1:
        pytest.skip("a first and a last frame are two")
    clip = random_clip(num_frames, 32, 48)
    encoder = wan_video.WanVideo(tiny_model(family)).load_media_encoder("cpu")
    sample = wan_video.encode_clip(encoder, clip, task=task)
    stock = stock_inputs(tiny_model(family), clip, task)
    frames = (num_frames - 1) // 4 + 1
    assert sample["latents"].shape == (16, frames, 4, 6) and sample["condition"].shape == (20, frames, 4, 6)
    assert torch.equal(sample["condition"], stock["hidden_states"][0, 16:])
    if family == "wan_i2v_a14b":
        assert "image_embeds" not in sample and stock["encoder_hidden_states_image"] is None
    else:
        assert torch.equal(sample["image_embeds"], stock["encoder_hidden_states_image"])
        assert sample["image_embeds"].shape[:2] == (2 if task == "flf2v" else 1, 257)
    # The mask by hand: the four pixel frames of each latent frame; the first one stands for itself four times.
    mask = torch.zeros(4, frames)
    mask[:, 0] = 1
    if task == "flf2v":
        mask[3, -1] = 1
    assert torch.equal(sample["condition"][:4], mask[:, :, None, None].expand(-1, -1, 4, 6))
    assert all(tensor.dtype == torch.float32 for tensor in sample.values())


@pytest.mark.parametrize("num_frames", [5, 9, 17])
def test_first_latent_frame_equals_that_of_a_stock_sampling(num_frames, tiny_model):
    """TI2V-5B from image to video: hidden states and timesteps of the first frame, as they reach the transformer."""
    clip = random_clip(num_frames, 64, 32)
    encoder = wan_video.WanVideo(tiny_model("wan_ti2v")).load_media_encoder("cpu")
    sample = wan_video.encode_clip(encoder, clip, task="i2v")
    stock = stock_inputs(tiny_model("wan_ti2v"), clip, "i2v")
    assert set(sample) == {"latents"} and sample["latents"].shape == (48, (num_frames - 1) // 4 + 1, 4, 2)
    latents, noisy = sample["latents"][None], torch.randn(1, *sample["latents"].shape)
    sigma_timestep = stock["timestep"].max()[None].float()
    hidden_states, timestep = wan_video.clean_first_frame(noisy, latents, sigma_timestep)
    assert torch.equal(hidden_states[:, :, 0], stock["hidden_states"][:, :, 0])
    assert torch.equal(hidden_states[:, :, 1:], noisy[:, :, 1:])
    assert torch.equal(timestep, stock["timestep"].float())
    # From text nothing is replaced.
    plain = wan_video.encode_clip(encoder, clip, task="t2v")
    torch.testing.assert_close(plain["latents"][:, 1:], sample["latents"][:, 1:])


@pytest.mark.parametrize("family", ["wan_t2v", "wan_ti2v"])
def test_latents_decode_as_the_stock_pipeline_expects(family, tiny_model):
    """What `encode_clip` makes is what the pipeline, given latents, takes back to the VAE's own."""
    encoder = wan_video.WanVideo(tiny_model(family)).load_media_encoder("cpu")
    assert encoder.vae.dtype == torch.float32
    clip = random_clip(9, 64, 32)
    latents = wan_video.encode_clip(encoder, clip, task="t2v")["latents"]
    pipeline = WanPipeline.from_pretrained(tiny_model(family))
    pipeline.set_progress_bar_config(disable=True)
    decoded = []
    pipeline.vae.decode = lambda z, **_: (decoded.append(z) or torch.zeros(1, 3, 9, 64, 32),)
    # A transformer that predicts no change: the latents reach the VAE as they were given.
    pipeline.transformer.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states),)
    pipeline("", latents=latents[None], height=64, width=32, num_frames=9, num_inference_steps=2, output_type="pt")
    with torch.no_grad():
        expected = encoder.vae.encode(clip[None]).latent_dist.mode()
    torch.testing.assert_close(decoded[0], expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- names and weights


def golden_names(model):
    rows = csv.DictReader((pathlib.Path(__file__).parent / "golden_keys_wan_video.tsv").open(), delimiter="\t")
    for row in rows:
        if row["family"] == model:
            for index in range(int(row["count"])):
                names = [row[column].replace("{i}", str(index)) for column in ("diffusers_module", "exported_module")]
                yield *names, (int(row["out"]), int(row["in"]))


@pytest.mark.parametrize(
    "model, config, count",
    [
        ("wan2.1_t2v_1.3b", {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}, 306),
        ("wan_14b", {}, 406),
        ("wan2.1_i2v_14b", {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}, 488),
        ("wan2.2_ti2v_5b", {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48,
                            "out_channels": 48}, 306),
    ],
)  # fmt: skip
def test_exported_names_and_shapes_are_those_of_the_golden_list(model, config, count):
    """Every Linear of the real models, by name and shape, as ComfyUI knows it; and back, as diffusers reads it."""
    with torch.device("meta"):
        transformer = WanTransformer3DModel(**{"text_dim": 4096} | config)
    ours = {
        (name, wan_video.lora_export_name(name), (module.out_features, module.in_features))
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert len(ours) == count and ours == set(golden_names(model))
    original = {exported.removeprefix("diffusion_model.") + ".weight": None for _, exported, _ in ours}
    assert set(convert_wan_transformer_to_diffusers(original)) == {f"{name}.weight" for name, _, _ in ours}


def test_a_layer_without_a_known_name_raises():
    with pytest.raises(KeyError):
        wan_video.lora_export_name("blocks.0.attn1.to_something")
    with pytest.raises(KeyError):
        wan_video.lora_export_name("patch_embedding")


def original_layout(state_dict):
    """Rename tensors to what the authors call them, by the rules of facts/lora_formats.md, 2.9."""
    renamed = {}
    for name, tensor in state_dict.items():
        module, _, kind = name.rpartition(".")
        if name.endswith("scale_shift_table"):
            module = name.removesuffix("scale_shift_table")
            renamed[f"{module or 'head.'}modulation"] = tensor
            continue
        for ours, theirs in (
            ("condition_embedder.image_embedder.norm1", "img_emb.proj.0"),
            ("condition_embedder.image_embedder.norm2", "img_emb.proj.4"),
            ("norm_added_k", "norm_k_img"),
            (".norm2", ".norm3"),
        ):
            module = module.replace(ours, theirs)
        if "norm" in module or module.startswith("img_emb"):
            module = module.replace("attn1", "self_attn").replace("attn2", "cross_attn")
        elif module != "patch_embedding":
            module = wan_video.lora_export_name(module).removeprefix("diffusion_model.")
        renamed[f"{module}.{kind}"] = tensor
    return renamed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["wan_i2v", "wan_t2v_a14b"])
def test_transformer_from_a_folder_and_from_one_file(family, dtype, tiny_model, tmp_path):
    """From a file in the authors' or diffusers' names the same bits, dtypes and buffers as from a folder."""
    model = str(tiny_model(family))
    original = loading.load_transformer(wan_video.WanVideo.parts["transformer"][0], model, dtype=torch.float32)
    weights = {name: tensor + 1 for name, tensor in original.state_dict().items()}
    original.load_state_dict(weights)
    original.save_pretrained(tmp_path / "transformer")
    save_file(original_layout(weights), tmp_path / "one.safetensors")
    save_file(weights, tmp_path / "two.SAFETENSORS")
    places = [str(tmp_path / path) for path in ("transformer", "one.safetensors", "two.SAFETENSORS")]
    digests = [
        loading.check_weights(wan_video.WanVideo.parts, model, ("transformer",), transformer_path=path)
        for path in places
    ]
    assert digests[0] == digests[1] == digests[2]
    folder, *files = (
        loading.load_transformer(wan_video.WanVideo.parts["transformer"][0], model, dtype=dtype, transformer_path=path)
        for path in places
    )
    assert all(torch.equal(tensor, weights[name].to(tensor.dtype)) for name, tensor in folder.state_dict().items())
    for file in files:
        assert not file.training
        for expected, ours in (
            (folder.named_parameters(), file.named_parameters()),
            (folder.named_buffers(), file.named_buffers()),
        ):
            for (name, tensor), (other_name, other) in zip(expected, ours, strict=True):
                assert name == other_name and tensor.dtype == other.dtype and torch.equal(tensor, other), name


def test_bad_files_are_refused(tiny_model, tmp_path):
    model = str(tiny_model("wan_t2v"))
    weights = load_file(tiny_model("wan_t2v") / "transformer" / "diffusion_pytorch_model.safetensors")
    lacking = original_layout(weights)
    del lacking["head.head.bias"]
    save_file(lacking, tmp_path / "cut.safetensors")
    save_file(original_layout(weights) | {"head.head.bias": torch.zeros(3)}, tmp_path / "shape.safetensors")
    for path, said in (
        ("cut", "lacks 1 of .* proj_out.bias"),
        ("shape", r"proj_out.bias has the shape \(3,\), and the model has \(64,\)"),
    ):
        with pytest.raises(ValueError, match=said):
            loading.check_weights(
                wan_video.WanVideo.parts,
                model,
                ("transformer",),
                transformer_path=str(tmp_path / f"{path}.safetensors"),
            )


@pytest.mark.parametrize("pipeline, other", [("wan_t2v", "wan_i2v"), ("wan_i2v", "wan_flf2v"), ("wan_i2v", "wan_t2v")])
def test_a_transformer_with_other_inputs_is_refused(pipeline, other, tiny_model):
    path = str(tiny_model(other) / "transformer")
    with pytest.raises(ValueError, match="(in_channels|pos_embed_seq_len) .* which it is to replace"):
        loading.load_transformer_skeleton(
            wan_video.WanVideo.parts["transformer"][0], str(tiny_model(pipeline)), transformer_path=path
        )


def test_weights_of_each_expert_are_checked(tiny_model, tmp_path):
    model = tiny_model("wan_t2v_a14b")
    both = loading.check_weights(wan_video.WanVideo.parts, str(model), ("transformer", "transformer_2"))
    assert both["transformer"] != both["transformer_2"]
    for name in ("model_index.json", "transformer"):
        (tmp_path / name).symlink_to(model / name)
    assert loading.check_weights(wan_video.WanVideo.parts, str(tmp_path), ("transformer",)) == {
        "transformer": both["transformer"]
    }
    with pytest.raises(OSError, match="transformer_2"):
        loading.check_weights(wan_video.WanVideo.parts, str(tmp_path), ("transformer_2",), required=True)
