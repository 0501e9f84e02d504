"""The order of training: nothing lost, nothing doubled, the same for every number of processes."""

import collections
import json
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.batches import BatchPlan, Sample, TrainingDataset, collate, plan_batches
from dataset.draws import Draw
from dataset.inspection import Item
from dataset.metadata import Row
from runtime.errors import RefusedError
from training.flow_matching import SigmaLaw


def plan(sizes, *, train_batch_size=1, dataset_repeat=1, tokens=1, **given):
    """The plan of items of these sizes; batch sizes, repeats and tokens are those of all items or of each."""

    def of_each(value):
        return [value] * len(sizes) if isinstance(value, int) else value

    keys = list(zip(sizes, of_each(train_batch_size), strict=True))
    how = {"num_processes": 1, "gradient_accumulation_steps": 1, "seed": 5} | given
    return BatchPlan(keys, of_each(dataset_repeat), of_each(tokens), **how)


@pytest.mark.parametrize(
    "split",
    [
        {"train_batch_size": 4},
        {"train_batch_size": 2, "num_processes": 2},
        {"train_batch_size": 1, "num_processes": 4},
        {"train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"train_batch_size": 1, "num_processes": 2, "gradient_accumulation_steps": 2},
    ],
)
def test_global_batches_do_not_depend_on_how_they_are_split(split):
    sizes = [(64, 64)] * 10
    reference, other = plan(sizes, train_batch_size=4), plan(sizes, **split)
    assert [other.step(step) for step in range(1, 12)] == [reference.step(step) for step in range(1, 12)]


def steps_of(order, epoch):
    """The steps of one epoch."""
    return range(epoch * order.steps_per_epoch + 1, (epoch + 1) * order.steps_per_epoch + 1)


def test_every_item_once_per_epoch():
    order = plan([(64, 64)] * 7, train_batch_size=3)
    epochs = [[index for step in steps_of(order, epoch) for index in order.step(step)] for epoch in range(3)]
    assert [sorted(seen) for seen in epochs] == [list(range(7))] * 3
    assert epochs[0] != epochs[1], "each epoch has an order of its own"
    assert [len(order.step(step)) for step in range(1, 7)] == [3, 3, 1, 3, 3, 1]
    assert [order.epoch(step) for step in (1, 2, 3, 4, 10)] == [0, 0, 0, 1, 3]
    assert [order._find(step)[1] for step in (1, 2, 3, 4, 10)] == [0, 3, 6, 7, 21]


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=40),
    batch_sizes=st.lists(st.integers(1, 6), min_size=10, max_size=10),
    num_processes=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_an_epoch_is_an_epoch(data, batch_sizes, num_processes, accumulation, seed):
    """Whatever the sizes, batch sizes, repeats and processes: each epoch has each item as often as its repeats say,
    and what the processes do, put together, is the step and weighs as its mean.
    """
    sizes, repeats = [(number,) for number, _ in data], [repeat for _, repeat in data]
    batch_size = [batch_sizes[number] for number, _ in data]
    split = {"num_processes": num_processes, "gradient_accumulation_steps": accumulation}
    tokens = [2**number for number, _ in data]
    order = plan(sizes, train_batch_size=batch_size, dataset_repeat=repeats, tokens=tokens, seed=seed, **split)
    assert order.samples_per_epoch == sum(repeats)
    for epoch in (0, 3):
        seen = collections.Counter()
        for step in steps_of(order, epoch):
            assert order.epoch(step) == epoch
            micro_batches, samples = order.micro_batches(step), order.step(step)
            seen.update(samples)
            is_last = step == steps_of(order, epoch)[-1]
            assert len(micro_batches) == accumulation or (is_last and 0 < len(micro_batches) < accumulation)
            own = [order.own_part(step, process) for process in range(num_processes)]
            counted, weights = {}, collections.Counter()
            for number, micro_batch in enumerate(micro_batches):
                assert len(micro_batch) == num_processes and micro_batch[0]
                for process, batch in enumerate(micro_batch):
                    assert batch or is_last, "only at the end of an epoch is nothing left"
                    weight = order.loss_weight(step, number, process)
                    done = own[process][number]
                    assert len({sizes[index] for _, _, index in done}) == 1, "one size"
                    assert 1 <= len(done) <= max(batch_size[index] for _, _, index in done)
                    if not batch:
                        assert weight == 0 and len(done) == 1 and done[0][1] == len(samples)
                        continue
                    assert [index for _, _, index in done] == batch
                    for at, position, index in done:
                        assert at == step and position not in counted
                        counted[position] = index
                        weights[position] = weight / len(batch)
            assert [counted[position] for position in range(len(samples))] == samples
            # Accelerate divides by the micro-batches of a whole step, DDP by the processes.
            for weight in weights.values():
                assert weight / (num_processes * accumulation) == pytest.approx(1 / len(samples))
        assert seen == dict(enumerate(repeats))
    for step in (1, order.steps_per_epoch, 2 * order.steps_per_epoch + 1):
        assert order._find(step)[1] == sum(len(order.step(before)) for before in range(1, step))


