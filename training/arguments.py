"""Command line and config files of the training scripts: every flag, its default, and what contradicts what.

Needs the standard library and yaml only: the scripts parse before they import torch, so that a typo costs nothing.
"""

import argparse
import ast
import difflib
import json
import logging
import math
import pathlib

from dataset.settings import DATASET_FLAGS, LINES, bucket_pixels, round_down_frames
from runtime.errors import RefusedError


logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- values


def _number(kind, is_allowed):
    """Return the kind of a number, which `is_allowed` says of a value; what is not a number never is."""

    def convert(text):
        value = kind(text)
        if not is_allowed(value):
            raise ValueError
        return value

    return convert


_positive_int = _number(int, lambda value: value >= 1)
_natural = _number(int, lambda value: value >= 0)
_seed = _number(int, lambda value: 0 <= value < 2**63)
_positive = _number(float, lambda value: 0 < value < math.inf)
_non_negative = _number(float, lambda value: 0 <= value < math.inf)
_fraction = _number(float, lambda value: 0 <= value <= 1)
_dropout = _number(float, lambda value: 0 <= value < 1)


def _counts(text):
    values = [_natural(item) for item in text.split(",")]
    if not any(values):
        raise ValueError
    return values


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _num_bytes(text):
    number, unit = text[:-3].strip(), text[-3:]
    if unit not in _UNITS:
        number, unit = text[:-2].strip(), text[-2:]
    if unit not in _UNITS:
        raise ValueError
    return int(_non_negative(number) * _UNITS[unit])


def _budget(text):
    return text if text == "auto" else _num_bytes(text)


def _trackers(text):
    names = [] if text == "none" else _names(text)
    if not set(names) <= {"tensorboard", "wandb", "trackio"}:
        raise ValueError
    return list(dict.fromkeys(names))


def _names(text):
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError
    return names


def _key_value(text):
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        raise ValueError
    return key, _literal(value)


def _literal(value):
    """Return what a text, or a list of texts in a config file, is in Python; true and false as YAML and JSON write."""
    if isinstance(value, list):
        return tuple(map(_literal, value))
    try:
        return value == "true" if value in ("true", "false") else ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


_ALLOWED = {
    _positive_int: "a whole number of at least 1",
    _natural: "a whole number of at least 0",
    _seed: "a whole number from 0 to below 2**63",
    _positive: "a finite number above 0",
    _non_negative: "a finite number of at least 0",
    _fraction: "a number from 0 to 1",
    _dropout: "a number from 0 to below 1",
    _counts: "whole numbers with commas between them, not all 0",
    _num_bytes: "a size with its unit, such as 24GiB or 512MB",
    _budget: "auto, or a size with its unit, such as 24GiB or 512MB",
    _names: "names with commas between them",
    _trackers: "tensorboard, wandb, trackio, with commas between them, or none",
    _key_value: "key=value",
    str: "text",
}

_METAVARS = {
    str: "TEXT",
    _positive_int: "N",
    _natural: "N",
    _seed: "N",
    _counts: "N,M",
    _names: "NAME,NAME",
    _trackers: "NAME,NAME|none",
    _key_value: "KEY=VALUE",
}

SWITCH = object()
REQUIRED = object()
# A default that depends on other flags: `_resolve` fills it in, the help text says what it will be.
DERIVED = object()


# ---------------------------------------------------------------- flags

_SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")

