"""scripts/make_tiny_model.py: its folders against the stock libraries, which are the independent reference here."""

import functools
import importlib.util
import logging
import os
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch


ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "make_tiny_model.py"
PROMPTS = ["", " ", "a cat", "\n\nA cat", " \n \n\tx", "'s", ":", "user\n", "1 zebra, 2 gnus", "\u0301a", "日本語 😀"]


# Pipeline class, then what the published folder of the family has: the scheduler's shift, the share of the noise where
# the experts change, and the transformer's channels.
WAN_FAMILIES = {
    "wan_t2v": ("WanPipeline", 3.0, None, 16, 16),
    "wan_i2v": ("WanImageToVideoPipeline", 3.0, None, 36, 16),
    "wan_flf2v": ("WanImageToVideoPipeline", 16.0, None, 36, 16),
    "wan_ti2v": ("WanPipeline", 5.0, None, 48, 48),
    "wan_t2v_a14b": ("WanPipeline", 3.0, 0.875, 16, 16),
    "wan_i2v_a14b": ("WanImageToVideoPipeline", 3.0, 0.9, 36, 16),
}


def run_script(*flags, **environment):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, flags)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def load(pipeline_class, folder, **kwargs):
    """A pipeline that draws no progress bars, and the warnings that were logged while it was loaded."""
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    # Both libraries stop their records at their own root loggers, so caplog would see none.
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        pipeline = pipeline_class.from_pretrained(folder, **kwargs)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline, [record.getMessage() for record in records]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "qwen_image"
    result = run_script("--family", "qwen_image", "--output", folder)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1 and str(folder) in result.stdout and "MB" in result.stdout
    return folder


@pytest.fixture(scope="module")
def pipeline(tiny_model):
    from diffusers import DiffusionPipeline

    return load(DiffusionPipeline, tiny_model)[0]


@pytest.fixture(scope="module")
def make_tiny_model():
    spec = importlib.util.spec_from_file_location("make_tiny_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def predict(transformer, prompt_embeds, sigma=0.5):
    """The transformer's answer to fixed noise on a 64x64 picture: [1, 16, 64]."""
    with torch.no_grad():
        return transformer(
            hidden_states=torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(0)),
            timestep=torch.tensor([sigma]),
            encoder_hidden_states=prompt_embeds,
            img_shapes=[[(1, 4, 4)]],
            return_dict=False,
        )[0]


def test_stock_pipeline_loads_without_a_warning(tiny_model):
    from diffusers import DiffusionPipeline

    pipeline, warnings = load(DiffusionPipeline, tiny_model)
    assert warnings == []
    assert {name: type(part).__name__ for name, part in pipeline.components.items()} == {
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        "tokenizer": "Qwen2Tokenizer",
        "transformer": "QwenImageTransformer2DModel",
        "vae": "AutoencoderKLQwenImage",
    }
    for part in (pipeline.text_encoder, pipeline.transformer, pipeline.vae):
        assert {parameter.dtype for parameter in part.parameters()} == {torch.float32}


