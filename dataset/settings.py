"""What flags and config files can say of data; needs the standard library only, so that parsing stays quick."""

DATASET_FLAGS = ("dataset_path", "dataset_metadata", "media_column", "caption_column", "dataset_repeat")

# Pixels of a video with so many lines, 16:9.
LINES = {f"{lines}p": lines * 2 * round(lines * 8 / 9) for lines in (144, 240, 360, 480, 720, 1080)}


def bucket_pixels(size):
    """Return (pixels, None) of a size as 256px or 480p, a cap, or (pixels, (height, width)) of one as 832x480.

    Raises:
        ValueError: It is none of these.
    """
    if size in LINES:
        return LINES[size], None
    is_cap = size.endswith("px")
    sides = [int(side) for side in (size[:-2].split() if is_cap else size.split("x"))]
    if min(sides) < 1:
        raise ValueError(size)
    width, height = sides * 2 if is_cap else sides
    return width * height, None if is_cap else (height, width)


def round_down_frames(num_frames):
    """Return the largest number of frames of at most `num_frames` (1 or more) that the video VAEs take: 4n + 1."""
    return (num_frames - 1) // 4 * 4 + 1
