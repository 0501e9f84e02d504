"""Decodes images and brings them to the size they train at: file -> RGB image -> (3, H, W) tensor.

All images take one path, so that orientation, transparency and pixel range cannot differ between two of them.
"""

import contextlib
import io
import logging
import os
from functools import partial

import numpy as np
import torch
from PIL import ExifTags, Image, ImageCms, ImageOps, TiffImagePlugin, UnidentifiedImageError

from dataset.colours import expand_range, profile_of_image
from dataset.inspection import Inspector, dropped_record, inspect_each
from runtime.errors import RefusedError


logger = logging.getLogger(__name__)

# Pillow knows more, of which some are read by other programs (EPS) and many are seldom tried.
IMAGE_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

# The largest cameras take 151 million. Decoding takes up to 20 bytes for each, and a false header may say anything.
MAX_SOURCE_PIXELS = 180_000_000
# In place of Pillow's own limits, a warning at half of that and an error, both without the name of the file.
Image.MAX_IMAGE_PIXELS = None
# Pillow's own reader of uncompressed TIFF takes strips that are missing, and colours stored one after the other with
# 16 bits, for something else.
TiffImagePlugin.READ_LIBTIFF = True


def open_image(media, name=None):
    """Decodes an image completely, upright and in sRGB, transparency composited on white.

    Args:
        media: A path or the bytes of a file.
        name: How messages call the image; the path if not given.

    Returns:
        A `PIL.Image.Image` in mode RGB that holds no file open.

    Raises:
        RefusedError: If it is missing, damaged, animated, too large, HDR, or of a kind without a defined colour range.
    """
    name = name or ("embedded image" if isinstance(media, bytes) else media)
    try:
        # What it is shows in its first bytes, whatever its name ends with.
        with open_media(media) as file, open_media(media) as again, Image.open(file, formats=IMAGE_FORMATS) as image:
            width, height = image.size
            if width * height > MAX_SOURCE_PIXELS:
                raise ValueError(f"it has {width}x{height} pixels, and at most {MAX_SOURCE_PIXELS} are read")
            if image.format == "TIFF" and image.tag_v2.get(254, 0) & 1:
                raise ValueError("it is the raw data of a camera, behind a small preview; save it as PNG or JPEG")
            # MPO is a JPEG with a preview or a second view behind the image.
            if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
                raise ValueError(f"it has {image.n_frames} frames, and an image has one")
            profile, limited = profile_of_image(image, again)
            image.load()
            # Upright before its size is used.
            return _to_rgb(_upright(image, name), profile, limited)
    except UnidentifiedImageError as error:
        hint = "save HEIF, JPEG 2000 and others as PNG or JPEG"
        raise RefusedError(f"{name} is not an image that Pillow can read; {hint}.") from error
    except Exception as error:  # on damaged files Pillow raises OSError, SyntaxError, ValueError, struct.error, ...
        raise RefusedError(f"{name} cannot be used: {error}.") from error


def open_media(media):
    """Returns an open file of bytes, or of what is at a path; raises ValueError where there is no file."""
    if isinstance(media, bytes):
        return io.BytesIO(media)
    # A pipe would be waited for.
    if not os.path.isfile(media):
        raise ValueError("there is no such file")
    return open(media, "rb")


def image_format(media):
    """Returns the format of a path or bytes: Pillow's name for it, "HEIF", which it cannot read, or None."""
    with contextlib.suppress(Exception):  # as in open_image
        with open_media(media) as file, Image.open(file, formats=IMAGE_FORMATS) as image:
            return image.format
    with contextlib.suppress(OSError, ValueError), open_media(media) as file:
        head = file.read(12)
        if head[4:8] == b"ftyp" and head[8:] in b"heic heix heim heis hevc hevx mif1 msf1".split():
            return "HEIF"
    return None


def _upright(image, name):
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    except Exception as error:  # SyntaxError, struct.error, ...: viewers show such an image as it is stored, too
        logger.info("%s: EXIF not readable: %s", name, error)
        turned = False
    if not turned:
        return image
    # Pillow would re-encode the rest, which fails for much of what cameras put there.
    for key in ("exif", "Raw profile type exif"):
        image.info.pop(key, None)
    return ImageOps.exif_transpose(image)


