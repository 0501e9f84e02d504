"""What files say of their colours outside an ICC profile, and what becomes of it: one rule for images and clips.

Whatever says something other than sRGB becomes an ICC profile, by which the pixels are converted to sRGB as by an
embedded one; what cannot be converted is refused by its name. A file that says nothing, sRGB, BT.709 or a gamma near
2.2, keeps its pixels: the camera curves of SDR video are shown by screens whose own curve is about sRGB's.
"""

import contextlib
import functools
import io
import logging
import struct

import av
import numpy as np
from PIL import ExifTags


logger = logging.getLogger(__name__)

# Numbers of ITU-T H.273 that name nothing: reserved, unspecified, reserved.
UNSTATED = (0, 2, 3)

_D65, _C, _D50 = (0.3127, 0.3290), (0.3100, 0.3160), (0.3457, 0.3585)
# x and y of white, red, green and blue.
_SRGB = (*_D65, 0.640, 0.330, 0.300, 0.600, 0.150, 0.060)
_SMPTE_C = (*_D65, 0.630, 0.340, 0.310, 0.595, 0.155, 0.070)
_ADOBE_RGB = (*_D65, 0.640, 0.330, 0.210, 0.710, 0.150, 0.060)
# By their numbers in ITU-T H.273.
_PRIMARIES = {
    1: _SRGB,
    4: (*_C, 0.670, 0.330, 0.210, 0.710, 0.140, 0.080),  # BT.470 M
    5: (*_D65, 0.640, 0.330, 0.290, 0.600, 0.150, 0.060),  # BT.470 BG, BT.601 with 625 lines
    6: _SMPTE_C,  # BT.601 with 525 lines
    7: _SMPTE_C,  # SMPTE 240M
    8: (*_C, 0.681, 0.319, 0.243, 0.692, 0.145, 0.049),  # film
    9: (*_D65, 0.708, 0.292, 0.170, 0.797, 0.131, 0.046),  # BT.2020
    11: (0.314, 0.351, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060),  # DCI-P3
    12: (*_D65, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060),  # Display P3
    22: (*_D65, 0.630, 0.340, 0.295, 0.605, 0.155, 0.077),  # EBU 3213
}
_CAMERA_CURVES = (1, 6, 7, 11, 12, 13, 14, 15)
_GAMMAS = {4: 2.2, 5: 2.8, 8: 1.0}
_HDR = {16: "PQ", 18: "HLG"}

# What decoders of JPEG and RGB assume, as EXIF and TIFF may state it: the weights of BT.601, and the full range.
_BT601 = (0.299, 0.587, 0.114)
_FULL_RANGES = ((0, 255, 128, 255, 128, 255), (0, 255) * 3, (0, 65535) * 3)


def _srgb_curve(num_steps=4096):
    code = np.linspace(0, 1, num_steps)
    return np.where(code <= 0.04045, code / 12.92, ((code + 0.055) / 1.055) ** 2.4)


@functools.cache
def profile_of_numbers(primaries, curve):
    """Returns the ICC profile of colours stated as numbers of ITU-T H.273.

    Args:
        primaries: Colour primaries, of which `UNSTATED` count as BT.709's.
        curve: Transfer characteristics, of which `UNSTATED` count as sRGB's.

    Returns:
        Bytes, or None where the pixels are to be left as they are.

    Raises:
        ValueError: They are HDR, or not supported.
    """
    if curve in _HDR:
        raise ValueError(f"it is HDR ({_HDR[curve]}), which must be converted to SDR")
    if primaries not in (*UNSTATED, *_PRIMARIES):
        raise ValueError(f"its colour primaries ({primaries} in ITU-T H.273) are not supported")
    if curve not in (*UNSTATED, *_CAMERA_CURVES, *_GAMMAS):
        raise ValueError(f"its transfer curve ({curve} in ITU-T H.273) is not supported")
    return _profile(_PRIMARIES.get(primaries), _gamma_curve(_GAMMAS.get(curve)))


def _gamma_curve(gamma):
    return None if not gamma else np.linspace(0, 1, 4096) ** gamma


