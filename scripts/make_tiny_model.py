"""Write a tiny random-weight pipeline folder in diffusers layout, for tests and for the demo.

    python scripts/make_tiny_model.py --family qwen_image --output outputs/tiny-qwen-image

The classes are the real ones, only their sizes are small: stock `DiffusionPipeline.from_pretrained(DIR)` loads the
folder and samples meaningless pictures from it. Nothing is downloaded. A transformer that can memorise a few pictures:

    python scripts/make_tiny_model.py --family qwen_image --output outputs/small-qwen-image \
        --num_layers 4 --num_attention_heads 4 --attention_head_dim 32

On one machine the same flags give byte-identical files. Weights are fp32; load them in any dtype.
"""

import argparse
import json
import logging
import re
from pathlib import Path


# Plain captions, so that common words become single tokens and anything else still falls apart into smaller ones.
CAPTIONS = (
    "A cat sits on a red chair beside the window.",
    "a photo of a small dog running on the beach, blue sky and white clouds in the background",
    "Two people walk down a wet street at night under yellow lights.",
    "A bowl of green apples and oranges on a wooden table, soft light from the left.",
    "an old stone house with a blue door in a field of flowers",
    "A woman in a black coat is holding a sign with the text 'hello world'.",
    "A mountain lake in the morning, the water is still and reflects the snow.",
    "close-up portrait of a man with grey hair, he's smiling, 35 mm film",
)

# In the order of the real tokenizer's ids, which follow the last merge.
QWEN_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# fmt: off
# Statistics of the real VAE's latents (Qwen/Qwen-Image, vae/config.json), one number per channel.
QWEN_LATENTS_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
QWEN_LATENTS_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916,
)
# fmt: on

# Qwen/Qwen-Image, scheduler/scheduler_config.json.
QWEN_SCHEDULER_CONFIG = {
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "invert_sigmas": False,
    "stochastic_sampling": False,
    "use_beta_sigmas": False,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}


