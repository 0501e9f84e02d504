"""scripts/make_tiny_model.py: its folders against the stock libraries, which are the independent reference here."""

import functools
import importlib.util
import logging
import time
import unicodedata

import numpy as np
import PIL.Image
import pytest
import torch

from tests.runs import REPO, run_script


SCRIPT = REPO / "scripts" / "make_tiny_model.py"

QWEN_PARTS = {
    "scheduler": "FlowMatchEulerDiscreteScheduler",
    "text_encoder": "Qwen2_5_VLForConditionalGeneration",
    "tokenizer": "Qwen2Tokenizer",
    "transformer": "QwenImageTransformer2DModel",
    "vae": "AutoencoderKLQwenImage",
}
WAN_PARTS = {
    "scheduler": "UniPCMultistepScheduler",
    "text_encoder": "UMT5EncoderModel",
    "tokenizer": "TokenizersBackend",
    "transformer": "WanTransformer3DModel",
    "vae": "AutoencoderKLWan",
}
IMAGE_ENCODER = {"image_encoder": "CLIPVisionModel"}
TWO_EXPERTS = {"transformer_2": "WanTransformer3DModel"}

# Pipeline class, parts, images that sampling needs, and what the published folder of the family has: the scheduler's
# shift, the share of the noise where the experts change, and the transformer's channels.
FAMILIES = {
    "qwen_image": ("QwenImagePipeline", QWEN_PARTS, [], {"in_channels": 64, "out_channels": 16}),
    "wan_t2v": ("WanPipeline", WAN_PARTS, [], {"flow_shift": 3.0, "in_channels": 16, "out_channels": 16}),
    "wan_i2v": (
        *("WanImageToVideoPipeline", WAN_PARTS | IMAGE_ENCODER, ["image"]),
        {"flow_shift": 3.0, "in_channels": 36, "out_channels": 16, "pos_embed_seq_len": None},
    ),
    "wan_flf2v": (
        *("WanImageToVideoPipeline", WAN_PARTS | IMAGE_ENCODER, ["image", "last_image"]),
        {"flow_shift": 16.0, "in_channels": 36, "out_channels": 16, "pos_embed_seq_len": 514},
    ),
    "wan_ti2v": (
        *("WanPipeline", WAN_PARTS, []),
        {"flow_shift": 5.0, "in_channels": 48, "out_channels": 48, "expand_timesteps": True},
    ),
    "wan_t2v_a14b": (
        *("WanPipeline", WAN_PARTS | TWO_EXPERTS, []),
        {"flow_shift": 3.0, "in_channels": 16, "out_channels": 16, "boundary_ratio": 0.875},
    ),
    "wan_i2v_a14b": (
        *("WanImageToVideoPipeline", WAN_PARTS | TWO_EXPERTS, ["image"]),
        {"flow_shift": 3.0, "in_channels": 36, "out_channels": 16, "boundary_ratio": 0.9},
    ),
}


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def load(folder, pipeline_class="DiffusionPipeline", **kwargs):
    """A pipeline that draws no progress bars, and the warnings that were logged while it was loaded."""
    import diffusers

    # Without torchvision transformers says, once, that the class under this name is that which works through Pillow.
    from diffusers import WanImageToVideoPipeline, WanPipeline  # noqa: F401

    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    # Both libraries stop their records at their own root loggers, so caplog would see none.
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        pipeline = getattr(diffusers, pipeline_class).from_pretrained(folder, **kwargs)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline, [record.getMessage() for record in records]


@functools.cache
def image(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels).resize((64, 64), PIL.Image.Resampling.BICUBIC)


def sample(pipeline, prompt="a cat", **settings):
    """One image or clip, of two steps from fixed noise."""
    settings |= {"height": 64, "width": 64, "num_inference_steps": 2, "generator": torch.Generator().manual_seed(0)}
    if type(pipeline).__name__ == "QwenImagePipeline":
        return pipeline(prompt, output_type="np", **settings).images
    return pipeline(prompt=prompt, num_frames=5, **settings).frames


# Their transformers are also those of wan_t2v_a14b and wan_i2v.
LIKE_OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in ("wan_t2v", "wan_i2v_a14b")]


