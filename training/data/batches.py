"""Which sample is trained when: the order of the dataset, micro-batches of equal size, and what is drawn for each.

One unit of the order is a micro-batch of all processes together: `train_batch_size * num_processes` samples of one
size. Process r takes its r-th part. So one process with twice the batch size sees what two processes see, at
the same places of the global batch; and all processes have equally many tokens at any moment, so that none waits. An
epoch does not end a batch: what is missing of its last one, of each size, comes from the next epoch.
"""

import collections
import concurrent.futures
import hashlib
import heapq
import itertools
import json
import logging

import numpy as np
import torch

from training.data.buckets import bucket_key
from training.errors import RefusedError
from training.flow_matching import Draw


logger = logging.getLogger(__name__)


class BatchPlan:
    """The order of training, the same on every process.

    Args:
        sizes (`list[tuple]`):
            For each item its size. Only items of equal size come into one micro-batch.
        train_batch_size, dataset_repeat (`int`, or `list[int]` with one for each item):
            Items of one size with different batch sizes do not meet.
        num_processes, gradient_accumulation_steps, seed (`int`)
    """

    def __init__(
        self, sizes, *, train_batch_size, num_processes, gradient_accumulation_steps=1, dataset_repeat=1, seed=0
    ):
        def for_each(value):
            return [value] * len(sizes) if isinstance(value, int) else value

        self.num_processes, self.gradient_accumulation_steps = num_processes, gradient_accumulation_steps
        self.batch_sizes, repeats = for_each(train_batch_size), for_each(dataset_repeat)
        self.samples_per_epoch = sum(repeats)
        several = len(set(self.batch_sizes)) > 1
        # None where they differ from step to step.
        self.samples_per_micro_batch = None if several else self.batch_sizes[0] * num_processes
        self.samples_per_step = None if several else self.samples_per_micro_batch * gradient_accumulation_steps
        self.identity = {}  # what a checkpoint remembers of the run, from `plan_batches`
        self._units, self._times, self._samples_before = [], [], [0]
        self._buckets = {}
        for index, (size, batch_size, repeat) in enumerate(zip(sizes, self.batch_sizes, repeats, strict=True)):
            self._buckets.setdefault((size, batch_size), []).extend([index] * repeat)
        self._stream = self._unit_stream(seed)

    def micro_batches(self, step):
        """Return the micro-batches of an optimizer step, counted from 1: of each the items of all processes."""
        first = (step - 1) * self.gradient_accumulation_steps
        last = first + self.gradient_accumulation_steps
        while len(self._units) < last:
            time, unit = next(self._stream)
            self._times.append(time)
            self._units.append(unit)
            self._samples_before.append(self._samples_before[-1] + len(unit))
        return self._units[first:last]

    def step(self, step):
        """Return the items of an optimizer step, counted from 1: for each position of the global batch an index."""
        return list(itertools.chain(*self.micro_batches(step)))

    def own_part(self, step, process_index):
        """Return the items of an optimizer step that one process has, in the order in which it has them."""
        parts = [(len(unit) // self.num_processes, unit) for unit in self.micro_batches(step)]
        return [index for size, unit in parts for index in unit[process_index * size : (process_index + 1) * size]]

    def loss_weight(self, step, micro_batch):
        """Return what the mean loss of a micro-batch, from 0, counts: so that each sample of the step counts alike."""
        if self.samples_per_step is not None:
            return 1.0
        sizes = [len(unit) for unit in self.micro_batches(step)]
        return sizes[micro_batch] * len(sizes) / sum(sizes)

    def samples_before(self, step):
        """Return how many samples come before an optimizer step."""
        if self.samples_per_step is not None:
            return (step - 1) * self.samples_per_step
        if step > 1:
            self.micro_batches(step - 1)
        return self._samples_before[(step - 1) * self.gradient_accumulation_steps]

    def steps_for(self, num_epochs):
        """Return how many optimizer steps take every sample of `num_epochs` epochs."""
        num_units = sum(
            -(-num_epochs * len(indices) // (batch_size * self.num_processes))
            for (_, batch_size), indices in self._buckets.items()
        )
        return -(-num_units // self.gradient_accumulation_steps)

    def describe(self, last_step):
        """Return one line on the length of a run of `last_step` optimizer steps, for a person."""
        num_samples = self.samples_before(last_step + 1)
        size = self.samples_per_step or f"{num_samples / last_step:.4g} (on average)"
        per_process = f"{min(self.batch_sizes)} to {max(self.batch_sizes)}"
        if self.samples_per_step:
            per_process = self.batch_sizes[0]
        return (
            f"{last_step} optimizer steps of {size} samples ({per_process} per process and "
            f"micro-batch x {self.num_processes} processes x {self.gradient_accumulation_steps} micro-batches); "
            f"{self.samples_per_epoch} samples per epoch, "
            f"{num_samples / self.samples_per_epoch:.4g} epochs"
        )

    def epoch(self, step):
        """Return the epoch, from 0, in which an optimizer step begins."""
        self.micro_batches(step)
        return int(self._times[(step - 1) * self.gradient_accumulation_steps])

    def _unit_stream(self, seed):
        """Yield (time in epochs, unit) for ever, each size in proportion to its number of items."""
        # Each bucket lays its units out over time, one somewhere in each slot of its own length; merged by time they
        # mix at random and yet keep every item in step with the others.
        streams = [
            self._bucket_stream(number, indices, batch_size * self.num_processes, seed)
            for number, ((_, batch_size), indices) in enumerate(self._buckets.items())
        ]
        return heapq.merge(*streams, key=lambda timed: timed[0])

    def _bucket_stream(self, number, indices, unit_size, seed):
        """Yield (time in epochs, unit) of one bucket."""
        items = self._shuffled_for_ever(number, indices, seed)
        jitter = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number, 1])))
        for slot in itertools.count():
            # A slot that reaches into the next epoch is used up to there: the epoch's last items come within it.
            begin = slot * unit_size
            end_of_epoch = (begin // len(indices) + 1) * len(indices)
            time = begin + jitter.random() * (min(begin + unit_size, end_of_epoch) - begin)
            yield time / len(indices), list(itertools.islice(items, unit_size))

    @staticmethod
    def _shuffled_for_ever(number, indices, seed):
        for epoch in itertools.count():
            order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number, 0, epoch])))
            yield from (indices[i] for i in order.permutation(len(indices)))


