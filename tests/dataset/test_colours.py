import io
import struct
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image, ImageCms, PngImagePlugin

from dataset.buckets import Sizing
from dataset.images import open_image
from dataset.metadata import Row
from dataset.videos import inspect_clips, read_clip
from runtime.errors import RefusedError


PIXELS = [(180, 90, 70), (80, 150, 90), (80, 90, 150), (160, 140, 60), (30, 30, 30), (128, 128, 128), (230, 230, 230)]
PIXELS = np.repeat(np.array([PIXELS]), 16, axis=0)
PIXELS = np.repeat(PIXELS, 16, axis=1).astype(np.uint8)

# Linear light of some primaries in that of sRGB: BT.2087, CSS Color 4, and for those of BT.601 SMPTE EG and EBU Tech.
TO_SRGB = {
    "Display P3": ((1.22494, -0.22494, 0), (-0.04206, 1.04206, 0), (-0.01964, -0.07864, 1.09827)),
    "BT.2020": ((1.66049, -0.58764, -0.07285), (-0.12455, 1.13290, -0.00835), (-0.01815, -0.10058, 1.11873)),
    "Adobe RGB": ((1.39836, -0.39836, 0), (0, 1, 0), (0, -0.04293, 1.04293)),
    "SMPTE C": ((0.93954, 0.05018, 0.01028), (0.01777, 0.96579, 0.01643), (-0.00162, -0.00437, 1.00599)),
    "EBU": ((1.04404, -0.04404, 0), (0, 1, 0), (0, 0.01179, 0.98821)),
    "sRGB": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
}
CHROMATICITIES = {
    "Display P3": (0.3127, 0.329, 0.68, 0.32, 0.265, 0.69, 0.15, 0.06),
    "Adobe RGB": (0.3127, 0.329, 0.64, 0.33, 0.21, 0.71, 0.15, 0.06),
    "sRGB": (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06),
}


def in_srgb(primaries, gamma=None, pixels=PIXELS):
    """Returns what pixels of these primaries, and of a gamma or sRGB's curve, are in sRGB, by the formulas."""
    code = pixels / 255
    light = np.where(code <= 0.04045, code / 12.92, ((code + 0.055) / 1.055) ** 2.4) if gamma is None else code**gamma
    light = np.clip(light @ np.array(TO_SRGB[primaries]).T, 0, 1)
    return 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def assert_shown(data, primaries, gamma=None, tolerance=2):
    expected = in_srgb(primaries, gamma)
    if (primaries, gamma) not in (("sRGB", None), ("EBU", None), ("SMPTE C", None)):
        assert np.abs(expected - PIXELS).max() > 4 * tolerance, "the reference would not tell"
    shown = np.asarray(open_image(data))[8::16, 8::16].astype(int)
    assert np.abs(shown - expected[8::16, 8::16]).max() <= tolerance


def encode(file_format, pixels=PIXELS, **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, file_format, **options)
    return buffer.getvalue()


def png(*chunks, pixels=PIXELS, **options):
    info = PngImagePlugin.PngInfo()
    for name, content in chunks:
        info.add(name, content)
    return encode("PNG", pixels, pnginfo=info, **options)


def cicp(primaries, curve, matrix=0, full_range=1):
    return b"cICP", bytes([primaries, curve, matrix, full_range])


def gama(gamma):
    return b"gAMA", struct.pack(">I", round(100000 / gamma))


def chrm(primaries):
    return b"cHRM", struct.pack(">8I", *(round(value * 100000) for value in CHROMATICITIES[primaries]))


SRGB_CHUNK = (b"sRGB", b"\0")
SRGB_PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def profile(primaries):
    """Returns an ICC profile of primaries, as the file that says them otherwise gets it."""
    from dataset.colours import profile_of_numbers

    return profile_of_numbers({"Display P3": 12, "BT.2020": 9}[primaries], 13)


