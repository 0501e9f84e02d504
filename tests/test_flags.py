"""What the row of a flag says is true: its proof, whether a resumed run may change it, whether the card shows it.

Every choice of a flag, and of every number a value other than the default, has a test that shows its effect.
"""

import argparse
import ast
import functools
import pathlib
import re

import pytest
import torch

from blockwise.plan import MemoryPlan
from dataset.batches import plan_batches
from dataset.buckets import Sizing
from dataset.draws import Draw
from dataset.inspection import Item
from dataset.metadata import Row
from dataset.videos import _decide
from runtime.errors import RefusedError
from train_wan_video import VALUES
from training import flags as rows
from training.arguments import parse_args, resolve_for_model
from training.checkpoints import refuse_changed_settings
from training.ema import WeightAverage
from training.flags import FIXED, ROWS, SHOWN
from training.flow_matching import flow_losses, sigma_law
from training.model_card import write_model_card
from training.module import add_lora
from training.optimizers import _PATHS, MasterWeights, find_optimizer, make_schedule


TESTS = pathlib.Path(__file__).parent


@functools.cache
def definitions():
    """Return the tests by name, each as a list of sources: with that of the constants of its file that it uses."""
    found = {}
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        lines, functions, constants = text.splitlines(), {}, {}
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                start = min(part.lineno for part in (node, *node.decorator_list))
                functions[node.name] = "\n".join(lines[start - 1 : node.end_lineno])
            elif isinstance(node, (ast.Assign, ast.AugAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (target.id for target in targets if isinstance(target, ast.Name)):
                    constants[name] = "\n".join([constants.get(name, ""), *lines[node.lineno - 1 : node.end_lineno]])
        for name, source in functions.items():
            used = [constants[word] for word in set(re.findall(r"\w+", source)) if word in constants]
            found.setdefault(name, []).append("\n".join([source, *used]))
    return found


def names(test, pattern, word):
    """Return whether a test of that name exists, and has a word of the pattern in it."""
    assert test.startswith("test_") and test in definitions(), f"there is no {test}"
    return any(word in re.findall(pattern, source) for source in definitions()[test])


@pytest.mark.parametrize("flag", ROWS)
def test_the_proof_of_a_flag_exists_and_names_it(flag):
    assert names(ROWS[flag].proof, r"\w+", flag), f"{ROWS[flag].proof} does not name {flag}"


@pytest.mark.parametrize("flag", ROWS)
def test_a_resumed_run_changes_what_may_change_and_nothing_else(flag):
    args = argparse.Namespace(**{"expert": None, flag: "now"})
    refuse_changed_settings(args, {flag: getattr(args, flag)}, "checkpoint-1")
    if ROWS[flag].change is not FIXED:
        return refuse_changed_settings(args, {flag: "before"}, "checkpoint-1")
    with pytest.raises(RefusedError, match=f"^{ROWS[flag].label} is .* and was before in checkpoint-1: a resumed run"):
        refuse_changed_settings(args, {flag: "before"}, "checkpoint-1")


@pytest.mark.parametrize("flag", ["max_train_steps", "num_train_epochs"])
def test_the_length_of_the_first_of_two_experts_stays(flag):
    args = argparse.Namespace(**{flag: 4}, expert="both")
    with pytest.raises(RefusedError, match=f"--{flag} is 4 and was 2"):
        refuse_changed_settings(args, {flag: 2}, "checkpoint-1")
    args.expert = "low_noise"
    refuse_changed_settings(args, {flag: 2}, "checkpoint-1")


def test_the_model_card_shows_what_may_not_change_and_what_is_marked(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    args = argparse.Namespace(**dict.fromkeys(ROWS, "set"))
    args.output_dir, args.validation_prompt = tmp_path, None
    family = {"pipeline_class": object, "transformer_class": object, "image_arguments": (), "is_video": False}
    stage = argparse.Namespace(name=None, subfolder="transformer", number=0)
    write_model_card(args, argparse.Namespace(**family, stages=(stage,)), stage, num_items=1)
    shown = re.findall(r"(?m)^\| (\w+) \|", (tmp_path / "README.md").read_text())
    described = {name for name, flag in ROWS.items() if flag.change in (FIXED, SHOWN)}
    assert set(shown) == described | {"setting", "base_model"} and len(shown) == len(set(shown))
    assert {"lora_rank", "seed", "learning_rate", "train_batch_size"} < set(shown)
    assert not {"output_dir", "dataset_path", "cache_dir", "memory_budget"} & set(shown), "nothing of this machine"


@pytest.mark.parametrize("flag", ROWS)
def test_what_a_flag_needs_and_excludes_are_flags(flag):
    row = ROWS[flag]
    needed = {need.partition("=")[0] for need in row.needs.split()}
    assert needed | set(row.excludes.split()) <= set(ROWS) - {flag}
    for need in filter(lambda need: "=" in need, row.needs.split()):
        name, _, value = need.partition("=")
        assert value in ROWS[name].kind.choices
    assert not set(row.elsewhere.split()) & set(ROWS), "a name of ours means ours"


# ---------------------------------------------------------------- choices and numbers


def parsed(*flags):
    required = ["--pretrained_model_name_or_path", "m", "--dataset_path", "d", "--output_dir", "o"]
    args = parse_args([*required, *flags], description="", values=VALUES, resolve=False)
    values = {"divisor": 16, "height": 480, "width": 832, "num_frames": 81, "fps": 16.0, "tasks": ("t2v",)}
    resolve_for_model(args, values | {"experts": (), "lora_target_modules": "q,v"})
    return args


def rates(args):
    """The learning rate of each of 12 steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=args.learning_rate)
    schedule = make_schedule(args, optimizer, 12)
    found = []
    for _ in range(12):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def updates(args):
    """A weight after three steps of the optimizer."""
    optimizer_class, values = find_optimizer(args, torch.device("cpu"))
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 4096).reshape(64, 64))
    optimizer = optimizer_class([weight], **values)
    for step in range(3):
        weight.grad = (weight.detach() + step).cos()
        optimizer.step()
    return weight[0, :3].tolist()


def adapters(args):
    """What a small LoRA is: names, shapes, strength, dropout."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in ("q", "k", "v")})
    model.add_adapter = functools.partial(_add_adapter, model)
    add_lora(model, args.lora_target_modules, args)
    return [str(model), [getattr(layer, "scaling", None) for layer in model.modules()]]


def _add_adapter(model, config, adapter_name="default"):
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, model, adapter_name)


def sigmas(args):
    law = sigma_law(args, 3.0)
    return [law.quantile(u) for u in (0.1, 0.5, 0.9)]


def losses(args):
    prediction = torch.linspace(-1, 1, 12).reshape(3, 4)
    return flow_losses(prediction, -prediction, torch.tensor([0.1, 0.5, 0.9]), args.loss_weighting).tolist()


def noise(args):
    return Draw(args.seed, 1, 0).noise((3,)).tolist()


def clip(args):
    """What is used of a clip of 200 frames at 24 fps."""
    measured = {"size": [1920, 1080], "times": [0.0, 199 / 24], "num_frames": 200, "duration": 200 / 24, "fps": 24.0}
    sizing = Sizing.from_args(args, 16)
    row = Row("a.mp4", "", {}, "a.mp4")
    return _decide(row, measured, sizing=sizing, fps=args.fps, clip_part=args.clip_part, min_frames=1)["used"]


def batches(args):
    """The length of the run and its first samples."""
    rows = [Row(str(n), "", {}, str(n), repeat=args.dataset_repeat) for n in range(7)]
    used = {"size": [64, 64], "frames": 1}
    items = [Item(row, {"id": row.id, "caption": "", "used": used}, {}) for row in rows]
    plan = plan_batches(args, items, 1, num_tokens=lambda *size: 1, resumed={"step": 0}, model={})
    return plan.last_step, [plan.micro_batches(step) for step in range(1, 5)]


def modes(args):
    return MemoryPlan.from_args(args, {"blocks": 4}).modes


def average(args):
    weights = MasterWeights(torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1))]))
    kept = WeightAverage(weights, args)
    for _ in range(9):
        weights.masters[0].data += 1
        kept.step()
    return kept.tensors[0].item()