def _profile(chromaticities=None, curve=None):
    """Returns an ICC profile, or None for what is sRGB or near enough.

    Args:
        chromaticities: x and y of white, red, green and blue; None for sRGB's.
        curve: Light in [0, 1] at equal steps of the code: an array (N,), or (3, N) for red, green and blue; None for
            sRGB's.
    """
    curve = _srgb_curve() if curve is None else curve
    chromaticities = _SRGB if chromaticities is None else chromaticities
    curves = np.broadcast_to(curve, (3, curve.shape[-1]))
    gap = np.abs(curves - _srgb_curve(curves.shape[1])).max()
    if len(chromaticities) != 8 or not all(chromaticities[1::2]):
        raise ValueError(f"its colour primaries are {chromaticities}, which are no colours")
    # The widest gap between gamma 2.2 and sRGB is 0.009.
    if np.abs(np.subtract(chromaticities, _SRGB)).max() < 0.002 and gap < 0.015:
        return None

    xyz = np.array([(x / y, 1, (1 - x - y) / y) for x, y in np.reshape(chromaticities, (4, 2))])  # of Y = 1
    white, primaries = xyz[0], xyz[1:].T
    # Bradford's way from this white to that of ICC profiles.
    cones = np.array([(0.8951, 0.2664, -0.1614), (-0.7502, 1.7135, 0.0367), (0.0389, -0.0685, 1.0296)])
    d50 = np.array([_D50[0] / _D50[1], 1, (1 - sum(_D50)) / _D50[1]])
    adapted = np.linalg.inv(cones) @ np.diag(cones @ d50 / (cones @ white)) @ cones
    try:
        columns = adapted @ primaries @ np.diag(np.linalg.solve(primaries, white))
    except np.linalg.LinAlgError:
        raise ValueError(f"its colour primaries are {chromaticities}, which are no colours") from None

    def text(value):
        head = struct.pack(">4s3I4s2I", b"mluc", 0, 1, 12, b"enUS", 2 * len(value), 28)
        return head + value.encode("utf-16-be")

    def number(values):
        return struct.pack(">4s4x3i", b"XYZ ", *np.round(values * 65536).astype(int))

    tags = {b"desc": text("stated by the file"), b"cprt": text("none"), b"wtpt": number(d50)}
    for name, column, light in zip((b"r", b"g", b"b"), columns.T, curves, strict=True):
        samples = np.round(np.clip(light, 0, 1) * 65535).astype(">u2").tobytes()
        tags[name + b"XYZ"] = number(column)
        tags[name + b"TRC"] = struct.pack(">4s2I", b"curv", 0, curves.shape[1]) + samples
    offset, index, body = 132 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        index += struct.pack(">4s2I", name, offset + len(body), len(value))
        body += value + bytes(-len(value) % 4)
    head = struct.pack(">2I4s4s4s4s", offset + len(body), 0, b"\4\x30\0\0", b"mntr", b"RGB ", b"XYZ ")
    head += bytes(12) + b"acsp" + bytes(28) + struct.pack(">3i", *np.round(d50 * 65536).astype(int))
    return head.ljust(128, b"\0") + index + body


def expand_range(image):
    """Returns an image (L or RGB) of limited range, 16 to 235, in the full one."""
    levels = [min(max(round((level - 16) * 255 / 219), 0), 255) for level in range(256)]
    return image.point(levels * len(image.getbands()))


# Images


def profile_of_image(image):
    """Returns the ICC profile of an image, in whichever way its file says its colours.

    The first of these counts: PNG's cICP, an embedded profile, other numbers of its format, EXIF and TIFF tags.

    Args:
        image: A `PIL.Image.Image` that was opened and is not loaded yet.

    Returns:
        The profile, bytes or None for sRGB; and whether the pixels have the limited range.

    Raises:
        ValueError: What it says cannot be converted.
    """
    position = image.fp.tell()
    image.fp.seek(0)
    try:
        cicp = _png_cicp(image.fp) if image.format == "PNG" else None
        own = {"AVIF": _avif_profile, "BMP": _bmp_profile, "JPEG2000": _jpeg2000_profile, "PNG": _png_profile}
        profile = image.info.get("icc_profile")
        if profile is None and cicp is None and image.format in own:
            profile = own[image.format](image)
    finally:
        image.fp.seek(position)
    if cicp is not None:
        primaries, curve, matrix, full_range = cicp
        if matrix != 0:
            raise ValueError(f"its colour matrix ({matrix} in ITU-T H.273) is not that of RGB, and PNG holds RGB")
        return profile_of_numbers(primaries, curve), not full_range
    of_exif = _exif_profile(image)
    says_srgb = image.format == "PNG" and "srgb" in image.info
    return of_exif if profile is None and not says_srgb else profile, False


def _png_cicp(file):
    file.seek(8)
    while len(head := file.read(8)) == 8:
        num_bytes, name = struct.unpack(">I4s", head)
        if name == b"cICP":
            return struct.unpack("4B", file.read(4))
        if name == b"IDAT":
            return None
        file.seek(num_bytes + 4, io.SEEK_CUR)


def _png_profile(image):
    if "srgb" in image.info:
        return None
    gamma = image.info.get("gamma")
    return _profile(image.info.get("chromaticity"), _gamma_curve(1 / gamma if gamma else None))