@pytest.mark.parametrize("family", ["qwen_image", "wan_i2v", "wan_flf2v", "wan_ti2v", "wan_t2v_a14b", *LIKE_OTHERS])
def test_stock_pipeline_loads_and_samples(family, tiny_model):
    """Without a warning, every key, in fp32; what comes out depends on the caption and on each image."""
    name, expected, images, _ = FAMILIES[family]
    pipeline, warnings = load(tiny_model(family))
    assert warnings == [] and type(pipeline).__name__ == name
    parts = {name: part for name, part in pipeline.components.items() if part is not None}
    assert {name: type(part).__name__ for name, part in parts.items() if name != "image_processor"} == expected
    assert ("image_processor" in parts) == ("image_encoder" in parts)
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            assert {parameter.dtype for parameter in part.parameters()} == {torch.float32} and not part.training
            _, info = type(part).from_pretrained(tiny_model(family), subfolder=name, output_loading_info=True)
            assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    given = {name: image(seed) for seed, name in enumerate(images)}
    frames = sample(pipeline, **given)
    assert frames.shape == ((1, 64, 64, 3) if family == "qwen_image" else (1, 5, 64, 64, 3))
    assert np.isfinite(frames).all() and frames.std() > 0.05
    assert (frames - sample(pipeline, "two dogs", **given)).std() > 1e-3
    for name in given:
        assert (frames - sample(pipeline, **given | {name: image(7)})).std() > 0.02


def test_ti2v_samples_from_an_image(tiny_model):
    pipeline, warnings = load(tiny_model("wan_ti2v"), "WanImageToVideoPipeline")
    assert warnings == [] and pipeline.config.expand_timesteps
    frames = sample(pipeline, image=image(0))
    assert np.isfinite(frames).all()
    # Frames after the first, too: those that are generated.
    assert (frames - sample(pipeline, image=image(7)))[:, 1:].std() > 0.02