def avif(primaries, curve, **options):
    data = encode("AVIF", quality=100, subsampling="4:4:4", **options)
    place = data.index(b"colrnclx") + 8
    return data[:place] + struct.pack(">2H", primaries, curve) + data[place + 4 :]


def with_exif(file_format, tags, details=(), interop=None, **options):
    exif = Image.Exif()
    # With a maker: Pillow drops EXIF that it takes for empty.
    for tag, value in {271: "maker", **tags}.items():
        exif[tag] = value
    for tag, value in dict(details).items():
        exif.get_ifd(0x8769)[tag] = value
    if interop:
        exif.get_ifd(0x8769)[0xA005] = {1: interop}
    lossless = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}.get(file_format, {})
    return encode(file_format, exif=exif, **lossless, **options)


WHITE, PRIMARIES, TRANSFER, MATRIX, LEVELS = 318, 319, 301, 529, 532
COLOUR_SPACE, GAMMA = 0xA001, 0xA500


def bmp(kind=b"\0\0\0\0", endpoints=(0,) * 9):
    """Returns a BMP file with the fifth version of its header."""
    data = encode("BMP")
    pixels = data[54:]
    header = struct.pack("<I", 124) + data[18:54] + struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0) + kind
    header += struct.pack("<9i7I", *endpoints, 0, 0, 0, 4, 0, 0, 0)
    return b"BM" + struct.pack("<3I", 138 + len(pixels), 0, 138) + header + pixels


def table(gamma):
    """Returns a TransferFunction of 8 bits, three times the same."""
    return tuple(round(65535 * (code / 255) ** gamma) for code in range(256)) * 3


def rational(numbers):
    return tuple(float(number) for number in numbers)


P3, ADOBE = CHROMATICITIES["Display P3"], CHROMATICITIES["Adobe RGB"]


@pytest.mark.parametrize(
    ("data", "primaries", "gamma"),
    [
        (lambda: png(cicp(12, 13)), "Display P3", None),
        (lambda: png(cicp(9, 14)), "BT.2020", None),
        (lambda: png(cicp(2, 8)), "sRGB", 1.0),
        (lambda: png(cicp(1, 5)), "sRGB", 2.8),
        (lambda: png(gama(1.8)), "sRGB", 1.8),
        (lambda: png(gama(1.0)), "sRGB", 1.0),
        (lambda: png(chrm("Display P3")), "Display P3", None),
        (lambda: png(gama(1.8), chrm("Display P3")), "Display P3", 1.8),
        (lambda: png(cicp(12, 13), SRGB_CHUNK), "Display P3", None),
        (lambda: png(cicp(12, 13), icc_profile=SRGB_PROFILE), "Display P3", None),
        (lambda: png(gama(1.0), icc_profile=profile("Display P3")), "Display P3", None),
        (lambda: avif(12, 13), "Display P3", None),
        (lambda: avif(9, 1), "BT.2020", None),
        (lambda: with_exif("JPEG", {}, {COLOUR_SPACE: 2}), "Adobe RGB", 2.2),
        (lambda: with_exif("JPEG", {}, {COLOUR_SPACE: 0xFFFF}, "R03"), "Adobe RGB", 2.2),
        (lambda: with_exif("WEBP", {}, {COLOUR_SPACE: 2}), "Adobe RGB", 2.2),
        (lambda: with_exif("PNG", {}, {COLOUR_SPACE: 2}), "Adobe RGB", 2.2),
        (lambda: encode("TIFF", tiffinfo={0x8769: {COLOUR_SPACE: 2}}), "Adobe RGB", 2.2),
        (lambda: with_exif("JPEG", {WHITE: ADOBE[:2], PRIMARIES: ADOBE[2:]}, {GAMMA: 2.2}), "Adobe RGB", 2.2),
        (lambda: encode("TIFF", tiffinfo={WHITE: P3[:2], PRIMARIES: P3[2:]}), "Display P3", None),
        (lambda: avif(2, 2, exif=exif_of(2)), "Adobe RGB", 2.2),
        (lambda: with_exif("JPEG", {}, {COLOUR_SPACE: 0xFFFD}, icc_profile=profile("BT.2020")), "BT.2020", None),
    ],
)
def test_what_an_image_says_of_its_colours_is_converted(data, primaries, gamma):
    """Reference: the formulas. JPEG and AVIF may be off by their quantisation."""
    data = data()
    assert_shown(data, primaries, gamma, 6 if b"avif" in data else 3)


