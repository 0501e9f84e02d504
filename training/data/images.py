"""Decodes pictures and brings them to the size they train at: file -> RGB picture -> (3, H, W) tensor.

One path for every picture, so that orientation, transparency and pixel range cannot differ between two of them.
"""

import io
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from PIL import ExifTags, Image, ImageCms, ImageOps, TiffImagePlugin, UnidentifiedImageError

from training.data.metadata import first_five
from training.errors import RefusedError


logger = logging.getLogger(__name__)

# Pillow knows more, of which some are read by other programs (EPS) and many are seldom tried.
PICTURE_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")

# Beyond this most of a picture would be cropped away, or one side would be thinner than a token.
MAX_ASPECT_RATIO = 10

# The largest cameras take 151 million. Decoding takes up to 20 bytes for each, and a false header may say anything.
MAX_SOURCE_PIXELS = 180_000_000
# In place of Pillow's own limits, a warning at half of that and an error, both without the name of the file.
Image.MAX_IMAGE_PIXELS = None
# Pillow's own reader of uncompressed TIFF takes strips that are missing, and colours stored one after the other with
# 16 bits, for something else.
TiffImagePlugin.READ_LIBTIFF = True


def open_image(media, name=None):
    """Decodes a picture completely, upright and in sRGB, transparency composited on white.

    Args:
        media: A path or the bytes of a file.
        name: How messages call the picture; the path if not given.

    Returns:
        A `PIL.Image.Image` in mode RGB that holds no file open.

    Raises:
        RefusedError: If it is missing, damaged, animated, too large, or of a kind without a defined colour range.
    """
    embedded = isinstance(media, bytes)
    if name is None:
        name = "embedded picture" if embedded else media
    try:
        # A pipe would be waited for.
        if not embedded and not os.path.isfile(media):
            raise ValueError("there is no such file")
        # What it is shows in its first bytes, whatever its name ends with.
        with Image.open(io.BytesIO(media) if embedded else media, formats=PICTURE_FORMATS) as image:
            if image.width * image.height > MAX_SOURCE_PIXELS:
                raise ValueError(
                    f"it has {image.width}x{image.height} pixels, and at most {MAX_SOURCE_PIXELS} are read"
                )
            # MPO is a JPEG with a preview or a second view behind the picture.
            if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
                raise ValueError(f"it has {image.n_frames} frames, and a picture has one")
            image.load()
            # Upright before anything looks at the size.
            return _to_rgb(_upright(image, name))
    except UnidentifiedImageError as error:
        num_bytes = len(media) if embedded else os.path.getsize(media)
        raise RefusedError(f"{name} is not a picture that Pillow can read ({num_bytes} bytes).") from error
    except Exception as error:  # on damaged files Pillow raises OSError, SyntaxError, ValueError, struct.error, ...
        raise RefusedError(f"{name} cannot be used: {error}.") from error


def _upright(image, name):
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    except Exception as error:  # SyntaxError, struct.error, ...: viewers show such a picture as it is stored, too
        logger.info("%s: EXIF not readable: %s", name, error)
        turned = False
    if not turned:
        return image
    # Pillow would write the rest anew, which fails for much of what cameras put there.
    for key in ("exif", "Raw profile type exif"):
        image.info.pop(key, None)
    return ImageOps.exif_transpose(image)


def _to_rgb(image):
    if image.mode in ("F", "I"):
        raise ValueError(f"32-bit pixels (mode {image.mode}) have no defined white; save it with 8 or 16 bits")
    # Profiles only: what PNG says of its colours in other chunks (gAMA, cHRM, cICP), and AVIF outside of a profile,
    # Pillow does not apply, nor do most viewers of files. They are taken for sRGB, which is what most of them state.
    profile = image.info.get("icc_profile")
    alpha = None
    if image.mode == "La":
        image = image.convert("LA")
    if image.mode.startswith("I;16"):
        # Pillow's own conversion clips at 255.
        values = np.asarray(image).astype(np.uint32)
        if "transparency" in image.info:
            alpha = Image.fromarray(np.where(values == image.info["transparency"], 0, 255).astype(np.uint8))
        white = 65535
        if image.format == "TIFF":
            # Pillow leaves 12 bits as they are, and does not turn those upside down in which 0 is white.
            white = 2 ** image.tag_v2[ExifTags.Base.BitsPerSample][0] - 1
            if image.tag_v2[ExifTags.Base.PhotometricInterpretation] == 0:
                values = white - values
        image = Image.fromarray(((values * 255 + white // 2) // white).astype(np.uint8))
    elif image.has_transparency_data:
        transparency = image.info.get("transparency")
        if isinstance(transparency, tuple) and max(transparency) > 255:
            # The colour has 16 bits, of which Pillow keeps the upper 8 in the pixels and looks for the lower.
            image.info["transparency"] = tuple(value >> 8 for value in transparency)
        rgba = image.convert("RGBA")
        alpha = rgba.getchannel("A")
        # Grey stays grey for its profile.
        image = rgba.convert("RGB").convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB")
    elif image.mode == "P":
        image = image.convert("RGB")

    image = _to_srgb(image, profile)
    return image if alpha is None else on_white(image, alpha)


def on_white(image, alpha):
    """Composites a picture on white.

    Args:
        image: A `PIL.Image.Image` in mode RGB.
        alpha: Its transparency, a picture of the same size in mode L: 0 is transparent.

    Returns:
        A `PIL.Image.Image` in mode RGB.
    """
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=alpha)
    return white


def _to_srgb(image, profile):
    if profile:
        try:
            profile = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            # Grey pictures with a profile for RGB are common. Other mismatches raise.
            if image.mode == "L" and profile.profile.xcolor_space == "RGB ":
                image = image.convert("RGB")
            return ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), outputMode="RGB")
        except (ImageCms.PyCMSError, OSError) as error:
            # What viewers do with a broken profile as well: the picture is taken for sRGB.
            logger.info("A colour profile was not usable: %s", error)
    return image.convert("RGB")