def axes_dims_rope(attention_head_dim):
    """Split a head's width over the rotary axes (frame, height, width).

    The frame axis gets an eighth, as in the real models (16, 56, 56 of 128), but never less than 8: a single frame and
    the text differ on it.

    Args:
        attention_head_dim (`int`): width of one head; a multiple of 4, at least 12.

    Returns:
        `tuple[int, int, int]`: three even positive numbers whose sum is `attention_head_dim`.

    Raises:
        ValueError: if `attention_head_dim` cannot be split that way.
    """
    if attention_head_dim < 12 or attention_head_dim % 4 != 0:
        raise ValueError(f"attention_head_dim must be a multiple of 4 and at least 12, not {attention_head_dim}.")
    frame = max(8, attention_head_dim // 32 * 4)
    side = (attention_head_dim - frame) // 2
    return frame, side, side


def make_qwen_tokenizer(template, num_prefix_tokens):
    """Train a byte-level BPE on the captions and the prompt template.

    The pipeline drops the first `num_prefix_tokens` positions of every prompt, so what the template puts before the
    prompt has to be that many tokens here too, whatever the user writes. Two things make it so. Training runs until no
    pair is left, hence every word of the template is one token, as it is for the real tokenizer, and the pre-tokenizer
    is the real one. And training never sees a line break followed by more white space, hence no longer token begins
    with a line break, and the one before the prompt cannot grow into it.

    Args:
        template (`str`): prompt template with one `{}`.
        num_prefix_tokens (`int`): number of tokens of what stands before `{}`.

    Returns:
        `transformers.Qwen2Tokenizer`: covers all 256 bytes, so it encodes any text.
    """
    from tokenizers import pre_tokenizers
    from tokenizers.trainers import BpeTrainer
    from transformers import Qwen2Tokenizer

    # Training does not know special tokens: the text between them is given piece by piece.
    boundaries = "|".join(map(re.escape, (*QWEN_SPECIAL_TOKENS, "{}")))
    # An untrained instance brings Qwen's own normalizer and pre-tokenizer.
    backend = Qwen2Tokenizer().backend_tokenizer
    backend.train_from_iterator(
        [*CAPTIONS, *filter(None, re.split(boundaries, template))],
        BpeTrainer(
            vocab_size=1 << 16,  # never reached
            min_frequency=1,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    model = json.loads(backend.to_str())["model"]
    special_tokens = {token: len(model["vocab"]) + i for i, token in enumerate(QWEN_SPECIAL_TOKENS)}
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"] | special_tokens,
        merges=[tuple(merge) for merge in model["merges"]],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(QWEN_SPECIAL_TOKENS[1:]),
        model_max_length=131072,
    )
    prefix = tokenizer(template.split("{}")[0]).input_ids
    assert len(prefix) == num_prefix_tokens, f"the template begins with {len(prefix)} tokens, not {num_prefix_tokens}"
    return tokenizer


def preserve_variance(model):
    """Redraw the weights of all linear and convolution layers so that outputs vary as much as inputs, in place.

    PyTorch's own initialisation loses two thirds of the variance in each layer. A few layers on, a caption changes the
    result by little more than bf16 rounding does, and a test could hardly see whether it arrived.

    Args:
        model (`torch.nn.Module`): freshly built; biases stay as they are.
    """
    from torch import nn

    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")


def normalize_vae(vae):
    """Give a random image VAE the statistics of a trained one, in place.

    As built, its latents of different images differ by less than a hundredth of `latents_std`. Here the last layers
    are scaled, so that over smooth random images the normalised latents have mean 0 and standard deviation 1 in every
    channel, and decoded pictures have contrast.

    Args:
        vae (`AutoencoderKLQwenImage`): freshly built; its config gives the statistics.
    """
    import torch
    from torch import nn

    def rounded(values):
        # Three digits, so that the order in which this CPU's convolutions add up does not reach the files.
        return torch.tensor([float(f"{value:.3g}") for value in values.tolist()])

    preserve_variance(vae)
    for name, parameter in vae.named_parameters():
        if name.endswith(".bias"):
            nn.init.zeros_(parameter)  # else the biases outweigh the image

    z_dim = vae.config.z_dim
    latents_mean, latents_std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    with torch.no_grad():
        images = nn.functional.interpolate(torch.randn(16, 3, 8, 8), size=(64, 64), mode="bicubic").clamp(-1, 1)
        latents = vae.encode(images.unsqueeze(2)).latent_dist.mode().transpose(0, 1).flatten(1)  # [z_dim, values]
        scale = rounded(latents_std / latents.std(dim=1))
        # The first half of the output channels is the posterior's mean, the other half its log variance.
        vae.quant_conv.weight[:z_dim] *= scale.view(z_dim, 1, 1, 1, 1)
        vae.quant_conv.bias[:z_dim] = rounded(latents_mean - scale * latents.mean(dim=1))

        shape = (1, z_dim, 1, 1, 1)
        latents = torch.randn(16, z_dim, 1, 8, 8) * latents_std.view(shape) + latents_mean.view(shape)
        vae.decoder.conv_out.weight *= 0.1  # away from the bounds where `decode` clips
        vae.decoder.conv_out.weight *= rounded(0.4 / vae.decode(latents).sample.std().view(1))


def make_qwen_image(num_layers, num_attention_heads, attention_head_dim):
    """Build a tiny `QwenImagePipeline` from torch's global random state.

    Args:
        num_layers (`int`): number of transformer blocks.
        num_attention_heads (`int`): attention heads of the transformer.
        attention_head_dim (`int`): width of one head.

    Returns:
        `QwenImagePipeline`: on the CPU, fp32, evaluation mode.
    """
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    # A pipeline without parts knows the prompt template and how much of it is dropped.
    blank = QwenImagePipeline(scheduler=None, vae=None, text_encoder=None, tokenizer=None, transformer=None)
    tokenizer = make_qwen_tokenizer(blank.prompt_template_encode, blank.prompt_template_encode_start_idx)

    # The transformer comes last: its size does not change the other parts' weights.
    vae = AutoencoderKLQwenImage(
        # With fewer channels the norms over channels keep little more than signs.
        base_dim=4,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        latents_mean=list(QWEN_LATENTS_MEAN),
        latents_std=list(QWEN_LATENTS_STD),
    )
    normalize_vae(vae)

    hidden_size = 32
    # Wide enough for the layers to change the embeddings they are added to: 0.02 is meant for a width of thousands.
    initializer_range = hidden_size**-0.5
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in QWEN_SPECIAL_TOKENS}
    text_encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "hidden_size": hidden_size,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1000000.0,
                    # Half a head's width, in the real model's proportions: 16, 24, 24 of 128 / 2.
                    "mrope_section": [2, 3, 3],
                },
                "initializer_range": initializer_range,
                "bos_token_id": ids["<|endoftext|>"],
                "eos_token_id": ids["<|im_end|>"],
                "pad_token_id": ids["<|endoftext|>"],
            },
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": hidden_size,
                "fullatt_block_indexes": [1],
                "initializer_range": initializer_range,
            },
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )
    )

    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=num_layers,
        attention_head_dim=attention_head_dim,
        num_attention_heads=num_attention_heads,
        joint_attention_dim=hidden_size,
        axes_dims_rope=axes_dims_rope(attention_head_dim),
    )
    preserve_variance(transformer)
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**QWEN_SCHEDULER_CONFIG),
        vae=vae.eval(),
        text_encoder=text_encoder.eval(),
        tokenizer=tokenizer,
        transformer=transformer.eval(),
    )


FAMILIES = {"qwen_image": make_qwen_image}


def parse_args():
    """Read the command line; exits with code 2 on a bad flag.

    Returns:
        `argparse.Namespace`: one attribute per flag.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--family", required=True, choices=sorted(FAMILIES), help="which pipeline to write")
    parser.add_argument(
        "--output", required=True, type=Path, help="folder to write; files of the same names are replaced"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: %(default)s)")
    parser.add_argument("--num_layers", type=int, default=2, help="transformer blocks (default: %(default)s)")
    parser.add_argument(
        "--num_attention_heads", type=int, default=2, help="attention heads of the transformer (default: %(default)s)"
    )
    parser.add_argument(
        "--attention_head_dim",
        type=int,
        default=16,
        help="width of one attention head of the transformer, a multiple of 4, at least 12 (default: %(default)s)",
    )
    args = parser.parse_args()
    for flag in ("num_layers", "num_attention_heads"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag} must be at least 1, not {getattr(args, flag)}.")
    try:
        axes_dims_rope(args.attention_head_dim)
    except ValueError as error:
        parser.error(f"--{error}")
    if args.output.exists() and not args.output.is_dir():
        parser.error(f"--output must be a folder, and {args.output} is a file.")
    return args


def main():
    """Build the family's pipeline, save it and say where it is."""
    args = parse_args()
    # The libraries announce missing optional packages and draw progress bars: neither says anything about this folder.
    logging.disable(logging.WARNING)
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(args.seed)
    pipeline = FAMILIES[args.family](args.num_layers, args.num_attention_heads, args.attention_head_dim)
    pipeline.save_pretrained(args.output)
    size_bytes = sum(path.stat().st_size for path in args.output.rglob("*") if path.is_file())
    print(f"{args.family} pipeline in {args.output}, {size_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