@pytest.mark.parametrize(
    "data",
    [
        lambda: png(),
        lambda: png(SRGB_CHUNK, gama(1.0)),
        lambda: png(gama(2.2)),
        lambda: png(gama(2.2), chrm("sRGB")),
        lambda: png((b"gAMA", bytes(4))),
        lambda: png(cicp(1, 13)),
        lambda: png(cicp(1, 1)),
        lambda: png(cicp(2, 2)),
        lambda: png(SRGB_CHUNK, exif=exif_of(2)),
        lambda: encode("TIFF", tiffinfo={TRANSFER: table(1.8), 0x8769: {COLOUR_SPACE: 1}}),
        lambda: encode("TIFF", tiffinfo={WHITE: P3[:2], PRIMARIES: CHROMATICITIES["sRGB"][2:]}),
        lambda: bmp(),
        lambda: bmp(b"BGRs"),
        lambda: bmp(b" niW"),
        lambda: with_exif("WEBP", {}, {COLOUR_SPACE: 1}),
        lambda: with_exif("WEBP", {}, {COLOUR_SPACE: 0xFFFF}, "R98"),
        lambda: with_exif("PNG", {WHITE: P3[:2], PRIMARIES: P3[2:]}, {COLOUR_SPACE: 1}),
    ],
)
def test_what_says_nothing_or_srgb_keeps_its_pixels(data):
    assert (np.asarray(open_image(data())) == PIXELS).all()


def exif_of(space):
    exif = Image.Exif()
    exif[271] = "maker"
    exif.get_ifd(0x8769)[COLOUR_SPACE] = space
    return exif


def test_avif_and_jpeg_that_say_srgb_keep_their_pixels():
    of_numbers = avif(1, 13), avif(2, 2), avif(1, 1), avif(1, 13, exif=exif_of(2))
    for data in (*of_numbers, with_exif("JPEG", {MATRIX: (0.299, 0.587, 0.114)})):
        assert (np.asarray(open_image(data)) == np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))).all()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda: png(cicp(9, 16)), "it is HDR (PQ), which must be converted to SDR"),
        (lambda: avif(9, 18), "it is HDR (HLG), which must be converted to SDR"),
        (lambda: png(cicp(10, 13)), "its colour primaries (10 in ITU-T H.273) are not supported"),
        (lambda: avif(1, 9), "its transfer curve (9 in ITU-T H.273) is not supported"),
        (lambda: png(cicp(1, 13, matrix=6)), "its colour matrix (6 in ITU-T H.273) is not that of RGB"),
        (lambda: png((b"cHRM", bytes(32))), "which are no colours"),
        (lambda: png((b"cHRM", struct.pack(">8I", *[30000] * 8))), "which are no colours"),
        (lambda: with_exif("JPEG", {MATRIX: (0.2126, 0.7152, 0.0722)}), "YCbCrCoefficients (0.2126"),
        (lambda: with_exif("JPEG", {LEVELS: rational((16, 235, 128, 240, 128, 240))}), "ReferenceBlackWhite (16.0"),
        (lambda: encode("TIFF", tiffinfo={LEVELS: rational((16, 235) * 3)}), "ReferenceBlackWhite (16.0"),
        (lambda: with_exif("JPEG", {}, {COLOUR_SPACE: 0xFFFD}), "Wide Gamut RGB"),
        (lambda: encode("TIFF", tiffinfo={TRANSFER: table(1.8)}), "its transfer curve is a table"),
        *((lambda kind=kind: bmp(kind), "its colours are not sRGB by its BMP header") for kind in (b"KNIL", b"DEBM")),
        (lambda: bmp(endpoints=(2**29,) * 9), "its colours are not sRGB by its BMP header"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_its_name(data, reason):
    with pytest.raises(RefusedError) as info:
        open_image(data())
    assert reason in str(info.value)


def test_the_limited_range_of_a_png_is_brought_to_the_full_one():
    levels = np.repeat(
        np.array([[(0,) * 3, (16,) * 3, (126,) * 3, (235,) * 3, (255,) * 3]], dtype=np.uint8), 16, axis=0
    )
    shown = np.asarray(open_image(png(cicp(1, 13, full_range=0), pixels=levels)))
    assert shown[0, :, 0].tolist() == [0, 0, 128, 255, 255]


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "I;16"])
def test_every_mode_is_converted(mode):
    """A grey of gamma 1 becomes much lighter whatever it is stored as."""
    image = Image.new("RGB", (16, 16), (64,) * 3)
    if mode == "I;16":
        image = Image.new("I;16", (16, 16), 64 * 257)
    else:
        image = image.quantize(2) if mode == "P" else image.convert(mode)
    buffer, info = io.BytesIO(), PngImagePlugin.PngInfo()
    info.add(*gama(1.0))
    image.save(buffer, "PNG", pnginfo=info)
    assert np.abs(np.asarray(open_image(buffer.getvalue())).astype(int) - 137).max() <= 1


