"""Decodes clips and brings them to the length, rate and size they train at: file -> frames -> (3, F, H, W) tensor.

A clip is a video file, an animated gif, a folder of frames, or a picture, which is a clip of one frame. What a
container says about its frames is often wrong, so they are decoded and counted, and their times are read, once before
a model loads. From then on the record of a clip names its frames.
"""

import contextlib
import io
import itertools
import logging
import math
import os
import re
from functools import partial
from pathlib import Path

import av
import numpy as np
import torch
from av.video.reformatter import ColorRange, Colorspace, Interpolation
from PIL import Image

from dataset.colours import UNSTATED, expand_range, profile_of_numbers
from dataset.draws import keyed_draw
from dataset.images import PICTURE_FORMATS, cover_and_crop, is_heif, on_white, open_image, to_srgb, to_tensor
from dataset.inspection import Inspector, dropped_record, inspect_each
from dataset.metadata import FOREIGN_IMAGE_SUFFIXES, IMAGE_SUFFIXES, first_five, frame_names
from dataset.settings import round_down_frames
from runtime.errors import RefusedError


logger = logging.getLogger(__name__)

# FFmpeg also knows pictures, playlists that name other files, text, and raw data.
CONTAINERS = "asf,avi,flv,gif,h264,hevc,m4v,matroska,mov,mpeg,mpegts,mpegvideo,ogg"
# 8K, as large as cameras record it: a decoder holds up to 17 frames, and a false header may say anything.
MAX_FRAME_PIXELS = 8192 * 4320
LIMITS = {"max_pixels": str(MAX_FRAME_PIXELS)}
# Frames that are days apart are no clip, and their times are damaged.
MAX_SECONDS = 24 * 60 * 60

# Numbers of ITU-T H.273, which files carry, to swscale's: two of them are BT.601.
MATRICES = {
    1: Colorspace.ITU709,
    4: Colorspace.FCC,
    5: Colorspace.ITU601,
    6: Colorspace.ITU601,
    7: Colorspace.SMPTE240M,
    9: Colorspace.BT2020,
}
UNTAGGED_MATRIX = 2
# The display matrices (a, b, c, d) of turns to the left, by their degrees.
TURNS = {0: (1, 0, 0, 1), 90: (0, -1, 1, 0), 180: (-1, 0, 0, -1), 270: (0, 1, -1, 0)}

# The exact arithmetic of swscale, with chroma interpolated in both directions; its default rounds and repeats.
SWSCALE_FLAGS = (
    Interpolation.BICUBIC
    | Interpolation.FULL_CHR_H_INT
    | Interpolation.FULL_CHR_H_INP
    | Interpolation.ACCURATE_RND
    | Interpolation.BITEXACT
)

# A frame that comes late by up to this part of the mean interval, and half a millisecond, to which mkv rounds, counts.
LATE = 0.25
LATE_SECONDS = 0.0005


