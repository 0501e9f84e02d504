"""Decodes clips and brings them to the length, rate and size they train at: file -> frames -> (3, F, H, W) tensor.

A clip is a video file, an animated gif, a folder of frames, or an image, which is a clip of one frame. What a
container declares about its frames is often wrong. So they are decoded and counted, and their times are read, once
before a model loads. From then on the record of a clip names its frames.
"""

import contextlib
import itertools
import math
import os
import re
from functools import partial
from pathlib import Path

import av
import numpy as np
import torch
from av.video.reformatter import ColorRange, Interpolation
from PIL import Image

from dataset.colours import expand_range, profile_of_numbers
from dataset.draws import keyed_draw
from dataset.images import cover_and_crop, image_format, on_white, open_image, open_media, to_srgb, to_tensor
from dataset.inspection import Inspector, dropped_record, inspect_each
from dataset.metadata import IMAGE_SUFFIXES, KNOWN_IMAGE_SUFFIXES, frame_names
from dataset.settings import round_down_frames
from runtime.errors import RefusedError


# FFmpeg also knows images, playlists that name other files, text, and raw data.
CONTAINERS = "asf,avi,flv,gif,h264,hevc,m4v,matroska,mov,mpeg,mpegts,mpegvideo,ogg"
# 8K, as large as cameras record it: a decoder holds up to 17 frames, and a false header may say anything.
MAX_FRAME_PIXELS = 8192 * 4320
LIMITS = {"max_pixels": str(MAX_FRAME_PIXELS)}
# Frames that are days apart are no clip, and their times are damaged.
MAX_SECONDS = 24 * 60 * 60

# Colour matrices by their numbers in ITU-T H.273: BT.709, FCC, BT.601 twice, SMPTE 240M and BT.2020.
MATRICES = (1, 4, 5, 6, 7, 9)
UNTAGGED_MATRIX = 2

