"""The forecast of a run against what its tensors really take: training runs on the CPU, followed byte by byte.

    python benchmarks/estimate_accuracy.py [--only qwen]    # two minutes

Each row is a whole command on a tiny random pipeline of the real classes: what it says before it starts (`forecast`
in run.json), and what its first three steps then had alive at most (`measured`). No constant of the forecast was
fitted to any measurement. On a CPU the forecast is for the kernels of a CPU; on CUDA `measured` is the allocator's.
Tensors from 4 KiB on are parked, since these models have no larger ones.
"""

import argparse
import contextlib
import io
import json
import logging
import pathlib
import platform
import subprocess
import sys
import tempfile

import torch


ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import train_qwen_image  # noqa: E402
import train_wan_video  # noqa: E402
from blockwise import offload  # noqa: E402
from blockwise.log import MemoryLog  # noqa: E402
from training.arguments import parse_args  # noqa: E402


CHECKPOINTED, OFFLOADED = ["--use_gradient_checkpointing"], ["--use_gradient_checkpointing_offload"]
FULL, BF16 = ["--training_mode", "full"], ["--mixed_precision", "bf16"]
# name -> (family, height, width, flags)
RUNS = {
    "qwen lora keep": ("qwen_image", 128, 128, []),
    "qwen lora recompute, batch 4": ("qwen_image", 128, 96, [*CHECKPOINTED, "--train_batch_size", "4"]),
    "qwen lora park, accumulation": ("qwen_image", 256, 192, [*OFFLOADED, "--gradient_accumulation_steps", "2"]),
    "qwen lora dropout, 1 block recomputed": (
        *("qwen_image", 192, 128),
        [*CHECKPOINTED, "--checkpoint_blocks", "1", "--lora_dropout", "0.1", "--lora_rank", "4"],
    ),
    "qwen full recompute, adafactor": ("qwen_image", 96, 128, [*FULL, *CHECKPOINTED, "--optimizer", "adafactor"]),
    "qwen full bf16 keep, 8 bit": ("qwen_image", 128, 128, [*FULL, *BF16, "--optimizer", "adamw_8bit"]),
    "t2v lora recompute": ("wan_t2v", 96, 96, CHECKPOINTED),
    "t2v lora bf16 park": ("wan_t2v", 128, 96, [*OFFLOADED, *BF16]),
    "t2v full park, batch 2": ("wan_t2v", 64, 96, [*FULL, *OFFLOADED, "--train_batch_size", "2"]),
    "t2v full keep, SGD": ("wan_t2v", 96, 64, [*FULL, "--optimizer", "torch.optim.SGD"]),
    "i2v lora keep, batch 2": ("wan_i2v", 64, 64, ["--train_batch_size", "2"]),
    "i2v full bf16 recompute": ("wan_i2v", 96, 64, [*FULL, *BF16, *CHECKPOINTED]),
    "ti2v i2v lora park": ("wan_ti2v", 128, 128, [*OFFLOADED, "--task", "i2v"]),
    "ti2v t2v full recompute, accumulation": (
        *("wan_ti2v", 128, 96),
        [*FULL, *CHECKPOINTED, "--task", "t2v", "--gradient_accumulation_steps", "2"],
    ),
    "a14b high lora park": ("wan_i2v_a14b", 96, 96, [*OFFLOADED, "--expert", "high_noise"]),
}


def make_data(folder):
    """Write three images and three clips of 9 frames, each with a caption, to `folder`; return their two folders."""
    import av
    import numpy as np
    from PIL import Image

    generator, folders = np.random.default_rng(0), (folder / "images", folder / "clips")
    for data in folders:
        data.mkdir()
    for index in range(3):
        pixels = generator.integers(0, 255, (256, 256, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folders[0] / f"{index}.png")
        with av.open(str(folders[1] / f"{index}.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=16, width=256, height=256, pix_fmt="yuv420p")
            for _ in range(9):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
        for data in folders:
            (data / f"{index}.txt").write_text(f"noise, the image number {index}")
    return folders


def run(name, folder, images, clips):
    """Train three steps, all output to `folder`, and return its run.json."""
    family, height, width, flags = RUNS[name]
    model = folder.parent / family
    if not model.exists():
        command = ["scripts/make_tiny_model.py", "--family", family, "--output", model]
        subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True, capture_output=True)
    script, data = (train_qwen_image, images) if family == "qwen_image" else (train_wan_video, clips)
    argv = ["--pretrained_model_name_or_path", model, "--dataset_path", data, "--output_dir", folder]
    argv += ["--max_train_steps", "3", "--height", height, "--width", width]
    argv += [] if family == "qwen_image" else ["--num_frames", "9"]
    argv += [] if "--mixed_precision" in flags else ["--mixed_precision", "no"]
    options = {"description": None, "values": script.VALUES, "resolve": family == "qwen_image"}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), MemoryLog() as log:
        offload.reset_counters()
        script.main(parse_args([*map(str, argv), *flags], **options), log)
    return json.loads((folder / "run.json").read_text())


def errors(content):
    """Return the relative error of the forecast of the peak, and of each category by its share of the peak."""
    forecast, measured = content["forecast"], content["measured"]
    peak = measured["training_peak_bytes"]
    categories = {
        name: (forecast["by_category"].get(name, 0) - num_bytes) / peak
        for name, num_bytes in measured["by_category"].items()
    }
    return forecast["training_peak_bytes"] / peak - 1, categories


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="Runs whose name begins so.")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    offload.MIN_PARKED_BYTES = 4096
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.processor() or 'CPU'}; MiB")
    print(f"{'run':38} {'forecast':>9} {'measured':>9} {'error':>7}  {'parked':>7} {'measured':>8}  worst category")
    worst = 0
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        data = make_data(root)
        for number, name in enumerate(name for name in RUNS if name.startswith(options.only)):
            content = run(name, root / str(number), *data)
            forecast, measured = content["forecast"], content["measured"]
            error, categories = errors(content)
            category = max(categories, key=lambda key: abs(categories[key]))
            cells = [content[key]["training_peak_bytes"] / 2**20 for key in ("forecast", "measured")]
            parked = [forecast["parked_bytes"] / 2**20, measured["parked_bytes"] / 2**20]
            print(
                f"{name:38} {cells[0]:9.3f} {cells[1]:9.3f} {error:+7.2%}  {parked[0]:7.3f} {parked[1]:8.3f}  "
                f"{category} {categories[category]:+.2%}",
                flush=True,
            )
            worst = max(worst, abs(error))
    print(f"largest error {worst:.2%}")


if __name__ == "__main__":
    main()
