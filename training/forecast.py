"""What a run will need, forecast before anything is loaded: device memory by category and phase, and host memory."""

import copy
import dataclasses
import functools
import importlib.util
import inspect
import logging
import math
import os
import shutil

import psutil
import torch

from blockwise import offload
from blockwise.estimate import StepProfile, fake_tensors, optimizer_bytes, peak_of, shrink, without_content
from blockwise.log import format_bytes
from blockwise.plan import BudgetError, MemoryPlan
from dataset.buckets import bucket_key
from runtime.errors import RefusedError
from runtime.processes import gather_from_all
from training.module import DiffusionTrainingModule, make_trainable, parameters_to_train
from training.optimizers import uses_deepspeed


logger = logging.getLogger(__name__)

# Shown to users where a device's own size is compared: its context, workspaces of its libraries, rounding.
RESERVED_BYTES = 2**30

_ENCODERS = ("text encoder", "VAE")
_MEMORY_SWITCHES = ("use_gradient_checkpointing", "use_gradient_checkpointing_offload")


@dataclasses.dataclass(frozen=True)
class Launch:
    """How the run is launched.

    Args:
        device_type (`str`): `"cpu"`, or the type of the accelerator that is there or, in a dry run, would be.
        num_processes, num_local_processes (`int`): In all, and on this machine.
        strategy (`str`): `"single"`, `"ddp"` or `"zero2"`.
        device_bytes (`tuple[int, int]`, *optional*): Free and total memory of the device that is there.
        host_bytes (`int`): Free memory of the host for each local process.
        zero_bucket_bytes (`int`): Of DeepSpeed's buffer for gradients on their way.
    """

    device_type: str
    num_processes: int = 1
    num_local_processes: int = 1
    strategy: str = "single"
    device_bytes: tuple[int, int] | None = None
    host_bytes: int = 2**63
    zero_bucket_bytes: int = 0

    @classmethod
    def of(cls, args, accelerator):
        """Return how this process was launched. Every process must call it."""
        device, num_processes = accelerator.device, accelerator.num_processes
        strategy, bucket_bytes = "ddp" if num_processes > 1 else "single", 0
        if uses_deepspeed(accelerator):
            zero = accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
            size = zero.get("reduce_bucket_size", "auto")
            strategy, bucket_bytes = "zero2", 4 * (500_000_000 if size == "auto" else int(size))
        num_local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
        there = device.type != "cpu"
        free = (torch.accelerator.get_memory_info(device) if there else None, psutil.virtual_memory().available)
        # The least of all processes, so that all make the same plan, or none.
        device_bytes, host_bytes = zip(*gather_from_all(accelerator, free), strict=True)
        return cls(
            # A dry run on a machine without an accelerator is for one that has it.
            device.type if there or not args.dry_run else "cuda",
            *(num_processes, num_local_processes, strategy, min(device_bytes) if there else None),
            host_bytes=int(min(host_bytes) * 0.9) // num_local_processes,
            zero_bucket_bytes=bucket_bytes,
        )


