"""The averaged weights against their recurrence, over the weights that a run without has after each step."""

import functools
import json
import types

import pytest
import torch
from safetensors.torch import load_file

from training.ema import WeightAverage
from training.export import LORA_FILE
from training.optimizers import MasterWeights


NUM_STEPS = 3
DECAY = 0.2  # the warm-up ends with the third update
FLAGS = [
    "--height",
    "64",
    "--width",
    "64",
    "--mixed_precision",
    "no",
    "--learning_rate",
    "1e-2",
    "--lora_dtype",
    "fp32",
]
FLAGS += ["--lora_rank", "4", "--lora_alpha", "4", "--lora_dropout", "0.2", "--max_train_steps", str(NUM_STEPS)]
EMA = ["--ema", "--ema_decay", str(DECAY)]


@pytest.fixture(scope="module")
def train(train):
    return functools.partial(train, "qwen_image", *FLAGS)


@pytest.fixture(scope="module")
def without(train):
    return train("--checkpointing_steps", "1", "--checkpoints_total_limit", str(NUM_STEPS))


@pytest.fixture(scope="module")
def averaged(train):
    return train(*EMA, "--checkpointing_steps", "2")


def weights_after(folder, step):
    """The trained weights in a checkpoint, by the names that they have in the exported file."""
    tensors = load_file(folder / f"checkpoint-{step}" / "trainable.safetensors")
    return {name.replace(".default.", "."): tensor.double() for name, tensor in tensors.items()}


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines]


def test_exported_weights_follow_the_recurrence(without, averaged):
    average = weights_after(without, 1)
    for n in range(1, NUM_STEPS):
        decay = min(DECAY, (1 + n) / (10 + n))
        weights = weights_after(without, n + 1)
        average = {name: decay * tensor + (1 - decay) * weights[name] for name, tensor in average.items()}
    exported = load_file(averaged / LORA_FILE)
    assert exported.keys() == average.keys()
    for name, tensor in average.items():
        torch.testing.assert_close(exported[name].double(), tensor, rtol=1e-6, atol=1e-8)
    last = load_file(without / LORA_FILE)
    assert all(torch.equal(last[name].double(), weights[name]) for name in weights), "the last ones, without"
    moved = [name for name in average if (average[name] - weights[name]).abs().max() > 1e-4]
    assert moved, "the average is something else"


def test_training_is_what_it_is_without(without, averaged):
    assert losses(averaged) == losses(without)
    checkpoints = [load_file(folder / "checkpoint-2" / "trainable.safetensors") for folder in (averaged, without)]
    assert all(torch.equal(tensor, checkpoints[1][name]) for name, tensor in checkpoints[0].items())


def test_average_on_the_host_is_the_same():
    """After each step, while it is applied, from a checkpoint, and in the place of the weights at the end."""
    seen = []
    for offload_ema in (False, True):
        torch.manual_seed(0)
        weights = MasterWeights(torch.nn.Linear(3, 3).bfloat16())
        args = types.SimpleNamespace(ema=True, ema_decay=DECAY, offload_ema=offload_ema, training_mode="lora")
        average, states = WeightAverage(weights, args), []
        for _ in range(NUM_STEPS):
            for master in weights.masters:
                master.data += torch.randn_like(master)
            average.step()
            with average.applied():
                states += [tensor.clone() for tensor in (*weights.masters, *weights.parameters.values())]
            states += [tensor.clone() for tensor in (*weights.masters, *average.tensors)]
        continued = WeightAverage(weights, args)
        continued.load_state_dict(average.state_dict())
        continued.replace_weights()
        seen.append([*states, *weights.masters])
    assert all(map(torch.equal, *seen)) and len(seen[0]) == len(seen[1]) == 8 * NUM_STEPS + 2
    assert not torch.equal(seen[0][8], seen[0][12]), "or nothing was applied"
