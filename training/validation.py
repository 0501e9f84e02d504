"""What is looked at while training goes on: previews by the stock pipeline, and the loss of items that are held out.

Nothing of it touches the training: with and without, the weights come out the same, bit for bit.
"""

import collections
import contextlib
import fractions
import hashlib
import json
import logging
import math
import pathlib

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import send_to_device
from diffusers.training_utils import free_memory
from diffusers.utils import make_image_grid
from PIL import Image

from dataset.batches import collate
from dataset.cache import read_entry
from dataset.draws import Draw
from dataset.images import cover_and_crop, open_image
from runtime.errors import RefusedError
from runtime.files import whole_file, write_text
from runtime.processes import gather_from_all


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
    if count >= len(items):
        raise RefusedError(
            f"--validation_split {args.validation_split} of {len(items)} items leaves nothing to train; give more "
            "items, or a smaller share."
        )

    def lot(item):
        # By what is in the file: adding an item, or moving the folder, does not deal again, and copies stay together.
        return hashlib.sha256(f"{args.seed} {item.digest}".encode()).hexdigest()

    last = lot(sorted(items, key=lot)[count - 1])
    held_out = [item for item in items if lot(item) <= last]
    if len(held_out) == len(items):
        raise RefusedError(f"--validation_split: all {len(items)} items are copies of one file.")
    for item in held_out:
        reason = "held out for validation (--validation_split)"
        item.record["decision"] = "dropped"
        item.record["reason"] = "; ".join(filter(None, [item.record["reason"], reason]))
    return [item for item in items if item.record["decision"] == "used"], held_out


def preview_size(args, items):
    """Return (height, width, frames) of previews: those of the run, or where items differ the most frequent ones."""
    used = [item.record["used"] for item in items]
    (width, height), num_frames = collections.Counter(
        (tuple(record["size"]), record["frames"]) for record in used
    ).most_common(1)[0][0]
    if args.height is not None and args.width is not None:
        height, width = args.height, args.width
    return height, width, getattr(args, "num_frames", None) or num_frames


def preview_settings(args, items, images=()):
    """Return what `sample` of a family is told of all previews of a run, by its names."""
    height, width, num_frames = preview_size(args, items)
    settings = {"height": height, "width": width, "num_frames": num_frames, "images": images}
    settings |= {"guidance_scale": args.guidance_scale, "num_inference_steps": args.num_inference_steps}
    return settings | {"seed": args.validation_seed}


def preview_prompts(args):
    """Return the texts that previews need encoded."""
    prompts = list(args.validation_prompt or ())
    return prompts if not prompts or args.negative_prompt is None else [*prompts, args.negative_prompt]


def read_preview_images(args, height, width):
    """Return the pictures of --validation_image as a clip's frames would be trained, covering the size and cropped.

    Raises:
        RefusedError: One cannot be read.
    """
    images = []
    for path in getattr(args, "validation_image", None) or ():
        if not pathlib.Path(path).is_file():
            raise RefusedError(f"--validation_image: there is no file {path}.")
        try:
            images.append(cover_and_crop(open_image(path), height, width))
        except RefusedError as error:
            raise RefusedError(f"--validation_image: {error}") from None
    return images


