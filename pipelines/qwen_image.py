"""Qwen-Image: load its parts, encode prompts and images, and run the transformer block by block.

Shapes: B batch, H W latent height and width (pixels / 8), C latent channels (16), T image tokens (H/2 * W/2),
L text tokens, J width of the text encoder, D width of the transformer.
"""

import math

import torch
from accelerate import init_empty_weights
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.models.transformers.transformer_qwenimage import compute_text_seq_len_from_mask
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

from blockwise.checkpointing import gradient_checkpoint_forward
from blockwise.plan import per_block
from pipelines import loading
from pipelines.family import Family


# The VAE halves each side three times and the transformer takes patches of 2x2 latents.
SIZE_DIVISOR = 16

# What the stock pipeline puts before each caption, and takes off its embedding again.
PROMPT_TEMPLATE_TOKENS = 34


def sample(pipeline, prompt, negative_prompt, *, guidance_scale, num_frames, images, seed, **settings):
    """Sample one image as the stock pipeline does.

    Args:
        pipeline (`QwenImagePipeline`)
        prompt, negative_prompt (`dict`): From `encode_prompt`; the second None: without guidance.
        guidance_scale (`float`): What the pipeline calls `true_cfg_scale`.
        num_frames, images: For clips.
        seed (`int`): Of the noise, which is drawn on the CPU.
        settings: Further arguments of the pipeline: `height`, `width` in pixels, `num_inference_steps`, ...

    Returns:
        `list[PIL.Image.Image]`: The image.
    """
    dtype, given = pipeline.transformer.img_in.weight.dtype, {}
    for name, text in (("prompt_embeds", prompt), ("negative_prompt_embeds", negative_prompt)):
        if text is not None:
            given[name] = text["prompt_embeds"][None].to(pipeline._execution_device, dtype)  # (1, L, J)
            given[f"{name}_mask"] = torch.ones(given[name].shape[:2], dtype=torch.bool, device=given[name].device)
    return pipeline(
        **given,
        true_cfg_scale=guidance_scale if negative_prompt is not None else 1.0,
        max_sequence_length=pipeline.tokenizer_max_length,
        generator=torch.Generator().manual_seed(seed),
        **settings,
    ).images


def never_trained_modules(transformer):
    """Return the names of the modules that the architecture gives no gradient.

    The last block's text stream ends there: what comes after its attention is thrown away, and its query is asked for
    nothing else. The first gets no gradient at all, the second one that is always zero.
    """
    last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}"
    return [f"{last}.{name}" for name in ("attn.to_add_out", "txt_mlp", "attn.add_q_proj", "attn.norm_added_q")]


@torch.no_grad()
def encode_prompt(pipeline, prompt):
    """Encode one caption exactly as the stock pipeline does.

    Args:
        pipeline (`QwenImagePipeline`): From `QwenImage.load_prompt_encoder`.
        prompt (`str`): The caption. The empty one leaves the closing tokens of the template.

    Returns:
        `dict` with `prompt_embeds` (L, J).
    """
    prompt_embeds, _ = pipeline.encode_prompt(prompt)
    return {"prompt_embeds": prompt_embeds[0]}


