"""What training each of the shipped recipes' models takes of memory, forecast on a CPU. NOT measured on a GPU.

    python benchmarks/forecasts.py [--model Wan2.1-T2V-14B] [--table memory|gpus]    # all: 4 minutes on one core

Every row is `--dry_run` of an entry script with the settings of the recipes: a folder with the published configs and
no weights, one item of the size, bf16, batch 1, a short caption (Wan pads it to 512 tokens). LoRA: rank 32, the
default layers, AdamW. Full: adamw_8bit.

`--table memory` prints the table of docs/memory.md, at each recipe's batch size; `--table gpus` that of README.md.

Limits: the context of the device, workspaces of its libraries, fragmentation and copies in flight come on top.
"""

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import io
import json
import logging
import math
import os
import pathlib
import sys
import tempfile
from unittest import mock


sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import av  # noqa: E402
import diffusers  # noqa: E402
import numpy as np  # noqa: E402
import transformers  # noqa: E402
from PIL import Image  # noqa: E402

import train_qwen_image  # noqa: E402
import train_wan_video  # noqa: E402
from blockwise.log import MemoryLog  # noqa: E402
from blockwise.plan import MemoryPlan  # noqa: E402
from scripts.make_tiny_model import FAMILIES  # noqa: E402
from training.arguments import parse_args  # noqa: E402


GIB = 2**30