class Validation:
    """Makes previews and measures held-out items now and then.

    Args:
        accelerator (`Accelerator`): Prompts and items are shared out over its processes.
        args (`argparse.Namespace`)
        module (`DiffusionTrainingModule`)
        held_out (`TrainingDataset`): Of the items that are not trained, without what is drawn for them.
        prompts (`dict[str, pathlib.Path]`): Of each text of a preview its entry in the cache.
        sigma_range (`tuple[float, float]`): In which the transformer is used.
        pipeline (`DiffusionPipeline`, *optional*): The stock one on the CPU, without the transformer; for previews.
        sample (`Callable`, *optional*): `sample` of the family, with its settings bound.
        place (`str`): What the pipeline calls the transformer.
        load_other (`Callable[[DiffusionPipeline], None]`, *optional*):
            Gives the pipeline the transformer that works beside the trained one. It is let go after each use.
        takes_turns (`bool`):
            The device has no room for all parts of the pipeline together: each has it alone, and the others wait in
            host memory.
        fps (`float`, *optional*): Of clips.
    """

    def __init__(
        self,
        accelerator,
        args,
        module,
        held_out,
        prompts,
        *,
        sigma_range=(0.0, 1.0),
        pipeline=None,
        sample=None,
        place="transformer",
        load_other=None,
        takes_turns=False,
        fps=None,
    ):
        self.accelerator, self.args, self.module, self.fps = accelerator, args, module, fps
        self.takes_turns = takes_turns
        low, high = max(sigma_range[0], args.min_sigma), min(sigma_range[1], args.max_sigma)
        self.sigmas = [low + (band + 0.5) / NUM_BANDS * (high - low) for band in range(NUM_BANDS)]
        self.held_out = held_out
        self.prompts = list(args.validation_prompt or ())
        self.entries = prompts
        self.pipeline, self.sample, self.place, self.load_other = pipeline, sample, place, load_other

    @property
    def is_wanted(self):
        """Whether there is anything to do, after the last step if at no other."""
        return bool(self.prompts or self.held_out)

    def is_due(self, step):
        """Return whether something is to be done after an optimizer step."""
        every = self.args.validation_steps
        return self.is_wanted and every is not None and step % every == 0

    def is_missing(self, step):
        """Return whether something was due after a step and is not there, as where a run was killed meanwhile.

        A step is followed by its checkpoint first, so that previews which fail cost nothing.
        """
        names = ["grid.png"] * bool(self.prompts) + ["loss.json"] * bool(self.held_out)
        is_done = all((self._folder(step) / name).exists() for name in names)
        return self.is_due(step) and not gather_from_all(self.accelerator, is_done)[0]

    def _folder(self, step):
        return pathlib.Path(self.args.output_dir) / "validation" / f"step-{step}"

    @torch.no_grad()
    def run(self, step, trackers=None, is_stopped=lambda: False):
        """Make the previews and measure the loss, and write them to validation/step-`step`.

        Every process must call it. The module is in the mode afterwards that it was in before.

        Args:
            step (`int`): The optimizer step that was made.
            trackers (`Trackers`, *optional*): Get them too.
            is_stopped (`Callable[[], bool]`): Asked now and then; once it says yes, the previews are given up.
        """
        device, was_training = self.accelerator.device, self.module.training
        self.module.eval()
        # The stock pipeline may draw as it likes.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            losses = self._losses() if self.held_out else None
            previews = self._previews(is_stopped) if self.prompts else []
        self.module.train(was_training)
        if self.accelerator.is_main_process:
            folder = self._folder(step)
            folder.mkdir(parents=True, exist_ok=True)
            if losses is not None:
                self._report_losses(losses, folder, step, trackers)
            if previews:
                self._report_previews(previews, folder, step, trackers)

    # ---- the loss of what is held out

    def _losses(self):
        """Return the loss of each held-out item at each of the sigmas."""
        n, rank = self.accelerator.num_processes, self.accelerator.process_index
        own = {}
        for number in range(rank, len(self.held_out), n):
            sample = self.held_out.read(*self.held_out.samples[number].entries)
            # Steps of training count from 1: this noise is seen nowhere else, and here each time.
            sample["noise"] = Draw(self.args.validation_seed, 0, number).noise(sample["latents"].shape)
            rows = []
            for sigma in self.sigmas:
                given = sample | {"sigmas": torch.tensor(sigma, dtype=torch.float32)}
                batch = collate([given], self.held_out.padded)
                rows.append(self.module.losses(send_to_device(batch, self.accelerator.device)))
            own[number] = torch.cat(rows).tolist()
        of_all = collections.ChainMap(*gather_from_all(self.accelerator, own))
        return [of_all[number] for number in range(len(self.held_out))]

    def _report_losses(self, losses, folder, step, trackers):
        bands = [math.fsum(column) / len(losses) for column in zip(*losses, strict=True)]
        by_sigma = {f"{sigma:.4g}": loss for sigma, loss in zip(self.sigmas, bands, strict=True)}
        record = {"step": step, "loss": math.fsum(bands) / len(bands), "by_sigma": by_sigma, "num_items": len(losses)}
        write_text(folder / "loss.json", json.dumps(record, indent=2) + "\n")
        listed = ", ".join(f"{loss:.4f} at sigma {sigma}" for sigma, loss in by_sigma.items())
        logger.info("step %d: the loss of %d held-out items is %.4f (%s)", step, len(losses), record["loss"], listed)
        if trackers is not None:
            numbers = {f"validation/loss_at_{sigma}": loss for sigma, loss in by_sigma.items()}
            trackers.log({"validation/loss": record["loss"]} | numbers, step)

    # ---- previews

    def _previews(self, is_stopped):
        """Return the frames of each preview; none if one of the processes was stopped."""

        def look(pipeline, step, timestep, tensors):
            pipeline._interrupt = is_stopped()
            return {}

        n, rank = self.accelerator.num_processes, self.accelerator.process_index
        self.pipeline.register_modules(**{self.place: self.module.transformer})
        if self.load_other is not None and rank < len(self.prompts):
            self.load_other(self.pipeline)
        self.pipeline.set_progress_bar_config(
            desc="preview", leave=False, disable=not self.accelerator.is_main_process
        )
        texts = {text: read_entry(path) for text, path in self.entries.items()}
        own = {}
        device, transformer = self.accelerator.device, self.module.transformer
        with _on_device(self.pipeline, transformer, device, takes_turns=self.takes_turns):
            for number in range(rank, len(self.prompts), n):
                prompt, negative_prompt = texts[self.prompts[number]], texts.get(self.args.negative_prompt)
                frames = self.sample(self.pipeline, prompt, negative_prompt, callback_on_step_end=look)
                if is_stopped():
                    break
                own[number] = frames
        self.pipeline.register_modules(
            **dict.fromkeys(name for name in self.pipeline.components if name.startswith("transformer"))
        )
        free_memory()
        of_all = collections.ChainMap(*gather_from_all(self.accelerator, own))
        return [of_all[number] for number in sorted(of_all)] if len(of_all) == len(self.prompts) else []

    def _report_previews(self, previews, folder, step, trackers):
        pictures, videos = {}, {}
        for number, frames in enumerate(previews):
            path = folder / f"prompt-{number:02}"
            if self.fps is None:
                path = path.with_suffix(".png")
                with whole_file(path) as beside:
                    frames[0].save(beside)
            else:
                path = path.with_suffix(".mp4")
                with whole_file(path) as beside:
                    write_clip(beside, frames, self.fps)
                videos[f"validation/{path.stem}"] = path
        grid = _grid(previews)
        with whole_file(folder / "grid.png") as beside:
            grid.save(beside)
        pictures["validation/grid"] = grid
        logger.info("step %d: %d previews are in %s", step, len(previews), folder)
        if trackers is not None:
            trackers.log_media(pictures, videos, step)


