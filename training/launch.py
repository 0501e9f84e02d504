"""Starts Accelerate for a run, checks its config against the flags, and seeds what modules draw."""

import logging
import os

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import set_seed

from blockwise.checkpointing import configure_deepspeed_checkpointing
from runtime.errors import RefusedError


_DISTRIBUTED_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED")

# What a DeepSpeed config may contain: what the flags or the code take into account.
_DEEPSPEED_KEYS = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("zero_optimization", "activation_checkpointing", "bf16", "fp16", "communication_data_type"),
    *("prescale_gradients", "gradient_predivide_factor", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "steps_per_print", "wall_clock_breakdown"),
}


def start_accelerator(args):
    """Return the `Accelerator` of this run.

    Raises:
        RefusedError: The Accelerate or DeepSpeed config contradicts a flag, or asks for what is not supported.
    """
    _check_environment(args)
    # Our own notices go to stderr, once; INFO lines of libraries do not.
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    for package in ("training", "dataset"):
        logging.getLogger(package).setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # everything is written before it is read
        torch.backends.cudnn.benchmark = False
    handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    if "LOCAL_RANK" in os.environ and not torch.accelerator.is_available():
        handlers.append(InitProcessGroupKwargs(backend="gloo"))  # DeepSpeed would look for a library of its own
    # No autocast: the weights have the dtype of the computation, so that training computes what inference computes.
    how = {"mixed_precision": "no", "step_scheduler_with_optimizer": False, "kwargs_handlers": handlers}
    how |= {"gradient_accumulation_steps": args.gradient_accumulation_steps}
    accelerator = Accelerator(log_with=args.report_to or None, project_dir=args.output_dir, **how)
    distributed_type = accelerator.distributed_type.value
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true" and distributed_type != "DEEPSPEED":
        raise RefusedError("ACCELERATE_USE_CPU makes Accelerate ignore the DeepSpeed of its config; unset it.")
    if distributed_type == "NO" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise RefusedError("Several processes, and no accelerator is found; on CPUs set ACCELERATE_USE_CPU=true.")
    if distributed_type not in _DISTRIBUTED_TYPES:
        _refuse(f"distributed_type {distributed_type}", f"allowed are {', '.join(_DISTRIBUTED_TYPES)}")
    if distributed_type == "DEEPSPEED":
        _complete_deepspeed_config(args, accelerator)
    return accelerator


def _check_environment(args):
    """Raise if the Accelerate config, which arrives in the environment, is not supported or contradicts a flag."""
    for name, value in os.environ.items():
        # Whatever it asks for by a variable with this prefix is recognised.
        is_asked_for = name.startswith("ACCELERATE_USE_") and value.lower() in ("1", "true", "yes", "on", "y", "t")
        if is_asked_for and name not in ("ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED"):
            allowed = f"allowed as distributed_type are {', '.join(_DISTRIBUTED_TYPES)}"
            _refuse(f"{name.removeprefix('ACCELERATE_USE_')} ({name})", allowed)
    # Accelerate would prefer them to its arguments.
    settings = {"dynamo_backend": ("no", ""), "mixed_precision": ("no",), "gradient_accumulation_steps": ("1", "auto")}
    for setting, unset in settings.items():
        value, flag = os.environ.pop(f"ACCELERATE_{setting.upper()}", unset[0]), getattr(args, setting, None)
        if value.lower() in (*unset, str(flag)):
            continue
        if flag is None:
            _refuse(f"{setting} {value}", "remove it, or set it to 'no'")
        contradiction = f"{setting} {value} in the Accelerate config contradicts --{setting} {flag}"
        raise RefusedError(f"{contradiction}; remove it from the config, since the flag decides.")


def _refuse(setting, what_to_do, config="Accelerate"):
    raise RefusedError(f"{setting} in the {config} config is not supported; {what_to_do}.")


def _complete_deepspeed_config(args, accelerator):
    """Put the flags into the DeepSpeed config, since the engine reads nothing else."""
    config = accelerator.deepspeed_plugin.deepspeed_config
    zero = config["zero_optimization"]
    if args.training_mode == "full" or zero["stage"] not in (0, 1, 2):
        found = f"DeepSpeed ZeRO stage {zero['stage']} with --training_mode {args.training_mode}"
        raise RefusedError(f"{found} is not supported; allowed is stage 1 or 2 with lora. Use MULTI_GPU otherwise.")
    unsupported = dict.fromkeys(sorted(config.keys() - _DEEPSPEED_KEYS), "")
    offloads = {part: zero.get(part, {}).get("device", "none") for part in ("offload_optimizer", "offload_param")}
    unsupported |= {part: f" {device}" for part, device in offloads.items() if device != "none"}
    # It would cast the fp32 weights of the LoRA.
    unsupported |= {key: ".enabled" for key in ("bf16", "fp16") if config.get(key, {}).get("enabled") is True}
    for key, value in unsupported.items():
        _refuse(f"{key}{value}", "remove it", config="DeepSpeed")
    if args.max_skipped_steps:
        raise RefusedError("--max_skipped_steps is not supported with DeepSpeed, whose engine makes the step itself.")
    # The engine only multiplies by it, and reports: with a bucket config the sizes differ.
    train_batch_size, accumulation = args.train_batch_size or 1, args.gradient_accumulation_steps
    values = {"train_micro_batch_size_per_gpu": train_batch_size, "gradient_accumulation_steps": accumulation}
    values |= {"gradient_clipping": args.max_grad_norm}
    for key, value in values.items():
        # Accelerate fills in an accumulation of 1 where the config does not give one.
        unset = ("auto", 1) if key == "gradient_accumulation_steps" else ("auto",)
        if config.get(key, "auto") not in (*unset, value):
            raise RefusedError(f"{key} is {config[key]} in the DeepSpeed config and {value} by the flags; remove it.")
        config[key] = value
    config["train_batch_size"] = train_batch_size * accumulation * accelerator.num_processes
    if args.offload_buffer_size is not None and "activation_checkpointing" in config:
        raise RefusedError("--offload_buffer_size has no effect with DeepSpeed's 'activation_checkpointing'.")
    names = ("use_gradient_checkpointing", "use_gradient_checkpointing_offload")
    switches = {name: getattr(args, name) for name in names}
    try:
        configure_deepspeed_checkpointing(config, **switches, device=accelerator.device)
    except ValueError as error:
        raise RefusedError(str(error)) from None


def seed_module_randomness(seed, process_index):
    """Seed what modules draw, mainly dropout. Unlike noise and sigma it differs between processes."""
    set_seed(int(np.random.SeedSequence([seed, process_index, 3]).generate_state(1)[0]))