# group -> (flag, type or choices, default) -> help. The defaults of all flags stand here, and nowhere else.
FLAGS = {
    "model": {
        ("pretrained_model_name_or_path", str, REQUIRED): "Hub id or folder of a diffusers pipeline.",
        ("revision", str, None): "Git revision of the hub repository. Default: its main branch.",
        ("variant", str, None): "File name variant of the weights, such as bf16. Default: none.",
        ("transformer_path", str, None): (
            "A transformer/ folder or one safetensors file that replaces the pipeline's transformer. Default: none."
        ),
        ("training_mode", ("lora", "full"), "lora"): "Train a LoRA, or all weights of the transformer.",
        ("seed", _seed, 42): "Seed of everything that is drawn.",
        ("deterministic", SWITCH, False): "Deterministic kernels on CUDA; slower. A CPU always is deterministic.",
    },
    "LoRA": {
        ("lora_rank", _positive_int, 32): "Rank.",
        ("lora_alpha", _positive, DERIVED): "Alpha; the strength is alpha / rank. Default: the rank, strength 1.",
        ("lora_dropout", _dropout, 0.0): "Dropout before each adapter. 0 is off.",
        ("lora_target_modules", _names, DERIVED): (
            "Names of linear layers, with commas; the end of a full name is enough. Default: {lora_target_modules}."
        ),
        ("lora_init_path", str, None): (
            "LoRA file, or folder with one, whose weights the adapters start from, and nothing else. Default: none."
        ),
        ("lora_dtype", ("bf16", "fp32"), "bf16"): "Dtype of the saved file; training is in fp32 either way.",
    },
    "data": {
        ("dataset_path", str, REQUIRED): "Folder, or hub id of a Hugging Face dataset.",
        ("dataset_metadata", str, None): "Metadata file. Default: the one in the folder, else sidecar .txt files.",
        ("media_column", str, None): "Column with the pictures or clips. Default: found by its usual names.",
        ("caption_column", str, None): "Column with the captions. Default: found by its usual names.",
        ("height", _positive_int, DERIVED): "Height in pixels, a multiple of {divisor}. Default: {height}.",
        ("width", _positive_int, DERIVED): "Width in pixels, a multiple of {divisor}. Default: {width}.",
        ("max_pixels", _positive_int, None): (
            "Instead of height and width: about the shape of each item, with at most so many pixels. Default: off."
        ),
        ("aspect_buckets", _natural, DERIVED): (
            "How many shapes there are under a cap on pixels (max_pixels, or sizes such as 480p in a bucket_config), "
            "from 1:2 to 2:1 and alike in pixels; each item is cropped to the nearest. 0: each has its own. "
            "Default: 9."
        ),
        ("num_frames", _positive_int, DERIVED): "Frames of a clip, 4n + 1, if it has as many. Default: {num_frames}.",
        ("fps", _positive, DERIVED): "Frames per second at which clips are trained. Default: {fps}.",
        ("clip_part", ("start", "middle", "random"), "start"): (
            "Which part of a clip with more frames; random: one draw per clip, fixed by the seed."
        ),
        ("task", ("t2v", "i2v"), None): "From text or from image to video. Required where a model does both: {tasks}.",
        ("train_batch_size", _positive_int, 1): "Samples per process and micro-batch.",
        ("dataset_repeat", _positive_int, 1): "How often each item comes in one epoch.",
        ("dataloader_num_workers", _natural, 1): (
            "Threads that load batches ahead, in each process. 0: a batch is made when it is needed."
        ),
        ("caption_dropout", _fraction, 0.0): "Share of samples that are trained with {dropped_caption}. 0 is off.",
        ("on_bad_sample", ("error", "skip"), "error"): (
            "What to do about items that cannot be used: list them all and stop, or train on the rest."
        ),
        ("allow_missing_captions", SWITCH, False): "Train items without a caption with an empty one.",
        ("cache_dir", str, DERIVED): (
            "Folder for encoded captions and media, which runs can share. Default: cache in the output_dir."
        ),
    },
    "memory": {
        ("use_gradient_checkpointing", SWITCH, False): "Recompute the activations of each block in the backward pass.",
        ("use_gradient_checkpointing_offload", SWITCH, False): (
            "Recompute, with the inputs of each block in host memory meanwhile. Implies the flag above."
        ),
        ("checkpoint_blocks", _counts, None): (
            "Only the first N blocks, with one of the flags above; one number for each block list, or one for all of "
            "them. Default: all blocks."
        ),
        ("offload_buffer_size", _num_bytes, None): (
            "Most host memory per process for parked inputs, such as 24GiB; blocks that find it full keep theirs on "
            "the device. Default: what the plan parks, if the host has as much free."
        ),
        ("memory_budget", _budget, None): (
            "Instead of the flags above: device memory per process, such as 24GiB, or auto for what the device has "
            "free. The fastest plan that fits is made. Default: off."
        ),
        ("dry_run", SWITCH, False): "Only say what the run will need, from configs alone, and check that it fits.",
    },
    "training": {
        ("max_train_steps", _positive_int, None): "Optimizer steps. Default: as many as the epochs need.",
        ("num_train_epochs", _positive_int, DERIVED): "Passes over the dataset, instead of steps. Default: 1.",
        ("gradient_accumulation_steps", _positive_int, 1): "Micro-batches per optimizer step.",
        ("learning_rate", _positive, DERIVED): "Default: 1e-4 for LoRA, 1e-5 for full, 1.0 with prodigy.",
        ("lr_scheduler", _SCHEDULES, "constant"): "Schedule of the learning rate, over optimizer steps.",
        ("lr_warmup_steps", _natural, 0): "Optimizer steps over which the rate rises from 0. 0 is off.",
        ("lr_num_cycles", _positive_int, None): (
            "How often the rate falls, 2 or more; required by cosine_with_restarts, and for it only. Default: none."
        ),
        ("lr_power", _positive, None): (
            "Power of the fall, other than 1 (linear); required by polynomial, and for it only. Default: none."
        ),
        ("optimizer", str, "adamw"): (
            "adamw, adamw_8bit, adafactor, prodigy, or the import path of a class, such as torch.optim.SGD."
        ),
        ("optimizer_args", _key_value, None): "Further arguments of the optimizer, as key=value ... Default: none.",
        ("weight_decay", _non_negative, DERIVED): (
            "0 is off. Default: 0.01; with the import path of an optimizer, what that class has."
        ),
        ("max_grad_norm", _non_negative, 1.0): "Norm to which gradients are clipped. 0 is off.",
        ("mixed_precision", ("no", "bf16"), "bf16"): (
            "Dtype of the base weights and of the computation: no is fp32. There is no autocast either way."
        ),
        ("timestep_sampling", ("uniform", "logit_normal"), "{timestep_sampling}"): "Law of sigma before the shift.",
        ("sigma_shift", _positive, None): "Factor that shifts sigmas towards noise. 1 is off. Default: {sigma_shift}.",
        ("expert", ("high_noise", "low_noise", "both"), None): (
            "Which expert is trained; both: one after the other. Required where a model has two: {experts}."
        ),
        ("min_sigma", _fraction, 0.0): "Draw sigmas from their law between this and max_sigma. 0 is off.",
        ("max_sigma", _fraction, 1.0): "The upper end. 1 is off.",
        ("loss_weighting", ("none", "sigma_sqrt", "cosmap"), "none"): (
            "Weight of each sample's loss by its sigma, as diffusers' compute_loss_weighting_for_sd3 names them."
        ),
        ("ema", SWITCH, False): (
            "Keep an average of the trained weights, in fp32; that is what is exported, previewed and validated."
        ),
        ("ema_decay", _dropout, DERIVED): (
            "Weight of what the average was before each step, at most (1 + n) / (10 + n) after n. Default: 0.999."
        ),
        ("offload_ema", SWITCH, False): "Keep the average in host memory: saves 4 bytes per weight, slows each step.",
        ("max_skipped_steps", _natural, 0): (
            "Optimizer steps in a row that may be left out because loss or gradient is not finite; each is looked at "
            "then, which makes the host wait for the device. 0: the run stops at the first."
        ),
    },
    "saving": {
        ("output_dir", str, REQUIRED): "Folder for everything that the run leaves.",
        ("checkpointing_steps", _positive_int, None): "Save the training state every so many steps. Default: off.",
        ("checkpoints_total_limit", _positive_int, None): "Keep the newest so many checkpoints. Default: all.",
        ("resume_from_checkpoint", str, None): (
            "Go on from a checkpoint folder (a bare name is looked for in the output_dir first), or from the latest "
            "complete one in the output_dir: latest. If there is none yet, the run starts at its first step."
        ),
        ("push_to_hub", SWITCH, False): "Upload the result, its model card and the last previews to the hub.",
        ("hub_model_id", str, None): "Repository for push_to_hub. Default: the name of the output_dir.",
    },
    "reporting": {
        ("report_to", _trackers, DERIVED): "Trackers that get the numbers and previews too. Default: none.",
        ("logging_steps", _positive_int, 10): "Write metrics and show the loss every so many optimizer steps.",
        ("validation_prompt", str, None): (
            "Prompt of a preview by the stock pipeline. Repeatable. Default: no previews."
        ),
        ("validation_image", str, None): (
            "First frame of the previews, for models from image to video; twice: first and last. Repeatable."
        ),
        ("validation_steps", _positive_int, None): (
            "Make previews, and measure the loss of what is held out, every so many optimizer steps. Default: after "
            "the last step only."
        ),
        ("validation_split", _dropout, 0.0): (
            "Share of the items that is held out: not trained, its loss measured at fixed sigmas and noise. 0 is off."
        ),
        ("negative_prompt", str, DERIVED): "Of the previews. Default: {described_negative_prompt}.",
        ("guidance_scale", _non_negative, DERIVED): (
            "Of the previews; up to 1 is without guidance. Default: {guidance_scale}."
        ),
        ("num_inference_steps", _positive_int, DERIVED): "Of the previews. Default: {num_inference_steps}.",
        ("validation_seed", _seed, DERIVED): "Of the previews' noise and that of held-out items. Default: the seed.",
    },
    "files": {
        ("config", str, None): (
            "YAML file with the same keys as the flags, and datasets and bucket_config (see README.md), or a "
            "run.json. Repeatable: a later file wins, and flags win over all."
        ),
    },
}


