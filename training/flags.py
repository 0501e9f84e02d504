"""Every flag of the training scripts, one row each; nothing else knows a default, a unit or what contradicts what.

Needs the standard library only: the scripts parse before they import torch, so that a typo costs nothing.
"""

import ast
import collections.abc
import dataclasses
import difflib
import math
import os
import pathlib
import re

from dataset.settings import DATASET_FLAGS, bucket_pixels
from runtime.errors import RefusedError


# ---------------------------------------------------------------- kinds of values


@dataclasses.dataclass(frozen=True)
class Kind:
    """The values that a flag can have.

    Args:
        convert (`Callable[[str], object]`): From the text of a value to the value; raises `ValueError`.
        allowed (`str`): The allowed values, in words.
        unit (`str`): What `--help` shows for a value.
        choices (`tuple[str]`): The allowed values, if they are words.
        is_list (`bool`): Whether a value has comma-separated parts, in a config file a list.
        is_repeatable (`bool`): Whether there can be several values, in a config file a list.
    """

    convert: collections.abc.Callable
    allowed: str
    unit: str = "X"
    choices: tuple = ()
    is_list: bool = False
    is_repeatable: bool = False


def _check(value, is_allowed=bool):
    """Return a value, or raise `ValueError` if it is not allowed."""
    if not is_allowed(value):
        raise ValueError
    return value


def _number(kind, is_allowed, allowed):  # nan is never allowed
    return Kind(lambda text: _check(kind(text), is_allowed), allowed, "N" if kind is int else "X")


def _choice(*choices):
    return Kind(lambda text: choices[choices.index(text)], f"one of {', '.join(choices)}", "|".join(choices), choices)


def _names(text):
    return _check([name.strip() for name in text.split(",")], all)


def _counts(text):
    return _check([NATURAL.convert(item) for item in text.split(",")], any)


def _trackers(text):
    names = [] if text == "none" else _names(text)
    return _check(list(dict.fromkeys(names)), {"tensorboard", "wandb", "trackio"}.issuperset)


def _num_bytes(text):
    number, prefix, is_binary = _check(re.fullmatch(r"(.+?)\s*(?:([KMGT])(i?))?B", text)).groups()
    return int(NON_NEGATIVE.convert(number) * (1024 if is_binary else 1000) ** (" KMGT".index(prefix or " ")))


def _key_value(text):
    key, value = text.split("=", 1)
    return _check(key, str.isidentifier), literal(value)


def literal(value):
    """Return the Python value of a text, or of a list of texts; true and false as in YAML."""
    if isinstance(value, list):
        return tuple(map(literal, value))
    try:
        return value == "true" if value in ("true", "false") else ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError):
        return value


def _optimizer(text):
    return _check(text, lambda name: name in ("adamw", "adamw_8bit", "adafactor", "prodigy") or "." in name)


def _switch(text):
    on, off = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
    return (on + off).index(text.lower()) < len(on)


