"""The order of training: nothing lost, nothing doubled, the same for every number of processes."""

import collections
import json
import types

import pytest
import torch

from training.data.batches import BatchPlan, MicroBatchSampler, TrainingDataset, collate, plan_batches
from training.data.inspection import Item
from training.data.metadata import Row
from training.errors import RefusedError
from training.flow_matching import Draw, SigmaLaw


def plan(sizes, **settings):
    return BatchPlan(sizes, **{"train_batch_size": 1, "num_processes": 1, "seed": 5} | settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"train_batch_size": 4},
        {"train_batch_size": 2, "num_processes": 2},
        {"train_batch_size": 1, "num_processes": 4},
        {"train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"train_batch_size": 1, "num_processes": 2, "gradient_accumulation_steps": 2},
    ],
)
def test_global_batches_do_not_depend_on_how_they_are_split(settings):
    sizes = [(64, 64)] * 10
    reference, other = plan(sizes, train_batch_size=4), plan(sizes, **settings)
    assert [other.step(step) for step in range(1, 12)] == [reference.step(step) for step in range(1, 12)]


def test_every_item_once_per_epoch():
    order = plan([(64, 64)] * 7, train_batch_size=3)
    seen = [index for step in range(1, 8) for index in order.step(step)]
    for epoch in range(3):
        assert sorted(seen[epoch * 7 : (epoch + 1) * 7]) == list(range(7))
    assert seen[:7] != seen[7:14], "each epoch has an order of its own"
    assert [order.epoch(step) for step in (1, 2, 3, 4, 8)] == [0, 0, 0, 1, 3]


@pytest.mark.parametrize("num_epochs", [1, 2, 7])
@pytest.mark.parametrize(
    "settings",
    [
        {"train_batch_size": 1},
        {"train_batch_size": 4},
        {"train_batch_size": 4, "num_processes": 8, "gradient_accumulation_steps": 3},
    ],
)
def test_every_item_comes_in_every_epoch_whatever_the_sizes(settings, num_epochs):
    """54 sizes, most of them rare: an epoch ends when its last item came, and no bucket is far behind or ahead."""
    sizes = [(n % 50 if n < 200 else 50 + n % 4,) for n in range(1000)]
    order = plan(sizes, **settings)
    seen = collections.Counter()
    last_step = order.steps_for(num_epochs)
    for step in range(1, last_step + 1):
        seen.update(order.step(step))
    assert min(seen[index] for index in range(1000)) >= num_epochs
    assert [order.epoch(1), order.epoch(last_step)] == [0, num_epochs - 1]
    unit = settings["train_batch_size"] * settings.get("num_processes", 1)
    for size in {*sizes}:
        members = [index for index in range(1000) if sizes[index] == size]
        total = sum(seen[index] for index in members)
        extra = unit * settings.get("gradient_accumulation_steps", 1)
        assert num_epochs * len(members) <= total < num_epochs * len(members) + unit + extra


def test_repeats_come_within_one_epoch():
    order = plan([(64, 64)] * 3, dataset_repeat=2)
    assert collections.Counter(order.step(s)[0] for s in range(1, 7)) == {0: 2, 1: 2, 2: 2}
    order = plan([(64, 64)] * 3, dataset_repeat=[1, 4, 2])
    assert collections.Counter(order.step(s)[0] for s in range(1, 8)) == {0: 1, 1: 4, 2: 2}