def inspect_clips(rows, sizing, *, fps, clip_part, min_frames=1, **how):
    """Decodes and counts every clip once, so that a bad one is known before a model loads, and chooses its frames.

    Frame k of what is trained on shows what the source shows at k / `fps` seconds from the start of the part: faster
    sources are thinned out, frames of slower ones are repeated. A folder of frames is taken to be at `fps` already.

    Args:
        rows: A list of `dataset.metadata.Row`.
        sizing: A `dataset.buckets.Sizing`. Its seed is also that of random parts.
        fps: Frames per second to train at.
        clip_part: What to use of a clip with more frames: "start", "middle", or "random", one draw for each id.
        min_frames: Clips with fewer frames are dropped.
        how: `on_bad_sample`, `cache` and `accelerator` of `dataset.inspection.inspect_each`.

    Returns:
        A list of `dataset.inspection.Item`. In a record `used` is None where `decision` is "dropped", and holds
        `size` (width, height), `frames`, `fps` and `source_frames`, the index of each used frame in its source, where
        it is "used". `reason` says what was changed, or why the clip was dropped.

    Raises:
        RefusedError: If clips are bad, or all are dropped; lists all of them with their reasons.
    """
    assert clip_part in ("start", "middle", "random"), clip_part
    decide = partial(_decide, sizing=sizing, fps=fps, clip_part=clip_part, min_frames=min_frames)
    # Few threads: a decoder holds up to 17 frames of the source's size.
    inspector = Inspector("clips", partial(_measure, fps=fps), f"clip at {fps:g} fps", decide, max_threads=8)
    items = inspect_each(rows, inspector, **how)

    used = [record for _, record, _ in items if record["decision"] == "used"]
    slow = [
        f"{record['id']}: {record['source']['fps']:g} fps"
        for record in used
        if len(set(record["used"]["source_frames"])) * 2 < record["used"]["frames"]
    ]
    if slow:
        listed = first_five(slow)
        logger.warning("Of %d clips each frame is shown more than twice at %g fps:\n%s", len(slow), fps, listed)
    changed = [f"{record['id']}: {record['reason']}" for record in used if record["reason"] is not None]
    if changed:
        logger.info("%d of %d clips are shortened or retimed:\n%s", len(changed), len(items), first_five(changed))
    return items


def _measure(content, name, fps):
    """Returns what `measure` does as a value that JSON takes, and that is short where frames come regularly."""
    size, times, duration, source_fps = measure(content, name, fps)
    regular = np.linspace(times[0], times[-1], len(times))
    if np.abs(regular - times).max() < 1e-6:
        times = [times[0], times[-1]]
    return {"size": size, "times": times, "num_frames": len(regular), "duration": duration, "fps": source_fps}


def _decide(row, measured, *, sizing, fps, clip_part, min_frames):
    """Returns the record of a row; raises RefusedError."""
    size, times, num_frames = measured["size"], measured["times"], measured["num_frames"]
    if len(times) <= 2:
        times = np.linspace(times[0], times[-1], num_frames)
    record = dropped_record(row, {"size": list(size), "frames": num_frames, "fps": measured["fps"]})

    late = LATE * (times[-1] - times[0]) / max(1, num_frames - 1)
    late += min(LATE_SECONDS, late)
    # The second number is larger by one where the clip ends with half a frame: 17 frames at 32 fps are 9 at 16. A
    # single frame is a picture, however long it is shown.
    last = math.floor((times[-1] - times[0] + late) * fps)
    available = max(round(measured["duration"] * fps), last + 1) if num_frames > 1 else 1
    if num_frames == 1 < min_frames:
        record["reason"] = "a single frame cannot be used for image-to-video"
        return record
    if round_down_frames(available) < min_frames:
        rounded = "" if available % 4 == 1 else f", rounded down to {round_down_frames(available)} (4n + 1)"
        record["reason"] = f"{available} frames at {fps:g} fps{rounded}; at least {min_frames} are needed"
        return record

    chosen = sizing.choose(row.id, *size, available)
    if isinstance(chosen, str):
        record["reason"] = chosen
        return record
    height, width, most_frames, batch_size = chosen
    num_used = round_down_frames(min(most_frames, available))
    spare = available - num_used
    if clip_part == "random":
        first = int(keyed_draw(sizing.seed, row.id).integers(spare + 1))
    else:
        first = spare // 2 if clip_part == "middle" else 0
    shown = times[0] + (first + np.arange(num_used)) / fps
    source_frames = np.searchsorted(times, shown + late, side="right") - 1
    record["decision"] = "used"
    record["used"] = {"size": [width, height], "frames": num_used, "fps": fps, "source_frames": source_frames.tolist()}
    if batch_size is not None:
        record["used"]["batch_size"] = batch_size

    changes, steps = [], np.diff(source_frames)
    if (steps != 1).any():
        repeated = ", frames repeated" if (steps == 0).any() else ""
        changes.append(f"retimed from {measured['fps']:g} to {fps:g} fps{repeated}")
    if spare and num_used < most_frames:
        changes.append(f"{available} frames, rounded down to {num_used} (4n + 1)")
    elif spare:
        where = f"at random, from frame {first}" if clip_part == "random" else f"from the {clip_part}"
        changes.append(f"{num_used} of {available} frames, {where}")
    record["reason"] = "; ".join(changes) or None
    return record