COUNT = _number(int, lambda value: value >= 1, "a whole number of at least 1")
STEPS, PIXELS, FRAMES = (dataclasses.replace(COUNT, unit=unit) for unit in ("STEPS", "PIXELS", "FRAMES"))
SEVERAL = _number(int, lambda value: value >= 2, "a whole number of at least 2")
NATURAL = _number(int, lambda value: value >= 0, "a whole number of at least 0")
SEED = _number(int, lambda value: 0 <= value < 2**63, "a whole number from 0 to below 2**63")
POSITIVE = _number(float, lambda value: 0 < value < math.inf, "a finite number above 0")
NOT_LINEAR = _number(float, lambda value: 0 < value < math.inf and value != 1, "a finite number above 0 other than 1")
NON_NEGATIVE = _number(float, lambda value: 0 <= value < math.inf, "a finite number of at least 0")
FRACTION = _number(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
SHARE = _number(float, lambda value: 0 < value <= 1, "a number above 0 to 1")
BELOW_ONE = _number(float, lambda value: 0 <= value < 1, "a number from 0 to below 1")
COUNTS = Kind(_counts, "comma-separated whole numbers, not all 0", "N,M", is_list=True)
SIZE = Kind(_num_bytes, "a size with its unit, such as 24GiB or 512MB", "SIZE")
BUDGET = Kind(lambda text: text if text == "auto" else _num_bytes(text), f"auto, or {SIZE.allowed}", "SIZE|auto")
NAMES = Kind(_names, "comma-separated names", "NAME,NAME", is_list=True)
TRACKERS = Kind(_trackers, "tensorboard, wandb, trackio (comma-separated), or none", "NAME,NAME|none", is_list=True)
SCHEDULER = _choice("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")
KEY_VALUE = Kind(_key_value, "key=value", "KEY=VALUE", is_repeatable=True)
OPTIMIZER = Kind(_optimizer, "adamw, adamw_8bit, adafactor, prodigy, or the import path of a class", "NAME")
TEXT, PATH = Kind(str, "text", "TEXT"), Kind(os.path.expanduser, "text", "PATH")
TEXTS, PATHS = (dataclasses.replace(kind, is_repeatable=True) for kind in (TEXT, PATH))
SWITCH = Kind(_switch, "true or false", "")
STRUCTURE = Kind(None, "")  # for config files only

REQUIRED = object()
BY_MODEL = object()  # `resolve_for_model` fills it in

# A resumed run cannot change what is fixed: it would be another run. The model card shows what is fixed or shown. What
# concerns only this start of a run is not read from a `run.json`.
FIXED, SHOWN, FREE, START = "fixed", "shown", "free", "start"


# ---------------------------------------------------------------- rows


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag, or one setting that only config files have, and all that is true of it.

    Args:
        name (`str`), kind (`Kind`)
        default: A value, a function of the other flags, `BY_MODEL` or `REQUIRED`.
        change (`str`): `FIXED`, `SHOWN`, `FREE` or `START`.
        text (`str`): For `--help`; the values of the family fill in `{names}`.
        proof (`str`): The test that shows its effect; there may be more.
        elsewhere (`str`): What other trainers call it, or what serves its purpose there.
        needs (`str`): Other flags, or name=value. Without one of them: no effect, no default, not required.
        excludes (`str`): Other flags that cannot be given together with it, and then have no default.
        is_optional (`bool`): Whether only those families have it that name it in their values under "flags".
    """

    name: str
    kind: Kind
    default: object
    change: str
    text: str
    proof: str
    elsewhere: str = ""
    needs: str = ""
    excludes: str = ""
    is_optional: bool = False

    @property
    def label(self):
        """The name as a user writes it."""
        return self.name if self.kind is STRUCTURE else f"--{self.name}"

    def read(self, value, where=""):
        """Return the value of the flag from its text, or from the texts, list or mapping in a config file.

        Raises:
            RefusedError: It is not allowed; the message begins with `where`.
        """
        if self.kind is KEY_VALUE and isinstance(value, dict):
            return [(name, literal(item)) for name, item in value.items()]
        if self.kind.is_list and isinstance(value, list):
            value = ",".join(map(str, value))
        items = value if self.kind.is_repeatable and isinstance(value, list) else [value]
        try:
            values = [self.kind.convert(_check(item, lambda value: isinstance(value, str))) for item in items]
        except (ValueError, OverflowError):
            raise RefusedError(f"{where}--{self.name} is {value!r}; allowed is {self.kind.allowed}.") from None
        return values if self.kind.is_repeatable else values[0]


def has_cap(args):
    """Return whether items have a cap on pixels instead of one size."""
    return args.max_pixels is not None or any(bucket_pixels(size)[1] is None for size in args.bucket_config or ())


def _learning_rate(args):
    return 1.0 if args.optimizer == "prodigy" else 1e-4 if args.training_mode == "lora" else 1e-5


_LORA = "training_mode=lora"
_CHECKPOINTING = "use_gradient_checkpointing use_gradient_checkpointing_offload"
_PREVIEWS_OR_LOSS = "validation_prompt validation_split"

# The titles of --help, each followed by its flags. What a row does not say is not true of the flag. A resume compares
# the product of batch size and accumulation, which may change, and the items, so that what only finds them may change.
# fmt: off
FLAGS = (
    "model",
    Flag("pretrained_model_name_or_path", PATH, REQUIRED, FREE, "Hub id or folder of a diffusers pipeline.",
         "test_variant", "model_paths model_id_with_origin_paths dit ckpt_path name_or_path model_name model_id"),
    Flag("revision", TEXT, None, SHOWN, "Git revision on the hub. Default: its main branch.", "test_revision"),
    Flag("variant", TEXT, None, SHOWN, "Variant of the files of weights, such as bf16.", "test_variant"),
    Flag("transformer_path", PATH, None, SHOWN, "Folder or safetensors file that replaces the pipeline's transformer.",
         "test_full_result_can_be_trained_on", "dit unet_path"),
    Flag("training_mode", _choice("lora", "full"), "lora", FIXED, "Train a LoRA, or all weights.",
         "test_full_result_can_be_trained_on", "lora_base_model trainable_models remove_prefix_in_ckpt"),
    Flag("seed", SEED, 42, FIXED, "Seed of all draws.", "test_flags_reach_the_clips", "global_seed manual_seed"),
    Flag("deterministic", SWITCH, False, FREE, "Deterministic kernels on CUDA; slower. A CPU is always deterministic.",
         "test_deterministic", "use_deterministic_algorithms"),
    "LoRA",
    Flag("lora_rank", COUNT, 32, FIXED, "Rank of the adapters.",
         "test_files_of_a_lora_run", "network_dim rank lora_r lora_dim linear", needs=_LORA),
    Flag("lora_alpha", POSITIVE, lambda args: float(args.lora_rank), FIXED, "Strength times rank. Default: the rank.",
         "test_strength_rate_dropout_and_dtype", "network_alpha linear_alpha alpha", needs=_LORA),
    Flag("lora_dropout", BELOW_ONE, 0.0, FIXED, "Dropout before each adapter. 0 is off.",
         "test_strength_rate_dropout_and_dtype", "network_dropout", needs=_LORA),
    Flag("lora_target_modules", NAMES, BY_MODEL, FIXED, "Names of linear layers; the end of a full name is enough.",
         "test_image_keys_need_not_be_adapted", "target_modules lora_layers network_args", needs=_LORA),
    Flag("lora_init_path", PATH, None, SHOWN, "LoRA file, or folder with one, to start from.",
         "test_a_run_starts_from_the_lora_of_its_expert", "network_weights lora_checkpoint", needs=_LORA),
    Flag("lora_dtype", _choice("bf16", "fp32"), "bf16", SHOWN, "Dtype of the saved file; training is in fp32.",
         "test_strength_rate_dropout_and_dtype", "save_precision save_dtype", needs=_LORA),
    "data",
    Flag("dataset_path", PATH, REQUIRED, FREE, "Folder, or hub id of a Hugging Face dataset.",
         "test_refused_before_models_load", "dataset_base_path dataset_name train_data_dir instance_data_dir"),
    Flag("dataset_metadata", PATH, None, FREE, "Metadata file. Default: that in the folder, else sidecar .txt files.",
         "test_given_metadata_must_exist_and_be_a_table", "dataset_metadata_path metadata_path"),
    Flag("media_column", TEXT, None, FREE, "Column with the images or clips. Default: found by its usual names.",
         "test_flags_decide_between_columns_and_the_rest_is_listed", "image_column video_column data_file_keys"),
    Flag("caption_column", TEXT, None, FREE, "Column with the captions. Default: found by its usual names.",
         "test_flags_decide_between_columns_and_the_rest_is_listed"),
    Flag("height", PIXELS, BY_MODEL, FIXED, "Height, a multiple of {divisor}.",
         "test_refused_before_models_load", "resolution"),
    Flag("width", PIXELS, BY_MODEL, FIXED, "Width, a multiple of {divisor}.",
         "test_refused_before_models_load", "resolution"),
    Flag("max_pixels", PIXELS, None, FIXED, "Instead of one size: at most this many pixels, each item in its "
         "own shape.", "test_sizes_under_a_cap", "resolution resolutions", excludes="height width"),
    Flag("aspect_buckets", NATURAL, lambda args: 9 if has_cap(args) else None, FIXED, "Shapes from 1:2 to 2:1 under a "
         "cap on pixels; each item is cropped to the nearest. 0: each keeps its own. Default: 9.",
         "test_ordinary_photographs_share_shapes", "enable_bucket num_ar_buckets ar_buckets"),
    Flag("num_frames", FRAMES, BY_MODEL, FIXED, "Frames of a clip, 4n + 1, if it has as many.",
         "test_frame_counts", "frames target_frames max_num_frames frame_buckets", is_optional=True),
    Flag("fps", POSITIVE, BY_MODEL, FIXED, "Frames per second of the clips that are trained.",
         "test_flags_reach_the_clips", "target_fps", is_optional=True),
    Flag("clip_part", _choice("start", "middle", "random"), "start", FIXED, "Part of a longer clip that is used; "
         "random: drawn once, by the seed.", "test_flags_reach_the_clips", "frame_extraction", is_optional=True),
    Flag("task", _choice("t2v", "i2v"), None, FIXED, "Text or image to video. Required where a model does both: "
         "{tasks}.", "test_refused_before_models_load", is_optional=True),
    Flag("train_batch_size", COUNT, 1, SHOWN, "Samples per process and micro-batch.",
         "test_update_is_that_of_the_mean_over_the_global_batch", "batch_size micro_batch_size_per_gpu"),
    Flag("dataset_repeat", COUNT, 1, SHOWN, "How often each item occurs in one epoch.",
         "test_several_datasets_with_repeats", "repeats num_repeats"),
    Flag("dataloader_num_workers", NATURAL, 1, FREE, "Threads per process that load batches ahead. 0: none.",
         "test_loaders_change_nothing_but_the_time", "max_data_loader_n_workers num_workers"),
    Flag("caption_dropout", FRACTION, 0.0, FIXED, "Share of samples trained with {dropped_caption}. 0 is off.",
         "test_dropped_captions_change_nothing_else", "caption_dropout_rate proportion_empty_prompts"),
    Flag("on_bad_sample", _choice("error", "skip"), "error", FREE, "Items that cannot be used: list them and stop, or "
         "train on the rest.", "test_skip_trains_on_the_rest"),
    Flag("allow_missing_captions", SWITCH, False, FREE, "Train items without a caption with an empty caption.",
         "test_missing_and_empty_captions_are_counted"),
    Flag("cache_dir", PATH, lambda args: str(pathlib.Path(args.output_dir) / "cache"), FREE,
         "Folder for encoded captions and media, which runs can share. Default: cache in the output_dir.",
         "test_what_changes_is_encoded_again", "cache_latents cache_latents_to_disk cache_text_encoder_outputs"),
    "memory",
    Flag("use_gradient_checkpointing", SWITCH, False, FREE, "Recompute each block in the backward pass.",
         "test_memory_of_the_modes_is_ordered", "gradient_checkpointing activation_checkpointing grad_checkpoint"),
    Flag("use_gradient_checkpointing_offload", SWITCH, False, FREE, "Recompute, with the blocks' inputs on the host. "
         "Implies --use_gradient_checkpointing.", "test_same_bytes_when_the_inputs_are_really_parked",
         "gradient_checkpointing_cpu_offload blocks_to_swap"),
    Flag("checkpoint_blocks", COUNTS, None, FREE, "Only the first N blocks, or N and M of two lists. Default: all.",
         "test_same_bytes_again_and_in_every_memory_mode", needs=_CHECKPOINTING),
    Flag("offload_buffer_size", SIZE, None, FREE, "Host memory per process for the inputs of offloaded blocks; when "
         "it is full, activations stay on the device. Default: as planned.",
         "test_a_full_buffer_changes_nothing", needs="use_gradient_checkpointing_offload"),
    Flag("memory_budget", BUDGET, None, FREE, "The fastest plan in this device memory, or in what is free (auto).",
         "test_a_budget_makes_the_plan", "blocks_to_swap low_vram enable_model_cpu_offload",
         excludes=f"{_CHECKPOINTING} checkpoint_blocks offload_buffer_size"),
    Flag("dry_run", SWITCH, False, START, "Only forecast, from configs alone, what the run will need, and check that "
         "it fits.", "test_the_size_of_the_cache_is_known_exactly_and_a_dry_run_adds_nothing"),
    "training",
    Flag("max_train_steps", STEPS, None, FREE, "Optimizer steps. Default: as many as the epochs need.",
         "test_checkpoints_total_limit", "steps train_steps max_steps num_steps", excludes="num_train_epochs"),
    Flag("num_train_epochs", COUNT, 1, FREE, "Passes over the dataset, instead of steps.",
         "test_epochs_become_optimizer_steps", "num_epochs epochs max_train_epochs"),
    Flag("gradient_accumulation_steps", COUNT, 1, SHOWN, "Micro-batches per optimizer step.",
         "test_update_is_that_of_the_mean_over_the_global_batch", "gradient_accumulation accumulation_steps"),
    Flag("learning_rate", POSITIVE, _learning_rate, FIXED, "Learning rate. Default: 1e-4 for LoRA, 1e-5 for full, 1.0 "
         "with prodigy.", "test_strength_rate_dropout_and_dtype", "lr unet_lr"),
    Flag("lr_scheduler", SCHEDULER, "constant", FIXED, "Schedule of the learning rate, over optimizer steps.",
         "test_two_processes_equal_one_with_twice_the_batch", "lr_scheduler_type"),
    Flag("lr_warmup_steps", NATURAL, 0, FIXED, "Optimizer steps over which the rate rises from 0. 0 is off.",
         "test_a_run_again_from_its_run_json", "warmup_steps"),
    Flag("lr_num_cycles", SEVERAL, REQUIRED, FIXED, "How often the rate falls, for cosine_with_restarts only.",
         "test_numbers_that_the_length_of_the_run_makes_void", needs="lr_scheduler=cosine_with_restarts"),
    Flag("lr_power", NOT_LINEAR, REQUIRED, FIXED, "Power of the fall, for polynomial only; 1 would be linear.",
         "test_refused", "lr_scheduler_power", needs="lr_scheduler=polynomial"),
    Flag("optimizer", OPTIMIZER, "adamw", FIXED, "adamw, adamw_8bit, adafactor, prodigy, or the import path of a "
         "class, such as torch.optim.SGD.", "test_learning_rate_reaches_every_optimizer", "use_8bit_adam"),
    Flag("optimizer_args", KEY_VALUE, lambda args: {}, FIXED, "Further arguments of the optimizer. Default: none.",
         "test_kinds_of_optimizer_args", "adam_beta1 adam_beta2 adam_epsilon betas"),
    Flag("weight_decay", NON_NEGATIVE, lambda args: None if "." in args.optimizer else 0.01, FIXED,
         "Weight decay. 0 is off. Default: 0.01; with the import path of an optimizer, the default of that class.",
         "test_learning_rate_reaches_every_optimizer", "adam_weight_decay"),
    Flag("max_grad_norm", NON_NEGATIVE, 1.0, FIXED, "Norm to which gradients are clipped. 0 is off.",
         "test_clipping", "gradient_clipping grad_clip clip_grad_norm"),
    Flag("mixed_precision", _choice("no", "bf16"), "bf16", FIXED, "Dtype of base weights and computation; no: fp32.",
         "test_in_bf16_the_transformer_gets_what_the_stock_pipeline_gives_it", "dtype precision"),
    Flag("timestep_sampling", _choice("uniform", "logit_normal"), "{timestep_sampling}", FIXED, "Law of sigma before "
         "the shift.", "test_sigmas_follow_the_flags", "weighting_scheme flow_weighting_scheme"),
    Flag("sigma_shift", POSITIVE, None, FIXED, "Shifts sigmas towards noise. 1 is off. Default: {sigma_shift}.",
         "test_each_expert_is_trained_on_its_own_side", "discrete_flow_shift flow_shift shift"),
    Flag("expert", _choice("high_noise", "low_noise", "both"), None, FIXED, "Which one to train, or both. Required "
         "where a model has two: {experts}.", "test_both_experts_in_one_run_equal_two_runs", is_optional=True),
    Flag("min_sigma", FRACTION, 0.0, FIXED, "Lower end of the sigmas, from 0 to 1. 0 is off.",
         "test_sigmas_follow_the_flags", "min_timestep min_timestep_boundary"),
    Flag("max_sigma", FRACTION, 1.0, FIXED, "Upper end of the sigmas, from 0 to 1. 1 is off.",
         "test_sigmas_follow_the_flags", "max_timestep max_timestep_boundary"),
    Flag("loss_weighting", _choice("none", "sigma_sqrt", "cosmap"), "none", FIXED, "Weight of each sample's loss by "
         "its sigma, as in diffusers' compute_loss_weighting_for_sd3.", "test_loss_weighting", "weighting_scheme"),
    Flag("ema", SWITCH, False, FIXED, "Average the trained weights in fp32; the average is exported and previewed.",
         "test_last_preview_is_what_the_stock_pipeline_samples", "use_ema"),
    Flag("ema_decay", BELOW_ONE, 0.999, FIXED, "Weight of the old average at step n, at most (1 + n) / (10 + n).",
         "test_last_preview_is_what_the_stock_pipeline_samples", needs="ema"),
    Flag("offload_ema", SWITCH, False, FREE, "Keep the average in host memory: 4 bytes per weight; slows each step.",
         "test_training_is_the_same_with_and_without", needs="ema"),
    Flag("max_skipped_steps", NATURAL, 0, FREE, "Steps in a row that may fail: loss or gradient is not finite.",
         "test_a_step_whose_loss_is_not_finite_is_left_out"),
    "saving",
    Flag("output_dir", PATH, REQUIRED, FREE, "Folder for everything that the run leaves.",
         "test_folder_that_cannot_be_written_is_refused", "output_path output_name training_folder outputs"),
    Flag("checkpointing_steps", STEPS, None, FREE, "Optimizer steps between two checkpoints. Default: off.",
         "test_checkpoints_total_limit", "save_every_n_steps save_every_n_epochs save_steps save_every ckpt_every"),
    Flag("checkpoints_total_limit", COUNT, None, FREE, "Keep only the newest N checkpoints. Default: all.",
         "test_checkpoints_total_limit", "save_last_n_steps_state save_total_limit", needs="checkpointing_steps"),
    Flag("resume_from_checkpoint", PATH, None, START, "Checkpoint folder, or latest: the newest complete one in the "
         "output_dir, or step 1 if there is none yet.", "test_resume_gives_the_same_bytes", "resume load"),
    Flag("push_to_hub", SWITCH, False, FREE, "Upload the result, its model card and the last previews to the hub.",
         "test_nothing_is_uploaded_without_the_flag"),
    Flag("hub_model_id", TEXT, None, FREE, "Repository for push_to_hub. Default: the name of the output_dir.",
         "test_repository_is_opened", "huggingface_repo_id", needs="push_to_hub"),
    "reporting",
    Flag("report_to", TRACKERS, lambda args: [], FREE, "Trackers that also get numbers and previews. Default: none.",
         "test_report_to", "log_with"),
    Flag("logging_steps", STEPS, 10, FREE, "Optimizer steps between two writes of the metrics.",
         "test_logging_steps", "log_every log_every_n_steps steps_per_print"),
    Flag("validation_prompt", TEXTS, None, FREE, "Prompt of a preview; repeatable. Default: no previews.",
         "test_files_of_previews", "sample_prompts validation_prompts"),
    Flag("validation_image", PATHS, None, FREE, "First frame of the previews; given twice: first and last.",
         "test_last_preview_is_what_the_stock_pipeline_samples", needs="validation_prompt", is_optional=True),
    Flag("validation_steps", STEPS, None, FREE, "Steps between previews or held-out losses. Default: the last only.",
         "test_files_of_previews", "sample_every_n_steps sample_every eval_every_n_steps", needs=_PREVIEWS_OR_LOSS),
    Flag("validation_split", BELOW_ONE, 0.0, FIXED, "Share of the items that are not trained, but whose loss is "
         "measured at fixed sigmas and noise. 0 is off.", "test_what_is_held_out_is_not_trained"),
    Flag("negative_prompt", TEXT, BY_MODEL, FREE, "Negative prompt of the previews. Default: "
         "{described_negative_prompt}.", "test_settings_of_previews", "neg validation_negative_prompt",
         needs="validation_prompt"),
    Flag("guidance_scale", NON_NEGATIVE, BY_MODEL, FREE, "Guidance scale of the previews; up to 1 is off.",
         "test_settings_of_previews", "cfg_scale", needs="validation_prompt"),
    Flag("num_inference_steps", STEPS, BY_MODEL, FREE, "Denoising steps of the previews.",
         "test_settings_of_previews", "sample_steps", needs="validation_prompt"),
    Flag("validation_seed", SEED, lambda args: args.seed, FREE, "Seed of previews and held-out items. Default: seed.",
         "test_validation_seed_changes_the_loss_only", needs=_PREVIEWS_OR_LOSS),
    "files",
    Flag("config", PATHS, None, START, "YAML with the keys of the flags (docs/data.md), or a run.json. Repeatable: "
         "the last wins.", "test_a_run_again_from_its_run_json", "config_file training_config dataset_config"),
    Flag("datasets", STRUCTURE, None, FREE, "Several datasets.",
         "test_several_datasets", "dataset_config data_backend_config", excludes=" ".join(DATASET_FLAGS)),
    Flag("bucket_config", STRUCTURE, None, FIXED, "Sizes, numbers of frames, shares and batch sizes.",
         "test_bucket_config", "resolutions frame_buckets",
         excludes="height width max_pixels num_frames train_batch_size"),
)
# fmt: on

ROWS = {row.name: row for row in FLAGS if isinstance(row, Flag)}


def flags_of(values):
    """Return the flags of a family by name, the family's own `values` filled in."""
    rows = {}
    for row in ROWS.values():
        if not row.is_optional or row.name in values.get("flags", ()):
            default = row.default.format(**values) if isinstance(row.default, str) else row.default
            text = row.text.format(**values)
            if default is REQUIRED:
                text += " Required there." if row.needs else " Required."
            elif not {"Default:", "Required"} & set(text.split()):
                shown = {BY_MODEL: values.get(row.name), None: "none"}.get(default, default)
                text += f" Default: {'off' if row.kind is SWITCH else shown}."
            rows[row.name] = dataclasses.replace(row, default=default, text=text)
    return rows


def suggest(name, flags, prefix="--"):
    """Return what to give instead of an unknown flag: the flags with its purpose, or the one with the nearest name.

    Args:
        name (`str`), flags (`dict[str, Flag]`)
        prefix (`str`): Put before each name.
    """
    same = [flag for flag in flags.values() if name.replace("-", "_").lower() in flag.elsewhere.split()]
    if same:
        meanings = [f"{prefix}{flag.name} ({flag.text.split('. ')[0].rstrip('.')})" for flag in same]
        return f"here it is {', '.join(meanings)}"
    return f"the nearest is {prefix}{difflib.get_close_matches(name, flags, n=1, cutoff=0)[0]}"