def test_a_turned_image_is_converted_too():
    exif = exif_of(2)
    exif[0x0112] = 3
    turned = np.asarray(open_image(encode("PNG", PIXELS[::-1, ::-1].copy(), exif=exif)))
    assert np.abs(turned - in_srgb("Adobe RGB", 2.2)).max() <= 2


# Clips


def clip(path, tags, pixels=PIXELS, pix_fmt="bgr0", codec="ffv1", in_container=None):
    """Writes a clip whose frames have these tags: primaries, curve, matrix and range.

    Args:
        in_container: Tags that the container says in their place.
    """
    source = path.with_name(f"source{path.suffix}")
    with av.open(str(source), "w") as container:
        stream = container.add_stream(codec, rate=16, options={"crf": "0"} if "264" in codec else {})
        stream.height, stream.width = pixels.shape[:2]
        stream.pix_fmt = pix_fmt
        context = stream.codec_context
        context.color_primaries, context.color_trc, context.colorspace, context.color_range = tags
        for k in range(5):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24" if pixels.ndim == 3 else "gray")
            frame = frame.reformat(format=pix_fmt)
            frame.color_primaries, frame.color_trc, frame.colorspace, frame.color_range = tags
            frame.pts, frame.time_base = k, Fraction(1, 16)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    if in_container is None:
        return source.rename(path)
    with av.open(str(source)) as old, av.open(str(path), "w") as container:
        stream = container.add_stream_from_template(old.streams.video[0])
        context = stream.codec_context
        context.color_primaries, context.color_trc, context.colorspace, context.color_range = in_container
        for packet in old.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                container.mux(packet)
    return path


def shown(path):
    """Returns the first frame as it is trained, or the reason why it is refused."""
    row = Row(path.name, "a caption", {"target": (path,)}, path.name)
    sizing = Sizing(*PIXELS.shape[:2], None, 16, 5)
    try:
        (item,) = inspect_clips([row], sizing, fps=16, clip_part="start")
    except RefusedError as error:
        return str(error).splitlines()[1].split("cannot be used: ")[1]
    return ((read_clip(row, item.record)[:, 0] + 1) * 127.5).round().permute(1, 2, 0).int().numpy()


