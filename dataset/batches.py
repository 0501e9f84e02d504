"""Which sample is trained when: epochs, optimizer steps, batches of items of one size, and what is drawn for each.

In an epoch every item is trained exactly `dataset_repeat` times. Items of one size make batches of
`train_batch_size`, the last of which may be short. An optimizer step takes as many batches as there are processes x
micro-batches, of about equally many tokens, so that no process waits long for another; the last step of an epoch takes
what is left. A process that finds nothing left runs one sample that does not count. Which samples a step has, and
their places in it, does not depend on how it is shared out: two processes see what one sees in two micro-batches.
"""

import collections
import concurrent.futures
import functools
import hashlib
import itertools
import json
import logging
import math
import operator
from typing import NamedTuple

import numpy as np
import torch

from dataset.buckets import bucket_key
from dataset.cache import read_entry
from dataset.draws import Draw
from runtime.errors import RefusedError


logger = logging.getLogger(__name__)


# Batches of one step have at most so many times the tokens of each other, as long as there are enough of them.
_ALIKE = 1.25

# Tensors of texts that a model takes padded, unless it states others.
PADDED = ("prompt_embeds",)


def read_sample(*paths):
    """Return the tensors of a sample, which are in several entries of the cache."""
    return functools.reduce(operator.or_, map(read_entry, paths))


def _in_groups(entries, size):
    return (entries[first : first + size] for first in range(0, len(entries), size))


