"""Damaged media end in pixels or in a refusal that names the file: in bounded time and memory, with every file closed.

The files are tried in a process of their own, so that a decoder that crashes or hangs is told by the name of the file.
By hand, with another seed, keeping the file that failed: `python test_fuzz.py FOLDER FIRST NUM_FILES SEED`.
"""

import faulthandler
import gc
import io
import logging
import os
import pathlib
import subprocess
import sys
import time
import warnings
import zlib
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from dataset.buckets import Sizing
from dataset.images import open_image, to_tensor
from dataset.metadata import Row
from dataset.videos import inspect_clips, read_clip
from runtime.errors import RefusedError


REPO = pathlib.Path(__file__).parents[2]
MAX_SECONDS = 20
# Of all files together, after the first ones.
MAX_GROWTH_BYTES = 100 * 2**20
# Beyond what the process holds anyway, at any time. The largest images that are read take most of it.
MAX_PEAK_BYTES = 2 * 2**30
NUM_WARM_UP = 40


@pytest.mark.parametrize("num_files", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_files_are_used_or_refused_by_name(tmp_path, num_files):
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    # Or memory that is free in the heaps of threads that are gone would look like a leak.
    environment["MALLOC_ARENA_MAX"] = "2"
    command = [sys.executable, __file__, tmp_path, 0, num_files, num_files]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"{' '.join(lines[-1:])}\n{done.stderr[-4000:]}"
    # Some of both, or the test would be of one of them only.
    num_used = sum(line.endswith(" used") for line in lines)
    assert len(lines) == num_files and num_files / 10 < num_used < num_files * 9 / 10


# Seeds


def image(mode, file_format, **options):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 48, 4), dtype=np.uint8)
    if mode == "I;16":
        image = Image.fromarray(pixels.view(np.uint16)[..., 0].copy())
    elif mode in ("P", "1"):
        image = Image.fromarray(pixels[..., :3]).convert(mode)
    else:
        image = Image.merge(mode, [Image.fromarray(pixels[..., k].copy()) for k in range(len(mode))])
    data = io.BytesIO()
    image.save(data, file_format, **options)
    return data.getvalue()


def deep_png():
    """Returns an RGB PNG with 16 bits, which Pillow does not write."""
    rows = np.random.default_rng(0).integers(0, 256, (40, 6 * 48 + 1), dtype=np.uint8)
    rows[:, 0] = 0
    head = (48).to_bytes(4, "big") + (40).to_bytes(4, "big") + bytes([16, 2, 0, 0, 0])
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n"
    for kind, content in chunks:
        data += len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")
    return data


def clip(folder, file_format, codec, pix_fmt="yuv420p", muxer=None, **options):
    # A file, because the muxer of mp4 reads back what it wrote.
    path = folder / "seed"
    with av.open(str(path), "w", format=file_format, options=muxer or {}) as container:
        stream = container.add_stream(codec, rate=16, options=options)
        stream.width, stream.height, stream.pix_fmt = 48, 32, pix_fmt
        stream.codec_context.thread_count = 1
        for n in range(9):
            pixels = np.full((32, 48, 3), 20 * n, dtype=np.uint8)
            pixels[:16] = np.random.default_rng(n).integers(0, 256, (16, 48, 3))
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = n, Fraction(1, 16)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path.read_bytes()


