"""Runs the encoders once over the dataset, before training, and keeps their outputs on the CPU."""

import logging

import torch
from tqdm.auto import tqdm

from training.errors import RefusedError


logger = logging.getLogger(__name__)


def count_caption_tokens(captions, count_tokens):
    """Return how many tokens each different caption has, and say which are longer than the text encoder takes.

    Args:
        captions (`list[str]`)
        count_tokens (`Callable[[str], tuple[int, int]]`): Returns the tokens of a caption and how many are kept.

    Returns:
        `list[int]`: How many are kept of each.
    """
    counts = {caption: count_tokens(caption) for caption in dict.fromkeys(captions)}
    cut = [(caption, *count) for caption, count in counts.items() if count[0] > count[1]]
    if cut:
        listed = "; ".join(f"{tokens} tokens, {kept} kept: {caption[:60]!r}..." for caption, tokens, kept in cut[:5])
        logger.warning("%d captions are cut, as the stock pipeline would cut them: %s", len(cut), listed)
    return [kept for _, kept in counts.values()]


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


def encode_media(items, read, encode, accelerator):
    """Encode each picture or clip at the size that its record says.

    Args:
        items (`list[tuple[Row, dict]]`): Rows with their records, of those that are used.
        read (`Callable[[Row, dict], torch.Tensor]`): Returns pixels in [-1, 1].
        encode (`Callable[[torch.Tensor], dict[str, torch.Tensor]]`): From those to what a sample holds.

    Returns:
        `list[dict[str, torch.Tensor]]`: For each item what `encode` returned, on the CPU.

    Raises:
        RefusedError: A result is not finite.
    """
    samples = []
    for row, record in tqdm(items, desc="media", disable=not accelerator.is_main_process):
        samples.append({name: tensor.cpu() for name, tensor in encode(read(row, record)).items()})
        for name, tensor in samples[-1].items():
            if not torch.isfinite(tensor).all():
                raise RefusedError(f"{row.id}: its {name} are not finite numbers; remove it from the dataset.")
    return samples