# Flag -> what it changes, and its values, each with the flags that it needs. What the default gives and what each
# value gives are all different.
EFFECTS = {
    "seed": (noise, {"7": []}),
    "lora_rank": (adapters, {"4": []}),
    "lora_alpha": (adapters, {"4": []}),
    "lora_dropout": (adapters, {"0.1": []}),
    "height": (clip, {"256": ["--width", "832"]}),
    "width": (clip, {"256": ["--height", "480"]}),
    "max_pixels": (clip, {"65536": []}),
    "aspect_buckets": (clip, dict.fromkeys(("0", "1"), ["--max_pixels", "65536"])),
    "num_frames": (clip, {"9": []}),
    "fps": (clip, {"8": []}),
    "clip_part": (clip, {"start": [], "middle": [], "random": []}),
    "train_batch_size": (batches, {"2": []}),
    "dataset_repeat": (batches, {"2": []}),
    "gradient_accumulation_steps": (batches, {"2": []}),
    "max_train_steps": (batches, {"5": []}),
    "num_train_epochs": (batches, {"2": []}),
    "checkpoint_blocks": (modes, {"2": ["--use_gradient_checkpointing"]}),
    "learning_rate": (rates, {"2e-3": []}),
    "lr_scheduler": (
        rates,
        {
            "linear": [],
            "cosine": [],
            "cosine_with_restarts": ["--lr_num_cycles", "3"],
            "polynomial": ["--lr_power", "2"],
            "constant": [],
            "constant_with_warmup": ["--lr_warmup_steps", "4"],
        },
    ),
    "lr_warmup_steps": (rates, {"2": ["--lr_scheduler", "linear"], "3": ["--lr_scheduler", "linear"]}),
    "lr_num_cycles": (rates, dict.fromkeys(("2", "3"), ["--lr_scheduler", "cosine_with_restarts"])),
    "lr_power": (rates, dict.fromkeys(("0.5", "2"), ["--lr_scheduler", "polynomial"])),
    "optimizer": (updates, {**{name: [] for name in _PATHS}, "torch.optim.SGD": []}),
    "weight_decay": (updates, {"0.5": []}),
    "timestep_sampling": (sigmas, {"uniform": [], "logit_normal": []}),
    "sigma_shift": (sigmas, {"1": [], "2": []}),
    "min_sigma": (sigmas, {"0.2": []}),
    "max_sigma": (sigmas, {"0.8": []}),
    "loss_weighting": (losses, {"none": [], "sigma_sqrt": [], "cosmap": []}),
    "ema_decay": (average, {"0.1": ["--ema"], "0.3": ["--ema"]}),
}