def test_components_load_every_key(tiny_model):
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLForConditionalGeneration

    for model_class, subfolder in (
        (QwenImageTransformer2DModel, "transformer"),
        (AutoencoderKLQwenImage, "vae"),
        (Qwen2_5_VLForConditionalGeneration, "text_encoder"),
    ):
        _, info = model_class.from_pretrained(tiny_model, subfolder=subfolder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


@pytest.mark.parametrize("guidance", [{}, {"negative_prompt": " ", "true_cfg_scale": 4.0}])
def test_stock_pipeline_samples(pipeline, guidance):
    def sample(prompt):
        return pipeline(
            prompt,
            height=64,
            width=64,
            num_inference_steps=2,
            output_type="np",
            generator=torch.Generator().manual_seed(0),
            **guidance,
        ).images

    images = sample("a cat")
    assert images.shape == (1, 64, 64, 3)
    assert np.isfinite(images).all()
    assert images.std() > 0.05
    assert np.abs(images - sample("two dogs")).max() > 1e-3


def test_samples_in_bf16(tiny_model):
    from diffusers import DiffusionPipeline

    pipeline, _ = load(DiffusionPipeline, tiny_model, dtype=torch.bfloat16)
    assert pipeline.transformer.dtype == pipeline.vae.dtype == pipeline.text_encoder.dtype == torch.bfloat16
    images = pipeline("a cat", height=64, width=64, num_inference_steps=2, output_type="np").images
    assert images.shape == (1, 64, 64, 3)
    assert np.isfinite(images).all()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_cut_falls_between_template_and_prompt(pipeline, prompt):
    """As for the real tokenizer, 34 tokens stand before the prompt, and none of them takes anything of it along."""
    before, after = pipeline.prompt_template_encode.split("{}")
    ids = pipeline.tokenizer(before + prompt + after).input_ids
    assert pipeline.prompt_template_encode_start_idx == 34
    assert pipeline.tokenizer.decode(ids[:34]) == before
    assert pipeline.tokenizer.decode(ids[34:]) == unicodedata.normalize("NFC", prompt) + after


def test_template_words_are_single_tokens(pipeline):
    tokens = pipeline.tokenizer.tokenize(pipeline.prompt_template_encode.split("{}")[0])
    assert len(tokens) == 34
    assert {"system", "Describe", "Ġdetailing", "Ġrelationships", "Ġbackground", "user"} <= set(tokens)
    assert pipeline.tokenizer.tokenize("a photo of a cat") == ["a", "Ġphoto", "Ġof", "Ġa", "Ġcat"]


def test_encode_prompt_keeps_prompt_and_suffix(pipeline):
    with torch.no_grad():
        empty, _ = pipeline.encode_prompt("")
        cat, _ = pipeline.encode_prompt("a cat")
        batch, mask = pipeline.encode_prompt(["a cat", ""])
    assert empty.shape == (1, 5, 32)
    assert cat.shape == (1, 7, 32)
    assert mask.sum(dim=1).tolist() == [7, 5]
    torch.testing.assert_close(batch[0], cat[0])
    # The last positions are the same tokens: they differ only if attention carries the prompt to them.
    assert (cat[0, -1] - empty[0, -1]).abs().max() > 0.05
    assert 0.3 < cat.std() < 3


def test_tokenizer_knows_the_special_tokens(pipeline):
    names = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
    tokenizer = pipeline.tokenizer
    ids = {name: tokenizer(f"<|{name}|>").input_ids for name in names}
    assert all(len(value) == 1 for value in ids.values())
    assert tokenizer.decode([value[0] for value in ids.values()], skip_special_tokens=True) == ""
    config = pipeline.text_encoder.config
    assert [config.image_token_id] == ids["image_pad"]
    assert [config.video_token_id] == ids["video_pad"]
    assert [config.vision_start_token_id] == ids["vision_start"]
    assert [config.vision_end_token_id] == ids["vision_end"]
    assert [tokenizer.pad_token_id] == ids["endoftext"] and [tokenizer.eos_token_id] == ids["im_end"]
    assert config.text_config.vocab_size == len(tokenizer)


def test_tokenizer_returns_any_text(pipeline):
    texts = [
        "Hello , world !  two  spaces\t\r\n\n end ",
        "naïve café, 日本語 العربية ไทย 👩‍👩‍👧 \U0001f9ff",
        "".join(map(chr, range(0x20, 0x250))),
        "\x00\x01\x7f\ufeff\uffff",
    ]
    for text in texts:
        assert pipeline.tokenizer.decode(pipeline.tokenizer(text).input_ids) == text
    byte_tokens = [token for token in pipeline.tokenizer.get_vocab() if len(token) == 1]
    assert len(byte_tokens) == 256


def test_vae_latents_have_the_real_statistics(pipeline):
    """Only so are the normalised latents what the scheduler and a loss expect: of unit scale, and one image's own."""
    vae = pipeline.vae
    shape = (1, 16, 1, 1, 1)
    latents_mean = torch.tensor(vae.config.latents_mean).view(shape)
    latents_std = torch.tensor(vae.config.latents_std).view(shape)
    generator = torch.Generator().manual_seed(1)
    images = torch.nn.functional.interpolate(torch.rand(8, 3, 8, 8, generator=generator) * 2 - 1, size=(64, 64))
    with torch.no_grad():
        latents = (vae.encode(images.unsqueeze(2)).latent_dist.mode() - latents_mean) / latents_std
        noise = torch.randn(8, 16, 1, 8, 8, generator=generator)
        decoded = vae.decode(noise * latents_std + latents_mean).sample
    assert latents.shape == (8, 16, 1, 8, 8)
    assert decoded.shape == (8, 3, 1, 64, 64)
    assert latents.mean(dim=(0, 2, 3, 4)).abs().max() < 1
    channel_std = latents.std(dim=(0, 2, 3, 4))
    assert 0.3 < channel_std.min() and channel_std.max() < 3
    assert latents.std(dim=0).mean() > 0.5  # at one place, over the images
    assert decoded.std(dim=0).mean() > 0.1


def test_transformer_output_is_of_unit_scale_and_depends_on_its_inputs(pipeline):
    with torch.no_grad():
        cat, dogs = (pipeline.encode_prompt(prompt)[0] for prompt in ("a cat", "two dogs"))
    output = predict(pipeline.transformer, cat)
    assert 0.3 < output.std() < 3
    assert (output - predict(pipeline.transformer, dogs)).std() > 0.02
    assert (output - predict(pipeline.transformer, cat, sigma=0.9)).std() > 0.02


def test_loaded_models_equal_built_ones(make_tiny_model, pipeline):
    """Also the tables that no file holds, such as the rotary ones."""
    torch.manual_seed(0)
    built = make_tiny_model.make_qwen_image(num_layers=2, num_attention_heads=2, attention_head_dim=16)
    with torch.no_grad():
        embeds, loaded_embeds = (part.encode_prompt("a cat")[0] for part in (built, pipeline))
        images = torch.rand(1, 3, 1, 64, 64) * 2 - 1
        latents, loaded_latents = (part.vae.encode(images).latent_dist.mode() for part in (built, pipeline))
        outputs, loaded_outputs = (predict(part.transformer, embeds) for part in (built, pipeline))
    # Not bit for bit: loaded weights lie in the mapped file at another alignment, and CPU kernels add up differently.
    torch.testing.assert_close(loaded_embeds, embeds, rtol=0, atol=1e-5)
    torch.testing.assert_close(loaded_latents, latents, rtol=0, atol=1e-4)
    torch.testing.assert_close(loaded_outputs, outputs, rtol=0, atol=1e-5)


def test_same_seed_same_bytes(tiny_model, tmp_path):
    for name in ("model_index.json", "vae/config.json", "vae/diffusion_pytorch_model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("left over")
    # Hash seed, number of threads and convolution kernels are not flags: none of them may reach the files.
    environment = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    result = run_script("--family", "qwen_image", "--output", tmp_path, **environment)
    assert result.returncode == 0, result.stderr
    first, second = contents(tiny_model), contents(tmp_path)
    assert sorted(first) == sorted(second)
    assert [name for name in first if first[name] != second[name]] == []


def test_seed_and_size_flags(tiny_model, tmp_path):
    from diffusers import QwenImageTransformer2DModel

    flags = ("--num_layers", 4, "--num_attention_heads", 4, "--attention_head_dim", 32)
    result = run_script("--family", "qwen_image", "--output", tmp_path, "--seed", 1, *flags)
    assert result.returncode == 0, result.stderr
    first, second = contents(tiny_model), contents(tmp_path)
    assert sorted(name for name in first if first[name] != second[name]) == [
        "text_encoder/model.safetensors",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    ]
    transformer = QwenImageTransformer2DModel.from_pretrained(tmp_path, subfolder="transformer")
    assert len(transformer.transformer_blocks) == 4
    assert transformer.inner_dim == 128
    assert 0.3 < predict(transformer, torch.randn(1, 7, 32)).std() < 3


def test_size(tiny_model):
    assert sum(map(len, contents(tiny_model).values())) < 4e6


@pytest.fixture(scope="module")
def built_wan(make_tiny_model, tmp_path_factory):
    """Function from a family's name to its folder and the pipeline that was saved there, each built once."""
    folder = tmp_path_factory.mktemp("tiny-wan")

    @functools.cache
    def build(family):
        torch.manual_seed(0)
        pipeline = make_tiny_model.FAMILIES[family](num_layers=2, num_attention_heads=2, attention_head_dim=16)
        pipeline.save_pretrained(folder / family)
        return folder / family, pipeline

    return build


@pytest.fixture(scope="module", params=WAN_FAMILIES)
def wan_family(request):
    return request.param


@pytest.fixture(scope="module")
def wan_folder(built_wan, wan_family):
    return built_wan(wan_family)[0]


@pytest.fixture(scope="module")
def wan(wan_folder):
    """The family's folder as the stock library loads it."""
    from diffusers import DiffusionPipeline

    return load(DiffusionPipeline, wan_folder)[0]


def picture(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels).resize((64, 64), PIL.Image.Resampling.BICUBIC)


def needed_pictures(family):
    if family == "wan_flf2v":
        return {"image": picture(0), "last_image": picture(1)}
    return {"image": picture(0)} if "i2v" in family and family != "wan_ti2v" else {}


def sample_video(pipeline, prompt="a cat", **pictures):
    return pipeline(
        prompt=prompt,
        height=64,
        width=64,
        num_frames=5,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        **pictures,
    ).frames


def random_clips(number, num_frames, seed=1):
    """Blocks of colour that go over into others: [number, 3, num_frames, 64, 64]."""
    pictures = torch.rand(2, number, 3, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    clips = torch.lerp(*pictures, torch.linspace(0, 1, num_frames).view(-1, 1, 1))
    return clips.repeat_interleave(8, dim=3).repeat_interleave(8, dim=4)


def wan_inputs(pipeline, prompt="a cat"):
    """The transformer's inputs for fixed noise of two latent frames of 8x8."""
    config = pipeline.transformer.config
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, config.in_channels, 2, 8, 8, generator=generator),
        "timestep": torch.full((1, 2 * 4 * 4) if pipeline.config.expand_timesteps else (1,), 500.0),
    }
    with torch.no_grad():
        inputs["encoder_hidden_states"] = pipeline.encode_prompt(prompt, None, False, max_sequence_length=512)[0]
        if config.image_dim is not None:
            pictures = [picture(0), picture(1)] if config.pos_embed_seq_len else [picture(0)]
            inputs["encoder_hidden_states_image"] = pipeline.encode_image(pictures)
    return inputs


def predict_wan(transformer, inputs):
    with torch.no_grad():
        return transformer(**inputs, return_dict=False)[0]


def test_wan_folder_loads_without_a_warning(wan_family, wan_folder):
    # Without torchvision transformers says, once, that the class under this name is that which works through Pillow.
    from diffusers import DiffusionPipeline, WanImageToVideoPipeline, WanPipeline  # noqa: F401
    from transformers import CLIPImageProcessor

    pipeline, warnings = load(DiffusionPipeline, wan_folder)
    assert warnings == []
    assert type(pipeline).__name__ == WAN_FAMILIES[wan_family][0]
    expected = {
        "scheduler": "UniPCMultistepScheduler",
        "text_encoder": "UMT5EncoderModel",
        "tokenizer": "TokenizersBackend",
        "transformer": "WanTransformer3DModel",
        "vae": "AutoencoderKLWan",
    }
    if wan_family.endswith("a14b"):
        expected["transformer_2"] = "WanTransformer3DModel"
    if wan_family in ("wan_i2v", "wan_flf2v"):
        expected |= {"image_encoder": "CLIPVisionModel", "image_processor": CLIPImageProcessor.__name__}
    parts = {name: part for name, part in pipeline.components.items() if part is not None}
    assert {name: type(part).__name__ for name, part in parts.items()} == expected
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            assert {parameter.dtype for parameter in part.parameters()} == {torch.float32}
            assert not part.training


def test_wan_configs_are_the_published_ones(wan_family, wan):
    _, flow_shift, boundary_ratio, in_channels, out_channels = WAN_FAMILIES[wan_family]
    assert wan.scheduler.config.flow_shift == flow_shift
    assert wan.scheduler.config.prediction_type == "flow_prediction"
    assert wan.scheduler.config.use_flow_sigmas and wan.scheduler.config.num_train_timesteps == 1000
    assert wan.config.boundary_ratio == boundary_ratio
    assert wan.config.expand_timesteps == (wan_family == "wan_ti2v")
    has_image_encoder = wan_family in ("wan_i2v", "wan_flf2v")
    for transformer in filter(None, (wan.transformer, wan.transformer_2)):
        config = transformer.config
        assert (config.in_channels, config.out_channels) == (in_channels, out_channels)
        assert tuple(config.patch_size) == (1, 2, 2)
        assert config.cross_attn_norm and config.qk_norm == "rms_norm_across_heads"
        assert (config.num_layers, config.num_attention_heads, config.attention_head_dim) == (2, 2, 16)
        assert config.text_dim == wan.text_encoder.config.d_model
        assert config.image_dim == (32 if has_image_encoder else None)
        assert config.added_kv_proj_dim == (32 if has_image_encoder else None)
        assert config.pos_embed_seq_len == (514 if wan_family == "wan_flf2v" else None)
    assert wan.vae_scale_factor_spatial == (16 if wan_family == "wan_ti2v" else 8)
    assert wan.vae_scale_factor_temporal == 4
    assert wan.vae.config.z_dim == len(wan.vae.config.latents_mean) == len(wan.vae.config.latents_std) == out_channels


def test_wan_components_load_every_key(wan, wan_folder):
    for name, part in wan.components.items():
        if isinstance(part, torch.nn.Module):
            _, info = type(part).from_pretrained(wan_folder, subfolder=name, output_loading_info=True)
            assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_wan_samples_by_caption_and_pictures(wan_family, wan):
    pictures = needed_pictures(wan_family)
    frames = sample_video(wan, **pictures)
    assert frames.shape == (1, 5, 64, 64, 3)
    assert np.isfinite(frames).all()
    assert frames.std() > 0.05
    assert ((frames <= 0) | (frames >= 1)).mean() < 0.1
    assert (frames - sample_video(wan, "two dogs", **pictures)).std() > 0.02
    for name in pictures:
        assert (frames - sample_video(wan, **pictures | {name: picture(7)})).std() > 0.02


def test_wan_ti2v_samples_from_an_image(built_wan):
    from diffusers import WanImageToVideoPipeline

    pipeline, warnings = load(WanImageToVideoPipeline, built_wan("wan_ti2v")[0])
    assert warnings == []
    assert pipeline.config.expand_timesteps
    frames = sample_video(pipeline, image=picture(0))
    assert frames.shape == (1, 5, 64, 64, 3)
    assert np.isfinite(frames).all() and frames.std() > 0.05
    assert (frames - sample_video(pipeline, "two dogs", image=picture(0))).std() > 0.02
    # Frames after the first, too: those that are generated.
    assert (frames - sample_video(pipeline, image=picture(7)))[:, 1:].std() > 0.02


def test_wan_samples_in_bf16(wan_family, wan_folder):
    from diffusers import DiffusionPipeline

    pipeline, _ = load(DiffusionPipeline, wan_folder, dtype=torch.bfloat16)
    assert pipeline.transformer.dtype == pipeline.vae.dtype == pipeline.text_encoder.dtype == torch.bfloat16
    frames = sample_video(pipeline, **needed_pictures(wan_family))
    assert frames.shape == (1, 5, 64, 64, 3)
    assert np.isfinite(frames).all()


def test_wan_transformer_output_is_of_unit_scale_and_depends_on_its_inputs(wan):
    inputs = wan_inputs(wan)
    output = predict_wan(wan.transformer, inputs)
    assert output.shape == (1, wan.transformer.config.out_channels, 2, 8, 8)
    assert 0.3 < output.std() < 3
    other = wan_inputs(wan, "two dogs")["encoder_hidden_states"]
    changed = [
        {"encoder_hidden_states": other},
        {"timestep": inputs["timestep"] + 400},
        {"hidden_states": inputs["hidden_states"].flip(2)},
    ]
    if wan.transformer.config.in_channels == 36:
        for channels in (slice(16, 20), slice(20, 36)):  # mask, condition
            hidden_states = inputs["hidden_states"].clone()
            hidden_states[:, channels] *= -1
            changed.append({"hidden_states": hidden_states})
    if wan.transformer.config.image_dim is not None:
        with torch.no_grad():
            pictures = [picture(seed) for seed in range(7, 7 + len(inputs["encoder_hidden_states_image"]))]
            changed.append({"encoder_hidden_states_image": wan.encode_image(pictures)})
    for change in changed:
        # bf16 rounding moves the output by less than 0.01.
        assert (output - predict_wan(wan.transformer, inputs | change)).std() > 0.05


def test_wan_timesteps_act_token_by_token(built_wan):
    pipeline = built_wan("wan_ti2v")[1]
    inputs = wan_inputs(pipeline)
    timestep = inputs["timestep"].clone()
    timestep[:, :16] = 0  # the first latent frame's tokens
    output, changed = (predict_wan(pipeline.transformer, inputs | change) for change in ({}, {"timestep": timestep}))
    assert (output - changed)[:, :, 0].std() > 0.2


def test_wan_position_table_acts(built_wan):
    """It tells the first image from the last one."""
    pipeline = built_wan("wan_flf2v")[1]
    inputs = wan_inputs(pipeline)
    swapped = inputs | {"encoder_hidden_states_image": inputs["encoder_hidden_states_image"].flip(0)}
    output, output_swapped = (predict_wan(pipeline.transformer, each) for each in (inputs, swapped))
    assert (output - output_swapped).std() > 0.02


@pytest.mark.parametrize("family", ["wan_t2v_a14b", "wan_i2v_a14b"])
def test_wan_experts_differ(built_wan, family):
    folder, pipeline = built_wan(family)
    configs = [(folder / name / "config.json").read_bytes() for name in ("transformer", "transformer_2")]
    assert configs[0] == configs[1]
    inputs = wan_inputs(pipeline)
    high, low = (predict_wan(expert, inputs) for expert in (pipeline.transformer, pipeline.transformer_2))
    assert (high - low).std() > 0.5
    low_weights = pipeline.transformer_2.state_dict()
    equal = [name for name, weight in pipeline.transformer.state_dict().items() if weight.equal(low_weights[name])]
    assert all("norm" in name for name in equal)


@pytest.mark.parametrize("family", ["wan_t2v", "wan_ti2v"])
@pytest.mark.parametrize("num_frames", [5, 9])
def test_wan_vae_latents_have_the_real_statistics(built_wan, family, num_frames):
    vae = built_wan(family)[1].vae
    shape = (1, -1, 1, 1, 1)
    latents_mean = torch.tensor(vae.config.latents_mean).view(shape)
    latents_std = torch.tensor(vae.config.latents_std).view(shape)
    with torch.no_grad():
        latents = (vae.encode(random_clips(8, num_frames)).latent_dist.mode() - latents_mean) / latents_std
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(1))
        decoded = vae.decode(noise * latents_std + latents_mean).sample
    side = 64 // vae.config.scale_factor_spatial
    assert latents.shape == (8, vae.config.z_dim, 1 + num_frames // 4, side, side)
    assert decoded.shape == (8, 3, num_frames, 64, 64)
    assert latents.mean(dim=(0, 2, 3, 4)).abs().max() < 1
    channel_std = latents.std(dim=(0, 2, 3, 4))
    assert 0.3 < channel_std.min() and channel_std.max() < 3
    assert latents.std(dim=0).mean() > 0.4  # at one place, over the clips
    assert decoded.std(dim=0).mean() > 0.1
    assert (decoded.abs() == 1).float().mean() < 0.1


def test_wan_tokenizer_is_as_the_pipeline_calls_it(built_wan):
    from transformers import AutoTokenizer

    folder, pipeline = built_wan("wan_t2v")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id] == [0, 1, 2]
    assert len(tokenizer) == pipeline.text_encoder.config.vocab_size
    assert tokenizer.tokenize("a photo of a cat") == ["▁a", "▁photo", "▁of", "▁a", "▁cat"]
    prompts = ["", "a cat", "a photo of two cats " * 200]
    inputs = tokenizer(
        prompts, padding="max_length", max_length=512, truncation=True, return_attention_mask=True, return_tensors="pt"
    )
    assert inputs.input_ids.shape == (3, 512)
    assert inputs.attention_mask.sum(dim=1).tolist() == [1, 3, 512]
    assert inputs.input_ids[1, 2:5].tolist() == [1, 0, 0] and inputs.input_ids[2, -1] == 1


