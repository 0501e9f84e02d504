"""How long training waits for data: batches from the cache, at a step of 50 ms.

    python benchmarks/data_loading.py [--step_seconds 0.05] [--num_steps 100] [--num_items 32] [--dataset_rows 100000]

The cache holds entries of the real shapes of Qwen-Image at 1024x1024 and Wan 2.1 T2V and I2V at 832x480 with 81
frames. They are read, noised and collated by what training uses, while a step is 50 ms in which this process does
nothing, as when a GPU computes ("waiting"), or in which Python computes ("slower": by how much the loading threads
stretch such a step, the waiting with it). Then the start of a run over many rows: reading the table, inspecting the
images, for the first time and again, and planning the batches.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types

import torch
from PIL import Image


sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from dataset.batches import BatchPlan, Sample, TrainingDataset, load_batches, plan_batches  # noqa: E402
from dataset.buckets import Sizing  # noqa: E402
from dataset.cache import Cache, write_entry  # noqa: E402
from dataset.images import inspect_rows  # noqa: E402
from dataset.metadata import read_rows  # noqa: E402
from training.flow_matching import SigmaLaw  # noqa: E402


# What an entry holds: (shape, dtype) by name.
TEXT = {"Qwen-Image": (200, 3584), "Wan2.1-T2V": (512, 4096), "Wan2.1-I2V": (512, 4096)}
MEDIA = {
    "Qwen-Image": {"latents": (16, 128, 128)},
    "Wan2.1-T2V": {"latents": (16, 21, 60, 104)},
    "Wan2.1-I2V": {"latents": (16, 21, 60, 104), "condition": (20, 21, 60, 104), "image_embeds": (1, 257, 1280)},
}


def make_dataset(folder, name, num_items):
    """Write a cache of one model's shapes and return the `TrainingDataset` over it."""
    cache, samples = Cache(folder), []
    for n in range(num_items):
        paths = [cache.path(kind, {"model": name, "item": n}) for kind in ("captions", "media")]
        write_entry(paths[0], {"prompt_embeds": torch.randn(TEXT[name]).bfloat16()})
        write_entry(paths[1], {tensor: torch.randn(shape) for tensor, shape in MEDIA[name].items()})
        samples.append(Sample(str(n), tuple(paths), law=SigmaLaw()))
    return TrainingDataset(samples)


def python_work(num_rounds):
    """Keep Python busy."""
    total = 0
    for n in range(num_rounds):
        total += n
    return total


def rounds_for(seconds):
    """Return how much `python_work` takes so long, at best."""
    best = []
    for _ in range(20):
        start = time.perf_counter()
        python_work(100_000)
        best.append(time.perf_counter() - start)
    return int(100_000 * seconds / min(best))


def waiting_share(dataset, step, *, batch_size, num_workers, num_steps, step_seconds):
    """Return the share of waiting, the seconds of waiting at worst, and how much longer all of it took than the steps.

    Args:
        dataset (`TrainingDataset`)
        step (`Callable`): Takes `step_seconds`.
        batch_size, num_workers, num_steps (`int`): The first five steps do not count.
        step_seconds (`float`)
    """
    keys, ones = [(None, batch_size)] * len(dataset), [1] * len(dataset)
    plan = BatchPlan(keys, ones, ones, num_processes=1, gradient_accumulation_steps=1, seed=0)
    steps = range(1, num_steps + 6)
    loader = load_batches(dataset, plan, process_index=0, steps=steps, num_workers=num_workers)
    waits = []
    for number in range(num_steps + 5):
        if number == 5:
            begin = time.perf_counter()
        start = time.perf_counter()
        next(loader)
        waits.append(time.perf_counter() - start)
        step()
    seconds, waits = time.perf_counter() - begin, waits[5:]
    return sum(waits) / seconds, max(waits), seconds / (num_steps * step_seconds) - 1


def make_rows(folder, num_rows):
    """Write a dataset of tiny images, all different, with a table."""
    for n in range(num_rows):
        path = folder / f"{n // 1000:03d}" / f"{n:06d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (48 + n % 5 * 16, 64), (n % 256, n // 256 % 256, n // 65536)).save(path)
    lines = [f"{n // 1000:03d}/{n:06d}.png,caption number {n}\n" for n in range(num_rows)]
    (folder / "metadata.csv").write_text("file_name,text\n" + "".join(lines))


def most_memory():
    """Return the most memory of this process so far, in MiB; `ru_maxrss` would count what its parent had."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def time_start(folder):
    """Print the seconds of the start of a run over a dataset, and the most memory."""
    before = most_memory()
    start = time.perf_counter()
    rows = read_rows(folder)
    read = time.perf_counter()
    items = inspect_rows(rows, Sizing(None, None, 4096, 16), cache=Cache(folder / "cache"))
    inspected = time.perf_counter()
    args = types.SimpleNamespace(
        train_batch_size=4, gradient_accumulation_steps=1, seed=0, max_train_steps=None, num_train_epochs=1
    )
    plan = plan_batches(args, items, 1, num_tokens=lambda *size: 1, resumed={"step": 0}, model={})
    for step in range(1, plan.last_step + 1):
        plan.step(step)
    planned = time.perf_counter()
    print(
        json.dumps(
            {
                "rows": len(rows),
                "read": round(read - start, 1),
                "look": round(inspected - read, 1),
                "plan": round(planned - inspected, 1),
                "all": round(planned - start, 1),
                "MiB": most_memory(),
                "of it libraries": before,
            }
        )
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step_seconds", type=float, default=0.05)
    parser.add_argument("--num_steps", type=int, default=100)
    parser.add_argument("--num_items", type=int, default=32)
    parser.add_argument("--dataset_rows", type=int, default=100_000)
    parser.add_argument("--start_of", type=pathlib.Path, help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if args.start_of is not None:
        time_start(args.start_of)
        return
    torch.set_num_threads(1)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "safetensors", "pillow"))
    print(f"{versions}; {os.cpu_count()} CPU cores; step of {args.step_seconds * 1000:g} ms")
    print(f"{'model':12} {'batch':>5} {'threads':>7} {'waiting':>8} {'worst':>8} {'slower':>7}")
    num_rounds = rounds_for(args.step_seconds)
    for name, batch_sizes in (("Qwen-Image", (1, 4)), ("Wan2.1-T2V", (1,)), ("Wan2.1-I2V", (1,))):
        with tempfile.TemporaryDirectory() as folder:
            dataset = make_dataset(folder, name, args.num_items)
            for batch_size in batch_sizes:
                for num_workers in (0, 1, 2):
                    settings = {"batch_size": batch_size, "num_workers": num_workers, "num_steps": args.num_steps}
                    settings["step_seconds"] = args.step_seconds
                    share, worst, _ = waiting_share(dataset, lambda: time.sleep(args.step_seconds), **settings)
                    _, _, slower = waiting_share(dataset, lambda: python_work(num_rounds), **settings)
                    cells = f"{share:>8.2%} {worst * 1000:>5.1f} ms {slower:>7.1%}"
                    print(f"{name:12} {batch_size:>5} {num_workers:>7} {cells}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        make_rows(pathlib.Path(folder), args.dataset_rows)
        for when in ("first start", "second start"):
            print(when, end=" ", flush=True)
            subprocess.run([sys.executable, __file__, "--start_of", folder], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