def encoder_skeletons(pretrained_model_name_or_path, *, num_tokens, height, width, revision=None, **hub):
    """Build the encoders from their configs alone, without memory for their weights.

    Args:
        num_tokens (`int`): Of the longest caption.
        height, width (`int`): Of an image, in pixels.

    Returns:
        `dict[str, tuple[list[nn.Module], Callable[[], dict[str, torch.Tensor]]]]`: Phase -> its modules, on the meta
        device, and what runs them, once they are elsewhere, as encoding a caption or an image does. Together the
        results are what a sample holds. "previews" holds what these need in addition to the transformer.
    """
    source = {"pretrained_model_name_or_path": pretrained_model_name_or_path, "revision": revision}
    config = AutoConfig.from_pretrained(subfolder="text_encoder", **source)
    with init_empty_weights():
        text_encoder = Qwen2_5_VLForConditionalGeneration(config)
        vae = AutoencoderKLQwenImage.from_config(AutoencoderKLQwenImage.load_config(subfolder="vae", **source))
    text_encoder.to(torch.bfloat16).tie_weights()

    def encode_prompt():
        input_ids = torch.zeros(1, PROMPT_TEMPLATE_TOKENS + num_tokens, dtype=torch.long)
        encoded = text_encoder(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), output_hidden_states=True
        )
        return {"prompt_embeds": encoded.hidden_states[-1][0, PROMPT_TEMPLATE_TOKENS:]}

    def encode_pixels():
        return encode_image(vae, torch.empty(3, height, width))

    def decode():
        vae.decode(torch.empty(1, vae.config.z_dim, 1, height // 8, width // 8))
        return {}

    return {
        "text encoder": ([text_encoder], encode_prompt),
        "VAE": ([vae], encode_pixels),
        "previews": ([vae], decode),
    }


def count_prompt_tokens(pipeline, prompt):
    """Return how many tokens of `prompt` go in, and how many the pipeline keeps of them."""
    prefix = pipeline.prompt_template_encode_start_idx
    num_tokens = len(pipeline.tokenizer(pipeline.prompt_template_encode.format(prompt)).input_ids) - prefix
    return num_tokens, min(num_tokens, pipeline.tokenizer_max_length)


@torch.no_grad()
def encode_image(vae, pixel_values):
    """Encode an image to all that a sample of it holds in addition to its caption.

    Args:
        vae (`AutoencoderKLQwenImage`)
        pixel_values (`torch.Tensor` of shape (3, 8 * H, 8 * W)): In [-1, 1].

    Returns:
        `dict` with `latents` (C, H, W) in fp32: the mode of the posterior, normalised, (z - mean) / std.
    """
    pixel_values = pixel_values[None, :, None].to(vae.device, vae.dtype)  # (1, 3, 1, 8 * H, 8 * W)
    latents = vae.encode(pixel_values).latent_dist.mode()  # (1, C, 1, H, W)
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(latents)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(latents)
    return {"latents": ((latents - mean) / std)[0, :, 0].float()}


def pack_latents(latents):
    """Turn latents (B, C, H, W) into tokens (B, T, 4 * C), 2x2 latents each. H and W must be even."""
    batch_size, num_channels, height, width = latents.shape
    return QwenImagePipeline._pack_latents(latents, batch_size, num_channels, height, width)


def unpack_latents(tokens, height, width):
    """Turn tokens (B, T, 4 * C) back into latents (B, C, H, W) of that `height` and `width`."""
    return QwenImagePipeline._unpack_latents(tokens, height, width, vae_scale_factor=1).squeeze(2)


def sigma_shift(scheduler, height, width):
    """Return the factor by which the stock pipeline shifts sigmas at this size.

    It is exp(mu), with mu linear in the number of target tokens: `calculate_shift` of the stock pipeline.

    Args:
        scheduler (`FlowMatchEulerDiscreteScheduler`)
        height, width (`int`): In pixels.
    """
    config = scheduler.config
    mu = calculate_shift(
        height // SIZE_DIVISOR * (width // SIZE_DIVISOR),
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )
    return math.exp(mu)


def model_fn_qwen_image(
    transformer,
    *,
    hidden_states,
    timestep,
    encoder_hidden_states,
    encoder_hidden_states_mask,
    img_shapes,
    controlnet_block_samples=None,
    additional_t_cond=None,
    use_gradient_checkpointing=False,
    use_gradient_checkpointing_offload=False,
):
    """Predict the flow. Equal to `transformer(..., return_dict=False)[0]` bit for bit.

    Args:
        transformer (`QwenImageTransformer2DModel`)
        hidden_states (`torch.Tensor` of shape (B, T, 64)): Packed latents, those of reference images after them.
        timestep (`torch.Tensor` of shape (B,)): In [0, 1000].
        encoder_hidden_states (`torch.Tensor` of shape (B, L, J))
        encoder_hidden_states_mask (`torch.Tensor` of shape (B, L), or None): False at padding; None: no padding.
        img_shapes (`list[list[tuple[int, int, int]]]`): Per sample (frames, H/2, W/2) of the target and references.
        controlnet_block_samples (`list[torch.Tensor]` of shape (B, T, D), *optional*): Residuals of a ControlNet.
        additional_t_cond (`torch.Tensor` of shape (B,), *optional*)
        use_gradient_checkpointing, use_gradient_checkpointing_offload (`bool` or one per block)

    Returns:
        `torch.Tensor` of shape (B, T, 64).
    """
    num_blocks = len(transformer.transformer_blocks)
    checkpointing = per_block(use_gradient_checkpointing, num_blocks)
    offload = per_block(use_gradient_checkpointing_offload, num_blocks)

    hidden_states = transformer.img_in(hidden_states)  # (B, T, D)
    # Rounded to the dtype of the model, as the stock forward does.
    timestep = (timestep / 1000).to(hidden_states.dtype)
    modulate_index = None
    if transformer.zero_cond_t:
        # References are modulated as clean images: a second row of each timestep, zero, and an index per token.
        timestep = torch.cat([timestep, timestep * 0])  # (2B,)
        tokens = [[math.prod(shape) for shape in shapes] for shapes in img_shapes]
        modulate_index = torch.tensor(
            [[0] * target + [1] * sum(references) for target, *references in tokens],
            device=timestep.device,
            dtype=torch.int,
        )  # (B, T)
    encoder_hidden_states = transformer.txt_in(transformer.txt_norm(encoder_hidden_states))  # (B, L, D)
    text_seq_len, _, encoder_hidden_states_mask = compute_text_seq_len_from_mask(
        encoder_hidden_states, encoder_hidden_states_mask
    )
    temb = transformer.time_text_embed(timestep, hidden_states, additional_t_cond)  # (B or 2B, D)
    image_rotary_emb = transformer.pos_embed(img_shapes, max_txt_seq_len=text_seq_len, device=hidden_states.device)

    for index, block in enumerate(transformer.transformer_blocks):
        encoder_hidden_states, hidden_states = gradient_checkpoint_forward(
            block,
            checkpointing[index],
            offload[index],
            hidden_states=hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            encoder_hidden_states_mask=encoder_hidden_states_mask,
            temb=temb,
            image_rotary_emb=image_rotary_emb,
            joint_attention_kwargs=None,
            modulate_index=modulate_index,
        )
        if controlnet_block_samples is not None:
            interval = math.ceil(num_blocks / len(controlnet_block_samples))
            hidden_states = hidden_states + controlnet_block_samples[index // interval]

    if transformer.zero_cond_t:
        temb = temb.chunk(2)[0]
    hidden_states = transformer.norm_out(hidden_states, temb)  # (B, T, D)
    return transformer.proj_out(hidden_states)  # (B, T, 64)


class QwenImage(Family):
    """Qwen-Image, from text to image."""

    pipelines = (QwenImagePipeline,)
    parts = {
        "transformer": (QwenImageTransformer2DModel,),
        "text_encoder": (Qwen2_5_VLForConditionalGeneration,),
        "vae": (AutoencoderKLQwenImage,),
    }
    divisor = SIZE_DIVISOR
    dropped_caption = " "

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scheduler = loading.load_scheduler(FlowMatchEulerDiscreteScheduler, self.path, **self.hub)

    @property
    def never_trained(self):
        return never_trained_modules(self.skeleton)

    def num_tokens(self, height, width, num_frames=1):
        return height // SIZE_DIVISOR * (width // SIZE_DIVISOR) * num_frames

    def sigma_shift(self, height, width):
        return sigma_shift(self.scheduler, height, width)

    def count_prompt_tokens(self, prompt):
        return count_prompt_tokens(self.tokenizer, prompt)

    def load_media_encoder(self, device):
        return super().load_media_encoder(device).vae

    encode_prompt = staticmethod(encode_prompt)
    encode_media = staticmethod(encode_image)
    sample = staticmethod(sample)

    def encoder_skeletons(self, *, num_tokens, height, width, num_frames):
        return encoder_skeletons(self.path, num_tokens=num_tokens, height=height, width=width, **self.hub)

    def predict(self, transformer, noisy_latents, timestep, batch):
        batch_size, _, height, width = noisy_latents.shape
        dtype = transformer.img_in.weight.dtype
        tokens = model_fn_qwen_image(
            transformer,
            hidden_states=pack_latents(noisy_latents).to(dtype),  # (B, T, 64)
            timestep=timestep,
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),  # (B, L, J)
            encoder_hidden_states_mask=batch["prompt_embeds_mask"],
            img_shapes=[[(1, height // 2, width // 2)]] * batch_size,
        )
        return unpack_latents(tokens, height, width)  # (B, C, H, W)
