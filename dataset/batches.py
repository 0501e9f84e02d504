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
    return {name: tensor for path in paths for name, tensor in read_entry(path).items()}


def _in_groups(entries, size):
    return (entries[first : first + size] for first in range(0, len(entries), size))


class BatchPlan:
    """The order of training, the same on every process: a function of the step.

    Args:
        keys (`list[tuple]`):
            For each item its `bucket_key`: what only those have in common that may come into one micro-batch, and how
            many of them make one.
        repeats (`list[int]`): How often each item comes in an epoch.
        tokens (`list[int]`): How many tokens each item is for the model.
        num_processes, gradient_accumulation_steps, seed (`int`)
    """

    def __init__(self, keys, repeats, tokens, *, num_processes, gradient_accumulation_steps, seed):
        self.tokens, self.num_processes, self.seed = tokens, num_processes, seed
        self.batches_per_step = num_processes * gradient_accumulation_steps
        self.last_step = None  # from `plan_batches`, as what a checkpoint remembers of the run
        self.identity = {}
        self._buckets = {}
        for index, (key, repeat) in enumerate(zip(keys, repeats, strict=True)):
            self._buckets.setdefault(key, []).extend([index] * repeat)
        self.samples_per_epoch = sum(repeats)
        num_batches = sum(-(-len(indices) // batch_size) for (_, batch_size), indices in self._buckets.items())
        self.steps_per_epoch = -(-num_batches // self.batches_per_step)
        batch_sizes = {batch_size for _, batch_size in keys}
        self.most_per_step = max(batch_sizes) * self.batches_per_step
        # Of a whole step; None where that differs from step to step.
        self.samples_per_step = self.most_per_step if len(batch_sizes) == 1 else None
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)

    @property
    def samples_by_size(self):
        """How many samples of each size an epoch has."""
        return collections.Counter(size for (size, _), indices in self._buckets.items() for _ in indices)

    def _find(self, step):
        """Return the batches of an optimizer step, and how many samples come before it."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        steps, counts = self._epoch(epoch)
        return steps[place], epoch * self.samples_per_epoch + counts[place]

    def micro_batches(self, step):
        """Return the micro-batches of an optimizer step, counted from 1: of each, for each process a list of items.

        Lists at the end of the last one may be empty.
        """
        batches, _ = self._find(step)
        return list(_in_groups(batches + [[]] * (-len(batches) % self.num_processes), self.num_processes))

    def step(self, step):
        """Return the items of an optimizer step, counted from 1: for each position of the global batch an index."""
        return list(itertools.chain(*self._find(step)[0]))

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

    def epoch(self, step):
        """Return the epoch, from 0, to which an optimizer step belongs."""
        return (step - 1) // self.steps_per_epoch

    @property
    def num_samples(self):
        """How many samples the run trains, on one transformer."""
        return self._find(self.last_step + 1)[1]

    def describe(self):
        """Return one line on the length of the run, for a person."""
        num_samples, most = self.num_samples, self.most_per_step // self.batches_per_step
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
            order = np.random.default_rng([self.seed, number, 0, epoch]).permutation(len(indices))
            jitter = np.random.default_rng([self.seed, number, 1, epoch])
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
    repeats, accumulation = [item.row.repeat for item in items], args.gradient_accumulation_steps
    tokens = [num_tokens(shape.height, shape.width, shape.frames) for shape, _ in keys]
    how = {"num_processes": num_processes, "gradient_accumulation_steps": accumulation, "seed": args.seed}
    batches = BatchPlan(keys, repeats, tokens, **how)
    last_step = batches.last_step = args.max_train_steps or args.num_train_epochs * batches.steps_per_epoch
    most = len(batches.micro_batches(1))
    if most < accumulation:
        message = "--gradient_accumulation_steps is %d, but an epoch has %d micro-batches and a step takes no more"
        logger.warning(f"{message}; raise --dataset_repeat for larger steps", accumulation, most)
    described = [
        [*(item.record[key] for key in ("id", "caption", "used")), item.row.repeat, item.digest] for item in items
    ]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    # Items of one size come in the same order however a step is split; with several sizes the split decides.
    split = ("batches_per_step",) if len(set(keys)) > 1 else ()
    compared = ("samples_per_step", "samples_per_epoch", *split, "steps_per_epoch")
    batches.identity = {"model": json.loads(json.dumps(model)), "dataset": digest}
    batches.identity |= {name: getattr(batches, name) for name in compared}
    batches.identity |= {"num_processes": num_processes, "last_step": last_step}
    if resumed["step"] > 0:
        _check_resumed(args, batches.identity, compared, resumed, num_stages * last_step)
    return batches


def _check_resumed(args, identity, compared, resumed, end):
    """Refuse a checkpoint that is past the end, or of a run with other batches, another dataset or another model."""
    numbers = [(name.replace("_", " "), identity[name], resumed.get(name)) for name in compared]
    numbers += [(f"{key} of the model", identity["model"].get(key), was) for key, was in resumed["model"].items()]
    problems = [f"it is at step {resumed['step']}, this run ends at step {end}"] * (resumed["step"] > end)
    problems += [f"its run had {was} {name}, and this one has {now}" for name, now, was in numbers if now != was]
    if identity["dataset"] != resumed["dataset"]:
        problems.append("items, their order, files, captions, sizes or frames differ from those of its run")
    if problems:
        hint = "give the flags and the dataset that its run had, or start a new run with --lora_init_path"
        raise RefusedError(f"--resume_from_checkpoint: the checkpoint cannot be continued: {problems[0]}; {hint}.")
    if identity["last_step"] != resumed["last_step"]:
        lengths = "this run ends after step %d, that of the checkpoint was to end after %d"
        rate = "from here on the learning rate is that of --lr_scheduler %s over the new length"
        values = identity["last_step"], resumed["last_step"], args.lr_scheduler
        logger.warning(f"--resume_from_checkpoint: {lengths}; {rate}", *values)


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
