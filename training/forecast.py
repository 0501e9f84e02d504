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


logger = logging.getLogger(__name__)

# Shown to users where a device's own size is compared: its context, workspaces of its libraries, rounding.
RESERVED_BYTES = 2**30

STRATEGIES = ("ddp", "zero2", "zero3", "fsdp2")

_MEMORY_SWITCHES = ("use_gradient_checkpointing", "use_gradient_checkpointing_offload")


@dataclasses.dataclass(frozen=True)
class Launch:
    """How the run is launched.

    Args:
        device_type (`str`): `"cpu"`, or the type of the accelerator that is there or, in a dry run, would be.
        num_processes, num_local_processes (`int`): In all, and on this machine.
        strategy (`str`): `"single"`, or one of `STRATEGIES`.
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
    zero_bucket_bytes: int = 4 * 500_000_000

    @classmethod
    def of(cls, args, accelerator):
        """Return how this process was launched."""
        device = accelerator.device
        strategy, bucket_bytes = "single", cls.zero_bucket_bytes
        if accelerator.distributed_type.value == "DEEPSPEED":
            zero = accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
            strategy, bucket_bytes = "zero2", 4 * int(zero.get("reduce_bucket_size", bucket_bytes // 4))
        elif accelerator.num_processes > 1:
            strategy = "ddp"
        there = device.type != "cpu"
        num_local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
        free = (torch.accelerator.get_memory_info(device) if there else None, psutil.virtual_memory().available)
        # The least of all processes, so that all make the same plan, or none.
        device_bytes, host_bytes = zip(*gather_from_all(accelerator, free), strict=True)
        return cls(
            # A dry run on a machine without an accelerator is for one that has it.
            device_type=device.type if there or not args.dry_run else "cuda",
            num_processes=accelerator.num_processes,
            num_local_processes=num_local_processes,
            strategy=strategy,
            device_bytes=min(device_bytes) if there else None,
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
        previews (`tuple[int, int, int]`, *optional*): Height, width and frames of previews, where any are made.
        preview_transformers (`int`): How many work together there.
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
    previews: tuple | None = None
    preview_transformers: int = 1

    @functools.cached_property
    def parameters(self):
        """Shape and dtype of each trained parameter: see `parameters_to_train`."""
        return parameters_to_train(self.family.skeleton, self.args, self.names)

    # ---- one sample, and the phases before training

    def _pixels(self, record):
        return math.prod((*record["used"]["size"], record["used"]["frames"]))

    def _batch_size(self, record):
        shape, batch_size = bucket_key(record, self.args.train_batch_size)
        return min(batch_size, self.samples_by_size.get(shape, batch_size))

    def _encode(self, record):
        """Return the peak of each encoder's phase at the size of an item, its weights, and the shapes of a sample."""
        width, height = record["used"]["size"]
        phases, weights, sample, of_texts = {}, {}, {}, []
        encoders = self._encoders(height, width, record["used"]["frames"])
        with fake_tensors(self.launch.device_type):
            for phase in ("text encoder", "VAE"):
                phases[phase], weights[phase] = self._run_encoder(*encoders[phase], sample)
                of_texts = of_texts or [*sample]
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in sample.items()}
        return phases, weights, shapes, of_texts

    def _encoders(self, height, width, num_frames):
        num_tokens = max(self.caption_tokens.values())
        return self.family.encoder_skeletons(num_tokens=num_tokens, height=height, width=width, num_frames=num_frames)

    @staticmethod
    def _run_encoder(modules, encode, sample):
        """Return the peak of an encoder and its weights; add what it returns to `sample`."""
        weights = sum(tensor.nbytes for module in modules for tensor in (*module.parameters(), *module.buffers()))
        for module in modules:
            without_content(module)
        return weights + peak_of(lambda: sample.update(encode())), weights

    @functools.cached_property
    def _largest(self):
        return max((*self.records, *self.held_out), key=self._pixels)

    @functools.cached_property
    def _encoded(self):
        """What `_encode` returns of the largest item."""
        return self._encode(self._largest)

    @functools.cached_property
    def _preview(self):
        """The peak of what previews run in addition to the transformer, and its weights."""
        height, width, num_frames = self.previews
        encoders = self._encoders(height, width, num_frames)
        with fake_tensors(self.launch.device_type):
            return self._run_encoder(*encoders["previews"], {})

    @functools.cached_property
    def _heaviest(self):
        """The shapes of a sample of the heaviest batch, and how many of them that has."""
        heaviest = max(self.records, key=lambda record: self._pixels(record) * self._batch_size(record))
        largest = self._largest
        same = heaviest["used"]["size"] == largest["used"]["size"]
        same = same and heaviest["used"]["frames"] == largest["used"]["frames"]
        return (self._encoded if same else self._encode(heaviest))[2], self._batch_size(heaviest)

    def _batch(self):
        """Return the heaviest batch, as `collate` makes it. Call it inside `fake_tensors`."""
        sample, batch_size = self._heaviest
        batch = {name: torch.empty(batch_size, *shape, dtype=dtype) for name, (shape, dtype) in sample.items()}
        batch["noise"], batch["sigmas"] = torch.empty_like(batch["latents"]), torch.empty(batch_size)
        masked = len(set(self.caption_tokens.values())) > 1 and batch_size > 1
        for name in self.family.padded:
            shape = batch[name].shape[:2]
            batch[f"{name}_mask"] = torch.empty(shape, dtype=torch.bool) if masked else None
        return batch

    @functools.cached_property
    def cache_bytes(self):
        """Bytes of what is to be encoded."""
        _, _, sample, of_texts = self._encoded
        largest = self._largest["used"]
        latents = sample["latents"][0][1:]

        def size_of_text(caption):
            total = 0
            for name in of_texts:
                shape, dtype = sample[name]
                shape = (self.caption_tokens[caption], *shape[1:]) if name in self.family.padded else shape
                total += math.prod(shape) * dtype.itemsize
            return total

        def size(used):
            # Latents are as many as pixels; the frames of a clip come in fours, after the first.
            scale = math.prod(used["size"]) * ((used["frames"] + 3) // 4)
            scale /= math.prod(largest["size"]) * ((largest["frames"] + 3) // 4)
            total = 0
            for name, (shape, dtype) in sample.items():
                if name not in of_texts:
                    total += math.prod(shape) * dtype.itemsize * (scale if shape[1:] == latents else 1)
            return total

        texts = sum(size_of_text(encoding.texts[0]) for encoding in self.to_encode["text encoder"].values())
        return texts + int(sum(size(encoding.item.record["used"]) for encoding in self.to_encode["VAE"].values()))

    @property
    def result_bytes(self):
        """Bytes of the file or folder that a run leaves, one file for each stage."""
        if self.args.training_mode == "full":
            return self._bytes["weights"]
        size = self._bytes["adapters"] * (1 if self.args.lora_dtype == "fp32" else 0.5)
        return int(size * len(self.family.stages))

    @property
    def checkpoint_bytes(self):
        """Bytes of a checkpoint: fp32 weights that are trained, the optimizer's state, the average."""
        return sum(self._bytes[name] for name in ("fp32_gradients", "optimizer_state", "ema"))

    @functools.cached_property
    def _batch_bytes(self):
        _ = self._heaviest  # found before, not inside: it builds the encoders
        with fake_tensors(self.launch.device_type):
            return sum(tensor.nbytes for tensor in self._batch().values() if tensor is not None)

    # ---- the step

    @functools.cached_property
    def profile(self):
        """The `StepProfile` of this run."""
        _ = self._heaviest  # found before, not inside, the step that is profiled
        model = shrink(self.family.skeleton, self.family.block_lists, self.names)
        make_trainable(model.transformer, self.args, model.names(self.names))

        def make_step(transformer):
            module, batch = DiffusionTrainingModule(self.family, transformer).train(), self._batch()
            return lambda: module(batch)

        return StepProfile(model, make_step, device_type=self.launch.device_type)

    @functools.cached_property
    def _bytes(self):
        """Bytes of the whole model by category, before they are shared out."""
        trained = {name: (math.prod(shape), dtype) for name, (shape, dtype) in self.parameters.items()}
        own = sum(count * dtype.itemsize for count, dtype in trained.values())
        base = sum(t.nbytes for t in (*self.family.skeleton.parameters(), *self.family.skeleton.buffers()))
        is_lora = self.args.training_mode == "lora"
        optimizer_class, arguments = self.optimizer
        if self.launch.device_type != "cpu" and issubclass(optimizer_class, torch.optim.Optimizer):
            arguments = _as_on_an_accelerator(optimizer_class, arguments)
        state, transient = optimizer_bytes(
            optimizer_class, arguments, [shape for shape, _ in self.parameters.values()]
        )
        return {
            "weights": base,
            "adapters": own if is_lora else 0,
            "masters": sum(4 * count for count, dtype in trained.values() if dtype != torch.float32),
            "ema": sum(4 * count for count, _ in trained.values()) if self.args.ema else 0,
            "optimizer_state": state,
            "gradients": own,
            "fp32_gradients": sum(4 * count for count, _ in trained.values()),
            "transient": transient,
        }

    @functools.cached_property
    def _largest_block_bytes(self):
        lists = [self.family.skeleton.get_submodule(name) for name in self.family.block_lists]
        return max(sum(parameter.nbytes for parameter in block.parameters()) for blocks in lists for block in blocks)

    def _shares(self, strategy, num_processes):
        """Return what of it one process holds all the time, and its gradients at the optimizer step."""
        whole, n = self._bytes, num_processes
        fixed = {key: whole[key] for key in ("weights", "adapters", "masters", "optimizer_state", "ema")}
        fixed["ema"] *= not self.args.offload_ema
        sums = whole["fp32_gradients"]
        fixed["gradients"] = sums if self.args.gradient_accumulation_steps > 1 else 0
        if strategy == "single":
            return fixed, sums
        if strategy == "ddp":
            # Its buckets, and of bf16 weights the sums in fp32. What micro-batches add up to has its own.
            fixed["gradients"] += whole["gradients"]
            return fixed, whole["gradients"] + whole["masters"]
        is_zero = strategy.startswith("zero")
        fixed["optimizer_state"] //= n
        fixed["masters"] = (sums if is_zero else whole["masters"]) // n
        fixed["gradients"] = sums // n + is_zero * self.launch.zero_bucket_bytes
        if strategy in ("zero3", "fsdp2"):
            # The block that runs and the next one are gathered.
            fixed["weights"] = fixed["weights"] // n + 2 * self._largest_block_bytes
            fixed["adapters"] //= n
        return fixed, fixed["gradients"]

    def training(self, plan, strategy=None, num_processes=None):
        """Return the bytes of a process by category at the highest moment of a step, and when that is.

        To the state of the optimizer belong the fp32 masters of weights in bf16.
        """
        strategy = strategy or self.launch.strategy
        fixed, at_step = self._held(strategy, num_processes or self.launch.num_processes)
        peak = self.profile.peak(plan, gradient_factor=self._gradient_factor(strategy))
        during = fixed | {"activations": peak.num_bytes - peak.gradient_bytes}
        during["gradients"] = fixed["gradients"] + peak.gradient_bytes
        if sum(at_step.values()) > sum(during.values()):
            return at_step, "optimizer step"
        return during, peak.place

    def _held(self, strategy, num_processes):
        """Return the bytes by category that a step finds, and those at the optimizer step."""
        fixed, gradients_at_step = self._shares(strategy, num_processes)
        fixed["batch"] = self._batch_bytes
        fixed["optimizer_state"] += fixed.pop("masters")
        return fixed, fixed | {"gradients": gradients_at_step, "activations": self._bytes["transient"]}

    def costs(self, plans):
        """Return what each of many plans costs; see `MemoryPlan.from_budget`. The peak is that of the whole run."""
        fixed, at_step = self._held(self.launch.strategy, self.launch.num_processes)
        held, phases = sum(fixed.values()), self.phases(plans[0]) | {"training": sum(at_step.values())}
        costs = self.profile.costs(plans, gradient_factor=self._gradient_factor(self.launch.strategy))
        floor = max(phases.values())
        return [dataclasses.replace(cost, peak_bytes=max(floor, held + cost.peak_bytes)) for cost in costs]

    def _gradient_factor(self, strategy):
        """Return what the backward pass leaves of each byte of gradients that it makes: see `StepProfile.peak`."""
        whole, num_micro_batches = self._bytes, self.args.gradient_accumulation_steps
        if strategy == "single":
            return 0 if num_micro_batches > 1 and not whole["masters"] else 1
        # Else they go into buckets, or are shared out: both are there all the time.
        if strategy != "ddp" or not whole["masters"]:
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
        before = {phase: peak for phase, peak in self._encoded[0].items() if self.to_encode[phase]}
        training = {"training": sum(self.training(plan)[0].values())}
        fixed, _ = self._shares(self.launch.strategy, self.launch.num_processes)
        held, sampling = sum(fixed.values()), self.profile.inference_bytes + self._batch_bytes
        # The exported file is loaded back, at the end, in addition to what training leaves.
        export = {"export": held - fixed["gradients"] + self._bytes["adapters"] + sampling}
        if self.previews is None:
            return before | training | export, False
        peak, weights = self._preview
        second = (self.preview_transformers - 1) * self._bytes["weights"]
        previews = held + second + max(weights + sampling, peak)
        if takes_turns := self._exceeds_room(previews, before | training | export):
            # While another part of the pipeline runs, what is not trained waits in host memory.
            waiting = self._waiting_bytes
            previews = max(held + max(0, second - waiting) + sampling, held - waiting + peak)
        return before | training | {"previews": previews} | export, takes_turns

    def _exceeds_room(self, num_bytes, phases):
        """Return whether previews that take `num_bytes` do not fit on a device on which other phases do."""
        if self.launch.device_type == "cpu":
            return False  # and what would leave it has nowhere to go
        if self.args.memory_budget not in (None, "auto"):
            return num_bytes > self.args.memory_budget
        if self.launch.device_bytes is not None:
            return num_bytes > self.launch.device_bytes[0] - RESERVED_BYTES
        return num_bytes > max(phases.values())  # the smallest device that will do

    @property
    def _waiting_bytes(self):
        """Bytes of the transformer that leave the device where parts of the pipeline take turns."""
        return self._bytes["weights"] if self.args.training_mode == "lora" else 0

    def host_bytes(self, plan):
        """Return the host memory of all processes on this machine at its highest.

        Weights are read by mapping their files: however many processes do it, these pages are there once.
        """
        phases, takes_turns = self._phases(plan)
        weights = [num_bytes for phase, num_bytes in self._encoded[1].items() if self.to_encode[phase]]
        # Batches that are made ahead, two for each thread, and the one that is trained on.
        ahead = self._batch_bytes * (2 * self.args.dataloader_num_workers + 1)
        mapped = max([*weights, self._bytes["weights"]])
        training = self.profile.parked_bytes(plan)
        if self.args.ema and self.args.offload_ema:
            training += self._bytes["ema"]
        preview_weights = 0
        if self.previews is not None:
            preview_weights = self._preview[1]
            training += self._bytes["ema"]  # the trained weights, while their average has their place
        if self.launch.device_type == "cpu":
            training += max(
                num_bytes + preview_weights * (phase in ("training", "export")) for phase, num_bytes in phases.items()
            )
        else:
            # On the way to and from a checkpoint: weights that are trained, or optimizer and average, twice.
            saving = self._bytes["fp32_gradients"] if self.args.checkpointing_steps else 0
            loading = self._bytes["optimizer_state"] + 2 * self._bytes["ema"]
            training += max(saving, loading if self.args.resume_from_checkpoint else 0)
            training += preview_weights + takes_turns * self._waiting_bytes
            training += (self.preview_transformers - 1) * self._bytes["weights"] * (self.previews is not None)
        process = psutil.Process().memory_info()
        shared = getattr(process, "shared", 0)  # libraries above all; only Linux tells
        n = self.launch.num_local_processes
        return int(shared + n * (process.rss - shared + ahead) + max(mapped, n * training))

    # ---- for people and files

    def describe(self, plan):
        """Return the forecast of a `MemoryPlan` as run.json has it; all in bytes."""
        by_category, place = self.training(plan)
        phases = self.phases(plan)
        peak_phase = max(phases, key=phases.get)
        n = self.launch.num_processes if self.launch.num_processes > 1 else 8
        return {
            "training_peak_bytes": phases["training"],
            "training_peak_place": place,
            **({"by_mode": self._by_mode()} if self.args.dry_run else {}),
            "peak_phase": peak_phase,
            "by_category": by_category,
            "phases": phases,
            "parked_bytes": self.profile.parked_bytes(plan),
            "host_bytes": self.host_bytes(plan),
            "device_type": self.launch.device_type,
            "strategy": self.launch.strategy,
            "num_processes": self.launch.num_processes,
            "num_local_processes": self.launch.num_local_processes,
            "per_process": {
                "num_processes": n,
                **{name: sum(self.training(plan, name, n)[0].values()) for name in STRATEGIES},
            },
        }

    def _by_mode(self):
        """Return the training peak of each mode for all blocks."""
        flags = zip(("keep", "recompute", "park"), (None, *_MEMORY_SWITCHES), strict=True)
        return {mode: sum(self.training(self._plan_with(flag))[0].values()) for mode, flag in flags}

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
        args = self.args
        if args.memory_budget is None:
            for name in _MEMORY_SWITCHES:
                if (other := self._plan_with(name)) != plan:
                    yield f"--{name}", self, other
        if self.previews is not None:
            yield "no --validation_prompt", self._with(previews=None), plan
        if args.ema and not args.offload_ema:
            yield "--offload_ema", self._with_flags(offload_ema=True), plan
        if args.optimizer == "adamw" and importlib.util.find_spec("bitsandbytes"):
            from bitsandbytes.optim import AdamW8bit

            yield "--optimizer adamw_8bit", self._with(optimizer=(AdamW8bit, {"lr": args.learning_rate})), plan
        if args.training_mode == "lora" and args.lora_rank > 1:
            yield f"--lora_rank {args.lora_rank // 2}", self._with_flags(lora_rank=args.lora_rank // 2), plan
        if args.bucket_config is not None:
            return
        if args.train_batch_size > 1:
            size, steps = args.train_batch_size // 2, args.gradient_accumulation_steps * 2
            text = f"--train_batch_size {size} --gradient_accumulation_steps {steps}"
            yield text, self._with_flags(train_batch_size=size, gradient_accumulation_steps=steps), plan
        largest = max(self.records, key=lambda record: math.prod(record["used"]["size"]))["used"]
        smaller = [max(32, round(side / math.sqrt(2) / 32) * 32) for side in largest["size"]]
        text = f"--max_pixels {math.prod(smaller)}" if args.max_pixels else "--width {} --height {}".format(*smaller)
        yield text, self._with(records=[{"used": largest | {"size": smaller}}], held_out=[]), plan
        if largest["frames"] > 5:
            frames = (largest["frames"] // 2 - 1) // 4 * 4 + 1
            other = self._with(records=[{"used": largest | {"frames": frames}}], held_out=[])
            yield f"--num_frames {frames}", other, plan

    def _with_flags(self, **flags):
        return self._with(args=_changed(self.args, **flags))

    def _with(self, **changes):
        """Return the forecast of another run, with what the change leaves as it is."""
        other = dataclasses.replace(self, **changes)
        kept = {"_encoded"} if "records" not in changes else {"_bytes"}
        if "args" not in changes and "records" not in changes:
            kept.add("profile")
        other.__dict__.update({name: value for name, value in vars(self).items() if name in kept})
        return other


def _changed(args, **changes):
    """Return a copy of an `argparse.Namespace` with some values changed."""
    changed = copy.copy(args)
    vars(changed).update(changes)
    return changed


def _as_on_an_accelerator(optimizer_class, arguments):
    """Return the arguments with what an optimizer of torch chooses by itself on an accelerator, and not on a CPU."""
    accepted = inspect.signature(optimizer_class).parameters
    if optimizer_class is torch.optim.AdamW:
        return {"fused": True} | arguments  # as `find_optimizer` sets it there
    if "foreach" in accepted and not arguments.get("fused"):
        return {"foreach": True} | arguments
    return arguments


def _listed(sizes):
    return ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in sizes.items())


def describe_forecast(forecast):
    """Return the lines of a forecast (`RunForecast.describe`) for a person."""
    processes = f"{forecast['num_processes']} process" + "es" * (forecast["num_processes"] > 1)
    lines = [f"forecast per process ({forecast['device_type']}, {processes}, {forecast['strategy']}):"]
    rows = forecast["by_category"] | {"training peak": forecast["training_peak_bytes"]}
    lines += [f"  {name.replace('_', ' '):16} {format_bytes(value):>12}" for name, value in rows.items() if value]
    lines[-1] += f"  ({forecast['training_peak_place']})"
    is_for_planning = "by_mode" in forecast
    if is_for_planning:
        lines.append(f"  training peak with all blocks in one mode: {_listed(forecast['by_mode'])}")
    lines.append(f"  phases: {_listed(forecast['phases'])}; the highest is {forecast['peak_phase']}")
    host, parked = format_bytes(forecast["host_bytes"]), format_bytes(forecast["parked_bytes"])
    lines.append(f"  host memory of all local processes {host}, of it parked per process {parked}")
    if is_for_planning or forecast["num_processes"] > 1:
        shared = {name: size for name, size in forecast["per_process"].items() if name != "num_processes"}
        count = forecast["per_process"]["num_processes"]
        lines.append(f"  training peak of each of {count} processes: {_listed(shared)}")
    return lines


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
    for name, (predicted, found) in rows.items():
        if predicted or found:
            text = "-" if found is None else format_bytes(found)
            ratio = predicted / found if predicted and found else None
            difference = "" if ratio is None else f"{ratio - 1:+.1%}" if ratio < 2 else f"{ratio:.2g} times"
            lines.append(f"{name.replace('_', ' '):16} {format_bytes(predicted):>12} {text:>12} {difference:>10}")
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
            logger.warning(
                "The plan parks %s in host memory, and for each of %d local processes %s are free: what finds no room "
                "stays on the device.",
                *(format_bytes(parked_bytes), forecast.launch.num_local_processes, format_bytes(limit)),
            )
    offload.set_limit(limit)
    return plan


def _plan_for_budget(args, forecast):
    budget = args.memory_budget
    if budget == "auto":
        if forecast.launch.device_bytes is None:
            raise RefusedError("--memory_budget auto: there is no accelerator here; give a size, such as 24GiB.")
        budget = forecast.launch.device_bytes[0] - RESERVED_BYTES
    fastest = functools.partial(
        MemoryPlan.from_budget,
        forecast.family.block_lists,
        costs=forecast.costs,
        # A dry run may be for another machine.
        host_bytes=None if args.dry_run and forecast.launch.device_bytes is None else forecast.launch.host_bytes,
    )
    try:
        return fastest(budget)
    except BudgetError as error:
        plan = fastest(error.smallest_bytes)
        phases, helping = forecast.phases(plan), forecast.suggestions(plan)
        most = f" What would help most is {helping[0][0]}: {format_bytes(helping[0][1])} less." if helping else ""
        needed, phase = format_bytes(error.smallest_bytes, up=True), max(phases, key=phases.get)
        raise RefusedError(
            f"--memory_budget: {format_bytes(budget)} cannot be met; the smallest that can is {needed}, for the phase "
            f"{phase}.{most}"
        ) from None


def describe_disk(forecast, last_step, num_existing):
    """Return a sentence on what the result and the checkpoints take; warn if the disk has no room for them.

    Args:
        forecast (`RunForecast`)
        last_step (`int`): The last optimizer step of the run.
        num_existing (`int`): Checkpoints that are there already.
    """
    args = forecast.args
    count = last_step // (args.checkpointing_steps or last_step + 1)
    if args.checkpoints_total_limit is not None:
        count = min(count, args.checkpoints_total_limit + 1)  # the oldest goes when the newest is there
    size, free = forecast.checkpoint_bytes, shutil.disk_usage(args.output_dir).free
    needed = forecast.result_bytes + max(0, count - num_existing) * size
    text = f"disk: {format_bytes(forecast.result_bytes)} for the result"
    if count:
        text += f", {format_bytes(size)} for a checkpoint, {format_bytes(count * size)} for {count} at a time"
    if needed > free:
        logger.warning(
            "%s, and %s has %s free; set --checkpoints_total_limit, or give another folder",
            *(text, args.output_dir, format_bytes(free)),
        )
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
        host, free = forecast.host_bytes(plan), psutil.virtual_memory().available
        return f"on the CPU: {format_bytes(host)} in all, of the {format_bytes(free)} that the host has free"
    if forecast.launch.device_bytes is None:
        return f"no accelerator is here to compare with: one with {format_bytes(need + RESERVED_BYTES)} is needed"
    free, total = forecast.launch.device_bytes
    if need > total:
        help_ = "; or ".join(f"{text} (saves {format_bytes(saved)})" for text, saved in forecast.suggestions(plan)[:3])
        raise RefusedError(
            f"The run needs {format_bytes(need)} in the phase {peak_phase}, and the device has {format_bytes(total)}. "
            f"What saves most: {help_ or 'a smaller model'}."
        )
    if need + RESERVED_BYTES > free:
        return f"it is tight: {format_bytes(need)} are needed, and the device has {format_bytes(free)} free"
    return f"fits: {format_bytes(need)} of the {format_bytes(free)} that the device has free"
