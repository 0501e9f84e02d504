"""Training state on disk: written beside and renamed, so that a checkpoint is complete or absent."""

import json
import pathlib
import re
import shutil

import safetensors
import safetensors.torch
import torch

from training.arguments import CONFIG_ONLY
from training.errors import RefusedError


_STATE_FILE = "training_state.json"
_WEIGHTS_FILE = "trainable.safetensors"

# What may differ when a run is resumed: where things are, how memory is used, what is written when, and the length.
# A schedule that depends on the length follows the new one. Anything else would make another run of the rest.
_MAY_CHANGE = {
    *("pretrained_model_name_or_path", "revision", "variant", "transformer_path", "dataset_path", "dataset_metadata"),
    *("output_dir", "resume_from_checkpoint", "config", "checkpointing_steps", "checkpoints_total_limit"),
    *("use_gradient_checkpointing", "use_gradient_checkpointing_offload", "checkpoint_blocks", "offload_buffer_size"),
    *("memory_budget", "dry_run"),
    *("deterministic", "logging_steps"),
    *("lora_dtype", "lora_init_path", "max_train_steps", "num_train_epochs"),
    # Their product is compared instead.
    *("train_batch_size", "gradient_accumulation_steps"),
    # What they say of the items is compared instead.
    *("datasets", "cache_dir", "on_bad_sample", "allow_missing_captions", "dataloader_num_workers"),
    *("media_column", "caption_column", "dataset_repeat"),
}


def list_checkpoints(output_dir):
    """Return the complete checkpoints of a run as `{step: path}`, oldest first."""
    found = {}
    for path in pathlib.Path(output_dir).glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if match and (path / _STATE_FILE).is_file():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def find_checkpoint(args):
    """Return (path, state) of the checkpoint that `--resume_from_checkpoint` names, or (None, {"step": 0}).

    Raises:
        RefusedError: There is none, its run had other settings, or a new run would mix its checkpoints with those of
            an older one.
    """
    existing = list_checkpoints(args.output_dir)
    if args.resume_from_checkpoint is None:
        if existing:
            raise RefusedError(
                f"--output_dir {args.output_dir} holds checkpoints of an earlier run (checkpoint-{max(existing)}); "
                "continue it with --resume_from_checkpoint latest, or give another folder."
            )
        return None, {"step": 0}
    if args.resume_from_checkpoint == "latest":
        if not existing:
            raise RefusedError(f"--resume_from_checkpoint latest: {args.output_dir} holds no checkpoint.")
        path = existing[max(existing)]
    else:
        path = pathlib.Path(args.resume_from_checkpoint)
    if not (path / _STATE_FILE).is_file():
        raise RefusedError(f"--resume_from_checkpoint {path} is not a complete checkpoint: it has no {_STATE_FILE}.")
    try:
        state = json.loads((path / _STATE_FILE).read_text(encoding="utf-8"))
        with safetensors.safe_open(path / _WEIGHTS_FILE, "pt"):
            pass
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise RefusedError(f"--resume_from_checkpoint {path} is damaged: {error}.") from None
    for name, before in state["arguments"].items():
        now = json.loads(json.dumps(getattr(args, name, None)))
        # With two experts the first one's length says where the second begins.
        fixed = getattr(args, "expert", None) == "both" and name in ("max_train_steps", "num_train_epochs")
        if now != before and (name not in _MAY_CHANGE or fixed):
            setting = name if name in CONFIG_ONLY else f"--{name}"
            raise RefusedError(
                f"{setting} is {now} and was {before} in {path}: a resumed run goes on with the settings it had. Give "
                "the old value, or start a new run."
            )
    return path, state


def register_state_hooks(accelerator, names, weights):
    """Make `accelerator.save_state` and `load_state` handle what is trained only, not the frozen base.

    Args:
        names (`list[str]`): Of the trainable parameters.
        weights (`MasterWeights`): Of the same parameters; the fp32 ones are what is saved.
    """

    def save(models, state_dicts, output_dir):
        state_dicts.clear()
        if accelerator.is_main_process:
            tensors = {name: m.detach().cpu() for name, m in zip(names, weights.masters, strict=True)}
            safetensors.torch.save_file(tensors, pathlib.Path(output_dir) / _WEIGHTS_FILE)

    def load(models, input_dir):
        models.clear()  # none is left for Accelerate to look for a file of; under DeepSpeed there is none anyway
        tensors = safetensors.torch.load_file(pathlib.Path(input_dir) / _WEIGHTS_FILE)
        if differing := sorted(set(tensors) ^ set(names)):
            raise RefusedError(
                f"--resume_from_checkpoint: the checkpoint trains other parameters than this run, such as "
                f"{', '.join(differing[:3])}; resume with the flags that it was made with."
            )
        with torch.no_grad():
            for name, master in zip(names, weights.masters, strict=True):
                master.copy_(tensors[name])
        weights.write_back()

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def save_checkpoint(accelerator, args, step, batches):
    """Save the training state after optimizer step `step` as checkpoint-`step`. Every process must call it."""
    output_dir = pathlib.Path(args.output_dir)
    final, beside = output_dir / f"checkpoint-{step}", output_dir / f"checkpoint-{step}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(beside, ignore_errors=True)
    accelerator.wait_for_everyone()
    kwargs = {"exclude_frozen_parameters": True} if _uses_deepspeed(accelerator) else {}
    accelerator.save_state(beside, **kwargs)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        state = {"step": step, "arguments": vars(args)} | batches.identity
        (beside / _STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        beside.rename(final)
        if args.checkpoints_total_limit is not None:
            for old in list(list_checkpoints(output_dir).values())[: -args.checkpoints_total_limit]:
                shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load_checkpoint(accelerator, path):
    """Load the training state that `save_checkpoint` wrote. Every process must call it."""
    kwargs = {"load_module_strict": False} if _uses_deepspeed(accelerator) else {}
    accelerator.load_state(path, **kwargs)


def _uses_deepspeed(accelerator):
    return accelerator.distributed_type.value == "DEEPSPEED"