# What a memory budget decides by itself.
_MANUAL_MEMORY_FLAGS = (
    "use_gradient_checkpointing",
    "use_gradient_checkpointing_offload",
    "checkpoint_blocks",
    "offload_buffer_size",
)

# Of each of several datasets, under the key `datasets` of a config file.

# Settings with a structure, which config files only can hold.
CONFIG_ONLY = ("datasets", "bucket_config")

# What a bucket config says for each size and length instead.
_SIZE_FLAGS = ("height", "width", "max_pixels", "num_frames", "train_batch_size")

# Settings, and those that cannot stand beside them.
_EXCLUSIVE = {
    "max_train_steps": ("num_train_epochs",),
    "max_pixels": ("height", "width"),
    "memory_budget": _MANUAL_MEMORY_FLAGS,
    "datasets": DATASET_FLAGS,
    "bucket_config": _SIZE_FLAGS,
}

# Flags that are for some families only, which name them in their values under "flags".
_FAMILY_FLAGS = {"num_frames", "fps", "clip_part", "task", "expert", "validation_image"}

# Flags that can stand several times; in a config file a list.
_REPEATABLE = ("config", "validation_prompt", "validation_image")

# Flags without effect unless one of those behind them is given.
_NEEDS = (
    ("checkpoints_total_limit", "checkpointing_steps"),
    ("checkpoint_blocks", "use_gradient_checkpointing", "use_gradient_checkpointing_offload"),
    ("offload_buffer_size", "use_gradient_checkpointing_offload"),
    *(("ema_decay", "ema"), ("offload_ema", "ema"), ("hub_model_id", "push_to_hub")),
    *(("validation_image", "validation_prompt"), ("negative_prompt", "validation_prompt")),
    *(("guidance_scale", "validation_prompt"), ("num_inference_steps", "validation_prompt")),
    ("validation_steps", "validation_prompt", "validation_split"),
    ("validation_seed", "validation_prompt", "validation_split"),
)