# Flag -> its values, each with the test that shows it and names flag and value.
SHOWN_BY = {
    "training_mode": {"full": "test_full_result_can_be_trained_on"},
    "lora_dtype": {"fp32": "test_strength_rate_dropout_and_dtype"},
    "task": dict.fromkeys(("t2v", "i2v"), "test_in_bf16_the_transformer_gets_what_the_stock_pipeline_gives_it"),
    "dataloader_num_workers": {"3": "test_loaders_change_nothing_but_the_time"},
    "caption_dropout": {"0.5": "test_dropped_captions_change_nothing_else"},
    "on_bad_sample": {"skip": "test_skip_trains_on_the_rest"},
    "offload_buffer_size": {"4KB": "test_a_full_buffer_changes_nothing"},
    "memory_budget": {"budget": "test_a_budget_makes_the_plan"},
    "max_grad_norm": {"0.05": "test_clipping"},
    "mixed_precision": dict.fromkeys(("no", "bf16"), "test_the_base_has_the_dtype_that_is_asked_for"),
    "expert": {
        "both": "test_both_experts_in_one_run_equal_two_runs",
        **dict.fromkeys(("high_noise", "low_noise"), "test_both_experts_in_one_run_equal_two_runs"),
    },
    "max_skipped_steps": {"1": "test_a_step_whose_loss_is_not_finite_is_left_out"},
    "checkpointing_steps": {"1": "test_checkpoints_total_limit"},
    "checkpoints_total_limit": {"2": "test_checkpoints_total_limit"},
    "report_to": {
        "tensorboard": "test_tensorboard",
        "wandb": "test_wandb_offline",
        "trackio": "test_trackio",
    },
    "logging_steps": {"3": "test_logging_steps"},
    "validation_steps": {"2": "test_files_of_previews"},
    "validation_split": {"0.4": "test_what_is_held_out_is_not_trained"},
    "guidance_scale": {"8": "test_settings_of_previews"},
    "num_inference_steps": {"3": "test_settings_of_previews"},
    "validation_seed": {"1": "test_validation_seed_changes_the_loss_only"},
}

# What is no number; of texts with a list of names the names count as choices.
NO_NUMBERS = (
    rows.TEXT,
    rows.PATH,
    rows.SWITCH,
    rows.TEXTS,
    rows.PATHS,
    rows.NAMES,
    rows.TRACKERS,
    rows.KEY_VALUE,
    rows.STRUCTURE,
)
NAMED = {"optimizer": {*_PATHS}, "report_to": {"tensorboard", "wandb", "trackio"}}


def test_every_choice_and_a_value_of_every_number_is_in_one_of_the_tables():
    shown = {flag: set(values) for flag, (_, values) in EFFECTS.items()} | {
        flag: set(values) for flag, values in SHOWN_BY.items()
    }
    assert len(shown) == len(EFFECTS) + len(SHOWN_BY), "one table is enough"
    for flag, row in ROWS.items():
        choices = {*row.kind.choices, *NAMED.get(flag, ())}
        assert choices - {row.default} <= shown.get(flag, set()), flag
        assert choices or row.kind in NO_NUMBERS or shown.get(flag, set()) - {str(row.default)}, flag
    assert set(shown) <= set(ROWS)


@pytest.mark.parametrize("flag", EFFECTS)
def test_each_value_gives_something_else(flag):
    observe, values = EFFECTS[flag]

    def seen(*flags):
        try:
            return repr(observe(parsed(*flags)))
        except RefusedError as error:
            return f"refused: {error}"

    found = {value: seen(f"--{flag}", value, *further) for value, further in values.items()}
    assert not any(text.startswith("refused") for text in found.values()), found
    if ROWS[flag].default not in values and not ROWS[flag].kind.choices:
        found["default"] = seen(*next(iter(values.values())) if flag not in ("height", "width") else ())
    assert len(set(found.values())) == len(found), found


@pytest.mark.parametrize("flag, value", [(flag, value) for flag, values in SHOWN_BY.items() for value in values])
def test_the_test_names_the_value(flag, value):
    test = SHOWN_BY[flag][value]
    assert names(test, r"[\w.]+", value), f"{test} does not name {value}"