@pytest.mark.parametrize(
    ("primaries", "curve"),
    [
        *((primaries, 13) for primaries in (0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 22)),
        *((primaries, curve) for primaries in (1, 12) for curve in (1, 2, 4, 5, 6, 7, 8, 9, 10, 14, 15, 16, 17, 18)),
    ],
)
def test_an_image_and_a_clip_that_say_the_same_are_the_same(tmp_path, primaries, curve):
    path = clip(tmp_path / "a.mkv", (primaries, curve, 0, 2))
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        assert (context.color_primaries, context.color_trc) in ((primaries, curve), (2, curve))
    try:
        expected = np.asarray(open_image(png(cicp(primaries, curve)), "a.png"))
    except RefusedError as error:
        assert shown(path) == str(error).split("cannot be used: ")[1]
        return
    assert (shown(path) == expected).all()
    if primaries in (0, 1, 2) and curve in (1, 2, 4, 6, 7, 13, 14, 15):
        assert (expected == PIXELS).all()


@pytest.mark.parametrize(
    ("number", "primaries"), [(5, "EBU"), (6, "SMPTE C"), (9, "BT.2020"), (12, "Display P3"), (1, "sRGB")]
)
def test_primaries_of_clips_are_converted(tmp_path, number, primaries):
    """Reference: the published matrices."""
    assert np.abs(shown(clip(tmp_path / "a.mkv", (number, 2, 0, 2))) - in_srgb(primaries)).max() <= 2


HDR = "it is HDR (PQ), which must be converted to SDR."


@pytest.mark.parametrize(
    ("suffix", "codec", "pix_fmt"),
    [
        (".mp4", "libx264", "yuv444p"),
        (".mp4", "libx265", "yuv444p"),
        (".mov", "prores_ks", "yuv444p10le"),
        (".mp4", "libvpx-vp9", "yuv444p"),
        (".mov", "png", "rgb24"),
    ],
)
def test_what_the_container_says_counts_where_the_stream_says_nothing(tmp_path, suffix, codec, pix_fmt):
    matrix = 0 if codec == "png" else 9
    plain = clip(tmp_path / f"plain{suffix}", (2, 2, 2, 0), codec=codec, pix_fmt=pix_fmt)
    sdr = clip(tmp_path / f"sdr{suffix}", (2, 2, 2, 0), None or PIXELS, pix_fmt, codec, (12, 13, matrix and 6, 0))
    assert np.abs(shown(sdr) - in_srgb("Display P3", pixels=shown(plain))).max() <= 3
    assert shown(clip(tmp_path / f"hdr{suffix}", (2, 2, 2, 0), PIXELS, pix_fmt, codec, (9, 16, matrix, 0))) == HDR


def test_a_profile_in_the_container_is_converted(tmp_path):
    """QuickTime's colr box holds numbers, or a profile in their place."""
    plain = clip(tmp_path / "plain.mov", (1, 1, 1, 1), PIXELS, "yuv444p", "libx264")
    data, icc = bytearray(plain.read_bytes()), profile("Display P3")
    start = data.index(b"colr") - 4
    assert data.index(b"mdat") < start, "or the places of the samples would change"
    (num_bytes,) = struct.unpack_from(">I", data, start)
    box = struct.pack(">I8s", 12 + len(icc), b"colrprof") + icc
    for name in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd", b"avc1"):
        place = data.rindex(name, 0, start) - 4
        struct.pack_into(">I", data, place, struct.unpack_from(">I", data, place)[0] + len(box) - num_bytes)
    data[start : start + num_bytes] = box
    (tmp_path / "a.mov").write_bytes(data)
    assert np.abs(shown(tmp_path / "a.mov") - in_srgb("Display P3", pixels=shown(plain))).max() <= 2


