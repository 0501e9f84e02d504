"""Train a LoRA on five photographs, load it back into the stock pipeline and show what changed. For scripts/demo.sh.

    python -m scripts.demo [--output_dir DIR]

The model is a tiny one with random weights, so nothing is downloaded and a CPU is enough. Its VAE has never seen a
picture and decodes everything to noise; what the latents hold is therefore shown through a linear map from latents to
pixels, fitted on the photographs (`fit_view`).

Shapes: B pictures, C latent channels (16), H W latent height and width (pixels / 8).
"""

# ruff: noqa: E402
import argparse
import contextlib
import json
import logging
import pathlib
import shlex
import shutil
import subprocess
import sys
import weakref


# Before the imports, since some of them already warn about optional packages that nothing here needs.
logging.disable(logging.WARNING)

import diffusers
import matplotlib
import safetensors.torch
import torch
import transformers
import yaml
from diffusers import DiffusionPipeline, QwenImageTransformer2DModel
from PIL import Image, ImageDraw
from skimage import data
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memory import offload
from memory.plan import MemoryPlan
from pipelines import qwen_image as family
from train_qwen_image import FAMILY, QwenImageTrainingModule
from training.arguments import parse_args
from training.checkpoints import list_checkpoints
from training.data.images import cover_and_crop, open_image, to_tensor
from training.export import LORA_FILE
from training.flow_matching import add_noise, flow_loss, flow_target
from training.module import ADAPTER_NAME, add_lora, find_lora_targets, lora_layers


matplotlib.use("Agg")  # there may be no display
from matplotlib import pyplot


DEFAULT_OUTPUT_DIR = pathlib.Path("outputs/demo")

# In the wheel of scikit-image, in the public domain or CC0: NASA, S. van der Walt, R. Michetti, SpaceX, NASA.
CAPTIONS = {
    "astronaut": "an astronaut in an orange suit",
    "chelsea": "a tabby cat, close-up",
    "coffee": "a cup of coffee on a wooden table",
    "rocket": "a rocket on its launch pad at night",
    "hubble_deep_field": "distant galaxies in a black sky",
}

SIZE = 96  # pixels
MODEL_FLAGS = ["--num_layers", "2", "--num_attention_heads", "4", "--attention_head_dim", "32"]
# Every linear layer, also those that a LoRA usually leaves alone: nothing of a random base is worth keeping.
# fmt: off
TARGETS = [
    "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2", "img_mod.1", "txt_mod.1",
    "img_in", "txt_in", "timestep_embedder.linear_1", "timestep_embedder.linear_2", "norm_out.linear", "proj_out",
]
# fmt: on
TRAINING = {
    "height": SIZE,
    "width": SIZE,
    "train_batch_size": len(CAPTIONS),
    "lora_rank": 64,
    "lora_target_modules": TARGETS,
    "max_train_steps": 800,
    "learning_rate": 3e-3,
    "max_grad_norm": 0.3,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 20,
    "mixed_precision": "no",  # bf16 is slow on most CPUs
    "use_gradient_checkpointing": True,
    "checkpointing_steps": 100,
    "logging_steps": 50,
}

# The noise levels of the loss on fixed noise: each photograph at each of them, always with the same noise.
SIGMAS = (0.2, 0.4, 0.6, 0.8)

# The memory of a step is measured in proportions closer to a real model: more blocks, a larger picture (inputs of
# blocks are parked from 1 MiB on), and a LoRA whose gradients are small beside them.
MEMORY_NUM_LAYERS = 12
MEMORY_SIZE = 768  # pixels
MEMORY_LORA_RANK = 8
MODES = {
    "keep": [],
    "recompute": ["--use_gradient_checkpointing"],
    "recompute, inputs parked": ["--use_gradient_checkpointing_offload"],
}


# ---------------------------------------------------------------- stages


def write_photographs(folder):
    """Write each photograph of `CAPTIONS` with its caption beside it, as a dataset on disk."""
    folder.mkdir(parents=True)
    for name, caption in CAPTIONS.items():
        Image.fromarray(getattr(data, name)()).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(caption + "\n")


def run_script(*command, log_path):
    """Run a Python script of this repository and show the last line that it prints; everything goes to a file."""
    print(f"  python {shlex.join(command)}", flush=True)
    with log_path.open("w") as log:
        done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, stderr=log, text=True)
        log.write(done.stdout)
    if done.returncode:
        tail = log_path.read_text().split("\n")[-20:]
        sys.exit("\n".join([*tail, f"error: {command[0]} ended with exit code {done.returncode}; see {log_path}."]))
    print(f"  {done.stdout.splitlines()[-1]}")


