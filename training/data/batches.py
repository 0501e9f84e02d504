"""Which sample is trained when: the order of the dataset, micro-batches of equal size, and what is drawn for each.

One unit of the order is a micro-batch of all processes together: `train_batch_size * num_processes` samples of one
size. Process r takes its r-th part. So one process with twice the batch size sees what two processes see, at
the same places of the global batch. An epoch does not end a batch: the next one goes on where it stopped.
"""

import hashlib
import heapq
import itertools
import json

import numpy as np
import torch

from training.errors import RefusedError
from training.flow_matching import Draw


class BatchPlan:
    """The order of training, the same on every process.

    Args:
        sizes (`list[tuple]`):
            For each item its size. Only items of equal size come into one micro-batch.
        train_batch_size, num_processes, gradient_accumulation_steps, dataset_repeat, seed (`int`)
    """

    def __init__(
        self, sizes, *, train_batch_size, num_processes, gradient_accumulation_steps=1, dataset_repeat=1, seed=0
    ):
        self.train_batch_size, self.num_processes = train_batch_size, num_processes
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.samples_per_epoch = len(sizes) * dataset_repeat
        self.samples_per_micro_batch = train_batch_size * num_processes
        self.samples_per_step = self.samples_per_micro_batch * gradient_accumulation_steps
        self.identity = {}  # what a checkpoint remembers of the run, from `plan_batches`
        self._units = []
        self._stream = self._unit_stream(sizes, dataset_repeat, seed)

    def step(self, step):
        """Return the items of an optimizer step, counted from 1: for each position of the global batch an index."""
        first = (step - 1) * self.gradient_accumulation_steps
        last = first + self.gradient_accumulation_steps
        while len(self._units) < last:
            self._units.append(next(self._stream))
        return list(itertools.chain(*self._units[first:last]))

    def describe(self, last_step):
        """Return one line on the length of a run of `last_step` optimizer steps, for a person."""
        return (
            f"{last_step} optimizer steps of {self.samples_per_step} samples ({self.train_batch_size} per process and "
            f"micro-batch x {self.num_processes} processes x {self.gradient_accumulation_steps} micro-batches); "
            f"{self.samples_per_epoch} samples per epoch, "
            f"{last_step * self.samples_per_step / self.samples_per_epoch:.4g} epochs"
        )

    def epoch(self, step):
        """Return the epoch, from 0, in which an optimizer step begins."""
        return (step - 1) * self.samples_per_step // self.samples_per_epoch

    def _unit_stream(self, sizes, repeat, seed):
        """Yield units for ever, each size in proportion to its number of items."""
        buckets = {}
        for index, size in enumerate(sizes):
            buckets.setdefault(size, []).extend([index] * repeat)
        # Each bucket lays its units out over time, one somewhere in each slot of its own length; merged by time they
        # mix at random and yet keep every item in step with the others.
        streams = [self._bucket_stream(number, indices, seed) for number, indices in enumerate(buckets.values())]
        for _, unit in heapq.merge(*streams, key=lambda timed: timed[0]):
            yield unit

    def _bucket_stream(self, number, indices, seed):
        """Yield (time in epochs, unit) of one bucket."""
        unit_size = self.samples_per_micro_batch
        items = self._shuffled_for_ever(number, indices, seed)
        jitter = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number, 1])))
        for slot in itertools.count():
            yield (slot + jitter.random()) * unit_size / len(indices), list(itertools.islice(items, unit_size))

    @staticmethod
    def _shuffled_for_ever(number, indices, seed):
        for epoch in itertools.count():
            order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number, 0, epoch])))
            yield from (indices[i] for i in order.permutation(len(indices)))


