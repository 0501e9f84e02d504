"""What a run checks while it trains: previews by the stock pipeline, and the loss of items that are held out.

It does not touch the training: with and without it, the weights are the same, bit for bit.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import pathlib

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import send_to_device
from diffusers import DiffusionPipeline
from diffusers.training_utils import free_memory

from dataset.batches import collate
from dataset.draws import Draw
from dataset.images import cover_and_crop, open_image
from runtime.errors import RefusedError
from runtime.files import whole_file, write_text
from runtime.processes import gather_from_all, on_main_process
from training.drawing import draw_grid, write_clip
from training.export import load_result
from training.trackers import log_previews


logger = logging.getLogger(__name__)

# At how many sigmas, in the middle of bands of equal width, the loss of a held-out item is measured.
NUM_BANDS = 4


def hold_out(args, items):
    """Split off the items that are not trained, the same ones in every run with this seed and these files.

    Args:
        args (`argparse.Namespace`): With `validation_split`, their share, and `seed`.
        items (`list[Item]`): Their records are changed where they are held out.

    Returns:
        `tuple[list[Item], list[Item]]`: Those that are trained, and those that are held out.

    Raises:
        RefusedError: Nothing would be left to train.
    """
    if not args.validation_split:
        return items, []
    count = max(1, round(args.validation_split * len(items)))

    def lot(item):
        # By the content of the file: adding an item or moving the folder changes no other lot, and copies stay
        # together.
        return hashlib.sha256(f"{args.seed} {item.digest}".encode()).hexdigest()

    last = sorted(map(lot, items))[count - 1]
    held_out = [item for item in items if lot(item) <= last]
    if len(held_out) == len(items):
        share = f"--validation_split {args.validation_split} of {len(items)} items, copies counted once,"
        raise RefusedError(f"{share} leaves nothing to train; give more items, or a smaller share.")
    for item in held_out:
        reasons = filter(None, [item.record["reason"], "held out for validation (--validation_split)"])
        item.record.update(decision="dropped", reason="; ".join(reasons))
    return [item for item in items if item.record["decision"] == "used"], held_out


# ---------------------------------------------------------------- what previews show


def preview_prompts(args):
    """Return the texts that previews need encoded; none where no previews are made."""
    prompts = list(args.validation_prompt or ())
    return prompts if not prompts or args.negative_prompt is None else [*prompts, args.negative_prompt]


def preview_settings(args, items):
    """Return what `Family.sample` is given for all previews of a run, except for the guidance.

    The size is that of the run, or the most frequent one where items differ.

    Raises:
        RefusedError: An image of --validation_image cannot be read.
    """
    sizes = [(*item.record["used"]["size"], item.record["used"]["frames"]) for item in items]
    (width, height, num_frames), _ = collections.Counter(sizes).most_common(1)[0]
    if args.height is not None and args.width is not None:
        height, width = args.height, args.width
    settings = {"height": height, "width": width, "num_frames": getattr(args, "num_frames", None) or num_frames}
    paths = getattr(args, "validation_image", None) or ()
    images = [open_image(path, f"--validation_image {path}") for path in paths]
    settings["images"] = [cover_and_crop(image, height, width) for image in images]  # as a frame that is trained
    return settings | {"num_inference_steps": args.num_inference_steps, "seed": args.validation_seed}


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What samples previews.

    Args:
        pipeline (`DiffusionPipeline`): The stock one on the CPU, without transformers and text encoder.
        settings (`dict`): Of `Family.sample`.
        texts (`dict[str, dict[str, torch.Tensor]]`): Each of the `preview_prompts`, encoded.
        takes_turns (`bool`):
            The device has no room for all parts of the pipeline together: each has it alone while the others wait in
            host memory.
    """

    pipeline: DiffusionPipeline
    settings: dict
    texts: dict
    takes_turns: bool


