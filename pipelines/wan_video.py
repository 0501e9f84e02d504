"""Wan-Video, 2.1 and 2.2: load its parts, encode prompts and clips, and run the transformer block by block.

Shapes: B batch, N frames of pixels, F latent frames (1 + (N - 1) / 4), H W latent height and width (pixels / 8, or
/ 16 with the VAE of TI2V-5B), C latent channels (16, or 48 there), T tokens (F * H/2 * W/2), L text tokens (512),
J width of the text encoder, I tokens of one image embedding (257), D width of the transformer.
"""

import dataclasses
import re

import ftfy  # noqa: F401  without it the stock pipeline leaves out a part of its cleaning of prompts, without a warning
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from PIL import Image
from transformers import AutoConfig, CLIPVisionConfig, CLIPVisionModel, CLIPVisionModelWithProjection, UMT5EncoderModel

from blockwise.checkpointing import gradient_checkpoint_forward
from blockwise.plan import per_block
from pipelines import loading
from pipelines.family import Family, Stage
from runtime.errors import RefusedError


# The pipelines cut and pad prompts to this, though `encode_prompt` alone would take 226.
MAX_SEQUENCE_LENGTH = 512

# With which the authors sample: `sample_neg_prompt` of their inference code.
NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，"
    "静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj", "ffn.net.0.proj", "ffn.net.2")


# ---------------------------------------------------------------- variants


@dataclasses.dataclass(frozen=True)
class WanVariant:
    """Which of the Wan models a pipeline folder holds, and what follows from it.

    Args:
        tasks (`tuple[str, ...]`): What it can be trained for: `"t2v"`, `"i2v"`, `"flf2v"` (first and last frame).
        boundary_ratio (`float`, *optional*): The sigma from which on the expert for high noise is used.
        expand_timesteps (`bool`): TI2V-5B, whose condition is a clean first latent frame with timestep 0.
        divisor (`int`): Height and width in pixels are multiples of it.
        height, width (`int`), num_frames (`int`), fps (`float`): Defaults, in pixels, frames and frames per second.
    """

    tasks: tuple[str, ...]
    boundary_ratio: float | None
    expand_timesteps: bool
    divisor: int
    height: int
    width: int
    num_frames: int
    fps: float

    @property
    def experts(self):
        """The names of the experts, empty where there is one transformer."""
        return () if self.boundary_ratio is None else ("high_noise", "low_noise")

    @property
    def guidance_scale(self):
        """How strongly sampling is guided; of two experts that for high noise."""
        if not self.experts:
            return 5.0
        return 4.0 if self.tasks == ("t2v",) else 3.5

    def guidance(self, scale):
        """Return what the stock pipeline is told for a scale: with the model's own, for low noise another one."""
        if not self.experts:
            return {"guidance_scale": scale}
        is_own = scale == self.guidance_scale and self.tasks == ("t2v",)
        return {"guidance_scale": scale, "guidance_scale_2": 3.0 if is_own else scale}

    @property
    def num_inference_steps(self):
        """In how many steps the model is sampled."""
        return 40 if self.experts else 50

    def num_tokens(self, height, width, num_frames):
        """Return T, the tokens of a clip at a size in pixels."""
        return height // self.divisor * (width // self.divisor) * ((num_frames + 3) // 4)

    def sigma_range(self, expert):
        """Return the (lowest, highest) sigma at which `expert`, None for an only transformer, is used."""
        return {
            "high_noise": (self.boundary_ratio, 1.0),
            "low_noise": (0.0, self.boundary_ratio),
            None: (0.0, 1.0),
        }[expert]

    def sigma_shift(self, height, width, task):
        """Return the default shift of sigmas at a size in pixels.

        That of the authors' inference code; the schedulers of the published pipelines say something else.
        """
        if task == "flf2v" or self.experts or self.expand_timesteps:
            return 5.0
        return 3.0 if height * width <= 832 * 480 else 5.0