def read_clip(row, record):
    """Reads the frames that the record of a clip names, at the size that it names.

    Args:
        row: A `dataset.metadata.Row`.
        record: Its record from `inspect_clips`, not dropped.

    Returns:
        A contiguous float32 tensor (3, F, H, W) in [-1, 1].

    Raises:
        RefusedError: If the file is no longer what was inspected.
    """
    used = record["used"]
    width, height = used["size"]
    positions = {}
    for position, index in enumerate(used["source_frames"]):
        positions.setdefault(index, []).append(position)

    pixels = torch.empty(3, used["frames"], height, width)
    missing = set(positions)
    for index, image in _images_at(row.content, row.name, missing.copy()):
        pixels[:, positions[index]] = to_tensor(cover_and_crop(image, height, width))[:, None]
        missing.discard(index)
    if missing:
        raise RefusedError(f"{row.name} ends before frame {min(missing)}: it was changed since it was inspected.")
    return pixels


# Kinds of clips


def _kind(media):
    """Returns "picture", "folder" or "video"."""
    embedded = isinstance(media, bytes)
    if not embedded and os.path.isdir(media):
        return "folder"
    suffix = "" if embedded else os.path.splitext(media)[1].lower()
    if embedded or os.path.isfile(media):
        with contextlib.suppress(Exception):  # as in open_image; who reads it next says what is wrong
            with Image.open(io.BytesIO(media) if embedded else media, formats=PICTURE_FORMATS) as image:
                return "video" if image.format == "GIF" else "picture"
        with contextlib.suppress(OSError):
            # FFmpeg would take the tiles that it is made of for frames.
            if is_heif(media):
                return "picture"
    # The name decides on what is neither.
    return "picture" if suffix in (*IMAGE_SUFFIXES, *FOREIGN_IMAGE_SUFFIXES) and suffix != ".gif" else "video"


def _frame_files(folder, name):
    """Returns the paths of the pictures in a folder, numbers in their names in the order of their values."""
    try:
        files = frame_names(folder)
    except OSError as error:
        raise RefusedError(f"{name} cannot be read: {error.strerror}.") from error
    if not files:
        raise RefusedError(f"{name} is a folder without pictures ({', '.join(IMAGE_SUFFIXES)}).")

    def natural(file):
        # Digits stand at the odd places, so that numbers are compared with numbers only.
        parts = re.split(r"([0-9]+)", file)
        return [int(part) if n % 2 else part for n, part in enumerate(parts)], file

    return [Path(folder, file) for file in sorted(files, key=natural)]


