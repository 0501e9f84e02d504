import io
import json
import logging
import math
import os
import struct
import zlib

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageDraw

from dataset.buckets import Sizing, target_size
from dataset.images import cover_and_crop, inspect_rows, open_image, to_tensor
from dataset.metadata import Row, read_rows
from runtime.errors import RefusedError


def encode(image, file_format, **options):
    data = io.BytesIO()
    image.save(data, file_format, **options)
    return data.getvalue()


def noise(height, width, seed=0):
    """Returns random pixels (H, W, 3), so that no rotation of them equals another."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def difference(image, pixels):
    """Returns the largest difference between an image and an array (H, W, 3), in levels of 255."""
    assert image.mode == "RGB"
    values = np.asarray(image).astype(int)
    assert values.shape == pixels.shape
    return np.abs(values - pixels).max()


# Orientation

# How the stored pixels come about from the upright ones, after the table of the EXIF standard: where the 0th row and
# the 0th column of the stored image lie in the upright one.
STORED = {
    1: lambda p: p,  # top, left
    2: lambda p: p[:, ::-1],  # top, right
    3: lambda p: p[::-1, ::-1],  # bottom, right
    4: lambda p: p[::-1],  # bottom, left
    5: lambda p: p.transpose(1, 0, 2),  # left, top
    6: lambda p: p[:, ::-1].transpose(1, 0, 2),  # right, top
    7: lambda p: p[::-1, ::-1].transpose(1, 0, 2),  # right, bottom
    8: lambda p: p[::-1].transpose(1, 0, 2),  # left, bottom
}


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize(
    ("file_format", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"})],
)
def test_every_orientation_gives_the_upright_image(orientation, file_format, options):
    pixels = noise(24, 40)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](pixels)))
    assert difference(open_image(encode(stored, file_format, exif=exif, **options)), pixels) == 0


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("file_format", ["JPEG", "AVIF"])
def test_every_orientation_of_lossy_formats(file_format, orientation):
    """AVIF says it in boxes of its own, which Pillow writes and reads."""
    # Two flat halves in blocks of 8: they keep them to a level or two.
    pixels = np.zeros((32, 64, 3), dtype=np.uint8)
    pixels[:16, :24] = 200, 40, 40
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](pixels)))
    options = {"quality": 100, "subsampling": 0 if file_format == "JPEG" else "4:4:4"}
    assert difference(open_image(encode(stored, file_format, exif=exif, **options)), pixels) <= 3


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_orientations_that_do_not_exist_change_nothing(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = noise(8, 16)
    assert difference(open_image(encode(Image.fromarray(pixels), "PNG", exif=exif)), pixels) == 0


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_does_not_cost_the_image():
    pixels = noise(8, 16)
    for exif in (b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"\0"):
        assert difference(open_image(encode(Image.fromarray(pixels), "PNG", exif=exif)), pixels) == 0


def test_exif_that_cannot_be_written_again_still_turns_the_image():
    """Cameras leave entries with false types; here the unit of the resolution as a text."""
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x02" + struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0)
    exif += struct.pack(">HHI4s", 0x0128, 2, 2, b"2") + bytes(4)
    assert open_image(encode(Image.new("RGB", (16, 8)), "JPEG", exif=exif)).size == (8, 16)


# Colours

CHART = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (200, 100, 50), (128, 128, 128))


def chart(colours=CHART):
    """Returns flat patches (16, 16 n, 3), each a multiple of JPEG's blocks."""
    return np.repeat(np.repeat(np.array([colours], dtype=np.uint8), 16, axis=0), 16, axis=1)


GREYS = tuple((level,) * 3 for level in (0, 1, 64, 128, 200, 254, 255))


@pytest.mark.parametrize(
    ("mode", "file_format", "options", "tolerance"),
    [
        ("RGB", "PNG", {}, 0),
        ("RGB", "BMP", {}, 0),
        ("RGB", "WEBP", {"lossless": True}, 0),
        ("RGB", "TIFF", {}, 0),
        ("RGB", "JPEG", {"quality": 100, "subsampling": 0}, 2),
        ("RGBA", "PNG", {}, 0),
        ("RGBA", "WEBP", {"lossless": True}, 0),
        ("P", "PNG", {}, 0),
        ("P", "BMP", {}, 0),
        ("P", "GIF", {}, 0),
        ("P", "TIFF", {}, 0),
        ("CMYK", "JPEG", {"quality": 100, "subsampling": 0}, 3),
        ("CMYK", "TIFF", {}, 1),
    ],
)
def test_a_colour_chart_survives_every_mode_and_format(mode, file_format, options, tolerance):
    image = Image.fromarray(chart())
    image = image.quantize(len(CHART)) if mode == "P" else image.convert(mode)
    data = encode(image, file_format, **options)
    stored = Image.open(io.BytesIO(data)).mode
    assert stored == ("RGB" if (mode, file_format) == ("RGBA", "WEBP") else mode)
    assert difference(open_image(data), chart()) <= tolerance