@pytest.mark.parametrize(
    "prompt",
    [
        *PROMPTS,
        "naïve café, العربية ไทย 👩‍👩‍👧 \U0001f9ff",
        "".join(map(chr, range(0x20, 0x250))),
        "\x00\x7f\uffff<0x41>",
    ],
)
def test_wan_tokenizer_returns_any_text(built_wan, prompt):
    tokenizer = built_wan("wan_t2v")[1].tokenizer
    ids = tokenizer(prompt).input_ids
    assert tokenizer.unk_token_id not in ids
    expected = unicodedata.normalize("NFKC", prompt).removeprefix(" ")
    assert tokenizer.decode(ids, skip_special_tokens=True) == expected


def test_wan_text_encoder_mixes_the_words(built_wan):
    pipeline = built_wan("wan_t2v")[1]
    with torch.no_grad():
        prompts = ["a red cat", "a blue cat", "red a cat"]
        red, blue, order = pipeline.encode_prompt(prompts, None, False, max_sequence_length=512)[0]
    assert red.shape == (512, 32)
    assert not red[4:].any()
    assert 0.3 < red[:4].std() < 3
    # The last word's state hears of the words before it, and of their order: each layer has its own table for that.
    assert (red[2] - blue[2]).abs().max() > 0.05
    assert (red[2] - order[2]).abs().max() > 0.01
    tables = [name for name, _ in pipeline.text_encoder.named_parameters() if "relative_attention_bias" in name]
    assert len(tables) == 2