def plan_batches(args, items, num_processes, *, resumed, model, num_stages=1):
    """Return the `BatchPlan` of this run and its last optimizer step.

    Args:
        args (`argparse.Namespace`)
        items (`list[Item]`): Those that are trained, which are batched by their size.
        num_processes (`int`)
        resumed (`dict`): State of the checkpoint to go on from, of `find_checkpoint`.
        model (`dict`): What the model is, for a checkpoint to know; values that JSON takes.
        num_stages (`int`): How often the run makes all those steps, each time with another transformer.

    Raises:
        RefusedError: The checkpoint is already past the last step, or of a run with other batches, another dataset or
            another model.
    """
    keys = [bucket_key(item.record, args.train_batch_size) for item in items]
    batches = BatchPlan(
        [key[:-1] for key in keys],
        train_batch_size=[key[-1] for key in keys],
        num_processes=num_processes,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataset_repeat=[item.row.repeat for item in items],
        seed=args.seed,
    )
    last_step = args.max_train_steps or batches.steps_for(args.num_train_epochs)
    described = [
        [*(item.record[key] for key in ("id", "caption", "used")), item.row.repeat, item.digest] for item in items
    ]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    batches.identity = {"model": json.loads(json.dumps(model)), "dataset": digest}
    batches.identity |= {
        name: getattr(batches, name) for name in ("samples_per_step", "samples_per_epoch", "samples_per_micro_batch")
    }
    batches.identity |= {"num_processes": num_processes, "last_step": last_step}
    if resumed["step"] == 0:
        return batches, last_step
    if resumed["step"] > num_stages * last_step:
        raise RefusedError(
            f"--resume_from_checkpoint: the checkpoint is at step {resumed['step']}, this run ends at step "
            f"{num_stages * last_step}; raise --max_train_steps or --num_train_epochs."
        )
    # Items of one size come in the same order however a step is split; with several sizes the split decides.
    split = ("samples_per_micro_batch",) if len(set(keys)) > 1 else ()
    if batches.samples_per_step is None:
        split = ("num_processes",)
    for name in ("samples_per_step", "samples_per_epoch", *split):
        if batches.identity[name] != resumed[name]:
            raise RefusedError(
                f"--resume_from_checkpoint: this run has {batches.identity[name]} {name.replace('_', ' ')}, that of "
                f"the checkpoint had {resumed[name]}; make them equal (a step has batch size x processes x "
                "accumulation, an epoch items x repeats)."
            )
    for key, before in resumed["model"].items():
        if batches.identity["model"].get(key) != before:
            raise RefusedError(
                f"--resume_from_checkpoint: the model has {key} {batches.identity['model'].get(key)}, that of the "
                f"checkpoint had {before}; it is another model."
            )
    if digest != resumed["dataset"]:
        raise RefusedError(
            "--resume_from_checkpoint: items, their order, files, captions, sizes or frames differ from those of the "
            "checkpoint's run; resume with the dataset as it was, or start a new run with --lora_init_path."
        )
    if last_step != resumed["last_step"]:
        logger.warning(
            "--resume_from_checkpoint: this run ends after step %d, that of the checkpoint was to end after %d; from "
            "here on the learning rate is that of --lr_scheduler %s over the new length",
            *(last_step, resumed["last_step"], args.lr_scheduler),
        )
    return batches, last_step


