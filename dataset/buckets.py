"""At which size and length an item trains, and the buckets that this makes: (width, height, frames) -> items."""

import collections
import dataclasses
import functools
import math
import statistics
from typing import NamedTuple

import numpy as np

from dataset.draws import keyed_draw
from dataset.settings import bucket_pixels
from runtime.errors import RefusedError


# Beyond this most of an image would be cropped away, or one side would be thinner than a token.
MAX_ASPECT_RATIO = 10


@functools.lru_cache(maxsize=65536)
def target_size(source_width, source_height, *, height, width, max_pixels, divisor):
    """Chooses the size that an image trains at.

    With `max_pixels`: of the sizes under the cap and inside the source the largest of about its aspect, where one
    percent of error in aspect (which is cropped) weighs as much as ten percent of the pixels. A source side below
    `divisor` is enlarged to it.

    Args:
        source_width: Width of the upright source in pixels.
        source_height: Height of the upright source in pixels.
        height: Fixed height in pixels, not used with `max_pixels`.
        width: Fixed width in pixels, not used with `max_pixels`.
        max_pixels: Cap on height x width, or None for the fixed size.
        divisor: Both sides are a multiple of it.

    Returns:
        (height, width) in pixels.

    Raises:
        RefusedError: If the source is too small or too elongated.
    """
    short, long = sorted((source_width, source_height))
    if 2 * short < divisor or long > MAX_ASPECT_RATIO * short:
        raise RefusedError(
            f"{source_width}x{source_height} pixels: the shorter side must be at least {(divisor + 1) // 2} and the "
            f"longer side at most {MAX_ASPECT_RATIO} times the shorter."
        )
    if max_pixels is None:
        return height, width

    sizes = set()
    for rows in range(divisor, min(max(source_height, divisor), max_pixels // divisor) + 1, divisor):
        most = min(max_pixels // rows, max(source_width, divisor)) // divisor * divisor
        below = rows * source_width // source_height // divisor * divisor
        sizes.update((rows, min(max(columns, divisor), most)) for columns in (below, below + divisor))

    def worth(size):
        ratio = size[1] * source_height / (size[0] * source_width)
        return size[0] * size[1] / max(ratio, 1 / ratio) ** 10, size

    return max(sizes, key=worth)


@functools.lru_cache
def aspect_shapes(max_pixels, divisor, num_shapes):
    """Returns the shapes [(height, width), ...] of one area: from 1:2 to 2:1 in equal factors, alike in pixels."""
    aspects = np.geomspace(0.5, 2, num_shapes) if num_shapes > 1 else [1.0]
    # As a large source of that aspect would train.
    sides = [(round(1e6 * aspect**0.5), round(1e6 / aspect**0.5)) for aspect in aspects]
    return [target_size(*side, height=None, width=None, max_pixels=max_pixels, divisor=divisor) for side in sides]


def cropped_share(source, used):
    """Returns the share of a side that is cropped away when `source` (width, height) covers `used` (width, height)."""
    ratio = source[0] * used[1] / (source[1] * used[0])
    return 1 - min(ratio, 1 / ratio)


@functools.lru_cache(maxsize=65536)
def nearest_shape(source_width, source_height, *, max_pixels, divisor, num_shapes):
    """Chooses the shape of `aspect_shapes` that crops least, of the largest area that enlarges by at most a tenth.

    Areas are `max_pixels` and, for small sources, three quarters of it, again and again.

    Args:
        source_width, source_height: Upright, in pixels.
        max_pixels, divisor: See `target_size`.
        num_shapes: Of each area.

    Returns:
        (height, width) in pixels.
    """
    source = source_width, source_height
    while True:
        shapes = aspect_shapes(max_pixels, divisor, num_shapes)
        height, width = min(shapes, key=lambda shape: (cropped_share(source, shape[::-1]), -math.prod(shape)))
        if max(height / source_height, width / source_width) <= 1.1 or max_pixels * 3 // 4 < divisor**2:
            return height, width
        max_pixels = max_pixels * 3 // 4


@dataclasses.dataclass(frozen=True)
class Sizing:
    """Chooses the size, length and batch size of an item: by one rule for all of them, or by a bucket config.

    With a bucket config an item goes to the largest size of which it has all pixels, and there to the longest length
    of which it has all frames; images only to length 1, and clips only to longer ones. Where it is not
    among the share that a bucket takes, drawn once for each item and bucket, it is offered to the next smaller size.

    Args:
        height, width, max_pixels, divisor: See `target_size`.
        num_frames: The most frames of a clip.
        bucket_config: From `parse_args`, or None.
        seed: Of the draws.
        aspect_buckets: How many shapes there are under a cap on pixels; 0: each item has its own.
    """

    height: int | None
    width: int | None
    max_pixels: int | None
    divisor: int
    num_frames: int | None = 1
    bucket_config: dict | None = None
    seed: int = 42
    aspect_buckets: int = 0

    @classmethod
    def from_args(cls, args, divisor):
        """Returns the rule that the flags ask for."""
        num_frames = getattr(args, "num_frames", 1)
        rule = args.bucket_config, args.seed, args.aspect_buckets or 0
        return cls(args.height, args.width, args.max_pixels, divisor, num_frames, *rule)

    def choose(self, item_id, source_width, source_height, num_frames):
        """Chooses for one item.

        Args:
            item_id: Of its row.
            source_width, source_height: Upright, in pixels.
            num_frames: How many it has at the rate of training; 1 is an image.

        Returns:
            (height, width, most frames, batch size or None for that of the run), or why no bucket takes it.

        Raises:
            RefusedError: See `target_size`.
        """
        fit = functools.partial(self._fit, source_width, source_height)
        if self.bucket_config is None:
            size = fit(height=self.height, width=self.width, max_pixels=self.max_pixels)
            return *size, self.num_frames, None
        left_out = []
        by_pixels = sorted(self.bucket_config, key=lambda name: bucket_pixels(name)[0], reverse=True)
        for number, name in enumerate(by_pixels):
            lengths = {int(frames): entry for frames, entry in self.bucket_config[name].items()}
            length = max((n for n in lengths if n <= num_frames and (n == 1) == (num_frames == 1)), default=None)
            pixels, sides = bucket_pixels(name)
            height, width = sides or (0, 0)
            is_large = source_width * source_height >= pixels and source_height >= height and source_width >= width
            if length is None or not is_large:
                continue
            share, batch_size = lengths[length]
            if share < 1 and keyed_draw(self.seed, item_id, 1, number, length).random() >= share:
                left_out.append(f"{share:g} of {name}")
                continue
            return *fit(height=height, width=width, max_pixels=None if sides else pixels), length, batch_size
        fit(height=0, width=0, max_pixels=None)  # refuses what no size can take
        if left_out:
            return f"it is not among the share of bucket_config ({', '.join(left_out)})"
        listed = "; ".join(f"{name}: {', '.join(lengths)} frames" for name, lengths in self.bucket_config.items())
        return f"no bucket of bucket_config takes it ({listed})"

    def _fit(self, source_width, source_height, *, height, width, max_pixels):
        source = source_width, source_height
        size = target_size(*source, height=height, width=width, max_pixels=max_pixels, divisor=self.divisor)
        if max_pixels is None or not self.aspect_buckets:
            return size
        return nearest_shape(*source, max_pixels=max_pixels, divisor=self.divisor, num_shapes=self.aspect_buckets)


class Shape(NamedTuple):
    """What decides the shape of all tensors of a sample but padded ones: its sizes, in pixels and frames.

    Args:
        width, height, frames (`int`): Of the target.
        files (`tuple`): Of each further role (role, ((width, height, frames), ...)).
    """

    width: int
    height: int
    frames: int
    files: tuple = ()

    def __str__(self):
        further = [f" + {len(files)} {role}" for role, files in self.files]
        return f"{self.width} x {self.height} x {self.frames}{''.join(further)}"


def bucket_key(record, train_batch_size):
    """Return what items of one micro-batch have in common: their `Shape`, and the batch size (`int`)."""

    def size(used):
        return *used["size"], used["frames"]

    used = record["used"]
    files = tuple((role, tuple(map(size, files))) for role, files in used.get("files", {}).items())
    return Shape(*size(used), files), used.get("batch_size") or train_batch_size


def describe_buckets(records, repeats, *, train_batch_size, tokens_per_sample):
    """Return the lines of the table of buckets, for a person.

    Args:
        records (`list[dict]`): Of the items that are trained.
        repeats (`list[int]`): How often each comes in one epoch.
        train_batch_size (`int`): Of buckets that do not state their own.
        tokens_per_sample (`Callable[[int, int, int], int]`): From height, width and frames to tokens of the model.
    """
    crops, samples = collections.defaultdict(list), collections.Counter()
    for record, repeat in zip(records, repeats, strict=True):
        key = bucket_key(record, train_batch_size)
        crops[key].append(cropped_share(record["source"]["size"], record["used"]["size"]))
        samples[key] += repeat
    row = "{:>24} {:>7} {:>9} {:>6} {:>7} {:>12} {:>6} {:>7}".format
    titles = "bucket (w x h x frames)", "items", "per epoch", "batch", "batches", "tokens/batch", "crop", "at most"
    lines = [row(*titles)]
    for key in sorted(crops, key=lambda key: (math.prod(key[0][:3]), key), reverse=True):
        shape, batch_size = key
        tokens = batch_size * tokens_per_sample(shape.height, shape.width, shape.frames)
        crop = [f"{share:.1%}" for share in (statistics.median(crops[key]), max(crops[key]))]
        counts = len(crops[key]), samples[key], batch_size, math.ceil(samples[key] / batch_size)
        lines.append(row(str(shape), *counts, tokens, *crop))
    return lines