# What the published configs say other than those of the tiny model of the same family.
QWEN_TEXT = {
    **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    **{"num_key_value_heads": 4, "vocab_size": 152064, "layer_types": ["full_attention"] * 28},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
}
QWEN_VISION = {
    **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584},
    "fullatt_block_indexes": [7, 15, 23, 31],
}
QWEN_IMAGE = {
    "transformer": {
        **{"num_layers": 60, "num_attention_heads": 24, "attention_head_dim": 128, "joint_attention_dim": 3584},
        "axes_dims_rope": [16, 56, 56],
    },
    "vae": {"base_dim": 96},
    "text_encoder": {"text_config": QWEN_TEXT, "vision_config": QWEN_VISION},
}
WAN_14B = {"num_layers": 40, "num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824}
WAN_14B |= {"text_dim": 4096, "freq_dim": 256}
WAN_1_3B = WAN_14B | {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}
WAN_5B = WAN_14B | {"num_layers": 30, "num_attention_heads": 24, "ffn_dim": 14336}
WAN_SEES_IMAGES = WAN_14B | {"image_dim": 1280, "added_kv_proj_dim": 5120}
WAN_ENCODERS = {
    "vae": {"base_dim": 96},
    "text_encoder": {
        **{"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 256384},
    },
}
CLIP = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}

QWEN_1024, QWEN_1328 = (1024, 1024, 1), (1328, 1328, 1)  # width, height, frames
WAN_480P, WAN_720P = (832, 480, 81), (1280, 720, 81)
TI2V_480P, TI2V_720P = (832, 480, 121), (1280, 704, 121)


def wan(transformer, **further):
    return WAN_ENCODERS | {"transformer": transformer} | further


# Model -> its family in scripts/make_tiny_model.py, the configs, and the sizes to look at.
MODELS = {
    "Qwen-Image": ("qwen_image", QWEN_IMAGE, [QWEN_1024, QWEN_1328]),  # and Qwen-Image-2512, which has its configs
    "Wan2.1-T2V-1.3B": ("wan_t2v", wan(WAN_1_3B), [WAN_480P, WAN_720P]),
    "Wan2.2-TI2V-5B": (
        "wan_ti2v",
        wan(WAN_5B, vae={"base_dim": 160, "decoder_base_dim": 256}),
        [TI2V_480P, TI2V_720P],
    ),
    "Wan2.1-T2V-14B": ("wan_t2v", wan(WAN_14B), [WAN_480P, WAN_720P]),
    "Wan2.1-I2V-14B-480P": ("wan_i2v", wan(WAN_SEES_IMAGES, image_encoder=CLIP), [WAN_480P]),
    "Wan2.1-I2V-14B-720P": ("wan_i2v", wan(WAN_SEES_IMAGES, image_encoder=CLIP), [WAN_720P]),
    "Wan2.1-FLF2V-14B-720P": ("wan_flf2v", wan(WAN_SEES_IMAGES, image_encoder=CLIP), [WAN_720P]),
    # Of both A14B one expert, which is trained alone.
    "Wan2.2-T2V-A14B": ("wan_t2v_a14b", wan(WAN_14B), [WAN_480P, WAN_720P]),
    "Wan2.2-I2V-A14B": ("wan_i2v_a14b", wan(WAN_14B), [WAN_480P, WAN_720P]),
}
# Rows of the README's table: the recipes that share a row, and a size.
GPU_ROWS = [
    (("Qwen-Image", "Qwen-Image-2512"), QWEN_1024),
    (("Wan2.1-T2V-1.3B",), WAN_480P),
    (("Wan2.2-TI2V-5B",), TI2V_720P),
    (("Wan2.1-T2V-14B", "Wan2.2-T2V-A14B", "Wan2.2-I2V-A14B"), WAN_480P),
    (("Wan2.1-T2V-14B", "Wan2.2-T2V-A14B", "Wan2.2-I2V-A14B"), WAN_720P),
    (("Wan2.1-I2V-14B-480P",), WAN_480P),
    (("Wan2.1-I2V-14B-720P", "Wan2.1-FLF2V-14B-720P"), WAN_720P),
]
GPU_GB = (8, 12, 16, 24, 32, 48, 80, 141, 192, 288)  # that there are, up to the largest that a recipe needs
GPUS_OF_README = (8, 12, 16, 24, 48, 80)
CONTEXT_BYTES = GIB  # of the device itself, on top of every forecast

MODES = ("keep", "recompute", "park")  # neither flag, --use_gradient_checkpointing, ..._offload
TRAINING = {
    "lora": ["--training_mode", "lora", "--optimizer", "adamw"],
    "full": ["--training_mode", "full", "--optimizer", "adamw_8bit"],
}
OF_RECIPES = {
    "Wan2.2-TI2V-5B": ["--task", "i2v"],  # each token has its own timestep, which takes more than t2v
    "Wan2.2-T2V-A14B": ["--expert", "high_noise"],
    "Wan2.2-I2V-A14B": ["--expert", "high_noise"],
}


# ---------------------------------------------------------------- a model without weights, a data set of one item


@functools.cache
def model_folder(name):
    """Write a pipeline folder with the published configs of a model and without weights.

    Returns:
        `tempfile.TemporaryDirectory`: Gone at exit.
    """
    family, configs, _ = MODELS[name]
    folder = tempfile.TemporaryDirectory(prefix=f"{name}-")
    FAMILIES[family](num_layers=1, num_attention_heads=1, attention_head_dim=16).save_pretrained(folder.name)
    root = pathlib.Path(folder.name)
    for weights in root.rglob("*.safetensors"):
        weights.unlink()
    for part, config in configs.items():
        path = root / part / "config.json"
        published = json.loads(path.read_text())
        for key, value in config.items():
            published[key] = published[key] | value if isinstance(value, dict) else value
        path.write_text(json.dumps(published))
    return folder


@functools.cache
def data_folder(is_video):
    """Write a data set of one flat item, which training enlarges to its size; a clip of 24 fps and 5.3 seconds.

    Returns:
        `tempfile.TemporaryDirectory`: Gone at exit.
    """
    folder = tempfile.TemporaryDirectory(prefix="data-")
    path = pathlib.Path(folder.name, "a.mp4" if is_video else "a.png")
    path.with_suffix(".txt").write_text("a gray square")
    gray = np.full((64, 64, 3), 128, dtype=np.uint8)
    if not is_video:
        Image.fromarray(gray).save(path)
        return folder
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=24, width=64, height=64, pix_fmt="yuv420p")
        for _ in range(128):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(gray)))
        container.mux(stream.encode())
    return folder