def _specs(values):
    """Yield (group, name, kind, default, help) of every flag, the family's own `values` filled in."""
    for group, flags in FLAGS.items():
        for (name, kind, default), text in flags.items():
            if name in _FAMILY_FLAGS and name not in values.get("flags", ()):
                continue
            if isinstance(default, str):
                default = default.format(**values)
            yield group, name, kind, default, text.format(**values)


# ---------------------------------------------------------------- parsing


def _help_format(prog):
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=44, width=119)


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one sentence, as all else is refused."""

    def error(self, message):
        raise RefusedError(message)


def _convert(name, kind, text):
    allowed = f"one of {', '.join(kind)}" if isinstance(kind, tuple) else _ALLOWED[kind]
    try:
        return kind[kind.index(text)] if isinstance(kind, tuple) else kind(text)
    except ValueError:
        raise RefusedError(f"--{name} is {text!r}; allowed is {allowed}.") from None


def _build_parser(description, values):
    # The values that the command line does not give are left out of the namespace: defaults are filled in afterwards,
    # so that a flag which was given and has no effect can be told from a default.
    parser = Parser(
        usage="%(prog)s "
        + " ".join(f"--{name} ..." for _, name, _, default, _ in _specs(values) if default is REQUIRED),
        description=description,
        formatter_class=_help_format,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups = {}
    for group, name, kind, default, text in _specs(values):
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        if default is REQUIRED:
            text += " Required."
        elif kind is SWITCH:
            text += " Default: off."
        elif default is not None and default is not DERIVED:
            text += f" Default: {default}."
        options = {"help": text.replace("%", "%%")}
        if kind is SWITCH:
            options["action"] = "store_true"
        else:
            options["metavar"] = "|".join(kind) if isinstance(kind, tuple) else _METAVARS.get(kind, "X")
            if name == "optimizer_args":
                options["nargs"] = "+"
            if name in _REPEATABLE:
                options["action"] = "append"
        groups[group].add_argument(f"--{name}", **options)
    return parser


def _nearest(name, known):
    close = difflib.get_close_matches(name, known, n=1, cutoff=0)
    return close[0]


def _check_names(argv, switches, known):
    """Raise for the first flag that does not exist, or switch with a value, before anything else is looked at."""
    for position, token in enumerate(argv):
        if not token.startswith("--") or token == "--help":
            continue
        name, has_value, value = token[2:].partition("=")
        if name not in known:
            raise RefusedError(f"Unknown flag --{name}; the nearest is --{_nearest(name, known)}.")
        following = argv[position + 1] if position + 1 < len(argv) else "--"
        if name in switches and (has_value or not following.startswith("-")):
            value = value if has_value else following
            raise RefusedError(
                f"--{name} is a switch and takes no value, but {value!r} was given; leave the flag out to switch it "
                "off."
            )


_SWITCHED = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def _read_config(path, kinds):
    """Return the settings of one YAML file or run.json; None stands for those that are taken back."""
    import yaml

    file = pathlib.Path(path)
    if not file.is_file():
        raise RefusedError(f"--config: there is no file {path}.")
    try:
        text = file.read_text(encoding="utf-8-sig")
        record = _read_record(text)
        # Everything stays text, so that `no`, `1e-5` and `007` mean what they would mean on the command line.
        content = yaml.load(text, Loader=_with_lines(yaml)) if record is None else _as_text(record)
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise RefusedError(f"--config: {path}, line {line}: the byte 0x{byte:02x} is not UTF-8.") from None
    except yaml.YAMLError as error:
        raise RefusedError(f"--config: {path}, {_problem_in_yaml(text, error)}.") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise RefusedError(f"--config: {path} must hold one key per flag, such as 'lora_rank: 16'.")
    settings, file = {}, path
    for key, value in content.items():
        path = _place(file, content, key)
        if key not in (*kinds, *CONFIG_ONLY) or (key == "config" and value is not None):
            known = [name for name in (*kinds, *CONFIG_ONLY) if name != "config"]
            raise RefusedError(f"{path}: unknown key {key!r}; the nearest is {_nearest(str(key), known)}.")
        if value is None or (value == [] and (key in _REPEATABLE or kinds.get(key) is _trackers)):
            settings[key] = None
            continue
        if record is not None and kinds.get(key) in (_num_bytes, _budget) and value.isdecimal():
            settings[key] = int(value)
            continue
        if record is not None and kinds.get(key) is _key_value:
            settings[key] = [(name, _tuples(item)) for name, item in record[key].items()]
            continue
        if key == "datasets":
            settings[key] = _read_datasets(file, path, value, kinds)
        elif key == "bucket_config":
            settings[key] = _read_bucket_config(file, path, value)
        elif kinds[key] is SWITCH:
            if str(value).lower() not in _SWITCHED:
                raise RefusedError(f"{path}: {key} is {value!r}; allowed is true or false.")
            settings[key] = _SWITCHED[value.lower()]
        elif key in _REPEATABLE:
            settings[key] = [_convert_in(path, key, kinds, item) for item in _as_list(value)]
        elif kinds[key] is _key_value:
            items = [f"{k}=" for k in value] if isinstance(value, dict) else _as_list(value)
            settings[key] = [_convert_in(path, key, kinds, item) for item in items]
            if isinstance(value, dict):
                settings[key] = [(k, _literal(v)) for k, v in value.items()]
        else:
            if kinds[key] in (_names, _counts, _trackers) and isinstance(value, list):
                value = ",".join(map(str, value))
            settings[key] = _convert_in(path, key, kinds, value)
    return settings


def _read_record(text):
    """Return the arguments of a run from its run.json, or None if the text is something else."""
    try:
        content = json.loads(text)
    except ValueError:
        return None
    if not (isinstance(content, dict) and isinstance(content.get("arguments"), dict) and "versions" in content):
        return None
    # The whole of the run is meant, and what was in its config files stands in it.
    return content["arguments"] | dict.fromkeys(("config", "resume_from_checkpoint", "dry_run"))


def _as_text(value):
    """Return a value from JSON as `_unique_keys` would return it from YAML."""
    if isinstance(value, dict):
        return {key: _as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class _Mapping(dict):
    """A mapping from YAML, with the line of each key in `lines`."""


def _with_lines(yaml):
    """Return a loader of texts, and None where nothing is said, in `_Mapping`s, that refuses a key which stands twice:
    the first would be ignored."""

    class Loader(yaml.BaseLoader):
        def construct_scalar(self, node):
            return None if node.style is None and node.value in ("", "null", "~") else super().construct_scalar(node)

        def construct_mapping(self, node, deep=False):
            mapping, lines = _Mapping(super().construct_mapping(node, deep)), {}
            for key, _ in node.value:
                if key.value in lines:
                    problem = f"the key {key.value!r} stands twice, before in line {lines[key.value]}"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                lines[key.value] = key.start_mark.line + 1
            mapping.lines = lines
            return mapping

    return Loader


def _place(path, mapping, key):
    """Return where a key stands, for messages: the file and, in YAML, the line."""
    return f"{path}, line {mapping.lines[key]}" if key in getattr(mapping, "lines", ()) else path


def _problem_in_yaml(text, error):
    """Return where a text is no YAML, and why, in one line."""
    mark, context = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    if mark is None:  # a character that YAML does not have
        line, column = text.count("\n", 0, error.position) + 1, error.position - text.rfind("\n", 0, error.position)
        return f"line {line}, column {column}: the character {chr(error.character)!r} is not allowed"
    # What is not closed shows later only, at the next key or at the end.
    within = f"{error.context} from line {context.line + 1} on, " if context and context.line < mark.line else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {within}{error.problem}"


def _read_datasets(file, path, value, kinds):
    """Return the settings of several datasets, each with all of `DATASET_FLAGS`."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value) or not value:
        raise RefusedError(f"{path}: datasets must be a list of settings with a dataset_path each.")
    datasets = []
    for number, item in enumerate(value, 1):
        dataset = dict.fromkeys(DATASET_FLAGS) | {"dataset_repeat": 1}
        for key, text in item.items():
            where = f"{_place(file, item, key)}: dataset {number}"
            if key not in DATASET_FLAGS:
                raise RefusedError(f"{where}: unknown key {key!r}; the nearest is {_nearest(key, DATASET_FLAGS)}.")
            if text is not None:
                dataset[key] = _convert_in(where, key, kinds, text)
        if dataset["dataset_path"] is None:
            raise RefusedError(f"{path}: dataset {number} has no dataset_path.")
        datasets.append(dataset)
    return datasets