class MicroBatchSampler(torch.utils.data.Sampler):
    """The part of one process: for each micro-batch a list of (step, position, index).

    Args:
        plan (`BatchPlan`)
        process_index (`int`)
        steps (`range`): The optimizer steps to make.
    """

    def __init__(self, plan, *, process_index, steps):
        self.plan, self.process_index, self.steps = plan, process_index, steps

    def __len__(self):
        return len(self.steps) * self.plan.gradient_accumulation_steps

    def __iter__(self):
        for step in self.steps:
            before = 0
            for unit in self.plan.micro_batches(step):
                size = len(unit) // self.plan.num_processes
                first = self.process_index * size
                yield [(step, before + place, unit[place]) for place in range(first, first + size)]
                before += len(unit)


class TrainingDataset(torch.utils.data.Dataset):
    """Samples of the cache, with what is drawn for a place in the training order.

    Args:
        ids (`list[str]`):
            Of the items.
        entries (`list[tuple]`):
            For each item the arguments of `read`.
        read (`Callable[..., dict[str, torch.Tensor]]`):
            Returns `latents` (C, [F,] H, W) in fp32, `prompt_embeds` (L, J), and further tensors of which those of
            items of one size have one shape.
        laws (`list[SigmaLaw]`):
            For each item the law of its sigma, which can depend on its size.
        dropped_prompt_embeds (`torch.Tensor` of shape (L, J), *optional*):
            Stands for the caption of samples whose caption is dropped.
        caption_dropout (`float`), seed (`int`)
    """

    def __init__(self, ids, entries, read, laws, *, seed, caption_dropout=0.0, dropped_prompt_embeds=None):
        self.ids, self.entries, self.read, self.laws = ids, entries, read, laws
        self.seed, self.caption_dropout = seed, caption_dropout
        self.dropped_prompt_embeds = dropped_prompt_embeds

    def __len__(self):
        return len(self.entries)

    def sigma(self, step, position, index):
        """Return the sigma (`float`) of the item `index` at a place in the training order."""
        return Draw(self.seed, step, position).sigma(self.laws[index])

    def __getitem__(self, place):
        step, position, index = place
        sample, draw = self.read(*self.entries[index]), Draw(self.seed, step, position)
        if self.caption_dropout > 0 and draw.drops_caption(self.caption_dropout):
            sample["prompt_embeds"] = self.dropped_prompt_embeds
        sample["noise"] = draw.noise(sample["latents"].shape)
        sample["sigmas"] = torch.tensor(self.sigma(step, position, index), dtype=torch.float32)
        return sample


def collate(samples):
    """Stack samples of equal size; pad their captions with zeros, with a mask where there is padding.

    Returns:
        `dict` with `latents` and `noise` (B, C, [F,] H, W), `sigmas` (B,), `prompt_embeds` (B, L, J),
        `prompt_embeds_mask`, (B, L) and False at padding, or None where every caption has the full length, and what
        else the samples hold.
    """
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0] if key != "prompt_embeds"}
    embeds = [sample["prompt_embeds"] for sample in samples]
    batch["prompt_embeds"] = torch.nn.utils.rnn.pad_sequence(embeds, batch_first=True)
    lengths = torch.tensor([len(embed) for embed in embeds])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    # As the stock pipeline: no mask where nothing is padded, since attention without one is another kernel.
    batch["prompt_embeds_mask"] = None if mask.all() else mask
    return batch


def load_batches(dataset, plan, *, process_index, steps, num_workers, pin_memory=False):
    """Return an iterator over the micro-batches of one process in the order of training, made ahead in threads.

    Threads and not the processes of torch's loader, which hands batches over through shared memory: containers have
    little of it, and the handing over alone takes several milliseconds. What a thread does here, reading a file and
    drawing noise, leaves Python's lock to the training.

    Args:
        dataset (`TrainingDataset`)
        plan (`BatchPlan`), process_index (`int`), steps (`range`): See `MicroBatchSampler`.
        num_workers (`int`): Threads; each is up to two batches ahead. With 0 a batch is made when it is asked for.
        pin_memory (`bool`): Whether batches are copied to where a GPU can fetch them from while it computes.
    """

    def load(places):
        batch = collate([dataset[place] for place in places])
        if pin_memory:
            batch = {name: tensor if tensor is None else tensor.pin_memory() for name, tensor in batch.items()}
        return batch

    places = MicroBatchSampler(plan, process_index=process_index, steps=steps)
    if num_workers == 0:
        return map(load, places)
    return map_ahead(load, places, num_threads=num_workers, num_ahead=2 * num_workers)


def map_ahead(function, items, *, num_threads, num_ahead):
    """Yield the results of a function in the order of the items, made ahead in threads.

    Args:
        function (`Callable`)
        items (`Iterable`): Taken as they are needed.
        num_threads, num_ahead (`int`): How many results are made at a time, and at most before they are asked for.
    """
    items = iter(items)
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        ahead = collections.deque(pool.submit(function, item) for item in itertools.islice(items, num_ahead))
        try:
            while ahead:
                result = ahead.popleft().result()
                ahead.extend(pool.submit(function, item) for item in itertools.islice(items, 1))
                yield result
        finally:
            for future in ahead:
                future.cancel()