def find_variant(index, transformer, vae):
    """Return the `WanVariant` of a pipeline.

    Args:
        index (`dict`): Its model_index.json.
        transformer, vae (`dict`): The configs of these parts.
    """
    expand_timesteps = index.get("expand_timesteps", False)
    if expand_timesteps:
        tasks, size = ("t2v", "i2v"), {"height": 704, "width": 1280, "num_frames": 121, "fps": 24.0}
    else:
        conditioned = transformer["in_channels"] != transformer["out_channels"]
        two_images = transformer.get("pos_embed_seq_len") is not None
        tasks = (("flf2v",) if two_images else ("i2v",)) if conditioned else ("t2v",)
        size = {"height": 480, "width": 832, "num_frames": 81, "fps": 16.0}
    return WanVariant(
        tasks=tasks,
        boundary_ratio=index.get("boundary_ratio"),
        expand_timesteps=expand_timesteps,
        divisor=vae.get("scale_factor_spatial", 8) * transformer["patch_size"][1],
        **size,
    )


def min_frames(task):
    """Return how many frames a clip needs: one will do for t2v; else two latent frames, one given and one to learn."""
    return 1 if task == "t2v" else 5


def transformer_subfolder(expert):
    """Return where the pipeline has the transformer of `expert`, None for an only one."""
    return "transformer_2" if expert == "low_noise" else "transformer"


def default_lora_targets(transformer):
    """Return the layers that a LoRA adapts by default: all of `LORA_TARGETS` that the model has."""
    names = [name for name, _ in transformer.named_modules()]
    return [target for target in LORA_TARGETS if any(name.endswith("." + target) for name in names)]


def sample(pipeline, prompt, negative_prompt, *, images, seed, **settings):
    """Sample one clip as the stock pipeline does.

    Args:
        pipeline (`WanPipeline` or `WanImageToVideoPipeline`)
        prompt, negative_prompt (`dict`): From `encode_prompt`; the second None: without guidance.
        images (`list[PIL.Image.Image]`): None, the first frame, or the first and the last one, of that size.
        seed (`int`): Of the noise, which is drawn on the CPU.
        settings: Further arguments of the pipeline: `height`, `width` in pixels, `num_frames`, `guidance_scale`, ...

    Returns:
        `list[PIL.Image.Image]`: The frames.
    """
    device = pipeline._execution_device
    if negative_prompt is not None:
        settings["negative_prompt_embeds"] = negative_prompt["prompt_embeds"][None].to(device)  # (1, L, J)
    settings |= dict(zip(("image", "last_image"), images, strict=False))
    return pipeline(
        prompt_embeds=prompt["prompt_embeds"][None].to(device),
        generator=torch.Generator().manual_seed(seed),
        output_type="pil",
        **settings,
    ).frames[0]


# ---------------------------------------------------------------- encoding


@torch.no_grad()
def encode_prompt(pipeline, prompt):
    """Encode one caption exactly as the stock pipeline does: cleaned, cut, and padded with zeros to 512 tokens.

    Args:
        pipeline (`WanPipeline`): From `WanVideo.load_prompt_encoder`.
        prompt (`str`): The caption.

    Returns:
        `dict` with `prompt_embeds` (L, J).
    """
    prompt_embeds, _ = pipeline.encode_prompt(
        prompt, do_classifier_free_guidance=False, max_sequence_length=MAX_SEQUENCE_LENGTH
    )
    return {"prompt_embeds": prompt_embeds[0]}


def count_prompt_tokens(pipeline, prompt):
    """Return how many tokens of `prompt` go in, and how many the pipeline keeps of them."""
    num_tokens = len(pipeline.tokenizer(prompt_clean(prompt)).input_ids)
    return num_tokens, min(num_tokens, MAX_SEQUENCE_LENGTH)