@pytest.mark.parametrize(
    ("mode", "file_format", "tolerance"),
    [("L", "PNG", 0), ("L", "BMP", 0), ("L", "TIFF", 0), ("L", "JPEG", 1), ("LA", "PNG", 0), ("LA", "TIFF", 0)],
)
def test_a_grey_chart_survives_every_mode_and_format(mode, file_format, tolerance):
    options = {"quality": 100} if file_format == "JPEG" else {}
    data = encode(Image.fromarray(chart(GREYS)).convert(mode), file_format, **options)
    assert Image.open(io.BytesIO(data)).mode == mode
    assert difference(open_image(data), chart(GREYS)) <= tolerance


@pytest.mark.parametrize("file_format", ["PNG", "BMP", "TIFF"])
def test_one_bit_images(file_format):
    pixels = chart(((0, 0, 0), (255, 255, 255), (0, 0, 0)))
    data = encode(Image.fromarray(pixels).convert("1"), file_format)
    assert Image.open(io.BytesIO(data)).mode == "1"
    assert difference(open_image(data), pixels) == 0


def test_adobe_cmyk_is_not_inverted():
    """Adobe's JPEGs store 255 - ink; the marker says so, and the file below has it (Pillow writes it)."""
    cyan = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    data = encode(cyan, "JPEG", quality=100)
    assert b"Adobe" in data
    assert difference(open_image(data), np.full((16, 16, 3), (0, 255, 255))) <= 3


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_sixteen_bit_grey_is_scaled_and_not_clipped(file_format):
    values = np.linspace(0, 65535, 32 * 32).astype(np.uint16).reshape(32, 32)
    data = encode(Image.fromarray(values), file_format)
    assert Image.open(io.BytesIO(data)).mode == "I;16"
    expected = np.round(values / 65535 * 255).astype(int)
    assert difference(open_image(data), np.stack([expected] * 3, axis=-1)) == 0


def test_big_endian_sixteen_bit_grey():
    values = np.linspace(0, 65535, 16 * 16).astype(">u2").reshape(16, 16)
    image = Image.frombytes("I;16B", (16, 16), values.tobytes())
    data = encode(image, "TIFF")
    expected = np.round(values.astype(int) / 65535 * 255).astype(int)
    assert difference(open_image(data), np.stack([expected] * 3, axis=-1)) == 0