@pytest.mark.parametrize("family", ["qwen_image", "wan_i2v", "wan_ti2v"])
def test_samples_in_bf16(family, tiny_model):
    """Of each pair of transformer and VAE that is there one family."""
    pipeline, _ = load(tiny_model(family), dtype=torch.bfloat16)
    assert pipeline.transformer.dtype == pipeline.vae.dtype == pipeline.text_encoder.dtype == torch.bfloat16
    given = {name: image(seed) for seed, name in enumerate(FAMILIES[family][2])}
    assert np.isfinite(sample(pipeline, **given)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_are_the_published_ones(family, tiny_model):
    pipeline, _ = load(tiny_model(family), text_encoder=None, image_encoder=None)
    expected = FAMILIES[family][3]
    found = dict(pipeline.transformer.config) | dict(pipeline.scheduler.config) | dict(pipeline.config)
    assert {key: found[key] for key in expected} == expected
    channels = expected["out_channels"]
    vae = pipeline.vae.config
    assert vae.z_dim == len(vae.latents_mean) == len(vae.latents_std) == channels
    assert pipeline.transformer.config.num_layers == pipeline.transformer.config.num_attention_heads == 2
    if family != "qwen_image":
        experts = filter(None, (pipeline.transformer, pipeline.transformer_2))
        configs = [dict(expert.config) | {"_name_or_path": None} for expert in experts]
        assert all(config == configs[0] for config in configs)
        assert pipeline.vae_scale_factor_spatial == (16 if family == "wan_ti2v" else 8)


@pytest.mark.parametrize("family", ["wan_t2v_a14b", "wan_i2v_a14b"])
def test_experts_differ(family, tiny_model):
    pipeline, _ = load(tiny_model(family), text_encoder=None)
    low = pipeline.transformer_2.state_dict()
    equal = [name for name, weight in pipeline.transformer.state_dict().items() if weight.equal(low[name])]
    assert all("norm" in name for name in equal)


def test_the_prompt_template_is_cut_where_the_real_one_is(tiny_model):
    """As for the real tokenizer, 34 tokens stand before the prompt, and none of them takes anything of it along."""
    pipeline, _ = load(tiny_model("qwen_image"), transformer=None, vae=None)
    before, after = pipeline.prompt_template_encode.split("{}")
    assert pipeline.prompt_template_encode_start_idx == 34
    for prompt in ("", " ", "a cat", "\n\nA cat", "'s", ":", "user\n", "1 zebra, 2 gnus", "\u0301a", "日本語 😀"):
        ids = pipeline.tokenizer(before + prompt + after).input_ids
        assert pipeline.tokenizer.decode(ids[:34]) == before
        assert pipeline.tokenizer.decode(ids[34:]) == unicodedata.normalize("NFC", prompt) + after
    with torch.no_grad():
        batch, mask = pipeline.encode_prompt(["a cat", ""])
        cat, empty = (pipeline.encode_prompt(prompt)[0] for prompt in ("a cat", ""))
    assert mask.sum(dim=1).tolist() == [7, 5] and cat.shape == (1, 7, 32)
    torch.testing.assert_close(batch[0], cat[0])
    # The last positions are the same tokens: they differ only if attention carries the prompt to them.
    assert (cat[0, -1] - empty[0, -1]).abs().max() > 0.05


def test_tokenizers_return_any_text(tiny_model):
    qwen = load(tiny_model("qwen_image"), text_encoder=None, transformer=None, vae=None)[0].tokenizer
    wan = load(tiny_model("wan_t2v"), text_encoder=None, transformer=None, vae=None)[0].tokenizer
    for text in ("Hello , world !\t\r\n end ", "naïve café, 日本語 ไทย 👩‍👩‍👧", "".join(map(chr, range(0x20, 0x250)))):
        assert qwen.decode(qwen(text).input_ids) == text
        ids = wan(text).input_ids
        assert wan.unk_token_id not in ids
        assert wan.decode(ids, skip_special_tokens=True) == unicodedata.normalize("NFKC", text).removeprefix(" ")
    assert [wan.pad_token_id, wan.eos_token_id, wan.unk_token_id] == [0, 1, 2]
    assert wan("a cat", padding="max_length", max_length=512).input_ids[2:4] == [1, 0]
    assert len(qwen("<|im_start|><|image_pad|>").input_ids) == 2


@pytest.mark.parametrize("families", [["qwen_image"], pytest.param([*FAMILIES], marks=pytest.mark.slow)])
def test_same_seed_same_bytes(families, tiny_model, tmp_path):
    """Hash seed and convolution kernels are no flags: neither may reach the files, nor what was in the folder."""
    code = "import runpy, sys\nscript, folder, *families = sys.argv[1:]\nfor family in families:\n"
    code += "    sys.argv = [script, '--family', family, '--output', f'{folder}/{family}']\n"
    code += "    runpy.run_path(script, run_name='__main__')"
    for family in families:
        (tmp_path / family).mkdir()
        (tmp_path / family / "model_index.json").write_text("left over")
    environment = {"PYTHONHASHSEED": "7", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    done = run_script("-c", code, SCRIPT, tmp_path, *families, env=environment)
    assert done.stderr == "" and done.stdout.count("\n") == len(families)
    for family in families:
        assert f"{tmp_path / family}, " in done.stdout
        first, second = contents(tiny_model(family)), contents(tmp_path / family)
        assert sorted(first) == sorted(second) and sum(map(len, first.values())) < 4e6
        assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.parametrize("family, part", [("qwen_image", "text_encoder"), ("wan_flf2v", "image_encoder")])
def test_seed_and_size_flags(family, part, tiny_model, fork_server, tmp_path):
    flags = ("--num_layers", 3, "--num_attention_heads", 4, "--attention_head_dim", 32, "--seed", 1)
    fork_server.run(SCRIPT, "--family", family, "--output", tmp_path, *flags)
    first, second = contents(tiny_model(family)), contents(tmp_path)
    differing = {name for name in first if first[name] != second[name]}
    assert differing == {
        *(f"{part}/model.safetensors", "text_encoder/model.safetensors", "transformer/config.json"),
        *("transformer/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors"),
    }
    transformer = load(tmp_path, text_encoder=None)[0].transformer
    assert transformer.config.num_layers == 3 and transformer.config.attention_head_dim == 32


@pytest.fixture(scope="module")
def make_tiny_model():
    spec = importlib.util.spec_from_file_location("make_tiny_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_head_dims(make_tiny_model):
    for attention_head_dim in (12, 16, 32, 64, 72, 128):
        axes = make_tiny_model.axes_dims_rope(attention_head_dim)
        assert sum(axes) == attention_head_dim and all(axis > 0 and axis % 2 == 0 for axis in axes)
    assert make_tiny_model.axes_dims_rope(128) == (16, 56, 56), "as the real model has it"
    for attention_head_dim in (8, 14, 18, 33):
        with pytest.raises(ValueError, match=f"multiple of 4 and at least 12, not {attention_head_dim}"):
            make_tiny_model.axes_dims_rope(attention_head_dim)
    for attention_head_dim in (0, 4, 5, 15):
        with pytest.raises(ValueError, match=f"even and at least 6, not {attention_head_dim}"):
            make_tiny_model.check_wan_head_dim(attention_head_dim)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--family", "no_such_family"), "qwen_image"),
        (("--family", "qwen_image", "--attention_head_dim", "14"), "--attention_head_dim must be a multiple of 4"),
        (("--family", "wan_t2v", "--attention_head_dim", "15"), "--attention_head_dim must be even and at least 6"),
        (("--family", "qwen_image", "--num_layers", "0"), "--num_layers must be at least 1"),
        (("--fam", "qwen_image"), "--family"),
        (("--family", "qwen_image", "--output", SCRIPT), "--output must be a folder"),
    ],
)
def test_bad_flags_exit_2(tmp_path, flags, message, make_tiny_model, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["make_tiny_model.py", "--output", str(tmp_path / "model"), *map(str, flags)])
    with pytest.raises(SystemExit, match="2"):
        make_tiny_model.main()
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "model").exists()


def test_help_is_quick():
    start = time.monotonic()
    assert "--family" in run_script(SCRIPT, "--help").stdout
    assert time.monotonic() - start < 2