def measure(media, name, fps):
    """Decodes a clip completely, keeping no pixels.

    Args:
        media: Of the row.
        name: How messages call the clip.
        fps: The rate that folders of frames are taken to have.

    Returns:
        The upright size as displayed (width, height); the times of the frames in seconds, sorted; the duration in
        seconds, from the first frame to the end of the last; frames per second, None for pictures.
    """
    kind = _kind(media)
    if kind == "picture":
        return open_image(media, name).size, [0.0], 1 / fps, None
    if kind == "folder":
        files = _frame_files(media, name)
        sizes = [open_image(file, f"{name}: {file.name}").size for file in files]
        for file, size in zip(files, sizes, strict=True):
            if size != sizes[0]:
                raise RefusedError(
                    f"{name}: {file.name} is {size[0]}x{size[1]}, but {files[0].name} is {sizes[0][0]}x{sizes[0][1]}; "
                    "frames of one clip must have one size."
                )
        return sizes[0], [k / fps for k in range(len(files))], len(files) / fps, None

    times, size, stored, last_duration = [], None, None, 0.0
    # One thread for each clip: several are inspected at a time.
    with _open_video(media, name, num_threads=1) as (container, stream, stated):
        for frame, time, duration in _frames(container, stream):
            if stored is None:
                stored, size = (frame.width, frame.height), _display_size(frame, stream)
            if stored != (frame.width, frame.height):
                raise ValueError(
                    f"its size changes from {stored[0]}x{stored[1]} to {frame.width}x{frame.height} "
                    f"at frame {len(times)}, and all frames must have one size"
                )
            _colours(frame, stream, stated)
            times.append(time)
            last_duration = duration
        if not times:
            raise ValueError("no frame of it can be decoded")
        if max(times) - min(times) + last_duration > MAX_SECONDS:
            raise ValueError("by the times of its frames it lasts more than a day")
        nominal_rate, tick = _nominal_rate(stream), float(stream.time_base)
    # Decoders give frames in the order in which they are shown, whatever the container made of their times: avi holds
    # no times, and those that FFmpeg makes up for h264 in it are not in order.
    times.sort()
    span, num_intervals = times[-1] - times[0], len(times) - 1
    if num_intervals and not span:
        times = [k / nominal_rate for k in range(len(times))]
        span = times[-1]
    rate = num_intervals / span if num_intervals else nominal_rate
    # The container's word for it where its times say the same, as far as they can: mkv rounds to milliseconds.
    if tick * rate < 0.1 and abs(num_intervals / nominal_rate - span) <= tick:
        rate = nominal_rate
    # Some files give the last frame no duration of its own, and it is shown nevertheless.
    return size, times, span + max(last_duration, min(1 / rate, 1 / fps)), round(rate, 3)


def _images_at(media, name, wanted):
    """Yields (index, picture) for the frames with these indices, upright as displayed, decoding no further."""
    kind = _kind(media)
    if kind != "video":
        files = [media] if kind == "picture" else _frame_files(media, name)
        for index in sorted(wanted):
            if index < len(files):
                yield index, open_image(files[index], name if kind == "picture" else f"{name}: {files[index].name}")
        return
    last = max(wanted)
    with _open_video(media, name, num_threads=0) as (container, stream, stated):
        for index, (frame, _, _) in enumerate(_frames(container, stream)):
            if index in wanted:
                yield index, _to_image(frame, stream, stated)
            if index == last:
                return


# Video files


@contextlib.contextmanager
def _open_video(media, name, num_threads):
    """Context that opens a video for decoding, closes it, and names it in every error in between.

    Args:
        media: The path or the bytes.
        name: How messages call it.
        num_threads: Threads of the decoder, 0 for as many as it likes.

    Yields:
        The `av` container, its video stream, and what the container says of its colours; see `_stated`.
    """
    try:
        if not isinstance(media, bytes) and not os.path.isfile(media):
            raise ValueError("there is no such file")
        # Not by its name, in which FFmpeg would look for protocols and patterns.
        with io.BytesIO(media) if isinstance(media, bytes) else open(media, "rb") as file:
            num_bytes = file.seek(0, os.SEEK_END)
            if not num_bytes:
                raise ValueError("it is empty (0 bytes)")
            if _ends_early(file, num_bytes):
                raise ValueError("it is cut off: the file ends before its contents do")
            file.seek(0)
            try:
                container = av.open(
                    file, metadata_errors="replace", options={"format_whitelist": CONTAINERS, **LIMITS}
                )
            except av.FFmpegError as error:
                raise RefusedError(f"{name} is not a video that FFmpeg can read ({num_bytes} bytes).") from error
            with container:
                stream = container.streams.best("video")
                if stream is None or stream.disposition & av.stream.Disposition.attached_pic:
                    raise ValueError("it has no video stream")
                if stream.codec_context is None:
                    raise ValueError("its codec is not one that FFmpeg can decode")
                # Those of the container are for the look that FFmpeg takes at the first frames in opening it.
                stream.codec_context.options = LIMITS
                stream.codec_context.thread_count = num_threads
                stream.codec_context.thread_type = "AUTO"
                # Before a decoder puts its own word in the place of the container's.
                yield container, stream, _stated(stream.codec_context)
    except av.FFmpegError as error:
        raise RefusedError(f"{name} cannot be used: FFmpeg says {error.strerror!r}.") from error
    except (OSError, ValueError) as error:
        if isinstance(error, RefusedError):
            raise
        raise RefusedError(f"{name} cannot be used: {error}.") from error