@pytest.mark.parametrize("family", ["wan_i2v", "wan_flf2v"])
def test_wan_image_encoder_sees_the_picture(built_wan, family):
    pipeline = built_wan(family)[1]
    pixels = pipeline.image_processor(images=[picture(0), picture(1)], return_tensors="pt")
    assert pixels.pixel_values.shape == (2, 3, 224, 224)
    with torch.no_grad():
        states = pipeline.image_encoder(**pixels, output_hidden_states=True).hidden_states
        embeds = pipeline.encode_image([picture(0), picture(1)])
    assert embeds.shape == (2, 257, 32)
    assert embeds.equal(states[-2])
    assert (states[-2] - states[0]).std() > 0.1
    assert (embeds[0] - embeds[1]).std(dim=-1).min() > 0.05  # the class token's state, too
    assert 0.3 < embeds.std() < 3


def test_wan_loaded_models_equal_built_ones(built_wan, wan, wan_family):
    """Also the rotary tables, which no file holds."""
    built = built_wan(wan_family)[1]
    inputs, loaded_inputs = wan_inputs(built), wan_inputs(wan)
    outputs, loaded_outputs = (predict_wan(part.transformer, inputs) for part in (built, wan))
    clips = random_clips(1, 5)
    with torch.no_grad():
        latents, loaded_latents = (part.vae.encode(clips).latent_dist.mode() for part in (built, wan))
    for name in inputs:
        torch.testing.assert_close(loaded_inputs[name], inputs[name], rtol=0, atol=1e-5)
    torch.testing.assert_close(loaded_outputs, outputs, rtol=0, atol=1e-4)
    torch.testing.assert_close(loaded_latents, latents, rtol=0, atol=1e-4)