def make_seeds(folder):
    srgb = {"icc_profile": ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()}
    exif = Image.Exif()
    exif[0x0112] = 6
    more = {"save_all": True, "append_images": [Image.new("RGB", (48, 40), "red")]}
    quick = {"deadline": "realtime", "cpu-used": "8"}
    return {
        "rgb.png": image("RGB", "PNG", exif=exif, **srgb),
        "rgba.png": image("RGBA", "PNG"),
        "palette.png": image("P", "PNG", transparency=bytes(range(256))),
        "deep.png": deep_png(),
        "deep grey.png": image("I;16", "PNG"),
        "animated.png": image("RGB", "PNG", **more),
        "rgb.jpg": image("RGB", "JPEG", exif=exif),
        "progressive.jpg": image("RGB", "JPEG", progressive=True, **srgb),
        "cmyk.jpg": image("CMYK", "JPEG"),
        "lossy.webp": image("RGB", "WEBP", exif=exif),
        "lossless.webp": image("RGBA", "WEBP", lossless=True),
        "palette.gif": image("P", "GIF"),
        "raw.tiff": image("RGB", "TIFF", exif=exif),
        "lzw.tiff": image("RGBA", "TIFF", compression="tiff_lzw"),
        "jpeg.tiff": image("RGB", "TIFF", compression="jpeg"),
        "deep.tiff": image("I;16", "TIFF", compression="tiff_adobe_deflate"),
        "cmyk.tiff": image("CMYK", "TIFF"),
        "rgb.bmp": image("RGB", "BMP"),
        "palette.bmp": image("P", "BMP"),
        "rgb.avif": image("RGB", "AVIF", exif=exif),
        "end.mp4": clip(folder, "mp4", "libx264"),
        "front.mp4": clip(folder, "mp4", "libx264", muxer={"movflags": "faststart"}, bf="2"),
        "fragments.mp4": clip(folder, "mp4", "libx264", muxer={"movflags": "frag_keyframe+empty_moov"}, g="4"),
        "h264.mkv": clip(folder, "matroska", "libx264"),
        "ffv1.mkv": clip(folder, "matroska", "ffv1", "bgr0"),
        "vp9.webm": clip(folder, "webm", "libvpx-vp9", **quick),
        "vp8.webm": clip(folder, "webm", "libvpx", **quick),
        "alpha.webm": clip(folder, "webm", "libvpx-vp9", "yuva420p", **quick),
        "png.mov": clip(folder, "mov", "png", "rgb24"),
        "mpeg4.avi": clip(folder, "avi", "mpeg4"),
        "mjpeg.avi": clip(folder, "avi", "mjpeg", "yuvj420p"),
        "mpeg4.mov": clip(folder, "mov", "mpeg4"),
        "mjpeg.mov": clip(folder, "mov", "mjpeg", "yuvj420p"),
        "clip.gif": clip(folder, "gif", "gif", "rgb8"),
    }


# Damage

TAGS = [b"IHDR", b"fcTL", b"acTL", b"VP8 ", b"VP8X", b"ispe", b"meta", b"iloc", b"tkhd", b"mvhd", b"mdhd", b"stsd"]
TAGS += [b"avc1", b"stsz", b"stco", b"stsc", b"stts", b"ctts", b"elst", b"trun", b"trex", b"avih", b"strh", b"strf"]
TAGS += [b"idx1", b"movi", b"\xff\xc0", b"\xff\xc2", b"II*\0", b"BM", b"\x16\x54\xae\x6b", b"\x1f\x43\xb6\x75"]