def _frames(container, stream):
    """Yields (frame, time in seconds, duration in seconds or 0) in the order in which frames are shown."""
    decoder = _decoder(stream)
    interval = 1 / _nominal_rate(stream)
    time = -interval
    index = 0

    for num_packets, packet in enumerate(itertools.chain(container.demux(stream), [None])):
        # A false number in a header of 100 bytes would be good for hours.
        if num_packets > container.size:
            raise ValueError("it claims to hold more packets than it has bytes")
        # An empty packet repeats a frame, in avi, and would end decoding here. None ends it.
        if packet is not None and not packet.size:
            continue
        try:
            frames = decoder.decode(packet)
        except av.FFmpegError as error:
            if not stream.codec_context.width:
                limit = f"no size, or more than {MAX_FRAME_PIXELS} pixels"
                raise ValueError(f"by its header its frames have {limit}") from error
            raise ValueError(f"it is damaged near frame {index} (FFmpeg says {error.strerror!r})") from error
        for frame in frames:
            if frame.is_corrupt:
                raise ValueError(f"it is damaged or cut off at frame {index}")
            time = time + interval if frame.pts is None else float(frame.pts * stream.time_base)
            yield frame, time, float((frame.duration or 0) * stream.time_base)
            index += 1


def _nominal_rate(stream):
    """Returns frames per second as the container has them: right on average, or a guess."""
    return next(float(rate) for rate in (stream.average_rate, stream.guessed_rate, 25) if rate and rate > 0)


def _decoder(stream):
    # FFmpeg's own decoders of VP8 and VP9 leave transparency out.
    libvpx = {"vp8": "libvpx", "vp9": "libvpx-vp9"}.get(stream.codec_context.name)
    if libvpx is None or stream.metadata.get("alpha_mode") != "1":
        return stream.codec_context
    decoder = av.CodecContext.create(libvpx, "r")
    decoder.options = LIMITS
    decoder.extradata = stream.codec_context.extradata
    return decoder


def _ends_early(file, num_bytes):
    """Tells whether a container says that it is longer than the file, which FFmpeg passes over in silence.

    Frames that are missing at the end of avi, gif, mkv and webm files are no error for it.
    """

    def read(position, count):
        file.seek(position)
        return file.read(count)

    head = read(0, 12)
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return _matroska_ends_early(read, num_bytes)
    if head[:3] == b"GIF":
        return _gif_ends_early(read, num_bytes)
    if head == b"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\x00\xaa":
        # Of ASF the properties hold it, 0 in streams.
        place = read(0, 65536).find(b"\xa1\xdc\xab\x8c\x47\xa9\xcf\x11\x8e\xe4\x00\xc0\x0c\x20\x53\x65")
        return place >= 0 and int.from_bytes(read(place + 40, 8), "little") > num_bytes
    position = 0
    if head[:4] == b"RIFF":
        # One chunk, and more of them above 1 GB. Recorders that crashed, and streams, leave 0 or the largest number.
        while read(position, 4) == b"RIFF":
            size = int.from_bytes(read(position + 4, 4), "little")
            if size in (0, 2**32 - 1):
                return False
            position += 8 + size + size % 2
        # Some count the 8 bytes of the chunk's own head.
        return position > num_bytes + 9
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        while position + 8 <= num_bytes:
            box = read(position, 16)
            size = int.from_bytes(box[:4], "big")
            if size == 1:
                size = int.from_bytes(box[8:], "big")
            # 0 is "to the end"; a smaller box than its own head is no box but a tail of something else.
            if size < 8:
                return False
            position += size
            if position > num_bytes and box[4:8] in (b"mdat", b"moov", b"moof"):
                return True
    return False


