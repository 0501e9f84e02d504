"""The stages and plots that the demos of all families share. For scripts/demo_<family>.py.

Shapes: B images or clips, N frames of pixels (1 for images), F latent frames (1 + (N - 1) / 4), C latent channels,
H W latent height and width (pixels / 8).
"""

import argparse
import json
import pathlib
import shlex
import shutil
import subprocess
import sys

import diffusers
import matplotlib
import safetensors.torch
import torch
import transformers
import yaml
from accelerate import PartialState
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw
from torch import nn

from training.checkpoints import list_checkpoints
from training.export import LORA_FILE
from training.flow_matching import add_noise, flow_losses, flow_target
from training.module import ADAPTER_NAME, lora_layers


matplotlib.use("Agg")  # there may be no display
from matplotlib import pyplot  # noqa: E402


DEFAULT_OUTPUT_DIR = pathlib.Path("outputs/demo")

DEVICE = PartialState().device  # where the training scripts train

# In the wheel of scikit-image, in the public domain or CC0: NASA, S. van der Walt, R. Michetti, SpaceX, NASA.
CAPTIONS = {
    "astronaut": "an astronaut in an orange suit",
    "chelsea": "a tabby cat, close-up",
    "coffee": "a cup of coffee on a wooden table",
    "rocket": "a rocket on its launch pad at night",
    "hubble_deep_field": "distant galaxies in a black sky",
}

# What the runs have in common; each family adds its sizes, its layers and its number of steps.
TRAINING = {
    "lora_rank": 64,
    "learning_rate": 3e-3,
    "max_grad_norm": 0.3,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 20,
    "mixed_precision": "no",  # bf16 is slow on most CPUs
    "checkpointing_steps": 100,
    "logging_steps": 50,
}

# The noise levels of the loss on fixed noise: each image or clip at each of them, always with the same noise.
SIGMAS = (0.2, 0.4, 0.6, 0.8)


# ---------------------------------------------------------------- start and end


