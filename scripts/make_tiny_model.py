"""Write a tiny random-weight pipeline folder in diffusers layout, for tests and for the demo.

    python scripts/make_tiny_model.py --family qwen_image --output outputs/tiny-qwen-image
    python scripts/make_tiny_model.py --family wan_t2v --output outputs/tiny-wan-t2v

The classes are the real ones, only their sizes are small: stock `DiffusionPipeline.from_pretrained(DIR)` loads the
folder and samples meaningless images or videos from it. Nothing is downloaded. A transformer that can memorise a few
images:

    python scripts/make_tiny_model.py --family qwen_image --output outputs/small-qwen-image \
        --num_layers 4 --num_attention_heads 4 --attention_head_dim 32

The Wan families are the published kinds of folder:

    wan_t2v         Wan 2.1 text to video: WanPipeline
    wan_i2v         Wan 2.1 image to video: WanImageToVideoPipeline with an image encoder, 36 input channels
    wan_flf2v       Wan 2.1 first and last frame to video: as wan_i2v, with a position table for two images
    wan_ti2v        Wan 2.2 5B, text or image to video: WanPipeline, and WanImageToVideoPipeline opens it too; the VAE
                    has 48 channels at a sixteenth of the size, and every token its own timestep
    wan_t2v_a14b    Wan 2.2 A14B text to video: as wan_t2v, with two transformers
    wan_i2v_a14b    Wan 2.2 A14B image to video: 36 input channels, two transformers, no image encoder

On one machine the same flags give byte-identical files. Weights are fp32; load them in any dtype.
"""

import argparse
import json
import logging
import math
import re
from collections import Counter
from functools import partial
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
# Latent statistics of Wan-AI/Wan2.2-TI2V-5B-Diffusers, one number per channel. Those of the other published VAEs are
# the defaults of their classes.
WAN_TI2V_LATENTS_MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
    -0.1382, 0.0542, 0.2813, 0.0891, 0.157, -0.0098, 0.0375, -0.1825,
    -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.123,
    -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.052, 0.3748,
    0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)
WAN_TI2V_LATENTS_STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013,
    0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
    0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
    0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
    0.3971, 1.06, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
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

# Wan-AI's scheduler/scheduler_config.json, without the shift.
WAN_SCHEDULER_CONFIG = {
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "solver_order": 2,
    "solver_type": "bh2",
    "predict_x0": True,
    "lower_order_final": True,
    "final_sigmas_type": "zero",
}

# The Wan pipelines pad every prompt to this length, and the transformer takes what stands before it for image tokens.
WAN_PROMPT_LENGTH = 512


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


def check_wan_head_dim(attention_head_dim):
    """Refuse a head's width that Wan's rotary embedding cannot split over its axes.

    `WanRotaryPosEmbed` gives height and width two numbers for every six, and the frame axis the rest.

    Args:
        attention_head_dim (`int`): width of one head; even, at least 6.

    Raises:
        ValueError: if an axis would get an odd number or nothing.
    """
    if attention_head_dim < 6 or attention_head_dim % 2 != 0:
        raise ValueError(f"attention_head_dim must be even and at least 6, not {attention_head_dim}.")


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


def make_wan_tokenizer():
    """Count the words of the captions into a Unigram model with byte fallback, as umt5's is.

    The words of the captions are single tokens, other words fall apart into letters, and what is not ASCII into bytes.
    The model is made by hand because the library's trainer gives other pieces on every run. The class is the one that
    the installed transformers has for umt5: its `T5Tokenizer` drops the byte fallback on loading.

    Returns:
        `transformers.TokenizersBackend`: encodes any text, appends `</s>`; ids of pad, eos and unk are 0, 1 and 2.
    """
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
    from tokenizers.models import Unigram
    from transformers import TokenizersBackend

    words = Counter(re.findall(r"\w+", " ".join(CAPTIONS)))
    letter_score = -math.log(words.total()) - 1  # below any word's, so that a word is never spelt
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    # So low that a caption with the text "<0x41>" is spelt too.
    vocab += [(f"<0x{byte:02X}>", -100.0) for byte in range(256)]
    vocab += [("▁" + word, round(math.log(count / words.total()), 3)) for word, count in words.most_common()]
    known = {piece for piece, _ in vocab}
    letters = ["▁", *map(chr, range(0x21, 0x7F))]
    vocab += [(letter, round(letter_score, 3)) for letter in letters if letter not in known]

    backend = Tokenizer(Unigram(vocab, unk_id=2, byte_fallback=True))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return TokenizersBackend(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=WAN_PROMPT_LENGTH,
    )


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


