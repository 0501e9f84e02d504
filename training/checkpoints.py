"""Training state on disk: written under another name first, so that a checkpoint is complete or absent."""

import glob
import json
import logging
import os
import pathlib
import re
import shutil

import safetensors
import safetensors.torch

from runtime.errors import FailedError, RefusedError
from runtime.files import delete_folder, rename_folder
from runtime.processes import full_tensors, on_main_process, together
from training.flags import FIXED, ROWS
from training.optimizers import uses_deepspeed


logger = logging.getLogger(__name__)

_STATE_FILE = "training_state.json"
_WEIGHTS_FILE = "trainable.safetensors"


def _read_state(path):
    """Return the state of a complete checkpoint.

    Raises:
        ValueError: What it lacks.
    """
    try:
        state = json.loads((path / _STATE_FILE).read_text(encoding="utf-8"))
        sizes = state["files"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"its {_STATE_FILE} cannot be read ({error!r})") from None
    for name, size in sizes.items():
        if not (path / name).is_file() or (path / name).stat().st_size != size:
            raise ValueError(f"its {name} is missing, or does not have the {size} bytes that it had")
    return state


def list_checkpoints(output_dir, level=logging.DEBUG):
    """Return the complete checkpoints of a run as `{step: path}`, oldest first; log (`level`) what others lack."""
    complete = {}
    for path in pathlib.Path(output_dir).glob("checkpoint-*"):
        if number := re.fullmatch(r"checkpoint-(\d+)", path.name):
            try:
                _read_state(path)
                complete[int(number[1])] = path
            except ValueError as error:
                logger.log(level, "%s is not a complete checkpoint and is skipped: %s", path.name, error)
    return dict(sorted(complete.items()))


def find_checkpoint(args, accelerator):
    """Return (path, state) of the checkpoint that `--resume_from_checkpoint` names, or (None, {"step": 0}).

    The latest is the complete one with the highest number. Where none is complete yet, the run starts at its first
    step.

    Raises:
        RefusedError: There is no such checkpoint, its run had other settings, or a new run would mix its checkpoints
            with those of an older one.
    """
    path = _locate(args)
    if path is None:
        return None, {"step": 0}
    where = f"--resume_from_checkpoint {path}"
    if uses_deepspeed(accelerator) and glob.has_magic(str(path)):
        raise RefusedError(f"{where}: DeepSpeed takes *, ? and [ in it for a pattern; rename the folder.")
    try:
        state = _read_state(path)
        with safetensors.safe_open(path / _WEIGHTS_FILE, "pt"):
            pass
    except (ValueError, OSError, safetensors.SafetensorError) as error:
        raise RefusedError(
            f"{where} is not a complete checkpoint: {error}. From weights only, without the optimizer's state, the "
            "schedule, the step and the order of the data, start a new run: --lora_init_path or --transformer_path."
        ) from None
    refuse_changed_settings(args, state["arguments"], path)
    now, before = accelerator.num_processes, state["num_processes"]
    if now != before:
        changed = f"--resume_from_checkpoint: this run has {now} processes, that of the checkpoint had {before}"
        if uses_deepspeed(accelerator) or args.lora_dropout:
            raise RefusedError(f"{changed}, each with its own state of DeepSpeed or --lora_dropout; start as many.")
        logger.warning("%s; samples, noise and sigmas stay the same, gradients but for rounding", changed)
    return path, state


