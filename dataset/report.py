"""Describes how a dataset is used, before it is trained on: in lines, and as a sheet of the first samples."""

import collections
import pathlib
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dataset.buckets import describe_buckets


_SHEET_SAMPLES, _SHEET_COLUMNS = 64, 8
_CELL, _CAPTION_LINES = 224, 4


def describe_data(args, items, batches, num_tokens, cache_bytes):
    """Return lines on how the dataset is used, for a person.

    Args:
        args (`argparse.Namespace`)
        items (`list[Item]`): All, also those that are dropped.
        batches (`BatchPlan`)
        num_tokens (`Callable[[int, int, int], int]`): From height, width and frames to the tokens of a sample.
        cache_bytes (`int`): Of what is to be encoded.
    """
    used = [item for item in items if item.record["decision"] == "used"]
    lines = [f"{len(used)} of {len(items)} items are used"]
    reasons = collections.Counter(item.record["reason"] for item in items if item.record["decision"] == "dropped")
    lines += [f"  {count} dropped: {reason}" for reason, count in reasons.most_common()]
    clips = [item.record for item in used if "source_frames" in item.record["used"]]
    if clips:
        kept = sum(len(set(record["used"]["source_frames"])) for record in clips)
        there = sum(record["source"]["frames"] for record in clips)
        retimed = sum((record["reason"] or "").startswith("retimed") for record in clips)
        lines.append(f"  frames: {kept} of {there} are used; {retimed} of {len(clips)} clips are retimed")
    records, repeats = [item.record for item in used], [item.row.repeat for item in used]
    lines += describe_buckets(records, repeats, train_batch_size=args.train_batch_size, tokens_per_sample=num_tokens)
    tokens = [sum(batches.tokens[index] for index in batches.step(step)) for step in range(1, 11)]
    lines.append(f"tokens per optimizer step: {min(tokens)} to {max(tokens)} in the first ten")
    lines.append(f"cache: {cache_bytes / 2**20:.2f} MiB are to be written to {args.cache_dir}")
    return lines


def draw_contact_sheet(path, items, read):
    """Draw the first samples as the model will see them, of clips the first, middle and last frame, with captions.

    Args:
        path (`pathlib.Path`): Of the PNG.
        items (`list[Item]`): Of those that are used.
        read (`Callable[[Row, dict], torch.Tensor]`): Returns pixels (3, [F,] H, W) in [-1, 1].
    """
    items = items[:_SHEET_SAMPLES]
    with ThreadPoolExecutor(4) as pool:
        images = list(pool.map(lambda item: _thumbnail(item, read), items))
    # DejaVu comes with matplotlib and knows more letters than Pillow's own.
    from matplotlib import get_data_path

    font = ImageFont.truetype(str(pathlib.Path(get_data_path(), "fonts/ttf/DejaVuSans.ttf")), 11)
    columns = min(_SHEET_COLUMNS, len(items))
    rows = -(-len(items) // columns)
    height = _CELL + 16 * (_CAPTION_LINES + 1)
    sheet = Image.new("RGB", (columns * (_CELL + 8) + 8, rows * (height + 8) + 8), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (item, image) in enumerate(zip(items, images, strict=True)):
        left, top = 8 + number % columns * (_CELL + 8), 8 + number // columns * (height + 8)
        sheet.paste(image, (left + (_CELL - image.width) // 2, top + (_CELL - image.height) // 2))
        used = item.record["used"]
        title = f"{used['size'][0]}x{used['size'][1]}x{used['frames']} {item.row.id}"
        caption = textwrap.wrap(item.row.caption, 36, max_lines=_CAPTION_LINES, placeholder=" ...")
        text = "\n".join([textwrap.shorten(title, 40, placeholder="...") or title[:40], *caption])
        draw.multiline_text((left, top + _CELL + 2), text, fill="black", font=font)
    sheet.save(path)


def _thumbnail(item, read):
    record = item.record
    frames = record["used"].get("source_frames")
    if frames is not None:
        # Only those that are shown: no more is decoded than up to the last of them.
        shown = sorted({0, len(frames) // 2, len(frames) - 1})
        used = record["used"] | {"frames": len(shown), "source_frames": [frames[n] for n in shown]}
        record = record | {"used": used}
    pixels = read(item.row, record)
    pixels = pixels.transpose(0, 1) if pixels.ndim == 4 else pixels[None]
    levels = ((pixels + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()  # (F, H, W, 3)
    image = Image.fromarray(np.concatenate(levels, axis=1))
    image.thumbnail((_CELL, _CELL), Image.Resampling.LANCZOS)
    return image