def train(output_dir):
    """Write photographs and model, and train a LoRA on them with the command line that users have.

    Returns:
        `tuple` of three `pathlib.Path`: folders of the photographs, the model, and the run.
    """
    photos, model_dir, run_dir = (output_dir / name for name in ("photos", "model", "run"))
    print("[1/5] photographs and a tiny random model")
    write_photographs(photos)
    flags = ["--family", "qwen_image", "--output", str(model_dir), *MODEL_FLAGS]
    run_script("scripts/make_tiny_model.py", *flags, log_path=output_dir / "model.log")

    print(f"[2/5] training on {torch.cuda.get_device_name() if torch.cuda.is_available() else 'the CPU'}")
    paths = {"pretrained_model_name_or_path": model_dir, "dataset_path": photos, "output_dir": run_dir}
    config = {name: str(path) for name, path in paths.items()} | TRAINING
    (output_dir / "train.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    run_script("train_qwen_image.py", "--config", str(output_dir / "train.yaml"), log_path=output_dir / "train.log")
    return photos, model_dir, run_dir


class FixedNoise:
    """The loss of a stock transformer over the photographs, always at the same noise levels with the same noise.

    Args:
        transformer (`QwenImageTransformer2DModel`)
        latents (`torch.Tensor` of shape (B, C, H, W)): Of the photographs.
        prompt_embeds (`torch.Tensor` of shape (B, L, J)), prompt_embeds_mask (`torch.Tensor` of shape (B, L)): Of
            their captions.
    """

    def __init__(self, transformer, latents, prompt_embeds, prompt_embeds_mask):
        self.transformer = transformer
        self.latents = latents.repeat(len(SIGMAS), 1, 1, 1)
        self.noise = torch.randn(self.latents.shape, generator=torch.Generator().manual_seed(0)).to(latents.device)
        self.sigmas = torch.tensor(SIGMAS, device=latents.device).repeat_interleave(len(latents))
        self.prompt_embeds = prompt_embeds.repeat(len(SIGMAS), 1, 1)
        self.prompt_embeds_mask = prompt_embeds_mask.repeat(len(SIGMAS), 1)

    @torch.no_grad()
    def loss(self):
        """Return the loss (`float`) with the adapters that the transformer has now."""
        height, width = self.latents.shape[-2:]
        tokens = self.transformer(
            hidden_states=family.pack_latents(add_noise(self.latents, self.noise, self.sigmas)),
            timestep=self.sigmas,
            encoder_hidden_states=self.prompt_embeds,
            encoder_hidden_states_mask=self.prompt_embeds_mask,
            img_shapes=[[(1, height // 2, width // 2)]] * len(self.latents),
            return_dict=False,
        )[0]
        prediction = family.unpack_latents(tokens, height, width)
        return flow_loss(prediction, flow_target(self.latents, self.noise), self.sigmas).item()


def load_lora(pipeline, lora):
    """Give a stock pipeline a LoRA, and no other.

    Args:
        pipeline (`QwenImagePipeline`)
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
    expected = {key.removeprefix("transformer.").rpartition(".lora_A")[0] for key in lora if ".lora_A." in key}
    if set(lora_layers(pipeline.transformer)) != expected:
        raise RuntimeError("diffusers did not attach every layer of the LoRA.")


def checkpoint_lora(checkpoint):
    """Return the LoRA in a training state as stock diffusers takes it; alpha is the rank, so its strength is 1."""
    tensors = safetensors.torch.load_file(checkpoint / "trainable.safetensors")
    return {name.replace(f".{ADAPTER_NAME}.", "."): tensor for name, tensor in tensors.items()}


def loss_by_step(pipeline, run_dir, fixed_noise):
    """Measure the loss of the base, of each checkpoint, and of the exported LoRA, which `pipeline` has afterwards.

    Returns:
        `dict[int, float]`: Step -> loss.
    """
    fixed = {0: fixed_noise.loss()}
    for step, checkpoint in list_checkpoints(run_dir).items():
        load_lora(pipeline, checkpoint_lora(checkpoint))
        fixed[step] = fixed_noise.loss()
    load_lora(pipeline, run_dir / LORA_FILE)
    return fixed | {TRAINING["max_train_steps"]: fixed_noise.loss()}


def sample(pipeline):
    """Sample one picture for each caption with the stock pipeline and return the latents (B, C, H, W)."""
    tokens = pipeline(
        list(CAPTIONS.values()),
        height=SIZE,
        width=SIZE,
        num_inference_steps=20,
        true_cfg_scale=1.0,
        generator=torch.Generator().manual_seed(1),
        output_type="latent",
    ).images
    return family.unpack_latents(tokens, SIZE // 8, SIZE // 8)


def distances(samples, latents):
    """Return the mean squared distance of each sample to each photograph, (B, B), from latents (B, C, H, W)."""
    return (samples[:, None] - latents[None]).square().flatten(2).mean(2)


def count_nearest(table):
    """Return how many samples are nearer to their own photograph than to the others, from `distances`."""
    return sum(row[index] == min(row) for index, row in enumerate(table))


def fit_view(latents, pixel_values, ridge=0.05):
    """Fit a linear map that makes latents visible: 5x5 of them to the 8x8 pixels in their middle, by least squares.

    Args:
        latents (`torch.Tensor` of shape (B, C, H, W))
        pixel_values (`torch.Tensor` of shape (B, 3, 8 * H, 8 * W)): The pictures they belong to, in [-1, 1].
        ridge (`float`): Variance of the noise in latents that the map is to tolerate.

    Returns:
        Function from latents to pixels, of the shapes above.
    """

    def neighbourhoods(latents):
        padded = nn.functional.pad(latents, (2, 2, 2, 2), mode="reflect")
        columns = nn.functional.unfold(padded, 5).transpose(1, 2)  # (B, H * W, 25 * C)
        return torch.cat([columns, torch.ones_like(columns[..., :1])], dim=2)

    inputs = neighbourhoods(latents).flatten(0, 1)
    targets = nn.functional.pixel_unshuffle(pixel_values, 8).flatten(2).transpose(1, 2).flatten(0, 1)
    penalty = torch.full((inputs.shape[1],), ridge * len(inputs), device=inputs.device)
    penalty[-1] = 0  # the constant
    weight = torch.linalg.solve(inputs.T @ inputs + penalty.diag(), inputs.T @ targets)

    def view(latents):
        pixels = (neighbourhoods(latents) @ weight).transpose(1, 2).unflatten(2, latents.shape[-2:])
        return nn.functional.pixel_shuffle(pixels, 8)

    return view


# ---------------------------------------------------------------- memory


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that were made inside and are still alive, and their peak.

    What CUDA's allocator reports, for devices that report nothing. Not in it: scratch memory inside one operation.
    Copies that `memory.offload` keeps in host memory are not counted.
    """

    def __init__(self):
        super().__init__()
        self.known = set()
        self.alive_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._see((args, kwargs), made_here=False)
        outputs = func(*args, **(kwargs or {}))
        self._see(outputs, made_here=True)
        self.peak_bytes = max(self.peak_bytes, self.device_bytes())
        return outputs

    def device_bytes(self):
        return self.alive_bytes - offload.counters()["pool_bytes"]

    def _see(self, tree, *, made_here):
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.known:
                num_bytes = storage.nbytes() if made_here else 0  # 0: weights and inputs, which were there before
                self.known.add(storage._cdata)
                self.alive_bytes += num_bytes
                # The finalizer belongs to the storage: views and what autograd saves keep it alive.
                weakref.finalize(storage, self._forget, storage._cdata, num_bytes).atexit = False

    def _forget(self, address, num_bytes):
        self.known.discard(address)
        self.alive_bytes -= num_bytes


def measure_step(module, batch):
    """Run forward and backward once.

    Args:
        module (`DiffusionTrainingModule`)
        batch (`dict`): See `collate`.

    Returns:
        `dict` with the `loss`, `held_bytes` on the device when the forward pass has ended, `peak_bytes` on the device
        (both above what was there before) and `host_bytes`, the most that was parked.
    """
    device = batch["latents"].device
    on_cuda = device.type == "cuda"
    offload.reset_counters()
    with contextlib.nullcontext() if on_cuda else LiveBytes() as live:
        if on_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        loss = module(batch)
        held_bytes = torch.cuda.memory_allocated() - before if on_cuda else live.device_bytes()
        loss.backward()
        peak_bytes = torch.cuda.max_memory_allocated() - before if on_cuda else live.peak_bytes
    for parameter in module.parameters():
        parameter.grad = None
    host_bytes = offload.counters()["pool_peak_bytes"]
    return {"loss": loss.item(), "held_bytes": held_bytes, "peak_bytes": peak_bytes, "host_bytes": host_bytes}


def memory_by_mode(model_dir, prompt_embeds):
    """Measure one training step in each mode of the memory plan.

    Args:
        model_dir (`pathlib.Path`): Its transformer is built with more blocks.
        prompt_embeds (`torch.Tensor` of shape (1, L, J))

    Returns:
        `dict[str, dict]`: Mode -> what `measure_step` returns.

    Raises:
        RuntimeError: The modes do not agree on the loss.
    """
    device = prompt_embeds.device
    flags = ["--pretrained_model_name_or_path", str(model_dir), "--dataset_path", "none", "--output_dir", "none"]
    flags += ["--lora_rank", str(MEMORY_LORA_RANK)]
    args = parse_args(flags, description=None, values=FAMILY)
    config = QwenImageTransformer2DModel.load_config(model_dir, subfolder="transformer")
    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel.from_config(config, num_layers=MEMORY_NUM_LAYERS).to(device).train()
    never_trained = family.never_trained_modules(transformer)
    add_lora(transformer, find_lora_targets(transformer, args.lora_target_modules, never_trained=never_trained), args)
    shape = (1, config["out_channels"], MEMORY_SIZE // 8, MEMORY_SIZE // 8)
    batch = {
        "latents": torch.randn(shape, device=device),
        "noise": torch.randn(shape, device=device),
        "sigmas": torch.tensor([0.5], device=device),
        "prompt_embeds": prompt_embeds,
        "prompt_embeds_mask": None,
    }
    measured = {}
    for mode, switches in MODES.items():
        args = parse_args([*flags, *switches], description=None, values=FAMILY)
        plan = MemoryPlan.from_args(args, {"transformer_blocks": MEMORY_NUM_LAYERS})
        module = QwenImageTrainingModule(transformer, **plan.arguments("transformer_blocks"))
        if not measured:
            measure_step(module, batch)  # what is allocated once and kept, such as workspaces of matrix products
        measured[mode] = measure_step(module, batch)
    if len({step["loss"] for step in measured.values()}) != 1:
        raise RuntimeError(f"The loss depends on where activations live: {measured}.")
    return measured


# ---------------------------------------------------------------- pictures


def plot_loss(path, fixed, metrics):
    """Draw the loss on fixed noise over the steps, and behind it the loss of each training step.

    Args:
        fixed (`dict[int, float]`): Step -> loss.
        metrics (`list[dict]`): The lines of metrics.jsonl.
    """
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(
        [line["step"] for line in metrics],
        [line["loss"] for line in metrics],
        color="0.8",
        linewidth=0.8,
        label="training loss, noise drawn anew in each step",
    )
    axes.plot(fixed.keys(), fixed.values(), color="C0", marker="o", label="loss on fixed noise")
    for step in (min(fixed), max(fixed)):
        axes.annotate(f"{fixed[step]:.2f}", (step, fixed[step]), xytext=(6, 6), textcoords="offset points")
    axes.set(xlabel="optimizer step", ylabel="mean squared error of the flow", ylim=(0, 1.1 * max(fixed.values())))
    figure.suptitle(f"{len(CAPTIONS)} photographs at {len(SIGMAS)} noise levels, through the stock transformer")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_memory(path, measured, device):
    """Draw the bytes of `memory_by_mode`."""
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    parts = {
        "peak_bytes": f"peak on the device ({device.type})",
        "held_bytes": "of it held between forward and backward",
        "host_bytes": "parked in host memory",
    }
    for row, (key, label) in enumerate(parts.items()):
        values = [step[key] / 2**20 for step in measured.values()]
        bars = axes.barh([index + 0.27 * (row - 1) for index in range(len(values))], values, height=0.25, label=label)
        axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.set_yticks(range(len(measured)), measured)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("MiB")
    size = f"{MEMORY_NUM_LAYERS} blocks, {MEMORY_SIZE}x{MEMORY_SIZE} pixels"
    figure.suptitle(f"One training step, {size}, weights not counted")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def save_sheet(path, rows):
    """Save pictures as a sheet with a caption above each column and a label above each row.

    Args:
        rows (`dict[str, torch.Tensor]`): Label -> pictures (B, 3, height, width) in [-1, 1].
    """
    size, gap, label_height = 2 * SIZE, 6, 22
    width = gap + len(CAPTIONS) * (size + gap)
    sheet = Image.new("RGB", (width, label_height + len(rows) * (label_height + size + gap)), "white")
    draw = ImageDraw.Draw(sheet)
    for column, caption in enumerate(CAPTIONS.values()):
        draw.text((gap + column * (size + gap), 5), caption, fill="black", font_size=12)
    for row, (label, pictures) in enumerate(rows.items()):
        top = label_height + row * (label_height + size + gap)
        draw.text((gap, top + 4), label, fill="gray", font_size=14)
        pixels = ((pictures.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        for column, picture in enumerate(pixels):
            tile = Image.fromarray(picture).resize((size, size), Image.Resampling.NEAREST)
            sheet.paste(tile, (gap + column * (size + gap), top + label_height))
    sheet.save(path)


# ---------------------------------------------------------------- the demo


def find_output_dir():
    """Read the command line and return the folder for everything; exits with code 2 on a bad flag or folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
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


def main():
    """Run all stages."""
    output_dir = find_output_dir()
    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    photos, model_dir, run_dir = train(output_dir)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipeline = DiffusionPipeline.from_pretrained(model_dir).to(device)
    pipeline.set_progress_bar_config(disable=True)
    pictures = [cover_and_crop(open_image(photos / f"{name}.png"), SIZE, SIZE) for name in CAPTIONS]
    pixel_values = torch.stack([to_tensor(picture) for picture in pictures]).to(device)  # (B, 3, 8 * H, 8 * W)
    latents = torch.stack([family.encode_image(pipeline.vae, picture)["latents"] for picture in pixel_values])
    with torch.no_grad():
        prompt_embeds, prompt_embeds_mask = pipeline.encode_prompt(list(CAPTIONS.values()))  # (B, L, J), (B, L)
    base_samples = sample(pipeline)

    print("[3/5] loss on fixed noise, in a stock diffusers pipeline, by training step")
    fixed = loss_by_step(
        pipeline, run_dir, FixedNoise(pipeline.transformer, latents, prompt_embeds, prompt_embeds_mask)
    )
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    plot_loss(output_dir / "loss.png", fixed, metrics)
    print("  " + ", ".join(f"{step}: {loss:.3f}" for step, loss in fixed.items()))

    print("[4/5] samples of that pipeline, from noise that training never saw; distances of latents")
    samples = sample(pipeline)
    view = fit_view(latents, pixel_values)
    rows = {
        "the photographs": pixel_values,
        "their latents, made visible by a linear map": view(latents),
        "sampled without the LoRA, through the same map": view(base_samples),
        "sampled with the LoRA, through the same map": view(samples),
    }
    save_sheet(output_dir / "samples.png", rows)
    before, after = distances(base_samples, latents).tolist(), distances(samples, latents).tolist()
    for index, name in enumerate(CAPTIONS):
        print(f"  {name:18} to its photograph {before[index][index]:.2f} -> {after[index][index]:.2f}")
    print(f"  nearest to their own photograph: {count_nearest(before)} -> {count_nearest(after)} of {len(CAPTIONS)}")

    print(
        f"[5/5] memory of one step above the weights, {MEMORY_NUM_LAYERS} blocks at {MEMORY_SIZE}x{MEMORY_SIZE}, MiB"
    )
    measured = memory_by_mode(model_dir, prompt_embeds[:1])
    plot_memory(output_dir / "memory.png", measured, device)
    print(f"  {'':26}{'peak':>8}{'between forward and backward':>32}{'in host memory':>18}      loss")
    for mode, step in measured.items():
        peak, held, host = (step[key] / 2**20 for key in ("peak_bytes", "held_bytes", "host_bytes"))
        print(f"  {mode:26}{peak:8.1f}{held:32.1f}{host:18.1f}  {step['loss']:.6f}")

    results = {"device": device.type, "loss_on_fixed_noise": fixed, "memory": measured}
    results |= {"distances_without_lora": before, "distances_with_lora": after}
    (output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    first, *_, last = fixed.values()
    if last >= first:
        sys.exit(f"error: the loss on fixed noise did not fall: {first:.3f} before, {last:.3f} after.")
    print(f"loss.png, samples.png, memory.png, the LoRA (run/) and all else are in {output_dir.resolve()}")


if __name__ == "__main__":
    main()
