"""The plan that the flags ask for: a mode for every block of every list."""

import types

import pytest

from blockwise.plan import BudgetError, Cost, MemoryPlan, Mode, per_block


def words(plan):
    """Return what a plan does with activations, as tuples of words."""
    return {name: tuple(mode.activations for mode in modes) for name, modes in plan.modes.items()}


def plan(block_lists, checkpointing=False, offload=False, checkpoint_blocks=None):
    args = types.SimpleNamespace(
        use_gradient_checkpointing=checkpointing,
        use_gradient_checkpointing_offload=offload,
        checkpoint_blocks=checkpoint_blocks,
    )
    return words(MemoryPlan.from_args(args, block_lists))


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


def test_description():
    args = types.SimpleNamespace(
        use_gradient_checkpointing=False, use_gradient_checkpointing_offload=True, checkpoint_blocks=[2]
    )
    made = MemoryPlan.from_args(args, {"blocks": 4})
    first = "blocks: 2 of 4 blocks checkpointed, 2 offloaded"
    assert made.describe() == [first, "  blocks.0 to 1: park", "  blocks.2 to 3: keep"]


def test_one_mode_for_every_block():
    lists = {"decoder.blocks": 2, "blocks": 1}
    uniform = MemoryPlan.uniform(lists, "park")
    assert uniform.modes == {"decoder.blocks": (Mode("park"), Mode("park")), "blocks": (Mode("park"),)}
    assert MemoryPlan.uniform(lists, Mode("keep")) == MemoryPlan.uniform(lists, "keep")
    assert uniform.as_dict()["blocks"] == [{"activations": "park", "weights": "resident", "units": 1}]
    for wrong in ({"activations": "offload"}, {"weights": "streamed"}, {"units": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} of a Mode"):
            Mode(**wrong)


def test_one_flag_for_all_blocks_or_one_for_each():
    assert per_block(True, 2) == [True, True] and per_block((True, False), 2) == [True, False]
    with pytest.raises(ValueError, match="1 entries for 2 blocks"):
        per_block([True], 2)


# ---------------------------------------------------------------- budgets

LISTS = {"side": 2, "blocks": 5}
COST = {"keep": (10, 0.0), "recompute": (3, 1.0), "park": (1, 1.001)}  # bytes and seconds of a block


def costs(plans):
    for plan in plans:
        activations = [mode for modes in words(plan).values() for mode in modes]
        peak_bytes, seconds = (sum(COST[mode][which] for mode in activations) for which in (0, 1))
        yield Cost(seconds, 2 * activations.count("park"), peak_bytes)


def plan_for(budget_bytes, host_bytes=None):
    return words(MemoryPlan.from_budget(LISTS, budget_bytes, costs, host_bytes=host_bytes))


def cost(modes):
    return sum(COST[mode][1] for one in modes.values() for mode in one)


def test_the_fastest_plan_that_fits():
    """By hand: seven blocks of 10 bytes kept, 3 recomputed, 1 parked; the last is never parked."""
    assert plan_for(70) == {"side": ("keep",) * 2, "blocks": ("keep",) * 5}
    assert plan_for(69) == {"side": ("recompute", "keep"), "blocks": ("keep",) * 5}
    assert plan_for(62) == {"side": ("park", "keep"), "blocks": ("keep",) * 5}, "61 bytes, where recomputed 63"
    assert plan_for(9) == {"side": ("park",) * 2, "blocks": ("park",) * 4 + ("recompute",)}


def test_a_larger_budget_never_gives_a_slower_plan():
    seconds = [cost(plan_for(budget)) for budget in range(9, 80)]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1] == 0
    assert [plan_for(budget) for budget in range(9, 80)] == [plan_for(budget) for budget in range(9, 80)]


def test_what_the_host_has_limits_what_is_parked():
    assert plan_for(62, host_bytes=1) == {"side": ("recompute",) * 2, "blocks": ("keep",) * 5}


@pytest.mark.parametrize("host_bytes, smallest", [(None, 9), (0, 21), (4, 17)])
def test_a_budget_that_cannot_be_met_names_the_smallest_that_can(host_bytes, smallest):
    with pytest.raises(BudgetError) as error:
        plan_for(smallest - 1, host_bytes)
    assert error.value.smallest_bytes == smallest
    plan_for(smallest, host_bytes)