def _avif_profile(image):
    # Its decoder applies matrix and range, and says nothing of the rest.
    try:
        with av.open(io.BytesIO(image.fp.read()), options={"format_whitelist": "mov"}) as container:
            context = container.streams.best("video").codec_context
            return profile_of_numbers(context.color_primaries, context.color_trc)
    except av.FFmpegError as error:
        raise ValueError(f"what it says of its colours cannot be read (FFmpeg says {error.strerror!r})") from error


def _bmp_profile(image):
    header = image.fp.read(14 + 124)[14:]
    num_bytes, kind = struct.unpack_from("<I", header)[0], header[56:60]
    if num_bytes < 108 or len(header) < 108:
        return None
    if kind == b"KNIL":
        raise ValueError("its colour profile is another file; embed it")
    if kind == b"DEBM":
        offset, num_profile_bytes = struct.unpack_from("<2I", header, 112)
        image.fp.seek(14 + offset)
        return image.fp.read(num_profile_bytes)
    values = struct.unpack_from("<9i3I", header, 60)
    if kind != bytes(4) or not any(values):
        return None
    xyz = np.reshape(values[:9], (3, 3)) / 2**30  # of red, green and blue
    xyz = np.vstack([xyz.sum(axis=0), xyz])
    chromaticities = xyz[:, :2] / np.maximum(xyz.sum(axis=1, keepdims=True), 1e-9)
    gammas = [value / 65536 for value in values[9:]]
    curve = np.array([_gamma_curve(gamma) for gamma in gammas]) if all(gammas) else None
    return _profile(tuple(chromaticities.ravel().tolist()), curve)


def _jpeg2000_profile(image):
    def boxes(data):
        position = 0
        while position + 8 <= len(data):
            num_bytes, name = struct.unpack_from(">I4s", data, position)
            head = 8
            if num_bytes == 1:
                (num_bytes,), head = struct.unpack_from(">Q", data, position + 8), 16
            end = position + num_bytes if num_bytes else len(data)
            yield name, data[position + head : end]
            position = max(end, position + head)

    header = next((content for name, content in boxes(image.fp.read()) if name == b"jp2h"), b"")
    for name, content in boxes(header):
        if name != b"colr":
            continue
        method, number = content[0], int.from_bytes(content[3:7], "big")
        if method in (2, 3):
            return content[3:]
        # Black and white twice, CMYK, sRGB, grey, and sRGB's Y'CbCr, which the decoder turns into RGB.
        if method == 1 and number in (0, 15, 12, 16, 17, 18):
            return None
        raise ValueError(f"its colour space (method {method}, number {number} in JPEG 2000) is not supported")


def _exif_profile(image):
    try:
        exif = image.getexif()
        details = exif.get_ifd(ExifTags.IFD.Exif)
        space = details.get(ExifTags.Base.ColorSpace)
        interoperability = {}
        with contextlib.suppress(KeyError):  # which Pillow raises where there is none
            interoperability = exif.get_ifd(ExifTags.IFD.Interop)
        white, primaries, transfer, matrix, levels = (
            exif.get(tag) and tuple(float(value) for value in exif.get(tag)) for tag in (318, 319, 301, 529, 532)
        )
        gamma = float(details.get(ExifTags.Base.Gamma) or 0)
    except Exception as error:  # SyntaxError, struct.error, ...: as for the orientation
        logger.info("EXIF not readable: %s", error)
        return None
    # LibTIFF applies these two itself.
    if image.format in ("JPEG", "MPO", "TIFF") and not (
        image.format == "TIFF" and image.tag_v2.get(262) == 6 and image.info.get("compression") != "jpeg"
    ):
        if matrix and np.abs(np.subtract(matrix, _BT601)).max() > 0.002:
            raise ValueError(f"its colour matrix (YCbCrCoefficients {matrix}) is not that of BT.601")
        if levels and levels not in _FULL_RANGES:
            raise ValueError(f"its range (ReferenceBlackWhite {levels}) is not the full one")
    if space == 0xFFFD:
        raise ValueError("its colours are Wide Gamut RGB by EXIF, without a profile; embed one")
    # The second is how cameras say it, beside a colour space that is "uncalibrated".
    if space == 2 or interoperability.get(ExifTags.Interop.InteropIndex) == "R03":
        return _profile(_ADOBE_RGB, _gamma_curve(563 / 256))
    if space == 1:
        return None
    curve = np.reshape(transfer, (3 if len(transfer) % 3 == 0 else 1, -1)) / 65535 if transfer else None
    chromaticities = (*(white or _D65), *(primaries or _SRGB[2:]))
    return _profile(chromaticities, _gamma_curve(gamma) if curve is None else curve)