def _read_bucket_config(file, path, value):
    """Return the sizes as written -> number of frames (`str`, as JSON has it) -> [share, batch size]."""
    shape = "bucket_config must map sizes to frames to [share, batch size], such as 480p: {1: [1.0, 8], 81: [0.5, 1]}"
    if not isinstance(value, dict) or not value:
        raise RefusedError(f"{path}: {shape}.")
    buckets = {}
    for size, lengths in value.items():
        path = _place(file, value, size)
        try:
            bucket_pixels(size)
        except ValueError:
            raise RefusedError(
                f"{path}: bucket_config: {size!r} is no size; allowed are the side of a square such as 512px, lines "
                f"of 16:9 such as {', '.join(LINES)}, or one size as WIDTHxHEIGHT such as 832x480."
            ) from None
        if not isinstance(lengths, dict) or not lengths:
            raise RefusedError(f"{path}: {shape}; {size} has {lengths!r}.")
        buckets[size] = {}
        for num_frames, entry in lengths.items():
            path = _place(file, lengths, num_frames)
            try:
                share, batch_size = entry
                parsed = [_fraction(share), _positive_int(batch_size)]
                if _positive_int(num_frames) != round_down_frames(int(num_frames)) or not parsed[0]:
                    raise ValueError
                if str(int(num_frames)) in buckets[size]:
                    raise ValueError
            except (ValueError, TypeError):
                raise RefusedError(
                    f"{path}: bucket_config: {size} has {num_frames}: {entry!r}; allowed are frames 4n + 1 and "
                    "[share above 0 to 1, batch size of at least 1]."
                ) from None
            buckets[size][str(int(num_frames))] = parsed
    return buckets