def test_whole_batches_weigh_exactly_one():
    """So that a run whose batches are all whole is what it would be without weights, to the bit."""
    order = plan([(64, 64)] * 18, train_batch_size=3, num_processes=2, gradient_accumulation_steps=3)
    assert [order.loss_weight(1, n, r) for n in range(3) for r in range(2)] == [1.0] * 6


def test_more_processes_than_items():
    order = plan([(64, 64)] * 2, num_processes=8)
    assert [len(order.step(step)) for step in (1, 2)] == [2, 2] and order.steps_per_epoch == 1
    assert [order.loss_weight(1, 0, process) for process in range(8)] == [4, 4, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("num_processes", [1, 2, 3, 6])
def test_several_sizes_do_not_depend_on_how_a_step_is_split(num_processes):
    sizes = [(n % 5,) for n in range(47)]
    order = plan(
        sizes, train_batch_size=3, num_processes=num_processes, gradient_accumulation_steps=6 // num_processes
    )
    reference = plan(sizes, train_batch_size=3, num_processes=6)
    assert [order.step(step) for step in range(1, 12)] == [reference.step(step) for step in range(1, 12)]


def test_repeats_come_within_one_epoch():
    order = plan([(64, 64)] * 3, dataset_repeat=2)
    assert collections.Counter(order.step(s)[0] for s in range(1, 7)) == {0: 2, 1: 2, 2: 2}
    order = plan([(64, 64)] * 3, dataset_repeat=[1, 4, 2])
    assert collections.Counter(order.step(s)[0] for s in range(1, 8)) == {0: 1, 1: 4, 2: 2}


def test_processes_have_about_equally_many_tokens():
    """Clips of 16 and of 15 tokens meet, those of 4 come by themselves as long as there are enough."""
    tokens = [16] * 40 + [15] * 40 + [4] * 40
    order = plan([(count,) for count in tokens], tokens=tokens, train_batch_size=2, num_processes=4)
    mixed = 0
    for step in range(1, 40):
        counts = {sum(tokens[index] for index in batch) for batch in order.micro_batches(step)[0]}
        assert max(counts) <= 1.25 * min(counts), counts
        mixed += len(counts) > 1
    assert mixed > 5, "sizes that are alike meet"


def test_large_buckets_mix_in_proportion():
    sizes = [(64, 64)] * 90 + [(96, 64)] * 10
    order = plan(sizes, train_batch_size=2)
    rare = [step for step in range(1, 501) if order.step(step)[0] >= 90]
    assert len(rare) == 50
    for epoch in range(10):
        places = [step - 50 * epoch for step in rare if step in steps_of(order, epoch)]
        assert len(places) == 5 and all(10 * n < place <= 10 * (n + 1) + 1 for n, place in enumerate(places))
    assert len({step % 50 for step in rare}) > 10, "not at fixed places"


def test_rare_sizes_come_at_any_time_of_an_epoch():
    order = plan([(n,) for n in range(20)], train_batch_size=4)
    first = [order.step(epoch * 20 + 1)[0] for epoch in range(30)]
    assert len(set(first)) > 10


def test_seed_changes_the_order():
    sizes = [(64, 64)] * 20
    assert plan(sizes).step(1) == plan(sizes).step(1)
    assert [plan(sizes, seed=1).step(s) for s in range(1, 9)] != [plan(sizes, seed=2).step(s) for s in range(1, 9)]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_processes_share_out_the_global_batch(accumulation):
    order = plan([(64, 64)] * 24, train_batch_size=2, num_processes=2, gradient_accumulation_steps=accumulation)
    places = []
    for process in range(2):
        micro_batches = [batch for step in (2, 3) for batch in order.own_part(step, process)]
        if accumulation == 1:
            assert len(micro_batches) == 2 and all(len(batch) == 2 for batch in micro_batches)
        places += [place for batch in micro_batches for place in batch]
    expected = [(step, p, index) for step in (2, 3) for p, index in enumerate(order.step(step))]
    assert sorted(places) == expected


# ---------------------------------------------------------------- samples


def make_dataset(**settings):
    def read(n, level):
        return {
            "latents": torch.full((2, 4, 4), float(n)),
            "prompt_embeds": torch.full((n + 1, 3), float(level)),
            "pooled_prompt_embeds": torch.full((5,), float(level)),
            "text_ids": torch.full((n + 1, 2), level),
        }

    samples = [Sample(str(n), (n, n), (n, -1), SigmaLaw("uniform", 1 + n)) for n in range(4)]
    return TrainingDataset(samples, read, padded=("prompt_embeds", "text_ids"), seed=3, **settings)


def test_sample_is_its_own_latents_caption_and_draw():
    dataset = make_dataset()
    for place in [(1, 0, 2), (5, 3, 1)]:
        sample, draw = dataset[place], Draw(3, *place[:2])
        assert sample["latents"].unique() == place[2] and sample["prompt_embeds"].unique() == place[2]
        assert torch.equal(sample["noise"], draw.noise((2, 4, 4)))
        assert sample["sigmas"].item() == pytest.approx(draw.sigma(SigmaLaw("uniform", 1 + place[2])))


def test_dropped_captions_change_nothing_else():
    with_dropout = make_dataset(caption_dropout=0.5)
    shares = 0
    for step in range(1, 101):
        ours, plain = with_dropout[step, 0, 1], make_dataset()[step, 0, 1]
        levels = {float(ours[name].unique()) for name in ("prompt_embeds", "pooled_prompt_embeds", "text_ids")}
        assert levels in ({1.0}, {-1.0}), "all tensors of a text, or none"
        shares += levels == {-1.0}
        assert torch.equal(ours["noise"], plain["noise"]) and ours["sigmas"] == plain["sigmas"]
    assert 30 < shares < 70


def test_collate_pads_with_zeros_and_masks():
    dataset = make_dataset()
    batch = collate([dataset[1, 0, 1], dataset[1, 1, 3]], dataset.padded)
    assert batch["latents"].shape == batch["noise"].shape == (2, 2, 4, 4) and batch["sigmas"].shape == (2,)
    assert batch["prompt_embeds"].shape == (2, 4, 3)
    assert batch["prompt_embeds_mask"].tolist() == [[True, True, False, False], [True] * 4]
    assert (batch["prompt_embeds"][0, 2:] == 0).all() and (batch["prompt_embeds"][0, :2] == 1).all()
    assert batch["text_ids"].shape == (2, 4, 2) and batch["text_ids"].dtype == torch.int64
    assert torch.equal(batch["text_ids_mask"], batch["prompt_embeds_mask"])
    assert batch["pooled_prompt_embeds"].tolist() == [[1.0] * 5, [3.0] * 5]
    assert "pooled_prompt_embeds_mask" not in batch
    assert collate([dataset[1, 0, 1], dataset[1, 1, 1]])["prompt_embeds_mask"] is None
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        collate([dataset[1, 0, 1], dataset[1, 1, 3]], ("text_ids",))
    assert batch["sigmas"][0] != batch["sigmas"][1] and not torch.equal(batch["noise"][0], batch["noise"][1])


# ---------------------------------------------------------------- the plan of a run


def make_items(*used, caption="a", digest="d", repeat=1):
    return [
        Item(
            Row(str(n), caption, {}, str(n), repeat=repeat),
            {"id": str(n), "caption": caption, "used": {"size": [w, h], "frames": f}},
            {"target": (digest,)},
        )
        for n, (w, h, f) in enumerate(used)
    ]


def planned(items, num_processes=1, resumed=None, model=None, num_stages=1, **settings):
    def num_tokens(height, width, num_frames):
        return height * width * num_frames // 256

    defaults = {"train_batch_size": 2, "gradient_accumulation_steps": 1, "seed": 5}
    args = types.SimpleNamespace(
        **defaults | {"lr_scheduler": "cosine", "max_train_steps": 4, "num_train_epochs": None} | settings
    )
    resumed = resumed or {"step": 0}
    return plan_batches(
        args,
        items,
        num_processes,
        num_tokens=num_tokens,
        resumed=resumed,
        model=model or {"width": 8},
        num_stages=num_stages,
    )


def test_clips_of_different_length_do_not_meet_in_a_micro_batch():
    items = make_items(*[(64, 64, 5)] * 5, *[(64, 64, 9)] * 5)
    batches = planned(items)
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
        ({"train_batch_size": 1}, "its run had 2 samples per step, and this one has 1"),
        (
            {"train_batch_size": 1, "gradient_accumulation_steps": 2},
            "its run had 1 batches per step, and this one has 2",
        ),
        ({"num_processes": 2}, "this one has 4"),
        ({"repeat": 2}, "4 samples per epoch, and this one has 8"),
        ({"model": {"width": 9}}, "its run had 8 width of the model, and this one has 9"),
        ({"order": -1}, "items, their order, files, captions, sizes or frames differ"),
        ({"caption": "b"}, "items, their order, files, captions, sizes or frames differ"),
        ({"digest": "e"}, "items, their order, files, captions, sizes or frames differ"),
    ],
)
def test_a_resumed_run_is_the_same_run(changes, said):
    sizes = [(64, 64, 5), (64, 64, 9), (64, 64, 9), (64, 80, 5)]
    batches = planned(make_items(*sizes))
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