def png_by_hand(rows, color_type, transparency=None):
    """Returns a PNG of rows (H, W, C) with 16 bits, of which Pillow writes grey only."""
    height, width = rows.shape[:2]
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in rows)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0))]
    if transparency is not None:
        chunks.append((b"tRNS", struct.pack(">3H", *transparency)))
    chunks += [(b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


def tiff_by_hand(width, height, bits, photometric, planes):
    """Returns an uncompressed TIFF of a kind that Pillow does not write; `planes` are bytes, of all or each colour."""
    tags = {256: [width], 257: [height], 258: bits, 259: [1], 262: [photometric], 273: [0] * len(planes)}
    tags |= {277: [len(bits)], 278: [height], 279: [len(plane) for plane in planes], 284: [1 + (len(planes) > 1)]}
    end = 8 + 2 + 12 * len(tags) + 4
    lengths = {tag: 4 * len(values) if len(values) > 1 else 0 for tag, values in tags.items()}
    place = end + sum(lengths.values())
    for k, plane in enumerate(planes):
        tags[273][k] = place
        place += len(plane)
    table, values_behind = struct.pack("<H", len(tags)), b""
    for tag, values in tags.items():
        data = struct.pack(f"<{len(values)}I", *values)
        if tag == 258:
            data = struct.pack(f"<{len(values)}H", *values)
        if len(data) > 4:
            data, behind = struct.pack("<I", end + len(values_behind)), data.ljust(lengths[tag], b"\0")
            values_behind += behind
        else:
            values_behind += bytes(lengths[tag])
        table += struct.pack("<HHI", tag, 3 if tag == 258 else 4, len(values)) + data.ljust(4, b"\0")
    return b"II*\0\x08\0\0\0" + table + bytes(4) + values_behind + b"".join(planes)


@pytest.mark.parametrize("channels", ["RGB", "RGBA", "LA"])
def test_sixteen_bit_png_keeps_its_levels(channels):
    """Of colours Pillow keeps the upper 8 bits, which is one level below the nearest at most."""
    values = np.random.default_rng(0).integers(0, 65536, (16, 16, len(channels)), dtype=np.uint16)
    if channels.endswith("A"):
        values[..., -1] = 65535
    colour = values[..., :1] if channels == "LA" else values[..., :3]
    data = png_by_hand(values, {"RGB": 2, "LA": 4, "RGBA": 6}[channels])
    assert difference(open_image(data), np.broadcast_to(np.round(colour / 257), (16, 16, 3))) <= 1
    values = values // 257 * 257
    expected = np.broadcast_to(values[..., :1] if channels == "LA" else values[..., :3], (16, 16, 3)) // 257
    assert difference(open_image(png_by_hand(values, {"RGB": 2, "LA": 4, "RGBA": 6}[channels])), expected) == 0


def test_a_transparent_colour_of_sixteen_bits_is_white():
    values = np.array([[(1000, 2000, 65535), (0xE807, 0xD00F, 0xFF00)]], dtype=np.uint16)
    expected = np.array([[(255, 255, 255), (0xE8, 0xD0, 0xFF)]])
    assert difference(open_image(png_by_hand(values, 2, transparency=(1000, 2000, 65535))), expected) == 0


@pytest.mark.parametrize("separate", [False, True])
def test_sixteen_bit_tiff_with_colours_together_or_apart(separate):
    values = np.random.default_rng(0).integers(0, 256, (8, 16, 3), dtype="<u2") * 257
    planes = [values[..., k].tobytes() for k in range(3)] if separate else [values.tobytes()]
    assert difference(open_image(tiff_by_hand(16, 8, [16] * 3, 2, planes)), values // 257) == 0


def test_tiff_where_zero_is_white():
    levels = np.arange(256, dtype="<u2").reshape(16, 16)
    expected = np.stack([255 - levels] * 3, axis=-1)
    assert difference(open_image(tiff_by_hand(16, 16, [8], 0, [levels.astype(np.uint8).tobytes()])), expected) == 0
    with pytest.raises(RefusedError, match="its greys have 12 bits, or 0 for white"):
        open_image(tiff_by_hand(16, 16, [16], 0, [(levels * 257).tobytes()]))


def test_grey_of_twelve_bits_is_refused():
    with pytest.raises(RefusedError, match="its greys have 12 bits, or 0 for white"):
        open_image(tiff_by_hand(2, 1, [12], 1, [bytes(3)]))


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_without_a_defined_range_are_refused(tmp_path, mode):
    path = tmp_path / "depth.tiff"
    Image.new(mode, (16, 16), 1).save(path)
    with pytest.raises(RefusedError, match=f"depth.tiff cannot be used: 32-bit pixels .mode {mode}.* 8 or 16 bits"):
        open_image(path)


# Transparency


def test_transparency_is_composited_on_white():
    colours = np.array([[(200, 0, 0, 255), (200, 0, 0, 0), (0, 100, 0, 128), (0, 0, 0, 51)]], dtype=np.uint8)
    alpha = colours[..., 3:] / 255
    expected = np.round(colours[..., :3] * alpha + 255 * (1 - alpha)).astype(int)
    image = Image.fromarray(colours)
    assert difference(open_image(encode(image, "PNG")), expected) <= 1
    assert difference(open_image(encode(image, "WEBP", lossless=True, exact=True)), expected) <= 1
    assert difference(open_image(encode(image, "TIFF")), expected) <= 1


def test_grey_transparency_is_composited_on_white():
    image = Image.merge("LA", [Image.new("L", (4, 4), 100), Image.new("L", (4, 4), 51)])
    assert difference(open_image(encode(image, "PNG")), np.full((4, 4, 3), 224)) <= 1


def test_a_transparent_palette_colour_is_white():
    pixels = chart(((255, 0, 0), (0, 0, 255)))
    image = Image.fromarray(pixels).quantize(2)
    red = image.getpixel((0, 0))
    expected = chart(((255, 255, 255), (0, 0, 255)))
    for file_format, transparency in (("PNG", red), ("GIF", red), ("PNG", bytes([0, 255] if red == 0 else [255, 0]))):
        assert difference(open_image(encode(image, file_format, transparency=transparency)), expected) == 0


def test_a_single_transparent_colour_is_white():
    """PNG can name one colour of an opaque image as transparent, in every depth."""
    expected = chart(((255, 255, 255), (64, 64, 64)))
    pixels = chart(((10, 10, 10), (64, 64, 64)))
    data = encode(Image.fromarray(pixels), "PNG", transparency=(10, 10, 10))
    assert difference(open_image(data), expected) == 0
    data = encode(Image.fromarray(pixels).convert("L"), "PNG", transparency=10)
    assert difference(open_image(data), expected) == 0
    deep = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    assert difference(open_image(encode(deep, "PNG", transparency=10 * 257)), expected) == 0
    bits = Image.fromarray(chart(((0, 0, 0), (255, 255, 255)))).convert("1")
    assert difference(open_image(encode(bits, "PNG", transparency=0)), np.full((16, 32, 3), 255)) == 0


# Colour profiles


def gamma_profile(gamma, space="RGB "):
    """Returns an ICC profile with sRGB's primaries and a plain power law, written out by hand: Pillow makes none."""

    def fixed(value):
        return round(value * 65536).to_bytes(4, "big", signed=True)

    def xyz(*values):
        return b"XYZ \0\0\0\0" + b"".join(map(fixed, values))

    curve = b"curv\0\0\0\0" + (1).to_bytes(4, "big") + round(gamma * 256).to_bytes(2, "big") + b"\0\0"
    text = b"text\0\0\0\0test\0\0\0\0"
    description = b"desc\0\0\0\0" + (5).to_bytes(4, "big") + b"test\0" + b"\0" * 79
    # sRGB's primaries, adapted to the white of the profile connection space.
    tags = {
        b"desc": description,
        b"cprt": text,
        b"wtpt": xyz(0.9642, 1.0, 0.8249),
        b"rXYZ": xyz(0.43607, 0.22249, 0.01392),
        b"gXYZ": xyz(0.38515, 0.71687, 0.09708),
        b"bXYZ": xyz(0.14307, 0.06061, 0.7141),
        b"rTRC": curve,
        b"gTRC": curve,
        b"bTRC": curve,
        b"kTRC": curve,
    }
    offset = 128 + 4 + 12 * len(tags)
    table, body = len(tags).to_bytes(4, "big"), b""
    for name, value in tags.items():
        value += b"\0" * (-len(value) % 4)
        table += name + (offset + len(body)).to_bytes(4, "big") + len(value).to_bytes(4, "big")
        body += value
    head = (
        (offset + len(body)).to_bytes(4, "big")
        + b"\0\0\0\0\x02\x10\0\0mntr"
        + space.encode()
        + b"XYZ "
        + b"\0" * 12
        + b"acsp"
    )
    head += b"\0" * 28 + fixed(0.9642) + fixed(1.0) + fixed(0.8249)
    return head.ljust(128, b"\0") + table + body


def linear_to_srgb(pixels):
    """The sRGB standard's curve, for pixels (H, W, 3) of linear light in [0, 255]."""
    light = pixels / 255
    return np.round(255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055))


@pytest.mark.parametrize("file_format", ["PNG", "TIFF", "WEBP"])
def test_embedded_profiles_are_converted_to_srgb(file_format):
    pixels = chart()
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encode(Image.fromarray(pixels), file_format, icc_profile=gamma_profile(1.0), **options)
    assert np.abs(linear_to_srgb(pixels) - pixels).max() > 50
    assert difference(open_image(data), linear_to_srgb(pixels)) <= 2


@pytest.mark.parametrize(
    ("mode", "space"),
    [("L", "RGB "), ("L", "GRAY"), ("LA", "RGB "), ("LA", "GRAY"), ("RGB", "RGB "), ("RGBA", "RGB "), ("P", "RGB ")],
)
def test_profiles_hold_for_every_mode(mode, space):
    # Without the darkest greys, where littlecms' tables for grey are too coarse for a linear profile.
    pixels = chart(GREYS[2:])
    image = Image.fromarray(pixels)
    image = image.quantize(len(GREYS)) if mode == "P" else image.convert(mode)
    data = encode(image, "PNG", icc_profile=gamma_profile(1.0, space))
    assert Image.open(io.BytesIO(data)).mode == mode
    assert difference(open_image(data), linear_to_srgb(pixels)) <= 2


def test_profiles_are_applied_before_transparency():
    colours = Image.new("RGBA", (4, 4), (64, 64, 64, 51))
    data = encode(colours, "PNG", icc_profile=gamma_profile(1.0))
    shown = linear_to_srgb(np.full((4, 4, 3), 64)) * 0.2 + 255 * 0.8
    assert difference(open_image(data), np.round(shown)) <= 2


def ink_profile():
    """Returns an ICC profile for CMYK by a table: no ink is white, the first is grey, and all else is black."""
    corners = np.full((2, 2, 2, 2, 3), (0, 128, 128), dtype=np.uint8)  # L*, a*, b*
    corners[0, 0, 0, 0] = 255, 128, 128
    corners[1, 0, 0, 0] = 128, 128, 128
    ramp = bytes(range(256))
    matrix = struct.pack(">9i", *(65536, 0, 0, 0, 65536, 0, 0, 0, 65536))
    table = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + matrix + ramp * 4 + corners.tobytes() + ramp * 3
    white = b"XYZ \0\0\0\0" + struct.pack(">3i", 63190, 65536, 54061)
    tags = {b"desc": b"desc\0\0\0\0\0\0\0\x05test\0" + bytes(79), b"cprt": b"text\0\0\0\0test\0\0\0\0"}
    tags |= {b"wtpt": white, b"A2B0": table}
    offset, index, body = 128 + 4 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        value += bytes(-len(value) % 4)
        index += name + struct.pack(">II", offset + len(body), len(value))
        body += value
    head = struct.pack(">I", offset + len(body)) + b"\0\0\0\0\x02\x10\0\0prtrCMYKLab " + bytes(12) + b"acsp"
    head += bytes(28) + struct.pack(">3i", 63190, 65536, 54061)
    return head.ljust(128, b"\0") + index + body


@pytest.mark.parametrize("file_format", ["TIFF", "JPEG"])
def test_profiles_of_printers_hold_for_cmyk(file_format):
    """Reference: CIE L*, of which 128 / 255 is grey 119 in sRGB. Without the profile this ink is cyan."""
    inks = np.repeat(np.array([[(0, 0, 0, 0), (0, 0, 0, 255), (255, 0, 0, 0)]], dtype=np.uint8), 16, axis=0)
    image = Image.fromarray(np.repeat(inks, 16, axis=1), "CMYK")
    options = {"quality": 100} if file_format == "JPEG" else {}
    expected = chart(((255,) * 3, (0,) * 3, (119,) * 3))
    assert difference(open_image(encode(image, file_format, icc_profile=ink_profile(), **options)), expected) <= 4


def test_srgb_profiles_change_nothing():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    pixels = noise(32, 32)
    assert difference(open_image(encode(Image.fromarray(pixels), "PNG", icc_profile=profile)), pixels) == 0


@pytest.mark.parametrize("profile", [b"garbage", b"\0" * 200, gamma_profile(1.0)[:300]])
def test_broken_profiles_count_as_none(profile):
    pixels = noise(32, 32)
    assert difference(open_image(encode(Image.fromarray(pixels), "PNG", icc_profile=profile)), pixels) == 0


def test_profiles_of_another_colour_space_count_as_none():
    data = encode(Image.new("CMYK", (16, 16)), "TIFF", icc_profile=gamma_profile(1.0))
    assert difference(open_image(data), np.full((16, 16, 3), 255)) == 0
    data = encode(Image.fromarray(chart()), "PNG", icc_profile=gamma_profile(1.0, "GRAY"))
    assert difference(open_image(data), chart()) == 0
    data = encode(Image.new("1", (16, 16), 1), "PNG", icc_profile=gamma_profile(1.0))
    assert difference(open_image(data), np.full((16, 16, 3), 255)) == 0


# Files


def bad_files(folder):
    """Writes the three bad files of a typical folder: cut in half, empty, and no image at all."""
    data = encode(Image.fromarray(noise(64, 64)), "JPEG")
    (folder / "half.jpg").write_bytes(data[: len(data) // 2])
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.jpg").write_text("not an image")
    return ["half.jpg", "empty.png", "text.jpg"]


def test_unreadable_files_are_named(tmp_path):
    for name in [*bad_files(tmp_path), "absent.jpg"]:
        with pytest.raises(RefusedError) as info:
            open_image(tmp_path / name)
        assert str(tmp_path / name) in str(info.value)
        with pytest.raises(RefusedError, match="^row 7"):
            open_image(tmp_path / name, "row 7")
    with pytest.raises(RefusedError, match=r"embedded image is not an image that Pillow can read"):
        open_image(b"abc")
    with pytest.raises(RefusedError, match=str(tmp_path)):
        open_image(tmp_path)


def test_pipes_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(RefusedError, match="pipe.png cannot be used: there is no such file"):
        open_image(tmp_path / "pipe.png")


@pytest.mark.filterwarnings("error")
def test_huge_images_are_read_up_to_a_limit_and_refused_by_name_above_it(tmp_path):
    """The first would be warned of by Pillow; the others say a size of which the file has no pixels."""
    Image.new("1", (9500, 9500)).save(tmp_path / "large.png")
    assert open_image(tmp_path / "large.png").size == (9500, 9500)
    data = bytearray((tmp_path / "large.png").read_bytes())
    for width, height in ((13417, 13417), (65535, 65535), (2**31 - 1, 2**31 - 1)):
        data[16:24] = struct.pack(">II", width, height)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
        (tmp_path / "huge.png").write_bytes(data)
        with pytest.raises(RefusedError, match=f"huge.png cannot be used: it has {width}x{height} .* 180000000"):
            open_image(tmp_path / "huge.png")


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_names_with_another_ending_mean_nothing(tmp_path, file_format):
    (tmp_path / "a.jpg").write_bytes(encode(Image.fromarray(chart()).quantize(7).convert("RGB"), file_format))
    assert open_image(tmp_path / "a.jpg").size == (112, 16)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("clip.jpg", b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41" + bytes(100)),
        ("photo.jpg", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)),
        ("photo.avif", b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(100)),
        # Pillow has Ghostscript run what stands in such a file.
        ("script.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n"),
    ],
)
def test_other_kinds_of_files_are_refused_by_name(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(RefusedError, match=f"{name} is not an image that Pillow can read"):
        open_image(tmp_path / name)


HEIF = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)


def other_media(folder):
    """Writes files that people take for images, each with a caption, and returns why each is no item of images."""
    raw = encode(Image.new("RGB", (16, 12)), "TIFF", tiffinfo={254: 1})
    unread = "is not an image that Pillow can read"
    files = {
        "a.heic": (HEIF, "is not an image that Pillow can read; save HEIF, JPEG 2000 and others as PNG or JPEG."),
        "b.nef": (
            raw,
            "cannot be used: it is the raw data of a camera, behind a small preview; save it as PNG or JPEG.",
        ),
        "c.psd": (b"8BPS" + bytes(100), unread),
        "h.jp2": (encode(Image.new("RGB", (64, 64)), "JPEG2000"), unread),
        "d.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", unread),
        "e.jxl": (b"\xff\x0a" + bytes(100), unread),
        "f.mp4": (b"\0\0\0\x18ftypmp42" + bytes(100), unread),
        "g.cr2": (b"II*\0\x10\0\0\0CR\2\0" + bytes(100), ""),
    }
    for name, (data, _) in files.items():
        (folder / name).write_bytes(data)
        (folder / name).with_suffix(".txt").write_text("a caption")
    return {name: reason for name, (_, reason) in files.items()}


def test_other_media_are_bad_items_by_name(tmp_path):
    expected = other_media(tmp_path)
    for name in ("i.jfif", "j.jpe"):
        (tmp_path / name).write_bytes(encode(Image.new("RGB", (64, 64)), "JPEG"))
        (tmp_path / name).with_suffix(".txt").write_text("a caption")
    rows, sizing = read_rows(tmp_path), Sizing(64, 64, None, 16, 1)
    with pytest.raises(RefusedError) as info:
        inspect_rows(rows, sizing)
    assert f"{len(expected)} of {len(rows)} images cannot be used" in str(info.value)
    for name, reason in expected.items():
        assert f"{name} {reason}" in str(info.value)
    items = inspect_rows(rows, sizing, on_bad_sample="skip")
    assert [item.row.id for item in items if item.record["decision"] == "used"] == ["i.jfif", "j.jpe"]


@pytest.mark.parametrize("file_format", ["AVIF", "GIF", "PNG", "WEBP", "TIFF"])
def test_animations_are_refused(file_format):
    frames = [Image.fromarray(noise(16, 16, seed)) for seed in range(3)]
    data = encode(frames[0], file_format, save_all=True, append_images=frames[1:])
    with pytest.raises(RefusedError, match="it has 3 frames"):
        open_image(data)


def test_a_jpeg_with_a_second_view_is_its_first():
    first, second = Image.new("RGB", (16, 16), "red"), Image.new("RGB", (16, 16), "blue")
    data = encode(first, "MPO", save_all=True, append_images=[second], quality=100)
    assert difference(open_image(data), np.full((16, 16, 3), (255, 0, 0))) <= 3


def test_decoded_images_hold_no_file_open(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(noise(16, 16)).save(path)
    image = open_image(path)
    path.unlink()
    assert getattr(image, "fp", None) is None
    assert difference(image, noise(16, 16)) == 0


SEEDS = [
    encode(Image.fromarray(noise(16, 16)).convert(mode), file_format, **options)
    for mode, file_format, options in [
        ("RGB", "JPEG", {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"}),
        ("RGBA", "PNG", {"icc_profile": gamma_profile(1.0)}),
        ("P", "GIF", {}),
        ("RGB", "WEBP", {}),
        ("CMYK", "TIFF", {"icc_profile": gamma_profile(1.0)}),
        ("RGB", "BMP", {}),
    ]
]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(SEEDS), st.integers(0, 3), st.data())
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_decode_or_are_refused(seed, num_changes, data):
    damaged = bytearray(seed)
    for _ in range(num_changes):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(damaged[: data.draw(st.integers(0, len(damaged)))] if data.draw(st.booleans()) else damaged)
    try:
        assert open_image(damaged).mode == "RGB"
    except RefusedError as error:
        assert "embedded image" in str(error)


# Sizes


def size(source_width, source_height, max_pixels=None, height=64, width=96, divisor=16):
    return target_size(source_width, source_height, height=height, width=width, max_pixels=max_pixels, divisor=divisor)


def test_fixed_sizes():
    assert size(1000, 700) == (64, 96)
    assert size(20, 20) == (64, 96)


@pytest.mark.parametrize(
    ("source", "max_pixels", "expected"),
    [
        ((1024, 1024), 1024**2, (1024, 1024)),
        ((4000, 4000), 1024**2, (1024, 1024)),
        ((4000, 4000), 1024**2 - 1, (1008, 1008)),
        ((1000, 1000), 1024**2, (992, 992)),
        ((6000, 4000), 1024**2, (832, 1248)),
        ((4000, 6000), 1024**2, (1248, 832)),
        ((3840, 2160), 832 * 480, (464, 832)),
        ((15, 15), 1024**2, (16, 16)),
        ((17, 31), 1024**2, (16, 16)),
        ((1000, 1000), 512, (16, 16)),
        ((16, 160), 1024**2, (160, 16)),
        ((4000, 400), 256, (16, 16)),
    ],
)
def test_sizes_under_a_cap(source, max_pixels, expected):
    assert size(*source, max_pixels) == expected


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(8, 6000), st.integers(8, 6000), st.sampled_from([256, 256**2, 512**2, 832 * 480, 1024**2, 1328**2]))
def test_sizes_are_legal_whatever_the_source(source_width, source_height, max_pixels):
    for divisor in (16, 32):
        if max_pixels < divisor**2:
            # Refused with the flags, in training.arguments.
            continue
        try:
            height, width = size(source_width, source_height, max_pixels, divisor=divisor)
        except RefusedError:
            elongated = max(source_width, source_height) > 10 * min(source_width, source_height)
            assert elongated or min(source_width, source_height) < divisor / 2
            continue
        assert height % divisor == width % divisor == 0 and height >= divisor and width >= divisor
        assert height * width <= max_pixels
        assert height <= max(source_height, divisor) and width <= max(source_width, divisor)
        assert (height, width) == size(source_height, source_width, max_pixels, divisor=divisor)[::-1]


@pytest.mark.parametrize(
    "source", [(6000, 4000), (4000, 3000), (3840, 2160), (3000, 4000), (2560, 1080), (1920, 1200)]
)
def test_common_photographs_keep_their_aspect_and_most_of_the_cap(source):
    for max_pixels, worst_error, least in ((1024**2, 0.01, 0.9), (512**2, 0.02, 0.8)):
        height, width = size(*source, max_pixels)
        ratio = width / height / (source[0] / source[1])
        assert max(ratio, 1 / ratio) - 1 < worst_error
        assert height * width >= least * max_pixels


@pytest.mark.parametrize("source", [(1, 1), (1, 2000), (2000, 1), (8000, 20), (20, 8000), (7, 7)])
@pytest.mark.parametrize("max_pixels", [None, 256**2, 1024**2])
def test_tiny_and_elongated_images_are_refused_with_the_limits(source, max_pixels):
    with pytest.raises(RefusedError) as info:
        size(*source, max_pixels)
    message = str(info.value)
    assert f"{source[0]}x{source[1]}" in message and "at least 8" in message and "at most 10 times" in message


# Geometry


@pytest.mark.parametrize("canvas", [(400, 200), (200, 400), (300, 300), (123, 231)])
@pytest.mark.parametrize("target", [(64, 96), (96, 64), (128, 128), (512, 256)])
def test_a_circle_stays_a_circle(canvas, target):
    """Second moments: a disc has the same spread along both axes and none across."""
    image = Image.new("RGB", canvas)
    x, y, radius = canvas[0] / 2, canvas[1] / 2, min(canvas) / 5
    ImageDraw.Draw(image).ellipse([x - radius, y - radius, x + radius, y + radius], fill="white")
    cropped = cover_and_crop(image, *target)
    assert (cropped.height, cropped.width) == target
    mass = np.asarray(cropped)[..., 0] / 255
    rows, columns = np.indices(mass.shape)
    rows, columns = rows - (mass * rows).sum() / mass.sum(), columns - (mass * columns).sum() / mass.sum()
    spread = [(mass * rows**2).sum(), (mass * columns**2).sum()]
    assert abs(spread[0] / spread[1] - 1) < 0.02
    assert abs((mass * rows * columns).sum()) < 0.01 * spread[0]
    # And it has the size that covering asks for: radius times the larger of the two scales.
    scale = max(target[0] / canvas[1], target[1] / canvas[0])
    assert math.sqrt(mass.sum() / math.pi) == pytest.approx((radius + 0.5) * scale, rel=0.03)


def test_the_crop_is_in_the_centre():
    pixels = np.zeros((40, 120, 3), dtype=np.uint8)
    pixels[:, 40:80] = noise(40, 40)
    assert difference(cover_and_crop(Image.fromarray(pixels), 40, 40), pixels[:, 40:80]) == 0
    pixels = pixels.transpose(1, 0, 2)
    assert difference(cover_and_crop(Image.fromarray(np.ascontiguousarray(pixels)), 40, 40), pixels[40:80]) == 0


def test_the_right_size_is_not_resampled():
    assert difference(cover_and_crop(Image.fromarray(noise(32, 48)), 32, 48), noise(32, 48)) == 0


def test_scaling_is_lanczos():
    image = Image.fromarray(noise(64, 64))
    expected = np.asarray(image.resize((32, 32), Image.Resampling.LANCZOS)).astype(int)
    assert difference(cover_and_crop(image, 32, 32), expected) == 0


# Pixel range


def test_black_and_white_are_exactly_minus_one_and_one():
    image = Image.fromarray(np.array([[(0, 0, 0), (255, 255, 255)]], dtype=np.uint8))
    tensor = to_tensor(image)
    assert tensor.shape == (3, 1, 2) and tensor.dtype == torch.float32 and tensor.is_contiguous()
    assert tensor[:, 0, 0].tolist() == [-1.0] * 3 and tensor[:, 0, 1].tolist() == [1.0] * 3


def test_every_level_equals_diffusers():
    """Reference: diffusers' VaeImageProcessor, which the stock pipelines prepare their images with."""
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    image = Image.fromarray(np.stack([levels, levels.T, 255 - levels], axis=-1))
    expected = VaeImageProcessor(vae_scale_factor=1).preprocess(image)[0]
    assert torch.equal(to_tensor(image), expected)


# Inspection


def inspect(rows, max_pixels=None, height=64, width=96):
    return [item.record for item in inspect_rows(rows, Sizing(height, width, max_pixels, 16))]


def test_records_are_those_of_dataset_jsonl(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "a.png").write_bytes(encode(Image.fromarray(noise(100, 150)), "PNG", exif=exif))
    (tmp_path / "a.txt").write_text("a café")
    rows = [
        *read_rows(tmp_path),
        Row("train/1", "two", {"target": (encode(Image.fromarray(noise(64, 80)), "PNG"),)}, "train row 1"),
    ]
    records = inspect(rows, max_pixels=96 * 64)
    assert records == [
        {
            "id": "a.png",
            "caption": "a café",
            "source": {"size": [100, 150], "frames": 1, "fps": None},
            "used": {"size": [64, 96], "frames": 1},
            "decision": "used",
            "reason": None,
        },
        {
            "id": "train/1",
            "caption": "two",
            "source": {"size": [80, 64], "frames": 1, "fps": None},
            "used": {"size": [80, 64], "frames": 1},
            "decision": "used",
            "reason": None,
        },
    ]
    assert json.loads(json.dumps(records)) == records
    assert inspect(rows)[0]["used"] == {"size": [96, 64], "frames": 1}


def test_all_bad_images_come_in_one_error(tmp_path):
    names = bad_files(tmp_path)
    for n in range(6):
        Image.fromarray(noise(64, 64, n)).save(tmp_path / f"{n}.png")
    Image.new("RGB", (2000, 1)).save(tmp_path / "thin.png")
    for n in range(5):
        (tmp_path / f"more{n}.jpg").write_bytes(b"")
    (tmp_path / "metadata.csv").write_text(
        "file_name,text\n" + "".join(f"{path.name},x\n" for path in sorted(tmp_path.glob("*.*g")))
    )
    with pytest.raises(RefusedError) as info:
        inspect(read_rows(tmp_path))
    message = str(info.value)
    assert message.startswith("9 of 15 images cannot be used:\n") and message.count("\n") == 10
    for name in [*names, "thin.png", *(f"more{n}.jpg" for n in range(5))]:
        assert f"  {name} (metadata.csv line " in message
    assert "thin.png (metadata.csv line 16): 2000x1 pixels: the shorter side" in message


def test_enlargement_is_reported(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    rows = []
    for n in range(7):
        Image.new("RGB", (48, 31)).save(tmp_path / f"{n}.png")
        rows.append(Row(f"{n}.png", "x", {"target": (tmp_path / f"{n}.png",)}, f"{n}.png"))
    Image.new("RGB", (48, 32)).save(tmp_path / "twice.png")
    rows.append(Row("twice.png", "x", {"target": (tmp_path / "twice.png",)}, "twice.png"))
    inspect(rows, max_pixels=1024**2)
    assert not caplog.text
    inspect(rows)
    assert "7 of 8 images are enlarged more than 2 times:\n  0.png: 48x31 to 96x64, 2.1 times" in caplog.text
    assert "and 2 more" in caplog.text and "twice.png" not in caplog.text