def test_wan_same_seed_same_bytes(built_wan, tmp_path):
    """Every family from one process, which imports the libraries once."""
    code = (
        "import sys, make_tiny_model\n"
        "output, *families = sys.argv[1:]\n"
        "for family in families:\n"
        "    sys.argv[1:] = ['--family', family, '--output', f'{output}/{family}']\n"
        "    make_tiny_model.main()\n"
    )
    environment = {
        "PYTHONPATH": str(SCRIPT.parent),
        "PYTHONHASHSEED": "7",
        "OMP_NUM_THREADS": "1",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    }
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), *WAN_FAMILIES],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(WAN_FAMILIES)
    for family in WAN_FAMILIES:
        first, second = contents(built_wan(family)[0]), contents(tmp_path / family)
        assert sorted(first) == sorted(second)
        assert [name for name in first if first[name] != second[name]] == []
        assert sum(map(len, first.values())) < 4e6


def test_wan_seed_and_size_flags(built_wan, tmp_path):
    from diffusers import DiffusionPipeline

    flags = ("--num_layers", 3, "--num_attention_heads", 4, "--attention_head_dim", 32, "--seed", 1)
    result = run_script("--family", "wan_flf2v", "--output", tmp_path, *flags)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    first, second = contents(built_wan("wan_flf2v")[0]), contents(tmp_path)
    assert sorted(name for name in first if first[name] != second[name]) == [
        "image_encoder/model.safetensors",
        "text_encoder/model.safetensors",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    ]
    pipeline, _ = load(DiffusionPipeline, tmp_path)
    transformer = pipeline.transformer
    assert len(transformer.blocks) == 3
    assert transformer.config.added_kv_proj_dim == transformer.blocks[0].attn1.inner_dim == 128
    assert 0.3 < predict_wan(transformer, wan_inputs(pipeline)).std() < 3


