"""scripts/make_tiny_model.py: its folders against the stock libraries, which are the independent reference here."""

import importlib.util
import logging
import os
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch


ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "make_tiny_model.py"
PROMPTS = ["", " ", "a cat", "\n\nA cat", " \n \n\tx", "'s", ":", "user\n", "1 zebra, 2 gnus", "\u0301a", "日本語 😀"]


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

    pipeline = DiffusionPipeline.from_pretrained(tiny_model)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


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

    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    # Both libraries stop their records at their own root loggers, so caplog would see none.
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        pipeline = DiffusionPipeline.from_pretrained(tiny_model)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)

    assert [record.getMessage() for record in records] == []
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

    pipeline = DiffusionPipeline.from_pretrained(tiny_model, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
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