def test_batch_sizes_of_their_own():
    """Pictures at 4 and clips at 1 in one run, on two processes with accumulation."""
    sizes, batch_sizes = [(64, 64, 1)] * 12 + [(64, 64, 5)] * 4, [4] * 12 + [1] * 4
    order = plan(sizes, train_batch_size=batch_sizes, num_processes=2, gradient_accumulation_steps=2)
    seen = collections.Counter()
    for step in range(1, 40):
        units = order.micro_batches(step)
        for unit in units:
            assert len({sizes[index] for index in unit}) == 1 and len(unit) == 2 * batch_sizes[unit[0]]
        weights = [order.loss_weight(step, n) for n in range(2)]
        assert sum(weights) == 2 and weights[0] * len(units[1]) == weights[1] * len(units[0])
        seen.update(order.step(step))
        processes = [next(iter(MicroBatchSampler(order, process_index=r, steps=[step]))) for r in range(2)]
        assert len(processes[0]) == len(processes[1]) == len(units[0]) // 2
        assert [place[1] for process in processes for place in process] == list(range(len(units[0])))
    assert max(seen.values()) - min(seen.values()) <= 3, "each item gets its share"
    assert order.samples_before(1) == 0 and order.samples_before(3) == len(order.step(1)) + len(order.step(2))
    steps = order.steps_for(3)
    trained = collections.Counter(index for step in range(1, steps + 1) for index in order.step(step))
    assert min(trained[index] for index in range(16)) >= 3 and order.epoch(steps) == 2


def test_sizes_are_not_mixed_and_each_item_gets_its_share():
    sizes = [(64, 64)] * 2 + [(96, 64)] * 2 + [(64, 96)]
    order = plan(sizes, train_batch_size=2, gradient_accumulation_steps=1)
    seen = collections.Counter()
    for step in range(1, 6):  # two epochs of five items in batches of two
        items = order.step(step)
        assert len({sizes[index] for index in items}) == 1
        seen.update(items)
    assert seen == dict.fromkeys(range(5), 2)


def test_large_buckets_mix_in_proportion():
    sizes = [(64, 64)] * 90 + [(96, 64)] * 10
    order = plan(sizes, train_batch_size=2)
    rare = [step for step in range(1, 501) if order.step(step)[0] >= 90]
    assert 48 <= len(rare) <= 52
    assert len(set(zip([r % 10 for r in rare], range(3), strict=False))) > 1, "not at fixed places"


def test_seed_changes_the_order():
    sizes = [(64, 64)] * 20
    assert plan(sizes).step(1) == plan(sizes).step(1)
    assert [plan(sizes, seed=1).step(s) for s in range(1, 9)] != [plan(sizes, seed=2).step(s) for s in range(1, 9)]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_processes_share_out_the_global_batch(accumulation):
    order = plan([(64, 64)] * 10, train_batch_size=2, num_processes=2, gradient_accumulation_steps=accumulation)
    places = []
    for process in range(2):
        micro_batches = list(MicroBatchSampler(order, process_index=process, steps=range(2, 4)))
        assert len(micro_batches) == 2 * accumulation and all(len(batch) == 2 for batch in micro_batches)
        places += [place for batch in micro_batches for place in batch]
    expected = [(step, p, index) for step in (2, 3) for p, index in enumerate(order.step(step))]
    assert sorted(places) == expected


# ---------------------------------------------------------------- samples


def make_dataset(**settings):
    def read(n):
        return {"latents": torch.full((2, 4, 4), float(n)), "prompt_embeds": torch.full((n + 1, 3), float(n))}

    laws = [SigmaLaw("uniform", 1 + n) for n in range(4)]
    return TrainingDataset(["0", "1", "2", "3"], [(n,) for n in range(4)], read, laws, seed=3, **settings)


def test_sample_is_its_own_latents_caption_and_draw():
    dataset = make_dataset()
    for place in [(1, 0, 2), (5, 3, 1)]:
        sample, draw = dataset[place], Draw(3, *place[:2])
        assert sample["latents"].unique() == place[2] and sample["prompt_embeds"].unique() == place[2]
        assert torch.equal(sample["noise"], draw.noise((2, 4, 4)))
        assert sample["sigmas"].item() == pytest.approx(draw.sigma(SigmaLaw("uniform", 1 + place[2])))


def test_dropped_captions_change_nothing_else():
    dropped = torch.full((2, 3), -1.0)
    with_dropout = make_dataset(caption_dropout=0.5, dropped_prompt_embeds=dropped)
    shares = 0
    for step in range(1, 101):
        ours, plain = with_dropout[step, 0, 1], make_dataset()[step, 0, 1]
        shares += ours["prompt_embeds"] is dropped
        assert torch.equal(ours["noise"], plain["noise"]) and ours["sigmas"] == plain["sigmas"]
    assert 30 < shares < 70