@pytest.mark.parametrize("attention_head_dim", [6, 8, 10, 16, 22, 64, 128])
def test_wan_head_dim_fits_the_rotary_embedding(make_tiny_model, attention_head_dim):
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

    make_tiny_model.check_wan_head_dim(attention_head_dim)
    cos, sin = WanRotaryPosEmbed(attention_head_dim, (1, 2, 2), max_seq_len=8)(torch.zeros(1, 1, 2, 4, 4))
    assert cos.shape == sin.shape == (1, 8, 1, attention_head_dim)


@pytest.mark.parametrize("attention_head_dim", [0, 4, 5, 15])
def test_wan_head_dim_is_refused(make_tiny_model, attention_head_dim):
    with pytest.raises(ValueError, match=f"even and at least 6, not {attention_head_dim}"):
        make_tiny_model.check_wan_head_dim(attention_head_dim)


@pytest.mark.parametrize(
    ("attention_head_dim", "expected"),
    [(12, (8, 2, 2)), (16, (8, 4, 4)), (32, (8, 12, 12)), (64, (8, 28, 28)), (72, (8, 32, 32)), (128, (16, 56, 56))],
)
def test_axes_dims_rope(make_tiny_model, attention_head_dim, expected):
    assert make_tiny_model.axes_dims_rope(attention_head_dim) == expected