def odd_number(rng):
    """Returns the bytes of a number as headers should not have it: none, the largest, one too many, ..."""
    num_bytes = [1, 2, 4, 4, 8][rng.integers(5)]
    largest = 256**num_bytes - 1
    numbers = [0, 1, 2, largest // 2, largest // 2 + 1, largest - 1, largest, largest // int(rng.integers(2, 1000))]
    return numbers[rng.integers(len(numbers))].to_bytes(num_bytes, ["big", "little"][rng.integers(2)])


def damage(data, rng, seeds):
    """Returns the bytes of a file with one kind of damage; half of it near the head, where the structure is."""
    data = bytearray(data)
    head = len(data) if rng.random() < 0.5 else min(400, len(data))
    place = int(rng.integers(head))
    run = int(2 ** (rng.random() * 9))
    kind = ["bits", "overwrite", "insert", "delete", "repeat", "truncate", "number", "number", "number", "join"][
        rng.integers(10)
    ]
    if kind == "bits":
        for _ in range(int(2 ** (rng.random() * 6))):
            data[rng.integers(head)] ^= 1 << int(rng.integers(8))
    elif kind == "overwrite":
        data[place : place + run] = rng.bytes(run) if rng.random() < 0.5 else bytes([rng.integers(256)]) * run
    elif kind == "insert":
        data[place:place] = rng.bytes(run)
    elif kind == "delete":
        del data[place : place + run]
    elif kind == "repeat":
        data[place:place] = data[place : place + run] * int(rng.integers(1, 100))
    elif kind == "truncate":
        del data[int(rng.integers(len(data))) :]
    elif kind == "join":
        data += list(seeds.values())[rng.integers(len(seeds))]
    elif kind == "number":
        tags = [tag for tag in TAGS if tag in data]
        if tags and rng.random() < 0.7:
            place = data.index(tags[rng.integers(len(tags))]) + int(rng.integers(-4, 48))
        number = odd_number(rng)
        place = max(place, 0)
        data[place : place + len(number)] = number
    return repair_png(data) if data[:4] == b"\x89PNG" and rng.random() < 0.7 else data


def repair_png(data):
    """Sets the check sums right, behind which the decoder would not come otherwise."""
    place = 8
    while place + 12 <= len(data):
        end = place + 8 + int.from_bytes(data[place : place + 4], "big")
        if end + 4 > len(data):
            break
        data[end : end + 4] = zlib.crc32(data[place + 4 : end]).to_bytes(4, "big")
        place = end + 4
    return data


# The process


def use(row):
    """Takes one file the way that training does; returns whether it is used."""
    used = False
    try:
        image = open_image(row.content, row.id)
        assert image.mode == "RGB" and min(image.size) > 0
        used = True
        if image.width * image.height < 10**7:
            pixels = to_tensor(image)
            assert pixels.isfinite().all() and pixels.abs().max() <= 1
    except RefusedError as error:
        assert row.id in str(error), error
    try:
        ((_, record, _),) = inspect_clips([row], Sizing(32, 48, None, 16, 9), fps=16, clip_part="random")
        pixels = read_clip(row, record)
        assert pixels.shape == (3, record["used"]["frames"], 32, 48)
        assert pixels.isfinite().all() and pixels.abs().max() <= 1
        used = True
    except RefusedError as error:
        assert row.id in str(error), error
    return used


def memory_bytes(line):
    """Returns what a line of the kernel's account of this process says: VmRSS is held now, VmHWM the most so far."""
    for text in open("/proc/self/status"):
        if text.startswith(line):
            return int(text.split()[1]) * 1024


def main(folder, first, num_files, seed):
    faulthandler.enable()
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    seeds = make_seeds(folder)
    names = list(seeds)
    for n in range(first, first + num_files):
        rng = np.random.default_rng([seed, n])
        name = names[rng.integers(len(names))]
        data = damage(seeds[name], rng, seeds)
        if rng.random() < 0.2:
            data = damage(data, rng, seeds) if data else data
        if rng.random() < 0.1:
            name += os.path.splitext(names[rng.integers(len(names))])[1]
        path = folder / f"{n} {name}"
        path.write_bytes(data)
        print(path, end="", flush=True)
        if n - first in (0, NUM_WARM_UP):
            at_first, num_open = memory_bytes("VmRSS"), len(os.listdir("/proc/self/fd"))
        # Sets the peak back to what is held now.
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        before = memory_bytes("VmRSS")
        start = time.monotonic()
        # Ends the process even where a decoder holds Python's lock.
        faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
        used = use(Row(path.name, "x", {"target": (bytes(data) if n % 4 == 0 else path,)}, path.name))
        # What is wrong in memory shall show with the file that did it.
        gc.collect()
        faulthandler.cancel_dump_traceback_later()
        peak = memory_bytes("VmHWM") - before
        print(f" {time.monotonic() - start:.2f} s {peak >> 20} MiB", "used" if used else "refused", flush=True)
        assert peak < MAX_PEAK_BYTES, peak
        path.unlink()
    growth = memory_bytes("VmRSS") - at_first
    assert growth < MAX_GROWTH_BYTES, growth
    assert len(os.listdir("/proc/self/fd")) == num_open


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