class BatchPlan:
    """The order of training, the same on every process: a function of the step.

    Args:
        sizes (`list[tuple]`):
            For each item its `Shape`, or whatever only those have in common that may come into one micro-batch.
        train_batch_size, dataset_repeat (`int`, or `list[int]` with one for each item):
            Items of one size with different batch sizes do not meet.
        num_processes, gradient_accumulation_steps, seed (`int`)
        tokens (`list[int]`, *optional*): For each item how many tokens it is for the model; by default equally many.
    """

    def __init__(
        self,
        sizes,
        *,
        train_batch_size,
        num_processes,
        gradient_accumulation_steps=1,
        dataset_repeat=1,
        tokens=None,
        seed=0,
    ):
        def for_each(value):
            return [value] * len(sizes) if isinstance(value, int) else value

        self.num_processes, self.seed = num_processes, seed
        self.batches_per_step = num_processes * gradient_accumulation_steps
        self.batch_sizes, self.tokens = for_each(train_batch_size), for_each(tokens or 1)
        self.last_step = None  # from `plan_batches`, as what a checkpoint remembers of the run
        self.identity = {}
        self._buckets = {}
        repeats = for_each(dataset_repeat)
        for index, (size, batch_size, repeat) in enumerate(zip(sizes, self.batch_sizes, repeats, strict=True)):
            self._buckets.setdefault((size, batch_size), []).extend([index] * repeat)
        self.samples_per_epoch = sum(repeats)
        num_batches = sum(-(-len(indices) // batch_size) for (_, batch_size), indices in self._buckets.items())
        self.steps_per_epoch = -(-num_batches // self.batches_per_step)
        several = len(set(self.batch_sizes)) > 1
        # Of a whole step; None where that differs from step to step.
        self.samples_per_step = None if several else self.batch_sizes[0] * self.batches_per_step
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)

    @property
    def samples_by_size(self):
        """How many samples of each size an epoch has."""
        return collections.Counter(size for (size, _), indices in self._buckets.items() for _ in indices)

    def micro_batches(self, step):
        """Return the micro-batches of an optimizer step, counted from 1: of each, for each process a list of items.

        Lists at the end of the last one may be empty.
        """
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        batches = self._epoch(epoch)[0][place]
        return list(_in_groups(batches + [[]] * (-len(batches) % self.num_processes), self.num_processes))

    def step(self, step):
        """Return the items of an optimizer step, counted from 1: for each position of the global batch an index."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        return list(itertools.chain(*self._epoch(epoch)[0][place]))

    def own_part(self, step, process_index):
        """Return what one process does in an optimizer step: for each micro-batch the places (step, position, index).

        Where nothing is left for it, that is one item of the micro-batch at a position after those of the step.
        """
        parts, position, num_samples = [], 0, len(self.step(step))
        for micro_batch in self.micro_batches(step):
            first = position + sum(map(len, micro_batch[:process_index]))
            own = [(step, first + n, index) for n, index in enumerate(micro_batch[process_index])]
            parts.append(own or [(step, num_samples, micro_batch[0][0])])
            position += sum(map(len, micro_batch))
        return parts

    def loss_weight(self, step, micro_batch, process_index):
        """Return what the mean loss of a micro-batch, from 0, counts on a process.

        The mean of the weighted losses over all processes and `gradient_accumulation_steps` micro-batches is that over
        the samples of the step, also where it has fewer micro-batches. 1 where all batches are whole.
        """
        own = self.micro_batches(step)[micro_batch][process_index]
        return len(own) * self.batches_per_step / len(self.step(step))

    def samples_before(self, step):
        """Return how many samples come before an optimizer step."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        return epoch * self.samples_per_epoch + (self._epoch(epoch)[1][place] if place else 0)

    def epoch(self, step):
        """Return the epoch, from 0, to which an optimizer step belongs."""
        return (step - 1) // self.steps_per_epoch

    @property
    def num_samples(self):
        """How many samples the run trains, on one transformer."""
        return self.samples_before(self.last_step + 1)

    def describe(self):
        """Return one line on the length of the run, for a person."""
        num_samples, most = self.num_samples, max(self.batch_sizes)
        return (
            f"{self.last_step} optimizer steps of {num_samples / self.last_step:.4g} samples on average (up to {most} "
            f"x {self.num_processes} processes x {self.batches_per_step // self.num_processes} micro-batches); "
            f"{self.samples_per_epoch} samples in {self.steps_per_epoch} steps per epoch, "
            f"{num_samples / self.samples_per_epoch:.4g} epochs"
        )

    def _plan_epoch(self, epoch):
        """Return the steps of an epoch, each a list of batches, and how many samples come before each step."""
        timed = []
        for number, ((_, batch_size), indices) in enumerate(self._buckets.items()):
            order, jitter = (
                np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, number, purpose, epoch])))
                for purpose in (0, 1)
            )
            order = order.permutation(len(indices))
            # Each bucket lays its batches out over the epoch, one somewhere in each slot of its own length; sorted by
            # time they mix at random and yet keep every size in step with the others.
            for n, places in enumerate(_in_groups(order, batch_size)):
                batch = [indices[place] for place in places]
                time = (n * batch_size + jitter.random() * len(batch)) / len(indices)
                timed.append((time, sum(self.tokens[index] for index in batch), batch))
        timed.sort(key=lambda entry: entry[0])

        # Classes of batches of about equally many tokens, by the most of each, the heaviest first.
        class_of, heaviest, classes = {}, math.inf, {}
        for tokens in sorted({tokens for _, tokens, _ in timed}, reverse=True):
            heaviest = class_of[tokens] = tokens if tokens * _ALIKE < heaviest else heaviest
            classes[heaviest] = []
        for time, tokens, batch in timed:
            classes[class_of[tokens]].append((time, batch))

        size, groups, rest = self.batches_per_step, [], []
        for alike in classes.values():
            whole = len(alike) // size * size
            groups += _in_groups(alike[:whole], size)
            rest += alike[whole:]
        groups += _in_groups(rest, size)
        groups.sort(key=lambda group: (len(group) < size, min(time for time, _ in group)))
        steps = [[batch for _, batch in group] for group in groups]
        counts = [sum(map(len, batches)) for batches in steps]
        return steps, list(itertools.accumulate(counts, initial=0))


