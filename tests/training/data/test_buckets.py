"""Sizes, lengths and batch sizes: by flags, and by a bucket config as Open-Sora has it."""

import collections

import pytest

from training.data.buckets import Sizing, describe_buckets, keyed_draw
from training.errors import RefusedError


CONFIG = {"480p": {"1": [1.0, 4], "49": [1.0, 1]}, "256px": {"1": [1.0, 8], "5": [1.0, 4], "17": [1.0, 2]}}


def sizing(config=CONFIG, seed=5):
    return Sizing(None, None, None, 16, None, config, seed)


@pytest.mark.parametrize(
    "source, num_frames, expected",
    [
        ((1280, 720), 1, (480, 848, 1, 4)),  # a picture that is large enough for 480p
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


def test_the_table_of_buckets():
    used = [{"size": [64, 48], "frames": 1}] * 5 + [{"size": [64, 64], "frames": 5, "batch_size": 1}]
    lines = describe_buckets(
        [{"used": entry} for entry in used],
        [1, 1, 1, 1, 2, 3],
        train_batch_size=4,
        num_processes=2,
        tokens_per_sample=lambda height, width, frames: height * width * frames // 256,
    )
    assert [line.split() for line in lines[1:3]] == [
        ["64", "x", "64", "x", "5", "1", "3", "1", "80", "75%"],
        ["64", "x", "48", "x", "1", "5", "6", "4", "48", "75%"],
    ]
    assert "2 buckets have fewer items than one batch" in lines[-1]
