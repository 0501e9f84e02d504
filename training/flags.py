"""Every flag of the training scripts, one row each; nothing else knows a default, a unit or what contradicts what.

Needs the standard library only: the scripts parse before they import torch, so that a typo costs nothing.
"""

import ast
import collections.abc
import dataclasses
import difflib
import math
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
    """

    convert: collections.abc.Callable
    allowed: str
    unit: str = "X"
    choices: tuple = ()
    is_list: bool = False


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


POSITIVE_INT = _number(int, lambda value: value >= 1, "a whole number of at least 1")
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
KEY_VALUE = Kind(_key_value, "key=value", "KEY=VALUE")
OPTIMIZER = Kind(_optimizer, "adamw, adamw_8bit, adafactor, prodigy, or the import path of a class", "NAME")
TEXT = Kind(str, "text", "TEXT")
PATH = Kind(str, "text", "PATH")
SWITCH = Kind(_switch, "true or false", "")
STRUCTURE = Kind(None, "")  # for config files only

REQUIRED = object()
BY_MODEL = object()  # `resolve_for_model` fills it in


# ---------------------------------------------------------------- rows


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag, or one setting that only config files have, and all that is true of it.

    Args:
        name (`str`), kind (`Kind`)
        default: A value, a function of the other flags, `BY_MODEL` or `REQUIRED`.
        text (`str`): For `--help`; the values of the family fill in `{names}`.
        unit (`str`): Shown by `--help`, if not that of the kind.
        needs (`str`): Other flags, or name=value. Without one of them: no effect, no default, not required.
        excludes (`str`): Other flags that cannot be given together with it, and then have no default.
        may_change (`bool`): Whether a resumed run may have another value. Any other change would make it another run.
        in_card (`bool`): Whether the model card shows it although it may change. It shows all that may not.
        is_of_start (`bool`): Whether it concerns only this start of a run, so that reading a `run.json` skips it.
        is_repeatable (`bool`): Whether it can be given several times, in a config file as a list.
        is_optional (`bool`): Whether only those families have it that name it in their values under "flags".
        proof (`str`): The test that shows its effect; there may be more.
        elsewhere (`str`): What other trainers call it, or what serves its purpose there.
    """

    name: str
    kind: Kind
    default: object
    text: str
    unit: str = ""
    needs: str = ""
    excludes: str = ""
    may_change: bool = False
    in_card: bool = False
    is_of_start: bool = False
    is_repeatable: bool = False
    is_optional: bool = False
    proof: str = ""
    elsewhere: str = ""

    @property
    def label(self):
        """The name as a user writes it."""
        return self.name if self.kind is STRUCTURE else f"--{self.name}"

    @property
    def has_several(self):
        """Whether its value is a list whose items are converted one by one."""
        return self.is_repeatable or self.kind is KEY_VALUE

    def read(self, value, where=""):
        """Return the value of the flag from its text, or from the texts, list or mapping in a config file.

        Raises:
            RefusedError: It is not allowed; the message begins with `where`.
        """
        if self.kind is KEY_VALUE and isinstance(value, dict):
            return [(name, literal(item)) for name, item in value.items()]
        if self.kind.is_list and isinstance(value, list):
            value = ",".join(map(str, value))
        items = value if self.has_several and isinstance(value, list) else [value]
        try:
            values = [self.kind.convert(_check(item, lambda value: isinstance(value, str))) for item in items]
        except (ValueError, OverflowError):
            raise RefusedError(f"{where}--{self.name} is {value!r}; allowed is {self.kind.allowed}.") from None
        return values if self.has_several else values[0]


def has_cap(args):
    """Return whether items have a cap on pixels instead of one size."""
    return args.max_pixels is not None or any(bucket_pixels(size)[1] is None for size in args.bucket_config or ())


def _learning_rate(args):
    return 1.0 if args.optimizer == "prodigy" else 1e-4 if args.training_mode == "lora" else 1e-5


_MANUAL_MEMORY = "use_gradient_checkpointing use_gradient_checkpointing_offload checkpoint_blocks offload_buffer_size"
_PREVIEWS_OR_LOSS = "validation_prompt validation_split"