@dataclasses.dataclass
class RunForecast:
    """Predicts what the command with these flags takes.

    Args:
        args (`argparse.Namespace`)
        launch (`Launch`)
        family (`Family`)
        names (`list[str]`): Of adapted layers, or in full training of the modules that are not trained.
        optimizer (`tuple[type, dict]`): See `find_optimizer`.
        records (`list[dict]`): Of the items that are trained.
        samples_by_size (`dict[tuple, int]`): How many an epoch has of each: a batch has no more.
        caption_tokens (`dict[str, int]`): Of each caption the tokens that its embedding has.
        to_encode (`dict[str, dict]`):
            Phase of an encoder -> what is not in the cache yet, as `EncodingPlan.missing` has it.
        held_out (`list[dict]`): Records of the items that are encoded, and not trained.
        previews (`dict`, *optional*): The settings of previews, see `preview_settings`, where any are made.
    """

    args: object
    launch: Launch
    family: object
    names: list
    optimizer: tuple
    records: list
    samples_by_size: dict
    caption_tokens: dict
    to_encode: dict
    held_out: list = ()
    previews: dict | None = None

    @functools.cached_property
    def parameters(self):
        """Shape and dtype of each trained parameter: see `parameters_to_train`."""
        return parameters_to_train(self.family.skeleton, self.args, self.names)

    # ---- one sample, and the phases before training

    def _num_tokens(self, record):
        return self.family.num_tokens(*_size_of(record))

    def _batch_size(self, record):
        shape, batch_size = bucket_key(record, self.args.train_batch_size)
        return min(batch_size, self.samples_by_size.get(shape, batch_size))

    def _encode(self, size, *phases):
        """Return of each phase with encoders what `_run_encoder` does, at a size: height, width and frames."""
        size = dict(zip(("height", "width", "num_frames"), size, strict=True))
        encoders = self.family.encoder_skeletons(num_tokens=max(self.caption_tokens.values()), **size)
        with fake_tensors(self.launch.device_type):
            return {phase: _run_encoder(*encoders[phase]) for phase in phases}

    @functools.cached_property
    def _largest(self):
        return max((*self.records, *self.held_out), key=self._num_tokens)

    @functools.cached_property
    def _encoded(self):
        """What `_encode` returns of the largest item."""
        return self._encode(_size_of(self._largest), *_ENCODERS)

    @functools.cached_property
    def _preview(self):
        """The peak of what previews run in addition to the transformer, and its weights."""
        size = [self.previews[name] for name in ("height", "width", "num_frames")]
        return self._encode(size, "previews")["previews"][:2]

    @functools.cached_property
    def _heaviest(self):
        """The heaviest batch: shape and dtype of each tensor of a sample, and how many samples it has."""
        record = max(self.records, key=lambda record: self._num_tokens(record) * self._batch_size(record))
        size = _size_of(record)
        encoded = self._encoded if size == _size_of(self._largest) else self._encode(size, *_ENCODERS)
        (*_, of_text), (*_, of_media) = encoded.values()
        return of_text | of_media, self._batch_size(record)

    def _batch(self, sample, batch_size):
        """Return a batch of so many samples, as `collate` makes it. Call it inside `fake_tensors`."""
        batch = {name: torch.empty(batch_size, *shape, dtype=dtype) for name, (shape, dtype) in sample.items()}
        batch["noise"], batch["sigmas"] = torch.empty_like(batch["latents"]), torch.empty(batch_size)
        masked = len(set(self.caption_tokens.values())) > 1 and batch_size > 1
        for name in self.family.padded:
            shape = batch[name].shape[:2]
            batch[f"{name}_mask"] = torch.empty(shape, dtype=torch.bool) if masked else None
        return batch

    @functools.cached_property
    def _batch_bytes(self):
        heaviest = self._heaviest  # found before, not inside: it builds the encoders
        with fake_tensors(self.launch.device_type):
            return sum(tensor.nbytes for tensor in self._batch(*heaviest).values() if tensor is not None)

    @functools.cached_property
    def cache_bytes(self):
        """Bytes of what is to be encoded: those of the longest caption and of the largest item, in proportion."""
        captions, items = (self.to_encode[phase].values() for phase in _ENCODERS)
        of_longest, of_largest = (
            sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors.values())
            for *_, tensors in self._encoded.values()
        )
        num_tokens = sum(self.caption_tokens[encoding.texts[0]] for encoding in captions)
        texts = of_longest * num_tokens // max(self.caption_tokens.values())
        num_tokens = sum(self._num_tokens(encoding.item.record) for encoding in items)
        return texts + of_largest * num_tokens // self._num_tokens(self._largest)

    @property
    def result_bytes(self):
        """Bytes of the file or folder that a run leaves, one file for each stage."""
        if self.args.training_mode == "full":
            return self._bytes["weights"]
        return len(self.family.stages) * self._bytes["adapters"] // (1 if self.args.lora_dtype == "fp32" else 2)

    @property
    def checkpoint_bytes(self):
        """Bytes of a checkpoint: fp32 weights that are trained, the optimizer's state, the average."""
        return sum(self._bytes[name] for name in ("fp32_gradients", "optimizer_state", "ema"))

    # ---- the step

    @functools.cached_property
    def profile(self):
        """The `StepProfile` of this run."""
        heaviest = self._heaviest  # found before, not inside, the step that is profiled
        model = shrink(self.family.skeleton, self.family.block_lists, self.names)
        make_trainable(model.transformer, self.args, model.names(self.names))

        def make_step(transformer):
            module, batch = DiffusionTrainingModule(self.family, transformer).train(), self._batch(*heaviest)
            return lambda: module(batch)

        return StepProfile(model, make_step, device_type=self.launch.device_type)

    @functools.cached_property
    def _bytes(self):
        """Bytes of the whole model by category, before they are shared out."""
        skeleton, (optimizer_class, arguments) = self.family.skeleton, self.optimizer
        base = sum(tensor.nbytes for tensor in (*skeleton.parameters(), *skeleton.buffers()))
        trained = [(math.prod(shape), dtype) for shape, dtype in self.parameters.values()]
        own, in_fp32 = sum(n * dtype.itemsize for n, dtype in trained), sum(4 * n for n, _ in trained)
        is_lora = self.args.training_mode == "lora"
        if self.launch.device_type != "cpu" and not {"fused", "foreach"} & arguments.keys():
            # What an optimizer of torch chooses by itself there, and not on a CPU; AdamW as `find_optimizer` sets it.
            chosen = "fused" if optimizer_class is torch.optim.AdamW else "foreach"
            if chosen in inspect.signature(optimizer_class).parameters:
                arguments = arguments | {chosen: True}
        shapes = [shape for shape, _ in self.parameters.values()]
        state, transient = optimizer_bytes(optimizer_class, arguments, shapes)
        return {
            "weights": base,
            "frozen": base if is_lora else 0,
            "second": base if self.family.stages[0].other is not None else 0,  # of previews
            "adapters": own if is_lora else 0,
            "masters": sum(4 * n for n, dtype in trained if dtype != torch.float32),
            "ema": in_fp32 if self.args.ema else 0,
            "optimizer_state": state,
            "gradients": own,
            "fp32_gradients": in_fp32,
            "transient": transient,
        }

    def _held(self):
        """Return the bytes by category that a process holds all the time, and those at the optimizer step.

        To the state of the optimizer belong the fp32 masters of weights in bf16.
        """
        whole, strategy, n = self._bytes, self.launch.strategy, self.launch.num_processes
        held = {name: whole[name] for name in ("weights", "adapters", "optimizer_state", "ema")}
        held["ema"] *= not self.args.offload_ema
        masters, sums = whole["masters"], whole["fp32_gradients"]
        held["gradients"] = sums if self.args.gradient_accumulation_steps > 1 else 0
        at_step = sums
        if strategy == "ddp":
            # Its buckets, and of bf16 weights the sums in fp32. What micro-batches add up to has its own.
            held["gradients"] += whole["gradients"]
            at_step = whole["gradients"] + masters
        elif strategy == "zero2":
            held["optimizer_state"] //= n
            masters = sums // n
            held["gradients"] = at_step = sums // n + self.launch.zero_bucket_bytes
        held["optimizer_state"] += masters
        held["batch"] = self._batch_bytes
        return held, held | {"gradients": at_step, "activations": whole["transient"]}

    def training(self, plan):
        """Return the bytes of a process by category at the highest moment of a step, and when that is."""
        held, at_step = self._held()
        peak = self.profile.peak(plan, gradient_factor=self._gradient_factor)
        during = held | {"activations": peak.num_bytes - peak.gradient_bytes}
        during["gradients"] += peak.gradient_bytes
        if sum(at_step.values()) > sum(during.values()):
            return at_step, "optimizer step"
        return during, peak.place

    def costs(self, plans):
        """Return what each of many plans costs; see `MemoryPlan.from_budget`. The peak is that of the whole run."""
        held, at_step = (sum(num_bytes.values()) for num_bytes in self._held())
        floor = max((self.phases(plans[0]) | {"training": at_step}).values())
        costs = self.profile.costs(plans, gradient_factor=self._gradient_factor)
        return [dataclasses.replace(cost, peak_bytes=max(floor, held + cost.peak_bytes)) for cost in costs]

    @property
    def _gradient_factor(self):
        """What the backward pass leaves of each byte of gradients that it makes: see `StepProfile.peak`."""
        whole, num_micro_batches = self._bytes, self.args.gradient_accumulation_steps
        if self.launch.strategy == "single":
            return 0 if num_micro_batches > 1 and not whole["masters"] else 1
        # Else they go into buckets, or are shared out: both are there all the time.
        if self.launch.strategy != "ddp" or not whole["masters"]:
            return 0
        if num_micro_batches == 1:
            return whole["masters"] / whole["gradients"]
        return 1 if num_micro_batches > 2 else 0  # of those in the middle, which are not averaged yet

    def phases(self, plan):
        """Return the peak of each phase of the run, in bytes of a process on its device."""
        return self._phases(plan)[0]

    def previews_take_turns(self, plan):
        """Return whether the parts that make previews have the device one at a time, since all do not fit together."""
        return self._phases(plan)[1]

    def _phases(self, plan):
        whole, (by_category, _) = self._bytes, self._held()
        held, batch = sum(by_category.values()), by_category["batch"]
        phases = {phase: peak for phase, (peak, *_) in self._encoded.items() if self.to_encode[phase]}
        phases["training"] = sum(self.training(plan)[0].values())
        # The exported file is loaded back, at the end, in addition to what training leaves.
        export = held - by_category["gradients"] + whole["adapters"] + self.profile.inference_bytes
        if self.previews is None:
            return phases | {"export": export}, False
        (peak, weights), second, frozen = self._preview, whole["second"], whole["frozen"]
        held, sampling = held - batch, self.profile.inference_bytes + batch
        previews = held + second + max(weights + sampling, peak)
        # Together, if they fit: on the smallest device on which the rest does, where none is known.
        room = max(export, *phases.values()) if self.room_bytes is None else self.room_bytes
        takes_turns = previews > room and self.launch.device_type != "cpu"  # which has nowhere to move them
        if takes_turns:
            # While another part of the pipeline runs, what is not trained waits in host memory.
            previews = max(held + max(0, second - frozen) + sampling, held - frozen + peak)
        return phases | {"previews": previews, "export": export}, takes_turns

    @property
    def room_bytes(self):
        """Bytes that the run may take of the device: --memory_budget, or what is free; None where no device is."""
        if self.args.memory_budget not in (None, "auto"):
            return self.args.memory_budget
        return self.launch.device_bytes and self.launch.device_bytes[0] - RESERVED_BYTES

    def host_bytes(self, plan):
        """Return the host memory of all processes on this machine at its highest.

        Weights are read by mapping their files: however many processes do it, these pages are there once.
        """
        whole, args, (phases, takes_turns) = self._bytes, self.args, self._phases(plan)
        encoders = [weights for phase, (_, weights, _) in self._encoded.items() if self.to_encode[phase]]
        # Batches that are made ahead, two for each thread, and the one that is trained on.
        ahead = self._batch_bytes * (2 * args.dataloader_num_workers + 1)
        own, of_previews = self.profile.parked_bytes(plan) + whole["ema"] * args.offload_ema, 0
        if self.previews is not None:
            own += whole["ema"]  # the trained weights, while their average has their place
            of_previews = self._preview[1]
        if self.launch.device_type == "cpu":
            # The parts of previews are there all the time, and their own phase counts them already.
            own += max(size + of_previews * (phase in ("training", "export")) for phase, size in phases.items())
        else:
            # On the way to and from a checkpoint: weights that are trained, or optimizer and average, twice.
            saving = whole["fp32_gradients"] if args.checkpointing_steps else 0
            loading = whole["optimizer_state"] + 2 * whole["ema"] if args.resume_from_checkpoint else 0
            own += max(saving, loading) + of_previews + takes_turns * whole["frozen"]
            own += whole["second"] * (self.previews is not None)
        process, n = psutil.Process().memory_info(), self.launch.num_local_processes
        shared = getattr(process, "shared", 0)  # libraries above all; only Linux tells
        return int(shared + n * (process.rss - shared + ahead) + max(*encoders, whole["weights"], n * own))

    # ---- for people and files

    def describe(self, plan):
        """Return the forecast of a `MemoryPlan` as run.json has it; all in bytes."""
        by_category, place = self.training(plan)
        phases, by_mode = self.phases(plan), {}
        if self.args.dry_run:
            flags = zip(("keep", "recompute", "park"), (None, *_MEMORY_SWITCHES), strict=True)
            by_mode = {mode: sum(self.training(self._plan_with(flag))[0].values()) for mode, flag in flags}
        return {
            "training_peak_bytes": phases["training"],
            "training_peak_place": place,
            "by_mode": by_mode,
            "peak_phase": max(phases, key=phases.get),
            "by_category": by_category,
            "phases": phases,
            "parked_bytes": self.profile.parked_bytes(plan),
            "host_bytes": self.host_bytes(plan),
            "launch": dataclasses.asdict(self.launch),
        }

    def _plan_with(self, flag):
        """Return the `MemoryPlan` of all blocks with one of the switches, or with none."""
        flags = {name: name == flag for name in _MEMORY_SWITCHES}
        return MemoryPlan.from_args(_changed(self.args, **flags, checkpoint_blocks=None), self.family.block_lists)

    def suggestions(self, plan, phase=None):
        """Return the settings that would lower a peak, as (what to set, bytes that it saves), best first.

        Args:
            plan (`MemoryPlan`): The plan as it is.
            phase (`str`, *optional*): The phase whose peak it is; without it the highest of the run.
        """

        def peak(forecast, plan):
            phases = forecast.phases(plan)
            return phases.get(phase, 0) if phase else max(phases.values())

        now = peak(self, plan)
        saved = [(text, now - peak(other, changed)) for text, other, changed in self._alternatives(plan)]
        return sorted((entry for entry in saved if entry[1] > 0), key=lambda entry: -entry[1])

    def _alternatives(self, plan):
        """Yield for each setting its flags, and the forecast and the plan of a run with it."""
        args, of_item, of_step = self.args, ("_encoded", "_preview"), ("_encoded", "profile", "_batch_bytes")
        for name in _MEMORY_SWITCHES if args.memory_budget is None else ():
            yield f"--{name}", self, self._plan_with(name)
        yield "no --validation_prompt", self._with(of_step, previews=None), plan
        yield "--offload_ema", self._with(of_step, args=_changed(args, offload_ema=True)), plan
        if args.optimizer == "adamw" and importlib.util.find_spec("bitsandbytes"):
            from bitsandbytes.optim import AdamW8bit

            optimizer = AdamW8bit, {"lr": args.learning_rate}
            yield "--optimizer adamw_8bit", self._with(of_step, optimizer=optimizer), plan
        if args.bucket_config is not None:
            return
        if args.train_batch_size > 1:
            size, steps = args.train_batch_size // 2, args.gradient_accumulation_steps * 2
            changed = _changed(args, train_batch_size=size, gradient_accumulation_steps=steps)
            text = f"--train_batch_size {size} --gradient_accumulation_steps {steps}"
            yield text, self._with(of_item, args=changed), plan
        used = max(self.records, key=self._num_tokens)["used"]
        smaller = [max(32, round(side / math.sqrt(2) / 32) * 32) for side in used["size"]]
        text = f"--max_pixels {math.prod(smaller)}" if args.max_pixels else "--width {} --height {}".format(*smaller)
        yield text, self._with(("_bytes",), records=[{"used": used | {"size": smaller}}], held_out=[]), plan
        if used["frames"] > 5:
            frames = (used["frames"] // 2 - 1) // 4 * 4 + 1
            fewer = self._with(("_bytes",), records=[{"used": used | {"frames": frames}}], held_out=[])
            yield f"--num_frames {frames}", fewer, plan

    def _with(self, kept, **changes):
        """Return the forecast of another run, which takes over what is `kept` of the attributes found so far."""
        other = dataclasses.replace(self, **changes)
        vars(other).update({name: vars(self)[name] for name in kept if name in vars(self)})
        return other


def _changed(args, **changes):
    """Return a copy of an `argparse.Namespace` with some values changed."""
    changed = copy.copy(args)
    vars(changed).update(changes)
    return changed


def _size_of(record):
    """Return the height, the width and the frames of an item as it is used."""
    width, height = record["used"]["size"]
    return height, width, record["used"]["frames"]


def _run_encoder(modules, encode):
    """Return the peak of an encoder without content, its weights, and shape and dtype of each tensor of its result."""
    weights = sum(tensor.nbytes for module in modules for tensor in (*module.parameters(), *module.buffers()))
    for module in modules:
        without_content(module)
    sample = {}
    peak = weights + peak_of(lambda: sample.update(encode()))
    return peak, weights, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in sample.items()}