def _locate(args):
    """Return where the checkpoint is that the run resumes from, None where it starts at its first step."""
    wanted, output_dir = args.resume_from_checkpoint, args.output_dir
    existing = list_checkpoints(output_dir, logging.WARNING if wanted == "latest" else logging.DEBUG)
    if wanted == "latest":
        if not existing:
            _refuse_to_repeat(args)
            logger.warning("%s holds no complete checkpoint to resume from; the run starts at step 1", output_dir)
        return existing[max(existing)] if existing else None
    if wanted is None:
        if existing:
            earlier = f"--output_dir {output_dir} holds checkpoints of an earlier run (checkpoint-{max(existing)})"
            what_to_do = "continue it with --resume_from_checkpoint latest, or give another folder"
            _refuse_unless_dry_run(args, f"{earlier}; {what_to_do}.")
        return None
    for place in (pathlib.Path(output_dir, wanted), pathlib.Path(wanted)):
        if place.exists():
            return place
    raise RefusedError(
        f"--resume_from_checkpoint {wanted}: there is no such path, in --output_dir or from {os.getcwd()}; complete "
        f"ones in {output_dir}: {', '.join(place.name for place in existing.values()) or 'none'}."
    )


def _refuse_to_repeat(args):
    """Raise if the run in the output folder has ended: to start it again would replace its results."""
    try:
        ended = "measured" in json.loads(pathlib.Path(args.output_dir, "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if ended:
        results = f"--resume_from_checkpoint latest: {args.output_dir} holds the results of a run that has ended"
        _refuse_unless_dry_run(args, f"{results}, and no checkpoint; give another --output_dir.")


def _refuse_unless_dry_run(args, message):
    """Raise `RefusedError`, or in a dry run log what the run itself would be refused for."""
    if not args.dry_run:
        raise RefusedError(message)
    logger.warning("without --dry_run this would be refused: %s", message)


def refuse_changed_settings(args, settings, path):
    """Refuse to continue a run with other settings than it had, unless they may change.

    Args:
        args (`argparse.Namespace`): Of this run.
        settings (`dict[str, Any]`): Of the run that wrote the checkpoint, as JSON has them.
        path (`pathlib.Path`): Of the checkpoint, for the message.

    Raises:
        RefusedError: It names the first one that differs.
    """
    for name, flag in ROWS.items():
        now = json.loads(json.dumps(getattr(args, name, None)))
        before = settings.get(name, now)
        # With two experts the first one's length tells where the second begins.
        is_fixed = getattr(args, "expert", None) == "both" and name in ("max_train_steps", "num_train_epochs")
        if now != before and (is_fixed or flag.change is FIXED):
            changed = f"{flag.label} is {now} and was {before} in {path}"
            raise RefusedError(f"{changed}: a resumed run keeps the settings it had. Give the old value.")


def check_same_weights(args, resumed, batches, weights):
    """Make checkpoints remember which weights a run reads, and check that a resumed run reads the same.

    Args:
        args (`argparse.Namespace`)
        resumed (`dict`): State of the checkpoint, from `find_checkpoint`.
        batches (`BatchPlan`)
        weights (`dict[str, str]`): From each part of the model to the digest of its weights, wherever they are; in a
            dry run of those that are on this machine.

    Raises:
        RefusedError: They were others.
    """
    batches.identity["weights"] = weights
    before = resumed.get("weights", weights)
    for part in weights if args.dry_run else weights | before:
        if weights.get(part) != before.get(part):
            problem = f"its run had a {part} of other weights than this one"
            raise RefusedError(f"--resume_from_checkpoint: {problem}; give those it had, or start a new run.")


def register_state(accelerator, weights, average, lr_scheduler):
    """Make `accelerator.save_state` and `load_state` handle what is trained only, not the frozen base.

    Args:
        accelerator (`Accelerator`)
        weights (`MasterWeights`): The fp32 masters are what is saved.
        average (`WeightAverage`), lr_scheduler (`LambdaLR`)
    """

    def save(models, state_dicts, output_dir):
        state_dicts.clear()
        is_main = accelerator.is_main_process
        tensors = {name: tensor.cpu() for name, tensor in full_tensors(weights.named_masters()) if is_main}
        if is_main:
            safetensors.torch.save_file(tensors, pathlib.Path(output_dir) / _WEIGHTS_FILE)

    def load(models, input_dir):
        models.clear()  # Accelerate would look for a file of each; under DeepSpeed there is none anyway
        tensors = safetensors.torch.load_file(pathlib.Path(input_dir) / _WEIGHTS_FILE)
        masters = dict(weights.named_masters())
        shapes, saved = ({name: value.shape for name, value in values.items()} for values in (masters, tensors))
        if differing := sorted({name for name, _ in shapes.items() ^ saved.items()}):
            other = f"the checkpoint trains other parameters than this run, such as {', '.join(differing[:3])}"
            raise RefusedError(f"--resume_from_checkpoint: {other}; resume with the flags that it was made with.")
        for name, master in masters.items():
            master.detach().copy_(tensors[name])
        weights.write_back()

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.register_for_checkpointing(lr_scheduler)
    if average.model is not None:
        accelerator.register_for_checkpointing(average)


def save_checkpoint(accelerator, args, step, batches):
    """Save the training state after optimizer step `step` as checkpoint-`step`. Every process must call it.

    It gets its name when all of it is on disk; only then older ones are deleted.

    Args:
        accelerator (`Accelerator`), args (`argparse.Namespace`), step (`int`)
        batches (`BatchPlan`): Knows what of the run a resume compares.

    Raises:
        FailedError: It cannot be written. Those from before are untouched.
    """
    output_dir = pathlib.Path(args.output_dir)
    final, unfinished = output_dir / f"checkpoint-{step}", output_dir / f"checkpoint-{step}.tmp"

    def complete():
        files = sorted(path for path in unfinished.rglob("*") if path.is_file())
        state = {"step": step, "arguments": vars(args)} | batches.identity
        state["files"] = {str(file.relative_to(unfinished)): file.stat().st_size for file in files}
        (unfinished / _STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        rename_folder(unfinished, final)

    def delete_old():
        delete_folder(output_dir / f"{final.name}.replaced")
        if args.checkpoints_total_limit is not None:
            for old in list(list_checkpoints(output_dir).values())[: -args.checkpoints_total_limit]:
                delete_folder(old)

    kwargs = {"exclude_frozen_parameters": True} if uses_deepspeed(accelerator) else {}
    try:
        together(accelerator, lambda: accelerator.save_state(unfinished, **kwargs))
        on_main_process(accelerator, complete)
    # torch and safetensors have errors of their own for a disk that is full.
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise FailedError(
            f"{final.name} cannot be written to {output_dir}: {error}. The checkpoints before it are as they were; "
            "make room and continue with --resume_from_checkpoint latest."
        ) from error
    on_main_process(accelerator, delete_old)


def clear_later_steps(output_dir, step):
    """Delete what a killed run has left of a checkpoint, and set checkpoints after `step` aside.

    Otherwise `latest` would resume from these before this run is as far.
    """
    for left in (*output_dir.glob("checkpoint-*.tmp"), *output_dir.glob("checkpoint-*.old")):
        shutil.rmtree(left, ignore_errors=True)
    for later in [path for number, path in list_checkpoints(output_dir).items() if number > step]:
        rename_folder(later, output_dir / f"{later.name}.replaced")
        logger.warning("%s is renamed to %s.replaced until there is a new one", later, later.name)


def load_checkpoint(accelerator, path, lr_scheduler):
    """Load the training state that `save_checkpoint` wrote. Every process must call it.

    Args:
        accelerator (`Accelerator`), path (`pathlib.Path`)
        lr_scheduler (`LambdaLR`): That of this run; it holds, also where the length of the run changed.
    """
    kwargs = {"load_module_strict": False} if uses_deepspeed(accelerator) else {}
    accelerator.load_state(path, **kwargs)
    # It counts micro-batches, of which a step may have another number now; a checkpoint is of the end of a step.
    accelerator.step = 0
    # The rate in the state was made by the schedule of that run, whose end may be the middle of this one.
    rate = lr_scheduler.base_lrs[0] * lr_scheduler.lr_lambdas[0](lr_scheduler.last_epoch)
    lr_scheduler.optimizer.param_groups[0]["lr"] = rate
    lr_scheduler._last_lr = [rate]