def find_output_dir(description):
    """Read the command line and return the folder for everything; exits with code 2 on a bad flag or folder."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--output_dir",
        type=pathlib.Path,
        default=DEFAULT_OUTPUT_DIR,
        help="folder for everything, new or empty. Default: outputs/demo, which is emptied first",
    )
    output_dir = parser.parse_args().output_dir
    if output_dir == DEFAULT_OUTPUT_DIR:
        shutil.rmtree(output_dir, ignore_errors=True)
    elif output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        parser.error(f"--output_dir {output_dir} is not an empty folder.")
    return output_dir


def finish(output_dir, run_dir, results, files):
    """Write `results` (`dict`), copy the memory plot of the run, and print the names of all `files` (`str`).

    Exits with code 1 if the loss did not fall.
    """
    shutil.copy(run_dir / "memory.png", output_dir)
    results = {"device": DEVICE.type} | results
    (output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    first, *_, last = results["loss_on_fixed_noise"].values()
    if last >= first:
        sys.exit(f"error: the loss on fixed noise did not fall: {first:.3f} before, {last:.3f} after.")
    print(f"{files}, memory.png and the LoRA (run/) are in {output_dir.resolve()}")


# ---------------------------------------------------------------- training


def run_script(*command, log_path, result=""):
    """Run a Python script of this repository; everything that it prints goes to a file.

    The last line that begins with `result` is shown.
    """
    print(f"  python {shlex.join(command)}", flush=True)
    with log_path.open("w") as log:
        done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, stderr=log, text=True)
        log.write(done.stdout)
    if done.returncode:
        tail = log_path.read_text().split("\n")[-20:]
        sys.exit("\n".join([*tail, f"error: {command[0]} ended with exit code {done.returncode}; see {log_path}."]))
    print(f"  {[line for line in done.stdout.splitlines() if line.startswith(result)][-1]}")


def make_model(output_dir, family, flags):
    """Write a tiny random pipeline of a `family` of scripts/make_tiny_model.py and return its folder."""
    model_dir = output_dir / "model"
    flags = ["--family", family, "--output", str(model_dir), *flags]
    run_script("scripts/make_tiny_model.py", *flags, log_path=output_dir / "model.log")
    return model_dir


def train(output_dir, script, *, model_dir, dataset_path, settings):
    """Train a LoRA with the command line that users have and return the folder of the run.

    Args:
        script (`str`): The entry script.
        settings (`dict`): All other flags.
    """
    print(f"[2/4] training on {'the CPU' if DEVICE.type == 'cpu' else DEVICE.type}")
    run_dir = output_dir / "run"
    paths = {"pretrained_model_name_or_path": model_dir, "dataset_path": dataset_path, "output_dir": run_dir}
    config = {name: str(path) for name, path in paths.items()} | settings
    (output_dir / "train.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    run_script(script, "--config", str(output_dir / "train.yaml"), log_path=output_dir / "train.log", result="saved ")
    return run_dir


def load_pipeline(model_dir):
    """Load the stock pipeline onto `DEVICE`."""
    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    pipeline = DiffusionPipeline.from_pretrained(model_dir).to(DEVICE)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


# ---------------------------------------------------------------- what was learnt


@torch.no_grad()
def fixed_noise_loss(predict, latents):
    """Return the loss (`float`) over all latents at the same noise levels and with the same noise in every call.

    Args:
        predict: Function from noisy latents (B, C, ...) and sigmas (B,) to the flow that a stock transformer predicts.
        latents (`torch.Tensor` of shape (B, C, ...)): Of the images or clips.
    """
    shape = (len(SIGMAS), *latents.shape)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(latents.device)
    losses = []
    for level, sigma in enumerate(SIGMAS):
        sigmas = torch.full((len(latents),), sigma, device=latents.device)
        prediction = predict(add_noise(latents, noise[level], sigmas), sigmas)
        losses.append(flow_losses(prediction, flow_target(latents, noise[level]), sigmas).mean())
    return torch.stack(losses).mean().item()


def load_lora(pipeline, lora):
    """Give a stock pipeline a LoRA, and no other.

    Args:
        pipeline (`DiffusionPipeline`)
        lora (`pathlib.Path` or `dict[str, torch.Tensor]`): A LoRA file, or tensors under the names of such a file.

    Raises:
        RuntimeError: Not every layer of it arrived.
    """
    pipeline.unload_lora_weights()
    if isinstance(lora, pathlib.Path):
        pipeline.load_lora_weights(lora.parent, weight_name=lora.name)
        lora = safetensors.torch.load_file(lora)
    else:
        pipeline.load_lora_weights(lora)
    if len(lora_layers(pipeline.transformer)) != sum(".lora_A." in key for key in lora):
        raise RuntimeError("diffusers did not attach every layer of the LoRA.")


def checkpoint_lora(checkpoint):
    """Return the LoRA in a training state as stock diffusers takes it; alpha is the rank, so its strength is 1."""
    tensors = safetensors.torch.load_file(checkpoint / "trainable.safetensors")
    return {name.replace(f".{ADAPTER_NAME}.", "."): tensor for name, tensor in tensors.items()}


def report_loss(output_dir, pipeline, run_dir, loss, what):
    """Measure the loss of the base, of each checkpoint, and of the exported LoRA, which `pipeline` keeps.

    Args:
        loss: Function without arguments to the loss (`float`) with the adapters of the pipeline.
        what (`str`): Such as "5 photographs".

    Returns:
        `dict[int, float]`: Step -> loss.
    """
    print("[3/4] loss on fixed noise, in a stock diffusers pipeline, by training step")
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    fixed = {0: loss()}
    for step, checkpoint in list_checkpoints(run_dir).items():
        load_lora(pipeline, checkpoint_lora(checkpoint))
        fixed[step] = loss()
    load_lora(pipeline, run_dir / LORA_FILE)
    fixed[metrics[-1]["step"]] = loss()
    plot_loss(output_dir / "loss.png", fixed, metrics, what)
    print("  " + ", ".join(f"{step}: {loss:.3f}" for step, loss in fixed.items()))
    return fixed


def distances(samples, latents):
    """Return the mean squared distance of each sample to each image or clip, (B, B), from latents (B, C, ...)."""
    return (samples[:, None] - latents[None]).square().flatten(2).mean(2)


def count_nearest(table):
    """Return how many samples are nearer to their own original than to the others, from `distances`."""
    return sum(row[index] == min(row) for index, row in enumerate(table))


def report_distances(names, base_samples, samples, latents, what):
    """Print how near samples (B, C, ...) are to the originals of their captions.

    Args:
        names (`list[str]`): Of the originals.
        base_samples, samples, latents (`torch.Tensor` of shape (B, C, ...)): Sampled without and with the LoRA, and
            of the originals.
        what (`str`): Such as "photograph".

    Returns:
        `dict` with the results of `distances` as lists.
    """
    before, after = distances(base_samples, latents).tolist(), distances(samples, latents).tolist()
    for index, name in enumerate(names):
        print(f"  {name:18} to its {what} {before[index][index]:.2f} -> {after[index][index]:.2f}")
    print(f"  nearest to their own {what}: {count_nearest(before)} -> {count_nearest(after)} of {len(names)}")
    return {"distances_without_lora": before, "distances_with_lora": after}


def fit_view(latents, pixel_values, ridge=0.05):
    """Fit a linear map that makes latents visible: 5x5 of them to the 8x8 pixels in their middle, by least squares.

    In time a latent frame comes with its neighbours. The first stands for one frame of pixels and each later one for
    four, hence two maps. A few small clips hold fewer patches than a map has inputs: it shows what is near the latents
    that it was fitted on, and makes noise of anything else.

    Args:
        latents (`torch.Tensor` of shape (B, C, F, H, W))
        pixel_values (`torch.Tensor` of shape (B, 3, N, 8 * H, 8 * W)): What they belong to, in [-1, 1].
        ridge (`float`): Variance of the noise in latents that the map is to tolerate.

    Returns:
        Function from latents to pixels, of the shapes above.
    """

    def neighbourhoods(latents):
        padded = nn.functional.pad(latents.transpose(1, 2).flatten(0, 1), (2, 2, 2, 2), mode="reflect")
        frames = nn.functional.unfold(padded, 5).transpose(1, 2)  # (B * F, H * W, 25 * C)
        frames = frames.unflatten(0, (len(latents), -1))
        parts = [frames[:, :2].transpose(1, 2).flatten(2).unsqueeze(1)]
        if frames.shape[1] > 1:
            parts.append(torch.cat([frames, frames[:, -1:]], dim=1).unfold(1, 3, 1).flatten(3))
        return [torch.cat([part, torch.ones_like(part[..., :1])], dim=3) for part in parts]

    def patches(pixel_values):
        frames = nn.functional.pixel_unshuffle(pixel_values.transpose(1, 2), 8).flatten(3)  # (B, N, 192, H * W)
        parts = [frames[:, :1]]
        if frames.shape[1] > 1:
            parts.append(frames[:, 1:].unflatten(1, (-1, 4)).flatten(2, 3))
        return [part.transpose(2, 3) for part in parts]

    weights = []
    for inputs, targets in zip(neighbourhoods(latents), patches(pixel_values), strict=True):
        inputs, targets = inputs.flatten(0, 2), targets.flatten(0, 2)
        penalty = torch.full((inputs.shape[1],), ridge * len(inputs), device=inputs.device)
        penalty[-1] = 0  # the constant
        weights.append(torch.linalg.solve(inputs.T @ inputs + penalty.diag(), inputs.T @ targets))

    def view(latents):
        parts = [inputs @ weight for inputs, weight in zip(neighbourhoods(latents), weights, strict=True)]
        parts = [part.transpose(2, 3).unflatten(2, (-1, 192)).flatten(1, 2) for part in parts]  # (B, N, 192, H * W)
        frames = torch.cat(parts, dim=1).unflatten(3, latents.shape[-2:])
        return nn.functional.pixel_shuffle(frames, 8).transpose(1, 2)

    return view


# ---------------------------------------------------------------- plots


def plot_loss(path, fixed, metrics, what):
    """Draw the loss on fixed noise over the steps, and behind it the loss of each training step.

    Args:
        fixed (`dict[int, float]`): Step -> loss.
        metrics (`list[dict]`): The lines of metrics.jsonl.
        what (`str`): Such as "5 photographs".
    """
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(
        [line["step"] for line in metrics],
        [line["loss"] for line in metrics],
        color="0.8",
        linewidth=0.8,
        label="training loss, noise drawn again in each step",
    )
    axes.plot(fixed.keys(), fixed.values(), color="C0", marker="o", label="loss on fixed noise")
    for step in (min(fixed), max(fixed)):
        axes.annotate(f"{fixed[step]:.2f}", (step, fixed[step]), xytext=(6, 6), textcoords="offset points")
    axes.set(xlabel="optimizer step", ylabel="mean squared error of the flow", ylim=(0, 1.1 * max(fixed.values())))
    figure.suptitle(f"{what} at {len(SIGMAS)} noise levels, through the stock transformer")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_sheet(captions, rows, scale=2):
    """Draw images as a sheet with a caption above each column and a label above each row.

    Args:
        captions (`list[str]`)
        rows (`dict[str, torch.Tensor]`): Label -> frames (B, 3, N, height, width) in [-1, 1], drawn side by side.
        scale (`int`): By which images are enlarged.

    Returns:
        `PIL.Image.Image`.
    """
    _, _, num_frames, height, width = next(iter(rows.values())).shape
    tile_size = (scale * num_frames * width, scale * height)
    gap, label_height = 6, 22
    column_width, row_height = tile_size[0] + gap, label_height + tile_size[1] + gap
    size = (gap + len(captions) * column_width, label_height + len(rows) * row_height)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for column, caption in enumerate(captions):
        draw.text((gap + column * column_width, 5), caption, fill="black", font_size=12)
    for row, (label, media) in enumerate(rows.items()):
        top = label_height + row * row_height
        draw.text((gap, top + 4), label, fill="gray", font_size=14)
        pixels = ((media.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 3, 2, 4, 1).flatten(2, 3).cpu().numpy()
        for column, image in enumerate(pixels):  # (height, N * width, 3)
            tile = Image.fromarray(image).resize(tile_size, Image.Resampling.NEAREST)
            sheet.paste(tile, (gap + column * column_width, top + label_height))
    return sheet
