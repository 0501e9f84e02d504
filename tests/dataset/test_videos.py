import io
import json
import logging
import os
import pathlib
import struct
import subprocess
import sys
import time
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageDraw

from dataset import videos
from dataset.buckets import Sizing
from dataset.images import cover_and_crop, open_image, to_tensor
from dataset.metadata import IMAGE_SUFFIXES, VIDEO_SUFFIXES, Row, read_rows
from dataset.videos import inspect_clips, read_clip
from runtime.errors import RefusedError


REPO = pathlib.Path(__file__).parents[2]

# The usual codec of each container. Vp9's quickest settings, which change no times.
QUICK = {"deadline": "realtime", "cpu-used": "8"}
CONTAINERS = {
    "mp4": ("libx264", "yuv420p", {}),
    "mkv": ("libx264", "yuv420p", {}),
    "webm": ("libvpx-vp9", "yuv420p", QUICK),
    "avi": ("mpeg4", "yuv420p", {"q": "2"}),
    "gif": ("gif", "gray", {}),
}


def write_clip(
    path, frames, rate=16, codec="ffv1", pix_fmt="bgr0", options=(), times=None, muxer=(), setup=None, file_format=None
):
    """Encodes frames: `av.VideoFrame`s, or arrays (H, W) or (H, W, 3). `times` are in units of 1 / `rate`."""
    frames = [
        frame
        if isinstance(frame, av.VideoFrame)
        else av.VideoFrame.from_ndarray(frame, format="gray" if frame.ndim == 2 else "rgb24")
        for frame in frames
    ]
    with av.open(str(path), "w", format=file_format, options=dict(muxer)) as container:
        stream = container.add_stream(codec, rate=rate, options=dict(options))
        stream.width, stream.height, stream.pix_fmt = frames[0].width, frames[0].height, pix_fmt
        # One thread, as for everything here: frames this small gain nothing from more.
        stream.codec_context.thread_count = 1
        if setup is not None:
            setup(stream)
        for k, frame in enumerate(frames):
            frame.pts, frame.time_base = k if times is None else times[k], 1 / Fraction(rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def slow(*variants):
    """Returns parameters for tests that are not run by default: others prove nearly the same."""
    return [
        pytest.param(*(variant if isinstance(variant, tuple) else (variant,)), marks=pytest.mark.slow)
        for variant in variants
    ]


def greys(num_frames, height=64, width=64):
    """Returns frames that tell their index by their grey level, 10 k."""
    return [np.full((height, width), 10 * k, dtype=np.uint8) for k in range(num_frames)]


def row_of(media, name=None):
    name = name or media.name
    return Row(name, "a caption", {"target": (media,)}, name)


def inspect(*rows, fps=16, num_frames=81, clip_part="start", seed=0, height=64, width=64, max_pixels=None, **kwargs):
    """Inspects rows, or files, with the defaults of these tests."""
    rows = [row if isinstance(row, Row) else row_of(row) for row in rows]
    sizing = Sizing(height, width, max_pixels, 16, num_frames, seed=seed)
    return [item.record for item in inspect_clips(rows, sizing, fps=fps, clip_part=clip_part, **kwargs)]


def load(path, **kwargs):
    """Returns the record of a clip and its pixels as levels from 0 to 255, (F, H, W, 3)."""
    row = path if isinstance(path, Row) else row_of(path)
    (record,) = inspect(row, **kwargs)
    clip = read_clip(row, record)
    assert clip.shape == (3, record["used"]["frames"], *record["used"]["size"][::-1])
    assert clip.dtype == torch.float32 and clip.is_contiguous()
    assert clip.min() >= -1 and clip.max() <= 1
    return record, ((clip + 1) * 127.5).permute(1, 2, 3, 0).round().int().numpy()


def indices(levels):
    """Reads the indices back that `greys` wrote into the pixels; codecs may be off by 4 of 255."""
    means = levels.mean(axis=(1, 2, 3)) / 10
    assert np.abs(means - means.round()).max() < 0.4
    return means.round().astype(int).tolist()


def refused(*rows, **kwargs):
    """Returns the message with which clips are refused."""
    with pytest.raises(RefusedError) as info:
        inspect(*rows, **kwargs)
    return str(info.value)


# Counting frames


@pytest.mark.parametrize("rate", [16, Fraction(24000, 1001), 24, Fraction(30000, 1001), 30])
@pytest.mark.parametrize("container", CONTAINERS)
def test_every_frame_is_counted_and_used_at_its_own_rate(tmp_path, container, rate):
    codec, pix_fmt, options = CONTAINERS[container]
    for num_frames in (5, 9, 17):
        path = tmp_path / f"{num_frames}.{container}"
        write_clip(path, greys(num_frames), rate, codec, pix_fmt, options)
        for fps in {float(rate), round(float(rate), 3)}:
            record, levels = load(path, fps=fps)
            assert record["source"]["frames"] == record["used"]["frames"] == num_frames
            assert record["used"]["source_frames"] == indices(levels) == list(range(num_frames))
            assert record["reason"] is None
        if container != "gif":
            assert record["source"]["fps"] == round(float(rate), 3)


TIMES = [0, 10, 20, 30, 60, 90, 120, 130, 140, 150, 160, 170, 180, 190, 200, 210, 300]  # in 1/100 s


@pytest.mark.parametrize("container", CONTAINERS)
def test_variable_rates_follow_their_times(tmp_path, container):
    """Reference: the rule word by word, for each frame of the clip by itself."""
    codec, pix_fmt, options = CONTAINERS[container]
    if container == "gif":
        images = [Image.fromarray(frame) for frame in greys(17)]
        durations = [10 * (b - a) for a, b in zip(TIMES, [*TIMES[1:], 310], strict=True)]
        images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:], duration=durations)
    else:
        write_clip(tmp_path / f"a.{container}", greys(17), 100, codec, pix_fmt, options, TIMES)
    record, levels = load(tmp_path / f"a.{container}")
    assert record["source"]["frames"] == 17 and record["source"]["fps"] == pytest.approx(16 / 3, abs=0.001)
    quarter = 3.0 / 16 / 4
    expected = [
        max(index for index, at in enumerate(TIMES) if at / 100 <= k / 16 + quarter)
        for k in range(record["used"]["frames"])
    ]
    assert record["used"]["frames"] == 49
    assert record["used"]["source_frames"] == indices(levels) == expected
    assert record["reason"].startswith("retimed from 5.333 to 16 fps, frames repeated")


@pytest.mark.parametrize("options", [{"bf": "3"}, {"bf": "3", "b-pyramid": "none"}, {"bf": "0"}])
@pytest.mark.parametrize("container", ["mp4", "mkv", "avi", "ts", "h264"])
def test_frames_come_in_the_order_of_display(tmp_path, container, options):
    """Packets of h264 with B-frames are not in this order, avi holds no times, and a bare stream neither."""
    path = write_clip(tmp_path / f"a.{container}", greys(17), 25, "libx264", "yuv420p", options)
    record, levels = load(path, fps=25)
    assert record["used"]["source_frames"] == indices(levels) == list(range(17))


def with_declared_frames(data, count):
    """Returns the bytes of an avi whose two headers declare this number of frames."""
    data = bytearray(data)
    for place in (data.index(b"avih") + 8 + 16, data.index(b"strh") + 8 + 32):
        data[place : place + 4] = count.to_bytes(4, "little")
    return bytes(data)