def _grid(previews):
    """Return the pictures side by side; of clips the first, middle and last frame, a line for each."""
    if all(len(frames) == 1 for frames in previews):
        images = [frames[0] for frames in previews]
        columns = math.ceil(math.sqrt(len(images)))
    else:
        images = [frames[k * (len(frames) - 1) // 2] for frames in previews for k in range(3)]
        columns = 3
    rows = math.ceil(len(images) / columns)
    images += [Image.new("RGB", images[0].size)] * (rows * columns - len(images))
    return make_image_grid(images, rows, columns)


def write_clip(path, frames, fps):
    """Write a clip as H.264 in an mp4.

    Args:
        path (`pathlib.Path`), frames (`list[PIL.Image.Image]`), fps (`float`)
    """
    import av

    rate = fractions.Fraction(fps).limit_denominator(1001)
    with av.open(str(path), "w") as container:
        width, height = frames[0].size
        stream = container.add_stream("libx264", rate=rate, width=width, height=height, pix_fmt="yuv420p")
        stream.thread_count = 1
        # With B-frames x264's bytes are not the same each time.
        stream.options = {"crf": "18", "bf": "0"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())


# ---------------------------------------------------------------- what of the pipeline is on the device


class _MoveToDevice(ModelHook):
    """Brings the part that is about to run to the device; if they take turns, what of others can wait to the host."""

    def __init__(self, parts, device, takes_turns):
        self.parts, self.execution_device, self.takes_turns = parts, device, takes_turns
        self.at_work = None

    def pre_forward(self, module, *args, **kwargs):
        if module is not self.at_work:
            self.at_work = module
            if self.takes_turns:
                for part in self.parts:
                    if part is not module:
                        _move_frozen(part, "cpu")
            _move_frozen(module, self.execution_device)
        return args, kwargs


def _move_frozen(module, device):
    """Move what of a module is not trained. What is stays: the optimizer and DDP hold on to its memory."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.requires_grad:
            tensor.data = tensor.data.to(device)


@contextlib.contextmanager
def _on_device(pipeline, trained, device, *, takes_turns):
    """Context in which the parts of a pipeline run on the device, all together or by turns; then `trained` has it."""
    parts = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    hook = _MoveToDevice(parts, device, takes_turns)
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