def _listed(sizes):
    return ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in sizes.items())


def describe_forecast(forecast):
    """Return the lines of a forecast (`RunForecast.describe`) for a person."""
    launch = forecast["launch"]
    processes = f"{launch['device_type']}, {launch['strategy']}, {launch['num_processes']} in all"
    lines = [f"forecast per process ({processes}):"]
    rows = forecast["by_category"] | {"training peak": forecast["training_peak_bytes"]}
    lines += [f"  {name.replace('_', ' '):16} {format_bytes(value):>12}" for name, value in rows.items() if value]
    lines[-1] += f"  ({forecast['training_peak_place']})"
    if forecast["by_mode"]:
        lines.append(f"  training peak with all blocks in one mode: {_listed(forecast['by_mode'])}")
    lines.append(f"  phases: {_listed(forecast['phases'])}; the highest is {forecast['peak_phase']}")
    host, parked = format_bytes(forecast["host_bytes"]), format_bytes(forecast["parked_bytes"])
    return [*lines, f"  host memory of all local processes {host}, of it parked per process {parked}"]


def compare_forecast(forecast, measured):
    """Return the lines of a table of what was predicted and what was measured, for a person.

    Args:
        forecast (`dict`): From `RunForecast.describe`.
        measured (`dict`): With the same keys, as far as they were measured; None where this device reports nothing.
    """
    rows = {name: (value, measured["by_category"].get(name)) for name, value in forecast["by_category"].items()}
    for key in ("training_peak_bytes", "parked_bytes", "host_bytes"):
        rows[key.removesuffix("_bytes")] = forecast[key], measured[key]
    lines = [f"{'memory':16} {'forecast':>12} {'measured':>12} {'difference':>10}"]
    for name, sizes in rows.items():
        if any(sizes):
            difference = f"{sizes[0] / sizes[1] - 1:+.1%}" if all(sizes) else ""
            cells = ["-" if num_bytes is None else format_bytes(num_bytes) for num_bytes in sizes]
            lines.append(f"{name.replace('_', ' '):16} {cells[0]:>12} {cells[1]:>12} {difference:>10}")
    return lines