def normalize_vae(vae, num_frames=1):
    """Give a random VAE the statistics of a trained one, in place.

    As built, its latents of different images differ by less than a hundredth of `latents_std`. Here the last layers
    are scaled, so that over smooth random clips the normalised latents have mean 0 and standard deviation 1 in every
    channel, and decoded images have contrast.

    Args:
        vae (`AutoencoderKLQwenImage` or `AutoencoderKLWan`): freshly built; its config gives the statistics.
        num_frames (`int`, *optional*, defaults to 1): frames of a clip, one more than a multiple of 4.
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
        # A clip fades from one image to another.
        images = torch.randn(16 * min(num_frames, 2), 3, 8, 8)
        images = nn.functional.interpolate(images, size=(64, 64), mode="bicubic").clamp(-1, 1)
        share = torch.linspace(0, 1, num_frames).view(-1, 1, 1)
        clips = torch.lerp(images[:16].unsqueeze(2), images[-16:].unsqueeze(2), share)
        encoded = vae.encode(clips).latent_dist.mode()
        latents = encoded.transpose(0, 1).flatten(1)  # [z_dim, values]
        scale = rounded(latents_std / latents.std(dim=1))
        # The first half of the output channels is the posterior's mean, the other half its log variance.
        vae.quant_conv.weight[:z_dim] *= scale.view(z_dim, 1, 1, 1, 1)
        vae.quant_conv.bias[:z_dim] = rounded(latents_mean - scale * latents.mean(dim=1))

        shape = (1, z_dim, 1, 1, 1)
        latents = torch.randn_like(encoded) * latents_std.view(shape) + latents_mean.view(shape)
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


def make_wan(
    num_layers,
    num_attention_heads,
    attention_head_dim,
    *,
    image_to_video=False,
    num_image_embeds=0,
    boundary_ratio=None,
    expand_timesteps=False,
    flow_shift=3.0,
):
    """Build a tiny `WanPipeline` or `WanImageToVideoPipeline` from torch's global random state.

    Args:
        num_layers (`int`): number of transformer blocks.
        num_attention_heads (`int`): attention heads of the transformer.
        attention_head_dim (`int`): width of one head.
        image_to_video (`bool`, *optional*, defaults to `False`):
            Whether the transformer takes a mask and a condition in addition to the noise: 36 input channels.
        num_image_embeds (`int`, *optional*, defaults to 0):
            Number of images that the image encoder sees, at most 2; 0 is without an image encoder.
        boundary_ratio (`float`, *optional*):
            Share of the noise above which `transformer` works and below which `transformer_2` does. There is one
            transformer without it.
        expand_timesteps (`bool`, *optional*, defaults to `False`):
            Whether there is one timestep per token, and the VAE of 48 channels: the 5B model.
        flow_shift (`float`, *optional*, defaults to 3.0): shift of the scheduler.

    Returns:
        `WanPipeline` or `WanImageToVideoPipeline`: on the CPU, fp32, evaluation mode.
    """
    from diffusers import (
        AutoencoderKLWan,
        UniPCMultistepScheduler,
        WanImageToVideoPipeline,
        WanPipeline,
        WanTransformer3DModel,
    )
    from torch import nn
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

    tokenizer = make_wan_tokenizer()

    # The transformers come last: their size does not change the other parts' weights.
    vae_config = {"base_dim": 4, "z_dim": 16}
    if expand_timesteps:
        vae_config = {
            "base_dim": 4,
            "decoder_base_dim": 8,
            "z_dim": 48,
            "latents_mean": WAN_TI2V_LATENTS_MEAN,
            "latents_std": WAN_TI2V_LATENTS_STD,
            "is_residual": True,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            "scale_factor_spatial": 16,
        }
    vae = AutoencoderKLWan(**vae_config)
    normalize_vae(vae, num_frames=9)

    hidden_size = 32
    text_encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer),
            d_model=hidden_size,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )

    conditions = {}
    if num_image_embeds:
        image_encoder = CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=hidden_size,
                intermediate_size=64,
                num_hidden_layers=3,  # the pipeline takes the states before the last layer
                num_attention_heads=2,
                image_size=224,
                patch_size=14,
            )
        )
        conditions = {"image_encoder": image_encoder.eval(), "image_processor": CLIPImageProcessor()}

    def make_transformer():
        transformer = WanTransformer3DModel(
            num_layers=num_layers,
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            # Noise, mask (one channel for each of the four frames) and condition.
            in_channels=16 + 4 + 16 if image_to_video else vae.config.z_dim,
            out_channels=vae.config.z_dim,
            text_dim=hidden_size,
            freq_dim=32,
            ffn_dim=3 * num_attention_heads * attention_head_dim,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            image_dim=hidden_size if num_image_embeds else None,
            added_kv_proj_dim=num_attention_heads * attention_head_dim if num_image_embeds else None,
            pos_embed_seq_len=2 * 257 if num_image_embeds == 2 else None,
        )
        preserve_variance(transformer)
        for block in transformer.blocks:
            # Prompts are padded with hundreds of zero rows, which nothing masks. With attention as even as that of a
            # freshly built block, a caption of a few words weighs a hundredth.
            nn.init.constant_(block.attn2.norm_k.weight, 3.0)
        if num_image_embeds == 2:
            # Zeros as built: nothing would show whether the table is used.
            nn.init.normal_(transformer.condition_embedder.image_embedder.pos_embed, std=0.5)
        return transformer.eval()

    parts = {"transformer": make_transformer()}
    if boundary_ratio is not None:
        parts["transformer_2"] = make_transformer()
    pipeline_class = WanImageToVideoPipeline if image_to_video else WanPipeline
    pipeline = pipeline_class(
        tokenizer=tokenizer,
        text_encoder=text_encoder.eval(),
        vae=vae.eval(),
        scheduler=UniPCMultistepScheduler(**WAN_SCHEDULER_CONFIG, flow_shift=flow_shift),
        boundary_ratio=boundary_ratio,
        expand_timesteps=expand_timesteps,
        **conditions,
        **parts,
    )
    if num_image_embeds:
        # As in the published folders: without torchvision the class that comes under this name has another one.
        pipeline.register_to_config(image_processor=("transformers", "CLIPImageProcessor"))
    return pipeline


FAMILIES = {
    "qwen_image": make_qwen_image,
    "wan_t2v": make_wan,
    "wan_i2v": partial(make_wan, image_to_video=True, num_image_embeds=1),
    "wan_flf2v": partial(make_wan, image_to_video=True, num_image_embeds=2, flow_shift=16.0),
    "wan_ti2v": partial(make_wan, expand_timesteps=True, flow_shift=5.0),
    "wan_t2v_a14b": partial(make_wan, boundary_ratio=0.875),
    "wan_i2v_a14b": partial(make_wan, image_to_video=True, boundary_ratio=0.9),
}


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
        help="width of one attention head of the transformer: a multiple of 4 and at least 12 for Qwen, even and at "
        "least 6 for Wan (default: %(default)s)",
    )
    args = parser.parse_args()
    for flag in ("num_layers", "num_attention_heads"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag} must be at least 1, not {getattr(args, flag)}.")
    try:
        (axes_dims_rope if args.family == "qwen_image" else check_wan_head_dim)(args.attention_head_dim)
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