def _to_rgb(image, profile, limited):
    if image.mode in ("F", "I"):
        raise ValueError(f"32-bit pixels (mode {image.mode}) have no defined white; save it with 8 or 16 bits")
    alpha = None
    if image.mode.startswith("I;16"):
        # Pillow's own conversion clips at 255.
        values = np.asarray(image).astype(np.uint32)
        if "transparency" in image.info:
            alpha = Image.fromarray(np.where(values == image.info["transparency"], 0, 255).astype(np.uint8))
        # Pillow leaves 12 bits as they are, and does not turn those upside down in which 0 is white.
        if image.format == "TIFF" and (image.tag_v2[258][0], image.tag_v2[262]) != (16, 1):
            raise ValueError("its greys have 12 bits, or 0 for white; save it with 8 or 16 bits and 0 for black")
        image = Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    elif image.has_transparency_data:
        transparency = image.info.get("transparency")
        if isinstance(transparency, tuple) and max(transparency) > 255:
            # The colour has 16 bits, of which Pillow keeps the upper 8 in the pixels and compares the lower.
            image.info["transparency"] = tuple(value >> 8 for value in transparency)
        rgba = image.convert("RGBA")
        alpha = rgba.getchannel("A")
        # Grey stays grey for its profile.
        image = rgba.convert("RGB").convert("L" if image.mode in ("1", "L", "LA") else "RGB")
    elif image.mode == "P":
        image = image.convert("RGB")

    image = to_srgb(expand_range(image.convert("RGB")) if limited else image, profile)
    return image if alpha is None else on_white(image, alpha)


def on_white(image, alpha):
    """Composites an image on white.

    Args:
        image: A `PIL.Image.Image` in mode RGB.
        alpha: Its transparency, an image of the same size in mode L: 0 is transparent.

    Returns:
        A `PIL.Image.Image` in mode RGB.
    """
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=alpha)
    return white


def to_srgb(image, profile):
    """Converts an image to sRGB.

    Args:
        image: A `PIL.Image.Image` without transparency.
        profile: Its ICC profile, bytes; None for sRGB.

    Returns:
        A `PIL.Image.Image` in mode RGB.
    """
    if profile:
        try:
            profile = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            # Grey images with a profile for RGB are common. Other mismatches raise an error.
            if image.mode == "L" and profile.profile.xcolor_space == "RGB ":
                image = image.convert("RGB")
            return ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), outputMode="RGB")
        except (ImageCms.PyCMSError, OSError) as error:
            # What viewers do with a broken profile as well: the image is taken for sRGB.
            logger.info("A colour profile was not usable: %s", error)
    return image.convert("RGB")


def cover_and_crop(image, height, width):
    """Scales an image until it covers the size, aspect kept, and crops the rest evenly on both sides.

    Args:
        image: A `PIL.Image.Image`.
        height: In pixels.
        width: In pixels.

    Returns:
        A `PIL.Image.Image` of that size.
    """
    return ImageOps.fit(image, (width, height), method=Image.Resampling.LANCZOS)


def to_tensor(image):
    """Turns an image into numbers: 0 becomes -1 and 255 becomes 1, exactly.

    Args:
        image: A `PIL.Image.Image` in mode RGB.

    Returns:
        A contiguous float32 tensor (3, H, W) in [-1, 1].
    """
    assert image.mode == "RGB", image.mode
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()  # (3, H, W)
    return pixels.float() / 127.5 - 1.0


def inspect_rows(rows, sizing, **how):
    """Decodes every image once, so that a bad one is known before a model loads.

    Args:
        rows: A list of `dataset.metadata.Row`.
        sizing: A `dataset.buckets.Sizing`.
        how: `on_bad_sample`, `cache` and `accelerator` of `dataset.inspection.inspect_each`.

    Returns:
        A list of `dataset.inspection.Item`.

    Raises:
        RefusedError: If images are bad; lists all of them with their reasons.
    """
    # Few threads: an image of the largest size takes gigabytes while it is decoded.
    inspector = Inspector("images", _measure, "image", partial(_decide, sizing=sizing), max_threads=8)
    return inspect_each(rows, inspector, **how)


def _measure(content, name):
    return {"size": open_image(content, name).size}


def _decide(row, measured, sizing):
    size = measured["size"]
    record = dropped_record(row, {"size": list(size), "frames": 1, "fps": None})
    chosen = sizing.choose(row.id, *size, 1)
    if isinstance(chosen, str):
        return record | {"reason": chosen}
    height, width, _, batch_size = chosen
    used = {"size": [width, height], "frames": 1} | ({} if batch_size is None else {"batch_size": batch_size})
    return record | {"decision": "used", "used": used}


def read_image(row, record):
    """Reads an image at the size in its record.

    Args:
        row: A `dataset.metadata.Row`.
        record: Its record from `inspect_rows`.

    Returns:
        A float32 tensor (3, height, width) in [-1, 1].
    """
    width, height = record["used"]["size"]
    return to_tensor(cover_and_crop(open_image(row.content, row.name), height, width))
