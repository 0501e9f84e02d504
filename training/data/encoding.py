"""Runs the encoders once over the dataset, before training, and keeps their outputs on the CPU."""

import logging

import torch
from tqdm.auto import tqdm

from training.data.images import cover_and_crop, open_image, to_tensor
from training.errors import RefusedError


logger = logging.getLogger(__name__)


def warn_of_truncated_captions(captions, count_tokens):
    """Say which captions are longer than the text encoder takes.

    Args:
        captions (`list[str]`)
        count_tokens (`Callable[[str], tuple[int, int]]`): Returns the tokens of a caption and how many are kept.
    """
    counts = {caption: count_tokens(caption) for caption in dict.fromkeys(captions)}
    cut = [(caption, *count) for caption, count in counts.items() if count[0] > count[1]]
    if cut:
        listed = "; ".join(f"{tokens} tokens, {kept} kept: {caption[:60]!r}..." for caption, tokens, kept in cut[:5])
        logger.warning("%d captions are cut, as the stock pipeline would cut them: %s", len(cut), listed)


def encode_captions(captions, encode, accelerator):
    """Encode each different caption once, one at a time: padding in a batch would change bits.

    Args:
        captions (`list[str]`)
        encode (`Callable[[str], torch.Tensor]`): Returns (L, J).

    Returns:
        `dict[str, torch.Tensor]`: Caption -> embedding, on the CPU.
    """
    different = list(dict.fromkeys(captions))
    return {
        caption: encode(caption).cpu()
        for caption in tqdm(different, desc="captions", disable=not accelerator.is_main_process)
    }


def encode_images(rows, records, encode, accelerator):
    """Encode each picture at the size that its record says.

    Args:
        rows (`list[Row]`), records (`list[dict]`): From `read_rows` and `inspect_rows`.
        encode (`Callable[[torch.Tensor], torch.Tensor]`): From (1, 3, height, width) in [-1, 1] to (1, C, H, W).

    Returns:
        `list[torch.Tensor]`: For each row its latents (C, H, W), fp32, on the CPU.

    Raises:
        RefusedError: The latents of a picture are not finite.
    """
    latents = []
    pairs = list(zip(rows, records, strict=True))
    for row, record in tqdm(pairs, desc="pictures", disable=not accelerator.is_main_process):
        width, height = record["used"]["size"]
        pixel_values = to_tensor(cover_and_crop(open_image(row.media), height, width))
        latents.append(encode(pixel_values[None])[0].cpu())
        if not torch.isfinite(latents[-1]).all():
            raise RefusedError(f"{row.id}: its latents are not finite numbers; remove the picture from the dataset.")
    return latents