# ---------------------------------------------------------------- the forecasts


@functools.cache
def dry_run(name, size, training_mode, *flags):
    """Return the `RunForecast` of an entry script.

    Args:
        name (`str`): One of `MODELS`.
        size (`tuple[int, int, int]`): Width, height, frames.
        training_mode (`str`): `"lora"` or `"full"`.
        *flags (`str`): Further flags of the command line, which win.
    """
    width, height, num_frames = size
    is_video = name.startswith("Wan")
    script = train_wan_video if is_video else train_qwen_image
    with tempfile.TemporaryDirectory() as output_dir:
        argv = ["--dry_run", "--pretrained_model_name_or_path", model_folder(name).name, "--output_dir", output_dir]
        argv += ["--dataset_path", data_folder(is_video).name, "--max_train_steps", "1", "--mixed_precision", "bf16"]
        argv += ["--width", str(width), "--height", str(height)]
        argv += ["--num_frames", str(num_frames)] if is_video else []
        argv += [*TRAINING[training_mode], *OF_RECIPES.get(name, []), *flags]
        args = parse_args(argv, description=None, values=script.VALUES, resolve=not is_video)
        # Also where there is a GPU, the forecast is for any: it compares with none.
        with mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true"), contextlib.redirect_stdout(io.StringIO()):
            with MemoryLog() as log:
                return script.main(args, log)


def predict(*of_dry_run):
    """Return for each of `MODES` what run.json has as the forecast, in bytes, of a `dry_run` with these arguments."""
    forecast = dry_run(*of_dry_run)
    predicted = {}
    for mode in MODES:
        asked = argparse.Namespace(
            use_gradient_checkpointing=mode == "recompute",
            use_gradient_checkpointing_offload=mode == "park",
            checkpoint_blocks=None,
        )
        predicted[mode] = forecast.describe(MemoryPlan.from_args(asked, forecast.family.block_lists))
    return predicted


# ---------------------------------------------------------------- the tables


COLUMNS = (*MODES, "parked", "adamw", "text_encoder", "VAE", "export", "host")


def figures(name, size, training_mode):
    """Return the bytes of a row: the peak of training by mode, then what is the same in all of them or is of parking.

    Returns:
        `dict[str, int]`: Of each of `COLUMNS`; `adamw` is the peak of a full training with it, all blocks recomputed.
    """
    predicted = predict(name, size, training_mode)
    row = {mode: forecast["training_peak_bytes"] for mode, forecast in predicted.items()}
    parked = predicted["park"]
    row |= {"parked": parked["parked_bytes"], "host": parked["host_bytes"]}
    row |= {phase.replace(" ", "_"): num_bytes for phase, num_bytes in parked["phases"].items() if phase != "training"}
    if training_mode == "full":
        with_adamw = predict(name, size, training_mode, "--optimizer", "adamw")
        row["adamw"] = with_adamw["recompute"]["training_peak_bytes"]
    return row


def describe_size(size):
    return "x".join(map(str, size if size[2] > 1 else size[:2]))


def print_table(names):
    print(f"{'model':21} {'size':12} mode " + " ".join(f"{column:>12}" for column in COLUMNS))
    for name in names:
        for size in MODELS[name][2]:
            for training_mode in TRAINING:
                row = figures(name, size, training_mode)
                cells = [f"{row[column] / GIB:.1f}" if column in row else "" for column in COLUMNS]
                cells = " ".join(f"{cell:>12}" for cell in cells)
                print(f"{name:21} {describe_size(size):12} {training_mode} {cells}", flush=True)


def recipe_flags(name, training_mode):
    """Return the flags of a recipe that change its forecast, other than its size."""
    if (name, training_mode) == ("Qwen-Image", "full"):
        return ["--train_batch_size", "4", "--dataset_repeat", "4"]
    return []