# As Open-Sora has them.


def _as_list(value):
    return value if isinstance(value, list) else [value]


def _convert_in(path, key, kinds, value):
    if not isinstance(value, str):
        raise RefusedError(f"{path}: {key} takes one value, not {type(value).__name__}.")
    try:
        return _convert(key, kinds[key], value)
    except RefusedError as error:
        raise RefusedError(f"{path}: {error}") from None


def parse_args(argv, *, description, values, resolve=True):
    """Parse and check a command line and the config files that it names.

    Args:
        argv (`list[str]`):
            The command line without the program.
        description (`str`):
            Shown by `--help`.
        values (`dict[str, Any]`):
            What differs between model families: the `flags` that not all have, the defaults of
            `resolve_for_model` (or what the help text is to say of them), `timestep_sampling`, and the descriptions
            `sigma_shift` and `dropped_caption`.
        resolve (`bool`):
            False where defaults depend on the model, not only on the family; then `resolve_for_model` is to be
            called as soon as the configs of the model are read.

    Returns:
        `argparse.Namespace`: Every flag with its final value.

    Raises:
        RefusedError: A flag is unknown, missing, out of range, contradicts another, or can have no effect.
    """
    specs = {name: (kind, default) for _, name, kind, default, _ in _specs(values)}
    kinds = {name: kind for name, (kind, _) in specs.items()}
    _check_names(argv, [name for name, kind in kinds.items() if kind is SWITCH], list(specs))
    flags = vars(_build_parser(description, values).parse_args(argv))
    for name, value in flags.items():
        if isinstance(value, str):
            flags[name] = _convert(name, kinds[name], value)
        elif isinstance(value, list):
            flags[name] = [_convert(name, kinds[name], item) for item in value]
    given = {}
    for settings in (*(_read_config(path, kinds) for path in flags.get("config", [])), flags):
        # What comes later wins, also over what cannot stand beside it; null takes back.
        replaced = {other for name in settings if settings[name] is not None for other in _instead_of(name)}
        given = {name: value for name, value in given.items() if name not in replaced} | settings
        given = {name: value for name, value in given.items() if value is not None}

    several = "datasets" in given
    missing = [
        f"--{name}"
        for name, (_, default) in specs.items()
        if default is REQUIRED and name not in given and not (several and name in DATASET_FLAGS)
    ]
    if missing:
        raise RefusedError(f"Required and not given: {', '.join(missing)}.")
    args = argparse.Namespace(**{name: given.get(name, default) for name, (_, default) in specs.items()})
    for name in CONFIG_ONLY:
        setattr(args, name, given.get(name))
    _refuse_without_effect(args, given)
    _resolve(args)
    if args.max_train_steps is not None:
        check_length(args, args.max_train_steps)
    if resolve:
        resolve_for_model(args, values)
    return args


def _instead_of(name):
    """Yield the settings that cannot stand beside the setting `name`."""
    yield from _EXCLUSIVE.get(name, ())
    yield from (one for one, others in _EXCLUSIVE.items() if name in others)


def _refuse_without_effect(args, given):
    """Raise for combinations of flags of which one would be ignored."""
    if args.training_mode == "full":
        for name in given:
            if name.startswith("lora_"):
                raise RefusedError(f"--{name} has no effect with --training_mode full. Remove one of the two.")
    if ("height" in given) != ("width" in given):
        raise RefusedError("Give --height and --width together, or none of them.")
    if args.memory_budget is not None:
        for name in _MANUAL_MEMORY_FLAGS:
            if getattr(args, name):
                raise RefusedError(f"--memory_budget decides by itself what --{name} sets; remove one of the two.")
    for name, others in _EXCLUSIVE.items():
        both = [f"--{other}" for other in others if given.get(other, False) is not False]
        if name in given and both:
            instead = f"{name} in a config file" if name in CONFIG_ONLY else f"--{name}"
            raise RefusedError(f"Give {' and '.join(both)}, or {instead}, not both.")
    if "aspect_buckets" in given and not _has_cap(args):
        raise RefusedError(
            "--aspect_buckets has no effect without a cap on pixels: --max_pixels, or sizes such as 480p or 512px in "
            "bucket_config."
        )
    if args.lr_warmup_steps and args.lr_scheduler == "constant":
        raise RefusedError(
            "--lr_warmup_steps has no effect with --lr_scheduler constant; use constant_with_warmup, or 0 steps."
        )
    if args.lr_scheduler == "constant_with_warmup" and not args.lr_warmup_steps:
        raise RefusedError("--lr_scheduler constant_with_warmup needs --lr_warmup_steps; without a warm-up: constant.")
    for name, scheduler, void, needed in (
        ("lr_num_cycles", "cosine_with_restarts", 1, "of 2 or more; one cycle is --lr_scheduler cosine"),
        ("lr_power", "polynomial", 1.0, "other than 1, as that is --lr_scheduler linear"),
    ):
        value = getattr(args, name)
        if args.lr_scheduler == scheduler and value in (None, void):
            raise RefusedError(f"--lr_scheduler {scheduler} needs --{name} {needed}.")
        if args.lr_scheduler != scheduler and value is not None:
            raise RefusedError(f"--{name} has no effect with --lr_scheduler {args.lr_scheduler}, only {scheduler}.")
    for name, *needed in _NEEDS:
        if given.get(name, False) is not False and not any(getattr(args, flag) for flag in needed):
            raise RefusedError(f"--{name} has no effect without {' or '.join(f'--{flag}' for flag in needed)}.")
    if given.get("guidance_scale", 2.0) <= 1 and "negative_prompt" in given:
        raise RefusedError("--negative_prompt has no effect with a --guidance_scale of 1 or less.")
    if args.min_sigma >= args.max_sigma:
        raise RefusedError(f"--min_sigma {args.min_sigma} must be below --max_sigma {args.max_sigma}.")