# Group -> its flags, as --help shows them. What a row does not say is not true of the flag. A resume compares the
# product of batch size and accumulation, which may change, and the items, so that what only finds them may change.
# fmt: off
FLAGS = {
    "model": (
        Flag("pretrained_model_name_or_path", PATH, REQUIRED, "Hub id or folder of a diffusers pipeline.",
             may_change=True, proof="test_variant",
             elsewhere="model_paths model_id_with_origin_paths dit ckpt_path name_or_path model_name model_id"),
        Flag("revision", TEXT, None, "Git revision of the hub repository. Default: its main branch.", may_change=True,
             in_card=True, proof="test_revision"),
        Flag("variant", TEXT, None, "File name variant of the weights, such as bf16. Default: none.", may_change=True,
             in_card=True, proof="test_variant"),
        Flag("transformer_path", PATH, None,
             "A transformer/ folder or one safetensors file that replaces the pipeline's transformer. Default: none.",
             may_change=True, in_card=True, proof="test_full_result_can_be_trained_on", elsewhere="dit unet_path"),
        Flag("training_mode", _choice("lora", "full"), "lora", "Train a LoRA, or all weights of the transformer.",
             proof="test_full_result_can_be_trained_on",
             elsewhere="lora_base_model trainable_models training_type network_module remove_prefix_in_ckpt"),
        Flag("seed", SEED, 42, "Seed of all random draws.", proof="test_flags_reach_the_clips",
             elsewhere="global_seed manual_seed"),
        Flag("deterministic", SWITCH, False, "Deterministic kernels on CUDA; slower. A CPU is always deterministic.",
             may_change=True, proof="test_deterministic", elsewhere="use_deterministic_algorithms"),
    ),
    "LoRA": (
        Flag("lora_rank", POSITIVE_INT, 32, "Rank of the adapters.", needs="training_mode=lora",
             proof="test_files_of_a_lora_run", elsewhere="network_dim rank lora_r lora_dim linear"),
        Flag("lora_alpha", POSITIVE, lambda args: float(args.lora_rank),
             "Alpha; the strength is alpha / rank. Default: the rank, strength 1.", needs="training_mode=lora",
             proof="test_strength_rate_dropout_and_dtype", elsewhere="network_alpha linear_alpha alpha"),
        Flag("lora_dropout", BELOW_ONE, 0.0, "Dropout before each adapter. 0 is off.", needs="training_mode=lora",
             proof="test_strength_rate_dropout_and_dtype", elsewhere="network_dropout"),
        Flag("lora_target_modules", NAMES, BY_MODEL, "Comma-separated names of linear layers; the end of a full name "
             "is enough. Default: {lora_target_modules}.", needs="training_mode=lora",
             proof="test_image_keys_need_not_be_adapted", elsewhere="target_modules lora_layers network_args"),
        Flag("lora_init_path", PATH, None, "LoRA file, or folder with one, whose weights the adapters start from. "
             "Default: none.", needs="training_mode=lora", may_change=True, in_card=True,
             proof="test_a_run_starts_from_the_lora_of_its_expert",
             elsewhere="network_weights lora_checkpoint init_from_existing"),
        Flag("lora_dtype", _choice("bf16", "fp32"), "bf16", "Dtype of the saved file; training is in fp32.",
             needs="training_mode=lora", may_change=True, in_card=True, proof="test_strength_rate_dropout_and_dtype",
             elsewhere="save_precision save_dtype"),
    ),
    "data": (
        Flag("dataset_path", PATH, REQUIRED, "Folder, or hub id of a Hugging Face dataset.", may_change=True,
             proof="test_refused_before_models_load",
             elsewhere="dataset_base_path dataset_name train_data_dir instance_data_dir folder_path data_path"),
        Flag("dataset_metadata", PATH, None, "Metadata file. Default: the one in the folder, else sidecar .txt files.",
             may_change=True, proof="test_given_metadata_must_exist_and_be_a_table",
             elsewhere="dataset_metadata_path metadata_path"),
        Flag("media_column", TEXT, None, "Column with the images or clips. Default: found by its usual names.",
             may_change=True, proof="test_flags_decide_between_columns_and_the_rest_is_listed",
             elsewhere="image_column video_column data_file_keys"),
        Flag("caption_column", TEXT, None, "Column with the captions. Default: found by its usual names.",
             may_change=True, proof="test_flags_decide_between_columns_and_the_rest_is_listed"),
        Flag("height", POSITIVE_INT, BY_MODEL, "Height, a multiple of {divisor}. Default: {height}.", unit="PIXELS",
             proof="test_refused_before_models_load", elsewhere="resolution"),
        Flag("width", POSITIVE_INT, BY_MODEL, "Width, a multiple of {divisor}. Default: {width}.", unit="PIXELS",
             proof="test_refused_before_models_load", elsewhere="resolution"),
        Flag("max_pixels", POSITIVE_INT, None, "Instead of height and width: keep each item's shape, with at most "
             "this many pixels. Default: off.", unit="PIXELS", excludes="height width", proof="test_sizes_under_a_cap",
             elsewhere="resolution resolutions"),
        Flag("aspect_buckets", NATURAL, lambda args: 9 if has_cap(args) else None, "Shapes from 1:2 to 2:1 under a "
             "cap on pixels; each item is cropped to the nearest. 0: each keeps its own. Default: 9.",
             proof="test_ordinary_photographs_share_shapes", elsewhere="enable_bucket num_ar_buckets ar_buckets"),
        Flag("num_frames", POSITIVE_INT, BY_MODEL,
             "Frames of a clip, 4n + 1, if it has as many. Default: {num_frames}.", unit="FRAMES", is_optional=True,
             proof="test_frame_counts", elsewhere="frames target_frames max_num_frames frame_buckets"),
        Flag("fps", POSITIVE, BY_MODEL, "Frames per second of the clips that are trained. Default: {fps}.",
             is_optional=True, proof="test_flags_reach_the_clips", elsewhere="target_fps"),
        Flag("clip_part", _choice("start", "middle", "random"), "start",
             "Which part of a longer clip is used; random: one draw per clip, fixed by the seed.", is_optional=True,
             proof="test_flags_reach_the_clips", elsewhere="frame_extraction"),
        Flag("task", _choice("t2v", "i2v"), None, "From text or from image to video. Required where a model does "
             "both: {tasks}.", is_optional=True, proof="test_refused_before_models_load"),
        Flag("train_batch_size", POSITIVE_INT, 1, "Samples per process and micro-batch.", unit="SAMPLES",
             may_change=True, in_card=True, proof="test_update_is_that_of_the_mean_over_the_global_batch",
             elsewhere="batch_size micro_batch_size_per_gpu per_device_train_batch_size"),
        Flag("dataset_repeat", POSITIVE_INT, 1, "How often each item occurs in one epoch.", may_change=True,
             in_card=True, proof="test_several_datasets_with_repeats", elsewhere="repeats num_repeats"),
        Flag("dataloader_num_workers", NATURAL, 1, "Threads per process that load batches ahead. 0: a batch is "
             "loaded when needed.", unit="THREADS", may_change=True, proof="test_loaders_change_nothing_but_the_time",
             elsewhere="dataset_num_workers max_data_loader_n_workers num_workers"),
        Flag("caption_dropout", FRACTION, 0.0, "Share of samples that are trained with {dropped_caption}. 0 is off.",
             proof="test_dropped_captions_change_nothing_else",
             elsewhere="caption_dropout_rate proportion_empty_prompts"),
        Flag("on_bad_sample", _choice("error", "skip"), "error", "Items that cannot be used: list them and stop, or "
             "train on the rest.", may_change=True, proof="test_skip_trains_on_the_rest"),
        Flag("allow_missing_captions", SWITCH, False, "Train items without a caption with an empty caption.",
             may_change=True, proof="test_missing_and_empty_captions_are_counted"),
        Flag("cache_dir", PATH, lambda args: str(pathlib.Path(args.output_dir) / "cache"),
             "Folder for encoded captions and media, which runs can share. Default: cache in the output_dir.",
             may_change=True, proof="test_what_changes_is_encoded_again",
             elsewhere="cache_directory cache_latents cache_latents_to_disk cache_text_encoder_outputs"),
    ),
    "memory": (
        Flag("use_gradient_checkpointing", SWITCH, False, "Recompute the activations of each block in the backward "
             "pass.", may_change=True, proof="test_memory_of_the_modes_is_ordered",
             elsewhere="gradient_checkpointing activation_checkpointing grad_checkpoint"),
        Flag("use_gradient_checkpointing_offload", SWITCH, False,
             "Recompute, and keep the inputs of each block in host memory until then. Implies the flag above.",
             may_change=True, proof="test_same_bytes_when_the_inputs_are_really_parked",
             elsewhere="gradient_checkpointing_cpu_offload blocks_to_swap"),
        Flag("checkpoint_blocks", COUNTS, None,
             "Number of blocks, from the first on, that a flag above is for; one for all block lists, or one each. "
             "Default: all.", needs="use_gradient_checkpointing use_gradient_checkpointing_offload", may_change=True,
             proof="test_same_bytes_again_and_in_every_memory_mode"),
        Flag("offload_buffer_size", SIZE, None, "Host memory per process for offloaded inputs; when it is full, they "
             "stay on the device. Default: what the plan offloads, if the host has that much free.",
             needs="use_gradient_checkpointing_offload", may_change=True, proof="test_a_full_buffer_changes_nothing"),
        Flag("memory_budget", BUDGET, None, "Instead of the flags above: the fastest plan that fits this device "
             "memory per process, or what is free (auto). Default: off.", excludes=_MANUAL_MEMORY, may_change=True,
             proof="test_a_budget_makes_the_plan", elsewhere="blocks_to_swap low_vram enable_model_cpu_offload"),
        Flag("dry_run", SWITCH, False, "Only forecast what the run will need, from configs alone, and check that it "
             "fits.", may_change=True, is_of_start=True, proof="test_a_dry_run_does_not_count_as_encoding"),
    ),
    "training": (
        Flag("max_train_steps", POSITIVE_INT, None, "Optimizer steps. Default: as many as the epochs need.",
             unit="STEPS", excludes="num_train_epochs", may_change=True, proof="test_checkpoints_total_limit",
             elsewhere="steps train_steps max_steps num_steps"),
        Flag("num_train_epochs", POSITIVE_INT, 1, "Passes over the dataset, instead of steps.", unit="EPOCHS",
             may_change=True, proof="test_epochs_become_optimizer_steps",
             elsewhere="num_epochs epochs max_train_epochs"),
        Flag("gradient_accumulation_steps", POSITIVE_INT, 1, "Micro-batches per optimizer step.", may_change=True,
             in_card=True, proof="test_update_is_that_of_the_mean_over_the_global_batch",
             elsewhere="gradient_accumulation accumulation_steps"),
        Flag("learning_rate", POSITIVE, _learning_rate, "Learning rate. Default: 1e-4 for LoRA, 1e-5 for full, 1.0 "
             "with prodigy.", proof="test_strength_rate_dropout_and_dtype", elsewhere="lr unet_lr"),
        Flag("lr_scheduler",
             _choice("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"),
             "constant", "Schedule of the learning rate, over optimizer steps.",
             proof="test_two_processes_train_on_for_several_steps", elsewhere="lr_scheduler_type"),
        Flag("lr_warmup_steps", NATURAL, 0, "Optimizer steps over which the rate rises from 0. 0 is off.",
             unit="STEPS", proof="test_a_run_again_from_its_run_json", elsewhere="warmup_steps"),
        Flag("lr_num_cycles", SEVERAL, REQUIRED, "How often the rate falls, for cosine_with_restarts only.",
             needs="lr_scheduler=cosine_with_restarts", proof="test_numbers_that_the_length_of_the_run_makes_void",
             elsewhere="lr_scheduler_num_cycles"),
        Flag("lr_power", NOT_LINEAR, REQUIRED, "Power of the fall, for polynomial only; 1 would be linear.",
             needs="lr_scheduler=polynomial", proof="test_refused", elsewhere="lr_scheduler_power"),
        Flag("optimizer", OPTIMIZER, "adamw",
             "adamw, adamw_8bit, adafactor, prodigy, or the import path of a class, such as torch.optim.SGD.",
             proof="test_learning_rate_reaches_every_optimizer", elsewhere="optimizer_type use_8bit_adam"),
        Flag("optimizer_args", KEY_VALUE, lambda args: {}, "Further arguments of the optimizer. Default: none.",
             proof="test_kinds_of_optimizer_args", elsewhere="adam_beta1 adam_beta2 adam_epsilon betas"),
        Flag("weight_decay", NON_NEGATIVE, lambda args: None if "." in args.optimizer else 0.01,
             "Weight decay. 0 is off. Default: 0.01; with the import path of an optimizer, the default of that class.",
             proof="test_learning_rate_reaches_every_optimizer", elsewhere="adam_weight_decay"),
        Flag("max_grad_norm", NON_NEGATIVE, 1.0, "Norm to which gradients are clipped. 0 is off.",
             proof="test_clipping", elsewhere="gradient_clipping grad_clip clip_grad_norm"),
        Flag("mixed_precision", _choice("no", "bf16"), "bf16",
             "Dtype of the base weights and of the computation; no is fp32. There is no autocast either way.",
             proof="test_in_bf16_the_transformer_gets_what_the_stock_pipeline_gives_it", elsewhere="dtype precision"),
        Flag("timestep_sampling", _choice("uniform", "logit_normal"), "{timestep_sampling}",
             "Distribution of sigma before the shift.", proof="test_sigmas_follow_the_flags",
             elsewhere="weighting_scheme flow_weighting_scheme timestep_sample_method"),
        Flag("sigma_shift", POSITIVE, None,
             "Factor that shifts sigmas towards noise. 1 is off. Default: {sigma_shift}.",
             proof="test_each_expert_is_trained_on_its_own_side", elsewhere="discrete_flow_shift flow_shift shift"),
        Flag("expert", _choice("high_noise", "low_noise", "both"), None,
             "Which expert is trained; both: one after the other. Required where a model has two: {experts}.",
             is_optional=True, proof="test_both_experts_in_one_run_equal_two_runs"),
        Flag("min_sigma", FRACTION, 0.0, "Lower end of the sigmas, from 0 to 1. 0 is off.",
             proof="test_sigmas_follow_the_flags", elsewhere="min_timestep min_timestep_boundary"),
        Flag("max_sigma", FRACTION, 1.0, "Upper end of the sigmas, from 0 to 1. 1 is off.",
             proof="test_sigmas_follow_the_flags", elsewhere="max_timestep max_timestep_boundary"),
        Flag("loss_weighting", _choice("none", "sigma_sqrt", "cosmap"), "none",
             "Weight of each sample's loss by its sigma, as in diffusers' compute_loss_weighting_for_sd3.",
             proof="test_loss_weighting", elsewhere="weighting_scheme"),
        Flag("ema", SWITCH, False, "Keep an average of the trained weights in fp32, which is exported, previewed and "
             "validated.", proof="test_averaged_weights_are_previewed", elsewhere="use_ema"),
        Flag("ema_decay", BELOW_ONE, 0.999, "Weight of the old average at step n, at most (1 + n) / (10 + n).",
             needs="ema", proof="test_last_preview_is_what_the_stock_pipeline_samples"),
        Flag("offload_ema", SWITCH, False, "Keep the average in host memory: saves 4 bytes per weight, slows each "
             "step.", needs="ema", may_change=True, proof="test_training_is_the_same_with_and_without"),
        Flag("max_skipped_steps", NATURAL, 0, "Optimizer steps in a row that may be skipped because loss or gradient "
             "is not finite; checking each makes the host wait for the device. 0: the run stops at the first.",
             unit="STEPS", may_change=True, proof="test_a_step_whose_loss_is_not_finite_is_left_out"),
    ),
    "saving": (
        Flag("output_dir", PATH, REQUIRED, "Folder for everything that the run leaves.", may_change=True,
             proof="test_folder_that_cannot_be_written_is_refused",
             elsewhere="output_path output_name training_folder outputs"),
        Flag("checkpointing_steps", POSITIVE_INT, None, "Optimizer steps between two checkpoints. Default: off.",
             unit="STEPS", may_change=True, proof="test_checkpoints_total_limit",
             elsewhere="save_every_n_steps save_every_n_epochs save_steps save_every ckpt_every save_state"),
        Flag("checkpoints_total_limit", POSITIVE_INT, None, "Keep only the newest N checkpoints. Default: all.",
             needs="checkpointing_steps", may_change=True, proof="test_checkpoints_total_limit",
             elsewhere="save_last_n_steps_state max_step_saves_to_keep"),
        Flag("resume_from_checkpoint", PATH, None,
             "Checkpoint folder to continue from (a bare name is searched in the output_dir first), or latest: the "
             "newest complete one in the output_dir, or step 1 if there is none yet. Default: off.", may_change=True,
             is_of_start=True, proof="test_resume_gives_the_same_bytes", elsewhere="resume load"),
        Flag("push_to_hub", SWITCH, False, "Upload the result, its model card and the last previews to the hub.",
             may_change=True, proof="test_nothing_is_uploaded_without_the_flag"),
        Flag("hub_model_id", TEXT, None, "Repository for push_to_hub. Default: the name of the output_dir.",
             needs="push_to_hub", may_change=True, proof="test_repository_is_opened", elsewhere="huggingface_repo_id"),
    ),
    "reporting": (
        Flag("report_to", TRACKERS, lambda args: [], "Trackers that also get the numbers and previews. Default: none.",
             may_change=True, proof="test_report_to", elsewhere="log_with"),
        Flag("logging_steps", POSITIVE_INT, 10, "Optimizer steps between two writes of the metrics.", unit="STEPS",
             may_change=True, proof="test_logging_steps", elsewhere="log_every log_every_n_steps steps_per_print"),
        Flag("validation_prompt", TEXT, None, "Prompt of a preview; repeatable. Default: no previews.",
             may_change=True, is_repeatable=True, proof="test_files_of_previews",
             elsewhere="sample_prompts validation_prompts"),
        Flag("validation_image", PATH, None,
             "First frame of the previews, for image to video; given twice: first and last. Default: none.",
             needs="validation_prompt", may_change=True, is_repeatable=True, is_optional=True,
             proof="test_last_preview_is_what_the_stock_pipeline_samples", elsewhere="validation_images"),
        Flag("validation_steps", POSITIVE_INT, None,
             "Optimizer steps between two rounds of previews and losses of held-out items. Default: only after the "
             "last step.", unit="STEPS", needs=_PREVIEWS_OR_LOSS, may_change=True, proof="test_files_of_previews",
             elsewhere="sample_every_n_steps sample_every validation_epochs eval_every_n_steps"),
        Flag("validation_split", BELOW_ONE, 0.0, "Share of the items that are not trained, but whose loss is "
             "measured at fixed sigmas and noise. 0 is off.", proof="test_what_is_held_out_is_not_trained"),
        Flag("negative_prompt", TEXT, BY_MODEL,
             "Negative prompt of the previews. Default: {described_negative_prompt}.", needs="validation_prompt",
             may_change=True, proof="test_settings_of_previews", elsewhere="neg validation_negative_prompt"),
        Flag("guidance_scale", NON_NEGATIVE, BY_MODEL,
             "Guidance scale of the previews; up to 1 is off. Default: {guidance_scale}.", needs="validation_prompt",
             may_change=True, proof="test_settings_of_previews", elsewhere="cfg_scale"),
        Flag("num_inference_steps", POSITIVE_INT, BY_MODEL,
             "Denoising steps of the previews. Default: {num_inference_steps}.", unit="STEPS",
             needs="validation_prompt", may_change=True, proof="test_settings_of_previews", elsewhere="sample_steps"),
        Flag("validation_seed", SEED, lambda args: args.seed,
             "Seed of the noise of previews and held-out items. Default: the seed.", needs=_PREVIEWS_OR_LOSS,
             may_change=True, proof="test_validation_seed_changes_the_loss_only"),
    ),
    "files": (
        Flag("config", PATH, None, "YAML file with the same keys as the flags, and datasets and bucket_config "
             "(docs/data.md), or a run.json. Repeatable: later files win, flags win over all. Default: none.",
             may_change=True, is_of_start=True, is_repeatable=True, proof="test_a_run_again_from_its_run_json",
             elsewhere="config_file training_config dataset_config"),
        Flag("datasets", STRUCTURE, None, "Several datasets.", excludes=" ".join(DATASET_FLAGS), may_change=True,
             proof="test_several_datasets", elsewhere="dataset_config data_backend_config"),
        Flag("bucket_config", STRUCTURE, None, "Sizes, numbers of frames, shares and batch sizes.",
             excludes="height width max_pixels num_frames train_batch_size", proof="test_bucket_config",
             elsewhere="resolutions frame_buckets"),
    ),
}
# fmt: on

ROWS = {row.name: row for rows in FLAGS.values() for row in rows}


def flags_of(values):
    """Return the flags of a family by name, the family's own `values` filled in."""
    rows = {}
    for row in ROWS.values():
        if not row.is_optional or row.name in values.get("flags", ()):
            default = row.default.format(**values) if isinstance(row.default, str) else row.default
            rows[row.name] = dataclasses.replace(row, default=default, text=row.text.format(**values))
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
