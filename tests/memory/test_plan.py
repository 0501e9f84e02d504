"""The plan that the flags ask for: a mode for every block of every list."""

import types

import pytest

from memory.plan import MemoryPlan, per_block


def plan(block_lists, checkpointing=False, offload=False, checkpoint_blocks=None):
    args = types.SimpleNamespace(
        use_gradient_checkpointing=checkpointing,
        use_gradient_checkpointing_offload=offload,
        checkpoint_blocks=checkpoint_blocks,
    )
    return MemoryPlan.from_args(args, block_lists).modes


def test_the_flags_hold_for_all_blocks():
    lists = {"side": 2, "blocks": 3}
    assert plan(lists) == {"side": ("keep",) * 2, "blocks": ("keep",) * 3}
    assert plan(lists, checkpointing=True) == {"side": ("recompute",) * 2, "blocks": ("recompute",) * 3}
    parked = {"side": ("park", "park"), "blocks": ("park", "park", "recompute")}
    assert plan(lists, offload=True) == parked, "the last block of all is needed at once"
    assert plan(lists, checkpointing=True, offload=True) == parked


@pytest.mark.parametrize(
    "numbers, side, blocks",
    [
        ([1], "rk", "rkk"),
        ([2], "rr", "rrk"),
        ([1, 3], "rk", "rrr"),
        ([0, 2], "kk", "rrk"),
        ([100, 1], "rr", "rkk"),
        ([100], "rr", "rrr"),
    ],
)
def test_the_first_blocks_of_each_list(numbers, side, blocks):
    names = {"r": "recompute", "k": "keep"}
    expected = {"side": tuple(names[c] for c in side), "blocks": tuple(names[c] for c in blocks)}
    lists = {"side": 2, "blocks": 3}
    assert plan(lists, checkpointing=True, checkpoint_blocks=numbers) == expected
    parked = {
        name: tuple("park" if mode == "recompute" else mode for mode in modes) for name, modes in expected.items()
    }
    if blocks == "rrr":
        parked["blocks"] = ("park", "park", "recompute")
    assert plan(lists, offload=True, checkpoint_blocks=numbers) == parked


@pytest.mark.parametrize("numbers", [[1, 2, 3], [1, 2]])
def test_numbers_that_fit_no_list(numbers):
    with pytest.raises(ValueError, match=f"--checkpoint_blocks has {len(numbers)} numbers; .* each of blocks"):
        plan({"blocks": 3}, checkpointing=True, checkpoint_blocks=numbers)


def test_arguments_and_description():
    args = types.SimpleNamespace(
        use_gradient_checkpointing=False, use_gradient_checkpointing_offload=True, checkpoint_blocks=[2]
    )
    made = MemoryPlan.from_args(args, {"blocks": 4})
    assert made.arguments("blocks") == {
        "use_gradient_checkpointing": [True, True, False, False],
        "use_gradient_checkpointing_offload": [True, True, False, False],
    }
    assert made.describe() == ["blocks: 2 of 4 blocks checkpointed, 2 offloaded"]


def test_one_flag_for_all_blocks_or_one_for_each():
    assert per_block(True, 2) == [True, True] and per_block((True, False), 2) == [True, False]
    with pytest.raises(ValueError, match="1 entries for 2 blocks"):
        per_block([True], 2)