# The exact arithmetic of swscale, with chroma interpolated in both directions; its default rounds and repeats.
_WHOLE_CHROMA = Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP
SWSCALE_FLAGS = Interpolation.BICUBIC | _WHOLE_CHROMA | Interpolation.ACCURATE_RND | Interpolation.BITEXACT

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
        it is "used". `reason` is what was changed, or why the clip was dropped.

    Raises:
        RefusedError: If clips are bad, or all are dropped; lists all of them with their reasons.
    """
    decide = partial(_decide, sizing=sizing, fps=fps, clip_part=clip_part, min_frames=min_frames)
    # Few threads: a decoder holds up to 17 frames of the source's size.
    inspector = Inspector("clips", partial(measure, fps=fps), f"frames at {fps:g} fps", decide, max_threads=8)
    return inspect_each(rows, inspector, **how)


def _decide(row, measured, *, sizing, fps, clip_part, min_frames):
    """Returns the record of a row; raises RefusedError."""
    size, times, num_frames = measured["size"], measured["times"], len(measured["times"])
    record = dropped_record(row, {"size": list(size), "frames": num_frames, "fps": measured["fps"]})

    late = LATE * (times[-1] - times[0]) / max(1, num_frames - 1)
    late += min(LATE_SECONDS, late)
    # The second number is larger by one where the clip ends with half a frame: 17 frames at 32 fps are 9 at 16. A
    # single frame is an image, however long it is shown.
    last = math.floor((times[-1] - times[0] + late) * fps)
    available = max(round(measured["duration"] * fps), last + 1) if num_frames > 1 else 1
    if available < min_frames:
        return record | {"reason": f"{available} frames at {fps:g} fps; at least {min_frames} are needed"}
    chosen = sizing.choose(row.id, *size, available)
    if isinstance(chosen, str):
        return record | {"reason": chosen}
    height, width, most_frames, batch_size = chosen
    num_used = round_down_frames(min(most_frames, available))
    spare = available - num_used
    first = spare // 2 if clip_part == "middle" else 0
    if clip_part == "random":
        first = int(keyed_draw(sizing.seed, row.id).integers(spare + 1))
    shown = times[0] + (first + np.arange(num_used)) / fps
    source_frames = np.searchsorted(times, shown + late, side="right") - 1
    used = {"size": [width, height], "frames": num_used, "fps": fps, "source_frames": source_frames.tolist()}
    used |= {} if batch_size is None else {"batch_size": batch_size}

    changes, steps = [], np.diff(source_frames)
    if (steps != 1).any():
        repeated = ", frames repeated" if (steps == 0).any() else ""
        changes.append(f"retimed from {measured['fps']:g} to {fps:g} fps{repeated}")
    if spare:
        where = f"at random, from frame {first}" if clip_part == "random" else f"from the {clip_part}"
        changes.append(f"{num_used} of {available} frames (4n + 1), {where}")
    return record | {"used": used, "decision": "used", "reason": "; ".join(changes) or None}


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
    source_frames, pixels = torch.tensor(used["source_frames"]), torch.empty(3, used["frames"], height, width)
    for index, image in _images_at(row.content, row.name, set(used["source_frames"])):
        pixels[:, source_frames == index] = to_tensor(cover_and_crop(image, height, width))[:, None]
    return pixels


# Kinds of clips


def _images_of(media, name):
    """Returns the images that a clip is made of, each as (file, name in messages), or None for a video."""
    embedded = isinstance(media, bytes)
    if not embedded and os.path.isdir(media):
        files = frame_names(media)
        if not files:
            raise RefusedError(f"{name} is a folder without images ({', '.join(IMAGE_SUFFIXES)}).")
        return [(Path(media, file), f"{name}: {file}") for file in sorted(files, key=_natural)]
    kind = image_format(media)
    # The name decides on a file that is neither. FFmpeg would take the tiles of HEIF for frames.
    if kind is None and not embedded and Path(media).suffix.lower() in KNOWN_IMAGE_SUFFIXES:
        kind = Path(media).suffix[1:].upper()
    return None if kind in (None, "GIF") else [(media, name)]


def _natural(file):
    """Returns by what names are sorted so that the numbers in them are in the order of their values."""
    # Digits are at the odd places, so that numbers are compared with numbers only.
    parts = re.split(r"([0-9]+)", file)
    return [int(part) if n % 2 else part for n, part in enumerate(parts)], file


def measure(media, name, fps):
    """Decodes a clip completely, keeping no pixels.

    Args:
        media: A path, or the bytes of a file.
        name: How messages call the clip.
        fps: The rate that folders of frames are taken to have.

    Returns:
        A dict that JSON takes: the upright `size` as displayed (width, height); the `times` of the frames in seconds,
        sorted; the `duration` in seconds, from the first frame to the end of the last; the `fps`, None for images.
    """
    images = _images_of(media, name)
    if images is None:
        return _measure_video(media, name, fps)
    sizes = [open_image(*image).size for image in images]
    for (_, image_name), size in zip(images, sizes, strict=True):
        if size != sizes[0]:
            raise RefusedError(f"{image_name} is {size}, but the first frame {sizes[0]}; a clip has one size.")
    times = [k / fps for k in range(len(images))]
    return {"size": sizes[0], "times": times, "duration": len(images) / fps, "fps": None}


def _measure_video(media, name, fps):
    times = []
    # One thread for each clip: several are inspected at a time.
    with _open_video(media, name, num_threads=1) as (container, stream, stated):
        for frame, time, duration in _frames(container, stream):
            if not times:
                stored, size = (frame.width, frame.height), _to_image(frame, stream, stated).size
            if stored != (frame.width, frame.height):
                raise ValueError(f"its size changes at frame {len(times)}, and all frames must have one size")
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
    # The container's rate where its times agree, as far as they can: mkv rounds to milliseconds.
    if tick * rate < 0.1 and abs(num_intervals / nominal_rate - span) <= tick:
        rate = nominal_rate
    # Some files give the last frame no duration of its own, and it is shown nevertheless.
    duration = span + max(last_duration, min(1 / rate, 1 / fps))
    return {"size": size, "times": times, "duration": duration, "fps": round(rate, 3)}


def _images_at(media, name, wanted):
    """Yields (index, image) for the frames with these indices, upright as displayed, decoding no further."""
    images, last = _images_of(media, name), max(wanted)
    if images is not None and last < len(images):
        yield from ((index, open_image(*images[index])) for index in sorted(wanted))
        return
    if images is None:
        with _open_video(media, name, num_threads=0) as (container, stream, stated):
            for index, (frame, _, _) in enumerate(_frames(container, stream)):
                if index in wanted:
                    yield index, _to_image(frame, stream, stated)
                if index == last:
                    return
    raise RefusedError(f"{name} ends before frame {last}: it was changed since it was inspected.")


# Video files


@contextlib.contextmanager
def _open_video(media, name, num_threads):
    """Context that opens a video for decoding, closes it, and names it in every error in between.

    Args:
        media: The path or the bytes.
        name: How messages call it.
        num_threads: Threads of the decoder, 0 for as many as it likes.

    Yields:
        The `av` container, its video stream, and what the container declares about its colours; see `_stated`.
    """
    try:
        # Not by its name, in which FFmpeg would look for protocols and patterns.
        with open_media(media) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1000))
            tail = file.read().rstrip(b"\0")
            file.seek(0)
            options = {"format_whitelist": CONTAINERS, **LIMITS}
            with av.open(file, metadata_errors="replace", options=options) as container:
                # The frames of a GIF are counted while it is read.
                if container.format.name == "gif" and not tail.endswith(b"\0;"):
                    raise ValueError("it is cut off: its last byte is not the trailer of a GIF")
                stream = container.streams.best("video")
                is_cover = stream is not None and stream.disposition & av.stream.Disposition.attached_pic
                if stream is None or is_cover or stream.codec_context is None:
                    raise ValueError("it has no video stream that FFmpeg can decode, or it is cut off")
                # Those of the container hold for the first frames, which FFmpeg decodes in opening it.
                stream.codec_context.options = LIMITS
                stream.codec_context.thread_count = num_threads
                stream.codec_context.thread_type = "AUTO"
                # Before a decoder puts its own word in the place of the container's.
                yield container, stream, _stated(stream.codec_context)
    except (av.FFmpegError, OSError) as error:
        problem = f"or is cut off, damaged or of more than {MAX_FRAME_PIXELS} pixels (it says {error.strerror!r})"
        raise RefusedError(f"{name} cannot be used: it is no video that FFmpeg can read, {problem}.") from error
    except ValueError as error:
        raise RefusedError(f"{name} cannot be used: {error}.") from error


def _frames(container, stream):
    """Yields (frame, time in seconds, duration in seconds or 0) in the order in which frames are shown."""
    decoder = _decoder(stream)
    interval = 1 / _nominal_rate(stream)
    time, index, num_packets, last_dts, end = -interval, 0, 0, 0, 0.0

    # All streams, since a clip may end with its sound. None ends decoding.
    for position, packet in enumerate(itertools.chain(container.demux(), [None])):
        # A false number in a header of 100 bytes would be good for hours.
        if position > container.size:
            raise ValueError("it claims to hold more packets than it has bytes")
        if packet is not None:
            if packet.pts is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream is stream and packet.dts is not None:
                num_packets, last_dts = num_packets + 1, packet.dts
            # An empty packet repeats a frame, in avi, and would end decoding here.
            if packet.stream is not stream or not packet.size:
                continue
        for frame in decoder.decode(packet):
            if frame.is_corrupt:
                raise ValueError(f"it is damaged or cut off at frame {index}")
            time = time + interval if frame.pts is None else float(frame.pts * stream.time_base)
            yield frame, time, float((frame.duration or 0) * stream.time_base)
            index += 1
    # What is missing at the end is no error for FFmpeg. Each kind of container declares in its own way what it holds.
    is_cut = {
        # Times at which no new frame is shown have no packets.
        "avi": last_dts + 1 < stream.frames,
        # Edit lists leave packets out of the index.
        "mov,mp4,m4a,3gp,3g2,mj2": num_packets < len(stream.index_entries),
        # Which round to milliseconds.
        "matroska,webm": end + max(interval / 2, 0.002) < (container.duration or 0) / av.time_base,
        # FFmpeg does not believe the duration in a file that is shorter than its header declares.
        "asf": not container.duration,
    }
    if is_cut.get(container.format.name):
        raise ValueError(f"it is cut off: it declares more than the {index} frames that it holds")


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


# Frames


def _stated(of):
    """Returns primaries, curve, matrix and range of a codec context or a frame, as numbers of ITU-T H.273."""
    return of.color_primaries, of.color_trc, of.colorspace, of.color_range


def _side_data(frame, stream, kind):
    """Returns what the decoder says with a frame of one kind, bytes that are empty where it says nothing."""
    # PyAV 18 frees the colour profile of the decoder of PNG a second time, once it has listed it, which ends
    # the process.
    if stream.codec_context.name not in ("apng", "png"):
        # It lists nothing where one is of a kind that it does not know, as EXIF in Motion JPEG.
        with contextlib.suppress(KeyError, ValueError):
            return bytes(frame.side_data[kind])
    return b""


def _colours(frame, stream, stated):
    """Returns how the colours of a frame become sRGB.

    Args:
        frame: Decoded.
        stream: It is of.
        stated: What the container declares, which some decoders drop and others replace by what the stream declares.

    Returns:
        The ICC profile, empty or None for sRGB; the number of the matrix for swscale, None without one; the range.
    """
    profiles = {profile_of_numbers(*numbers[:2]) for numbers in (stated, _stated(frame))} - {None}
    # An embedded profile counts more, as in images.
    if embedded := _side_data(frame, stream, "ICC_PROFILE"):
        profiles = {embedded}
    if len(profiles) > 1:
        raise ValueError("its container and its stream say different things of its primaries or transfer curve")
    profile, color_range = next(iter(profiles), None), stated[3] or frame.color_range
    if frame.format.is_rgb or frame.format.has_palette or len(frame.format.components) < 3:
        # Grey has no matrix, but may be tagged as RGB. Without a declaration the decoder of HEVC
        # reports the limited range, to which encoders do not convert grey.
        if stream.codec_context.name == "hevc" and not frame.format.is_rgb:
            color_range = ColorRange.JPEG
        return profile, None, color_range or ColorRange.JPEG
    if frame.format.name.startswith("yuvj"):
        color_range = ColorRange.JPEG
    # Of matrix and range the container's word counts more, as the standards of containers have it.
    matrix = frame.colorspace if stated[2] == UNTAGGED_MATRIX else stated[2]
    if matrix == UNTAGGED_MATRIX:
        # As players guess: high definition is BT.709.
        matrix = 1 if frame.height >= 720 else 5
    if matrix not in MATRICES:
        raise ValueError(f"its colour matrix ({matrix} in ITU-T H.273) is not supported; allowed are {MATRICES}")
    # swscale knows BT.601 by one of its two numbers.
    return profile, 5 if matrix == 6 else matrix, color_range or ColorRange.MPEG


def _to_image(frame, stream, stated):
    """Returns a frame of a stream as it is displayed, a `PIL.Image.Image` in mode RGB; `stated` as for `_colours`."""
    has_alpha = frame.format.has_palette or any(component.is_alpha for component in frame.format.components)
    profile, matrix, color_range = _colours(frame, stream, stated)
    # The matrix is stated, because swscale takes BT.601 for what is not tagged.
    how = {"src_colorspace": matrix, "src_color_range": None if matrix is None else color_range}
    how |= {"dst_colorspace": matrix, "dst_color_range": ColorRange.JPEG, "interpolation": SWSCALE_FLAGS}
    converted = frame.reformat(format="rgba" if has_alpha else "rgb24", threads=1, **how)
    image = Image.fromarray(converted.to_ndarray())
    alpha = image.getchannel("A") if has_alpha else None
    image = image.convert("RGB")
    if matrix is None and color_range == ColorRange.MPEG:
        # Which swscale takes for the full one, of RGB and of grey.
        image = expand_range(image)
    image = to_srgb(image, profile)
    if has_alpha:
        image = on_white(image, alpha)

    # Width of a pixel in heights of a pixel. The short side grows, so that nothing is lost.
    aspect = stream.sample_aspect_ratio or 1
    size = round(frame.width * max(aspect, 1)), round(frame.height / min(aspect, 1))
    if math.prod(size) > MAX_FRAME_PIXELS:
        raise ValueError(f"its frames have {size[0]}x{size[1]} pixels, and at most {MAX_FRAME_PIXELS} are read")
    if image.size != size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    # x' = a x + c y and y' = b x + d y. The rotation is that of the x axis, whether the frame is mirrored or not.
    if matrix := _side_data(frame, stream, "DISPLAYMATRIX"):
        a, b, _, c, d = np.frombuffer(matrix, dtype=np.int32)[:5].tolist()
        if a * d < b * c:
            image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    turn = round(frame.rotation / 90) * 90
    if abs(frame.rotation - turn) > 1:
        raise ValueError("it is to be shown at an angle; allowed are turns by multiples of 90 degrees")
    return image.rotate(turn, expand=True)
