"""A family that no other file knows goes through the whole command line: Flux, with two block lists and two texts.

It is stated here in full, as a file of `pipelines/` and its entry would, and calls diffusers' own forward under the
plan of the run. The references are runs in the plain mode and the stock pipeline that loads the results.
"""

import functools
import json
import math
import pathlib
import sys

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from safetensors.torch import load_file
from transformers import AutoConfig, CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel


ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # as an entry, which is what it is when it is run

from blockwise import offload  # noqa: E402
from pipelines.family import Family  # noqa: E402
from training import command  # noqa: E402
from training.run import run  # noqa: E402


# ---------------------------------------------------------------- the family

MAX_SEQUENCE_LENGTH = 12


class Flux(Family):
    """Flux, from text to image."""

    pipelines = (FluxPipeline,)
    parts = {
        "transformer": (FluxTransformer2DModel,),
        "text_encoder": (CLIPTextModel,),
        "text_encoder_2": (T5EncoderModel,),
        "vae": (AutoencoderKL,),
    }
    text_parts = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    padded = ()  # by the pipeline, to one length

    def num_tokens(self, height, width, num_frames=1):
        return height // 16 * (width // 16)

    def sigma_shift(self, height, width):
        return math.exp(calculate_shift(self.num_tokens(height, width)))

    def count_prompt_tokens(self, prompt):
        num_tokens = len(self.tokenizer.tokenizer_2(prompt).input_ids)
        return num_tokens, min(num_tokens, MAX_SEQUENCE_LENGTH)

    def embedded_tokens(self, num_tokens):
        return MAX_SEQUENCE_LENGTH

    def encode_prompt(self, encoder, prompt):
        with torch.no_grad():
            embeds, pooled, _ = encoder.encode_prompt(prompt, None, max_sequence_length=MAX_SEQUENCE_LENGTH)
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}  # (L, J), (P,)

    def encode_media(self, encoder, pixel_values):
        return encode_pixels(encoder.vae, pixel_values)

    def encoder_skeletons(self, *, num_tokens, height, width, num_frames):
        source = {"pretrained_model_name_or_path": self.path, "revision": self.hub["revision"]}
        configs = [AutoConfig.from_pretrained(subfolder=name, **source) for name in ("text_encoder", "text_encoder_2")]
        with init_empty_weights():
            clip, t5 = CLIPTextModel(configs[0]), T5EncoderModel(configs[1])
            vae = AutoencoderKL.from_config(AutoencoderKL.load_config(subfolder="vae", **source))
        for encoder in (clip, t5):
            encoder.to(torch.bfloat16).tie_weights()

        def encode_text():
            pooled = clip(torch.zeros(1, clip.config.max_position_embeddings, dtype=torch.long)).pooler_output
            embeds = t5(torch.zeros(1, MAX_SEQUENCE_LENGTH, dtype=torch.long)).last_hidden_state
            return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

        def decode():
            vae.decode(torch.empty(1, vae.config.latent_channels, height // 8, width // 8))
            return {}

        return {
            "text encoder": ([clip, t5], encode_text),
            "VAE": ([vae], lambda: encode_pixels(vae, torch.empty(3, height, width))),
            "previews": ([vae], decode),
        }

    def predict(self, transformer, noisy_latents, timestep, batch):
        batch_size, channels, height, width = noisy_latents.shape
        dtype, device = transformer.x_embedder.weight.dtype, noisy_latents.device
        tokens = FluxPipeline._pack_latents(noisy_latents, batch_size, channels, height, width)  # (B, T, 4 * C)
        tokens = transformer(
            hidden_states=tokens.to(dtype),
            timestep=timestep / 1000,
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            pooled_projections=batch["pooled_prompt_embeds"].to(dtype),
            txt_ids=torch.zeros(MAX_SEQUENCE_LENGTH, 3, device=device, dtype=dtype),
            img_ids=FluxPipeline._prepare_latent_image_ids(batch_size, height // 2, width // 2, device, dtype),
            return_dict=False,
        )[0]
        return FluxPipeline._unpack_latents(tokens, 8 * height, 8 * width, vae_scale_factor=8)  # (B, C, H, W)

    def sample(self, pipeline, prompt, negative_prompt, *, num_frames, images, seed, **settings):
        place = {"device": pipeline._execution_device, "dtype": pipeline.transformer.dtype}
        given = {name: tensor[None].to(**place) for name, tensor in prompt.items()}
        return pipeline(**given, generator=torch.Generator().manual_seed(seed), **settings).images


@torch.no_grad()
def encode_pixels(vae, pixel_values):
    latents = vae.encode(pixel_values[None].to(vae.device, vae.dtype)).latent_dist.mode()  # (1, C, H, W)
    return {"latents": ((latents - vae.config.shift_factor) * vae.config.scaling_factor)[0].float()}


# ---------------------------------------------------------------- its entry

VALUES = {
    "divisor": 16,
    "height": 1024,
    "width": 1024,
    "lora_target_modules": "attn.to_q,attn.to_k,attn.to_v,attn.to_out.0,proj_mlp",
    "timestep_sampling": "logit_normal",
    "sigma_shift": "by the size",
    "dropped_caption": "an empty caption",
    "negative_prompt": "",
    "described_negative_prompt": "empty",
    "guidance_scale": 1.0,
    "num_inference_steps": 28,
}

if __name__ == "__main__":
    command.finish(functools.partial(run, Flux), command.begin(__doc__, VALUES))


# ---------------------------------------------------------------- a tiny model of it, and its runs

NUM_BLOCKS = {"transformer_blocks": 5, "single_transformer_blocks": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of a complete tiny Flux pipeline."""
    from scripts.make_tiny_model import make_wan_tokenizer

    torch.manual_seed(0)
    letters = [chr(letter) for letter in range(33, 127)]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    clip_tokenizer = CLIPTokenizer(vocab={word: n for n, word in enumerate(words)}, merges=[], model_max_length=77)
    t5_tokenizer = make_wan_tokenizer()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    clip_config = CLIPTextConfig(
        vocab_size=len(words), bos_token_id=len(words) - 2, eos_token_id=len(words) - 1, pad_token_id=1, **sizes
    )
    t5_config = T5Config(vocab_size=len(t5_tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    folder = tmp_path_factory.mktemp("models") / "flux"
    FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(4,) * 4,
            norm_num_groups=2,
            latent_channels=16,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=CLIPTextModel(clip_config),
        tokenizer=clip_tokenizer,
        text_encoder_2=T5EncoderModel(t5_config),
        tokenizer_2=t5_tokenizer,
        transformer=FluxTransformer2DModel(
            num_layers=NUM_BLOCKS["transformer_blocks"],
            num_single_layers=NUM_BLOCKS["single_transformer_blocks"],
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            axes_dims_rope=(4, 6, 6),
        ),
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def train(model, photos, tmp_path_factory, monkeypatch):
    """Function that makes a run in this process and returns its output folder."""
    from tests.runs import quick_run
    from training.arguments import parse_args

    monkeypatch.setattr(offload, "MIN_PARKED_BYTES", 512)

    def make(*flags, output_dir=None):
        output_dir = output_dir or tmp_path_factory.mktemp("run") / "out"
        argv = ["--pretrained_model_name_or_path", model, "--dataset_path", photos, "--output_dir", output_dir]
        argv += ["--height", "64", "--width", "64", "--train_batch_size", "2", "--max_train_steps", "3", *flags]
        argv += ["--cache_dir", model.parent / "cache"]
        with quick_run() as log:
            run(Flux, parse_args([*map(str, argv)], description="", values=VALUES), log)
        return output_dir

    return make


LORA = ("--lora_rank", "4", "--learning_rate", "1e-2", "--mixed_precision", "no", "--lora_dtype", "fp32")


def weights(folder):
    return (folder / "pytorch_lora_weights.safetensors").read_bytes()


def test_its_command_line_trains_resumes_and_shows(model, photos, tmp_path, fork_server):
    """As a user runs it; what it leaves loads in the stock pipeline at the trained strength."""
    flags = ["--pretrained_model_name_or_path", model, "--dataset_path", photos, "--output_dir", tmp_path / "out"]
    flags += [*LORA, "--height", "64", "--width", "64", "--max_train_steps", "2", "--checkpointing_steps", "1"]
    flags += ["--use_gradient_checkpointing", "--checkpoint_blocks", "2,3", "--caption_dropout", "0.3"]
    flags += ["--validation_prompt", "a cat", "--num_inference_steps", "2", "--validation_split", "0.3"]
    done = fork_server.run(__file__, *flags)
    assert "loaded back by diffusers at the trained strength" in done.stdout
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    modes = {name: [mode["activations"] for mode in of_list] for name, of_list in record["plan"].items()}
    assert modes["transformer_blocks"] == ["recompute"] * 2 + ["keep"] * 3
    assert modes["single_transformer_blocks"] == ["recompute"] * 3 + ["keep"]
    forecast, measured = record["forecast"]["training_peak_bytes"], record["measured"]["training_peak_bytes"]
    assert forecast == pytest.approx(measured, rel=0.02)
    assert (tmp_path / "out" / "validation" / "step-2" / "prompt-00.png").is_file()
    pipeline = FluxPipeline.from_pretrained(model, vae=None, text_encoder=None, text_encoder_2=None)
    pipeline.load_lora_weights(tmp_path / "out")
    layers = [name for name, module in pipeline.transformer.named_modules() if hasattr(module, "lora_A")]
    assert len(layers) == len(load_file(tmp_path / "out" / "pytorch_lora_weights.safetensors")) // 2 == 5 * 4 + 4 * 4


@pytest.mark.parametrize("flags", [LORA, pytest.param([], marks=pytest.mark.slow)], ids=["LoRA", "full"])
def test_every_memory_mode_and_a_resume_give_the_same_bytes(flags, train, tmp_path):
    flags = flags or ["--training_mode", "full", "--mixed_precision", "no"]
    result = weights if "--lora_rank" in flags else lambda folder: load_full(folder)
    plain = train(*flags, "--checkpointing_steps", "1")
    assert {p.name for p in plain.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (1, 2, 3)}
    parked = train(*flags, "--use_gradient_checkpointing_offload")
    lines = [json.loads(line) for line in (parked / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["offloaded_bytes"] > 0
    assert result(parked) == result(plain)
    (plain / "checkpoint-1").rename((tmp_path / "out").mkdir() or tmp_path / "out" / "checkpoint-1")
    flags = [*flags, "--use_gradient_checkpointing", "--resume_from_checkpoint", "latest"]
    assert result(train(*flags, output_dir=tmp_path / "out")) == result(plain)


def load_full(folder):
    FluxTransformer2DModel.from_pretrained(folder / "transformer")
    return (folder / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes()


def test_a_budget_is_met_by_blocks_of_both_lists(train):
    """The forecast of a model whose lists are longer than what it is measured on equals what the step takes."""
    plain = json.loads((train(*LORA) / "run.json").read_text())
    budget = plain["forecast"]["training_peak_bytes"] * 3 // 4
    record = json.loads((train(*LORA, "--memory_budget", f"{budget // 1000}KB") / "run.json").read_text())
    used = {mode["activations"] for modes in record["plan"].values() for mode in modes}
    assert {name: len(modes) for name, modes in record["plan"].items()} == NUM_BLOCKS and len(used) > 1
    assert record["measured"]["training_peak_bytes"] <= budget
    forecast = record["forecast"]["training_peak_bytes"]
    assert forecast == pytest.approx(record["measured"]["training_peak_bytes"], rel=0.02)


def test_rooms_that_serve_all_families_do_not_name_it():
    for room in ("blockwise", "dataset", "runtime", "training"):
        for path in (ROOT / room).rglob("*.py"):
            assert "flux" not in path.read_text().lower(), path
