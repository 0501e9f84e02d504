"""What files say of their colours outside an ICC profile, and how it is converted: one rule for images and clips.

Whatever declares something other than sRGB becomes an ICC profile, by which the pixels are converted to sRGB as by an
embedded one; what cannot be converted is refused by its name. A file with no declaration, sRGB, BT.709 or a gamma near
2.2 keeps its pixels: the camera curves of SDR video are shown by screens whose own curve is about sRGB's.
"""

import functools
import logging
import struct

import numpy as np
from PIL import ExifTags, ImageCms


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


@functools.cache
def profile_of_numbers(primaries, curve):
    """Returns the ICC profile of colours stated as numbers of ITU-T H.273.

    Args:
        primaries: Colour primaries, of which `UNSTATED` count as BT.709's.
        curve: Transfer characteristics, of which `UNSTATED` count as sRGB's.

    Returns:
        Bytes, empty for sRGB; None where nothing is stated.

    Raises:
        ValueError: They are HDR, or not supported.
    """
    if primaries in UNSTATED and curve in UNSTATED:
        return None
    if curve in _HDR:
        raise ValueError(f"it is HDR ({_HDR[curve]}), which must be converted to SDR")
    if primaries not in (*UNSTATED, *_PRIMARIES):
        raise ValueError(f"its colour primaries ({primaries} in ITU-T H.273) are not supported")
    if curve not in (*UNSTATED, *_CAMERA_CURVES, *_GAMMAS):
        raise ValueError(f"its transfer curve ({curve} in ITU-T H.273) is not supported")
    return _profile(_PRIMARIES.get(primaries, _SRGB), _GAMMAS.get(curve))


def _profile(chromaticities, gamma=None):
    """Returns an ICC profile, empty for what is sRGB or near enough.

    Args:
        chromaticities: x and y of white, red, green and blue.
        gamma: Of the transfer curve; None for sRGB's.
    """
    if len(chromaticities) != 8 or not all(chromaticities[1::2]):
        raise ValueError(f"its colour primaries are {chromaticities}, which are no colours")
    # Gammas from 2.16 to 2.33 are nowhere more than 0.015 from sRGB's curve.
    if np.abs(np.subtract(chromaticities, _SRGB)).max() < 0.002 and (gamma is None or 2.16 <= gamma < 2.33):
        return b""

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

    profile = bytearray(_srgb_profile())

    def put(tag, *numbers):
        (place,) = struct.unpack_from(">I", profile, profile.index(tag) + 4)
        struct.pack_into(f">{len(numbers)}i", profile, place + 8, *numbers)

    for name, column in zip((b"r", b"g", b"b"), np.round(columns.T * 65536).astype(int), strict=True):
        put(name + b"XYZ", *column)
        if gamma:
            # A parametric curve of the kind 0, which has a gamma alone.
            put(name + b"TRC", 0, round(gamma * 65536))
    return bytes(profile)


@functools.cache
def _srgb_profile():
    # Once, since it holds the time at which it is made.
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def expand_range(image):
    """Returns an image (L or RGB) of limited range, 16 to 235, in the full one."""
    levels = [min(max(round((level - 16) * 255 / 219), 0), 255) for level in range(256)]
    return image.point(levels * len(image.getbands()))


# Images


def profile_of_image(image, file):
    """Returns the ICC profile of an image, however its file declares its colours.

    The first of these counts: PNG's cICP, an embedded profile, other numbers of its format, EXIF and TIFF tags.

    Args:
        image: A `PIL.Image.Image` that was opened and is not loaded yet.
        file: The same file, opened once more.

    Returns:
        The profile, bytes that are empty for sRGB, or None where it declares nothing; and whether the pixels have the
        limited range.

    Raises:
        ValueError: What it declares cannot be converted.
    """
    cicp = _png_cicp(file) if image.format == "PNG" else None
    profile = image.info.get("icc_profile")
    own = {"AVIF": _avif_profile, "BMP": _bmp_profile, "PNG": _png_profile}
    if profile is None and image.format in own:
        profile = own[image.format](image, file)
    if cicp is not None:
        primaries, curve, matrix, full_range = cicp
        if matrix != 0:
            raise ValueError(f"its colour matrix ({matrix} in ITU-T H.273) is not that of RGB, and PNG holds RGB")
        return profile_of_numbers(primaries, curve), not full_range
    return _exif_profile(image, profile), False


def _png_cicp(file):
    # By the length and the name of its chunk.
    _, is_there, content = file.read().partition(b"\0\0\0\4cICP")
    return struct.unpack("4B", content[:4]) if is_there else None


def _png_profile(image, _):
    if "srgb" in image.info:
        return b""
    gamma, chromaticities = image.info.get("gamma"), image.info.get("chromaticity")
    if not gamma and not chromaticities:
        return None
    return _profile(chromaticities or _SRGB, 1 / gamma if gamma else None)


def _avif_profile(_, file):
    import av

    # Its decoder applies matrix and range, and reports nothing of the rest.
    try:
        with av.open(file, options={"format_whitelist": "mov"}) as container:
            context = container.streams.best("video").codec_context
            return profile_of_numbers(context.color_primaries, context.color_trc)
    except av.FFmpegError as error:
        raise ValueError(f"what it declares of its colours cannot be read (FFmpeg: {error.strerror!r})") from error


def _bmp_profile(_, file):
    header = file.read(14 + 108)[14:]
    says_nothing = int.from_bytes(header[:4], "little") < 108 or not any(header[56:])
    if not says_nothing and header[56:60] not in (b"BGRs", b" niW"):
        raise ValueError("its colours are not sRGB by its BMP header; save it as PNG with a profile")


def _exif_profile(image, profile):
    """Returns the profile that is there already, or else that of what EXIF and TIFF tags say."""
    try:
        exif = image.getexif()
        details = exif.get_ifd(ExifTags.IFD.Exif)
        space = details.get(ExifTags.Base.ColorSpace)
        interoperability = exif.get_ifd(ExifTags.IFD.Interop) if ExifTags.IFD.Interop in details else {}
        white, primaries, matrix, levels = (tuple(map(float, exif.get(tag, ()))) for tag in (318, 319, 529, 532))
        gamma = float(details.get(ExifTags.Base.Gamma) or 0)
    except Exception as error:  # SyntaxError, struct.error, ...: as for the orientation
        logger.info("EXIF not readable: %s", error)
        return profile
    if matrix and np.abs(np.subtract(matrix, _BT601)).max() > 0.002:
        raise ValueError(f"its YCbCrCoefficients {matrix} are not those of JPEG")
    if levels and levels not in _FULL_RANGES:
        raise ValueError(f"its ReferenceBlackWhite {levels} is not that of JPEG")
    if profile is not None or space == 1:
        return profile
    if space == 0xFFFD:
        raise ValueError("its colours are Wide Gamut RGB by EXIF, without a profile; embed one")
    # The second is how cameras say it, together with a colour space that is "uncalibrated".
    if space == 2 or interoperability.get(ExifTags.Interop.InteropIndex) == "R03":
        return _profile(_ADOBE_RGB, 563 / 256)
    if 301 in exif:
        raise ValueError("its transfer curve is a table (TransferFunction), which is not read; embed a profile")
    return _profile((*(white or _D65), *(primaries or _SRGB[2:])), gamma or None)