def test_counts_of_the_container_are_not_believed(tmp_path):
    """Fewer frames than there are is what recorders leave that crashed; more is what a cut leaves."""
    path = write_clip(tmp_path / "a.avi", greys(9), 16, "mpeg4", "yuv420p")
    data = path.read_bytes()
    assert with_declared_frames(data, 9) == data
    for count in (0, 1):
        path.write_bytes(with_declared_frames(data, count))
        record, levels = load(path)
        assert record["source"]["frames"] == 9 and indices(levels) == list(range(9))
    path.write_bytes(with_declared_frames(data, 10))
    assert "a.avi cannot be used: it is cut off: it declares more than the 9 frames" in refused(path)


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_frames_outside_an_edit_list_are_not_part_of_the_clip(tmp_path, codec):
    """Phones cut clips without encoding them again: an edit list says where they begin, in the middle of a GOP."""
    times = [k - 4 for k in range(21)]
    muxer = {"avoid_negative_ts": "disabled"}
    path = write_clip(tmp_path / "a.mp4", greys(21), 16, codec, "yuv420p", {"bf": "0"}, times, muxer)
    record, levels = load(path)
    assert record["source"]["frames"] == 17
    assert indices(levels) == list(range(4, 21)) and record["used"]["source_frames"] == list(range(17))


def test_clips_that_begin_later_are_whole(tmp_path):
    path = write_clip(tmp_path / "a.mp4", greys(9), 16, "libx264", "yuv420p", times=[k + 40 for k in range(9)])
    assert indices(load(path)[1]) == list(range(9))


# Rates


@pytest.mark.parametrize("container", ["mp4", *slow("mkv")])
@pytest.mark.parametrize(
    ("rate", "fps", "expected"),
    [
        (32, 16, [0, 2, 4, 6, 8, 10, 12, 14, 16]),
        (24, 16, [0, 1, 3, 4, 6, 7, 9, 10, 12]),
        (25, 16, [0, 1, 3, 4, 6, 8, 9, 11, 12]),
        (30, 16, [0, 2, 4, 5, 7, 9, 11, 13, 15]),
        (60, 16, [0, 4, 7, 11, 15]),
        (48, 24, [0, 2, 4, 6, 8, 10, 12, 14, 16]),
        (30, 24, [0, 1, 2, 4, 5, 6, 7, 9, 10, 11, 12, 14, 15]),
        (8, 16, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10]),
        (12, 16, [0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11, 12]),
    ],
)
def test_retiming_takes_the_frames_that_are_shown_then(tmp_path, container, rate, fps, expected):
    path = write_clip(tmp_path / f"a.{container}", greys(17), rate, "libx264", "yuv420p")
    record, levels = load(path, fps=fps, num_frames=len(expected))
    assert record["used"]["source_frames"] == indices(levels) == expected
    repeated = ", frames repeated" if rate < fps else ""
    assert record["reason"].split(";")[0] == f"retimed from {rate} to {fps} fps{repeated}"
    assert record["used"]["fps"] == fps and record["source"]["fps"] == rate


def test_a_frame_counts_up_to_a_quarter_early(tmp_path):
    """Sources at 16 fps whose second frame is late by a part of the interval: is it shown at 1/16 s?"""
    for late, second in ((0.2, 1), (0.25, 1), (0.27, 0), (0.5, 0)):
        times = [0, round(1000 * (1 + late)), *(1000 * k for k in range(2, 9))]
        path = write_clip(tmp_path / "a.mp4", greys(9), 16000, "libx264", "yuv420p", times=times)
        assert inspect(path)[0]["used"]["source_frames"][:3] == [0, second, 2]


def test_half_a_frame_counts(tmp_path):
    """17 frames at 32 fps are 8.5 at 16, and nine of them are shown at a time of 16 fps."""
    for container in ("mkv", "avi"):
        path = write_clip(tmp_path / f"a.{container}", greys(17), 32)
        assert inspect(path)[0]["used"]["source_frames"] == list(range(0, 17, 2))


# Lengths


def test_lengths_are_rounded_down_to_4n_plus_1_with_notice(tmp_path):
    for num_frames in range(1, 11):
        path = write_clip(tmp_path / f"{num_frames}.mkv", greys(num_frames))
        (record,) = inspect(path)
        used = {1: 1, 2: 1, 3: 1, 4: 1, 5: 5, 6: 5, 7: 5, 8: 5, 9: 9, 10: 9}[num_frames]
        assert record["used"]["frames"] == used and record["used"]["source_frames"] == list(range(used))
        notice = None if num_frames == used else f"{used} of {num_frames} frames (4n + 1), from the start"
        assert record["reason"] == notice