def plan_batches(args, items, num_processes, *, num_tokens, resumed, model, num_stages=1):
    """Return the `BatchPlan` of this run, which knows its `last_step`, and check it against a checkpoint.

    Args:
        args (`argparse.Namespace`)
        items (`list[Item]`): Those that are trained, which are batched by their size.
        num_processes (`int`)
        num_tokens (`Callable[[int, int, int], int]`): From height, width and frames to the tokens of a sample.
        resumed (`dict`): State of the checkpoint to resume from, of `find_checkpoint`.
        model (`dict`): What the model is, for a checkpoint to know; values that JSON takes.
        num_stages (`int`): How often the run makes all those steps, each time with another transformer.

    Raises:
        RefusedError: The checkpoint is already past the last step, or of a run with other batches, another dataset or
            another model.
    """
    keys = [bucket_key(item.record, args.train_batch_size) for item in items]
    batches = BatchPlan(
        [shape for shape, _ in keys],
        train_batch_size=[batch_size for _, batch_size in keys],
        num_processes=num_processes,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataset_repeat=[item.row.repeat for item in items],
        tokens=[num_tokens(shape.height, shape.width, shape.frames) for shape, _ in keys],
        seed=args.seed,
    )
    last_step = batches.last_step = args.max_train_steps or args.num_train_epochs * batches.steps_per_epoch
    if len(batches.micro_batches(1)) < args.gradient_accumulation_steps:
        logger.warning(
            "--gradient_accumulation_steps is %d, but an epoch has %d micro-batches and a step takes no more; raise "
            "--dataset_repeat for larger steps",
            *(args.gradient_accumulation_steps, len(batches.micro_batches(1))),
        )
    described = [
        [*(item.record[key] for key in ("id", "caption", "used")), item.row.repeat, item.digest] for item in items
    ]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    batches.identity = {"model": json.loads(json.dumps(model)), "dataset": digest}
    # Items of one size come in the same order however a step is split; with several sizes the split decides.
    split = ("batches_per_step",) if len(set(keys)) > 1 else ()
    compared = ("samples_per_step", "samples_per_epoch", *split, "steps_per_epoch")
    batches.identity |= {name: getattr(batches, name) for name in compared}
    batches.identity |= {"num_processes": num_processes, "last_step": last_step}
    if resumed["step"] > 0:
        _check_resumed(args, batches.identity, compared, resumed, num_stages * last_step)
    return batches


def _check_resumed(args, identity, compared, resumed, end):
    """Refuse a checkpoint that is past the end, or of a run with other batches, another dataset or another model."""
    problem = None
    differing = [name for name in compared if identity[name] != resumed.get(name)]
    of_model = [key for key, before in resumed["model"].items() if identity["model"].get(key) != before]
    if resumed["step"] > end:
        problem = f"it is at step {resumed['step']}, this run ends at step {end}; raise the number of steps or epochs"
    elif differing:
        name = differing[0]
        problem = (
            f"this run has {identity[name]} {name.replace('_', ' ')}, that of the checkpoint had {resumed.get(name)}; "
            "make processes x accumulation x batch size, and items x repeats, what they were"
        )
    elif of_model:
        key = of_model[0]
        problem = (
            f"the model has {key} {identity['model'].get(key)}, that of the checkpoint had {resumed['model'][key]}"
        )
    elif identity["dataset"] != resumed["dataset"]:
        problem = (
            "items, their order, files, captions, sizes or frames differ from those of its run; resume with the "
            "dataset as it was, or start a new run with --lora_init_path"
        )
    if problem is not None:
        raise RefusedError(f"--resume_from_checkpoint: the checkpoint cannot be continued: {problem}.")
    if identity["last_step"] != resumed["last_step"]:
        logger.warning(
            "--resume_from_checkpoint: this run ends after step %d, that of the checkpoint was to end after %d; from "
            "here on the learning rate is that of --lr_scheduler %s over the new length",
            *(identity["last_step"], resumed["last_step"], args.lr_scheduler),
        )