@torch.no_grad()
def encode_clip(pipeline, pixel_values, *, task):
    """Encode one clip to all that a sample of it holds in addition to its caption.

    Args:
        pipeline (`WanImageToVideoPipeline`): From `WanVideo.load_media_encoder`.
        pixel_values (`torch.Tensor` of shape (3, N, height, width)): In [-1, 1], N of the form 4n + 1.
        task (`str`): `"t2v"`; `"i2v"`, whose condition is the first frame; `"flf2v"`, the first and the last.

    Returns:
        `dict` of fp32 tensors: `latents` (C, F, H, W), the mode of the posterior, (z - mean) / std. For TI2V-5B from
        image to video the first latent frame is that of the image alone. For other conditioned models also
        `condition` (4 + C, F, H, W), the mask and the latents of the condition, and where the model has an image
        encoder `image_embeds` (images, I, width of the image encoder).
    """
    pixel_values = pixel_values[None].to(pipeline.vae.device, pipeline.vae.dtype)  # (1, 3, N, height, width)
    sample = {"latents": _normalised(pipeline.vae, pipeline.vae.encode(pixel_values).latent_dist.mode())}
    if task != "t2v":
        first = pixel_values[:, :, 0]
        last = pixel_values[:, :, -1] if task == "flf2v" else None
        condition = _prepare_condition(pipeline, first, last, num_frames=pixel_values.shape[2])
        if pipeline.config.expand_timesteps:
            sample["latents"][:, :, :1] = condition  # (1, C, 1, H, W)
        else:
            sample["condition"] = condition  # (1, 4 + C, F, H, W)
        if pipeline.image_encoder is not None:
            images = [_to_image(frame[0]) for frame in (first, last) if frame is not None]
            sample["image_embeds"] = pipeline.encode_image(images)[None]  # (1, images, I, width)
    return {name: tensor[0].float() for name, tensor in sample.items()}


def _normalised(vae, latents):
    # Multiplied by 1 / std instead of divided by it, to have the bits of the stock pipeline's conditions.
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(latents)
    std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(latents)
    return (latents - mean) * std


def _prepare_condition(pipeline, image, last_image, *, num_frames):
    """Return what the stock pipeline makes of first and last frames (1, 3, height, width) at the start of sampling."""
    height, width = image.shape[-2:]
    prepared = pipeline.prepare_latents(
        image,
        batch_size=1,
        height=height,
        width=width,
        num_frames=num_frames,
        dtype=torch.float32,
        device=image.device,
        latents=torch.zeros(()),  # the noise, which is not used
        last_image=last_image,
    )
    return prepared[1]


def _to_image(frame):
    """Turn a frame (3, height, width) in [-1, 1] back into the image that it was."""
    return Image.fromarray(((frame + 1) * 127.5).round().byte().permute(1, 2, 0).cpu().numpy())