# ---------------------------------------------------------------- the plan


def plan_memory(args, forecast):
    """Return the `MemoryPlan` of this run, and limit what may be parked.

    Args:
        args (`argparse.Namespace`)
        forecast (`RunForecast`)

    Raises:
        RefusedError: The flags do not fit the block lists of this model, or no plan fits the budget.
    """
    if args.memory_budget is not None:
        plan = _plan_for_budget(args, forecast)
    else:
        try:
            plan = MemoryPlan.from_args(args, forecast.family.block_lists)
        except ValueError as error:
            raise RefusedError(str(error)) from None
    limit, parked_bytes = args.offload_buffer_size, forecast.profile.parked_bytes(plan)
    if limit is None:
        limit = forecast.launch.host_bytes
        if parked_bytes > limit and not args.dry_run:
            found = f"{format_bytes(parked_bytes)} for each local process, of which {format_bytes(limit)} are free"
            logger.warning("The plan parks %s: what finds no room in host memory stays on the device.", found)
    offload.set_limit(limit)
    return plan


def _plan_for_budget(args, forecast):
    budget, launch = forecast.room_bytes, forecast.launch
    if budget is None:
        raise RefusedError("--memory_budget auto: there is no accelerator here; give a size, such as 24GiB.")
    # A dry run may be for another machine.
    host_bytes = None if args.dry_run and launch.device_bytes is None else launch.host_bytes
    plan_for = functools.partial(
        MemoryPlan.from_budget, forecast.family.block_lists, costs=forecast.costs, host_bytes=host_bytes
    )
    try:
        return plan_for(budget)
    except BudgetError as error:
        plan = plan_for(error.smallest_bytes)
        phases, helping = forecast.phases(plan), forecast.suggestions(plan)
        most = f" What would help most is {helping[0][0]}: {format_bytes(helping[0][1])} less." if helping else ""
        needed, phase = format_bytes(error.smallest_bytes, up=True), max(phases, key=phases.get)
        raise RefusedError(
            f"--memory_budget: {format_bytes(budget)} cannot be met; the smallest that can is {needed}, for the phase "
            f"{phase}.{most}"
        ) from None