def _matroska_ends_early(read, num_bytes):
    def element_size(position):
        """Returns the size of the element's content, None if unknown, and where that begins."""
        data = read(position, 8).ljust(8, b"\0")
        num_size_bytes = 9 - data[0].bit_length()
        value = int.from_bytes(data[:num_size_bytes], "big") & ((1 << 7 * num_size_bytes) - 1)
        unknown = value == (1 << 7 * num_size_bytes) - 1
        return None if unknown else value, position + num_size_bytes

    size, position = element_size(4)
    position += size or 0
    # What follows the header is the segment, which is all of the file.
    if read(position, 4) != b"\x18\x53\x80\x67":
        return False
    size, position = element_size(position + 4)
    return size is not None and position + size > num_bytes


def _gif_ends_early(read, num_bytes):
    def colour_table_bytes(flags):
        return 3 << (flags & 7) + 1 if flags & 0x80 else 0

    head = read(0, 13).ljust(13, b"\0")
    position = 13 + colour_table_bytes(head[10])
    while position < num_bytes:
        block = read(position, 10).ljust(10, b"\0")
        if block[0] == 0x3B:
            return False
        if block[0] == 0x2C:
            position += 11 + colour_table_bytes(block[9])
        elif block[0] == 0x21:
            position += 2
        else:
            return False
        while size := int.from_bytes(read(position, 1), "big"):
            position += 1 + size
        position += 1
    return True


# Frames


def _stated(of):
    """Returns what a codec context or a frame says: primaries, curve, matrix and range, as numbers of ITU-T H.273."""
    return of.color_primaries, of.color_trc, of.colorspace, of.color_range


def _side_data(frame, stream):
    """Returns what comes with a frame beside its pixels, by its type, or None where that cannot be listed."""
    # PyAV 18 frees what the decoder of PNG says of a colour profile a second time, once it has listed it, which ends
    # the process.
    if stream.codec_context.name not in ("apng", "png"):
        # It lists none where one is of a kind that it does not know, as EXIF in Motion JPEG.
        with contextlib.suppress(ValueError):
            return {data.type.name: data for data in frame.side_data}
    return None


def _colours(frame, stream, stated):
    """Returns how a frame's colours become sRGB.

    Args:
        frame: Decoded.
        stream: It is of.
        stated: What the container says, which some decoders drop, and others put in the place of what the stream says.

    Returns:
        Their ICC profile, empty or None for sRGB; swscale's number of their matrix, None where they have none; their
        range.
    """
    primaries, curves, matrices, ranges = zip(stated, _stated(frame), strict=True)
    primaries, curves = ({number for number in numbers if number not in UNSTATED} for numbers in (primaries, curves))
    profiles = {profile_of_numbers(*numbers) for numbers in itertools.product(primaries or {2}, curves or {2})}
    # An embedded profile counts more, as in images.
    if embedded := (_side_data(frame, stream) or {}).get("ICC_PROFILE"):
        profiles = {bytes(embedded)}
    if len(profiles) > 1:
        raise ValueError("its container and its stream say different things of its primaries or transfer curve")
    # Of these two the container's word counts more, as the standards of containers have it.
    matrix = matrices[0] if matrices[0] != UNTAGGED_MATRIX else matrices[1]
    color_range = ranges[0] or ranges[1]
    if frame.format.is_rgb or frame.format.has_palette or len(frame.format.components) < 3:
        # Grey has no matrix, but may be tagged as RGB. Where HEVC says nothing, its decoder says the limited range, to
        # which encoders do not convert grey.
        if stream.codec_context.name == "hevc" and not frame.format.is_rgb:
            color_range = ColorRange.JPEG
        return profiles.pop(), None, color_range or ColorRange.JPEG
    if frame.format.name.startswith("yuvj"):
        color_range = ColorRange.JPEG
    color_range = color_range or ColorRange.MPEG
    if matrix == UNTAGGED_MATRIX:
        # As players guess: high definition is BT.709.
        return profiles.pop(), Colorspace.ITU709 if frame.height >= 720 else Colorspace.ITU601, color_range
    if matrix not in MATRICES:
        raise ValueError(
            f"its colour matrix ({matrix} in ITU-T H.273) is not supported; allowed are BT.601, BT.709, "
            "SMPTE 240M and BT.2020 with non-constant luminance"
        )
    return profiles.pop(), MATRICES[matrix], color_range