def test_a_profile_in_the_frames_is_converted(tmp_path):
    def motion_jpeg(name, **options):
        image = encode("JPEG", quality=95, subsampling=0, **options)
        with av.open(str(tmp_path / name), "w") as container:
            stream = container.add_stream("mjpeg", rate=16)
            stream.height, stream.width = PIXELS.shape[:2]
            stream.pix_fmt = "yuvj444p"
            for k in range(5):
                packet = av.Packet(image)
                packet.stream, packet.pts, packet.dts, packet.time_base = stream, k, k, Fraction(1, 16)
                container.mux(packet)
        return shown(tmp_path / name)

    expected = in_srgb("Display P3", pixels=motion_jpeg("plain.avi"))
    assert np.abs(motion_jpeg("a.avi", icc_profile=profile("Display P3")) - expected).max() <= 2


def test_contradictions_are_refused(tmp_path):
    differing = clip(tmp_path / "a.mp4", (1, 1, 1, 1), PIXELS, "yuv444p", "libx264", (12, 1, 1, 1))
    assert shown(differing) == "its container and its stream say different things of its primaries or transfer curve."
    # HDR is so whoever says it, and what comes to the same is no contradiction.
    assert shown(clip(tmp_path / "b.mp4", (9, 16, 9, 1), PIXELS, "yuv444p", "libx264", (1, 1, 1, 1))) == HDR
    same = clip(tmp_path / "c.mp4", (6, 6, 6, 1), PIXELS, "yuv444p", "libx264", (7, 1, 5, 1))
    assert (shown(same) == shown(clip(tmp_path / "d.mp4", (6, 6, 6, 1), PIXELS, "yuv444p", "libx264"))).all()


def test_the_matrix_and_range_of_the_container_count(tmp_path):
    plain = shown(clip(tmp_path / "a.mp4", (1, 1, 6, 1), PIXELS, "yuv444p", "libx264"))
    other = shown(clip(tmp_path / "b.mp4", (1, 1, 1, 1), PIXELS, "yuv444p", "libx264", (1, 1, 6, 1)))
    assert (plain == other).all()


@pytest.mark.parametrize(
    ("pix_fmt", "pixels"), [("bgr0", PIXELS), ("gray", PIXELS[..., 0]), ("gray16le", PIXELS[..., 0])]
)
def test_the_limited_range_of_rgb_and_grey_is_brought_to_the_full_one(tmp_path, pix_fmt, pixels):
    expected = np.clip((pixels - 16.0) * 255 / 219, 0, 255)
    expected = expected if pixels.ndim == 3 else expected[..., None]
    for color_range, levels in (
        (1, expected),
        (2, pixels.reshape(expected.shape)),
        (0, pixels.reshape(expected.shape)),
    ):
        path = clip(
            tmp_path / f"{color_range}.mkv", (2, 2, 0 if pix_fmt == "bgr0" else 2, color_range), pixels, pix_fmt
        )
        assert np.abs(shown(path) - levels).max() <= 2


def test_grey_hevc_that_says_nothing_keeps_its_levels(tmp_path):
    path = clip(tmp_path / "a.mp4", (2, 2, 2, 0), PIXELS[..., 0].copy(), "gray", "libx265")
    assert np.abs(shown(path)[8::16, 8::16] - PIXELS[8::16, 8::16, :1].astype(int)).max() <= 6


def test_frames_of_a_folder_follow_the_rule_of_images(tmp_path):
    folder = tmp_path / "frames"
    folder.mkdir()
    for k in range(5):
        (folder / f"{k}.png").write_bytes(png(cicp(12, 13)))
    assert np.abs(shown(folder) - in_srgb("Display P3")).max() <= 2
    (folder / "3.png").write_bytes(png(cicp(9, 16)))
    with pytest.raises(RefusedError, match=r"frames: 3.png cannot be used: it is HDR \(PQ\)"):
        row = Row("frames", "a caption", {"target": (folder,)}, "frames")
        inspect_clips([row], Sizing(16, 112, None, 16, 5), fps=16, clip_part="start")