def describe_disk(forecast, num_steps, num_existing):
    """Return a sentence on what the result and the checkpoints take; warn if the disk has no room for them.

    Args:
        forecast (`RunForecast`)
        num_steps (`int`): Optimizer steps of the run.
        num_existing (`int`): Checkpoints that are there already.
    """
    args, size = forecast.args, forecast.checkpoint_bytes
    count = num_steps // (args.checkpointing_steps or num_steps + 1)
    if args.checkpoints_total_limit is not None:
        count = min(count, args.checkpoints_total_limit + 1)  # the oldest goes when the newest is there
    text, free = f"disk: {format_bytes(forecast.result_bytes)} for the result", shutil.disk_usage(args.output_dir).free
    if count:
        text += f", {format_bytes(size)} for each checkpoint, {format_bytes(count * size)} for {count} at a time"
    if forecast.result_bytes + max(0, count - num_existing) * size > free:
        where = f"{args.output_dir} has {format_bytes(free)} free"
        logger.warning("%s, and %s; set --checkpoints_total_limit, or give another folder", text, where)
    return f"{text}; {format_bytes(free)} are free"


def check_fits(forecast, plan):
    """Return a sentence on whether the run fits the device that is there.

    Args:
        forecast (`RunForecast`)
        plan (`MemoryPlan`)

    Raises:
        RefusedError: It does not.
    """
    phases = forecast.phases(plan)
    peak_phase = max(phases, key=phases.get)
    need = phases[peak_phase]
    budget = forecast.args.memory_budget
    if budget not in (None, "auto"):
        return f"fits in --memory_budget: {format_bytes(need)} of {format_bytes(budget)}"
    if forecast.launch.device_type == "cpu":
        return f"on the CPU: {format_bytes(forecast.host_bytes(plan))} of host memory in all"
    if forecast.launch.device_bytes is None:
        return f"no accelerator is here to compare with: one with {format_bytes(need + RESERVED_BYTES)} is needed"
    free, total = forecast.launch.device_bytes
    if need > total:
        help_ = "; or ".join(f"{text} (saves {format_bytes(saved)})" for text, saved in forecast.suggestions(plan)[:3])
        raise RefusedError(
            f"The run needs {format_bytes(need)} in the phase {peak_phase}, and the device has {format_bytes(total)}. "
            f"What saves most: {help_ or 'a smaller model'}."
        )
    fits = "it is tight" if need > forecast.room_bytes else "fits"
    return f"{fits}: {format_bytes(need)} of the {format_bytes(free)} that the device has free"
