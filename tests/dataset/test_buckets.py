"""Sizes, lengths and batch sizes: by flags, and by a bucket config as Open-Sora has it."""

import collections

import numpy as np
import pytest

from dataset.buckets import Sizing, aspect_shapes, cropped_share, describe_buckets
from dataset.draws import keyed_draw
from runtime.errors import RefusedError


CONFIG = {"480p": {"1": [1.0, 4], "49": [1.0, 1]}, "256px": {"1": [1.0, 8], "5": [1.0, 4], "17": [1.0, 2]}}


def sizing(config=CONFIG, seed=5):
    return Sizing(None, None, None, 16, None, config, seed)


@pytest.mark.parametrize(
    "source, num_frames, expected",
    [
        ((1280, 720), 1, (480, 848, 1, 4)),  # an image that is large enough for 480p
        ((1280, 720), 60, (480, 848, 49, 1)),
        ((1280, 720), 48, (192, 336, 17, 2)),  # too short for 480p
        ((320, 320), 60, (256, 256, 17, 2)),  # too small for 480p
        ((320, 320), 5, (256, 256, 5, 4)),
        ((320, 320), 4, "no bucket of bucket_config takes it (480p: 1, 49 frames; 256px: 1, 5, 17 frames)"),
        ((200, 200), 1, "no bucket of bucket_config takes it (480p: 1, 49 frames; 256px: 1, 5, 17 frames)"),
        ((853, 480), 1, (192, 336, 1, 8)),  # one pixel short of 480p
    ],
)
def test_an_item_goes_to_the_largest_bucket_that_it_fills(source, num_frames, expected):
    assert sizing().choose("a", *source, num_frames) == expected


def test_fixed_sizes_in_a_bucket_config():
    config = sizing({"832x480": {"1": [1.0, 2]}, "64x64": {"1": [1.0, 3]}})
    assert config.choose("a", 832, 480, 1) == (480, 832, 1, 2)
    assert config.choose("a", 4000, 479, 1) == (64, 64, 1, 3), "not enough lines"


def test_shares_are_drawn_once_for_each_item_and_what_is_left_falls_down():
    config = {"256px": {"1": [0.3, 8]}, "128px": {"1": [0.5, 16]}}
    names = [f"{n}.png" for n in range(2000)]
    chosen = {name: sizing(config).choose(name, 600, 600, 1) for name in names}
    counts = collections.Counter(choice[3] for choice in chosen.values())
    assert "it is not among the share of bucket_config (0.3 of 256px, 0.5 of 128px)" in chosen.values()
    assert abs(counts[8] / 2000 - 0.3) < 0.04 and abs(counts[16] / 2000 - 0.35) < 0.04
    assert chosen == {name: sizing(config).choose(name, 600, 600, 1) for name in reversed(names)}
    assert chosen != {name: sizing(config, seed=6).choose(name, 600, 600, 1) for name in names}


def test_what_is_refused_everywhere_is_refused_with_buckets_too():
    with pytest.raises(RefusedError, match="at most 10 times the shorter"):
        sizing().choose("a", 20, 4000, 1)


def test_flags_give_one_rule():
    assert Sizing(64, 96, None, 16, 81).choose("a", 500, 400, 30) == (64, 96, 81, None)


def test_draws_are_keyed_by_the_item():
    assert keyed_draw(1, "a").random() == keyed_draw(1, "a").random() != keyed_draw(1, "b").random()
    assert keyed_draw(1, "a", 1).random() != keyed_draw(1, "a", 2).random()