def recipe_figures(name, size, training_mode):
    """Return what the recipe of a model takes at a size.

    Returns:
        `dict[str, float]`: `keep`, `recompute` and `park`, the peak of training by mode; `others`, that of all other
        phases; `parked`; all in bytes. `result` and `checkpoint`, the sizes of both on disk, in bytes.
    """
    arguments = (name, size, training_mode, *recipe_flags(name, training_mode))
    predicted = predict(*arguments)
    row = {mode: forecast["training_peak_bytes"] for mode, forecast in predicted.items()}
    row["others"] = max(num for phase, num in predicted["park"]["phases"].items() if phase != "training")
    row["parked"] = predicted["park"]["parked_bytes"]
    num_trained = sum(math.prod(shape) for shape, _ in dry_run(*arguments).parameters.values())
    # The result is in bf16. A checkpoint has fp32 weights and two moments: fp32, or of 8 bits with a scale per 256.
    row["result"] = 2 * num_trained
    row["checkpoint"] = (4 + (8 if training_mode == "lora" else 2 + 8 / 256)) * num_trained
    return row


def memory_row(name, size, training_mode):
    """Return a row of docs/memory.md."""
    row = recipe_figures(name, size, training_mode)
    cells = [f"{row[key] / GIB:.1f}" for key in (*MODES, "parked", "others")]
    cells += [f"{row[key] / 1e9:.1f}" for key in ("result", "checkpoint")]
    return f"| {training_mode}/{name}, {describe_size(size)} | {' | '.join(cells)} |"


def print_memory_table(names):
    """Print the table of docs/memory.md, one row for each recipe and size."""
    print("| GiB | neither flag | checkpointing | offload | parked | other phases | result, GB | checkpoint, GB |")
    print("|---|---|---|---|---|---|---|---|")
    for training_mode in TRAINING:
        for name in names:
            for size in MODELS[name][2]:
                print(memory_row(name, size, training_mode), flush=True)


def size_class(num_bytes):
    """Return the GB of the smallest GPU that holds so many bytes; N GB are counted as N * 10^9 bytes."""
    return next(gigabytes for gigabytes in GPU_GB if num_bytes + CONTEXT_BYTES <= gigabytes * 1e9)


def gpu_table(figures=recipe_figures):
    """Yield the lines of the table in README.md: which recipes fit on which GPU, by the figures of each."""
    yield f"| forecast | {' | '.join(f'{gigabytes} GB' for gigabytes in GPUS_OF_README)} |"
    yield "|---" * (len(GPUS_OF_README) + 1) + "|"
    for names, size in GPU_ROWS:
        cells = {gigabytes: [] for gigabytes in GPUS_OF_README}
        for recipe, training_mode in (("LoRA", "lora"), ("full", "full")):
            row = figures(names[0], size, training_mode)
            needed, with_offload = (size_class(max(row[mode], row["others"])) for mode in ("recompute", "park"))
            for gigabytes, cell in cells.items():
                if gigabytes >= with_offload:
                    cell.append(recipe if gigabytes >= needed else f"{recipe} + offload")
        cells = [", ".join(cell) or "not yet" for cell in cells.values()]
        yield f"| {', '.join(names)}, {describe_size(size)} | {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="this model alone")
    parser.add_argument("--table", choices=("memory", "gpus"), help="a table of docs/memory.md or the README instead")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    names = [options.model] if options.model else MODELS
    if options.table == "gpus":
        for line in gpu_table():
            print(line, flush=True)
        return
    if options.table == "memory":
        return print_memory_table(names)
    packages = ("torch", "diffusers", "transformers", "peft", "bitsandbytes")
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    print(f"{versions}; {datetime.date.today()}; forecast, not measured; batch 1, GiB")
    print_table(names)


if __name__ == "__main__":
    main()