def plan_batches(args, records, num_processes, *, resumed, model, num_stages=1):
    """Return the `BatchPlan` of this run and its last optimizer step.

    Args:
        args (`argparse.Namespace`)
        records (`list[dict]`): Of the items that are trained, which are batched by their size.
        num_processes (`int`)
        resumed (`dict`): State of the checkpoint to go on from, of `find_checkpoint`.
        model (`dict`): What the model is, for a checkpoint to know; values that JSON takes.
        num_stages (`int`): How often the run makes all those steps, each time with another transformer.

    Raises:
        RefusedError: The checkpoint is already past the last step, or of a run with other batches, another dataset or
            another model.
    """
    sizes = [(*record["used"]["size"], record["used"]["frames"]) for record in records]
    batches = BatchPlan(
        sizes,
        train_batch_size=args.train_batch_size,
        num_processes=num_processes,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataset_repeat=args.dataset_repeat,
        seed=args.seed,
    )
    last_step = args.max_train_steps
    if last_step is None:
        last_step = -(-args.num_train_epochs * batches.samples_per_epoch // batches.samples_per_step)
    described = [[record[key] for key in ("id", "caption", "used")] for record in records]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    batches.identity = {"model": json.loads(json.dumps(model)), "dataset": digest}
    batches.identity |= {
        name: getattr(batches, name) for name in ("samples_per_step", "samples_per_epoch", "samples_per_micro_batch")
    }
    if resumed["step"] == 0:
        return batches, last_step
    if resumed["step"] > num_stages * last_step:
        raise RefusedError(
            f"--resume_from_checkpoint: the checkpoint is at step {resumed['step']}, this run ends at step "
            f"{num_stages * last_step}; raise --max_train_steps or --num_train_epochs."
        )
    # Items of one size come in the same order however a step is split; with several sizes the split decides.
    for name in ("samples_per_step", "samples_per_epoch", *["samples_per_micro_batch"] * (len(set(sizes)) > 1)):
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
            "--resume_from_checkpoint: items, their order, captions, sizes or frames differ from those of the "
            "checkpoint's run; resume with the dataset as it was, or start a new run with --lora_init_path."
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
        size = self.plan.train_batch_size
        for step in self.steps:
            indices = self.plan.step(step)
            for start in range(self.process_index * size, len(indices), size * self.plan.num_processes):
                yield [(step, position, indices[position]) for position in range(start, start + size)]


class TrainingDataset(torch.utils.data.Dataset):
    """Cached samples, with what is drawn for a place in the training order.

    Args:
        samples (`list[dict]`):
            For each item its `id`, `latents` (C, [F,] H, W) in fp32, `prompt_embeds` (L, J), and further tensors of
            which those of items of one size have one shape.
        laws (`list[SigmaLaw]`):
            For each item the law of its sigma, which can depend on its size.
        dropped_prompt_embeds (`torch.Tensor` of shape (L, J)):
            Stands for the caption of samples whose caption is dropped.
        caption_dropout (`float`), seed (`int`)
    """

    def __init__(self, samples, laws, *, seed, caption_dropout=0.0, dropped_prompt_embeds=None):
        self.samples, self.laws = samples, laws
        self.seed, self.caption_dropout = seed, caption_dropout
        self.dropped_prompt_embeds = dropped_prompt_embeds

    def __len__(self):
        return len(self.samples)

    def sigma(self, step, position, index):
        """Return the sigma (`float`) of the item `index` at a place in the training order."""
        return Draw(self.seed, step, position).sigma(self.laws[index])

    def __getitem__(self, place):
        step, position, index = place
        sample, draw = self.samples[index], Draw(self.seed, step, position)
        drops = self.caption_dropout > 0 and draw.drops_caption(self.caption_dropout)
        return {
            **{name: tensor for name, tensor in sample.items() if name != "id"},
            "prompt_embeds": self.dropped_prompt_embeds if drops else sample["prompt_embeds"],
            "noise": draw.noise(sample["latents"].shape),
            "sigmas": torch.tensor(self.sigma(step, position, index), dtype=torch.float32),
        }


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