def test_collate_pads_with_zeros_and_masks():
    dataset = make_dataset()
    batch = collate([dataset[1, 0, 1], dataset[1, 1, 3]])
    assert batch["latents"].shape == batch["noise"].shape == (2, 2, 4, 4) and batch["sigmas"].shape == (2,)
    assert batch["prompt_embeds"].shape == (2, 4, 3)
    assert batch["prompt_embeds_mask"].tolist() == [[True, True, False, False], [True] * 4]
    assert (batch["prompt_embeds"][0, 2:] == 0).all() and (batch["prompt_embeds"][0, :2] == 1).all()
    assert collate([dataset[1, 0, 1], dataset[1, 1, 1]])["prompt_embeds_mask"] is None
    assert batch["sigmas"][0] != batch["sigmas"][1] and not torch.equal(batch["noise"][0], batch["noise"][1])


# ---------------------------------------------------------------- the plan of a run


def make_items(*used, caption="a", digest="d", repeat=1):
    return [
        Item(
            Row(str(n), caption, None, str(n), repeat=repeat),
            {"id": str(n), "caption": caption, "used": {"size": [w, h], "frames": f}},
            digest,
        )
        for n, (w, h, f) in enumerate(used)
    ]


def planned(items, num_processes=1, resumed=None, model=None, num_stages=1, **settings):
    defaults = {"train_batch_size": 2, "gradient_accumulation_steps": 1, "seed": 5}
    args = types.SimpleNamespace(
        **defaults | {"lr_scheduler": "cosine", "max_train_steps": 4, "num_train_epochs": None} | settings
    )
    resumed = resumed or {"step": 0}
    return plan_batches(
        args, items, num_processes, resumed=resumed, model=model or {"width": 8}, num_stages=num_stages
    )


def test_clips_of_different_length_do_not_meet_in_a_micro_batch():
    items = make_items(*[(64, 64, 5)] * 5, *[(64, 64, 9)] * 5)
    batches, _ = planned(items)
    for step in range(1, 30):
        assert len({items[index].record["used"]["frames"] for index in batches.step(step)}) == 1


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, None),
        ({"max_train_steps": 9}, None),
        ({"max_train_steps": 2}, "at step 3, this run ends at step 2"),
        ({"max_train_steps": 1, "num_stages": 2}, "at step 3, this run ends at step 2"),
        ({"max_train_steps": 2, "num_stages": 2}, None),
        ({"train_batch_size": 1}, "1 samples per step, that of the checkpoint had 2"),
        ({"train_batch_size": 1, "gradient_accumulation_steps": 2}, "1 samples per micro batch"),
        ({"repeat": 2}, "8 samples per epoch"),
        ({"model": {"width": 9}}, "the model has width 9, that of the checkpoint had 8"),
        ({"order": -1}, "items, their order, files, captions, sizes or frames differ"),
        ({"caption": "b"}, "items, their order, files, captions, sizes or frames differ"),
        ({"digest": "e"}, "items, their order, files, captions, sizes or frames differ"),
    ],
)
def test_a_resumed_run_is_the_same_run(changes, said):
    sizes = [(64, 64, 5), (64, 64, 9), (64, 64, 9), (64, 80, 5)]
    batches, _ = planned(make_items(*sizes))
    order = changes.get("order", 1)
    of_items = {name: value for name, value in changes.items() if name in ("caption", "digest", "repeat")}
    items = make_items(*sizes, **of_items)[::order]
    changes = {name: value for name, value in changes.items() if name not in ("order", *of_items)}
    resumed = {"step": 3} | json.loads(json.dumps(batches.identity))
    if said is None:
        planned(items, resumed=resumed, **changes)
    else:
        with pytest.raises(RefusedError, match=said):
            planned(items, resumed=resumed, **changes)