def target_size(source_width, source_height, *, height, width, max_pixels, divisor):
    """Chooses the size that a picture trains at.

    With `max_pixels`: of the sizes under the cap and inside the source the largest of about its aspect, where one
    percent of error in aspect (which is cropped) weighs as much as ten percent of the pixels. A source side below
    `divisor` is enlarged to it.

    Args:
        source_width: Width of the upright source in pixels.
        source_height: Height of the upright source in pixels.
        height: Fixed height in pixels, not looked at with `max_pixels`.
        width: Fixed width in pixels, not looked at with `max_pixels`.
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


def cover_and_crop(image, height, width):
    """Scales a picture until it covers the size, aspect kept, and crops what stands out evenly on both sides.

    Args:
        image: A `PIL.Image.Image`.
        height: In pixels.
        width: In pixels.

    Returns:
        A `PIL.Image.Image` of that size.
    """
    return ImageOps.fit(image, (width, height), method=Image.Resampling.LANCZOS)


def to_tensor(image):
    """Turns a picture into numbers: 0 becomes -1 and 255 becomes 1, exactly.

    Args:
        image: A `PIL.Image.Image` in mode RGB.

    Returns:
        A contiguous float32 tensor (3, H, W) in [-1, 1].
    """
    assert image.mode == "RGB", image.mode
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()  # (3, H, W)
    return pixels.float() / 127.5 - 1.0


def inspect_rows(rows, *, height, width, max_pixels, divisor):
    """Decodes every picture once, so that a bad one is known before a model loads.

    Args:
        rows: A list of `training.data.metadata.Row`.
        height, width, max_pixels, divisor: See `target_size`.

    Returns:
        For each row its record of `dataset.jsonl`, a dict.

    Raises:
        RefusedError: If pictures are bad; lists all of them with their reasons.
    """
    size_of = partial(target_size, height=height, width=width, max_pixels=max_pixels, divisor=divisor)
    return inspect_each(partial(_inspect, size_of=size_of), rows, "pictures")


def inspect_each(inspect, rows, what, max_threads=None):
    """Makes the record of every row, and says which are enlarged a lot.

    Args:
        inspect: From a `training.data.metadata.Row` to its record; raises RefusedError.
        rows: A list of rows.
        what: What the rows hold, in the plural.
        max_threads: The most threads to use; Python's choice if not given.

    Returns:
        The records, in the order of the rows.

    Raises:
        RefusedError: If any row is refused; lists all of them with their reasons.
    """

    def record_or_error(row):
        try:
            return inspect(row)
        except RefusedError as error:
            return error

    # Threads: Pillow and FFmpeg decode without holding Python's lock.
    with ThreadPoolExecutor(max_threads) as pool:
        results = list(pool.map(record_or_error, rows))
    problems = [str(result) for result in results if isinstance(result, RefusedError)]
    if problems:
        listing = "\n".join(f"  {problem}" for problem in problems)
        raise RefusedError(f"{len(problems)} of {len(rows)} {what} cannot be used:\n{listing}")

    enlarged = []
    for record in results:
        if record["decision"] == "used":
            source, used = record["source"]["size"], record["used"]["size"]
            scale = max(used[0] / source[0], used[1] / source[1])
            if scale > 2:
                enlarged.append(f"{record['id']}: {source[0]}x{source[1]} to {used[0]}x{used[1]}, {scale:.1f} times")
    if enlarged:
        logger.warning("%d %s are enlarged more than 2 times:\n%s", len(enlarged), what, first_five(enlarged))
    return results


def row_name(row):
    """Returns how messages call a row: by its id, and where it was found."""
    return row.id if row.id == row.origin else f"{row.id} ({row.origin})"


def _inspect(row, size_of):
    name = row_name(row)
    source_width, source_height = open_image(row.media, name).size
    try:
        height, width = size_of(source_width, source_height)
    except RefusedError as error:
        raise RefusedError(f"{name}: {error}") from error
    return {
        "id": row.id,
        "caption": row.caption,
        "source": {"size": [source_width, source_height], "frames": 1, "fps": None},
        "used": {"size": [width, height], "frames": 1},
        "decision": "used",
        "reason": None,
    }


def read_picture(row, record):
    """Reads a picture at the size that its record says.

    Args:
        row: A `training.data.metadata.Row`.
        record: Its record from `inspect_rows`.

    Returns:
        A float32 tensor (3, height, width) in [-1, 1].
    """
    width, height = record["used"]["size"]
    return to_tensor(cover_and_crop(open_image(row.media), height, width))