@pytest.mark.parametrize("divisor", [16, 32])
@pytest.mark.parametrize("side", [256, 512, 1024, 1328])
def test_nine_shapes_crop_little_and_are_alike_in_pixels(side, divisor):
    sizing = Sizing(None, None, side**2, divisor, aspect_buckets=9)
    shapes, crops = set(), []
    for aspect in np.geomspace(0.5, 2, 301):
        source = round(4000 * aspect**0.5), round(4000 / aspect**0.5)
        height, width, *_ = sizing.choose("a", *source, 1)
        shapes.add((height, width))
        crops.append(cropped_share(source, (width, height)))
    pixels = [height * width for height, width in shapes]
    assert len(shapes) == 9 and max(pixels) <= side**2
    assert all(height % divisor == width % divisor == 0 for height, width in shapes)
    assert max(crops) <= 0.12 and np.median(crops) < 0.05
    if side >= 512 and divisor == 16:
        assert min(pixels) > 0.93 * side**2


def test_ordinary_photographs_share_shapes():
    """Cut by hand, each with its own sides: without shapes in common every one would be a batch of its own."""
    draw = np.random.default_rng(0)
    sources = [(int(draw.integers(2400, 4100)), int(draw.integers(2000, 3100))) for _ in range(30)]
    of_each = {Sizing(None, None, 1024**2, 16).choose("a", *source, 1)[:2] for source in sources}
    sizing = Sizing(None, None, 1024**2, 16, aspect_buckets=9)
    chosen = [sizing.choose("a", *source, 1)[:2] for source in sources]
    assert len(of_each) > 20 and len(set(chosen)) <= 8
    crops = [cropped_share(source, size[::-1]) for source, size in zip(sources, chosen, strict=True)]
    assert max(crops) <= 0.12 and np.median(crops) < 0.05


@pytest.mark.parametrize("num_shapes", [1, 2, 3, 15])
def test_as_many_shapes_as_asked_for(num_shapes):
    shapes = aspect_shapes(1024**2, 16, num_shapes)
    aspects = sorted(width / height for height, width in shapes)
    expected = [1.0] if num_shapes == 1 else np.geomspace(0.5, 2, num_shapes)
    assert aspects == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    "source, expected",
    [
        ((1280, 720), (736, 1232)),  # a whole frame is not made smaller for being cropped in one direction
        ((1000, 1000), (960, 960)),
        ((640, 640), (608, 608)),
        ((100, 100), (96, 96)),
        ((16, 16), (16, 16)),
        ((9, 9), (16, 16)),
        ((4000, 500), (496, 992)),  # beyond 2:1 the nearest
    ],
)
def test_small_sources_are_hardly_enlarged(source, expected):
    height, width, *_ = Sizing(None, None, 1280 * 720, 16, aspect_buckets=9).choose("a", *source, 1)
    assert (height, width) == expected
    if min(source) > 16:
        assert max(width / source[0], height / source[1]) <= 1.1


def test_shapes_of_a_bucket_config():
    config = {"512px": {"1": [1.0, 4]}, "640x320": {"1": [1.0, 2]}}
    sizing = Sizing(None, None, None, 16, None, config, aspect_buckets=3)
    sizes = {sizing.choose("a", 3000, 2000 + 37 * n, 1) for n in range(27)}
    assert sizes == {(512, 512, 1, 4), (352, 704, 1, 4)}
    assert sizing.choose("a", 650, 330, 1) == (320, 640, 1, 2), "a size with both sides stays as it is"


def test_the_table_of_buckets():
    records = [{"source": {"size": [640, 480]}, "used": {"size": [64, 48], "frames": 1}} for _ in range(4)]
    records.append({"source": {"size": [480, 480]}, "used": {"size": [64, 48], "frames": 1}})
    records.append({"source": {"size": [64, 64]}, "used": {"size": [64, 64], "frames": 5, "batch_size": 1}})
    lines = describe_buckets(
        records,
        [1, 1, 1, 1, 2, 3],
        train_batch_size=4,
        tokens_per_sample=lambda height, width, frames: height * width * frames // 256,
    )
    assert [line.split() for line in lines[1:3]] == [
        ["64", "x", "64", "x", "5", "1", "3", "1", "3", "80", "0.0%", "0.0%"],
        ["64", "x", "48", "x", "1", "5", "6", "4", "2", "48", "0.0%", "25.0%"],
    ]