def test_the_last_frame_is_shown_as_long_as_the_others(tmp_path):
    path = write_clip(tmp_path / "a.mkv", greys(5), 2)
    (record,) = inspect(path)
    # Eight times each, a quarter early.
    assert record["used"]["source_frames"] == [(k + 2) // 8 for k in range(37)]
    assert record["reason"].endswith("frames repeated; 37 of 40 frames (4n + 1), from the start")


def test_times_that_are_all_the_same_count_for_nothing(tmp_path):
    """At 10000 fps mkv writes 0 ms for each of them."""
    path = write_clip(tmp_path / "a.mkv", greys(5), 10000)
    with av.open(str(path)) as container:
        assert {frame.pts for frame in container.decode(video=0)} == {0}
    (record,) = inspect(path)
    assert record["source"] == {"size": [64, 64], "frames": 5, "fps": 10000} and record["used"]["frames"] == 1


def test_a_change_of_rate_and_of_length_stand_in_one_reason(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = write_clip(tmp_path / "a.mp4", greys(22) * 2, 32, "libx264", "yuv420p")
    (record,) = inspect(path)
    assert record["reason"] == "retimed from 32 to 16 fps; 21 of 22 frames (4n + 1), from the start"
    assert "1 of 1 clips are shortened or retimed:\n  a.mp4: retimed from 32 to 16 fps; 21 of 22" in caplog.text


def test_the_record_is_that_of_dataset_jsonl(tmp_path):
    path = write_clip(tmp_path / "a.mp4", greys(20, 48, 80) * 2, Fraction(24000, 1001), "libx264", "yuv420p")
    records = inspect(
        Row("sub/é.mp4", "a café", {"target": (path,)}, "metadata.csv line 2"), fps=24, num_frames=5, max_pixels=4096
    )
    assert records == [
        {
            "id": "sub/é.mp4",
            "caption": "a café",
            "source": {"size": [80, 48], "frames": 40, "fps": 23.976},
            "used": {"size": [80, 48], "frames": 5, "fps": 24, "source_frames": [0, 1, 2, 3, 4]},
            "decision": "used",
            "reason": "5 of 40 frames (4n + 1), from the start",
        }
    ]
    assert json.loads(json.dumps(records)) == records


@pytest.mark.parametrize(
    ("clip_part", "expected", "where"),
    [("start", [0, 2, 4, 6, 8], "from the start"), ("middle", [8, 10, 12, 14, 16], "from the middle")],
)
def test_parts(tmp_path, clip_part, expected, where):
    path = write_clip(tmp_path / "a.mkv", greys(25), 32)
    record, levels = load(path, num_frames=5, clip_part=clip_part)
    # 13 frames at 16 fps, 8 to spare.
    assert record["used"]["source_frames"] == indices(levels) == expected
    assert record["reason"] == f"retimed from 32 to 16 fps; 5 of 13 frames (4n + 1), {where}"


def test_random_parts_are_one_draw_for_each_id(tmp_path):
    data = write_clip(tmp_path / "a.mkv", greys(10)).read_bytes()
    rows = [row_of(data, f"{n}.mkv") for n in range(60)]

    def starts(rows, seed=7):
        records = inspect(*rows, num_frames=5, clip_part="random", seed=seed)
        for record in records:
            first = record["used"]["source_frames"][0]
            assert record["used"]["source_frames"] == list(range(first, first + 5))
            assert record["reason"] == f"5 of 10 frames (4n + 1), at random, from frame {first}"
        return {record["id"]: record["used"]["source_frames"][0] for record in records}

    drawn = starts(rows)
    # Every start from 0 to 10 - 5 occurs; missing one in 60 fair draws has a chance of 1e-4.
    assert set(drawn.values()) == {0, 1, 2, 3, 4, 5}
    assert starts(rows) == drawn and starts(rows, seed=8) != drawn
    # Order, and what else the dataset holds, make no difference.
    assert starts(rows[::-1]) == drawn
    assert starts(rows[40:]) == {row.id: drawn[row.id] for row in rows[40:]}


def test_random_parts_of_clips_without_frames_to_spare_are_the_clip(tmp_path):
    path = write_clip(tmp_path / "a.mkv", greys(5))
    assert inspect(path, clip_part="random")[0]["used"]["source_frames"] == list(range(5))


# Dropping


def test_short_clips_are_dropped_with_a_count_and_a_reason(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    good = write_clip(tmp_path / "good.mkv", greys(5))
    Image.new("RGB", (64, 64)).save(tmp_path / "still.png")
    short = [write_clip(tmp_path / f"short{n}.mkv", greys(4)) for n in range(6)]
    # Shown for a second, and a single frame nevertheless.
    one = write_clip(tmp_path / "one.mkv", greys(1), 1)
    records = inspect(good, tmp_path / "still.png", *short, one, min_frames=5)
    assert [record["decision"] for record in records] == ["used"] + ["dropped"] * 8
    assert [record["used"] for record in records[1:]] == [None] * 8
    alone = "1 frames at 16 fps; at least 5 are needed"
    few = "4 frames at 16 fps; at least 5 are needed"
    assert [record["reason"] for record in records] == [None, alone, *[few] * 6, alone]
    assert records[2]["source"] == {"size": [64, 64], "frames": 4, "fps": pytest.approx(16, rel=0.01)}
    assert f"8 of 9 clips are dropped:\n  still.png: {alone}\n  short0.mkv: {few}" in caplog.text
    assert "and 3 more" in caplog.text
    json.dumps(records)


def test_a_dataset_of_which_nothing_is_left_is_refused(tmp_path):
    paths = [write_clip(tmp_path / f"{n}.mkv", greys(4)) for n in range(7)]
    message = refused(*paths, min_frames=5)
    assert message.startswith("All 7 clips are dropped:\n") and message.count("at least 5 are needed") == 7
    assert "  6.mkv: 4 frames at 16 fps" in message


# Images and folders


def test_an_image_is_a_clip_of_one_frame(tmp_path):
    """Reference: what the path for images makes of the same file, turned by its orientation tag."""
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(0).integers(0, 256, (60, 100, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    for row in (row_of(tmp_path / "a.png"), row_of((tmp_path / "a.png").read_bytes(), "train/0")):
        (record,) = inspect(row)
        assert record["source"] == {"size": [60, 100], "frames": 1, "fps": None}
        assert record["used"] == {"size": [64, 64], "frames": 1, "fps": 16, "source_frames": [0]}
        assert record["decision"] == "used" and record["reason"] is None
        expected = to_tensor(cover_and_crop(open_image(tmp_path / "a.png"), 64, 64))
        assert torch.equal(read_clip(row, record)[:, 0], expected)


def test_bytes_are_told_apart_by_what_they_hold(tmp_path):
    clips = {
        "mp4": write_clip(tmp_path / "a.mp4", greys(5), 16, "libx264", "yuv420p"),
        "gif": write_clip(tmp_path / "a.gif", greys(5), 16, "gif", "gray"),
        "mpg": write_clip(tmp_path / "a.mpg", greys(5), 25, "mpeg2video", "yuv420p", file_format="mpeg2video"),
    }
    for path in clips.values():
        record, levels = load(row_of(path.read_bytes(), "train/0"), fps=25 if path.suffix == ".mpg" else 16)
        assert indices(levels) == list(range(5))
    message = refused(row_of(b"nothing", "train/0"))
    assert "train/0 cannot be used: it is no video that FFmpeg can read, or is cut off" in message
    half = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(half, "PNG")
    assert "train/0 cannot be used: image file is truncated" in refused(row_of(half.getvalue()[:6000], "train/0"))


def test_a_folder_is_a_clip_in_the_order_of_its_numbers(tmp_path):
    folder = tmp_path / "clip"
    folder.mkdir()
    for n in range(13):
        Image.fromarray(greys(13, 48, 80)[n]).save(folder / f"frame {n}.png")
    (folder / ".hidden.png").write_text("x")
    (folder / "notes.txt").write_text("x")
    record, levels = load(folder, fps=24)
    assert record["source"] == {"size": [80, 48], "frames": 13, "fps": None}
    assert record["used"]["source_frames"] == indices(levels) == list(range(13)) and record["reason"] is None
    record, levels = load(folder, num_frames=5, clip_part="middle")
    assert indices(levels) == [4, 5, 6, 7, 8] and record["reason"] == "5 of 13 frames (4n + 1), from the middle"


def test_problems_of_folders_are_named(tmp_path):
    for name in ("odd", "bad", "none"):
        (tmp_path / name).mkdir()
        for n in range(0 if name == "none" else 3):
            Image.new("RGB", (64, 80 if (name, n) == ("odd", 1) else 64)).save(tmp_path / name / f"{n}.png")
    (tmp_path / "bad" / "2.png").write_bytes(b"")
    message = refused(tmp_path / "odd", tmp_path / "bad", tmp_path / "none")
    assert message.startswith("3 of 3 clips cannot be used:\n")
    assert "  odd: 1.png is (64, 80), but the first frame (64, 64); a clip has one size.\n" in message
    assert "  bad: 2.png is not an image" in message
    assert "  none is a folder without images" in message


# Geometry


def noise(height, width):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize("container", ["mp4", *slow("mkv", "mov")])
def test_clips_are_turned_before_their_size_is_chosen(tmp_path, container, degrees, mirrored):
    """Reference: numpy turns counter-clockwise, as the flag of the container that is written."""
    pixels = noise(48, 80)
    codec, pix_fmt = ("libx264rgb", "rgb24") if container != "mkv" else ("ffv1", "bgr0")
    path = write_clip(
        *(tmp_path / f"a.{container}", [pixels] * 5, 16, codec, pix_fmt, {"crf": "0"} if "264" in codec else {}),
        setup=lambda stream: stream.set_display_rotation(degrees, hflip=mirrored),
    )
    expected = np.rot90(pixels, degrees // 90)
    expected = expected[:, ::-1] if mirrored else expected
    record, levels = load(path, max_pixels=80 * 48)
    assert record["source"]["size"] == record["used"]["size"] == list(expected.shape[1::-1])
    assert (levels == expected).all()


def test_the_matrix_of_a_phone_held_upright(tmp_path):
    """What iPhones write for portrait: x' = -y, y' = x, a turn to the right."""
    pixels = noise(48, 80)
    matrix = [0, 65536, 0, -65536, 0, 0, 48 * 65536, 0, 1 << 30]
    path = write_clip(
        *(tmp_path / "a.mp4", [pixels] * 5, 16, "libx264rgb", "rgb24", {"crf": "0"}),
        setup=lambda stream: stream.set_display_matrix(matrix),
    )
    assert (load(path, height=80, width=48)[1] == np.rot90(pixels, -1)).all()


@pytest.mark.parametrize(("orientation", "turns_right"), [(1, 0), (6, 1), (3, 2), (8, 3)])
@pytest.mark.parametrize("container", ["avi", "mov", "mkv"])
def test_motion_jpeg_is_turned_by_its_exif(tmp_path, container, orientation, turns_right):
    pixels = np.zeros((48, 80, 3), dtype=np.uint8)
    pixels[:16, :32] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "JPEG", quality=100, subsampling=0, exif=exif)
    with av.open(str(tmp_path / f"a.{container}"), "w") as output:
        stream = output.add_stream("mjpeg", rate=16)
        stream.width, stream.height, stream.pix_fmt = 80, 48, "yuvj444p"
        for k in range(5):
            packet = av.Packet(data.getvalue())
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, k, k, Fraction(1, 16)
            output.mux(packet)
    record, levels = load(tmp_path / f"a.{container}", max_pixels=80 * 48)
    expected = np.rot90(pixels, -turns_right)
    assert record["source"]["size"] == list(expected.shape[1::-1])
    assert np.abs(levels - expected).max() <= 3


def test_other_angles_are_refused(tmp_path):
    path = write_clip(
        *(tmp_path / "a.mp4", [noise(48, 80)] * 5, 16, "libx264rgb", "rgb24"),
        setup=lambda stream: stream.set_display_rotation(30),
    )
    assert "a.mp4 cannot be used: it is to be shown at an angle; allowed are turns by multiples of 90" in refused(path)


def disc(width, height, squeezed_to=None):
    image = Image.new("RGB", (width, height))
    x, y, radius = width / 2, height / 2, min(width, height) / 4
    ImageDraw.Draw(image).ellipse([x - radius, y - radius, x + radius, y + radius], fill="white")
    return np.asarray(image.resize(squeezed_to) if squeezed_to else image)


def assert_round(levels):
    """Second moments: a disc has the same spread along both axes and none across."""
    mass = levels[0, ..., 0] / 255
    rows, columns = np.indices(mass.shape)
    rows, columns = rows - (mass * rows).sum() / mass.sum(), columns - (mass * columns).sum() / mass.sum()
    spread = [(mass * rows**2).sum(), (mass * columns**2).sum()]
    assert abs(spread[0] / spread[1] - 1) < 0.03
    assert abs((mass * rows * columns).sum()) < 0.01 * spread[0]


@pytest.mark.parametrize("canvas", [(256, 128), (128, 256)])
@pytest.mark.parametrize("target", [(96, 64), (64, 96), (128, 128)])
def test_a_circle_stays_a_circle(tmp_path, canvas, target):
    path = write_clip(tmp_path / "a.mkv", [disc(*canvas)] * 5)
    record, levels = load(path, height=target[0], width=target[1])
    assert record["used"]["size"] == [target[1], target[0]]
    assert_round(levels)


@pytest.mark.parametrize("degrees", [0, 90])
@pytest.mark.parametrize(
    ("stored", "aspect", "displayed"),
    [
        ((128, 128), Fraction(2), (256, 128)),
        ((256, 128), Fraction(1, 2), (256, 256)),
        ((96, 128), Fraction(4, 3), (128, 128)),
    ],
)
def test_pixels_that_are_not_square_are_shown_as_they_should(tmp_path, stored, aspect, displayed, degrees):
    def setup(stream):
        stream.codec_context.sample_aspect_ratio = aspect
        stream.set_display_rotation(degrees)

    frames = [disc(*displayed, squeezed_to=stored)] * 5
    path = write_clip(tmp_path / "a.mp4", frames, 16, "libx264", "yuv420p", setup=setup)
    record, levels = load(path, height=128, width=96)
    assert record["source"]["size"] == list(displayed[::-1] if degrees else displayed)
    assert_round(levels)


def test_frames_take_the_path_of_images(tmp_path):
    """Reference: the same pixels as a PNG, through the path for images. A condition is cut from the clip itself."""
    pixels = noise(70, 110)
    path = write_clip(tmp_path / "a.mkv", [pixels] * 5)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (record,) = inspect(path, max_pixels=64 * 64)
    clip = read_clip(row_of(path), record)
    width, height = record["used"]["size"]
    expected = to_tensor(cover_and_crop(open_image(tmp_path / "a.png"), height, width))
    assert all(torch.equal(clip[:, k], expected) for k in range(5))


def test_clips_that_are_too_thin_are_named_and_enlargement_is_said(tmp_path, caplog):
    thin = write_clip(tmp_path / "thin.mkv", greys(5, 16, 200))
    small = write_clip(tmp_path / "small.mkv", greys(5, 24, 24))
    assert "thin.mkv: 200x16 pixels: the shorter side must be" in refused(thin, small)
    inspect(small)
    assert "1 clips are enlarged more than 2 times:\n  small.mkv: 24x24 to 64x64, 2.7 times" in caplog.text


def test_a_size_that_changes_is_refused(tmp_path):
    parts = [
        write_clip(tmp_path / f"{size}.h264", greys(5, size, size), 16, "libx264", "yuv420p").read_bytes()
        for size in (64, 128)
    ]
    (tmp_path / "a.h264").write_bytes(b"".join(parts))
    assert "a.h264 cannot be used: its size changes at frame 5" in refused(tmp_path / "a.h264")


# Colours

CHART = np.array(
    [(200, 60, 40), (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (128, 128, 128), (30, 120, 220)]
)
# Kr and Kb of ITU-R BT.709, BT.601 and BT.2020, and SMPTE 240M, by their numbers in ITU-T H.273.
WEIGHTS = {1: (0.2126, 0.0722), 5: (0.299, 0.114), 6: (0.299, 0.114), 7: (0.212, 0.087), 9: (0.2627, 0.0593)}


def coded_chart(matrix, full_range, pix_fmt="yuv444p", height=64):
    """Returns the chart as a frame of Y'CbCr, by the formulas of the standards: patches of 16 columns."""
    num_bits = 10 if "10" in pix_fmt else 8
    kr, kb = WEIGHTS[matrix]
    red, green, blue = CHART.T / 255
    luma = kr * red + (1 - kr - kb) * green + kb * blue
    chroma = [(blue - luma) / 2 / (1 - kb), (red - luma) / 2 / (1 - kr)]
    one, most = 1 << num_bits - 8, (1 << num_bits) - 1
    if full_range:
        planes = [luma * most, *(part * most + 128 * one for part in chroma)]
    else:
        planes = [(219 * luma + 16) * one, *((224 * part + 128) * one for part in chroma)]
    frame = av.VideoFrame(16 * len(CHART), height, pix_fmt)
    for plane, values in zip(frame.planes, planes, strict=True):
        row = np.repeat(np.clip(values.round(), 0, most), plane.width // len(CHART))
        row = row.astype("<u2" if num_bits > 8 else "u1").tobytes().ljust(plane.line_size, b"\0")
        plane.update(row * plane.height)
    return frame


def write_chart(path, matrix, full_range, tags, height=64, codec="ffv1", pix_fmt="yuv444p", options=()):
    """Writes a chart whose tags of matrix, range and transfer curve may say something else, or nothing (2, 0, 2)."""
    frame = coded_chart(matrix, full_range, pix_fmt, height)
    frame.colorspace, frame.color_range, frame.color_trc = tags

    def setup(stream):
        context = stream.codec_context
        context.colorspace, context.color_range, context.color_trc = tags

    return write_clip(path, [frame] * 5, 16, codec, pix_fmt, options, setup=setup)


def chart_error(path):
    """Returns the largest difference in the middle of a patch, in levels of 255."""
    with av.open(str(path)) as container:
        height, width = container.streams.video[0].height, container.streams.video[0].width
    _, levels = load(path, height=height, width=width)
    return np.abs(levels[:, height // 2, 8::16] - CHART).max()


@pytest.mark.parametrize("full_range", [False, True])
@pytest.mark.parametrize("matrix", WEIGHTS)
@pytest.mark.parametrize(
    ("container", "codec", "pix_fmt", "options"),
    [
        ("mkv", "ffv1", "yuv444p", {}),
        ("mkv", "ffv1", "yuv420p10le", {}),
        ("mp4", "libx264", "yuv420p", {"crf": "0"}),
        *slow(("mkv", "ffv1", "yuv420p", {}), ("mp4", "libx264", "yuv422p10le", {"crf": "0"})),
    ],
)
def test_every_matrix_and_range_gives_the_colours_back(
    tmp_path, matrix, full_range, container, codec, pix_fmt, options
):
    path = tmp_path / f"a.{container}"
    write_chart(path, matrix, full_range, (matrix, 2 if full_range else 1, 2), 64, codec, pix_fmt, options)
    assert chart_error(path) <= 2


@pytest.mark.parametrize(("height", "matrix"), [(480, 6), (704, 6), (720, 1), (1088, 1)])
def test_without_tags_720_lines_are_bt709_and_fewer_bt601(tmp_path, height, matrix):
    path = write_chart(tmp_path / "a.mkv", matrix, False, (2, 0, 2), height)
    assert chart_error(path) <= 2
    # And the other matrix is far from it.
    write_chart(path, 7 - matrix, False, (2, 0, 2), height)
    assert chart_error(path) > 15


def test_a_tag_counts_more_than_the_number_of_lines(tmp_path):
    for height, matrix in ((480, 1), (720, 6)):
        assert chart_error(write_chart(tmp_path / "a.mkv", matrix, False, (matrix, 1, 2), height)) <= 2


def test_full_range_by_its_pixel_format(tmp_path):
    """Motion JPEG is full range by its nature."""
    write_chart(tmp_path / "a.avi", 6, True, (2, 0, 2), 64, "mjpeg", "yuvj444p", {"q": "1", "qmin": "1"})
    assert chart_error(tmp_path / "a.avi") <= 4


@pytest.mark.parametrize("matrix", [8, 10, 14])
def test_matrices_that_are_not_known_are_refused(tmp_path, matrix):
    path = write_chart(tmp_path / "a.mkv", 9, False, (matrix, 1, 2))
    assert f"a.mkv cannot be used: its colour matrix ({matrix} in ITU-T H.273) is not supported" in refused(path)


@pytest.mark.parametrize(("curve", "name"), [(16, "PQ"), (18, "HLG")])
@pytest.mark.parametrize(("container", "codec"), [("mkv", "ffv1"), ("mp4", "libx264"), ("webm", "libvpx-vp9")])
def test_hdr_is_refused(tmp_path, curve, name, container, codec):
    path = tmp_path / f"a.{container}"
    pix_fmt = "yuv420p" if container == "webm" else "yuv420p10le"
    write_chart(path, 9, False, (9, 1, curve), 64, codec, pix_fmt)
    message = refused(path)
    assert f"a.{container} cannot be used: it is HDR ({name}), which must be converted to SDR" in message


@pytest.mark.parametrize("curve", [1, 6, 13, 14, 15])
def test_curves_of_sdr_change_nothing(tmp_path, curve):
    assert chart_error(write_chart(tmp_path / "a.mkv", 1, False, (1, 1, curve))) <= 1


@pytest.mark.parametrize(
    ("container", "codec", "pix_fmt"),
    [("mkv", "ffv1", "bgr0"), ("mp4", "libx264rgb", "rgb24"), ("mov", "png", "rgb24"), ("avi", "rawvideo", "bgr24")],
)
def test_rgb_needs_no_matrix(tmp_path, container, codec, pix_fmt):
    pixels = noise(64, 64)
    options = {"crf": "0"} if codec == "libx264rgb" else {}
    path = write_clip(tmp_path / f"a.{container}", [pixels] * 5, 16, codec, pix_fmt, options)
    assert (load(path)[1] == pixels).all()


@pytest.mark.parametrize(
    ("container", "codec", "pix_fmt"),
    [("mkv", "ffv1", "gray"), ("mkv", "ffv1", "gray16le"), ("mov", "png", "gray"), ("mov", "png", "ya8")],
)
def test_grey_keeps_its_levels(tmp_path, container, codec, pix_fmt):
    ramp = np.repeat(np.arange(0, 256, 4, dtype=np.uint8)[None], 64, axis=0)
    frame = av.VideoFrame.from_ndarray(ramp, format="gray").reformat(format=pix_fmt)
    path = write_clip(tmp_path / f"a.{container}", [frame] * 5, 16, codec, pix_fmt)
    assert np.abs(load(path)[1] - ramp[..., None]).max() <= 1


def test_black_and_white_are_exactly_minus_one_and_one(tmp_path):
    for level in (0, 255):
        frames = [np.full((64, 64), level, dtype=np.uint8)] * 5
        for container, codec, pix_fmt in (("mkv", "ffv1", "yuv420p"), ("mkv", "ffv1", "bgr0"), ("gif", "gif", "gray")):
            path = write_clip(tmp_path / f"{level}.{container}", frames, 16, codec, pix_fmt)
            clip = read_clip(row_of(path), inspect(path)[0])
            assert torch.equal(clip, torch.full((3, 5, 64, 64), level / 127.5 - 1))


@pytest.mark.parametrize(
    ("name", "codec", "pix_fmt", "options"),
    [
        ("vp9.webm", "libvpx-vp9", "yuva420p", {"lossless": "1", "auto-alt-ref": "0", **QUICK}),
        ("vp8.webm", "libvpx", "yuva420p", {"crf": "4", "b:v": "5M", "auto-alt-ref": "0"}),
        ("a.mkv", "ffv1", "yuva444p", {}),
        ("b.mkv", "ffv1", "bgra", {}),
        ("a.mov", "png", "rgba", {}),
    ],
)
def test_transparency_is_composited_on_white(tmp_path, name, codec, pix_fmt, options):
    pixels = np.zeros((64, 64, 4), dtype=np.uint8)
    pixels[..., 0] = 200
    pixels[:, 16:32, 3], pixels[:, 32:, 3] = 128, 255
    frame = av.VideoFrame.from_ndarray(pixels, format="rgba").reformat(format=pix_fmt)
    write_clip(tmp_path / name, [frame] * 5, 16, codec, pix_fmt, options)
    _, levels = load(tmp_path / name)
    half = [200 * 128 / 255 + 127, 127, 127]
    expected = np.array([[255, 255, 255], half, [200, 0, 0]])
    assert np.abs(levels[:, 32, [8, 24, 48]] - expected).max() <= 4


def test_transparent_gifs_are_white_behind(tmp_path):
    frames = []
    for n in range(5):
        frame = Image.new("RGBA", (64, 64))
        frame.paste((0, 0, 10 * n + 100, 255), (32, 0, 64, 64))
        frames.append(frame)
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=60, disposal=2)
    _, levels = load(tmp_path / "a.gif")
    assert (levels[:, 32, 8] == 255).all()
    assert levels[:, 32, 48].tolist() == [[0, 0, 10 * n + 100] for n in range(5)]


# Damaged files


FASTSTART = {"movflags": "faststart"}
FRAGMENTS = {"movflags": "frag_keyframe+empty_moov"}
WHOLE = {
    "front.mp4": ("libx264", "yuv420p", {}, FASTSTART),
    "end.mp4": ("libx264", "yuv420p", {}, {}),
    "fragments.mp4": ("libx264", "yuv420p", {"g": "8"}, FRAGMENTS),
    "intra.mov": ("mjpeg", "yuvj420p", {}, FASTSTART),
    "a.mkv": ("libx264", "yuv420p", {}, {}),
    "intra.mkv": ("ffv1", "bgr0", {}, {}),
    "a.webm": ("libvpx-vp9", "yuv420p", QUICK, {}),
    "a.avi": ("mpeg4", "yuv420p", {}, {}),
    "intra.avi": ("mjpeg", "yuvj420p", {}, {}),
    "a.gif": ("gif", "rgb8", {}, {}),
    "a.asf": ("libx264", "yuv420p", {}, {}),
}


def whole_file(folder, name):
    codec, pix_fmt, options, muxer = WHOLE[name]
    frames = [np.random.default_rng(n).integers(0, 256, (64, 64, 3), dtype=np.uint8) for n in range(9)]
    return write_clip(folder / name, frames, 16, codec, pix_fmt, options, muxer=muxer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a clip of nine frames in each container, which no test changes."""
    folder = tmp_path_factory.mktemp("whole")
    return {name: whole_file(folder, name).read_bytes() for name in WHOLE}


def packet_ends(data):
    """Returns where the first, middle and last but one packet of a file end, if its container says where they lie."""
    with av.open(io.BytesIO(data)) as container:
        ends = sorted(packet.pos + packet.size for packet in container.demux(video=0) if packet.size)
    return (ends[0], ends[4], ends[-2])


@pytest.mark.parametrize("name", WHOLE)
def test_files_that_are_cut_off_are_named(whole, name):
    """Also between two frames, where every frame that is left is whole."""
    data = whole[name]
    row = row_of(data, f"whole {name}")
    assert inspect(row)[0]["source"]["frames"] == 9
    cuts = [int(len(data) * part) for part in (0.05, 0.3, 0.6, 0.61, 0.62, 0.8, 0.9)]
    # FFmpeg does not say where the packets of a GIF lie, and those of ASF are parts of others.
    cuts += packet_ends(data) if name not in ("a.gif", "a.asf") else ()
    if name == "fragments.mp4":
        # All that is left is whole between two fragments, of which nothing says how many there are.
        cuts = cuts[:-2] + cuts[-1:]
    for cut in cuts:
        message = refused(row_of(data[:cut], f"cut {name}"), row)
        assert message.startswith("1 of 2 clips cannot be used:") and f"cut {name}" in message, cut


def with_sound(path, num_seconds, codec="aac"):
    """Writes a clip of nine frames, half a second, with sound of this length."""
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264" if codec == "aac" else "libvpx-vp9", rate=16)
        video.width = video.height = 64
        video.pix_fmt = "yuv420p"
        audio = container.add_stream(codec, rate=48000)
        for pixels in greys(9):
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="gray")))
        sound = av.AudioFrame.from_ndarray(
            np.zeros((1, int(48000 * num_seconds)), np.float32), format="fltp", layout="mono"
        )
        sound.sample_rate = 48000
        for stream, frame in ((audio, sound), (audio, None), (video, None)):
            container.mux(stream.encode(frame))
    return path


@pytest.mark.parametrize("name", ["a.mp4", "a.mov", "a.mkv", "a.avi", "a.webm"])
def test_sound_may_be_longer_or_shorter_than_the_clip(tmp_path, name):
    for num_seconds in (0.25, 2):
        path = with_sound(tmp_path / name, num_seconds, "libopus" if name == "a.webm" else "aac")
        with av.open(str(path)) as container:
            assert len(container.streams) == 2 and container.duration / av.time_base >= num_seconds
        assert inspect(path)[0]["source"]["frames"] == 9


def test_what_a_crashed_recorder_or_a_stream_leaves_is_used(whole):
    """Its header says nothing about its length: 0 in avi, all ones and no duration in Matroska."""
    data = bytearray(with_declared_frames(whole["a.avi"], 0))
    data[4:8] = bytes(4)
    last = data.rindex(b"00dc", 0, data.index(b"idx1"))
    for end in (last, last + 100):
        assert inspect(row_of(bytes(data[:end]), "a.avi"))[0]["source"]["frames"] == 8

    data = bytearray(whole["a.mkv"])
    segment = data.index(b"\x18\x53\x80\x67") + 4
    assert data[segment] == 1
    data[segment : segment + 8] = b"\x01" + b"\xff" * 7
    assert inspect(row_of(bytes(data), "a.mkv"))[0]["source"]["frames"] == 9
    duration = data.index(b"\x44\x89\x88")
    # In its place an element that means nothing, of the same 11 bytes.
    data[duration : duration + 3] = b"\xec\x40\x08"
    with av.open(io.BytesIO(data)) as container:
        assert not container.duration
    end = packet_ends(bytes(data))[1]
    assert 0 < inspect(row_of(bytes(data[:end]), "a.mkv"))[0]["source"]["frames"] < 9


def test_what_stands_behind_the_end_does_not_matter(whole):
    for name, data in whole.items():
        for tail in (bytes(100), b"tail" * 20):
            row = row_of(data + tail, name)
            if name == "a.gif" and any(tail):
                assert "a.gif cannot be used: it is cut off: its last byte is not the trailer" in refused(row)
            else:
                assert inspect(row)[0]["source"]["frames"] == 9, name


def bad_files(folder):
    """Writes what is found in datasets: cut, empty, header only, no video, no video stream, missing."""
    front, end = (whole_file(folder, name).read_bytes() for name in ("front.mp4", "end.mp4"))
    (folder / "front.mp4").write_bytes(front[: len(front) * 6 // 10])
    (folder / "end.mp4").write_bytes(end[: len(end) * 6 // 10])
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "header.mp4").write_bytes(end[:40])
    (folder / "index only.mp4").write_bytes(front[: front.index(b"mdat") + 4])
    (folder / "text.mp4").write_text("this is not a video\n" * 50)
    (folder / "zeros.mkv").write_bytes(bytes(5000))
    with av.open(str(folder / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 16000), dtype=np.float32), format="fltp", layout="mono")
        sound.sample_rate = 16000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    middle = bytearray(front)
    place = packet_ends(front)[1]
    middle[place : place + 500] = np.random.default_rng(0).bytes(500)
    (folder / "middle.mp4").write_bytes(middle)
    (folder / "image.png").write_bytes(b"\x89PNG\r\n")
    os.mkfifo(folder / "pipe.mp4")
    names = ["front", "end", "empty", "header", "index only", "text", "sound", "middle", "missing", "pipe"]
    return [*(folder / f"{name}.mp4" for name in names), folder / "zeros.mkv", folder / "image.png"]


def test_all_bad_files_come_in_one_error_at_once(tmp_path, capfd):
    good = write_clip(tmp_path / "good.mkv", greys(5))
    paths = bad_files(tmp_path)
    start = time.monotonic()
    message = refused(good, *(Row(path.name, "x", {"target": (path,)}, "row 7") for path in paths))
    assert time.monotonic() - start < 20
    assert message.startswith("12 of 13 clips cannot be used:\n") and message.count("\n") == 13
    for path in paths:
        assert f"\n  {path.name} (row 7) " in message
    for name in ("empty", "text", "middle"):
        assert f"{name}.mp4 (row 7) cannot be used: it is no video that FFmpeg can read, or is cut off, dam" in message
    assert "sound.mp4 (row 7) cannot be used: it has no video stream" in message
    assert "missing.mp4 (row 7) cannot be used: there is no such file." in message
    # FFmpeg writes its own complaints to stderr, unless it is told not to.
    assert capfd.readouterr() == ("", "")


def test_a_cover_image_is_no_video(tmp_path):
    """What music files have: an image in a stream of its own."""
    image = io.BytesIO()
    Image.new("RGB", (64, 64)).save(image, "PNG")
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=1)
        stream.width = stream.height = 64
        stream.pix_fmt = "rgb24"
        stream.disposition = av.stream.Disposition.attached_pic
        packet = av.Packet(image.getvalue())
        packet.stream, packet.pts, packet.dts, packet.time_base = stream, 0, 0, Fraction(1)
        container.mux(packet)
    assert "a.mp4 cannot be used: it has no video stream" in refused(path)


def test_a_colour_profile_in_the_frames_does_not_end_the_process(tmp_path):
    """PyAV frees its name twice once side data is listed; here in a process of its own, with the heap checked."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    image = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 100, 50)).save(image, "PNG", icc_profile=profile)
    path = tmp_path / "a.mov"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=16)
        stream.width = stream.height = 64
        stream.pix_fmt = "rgb24"
        for n in range(5):
            packet = av.Packet(image.getvalue())
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, n, n, Fraction(1, 16)
            packet.is_keyframe = True
            container.mux(packet)
    script = "import sys; from dataset.videos import measure; print(measure(sys.argv[1], 'a.mov', 16)['size'])"
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "165"}
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "(64, 64)\n"), done.stderr
    assert load(path)[1][:, 32, 32].tolist() == [[200, 100, 50]] * 5


@pytest.mark.parametrize("size", [(65535, 65535), (8193, 4320), (8192, 4321)])
def test_frames_larger_than_8k_are_refused_by_name(tmp_path, size):
    """The header of the container says so, or in Motion JPEG that of a frame."""
    data = bytearray(write_clip(tmp_path / "a.avi", greys(5), 16, "rawvideo", "bgr24").read_bytes())
    start = data.index(b"strf") + 12
    # From top to bottom, which a negative height says.
    assert struct.unpack_from("<2i", data, start) == (64, -64)
    struct.pack_into("<2i", data, start, size[0], -size[1])
    (tmp_path / "a.avi").write_bytes(data)
    message = refused(tmp_path / "a.avi")
    assert "a.avi cannot be used: it is no video that FFmpeg can read, or is cut off, damaged or of more" in message

    data = bytearray(write_clip(tmp_path / "b.avi", greys(5), 16, "mjpeg", "yuvj420p").read_bytes())
    start = data.index(b"\xff\xc0") + 5
    assert struct.unpack_from(">2H", data, start) == (64, 64)
    struct.pack_into(">2H", data, start, *size[::-1])
    (tmp_path / "b.avi").write_bytes(data)
    assert "b.avi cannot be used: " in refused(tmp_path / "b.avi")


def test_pixels_that_would_be_stretched_over_more_than_8k_are_refused(tmp_path):
    def wide(stream):
        stream.codec_context.sample_aspect_ratio = 2

    path = write_clip(tmp_path / "a.mov", greys(5), 16, "mjpeg", "yuvj420p", setup=wide)
    assert inspect(path)[0]["source"]["size"] == [128, 64]
    data = bytearray(path.read_bytes())
    struct.pack_into(">2I", data, data.index(b"pasp") + 4, 30000, 1)
    path.write_bytes(data)
    assert "a.mov cannot be used: its frames have 1920000x64 pixels, and at most" in refused(path)


def test_frames_that_are_days_apart_are_refused(tmp_path):
    hours = [0, 1, 2, 3, 30]
    path = write_clip(tmp_path / "a.mp4", greys(5), Fraction(1, 3600), "libx264", "yuv420p", times=hours)
    assert "a.mp4 cannot be used: by the times of its frames it lasts more than a day" in refused(path)
    path = write_clip(tmp_path / "a.mp4", greys(5), Fraction(1, 3600), "libx264", "yuv420p", times=[0, 1, 2, 3, 20])
    assert inspect(path, clip_part="random")[0]["used"]["frames"] == 81


def test_more_packets_than_bytes_are_not_waited_for(tmp_path):
    """In mp4 chunks of many packets may all lie at the same place: half a million packets in 25 kB."""
    path = write_clip(tmp_path / "a.mp4", greys(5), 16, "libx265", "yuv420p", {"x265-params": "log-level=none"})
    data = bytearray(path.read_bytes())
    num_chunks, num_packets = 5000, 100
    struct.pack_into(">2I", data, data.index(b"stsz") + 8, 1, num_chunks * num_packets)
    struct.pack_into(">I", data, data.index(b"stsc") + 16, num_packets)
    place = data.index(b"stco") + 12
    data[place - 4 : place + 4] = struct.pack(">I", num_chunks) + data[place : place + 4] * num_chunks
    for box in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stco"):
        start = data.index(box) - 4
        (num_bytes,) = struct.unpack_from(">I", data, start)
        struct.pack_into(">I", data, start, num_bytes + 4 * (num_chunks - 1))
    path.write_bytes(data)
    assert "a.mp4 cannot be used: it claims to hold more packets than it has bytes." in refused(path)


def test_what_it_is_decides_and_not_its_name(tmp_path):
    clip = write_clip(tmp_path / "a.mp4", greys(5), 16, "libx264", "yuv420p")
    clip.rename(tmp_path / "clip.jpg")
    assert "clip.jpg is not an image that Pillow can read" in refused(tmp_path / "clip.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (96, 64)).save(tmp_path / "image.mp4", "JPEG", exif=exif)
    assert inspect(tmp_path / "image.mp4")[0]["source"] == {"size": [64, 96], "frames": 1, "fps": None}
    write_clip(tmp_path / "a.gif", greys(5), 16, "gif", "gray").rename(tmp_path / "gif.png")
    assert indices(load(tmp_path / "gif.png")[1]) == list(range(5))


@pytest.mark.parametrize(
    ("suffix", "codec"),
    [
        *((suffix, "libx264") for suffix in (".ts", ".mts", ".m2ts", ".flv", ".f4v", ".3gp", ".3g2", ".m4v", ".asf")),
        *((suffix, "mpeg2video") for suffix in (".mpg", ".mpeg", ".vob", ".m2v")),
        *((suffix, "wmv2") for suffix in (".wmv",)),
        *((suffix, "libx265") for suffix in (".hevc",)),
        *((suffix, "libvpx") for suffix in (".ogv",)),
    ],
)
def test_every_ending_that_can_be_read_is_an_item(tmp_path, suffix, codec):
    options = QUICK if codec == "libvpx" else {}
    write_clip(tmp_path / f"a{suffix}", [noise(64, 64)] * 5, 25, codec, "yuv420p", options)
    (tmp_path / "a.txt").write_text("a caption")
    (row,) = read_rows(tmp_path, media_suffixes=(*VIDEO_SUFFIXES, *IMAGE_SUFFIXES))
    assert (row.id, row.caption, row.problem) == (f"a{suffix}", "a caption", None)
    assert load(row, fps=25)[0]["used"]["frames"] == 5


HEIF = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


def test_other_media_are_bad_items_by_name(tmp_path):
    """A HEIF image is one also where FFmpeg would read it, here the frames of a clip under its brand."""
    clip = write_clip(tmp_path / "source.mp4", greys(5), 16, "libx265", "yuv420p").read_bytes()
    files = {"a.heic": HEIF + clip[24:], "b.psd": b"8BPS" + bytes(100), "c.mxf": bytes(100), "d.jpg": HEIF + clip[24:]}
    (tmp_path / "source.mp4").unlink()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).with_suffix(".txt").write_text("a caption")
    rows = read_rows(tmp_path, media_suffixes=(*VIDEO_SUFFIXES, *IMAGE_SUFFIXES))
    message = refused(*rows, row_of(files["a.heic"], "train/0"))
    for line in (
        "a.heic is not an image that Pillow can read; save HEIF",
        "b.psd is not an image that Pillow can read",
        "c.mxf cannot be used: it is no video that FFmpeg can read",
        "d.jpg is not an image that Pillow can read; save HEIF",
        "train/0 is not an image that Pillow can read; save HEIF",
    ):
        assert line in message


def test_a_frame_that_cannot_be_read_is_not_passed_over(tmp_path):
    folder = tmp_path / "frames"
    folder.mkdir()
    for n in range(5):
        Image.new("RGB", (64, 64)).save(folder / f"{n}.png")
    (folder / "5.heic").write_bytes(HEIF)
    (tmp_path / "frames.txt").write_text("a caption")
    (row,) = read_rows(tmp_path, media_suffixes=(*VIDEO_SUFFIXES, *IMAGE_SUFFIXES))
    assert "frames: 5.heic is not an image that Pillow can read; save HEIF" in refused(row)


@pytest.mark.parametrize("text", ["#EXTM3U\n#EXTINF:1,\n/etc/{}\n", "ffconcat version 1.0\nfile {}\n"])
def test_playlists_are_not_followed(tmp_path, text):
    path = write_clip(tmp_path / "other.mp4", greys(5), 16, "libx264", "yuv420p")
    (tmp_path / "a.mp4").write_text(text.format(path.name))
    assert "a.mp4 cannot be used: it is no video that FFmpeg can read" in refused(tmp_path / "a.mp4")


SEEDS = {}


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.sampled_from([name for name in WHOLE if name != "intra.mkv"]), st.data())
def test_damaged_files_decode_or_are_refused(tmp_path_factory, name, data):
    if name not in SEEDS:
        SEEDS[name] = whole_file(tmp_path_factory.mktemp("seeds"), name).read_bytes()
    damaged = bytearray(SEEDS[name])
    # Half of the damage in the head, where the structure is.
    last = data.draw(st.sampled_from([min(1000, len(damaged) - 1), len(damaged) - 1]))
    for _ in range(data.draw(st.integers(0, 5))):
        damaged[data.draw(st.integers(0, last))] = data.draw(st.integers(0, 255))
    damaged = bytes(damaged[: data.draw(st.integers(0, len(damaged)))] if data.draw(st.booleans()) else damaged)
    row = row_of(damaged, "train/0")
    try:
        (record,) = inspect(row, num_frames=9, clip_part="middle")
        assert read_clip(row, record).shape == (3, record["used"]["frames"], 64, 64)
    except RefusedError as error:
        assert "train/0" in str(error)


def test_files_are_closed(tmp_path):
    clips = [write_clip(tmp_path / f"a.{container}", greys(5), 16, *CONTAINERS[container]) for container in CONTAINERS]
    records = inspect(*clips, num_frames=1)
    bad = [path for path in bad_files(tmp_path) if path.name != "image.png"]

    def num_open_files():
        return len(os.listdir("/proc/self/fd"))

    before = num_open_files()
    for n in range(200):
        read_clip(row_of(clips[n % len(clips)]), records[n % len(clips)])
        with pytest.raises(RefusedError):
            videos.measure(bad[n % len(bad)], "name", 16)
    assert num_open_files() == before


def test_names_mean_nothing_to_ffmpeg(tmp_path):
    """It takes a part before a colon for a protocol, and %d for a number."""
    for name in ("http:a.mp4", "concat:a|b.mp4", "%03d.mp4", "é #1 [x].mp4", "-i.mp4", "no suffix"):
        write_clip(tmp_path / "a.mp4", greys(5), 16, "libx264", "yuv420p").rename(tmp_path / name)
        assert indices(load(tmp_path / name)[1]) == list(range(5))


def test_tags_in_other_encodings_do_not_matter(tmp_path):
    path = write_clip(
        *(tmp_path / "a.avi", greys(5), 16, "mpeg4", "yuv420p"),
        setup=lambda stream: stream.container.metadata.update(title="XXXX"),
    )
    assert b"XXXX" in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(b"XXXX", b"caf\xe9"))
    assert indices(load(path)[1]) == list(range(5))


# Reading


def test_reading_stops_at_the_last_frame_and_converts_only_what_it_takes(tmp_path, monkeypatch):
    path = write_clip(tmp_path / "a.mp4", greys(9) * 9, 32, "libx264", "yuv420p")
    decoded, converted = [], []
    frames, to_image = videos._frames, videos._to_image

    def count_frames(*args):
        for frame in frames(*args):
            decoded.append(frame[1])
            yield frame

    monkeypatch.setattr(videos, "_frames", count_frames)
    monkeypatch.setattr(videos, "_to_image", lambda *args: converted.append(1) or to_image(*args))
    (record,) = inspect(path, num_frames=5)
    assert len(decoded) == 81 and len(converted) == 1, "for its size"
    converted.clear()
    read_clip(row_of(path), record)
    assert len(decoded) == 81 + 9 and len(converted) == 5
    # A repeated frame is converted once.
    (record,) = inspect(path, num_frames=9, fps=64)
    converted.clear()
    read_clip(row_of(path), record)
    assert record["used"]["source_frames"] == [0, 0, 1, 1, 2, 2, 3, 3, 4] and len(converted) == 5


def test_threads_make_no_difference(tmp_path, monkeypatch):
    frames = [np.random.default_rng(n).integers(0, 256, (64, 96, 3), dtype=np.uint8) for n in range(17)]
    paths = [
        write_clip(tmp_path / f"{n}.{container}", frames[n:], 16, *CONTAINERS[container])
        for n, container in enumerate(["mp4", "mkv", "webm", "avi"])
    ]
    together = inspect(*paths)
    assert together == [record for path in paths for record in inspect(path)]
    clips = [read_clip(row_of(path), record) for path, record in zip(paths, together, strict=True)]
    open_video = videos._open_video
    for num_threads in (1, 2, 5):
        monkeypatch.setattr(
            videos,
            "_open_video",
            lambda media, name, num_threads=None, fixed=num_threads: open_video(media, name, fixed),
        )
        for path, record, clip in zip(paths, together, clips, strict=True):
            assert torch.equal(read_clip(row_of(path), record), clip)


def test_a_file_that_was_changed_is_refused(tmp_path):
    path = write_clip(tmp_path / "a.mkv", greys(9))
    (record,) = inspect(path)
    write_clip(path, greys(6))
    with pytest.raises(RefusedError, match="a.mkv ends before frame 8: it was changed since it was inspected"):
        read_clip(row_of(path), record)
    path.unlink()
    with pytest.raises(RefusedError, match="a.mkv cannot be used: there is no such file"):
        read_clip(row_of(path), record)


def test_endings_of_clips_are_those_of_the_containers_that_are_read():
    """Of FFmpeg's, which has none for some; without those of sound, subtitles, servers, images and an old encoder."""
    found = {
        f".{ending}" for name in videos.CONTAINERS.split(",") for ending in av.ContainerFormat(name, "r").extensions
    }
    others = {".avif", ".h26l", ".heic", ".heif", ".ism", ".isma", ".m4a", ".m4b", ".mka", ".mks", ".ogg", ".psp"}
    assert found - others <= set(VIDEO_SUFFIXES) and ".mkv" in found


def test_a_dataset_of_every_kind_of_clip(tmp_path):
    """From the folder to the pixels, with the reader of datasets in front."""
    (tmp_path / "sub").mkdir()
    write_clip(tmp_path / "sub" / "é.mp4", greys(5), 16, "libx264", "yuv420p")
    write_clip(tmp_path / "b.GIF", greys(5), 16, "gif", "gray", file_format="gif")
    Image.fromarray(greys(5)[4]).save(tmp_path / "c.png")
    (tmp_path / "d").mkdir()
    for n, frame in enumerate(greys(9)):
        Image.fromarray(frame).save(tmp_path / "d" / f"{n}.png")
    for name in ("sub/é", "b", "c", "d"):
        (tmp_path / f"{name}.txt").write_text(f"caption of {name}")
    suffixes = tuple(sorted({*VIDEO_SUFFIXES, *IMAGE_SUFFIXES}))
    rows = read_rows(tmp_path, media_suffixes=suffixes)
    assert [(row.id, row.caption) for row in rows] == [
        ("b.GIF", "caption of b"),
        ("c.png", "caption of c"),
        ("d", "caption of d"),
        ("sub/é.mp4", "caption of sub/é"),
    ]
    found = {row.id: indices(load(row)[1]) for row in rows}
    assert found == {"b.GIF": [0, 1, 2, 3, 4], "c.png": [4], "d": list(range(9)), "sub/é.mp4": [0, 1, 2, 3, 4]}
