"""What the training loop costs on top of a bare PyTorch loop over the same model function and optimizer.

    python benchmarks/loop_overhead.py [--rounds 5] [--steps 8]

Both loops run in this process, alternating, on the same tiny transformer, at a size where a step takes over 200 ms.
Everything is cached for both. The bare loop has its batches collated beforehand; ours draws and collates them, clips,
steps the schedule and writes metrics.jsonl.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

import torch
from diffusers import QwenImageTransformer2DModel


sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from blockwise.log import NUM_WATCHED_STEPS, MemoryLog  # noqa: E402
from dataset.batches import Sample, TrainingDataset, collate, plan_batches  # noqa: E402
from dataset.inspection import Item  # noqa: E402
from dataset.metadata import Row  # noqa: E402
from pipelines.family import Stage  # noqa: E402
from pipelines.qwen_image import QwenImage, never_trained_modules  # noqa: E402
from train_qwen_image import VALUES  # noqa: E402
from training.arguments import parse_args  # noqa: E402
from training.flow_matching import SigmaLaw  # noqa: E402
from training.launch import start_accelerator  # noqa: E402
from training.loop import Training, train  # noqa: E402
from training.module import DiffusionTrainingModule, make_trainable, trainable_parameters  # noqa: E402
from training.optimizers import find_optimizer  # noqa: E402


NUM_ITEMS, LATENT_SIDE, TEXT_TOKENS, BATCH_SIZE = 8, 64, 32, 2


def make_module():
    """Return a training module with a transformer of 4 blocks and width 128, all of it trained."""
    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        axes_dims_rope=(8, 12, 12),
    )
    make_trainable(transformer, argparse.Namespace(training_mode="full"), never_trained_modules(transformer))
    return DiffusionTrainingModule(object.__new__(QwenImage), transformer)


def run_bare(module, batches, optimizer, num_steps):
    """Train with nothing but PyTorch; return the seconds of each step."""
    seconds = []
    for step in range(num_steps):
        start = time.perf_counter()
        batch = dict(batches[step % len(batches)])
        batch["noise"] = torch.randn_like(batch["latents"])
        batch["sigmas"] = torch.rand(len(batch["latents"]))
        module(batch).backward()
        torch.nn.utils.clip_grad_norm_(list(trainable_parameters(module).values()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    samples = [
        {
            "latents": torch.randn(16, LATENT_SIDE, LATENT_SIDE, generator=generator),
            "prompt_embeds": torch.randn(TEXT_TOKENS, 64, generator=generator),
        }
        for _ in range(NUM_ITEMS)
    ]
    names, law = [str(n) for n in range(NUM_ITEMS)], SigmaLaw("logit_normal", 2.0)
    of_items = [Sample(name, (n,), law=law) for n, name in enumerate(names)]
    dataset = TrainingDataset(of_items, lambda n: dict(samples[n]))
    used = {"size": [LATENT_SIDE, LATENT_SIDE], "frames": 1}
    items = [Item(Row(name, "", {}, name), {"id": name, "caption": "", "used": used}, {}) for name in names]
    ours, bare = [], []
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--pretrained_model_name_or_path - --dataset_path - --output_dir {folder} --training_mode full"
        flags += f" --mixed_precision no --train_batch_size {BATCH_SIZE} --max_train_steps {options.steps}"
        args = parse_args(flags.split(), description="", values=VALUES)
        accelerator = start_accelerator(args)
        optimizer_class, arguments = find_optimizer(args, accelerator.device)
        order = plan_batches(args, items, 1, num_tokens=lambda *size: 1, resumed={"step": 0}, model={})
        batches = [
            collate([dataset[1, 0, index], dataset[1, 1, index + 1]]) for index in range(0, NUM_ITEMS, BATCH_SIZE)
        ]
        module = make_module()
        optimizer = optimizer_class(trainable_parameters(module).values(), **arguments)
        for round_number in range(options.rounds + 1):
            chosen = (optimizer_class, arguments)
            train(Training(accelerator, args, Stage(), module, dataset, order, MemoryLog(), chosen))
            accelerator.free_memory()
            lines = (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()
            plain = run_bare(module, batches, optimizer, options.steps)
            if round_number:  # the first round warms up
                # Without the first steps, which allocate the optimizer state and whose memory is watched.
                ours += [json.loads(line)["seconds"] for line in lines][NUM_WATCHED_STEPS:]
                bare += plain[NUM_WATCHED_STEPS:]
    ours_ms, bare_ms = (1000 * statistics.median(seconds) for seconds in (ours, bare))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {len(ours)} steps each, medians")
    print(f"bare loop      {bare_ms:8.1f} ms per step")
    print(f"training loop  {ours_ms:8.1f} ms per step ({ours_ms / bare_ms - 1:+.1%})")


if __name__ == "__main__":
    main()
