"""A build of torch for an accelerator on a machine without one: what is there counts, not the build."""

import json
import pathlib
import re

import pytest
import torch


ROOMS = ("benchmarks", "blockwise", "dataset", "pipelines", "runtime", "scripts", "training")


@pytest.fixture
def cuda_build(monkeypatch):
    """Let torch answer as a build for CUDA does where no GPU is found."""

    def current_accelerator(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)


@pytest.mark.parametrize(
    "family, flags",
    [
        ("qwen_image", ["--use_gradient_checkpointing_offload", "--validation_prompt", "a cat"]),
        ("wan_t2v", ["--memory_budget", "8GiB", "--num_frames", "1"]),
    ],
)
def test_a_build_for_an_accelerator_trains_on_the_cpu(cuda_build, train, family, flags):
    size = ["--height", "64", "--width", "64", "--max_train_steps", "1", "--num_inference_steps", "1"]
    flags = [*flags, *(size if "--validation_prompt" in flags else size[:-2])]
    output_dir = train(family, *flags)
    assert json.loads((output_dir / "run.json").read_text())["forecast"]["launch"]["device_type"] == "cpu"
    assert (output_dir / "pytorch_lora_weights.safetensors").is_file()


def test_nothing_asks_what_torch_was_built_for():
    """Whether there is a device, and which, is what `accelerator.device` says."""
    root = pathlib.Path(__file__).parents[1]
    files = [*root.glob("*.py"), *(path for room in ROOMS for path in (root / room).rglob("*.py"))]
    asks = re.compile(r"current_accelerator\(\)|\.is_built\(\)|torch\.version\.cuda|\.cuda\(\)")
    assert not [path for path in files if asks.search(path.read_text())]