def _has_cap(args):
    """Return whether items have a cap on pixels instead of one size."""
    return args.max_pixels is not None or any(bucket_pixels(size)[1] is None for size in args.bucket_config or ())


def _resolve(args):
    """Fill in the defaults that depend on other flags."""
    if args.aspect_buckets is DERIVED:
        args.aspect_buckets = 9 if _has_cap(args) else None
    if args.cache_dir is DERIVED:
        args.cache_dir = str(pathlib.Path(args.output_dir) / "cache")
    # What structured settings say instead is absent in `run.json`.
    for name in DATASET_FLAGS if args.datasets else ():
        setattr(args, name, None)
    for name in _SIZE_FLAGS if args.bucket_config else ():
        if name in vars(args):
            setattr(args, name, None)
    if args.training_mode == "full":
        # Not settings of this run: `run.json` shows them as absent.
        for name in [name for name in vars(args) if name.startswith("lora_")]:
            setattr(args, name, None)
    else:
        if args.lora_alpha is DERIVED:
            args.lora_alpha = float(args.lora_rank)
    if args.learning_rate is DERIVED:
        args.learning_rate = 1.0 if args.optimizer == "prodigy" else 1e-4 if args.training_mode == "lora" else 1e-5
    if args.num_train_epochs is DERIVED:
        args.num_train_epochs = None if args.max_train_steps else 1
    args.optimizer_args = dict(args.optimizer_args or [])
    args.report_to = [] if args.report_to is DERIVED else args.report_to
    if args.ema_decay is DERIVED:
        args.ema_decay = 0.999 if args.ema else None
    if args.validation_seed is DERIVED:
        args.validation_seed = args.seed if args.validation_prompt or args.validation_split else None
    if args.optimizer not in ("adamw", "adamw_8bit", "adafactor", "prodigy") and "." not in args.optimizer:
        raise RefusedError(
            f"--optimizer is {args.optimizer!r}; allowed are adamw, adamw_8bit, adafactor, prodigy, or the import "
            "path of a class."
        )
    if args.weight_decay is DERIVED:
        args.weight_decay = None if "." in args.optimizer else 0.01


def check_length(args, num_steps, *, num_stages=1, num_samples=None):
    """Check the numbers that mean something only beside the length of the run, and say which have little effect.

    Args:
        args (`argparse.Namespace`): From `parse_args`.
        num_steps (`int`): Optimizer steps over which the learning rate has its schedule.
        num_stages (`int`): How often the run makes them, each time with another transformer.
        num_samples (`int`, *optional*): That are trained in them; without it nothing is said.

    Raises:
        RefusedError: The learning rate would never be reached, or never fall.
    """
    warmup, cycles, decay = args.lr_warmup_steps, args.lr_num_cycles, args.ema_decay
    of_run, falling = f"of the run's {num_steps} optimizer steps", num_steps - warmup
    if falling <= 0:
        raise RefusedError(
            f"--lr_warmup_steps {warmup} {of_run}: the rate would rise to {(num_steps - 1) / warmup:.2%} of "
            f"--learning_rate and never reach it; allowed are 0 to {num_steps - 1}."
        )
    if cycles is not None and cycles >= falling:
        raise RefusedError(
            f"--lr_num_cycles {cycles} in the {falling} steps after the warm-up: the rate cannot fall in a cycle of "
            "one step or less; give fewer cycles, or more steps."
        )
    if num_samples is None:
        return

    notes = []
    if cycles is not None and 2 * cycles > falling:
        notes.append(f"--lr_num_cycles {cycles}: a cycle has {falling / cycles:.3g} steps")
    if falling == 1 and not args.lr_scheduler.startswith("constant"):
        notes.append(f"--lr_scheduler {args.lr_scheduler} has 1 {of_run} to fall in, and does not")
    highest = num_steps / (9 + num_steps) if num_steps > 1 else 0.0
    if args.ema and decay == 0:
        notes.append("--ema_decay 0: the average is always the weights of the last step")
    elif args.ema and highest < decay:
        notes.append(f"--ema_decay {decay} {of_run}: the decay rises to {highest:.4g} only")
    if args.max_skipped_steps >= num_steps:
        notes.append(f"--max_skipped_steps {args.max_skipped_steps} {of_run}: all of them may be left out")
    if 0 < args.caption_dropout * num_samples < 1:
        dropped = f"{args.caption_dropout * num_samples:.2g}"
        notes.append(f"--caption_dropout {args.caption_dropout} of {num_samples} samples: {dropped} on average")
    defaults = {name: default for flags in FLAGS.values() for name, _, default in flags}
    for name, comes in (
        ("checkpointing_steps", "no checkpoint is due"),
        ("validation_steps", "previews and the loss of what is held out come after the last one only"),
        ("logging_steps", "metrics are written after the last one only"),
    ):
        value = getattr(args, name)
        if value != defaults[name] and value > num_stages * num_steps:
            notes.append(f"--{name} {value} of the run's {num_stages * num_steps} optimizer steps: {comes}")
    for note in notes:
        logger.warning(note)