def _display_matrix(frame, stream):
    """Returns (a, b, c, d) with x' = a x + c y and y' = b x + d y, the turn from the stored frame to the upright."""
    side_data = _side_data(frame, stream)
    if side_data is None:
        # PyAV still tells the turn, though not whether the frame is mirrored too.
        a, b, c, d = TURNS.get(frame.rotation % 360, (1, 1, 1, 1))
    elif matrix := side_data.get("DISPLAYMATRIX"):
        a, b, _, c, d = np.frombuffer(bytes(matrix), dtype=np.int32)[:5].tolist()
    else:
        a, b, c, d = 1, 0, 0, 1
    straight, turned = max(abs(a), abs(d)), max(abs(b), abs(c))
    if 100 * min(straight, turned) > max(straight, turned):
        raise ValueError("it is to be shown at an angle; allowed are turns by multiples of 90 degrees")
    return (a, 0, 0, d) if straight >= turned else (0, b, c, 0)


def _display_size(frame, stream):
    """Returns the size (width, height) at which a frame of a stream is shown."""
    width, height = _square_pixels(frame, stream)
    _, b, c, _ = _display_matrix(frame, stream)
    return (height, width) if b or c else (width, height)


def _square_pixels(frame, stream):
    # Width of a pixel in heights of a pixel. The short side grows, so that nothing is lost.
    aspect = stream.sample_aspect_ratio or 1
    if aspect >= 1:
        size = round(frame.width * aspect), frame.height
    else:
        size = frame.width, round(frame.height / aspect)
    if math.prod(size) > MAX_FRAME_PIXELS:
        raise ValueError(f"its frames have {size[0]}x{size[1]} pixels, and at most {MAX_FRAME_PIXELS} are read")
    return size


def _to_image(frame, stream, stated):
    """Returns a frame of a stream as it is displayed, a `PIL.Image.Image` in mode RGB; `stated` as for `_colours`."""
    has_alpha = frame.format.has_palette or any(component.is_alpha for component in frame.format.components)
    profile, matrix, color_range = _colours(frame, stream, stated)
    converted = frame.reformat(
        format="rgba" if has_alpha else "rgb24",
        # Stated, because swscale takes BT.601 for what is not tagged.
        src_colorspace=matrix,
        dst_colorspace=matrix,
        src_color_range=None if matrix is None else color_range,
        dst_color_range=ColorRange.JPEG,
        interpolation=SWSCALE_FLAGS,
        threads=1,
    )
    image = Image.fromarray(converted.to_ndarray())
    alpha = image.getchannel("A") if has_alpha else None
    image = image.convert("RGB")
    if matrix is None and color_range == ColorRange.MPEG:
        # Which swscale takes for the full one, of RGB and of grey.
        image = expand_range(image)
    image = to_srgb(image, profile)
    if has_alpha:
        image = on_white(image, alpha)

    size = _square_pixels(frame, stream)
    if image.size != size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    a, b, c, d = _display_matrix(frame, stream)
    if b or c:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    if a < 0 or c < 0:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if b < 0 or d < 0:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    return image