def encoder_skeletons(pretrained_model_name_or_path, *, task, height, width, num_frames, revision=None, **_):
    """Build the encoders from their configs alone, without memory for their weights.

    Args:
        task (`str`): See `encode_clip`.
        height, width (`int`), num_frames (`int`): Of a clip, in pixels and frames.

    Returns:
        `dict[str, tuple[list[nn.Module], Callable[[], dict[str, torch.Tensor]]]]`: Phase -> its modules, on the meta
        device, and what runs them, once they are elsewhere, as encoding a caption or a clip does. Together the results
        are what a sample holds. "previews" holds what these need in addition to the transformer.
    """
    source = {"pretrained_model_name_or_path": pretrained_model_name_or_path, "revision": revision}
    index = WanPipeline.load_config(**source)
    config = AutoConfig.from_pretrained(subfolder="text_encoder", **source)
    with init_empty_weights():
        text_encoder = UMT5EncoderModel(config)
        vae = AutoencoderKLWan.from_config(AutoencoderKLWan.load_config(subfolder="vae", **source))
        image_encoder = None
        if index.get("image_encoder", (None, None))[0] is not None:
            image_encoder = CLIPVisionModel(CLIPVisionConfig.from_pretrained(subfolder="image_encoder", **source))
    text_encoder.to(torch.bfloat16).tie_weights()

    def encode_prompt():
        input_ids = torch.zeros(1, MAX_SEQUENCE_LENGTH, dtype=torch.long)
        return {"prompt_embeds": text_encoder(input_ids, torch.ones_like(input_ids)).last_hidden_state[0]}

    def encode_pixels():
        # The image encoder runs next to it: its processor goes through Pillow, which needs a content.
        parts = dict.fromkeys(("tokenizer", "text_encoder", "transformer", "transformer_2", "scheduler"))
        parts |= {"vae": vae, "image_encoder": None, "image_processor": None}
        pipeline = WanImageToVideoPipeline(**parts, expand_timesteps=index.get("expand_timesteps", False))
        sample = encode_clip(pipeline, torch.empty(3, num_frames, height, width), task=task)
        if image_encoder is not None:
            side, num_images = image_encoder.config.image_size, 2 if task == "flf2v" else 1
            encoded = image_encoder(torch.empty(num_images, 3, side, side), output_hidden_states=True)
            sample["image_embeds"] = encoded.hidden_states[-2]
        return sample

    def decode():
        if task != "t2v":
            encode_pixels()  # the given frames
        scale = vae.config.scale_factor_spatial
        vae.decode(torch.empty(1, vae.config.z_dim, (num_frames + 3) // 4, height // scale, width // scale))
        return {}

    clip_encoder = [vae] if image_encoder is None else [vae, image_encoder]
    return {
        "text encoder": ([text_encoder], encode_prompt),
        "VAE": (clip_encoder, encode_pixels),
        "previews": (clip_encoder, decode),
    }


# ---------------------------------------------------------------- the transformer


def clean_first_frame(noisy_latents, latents, timestep):
    """Prepare the inputs of TI2V-5B from image to video: the first latent frame is clean, and its tokens say so.

    Args:
        noisy_latents, latents (`torch.Tensor` of shape (B, C, F, H, W))
        timestep (`torch.Tensor` of shape (B,))

    Returns:
        `tuple` of `hidden_states` (B, C, F, H, W) and `timestep` (B, T), 0 for the tokens of the first frame.
    """
    _, _, num_frames, height, width = latents.shape
    hidden_states = torch.cat([latents[:, :, :1], noisy_latents[:, :, 1:]], dim=2)
    tokens_per_frame = height // 2 * (width // 2)
    timestep = timestep[:, None].repeat(1, num_frames * tokens_per_frame)
    timestep[:, :tokens_per_frame] = 0
    return hidden_states, timestep


def model_fn_wan_video(
    transformer,
    *,
    hidden_states,
    timestep,
    encoder_hidden_states,
    encoder_hidden_states_image=None,
    use_gradient_checkpointing=False,
    use_gradient_checkpointing_offload=False,
):
    """Predict the flow. Equal to `transformer(..., return_dict=False)[0]` bit for bit.

    Args:
        transformer (`WanTransformer3DModel`)
        hidden_states (`torch.Tensor` of shape (B, channels, F, H, W)): Noisy latents, then mask and condition.
        timestep (`torch.Tensor` of shape (B,) or (B, T)): In [0, 1000]; one per sample, or one per token.
        encoder_hidden_states (`torch.Tensor` of shape (B, L, J))
        encoder_hidden_states_image (`torch.Tensor` of shape (B, I, image width), *optional*):
            (2B, I, image width) where the model takes a first and a last frame.
        use_gradient_checkpointing, use_gradient_checkpointing_offload (`bool` or one per block)

    Returns:
        `torch.Tensor` of shape (B, C, F, H, W).
    """
    checkpointing = per_block(use_gradient_checkpointing, len(transformer.blocks))
    offload = per_block(use_gradient_checkpointing_offload, len(transformer.blocks))
    patch_size = transformer.config.patch_size
    grid = [side // patch for side, patch in zip(hidden_states.shape[2:], patch_size, strict=True)]  # F, H/2, W/2

    rotary_emb = transformer.rope(hidden_states)  # cosines and sines, (1, T, 1, width of a head) each
    hidden_states = transformer.patch_embedding(hidden_states)  # (B, D, F, H/2, W/2)
    # Contiguous, as in the stock forward: the kernels of the blocks round by the layout.
    hidden_states = hidden_states.flatten(2).transpose(1, 2).contiguous()  # (B, T, D)
    temb, timestep_proj, encoder_hidden_states, encoder_hidden_states_image = transformer.condition_embedder(
        timestep.flatten(),
        encoder_hidden_states,
        encoder_hidden_states_image,
        timestep_seq_len=timestep.shape[1] if timestep.ndim == 2 else None,
    )  # (B, [T,] D), (B, [T,] 6 * D), (B, L, D), (B, I, D)
    timestep_proj = timestep_proj.unflatten(-1, (6, -1))  # (B, [T,] 6, D)
    if encoder_hidden_states_image is not None:
        encoder_hidden_states = torch.cat([encoder_hidden_states_image, encoder_hidden_states], dim=1)  # (B, I + L, D)

    for index, block in enumerate(transformer.blocks):
        hidden_states = gradient_checkpoint_forward(
            block,
            checkpointing[index],
            offload[index],
            hidden_states=hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            temb=timestep_proj,
            rotary_emb=rotary_emb,
        )

    temb = temb.view(len(temb), -1, 1, temb.shape[-1])  # (B, 1 or T, 1, D)
    shift, scale = (transformer.scale_shift_table + temb).unbind(2)  # (B, 1 or T, D) each
    hidden_states = (transformer.norm_out(hidden_states.float()) * (1 + scale) + shift).type_as(hidden_states)
    hidden_states = transformer.proj_out(hidden_states)  # (B, T, patch * C)
    hidden_states = hidden_states.reshape(len(hidden_states), *grid, *patch_size, -1)
    hidden_states = hidden_states.permute(0, 7, 1, 4, 2, 5, 3, 6)  # (B, C, F, 1, H/2, 2, W/2, 2)
    return hidden_states.flatten(6, 7).flatten(4, 5).flatten(2, 3)  # (B, C, F, H, W)


# ---------------------------------------------------------------- names in LoRA files

# From diffusers to the names of the model's authors, which ComfyUI knows and diffusers converts.
_ORIGINAL_NAMES = {
    "attn1": "self_attn",
    "attn2": "cross_attn",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "o",
    "add_k_proj": "k_img",
    "add_v_proj": "v_img",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "proj_out": "head.head",
}


def lora_export_name(name):
    """Return the name in a LoRA file of a layer called `name` in diffusers.

    Raises:
        KeyError: No such layer is known.
    """
    in_block = re.fullmatch(r"(blocks\.\d+)\.(?:(attn\d)\.)?(.+)", name)
    if in_block is None:
        return f"diffusion_model.{_ORIGINAL_NAMES[name]}"
    block, attention, layer = in_block.groups()
    parts = [block, *([_ORIGINAL_NAMES[attention]] if attention else []), _ORIGINAL_NAMES[layer]]
    return f"diffusion_model.{'.'.join(parts)}"


# ---------------------------------------------------------------- the family


class WanVideo(Family):
    """Wan-Video from text, image, or first and last frame to video."""

    pipelines = (WanPipeline, WanImageToVideoPipeline)
    parts = {
        "transformer": (WanTransformer3DModel,),
        "transformer_2": (WanTransformer3DModel,),
        "text_encoder": (UMT5EncoderModel,),
        "vae": (AutoencoderKLWan,),
        # Published is the second. Read is a hidden state, which both have.
        "image_encoder": (CLIPVisionModel, CLIPVisionModelWithProjection),
    }
    media_parts = ("vae", "image_encoder", "image_processor")
    is_video = True
    cleans_first_frame = False

    def __init__(self, *args, **kwargs):
        self.task, self.expert = "t2v", None
        super().__init__(*args, **kwargs)
        source = {"pretrained_model_name_or_path": self.path, "revision": self.hub["revision"]}
        with loading.built_from("config of transformer or VAE"):
            vae = AutoencoderKLWan.load_config(subfolder="vae", **source)
            transformer = WanTransformer3DModel.load_config(subfolder="transformer", **source)
            self.variant = find_variant(self.index, transformer, vae)
        self.divisor = self.variant.divisor
        self._choose(self.variant.tasks[0], *self.variant.experts[:1])

    def _choose(self, task, expert=None):
        self.task, self.expert = task, expert
        self.min_frames = min_frames(task)
        self.image_arguments = {"t2v": (), "i2v": ("image",), "flf2v": ("image", "last_image")}[task]
        self.cleans_first_frame = self.variant.expand_timesteps and task == "i2v"

    @property
    def values(self):
        variant = self.variant
        return dataclasses.asdict(variant) | {
            "experts": variant.experts,
            "lora_target_modules": ",".join(default_lora_targets(self.skeleton)),
            "negative_prompt": NEGATIVE_PROMPT,
            "guidance_scale": variant.guidance_scale,
            "num_inference_steps": variant.num_inference_steps,
        }

    def resolve(self, args):
        self._choose(args.task or self.variant.tasks[0], args.expert)

    @property
    def pipeline_class(self):
        return WanPipeline if self.task == "t2v" else WanImageToVideoPipeline

    @property
    def stages(self):
        experts = self.variant.experts if self.expert == "both" else (self.expert,)
        stages = []
        for number, expert in enumerate(experts):
            others = [transformer_subfolder(name) for name in self.variant.experts if name != expert]
            stage = Stage(expert, transformer_subfolder(expert), self.variant.sigma_range(expert), *others[:1])
            stages.append(dataclasses.replace(stage, number=number, is_last=number == len(experts) - 1))
        return tuple(stages)

    @property
    def identity(self):
        return super().identity | dataclasses.asdict(self.variant)

    def check_lora_targets(self, targets):
        if not any(name.startswith("blocks.") for name in targets):
            raise RefusedError("--lora_target_modules names no layer in a block; diffusers loads no such Wan LoRA.")

    def num_tokens(self, height, width, num_frames):
        return self.variant.num_tokens(height, width, num_frames)

    def sigma_shift(self, height, width):
        return self.variant.sigma_shift(height, width, self.task)

    # ---- its encoders

    @property
    def media_settings(self):
        return [self.task, self.variant.expand_timesteps]

    def count_prompt_tokens(self, prompt):
        return count_prompt_tokens(self.tokenizer, prompt)

    def embedded_tokens(self, num_tokens):
        return MAX_SEQUENCE_LENGTH  # padded

    encode_prompt = staticmethod(encode_prompt)

    def load_media_encoder(self, device):
        return self.load_parts(self.media_parts, pipeline_class=WanImageToVideoPipeline).to(device)

    def encode_media(self, encoder, pixel_values):
        return encode_clip(encoder, pixel_values, task=self.task)

    def encoder_skeletons(self, *, num_tokens, height, width, num_frames):
        size = {"height": height, "width": width, "num_frames": num_frames}
        return encoder_skeletons(self.path, task=self.task, **size, **self.hub)

    # ---- a step

    def predict(self, transformer, noisy_latents, timestep, batch):
        dtype = transformer.patch_embedding.weight.dtype
        hidden_states, image_embeds = noisy_latents, batch.get("image_embeds")
        if self.cleans_first_frame:
            hidden_states, timestep = clean_first_frame(noisy_latents, batch["latents"], timestep)
        elif "condition" in batch:
            hidden_states = torch.cat([noisy_latents, batch["condition"]], dim=1)  # (B, C + 4 + C, F, H, W)
        if image_embeds is not None:
            image_embeds = image_embeds.flatten(0, 1).to(dtype)  # (B * images, I, width of the image encoder)
        return model_fn_wan_video(
            transformer,
            hidden_states=hidden_states.to(dtype),
            timestep=timestep,
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),  # (B, L, J)
            encoder_hidden_states_image=image_embeds,
        )

    def trained_part(self, flow):
        return flow[:, :, 1:] if self.cleans_first_frame else flow

    # ---- previews and results

    def guidance(self, scale):
        return self.variant.guidance(scale)

    sample = staticmethod(sample)
    lora_export_name = staticmethod(lora_export_name)

    def lora_metadata(self, stage):
        return {"sigma_range": "{} to {}".format(*stage.sigma_range)}