class Sample(NamedTuple):
    """Where an item is read from, and how it is noised.

    Args:
        id (`str`): Of its row.
        entries (`tuple`): Arguments of `TrainingDataset.read`.
        entries_without_caption (`tuple`): Those where its caption is dropped.
        law (`SigmaLaw`): Of its sigma, which can depend on its size.
    """

    id: str
    entries: tuple
    entries_without_caption: tuple = ()
    law: object = None


class TrainingDataset(torch.utils.data.Dataset):
    """Samples of the cache, with what is drawn for a place in the training order.

    Args:
        samples (`list[Sample]`): Of the items.
        read (`Callable[..., dict[str, torch.Tensor]]`):
            Returns the tensors of a sample: `latents` (C, [F,] H, W) in fp32, and whatever else the encoders gave. All
            but those that are padded have one shape in samples of one `Shape`.
        padded (`tuple[str, ...]`): Those of (L, ...) that may differ in L, see `collate`.
        caption_dropout (`float`), seed (`int`)
    """

    def __init__(self, samples, read=read_sample, *, padded=PADDED, caption_dropout=0.0, seed=0):
        self.samples, self.read, self.padded = samples, read, padded
        self.ids = [sample.id for sample in samples]
        self.caption_dropout, self.seed = caption_dropout, seed

    def __len__(self):
        return len(self.samples)

    def sigma(self, step, position, index):
        """Return the sigma (`float`) of the item `index` at a place in the training order."""
        return Draw(self.seed, step, position).sigma(self.samples[index].law)

    def __getitem__(self, place):
        step, position, index = place
        sample, draw = self.samples[index], Draw(self.seed, step, position)
        is_dropped = self.caption_dropout > 0 and draw.drops_caption(self.caption_dropout)
        tensors = self.read(*(sample.entries_without_caption if is_dropped else sample.entries))
        tensors["noise"] = draw.noise(tensors["latents"].shape)
        tensors["sigmas"] = torch.tensor(self.sigma(step, position, index), dtype=torch.float32)
        return tensors


def collate(samples, padded=PADDED):
    """Stack the tensors of samples of one `Shape`; pad texts with zeros, with a mask where there is padding.

    Args:
        samples (`list[dict[str, torch.Tensor]]`): From `TrainingDataset`.
        padded (`tuple[str, ...]`): Names of tensors (L, ...) that may differ in L.

    Returns:
        `dict` of what the samples hold, with a dimension (B, ...) in front. Each padded tensor has a mask, named
        `prompt_embeds_mask` for `prompt_embeds`: (B, L) and False at padding, or None where all have the full length.
    """
    batch = {}
    for name in samples[0]:
        tensors = [sample[name] for sample in samples]
        if name not in padded:
            batch[name] = torch.stack(tensors)
            continue
        batch[name] = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
        lengths = torch.tensor([len(tensor) for tensor in tensors])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        # As the stock pipeline: no mask where nothing is padded, since attention without one is another kernel.
        batch[f"{name}_mask"] = None if mask.all() else mask
    return batch


def load_batches(dataset, plan, *, process_index, steps, num_workers, pin_memory=False):
    """Return an iterator over the micro-batches of one process in the order of training, made ahead in threads.

    Threads and not the processes of torch's loader, which hands batches over through shared memory: containers have
    little of it, and the handing over alone takes several milliseconds. What a thread does here, reading a file and
    drawing noise, leaves Python's lock to the training.

    Args:
        dataset (`TrainingDataset`)
        plan (`BatchPlan`), process_index (`int`)
        steps (`range`): The optimizer steps to make.
        num_workers (`int`): Threads; each is up to two batches ahead. With 0 a batch is made when it is asked for.
        pin_memory (`bool`): Whether batches are copied to where a GPU can fetch them from while it computes.
    """

    def load(places):
        batch = collate([dataset[place] for place in places], dataset.padded)
        if pin_memory:
            batch = {name: tensor if tensor is None else tensor.pin_memory() for name, tensor in batch.items()}
        return batch

    places = itertools.chain.from_iterable(plan.own_part(step, process_index) for step in steps)
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