def resolve_for_model(args, values):
    """Fill in the defaults that depend on the model, and check what it allows.

    Args:
        args (`argparse.Namespace`): From `parse_args`; changed in place.
        values (`dict[str, Any]`):
            `divisor` of sizes, the defaults `height`, `width`, `lora_target_modules` (names, with commas),
            `negative_prompt`, `guidance_scale` and `num_inference_steps`; for video the defaults `num_frames` and
            `fps`, and what can be chosen from: `tasks` and `experts`.

    Raises:
        RefusedError: A size is not a multiple of the divisor, or a choice is missing, not offered or without effect.
    """
    divisor = values["divisor"]
    for name in ("negative_prompt", "guidance_scale", "num_inference_steps"):
        if getattr(args, name) is DERIVED:
            setattr(args, name, values[name] if args.validation_prompt else None)
    if args.validation_prompt and args.guidance_scale <= 1:
        args.negative_prompt = None
    if args.lora_target_modules is DERIVED:
        args.lora_target_modules = _names(values["lora_target_modules"])
    for name in ("height", "width"):
        if getattr(args, name) is DERIVED:
            setattr(args, name, None if args.max_pixels else values[name])
        _check_side(f"--{name}", getattr(args, name), divisor)
    _check_cap("--max_pixels", args.max_pixels, divisor)
    is_video = "num_frames" in vars(args)
    for size, lengths in (args.bucket_config or {}).items():
        pixels, sides = bucket_pixels(size)
        _check_cap(f"bucket_config: {size}", pixels, divisor)
        for side in sides or ():
            _check_side(f"bucket_config: a side of {size}", side, divisor)
        if not is_video and set(lengths) != {"1"}:
            raise RefusedError(f"bucket_config: {size} has {', '.join(lengths)} frames; allowed for pictures is 1.")
    if not is_video:
        return

    for name in ("num_frames", "fps"):
        if getattr(args, name) is DERIVED:
            setattr(args, name, values[name])
    num_frames = args.num_frames and round_down_frames(args.num_frames)
    if num_frames != args.num_frames:
        logger.warning(
            "--num_frames %d is rounded down to %d: the VAE takes 4n + 1 frames.", args.num_frames, num_frames
        )
        args.num_frames = num_frames
    _check_choice(args, "task", values["tasks"])
    if args.validation_prompt:
        wanted = {"t2v": 0, "i2v": 1, "flf2v": 2}[args.task or values["tasks"][0]]
        held = len(args.validation_image or ())
        if held != wanted:
            raise RefusedError(f"--validation_image is given {held} times; previews of this model take {wanted}.")
    both = ("both",) if args.training_mode == "lora" else ()
    _check_choice(args, "expert", (*values["experts"], *both) if values["experts"] else ())
    if args.expert == "both" and args.transformer_path is not None:
        raise RefusedError("--transformer_path names one transformer, and --expert both trains two; give one expert.")


def _check_side(name, size, divisor):
    if size is not None and size % divisor:
        below = size // divisor * divisor
        legal = [n for n in (below, below + divisor) if n]
        raise RefusedError(
            f"{name} is {size}; allowed are multiples of {divisor}, such as {' or '.join(map(str, legal))}."
        )


def _check_cap(name, pixels, divisor):
    if pixels is not None and pixels < divisor**2:
        raise RefusedError(f"{name} is {pixels}; allowed is at least {divisor**2}.")


def _check_choice(args, name, allowed):
    """Raise unless a flag is given exactly where the model offers a choice, and is one of those `allowed`."""
    value = getattr(args, name)
    listed = ", ".join(allowed)
    if len(allowed) < 2:
        if value is not None:
            raise RefusedError(f"--{name} {value} has no effect: this model offers {listed or 'none'}. Remove it.")
    elif value is None:
        raise RefusedError(f"--{name} is required for this model; allowed are {listed}.")
    elif value not in allowed:
        raise RefusedError(f"--{name} is {value}; allowed with --training_mode {args.training_mode} are {listed}.")