@pytest.mark.parametrize("attention_head_dim", [8, 14, 18, 33])
def test_axes_dims_rope_refuses(make_tiny_model, attention_head_dim):
    with pytest.raises(ValueError, match=f"multiple of 4 and at least 12, not {attention_head_dim}"):
        make_tiny_model.axes_dims_rope(attention_head_dim)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--family", "no_such_family"), "qwen_image"),
        (("--family", "qwen_image", "--attention_head_dim", "14"), "--attention_head_dim must be a multiple of 4"),
        (("--family", "wan_t2v", "--attention_head_dim", "15"), "--attention_head_dim must be even and at least 6"),
        (("--family", "qwen_image", "--num_layers", "0"), "--num_layers must be at least 1"),
        (("--fam", "qwen_image"), "--family"),
    ],
)
def test_bad_flags_exit_2(tmp_path, flags, message):
    result = run_script("--output", tmp_path / "model", *flags)
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
    assert not (tmp_path / "model").exists()


def test_output_must_not_be_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    result = run_script("--family", "qwen_image", "--output", tmp_path / "file")
    assert result.returncode == 2
    assert "--output must be a folder" in result.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_help_is_quick():
    start = time.monotonic()
    result = run_script("--help")
    assert result.returncode == 0 and "--family" in result.stdout
    assert time.monotonic() - start < 2
