"""Every shipped Accelerate config goes through Accelerate's own loader and launcher, which are the reference here."""

import argparse
import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_simple_launcher_cmd_env

from runtime.errors import RefusedError
from training.launch import _complete_deepspeed_config


ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
DISTRIBUTED_TYPES = {
    "cpu": "NO",
    "single_gpu": "NO",
    "multi_gpu": "MULTI_GPU",
    "deepspeed_zero2": "DEEPSPEED",
}


def config_file(name):
    return str(ROOT / "accelerate_configs" / f"{name}.yaml")


def launch_training(name, *arguments):
    """Start `accelerate launch` with a config as a user would."""
    accelerate = pathlib.Path(sys.executable).with_name("accelerate")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    return subprocess.Popen(
        [str(accelerate), "launch", "--config_file", config_file(name), *arguments],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def keys_without_comment(text):
    """Return the keys that have no comment behind them on their line, nor directly above it."""
    lines, uncommented = text.splitlines(), []

    def visit(node):
        for key, value in node.value:
            line = key.start_mark.line
            end = value.end_mark if value.start_mark.line == line else key.end_mark
            behind = lines[line][end.column :].lstrip(": ")
            above = lines[line - 1].strip() if line else ""
            if not re.match(r"# \S", behind) and not re.match(r"# \S", above):
                uncommented.append(key.value)
            if isinstance(value, yaml.MappingNode):
                visit(value)

    visit(yaml.compose(text))
    return uncommented


def deepspeed_plugin(name, monkeypatch):
    """Return the plugin that a training process would get which `accelerate launch` starts with this config."""
    started = []
    monkeypatch.setattr(launch, "deepspeed_launcher", started.append)
    arguments = ["--config_file", config_file(name), "--main_process_port", "0", "train_qwen_image.py"]
    launch.launch_command(launch.launch_command_parser().parse_args(arguments))
    _, environment = prepare_deepspeed_cmd_env(started[0])
    for key in [key for key in os.environ if key.startswith("ACCELERATE_")]:
        monkeypatch.delenv(key)
    for key, value in environment.items():
        if key.startswith("ACCELERATE_"):
            monkeypatch.setenv(key, value)
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(os.environ["ACCELERATE_MIXED_PRECISION"])
    return plugin


def test_all_configs_are_known_here():
    assert {path.stem for path in CONFIGS} == set(DISTRIBUTED_TYPES)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_loads_it(path):
    config = load_config_from_file(str(path))
    assert config.distributed_type.value == DISTRIBUTED_TYPES[path.stem]
    assert config.mixed_precision == "no"
    assert config.num_processes == (1 if DISTRIBUTED_TYPES[path.stem] == "NO" else 8)
    assert config.use_cpu == (path.stem == "cpu")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_says_why(path):
    assert keys_without_comment(path.read_text()) == []


def test_a_key_without_a_comment_would_be_noticed():
    text = "# the file\n\na: 1  # why\nb: 2\nc:  # why\n  d: '# no'\n  # why\n  e: 3\nf:\n  g: 4  # why\n"
    assert keys_without_comment(text) == ["b", "d", "f"]


def test_deepspeed_config_that_accelerate_makes_of_it(monkeypatch):
    config = deepspeed_plugin("deepspeed_zero2", monkeypatch).deepspeed_config
    assert config["zero_optimization"]["stage"] == 2
    # In bf16 the engine would cast the fp32 weights of a LoRA.
    assert config["bf16"] == config["fp16"] == {"enabled": False}
    assert "optimizer" not in config and "scheduler" not in config
    # Left to the flags of the scripts.
    for key in ("gradient_accumulation_steps", "gradient_clipping", "train_micro_batch_size_per_gpu"):
        assert config[key] == "auto", key
    for part in ("offload_optimizer", "offload_param"):
        assert config["zero_optimization"][part]["device"] == "none"


def test_flags_complete_stage_2_and_refuse_stage_3(monkeypatch):
    flags = {"train_batch_size": 2, "gradient_accumulation_steps": 4, "max_grad_norm": 0.5}
    switches = {"use_gradient_checkpointing": True, "use_gradient_checkpointing_offload": False}
    args = argparse.Namespace(training_mode="lora", offload_buffer_size=None, max_skipped_steps=0, **flags, **switches)
    accelerator = argparse.Namespace(num_processes=8, device="cuda")

    accelerator.deepspeed_plugin = deepspeed_plugin("deepspeed_zero2", monkeypatch)
    _complete_deepspeed_config(args, accelerator)
    config = accelerator.deepspeed_plugin.deepspeed_config
    assert (config["train_micro_batch_size_per_gpu"], config["train_batch_size"]) == (2, 2 * 4 * 8)
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (4, 0.5)

    accelerator.deepspeed_plugin = argparse.Namespace(deepspeed_config={"zero_optimization": {"stage": 3}})
    with pytest.raises(RefusedError, match="ZeRO stage 3 .* is not supported"):
        _complete_deepspeed_config(args, accelerator)


def test_buffer_size_without_effect_under_deepspeed_is_refused(monkeypatch):
    flags = {
        "train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 1.0,
        "offload_buffer_size": 2**30,
        "max_skipped_steps": 0,
    }
    switches = {"use_gradient_checkpointing": True, "use_gradient_checkpointing_offload": True}
    args = argparse.Namespace(training_mode="lora", **flags, **switches)
    accelerator = argparse.Namespace(num_processes=1, device="cuda")
    accelerator.deepspeed_plugin = deepspeed_plugin("deepspeed_zero2", monkeypatch)
    _complete_deepspeed_config(args, accelerator)
    accelerator.deepspeed_plugin.deepspeed_config["activation_checkpointing"] = {"cpu_checkpointing": True}
    with pytest.raises(RefusedError, match="--offload_buffer_size has no effect"):
        _complete_deepspeed_config(args, accelerator)


def test_steps_cannot_be_left_out_under_deepspeed(monkeypatch):
    """Its engine makes them itself, before anyone can look at the gradient."""
    args = argparse.Namespace(training_mode="lora", max_skipped_steps=1)
    accelerator = argparse.Namespace(deepspeed_plugin=deepspeed_plugin("deepspeed_zero2", monkeypatch))
    with pytest.raises(RefusedError, match="--max_skipped_steps is not supported with DeepSpeed"):
        _complete_deepspeed_config(args, accelerator)


@pytest.mark.slow
def test_scripts_accept_stage_2(tmp_path):
    """The first thing that is wrong is the model."""
    flags = ["--pretrained_model_name_or_path", "no such model", "--dataset_path", "no such folder anywhere"]
    flags += ["--output_dir", str(tmp_path / "output")]
    alone = ["--num_processes", "1", "--main_process_port", "0"]
    process = launch_training("deepspeed_zero2", *alone, "train_qwen_image.py", *flags)
    messages = process.communicate()[1]
    assert process.returncode == 1
    (error,) = re.findall("^error.*", messages, re.MULTILINE)
    assert "--pretrained_model_name_or_path no such model: there is no such folder" in error
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("name", ["cpu", "single_gpu"])
def test_configs_of_one_process_are_launched(name, monkeypatch):
    started = []
    monkeypatch.setattr(launch, "simple_launcher", started.append)
    arguments = ["--config_file", config_file(name), "train_qwen_image.py", "--help"]
    launch.launch_command(launch.launch_command_parser().parse_args(arguments))
    command, environment = prepare_simple_launcher_cmd_env(started[0])
    assert command == [sys.executable, "train_qwen_image.py", "--help"]
    assert environment["ACCELERATE_USE_CPU"].lower() == str(name == "cpu").lower()


@pytest.mark.slow
def test_cpu_config_launches():
    process = launch_training("cpu", "train_qwen_image.py", "--help")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "--use_gradient_checkpointing_offload" in output