class Validation:
    """Makes previews and measures held-out items now and then. Every process must call its methods.

    Args:
        accelerator (`Accelerator`): Prompts and items are distributed over its processes.
        args (`argparse.Namespace`)
        module (`DiffusionTrainingModule`)
        stage (`Stage`): Which transformer it trains.
        held_out (`TrainingDataset`): Of the items that are not trained, without what is drawn for them.
        sampler (`Sampler`, *optional*): Needed for a --validation_prompt.
    """

    def __init__(self, accelerator, args, module, stage, held_out, sampler=None):
        self.accelerator, self.args, self.module = accelerator, args, module
        self.stage, self.held_out, self.sampler = stage, held_out, sampler
        self.prompts = list(args.validation_prompt or ())
        low, high = max(stage.sigma_range[0], args.min_sigma), min(stage.sigma_range[1], args.max_sigma)
        self.sigmas = [low + (band + 0.5) / NUM_BANDS * (high - low) for band in range(NUM_BANDS)]

    def is_due(self, step):
        """Return whether something is to be done after an optimizer step, and was not before a run was killed.

        The checkpoint of a step comes first, so that previews which fail cost nothing.
        """
        every = self.args.validation_steps
        if every is None or step % every:
            return False
        names = ["grid.png"] * bool(self.prompts) + ["loss.json"] * bool(self.held_out)
        is_done = all((self._folder(step) / name).exists() for name in names)
        return not gather_from_all(self.accelerator, is_done)[0]

    def _folder(self, step):
        return pathlib.Path(self.args.output_dir) / "validation" / f"step-{step}"

    @torch.no_grad()
    def run(self, step, is_stopped=lambda: False):
        """Make the previews and measure the loss, and write them to validation/step-`step`.

        The module is in the same mode afterwards as before.

        Args:
            step (`int`): The optimizer step that was made, counted over the whole run.
            is_stopped (`Callable[[], bool]`): Asked now and then. When it returns True, the previews are given up.
        """
        device, was_training = self.accelerator.device, self.module.training
        self.module.eval()
        # The stock pipeline may draw random numbers.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            losses = self._losses() if self.held_out else []
            previews = self._previews(is_stopped) if self.prompts else []
        self.module.train(was_training)

        def report():
            self._folder(step).mkdir(parents=True, exist_ok=True)
            if losses:
                self._report_losses(losses, step)
            if previews:
                self._report_previews(previews, step)

        on_main_process(self.accelerator, report)

    # ---- the loss of what is held out

    def _losses(self):
        """Return the loss of each held-out item at each of the sigmas."""
        own = {}
        for number in range(len(self.held_out))[self._share]:
            sample = self.held_out.read(*self.held_out.samples[number].entries)
            # Steps of training count from 1: this noise is drawn nowhere else, and here each time.
            sample["noise"] = Draw(self.args.validation_seed, 0, number).noise(sample["latents"].shape)
            rows = []
            for sigma in torch.tensor(self.sigmas, dtype=torch.float32):
                batch = collate([sample | {"sigmas": sigma}], self.held_out.padded)
                rows.append(self.module.losses(send_to_device(batch, self.accelerator.device)))
            own[number] = torch.cat(rows).tolist()
        return self._gathered(own)

    def _report_losses(self, losses, step):
        bands = [math.fsum(column) / len(losses) for column in zip(*losses, strict=True)]
        by_sigma = {f"{sigma:.4g}": loss for sigma, loss in zip(self.sigmas, bands, strict=True)}
        record = {"step": step, "loss": math.fsum(bands) / len(bands), "by_sigma": by_sigma, "num_items": len(losses)}
        write_text(self._folder(step) / "loss.json", json.dumps(record, indent=2) + "\n")
        logger.info("step %d: the loss of %d held-out items is %.4f", step, len(losses), record["loss"])
        numbers = {f"validation/loss_at_{sigma}": loss for sigma, loss in by_sigma.items()}
        self.accelerator.log({"validation/loss": record["loss"]} | numbers, step=step)

    # ---- previews

    def _previews(self, is_stopped):
        """Return the frames of each preview; none if one of the processes was stopped."""
        sampler, pipeline, transformer = self.sampler, self.sampler.pipeline, self.module.transformer

        def after_each_step(pipeline, step, timestep, tensors):
            pipeline._interrupt = is_stopped()
            return {}

        own, numbers = {}, range(len(self.prompts))[self._share]
        settings = sampler.settings | {"callback_on_step_end": after_each_step}
        pipeline.register_modules(**{self.stage.subfolder: transformer})
        if self.stage.other is not None and numbers:
            self._load_other(pipeline)
        pipeline.set_progress_bar_config(desc="preview", leave=False, disable=not self.accelerator.is_main_process)
        with _on_device(pipeline, transformer, self.accelerator.device, takes_turns=sampler.takes_turns):
            for number in numbers:
                given = sampler.texts[self.prompts[number]], sampler.texts.get(self.args.negative_prompt)
                frames = self.module.family.sample(pipeline, *given, **settings)
                if is_stopped():
                    break
                own[number] = frames
        used = [name for name in pipeline.components if name.startswith("transformer")]
        pipeline.register_modules(**dict.fromkeys(used))
        free_memory()
        previews = self._gathered(own)
        return previews if len(previews) == len(self.prompts) else []

    def _load_other(self, pipeline):
        """Give a pipeline the transformer that samples together with the trained one. It is freed after each use."""
        family, other = self.module.family, self.stage.other
        pipeline.register_modules(**{other: family.load_transformer(other)})
        for before in family.stages[: self.stage.number]:  # trained by this run
            if before.subfolder == other:
                load_result(pipeline, self.args.output_dir, before)

    def _report_previews(self, previews, step):
        clips, folder, is_video = {}, self._folder(step), self.module.family.is_video
        for number, frames in enumerate(previews):
            path = folder / f"prompt-{number:02}.{'mp4' if is_video else 'png'}"
            with whole_file(path) as temporary:
                if is_video:
                    write_clip(temporary, frames, self.args.fps)
                    clips[f"validation/{path.stem}"] = path
                else:
                    frames[0].save(temporary)
        grid = draw_grid(previews)
        with whole_file(folder / "grid.png") as temporary:
            grid.save(temporary)
        logger.info("step %d: %d previews are in %s", step, len(previews), folder)
        log_previews(self.accelerator, grid, clips, step)

    # ---- over the processes

    @property
    def _share(self):
        """The slice of a list that this process works on."""
        return slice(self.accelerator.process_index, None, self.accelerator.num_processes)

    def _gathered(self, own):
        """Return what all processes have, `{number: value}` each, as one list in the order of the numbers."""
        of_all = collections.ChainMap(*gather_from_all(self.accelerator, own))
        return [of_all[number] for number in sorted(of_all)]


# ---------------------------------------------------------------- what of the pipeline is on the device


class _MoveToDevice(ModelHook):
    """Moves the part that is about to run to the device, and those that it takes turns with to the host."""

    def __init__(self, parts, device):
        self.parts, self.execution_device = parts, device

    def pre_forward(self, module, *args, **kwargs):
        for part in self.parts:
            if part is not module:
                _move_frozen(part, "cpu")
        _move_frozen(module, self.execution_device)
        return args, kwargs


def _move_frozen(module, device):
    """Move what of a module is not trained. The rest stays: the optimizer and DDP use its memory."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.requires_grad:
            tensor.data = tensor.data.to(device)


@contextlib.contextmanager
def _on_device(pipeline, trained, device, *, takes_turns):
    """Context in which the parts of a pipeline run on the device, all together or by turns; then `trained` has it."""
    parts = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    hook = _MoveToDevice(parts if takes_turns else (), device)
    for part in parts:
        if part is not trained:
            part.requires_grad_(False)
        add_hook_to_module(part, hook)
    try:
        yield
    finally:
        for part in parts:
            remove_hook_from_module(part)
            _move_frozen(part, device if part is trained else "cpu")
