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
        # One that wrote to another folder is not in the list of the main process.
        sizes = {f"random_states_{index}.pkl": None for index in range(state["num_processes"])} | state["files"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"its {_STATE_FILE} cannot be read ({error!r})") from None
    for name, size in sizes.items():
        if not (path / name).is_file():
            raise ValueError(f"it lacks {name}")
        if (path / name).stat().st_size != size:
            raise ValueError(f"its {name} has {(path / name).stat().st_size} bytes and had {size}")
    return state


def _inspect_checkpoints(output_dir):
    """Return the checkpoints of a run as `{step: path}`, oldest first, and what each incomplete one lacks."""
    complete, incomplete = {}, {}
    for path in pathlib.Path(output_dir).glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)(\.tmp|\.old)?", path.name)
        if match is None:
            continue
        try:
            if match[2]:
                raise ValueError("it was being written" if match[2] == ".tmp" else "it was being deleted")
            _read_state(path)
        except ValueError as error:
            incomplete[path.name] = str(error)
        else:
            complete[int(match[1])] = path
    return dict(sorted(complete.items())), dict(sorted(incomplete.items()))


def list_checkpoints(output_dir):
    """Return the complete checkpoints of a run as `{step: path}`, oldest first."""
    return _inspect_checkpoints(output_dir)[0]


def find_checkpoint(args, accelerator):
    """Return (path, state) of the checkpoint that `--resume_from_checkpoint` names, or (None, {"step": 0}).

    The latest is the complete one with the highest number; those that are passed over are logged. Where none is
    complete yet, the run starts at its first step.

    Raises:
        RefusedError: There is no such checkpoint, its run had other settings, or a new run would mix its checkpoints
            with those of an older one.
    """
    path = _locate(args)
    if path is None:
        return None, {"step": 0}
    where = f"--resume_from_checkpoint {path}"
    if path.suffix == ".safetensors" or (not (path / _STATE_FILE).exists() and any(path.glob("*.safetensors"))):
        raise RefusedError(
            f"{where} holds weights only: the optimizer's state, the schedule, the step and the order of the data are "
            "not in it. Start a new run from them with --lora_init_path, or --transformer_path."
        )
    if uses_deepspeed(accelerator) and glob.has_magic(str(path)):
        raise RefusedError(f"{where}: DeepSpeed takes *, ? and [ in it for a pattern; rename the folder.")
    try:
        state = _read_state(path)
        with safetensors.safe_open(path / _WEIGHTS_FILE, "pt"):
            pass
    except (ValueError, OSError, safetensors.SafetensorError) as error:
        raise RefusedError(f"{where} is not a complete checkpoint: {error}.") from None
    refuse_changed_settings(args, state["arguments"], path)
    _check_processes(args, state["num_processes"], accelerator)
    return path, state


def _locate(args):
    """Return where the checkpoint is that the run resumes from, None where it starts at its first step."""
    existing, incomplete = _inspect_checkpoints(args.output_dir)
    if args.resume_from_checkpoint is None:
        if existing:
            _refuse_unless_dry_run(
                args,
                f"--output_dir {args.output_dir} holds checkpoints of an earlier run (checkpoint-{max(existing)}); "
                "continue it with --resume_from_checkpoint latest, or give another folder.",
            )
        return None
    if args.resume_from_checkpoint == "latest":
        for name, lack in incomplete.items():
            logger.warning("--resume_from_checkpoint latest passes over %s: %s", name, lack)
        if existing:
            return existing[max(existing)]
        _refuse_to_repeat(args)
        logger.warning(
            "--resume_from_checkpoint latest: %s holds no complete checkpoint; the run starts at step 1",
            args.output_dir,
        )
        return None
    path = pathlib.Path(args.resume_from_checkpoint)
    is_bare = os.sep not in args.resume_from_checkpoint.rstrip(os.sep)
    places = [pathlib.Path(args.output_dir) / path] * is_bare + [path]
    for place in places:
        if place.exists():
            return place
    raise RefusedError(
        f"--resume_from_checkpoint {path}: there is no {' or '.join(map(os.path.abspath, places))}; complete ones in "
        f"{args.output_dir}: {', '.join(place.name for place in existing.values()) or 'none'}."
    )


def refuse_changed_settings(args, settings, path):
    """Refuse to continue a run with other settings than it had, unless they may change.

    Args:
        args (`argparse.Namespace`): Of this run.
        settings (`dict[str, Any]`): Of the run that wrote the checkpoint, as JSON has them.
        path (`pathlib.Path`): Of the checkpoint, for the message.

    Raises:
        RefusedError: It names the first one that differs.
    """
    for name, before in settings.items():
        now = json.loads(json.dumps(getattr(args, name, None)))
        # With two experts the first one's length tells where the second begins.
        is_fixed = getattr(args, "expert", None) == "both" and name in ("max_train_steps", "num_train_epochs")
        if now != before and (is_fixed or name not in ROWS or ROWS[name].change is FIXED):
            label = ROWS[name].label if name in ROWS else name
            raise RefusedError(
                f"{label} is {now} and was {before} in {path}: a resumed run keeps the settings it had. Give "
                "the old value, or start a new run."
            )


def describe_checkpoint(found):
    """Return what all processes have to find alike, from what `find_checkpoint` returns."""
    return {"the checkpoint of --resume_from_checkpoint": found}


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
            given = (args.pretrained_model_name_or_path, args.transformer_path, args.lora_init_path)
            raise RefusedError(
                f"--resume_from_checkpoint {args.resume_from_checkpoint}: its run had a {part} of other weights than "
                f"this one ({', '.join(filter(None, given))}). Give those it had, which may have moved, or start a "
                "new run."
            )


def _refuse_to_repeat(args):
    """Raise if the run in the output folder has ended: to start it again would replace its results."""
    try:
        ended = "measured" in json.loads((pathlib.Path(args.output_dir) / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if ended:
        _refuse_unless_dry_run(
            args,
            f"--resume_from_checkpoint latest: {args.output_dir} holds the results of a run that has ended, and no "
            "checkpoint to resume from; give another --output_dir, or start from its weights with --lora_init_path or "
            "--transformer_path.",
        )


def _refuse_unless_dry_run(args, message):
    """Raise `RefusedError`, or in a dry run log what the run itself would be refused for."""
    if not args.dry_run:
        raise RefusedError(message)
    logger.warning("without --dry_run this would be refused: %s", message)


def _check_processes(args, before, accelerator):
    """Log that a run continues with another number of processes, or raise if part of the state belongs to one."""
    now = accelerator.num_processes
    if before == now:
        return
    changed = f"--resume_from_checkpoint: this run has {now} processes, that of the checkpoint had {before}"
    if uses_deepspeed(accelerator):
        raise RefusedError(f"{changed}, over which DeepSpeed has spread the optimizer's state; start as many.")
    if args.lora_dropout:
        raise RefusedError(f"{changed}, each with its own random state for --lora_dropout; start as many.")
    logger.warning(
        "%s; samples, noise and sigmas stay the same, gradients are added up in another order (rounding)", changed
    )


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
        if differing := sorted(set(tensors) ^ set(weights.parameters)):
            raise RefusedError(
                f"--resume_from_checkpoint: the checkpoint trains other parameters than this run, such as "
                f"{', '.join(differing[:3])}; resume with the flags that it was made with."
            )
        weights.load(tensors)

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
    on_main_process(accelerator, lambda: _delete_unfinished(output_dir))

    def complete():
        files = sorted(path for path in unfinished.rglob("*") if path.is_file())
        state = {"step": step, "arguments": vars(args)} | batches.identity
        state["files"] = {str(file.relative_to(unfinished)): file.stat().st_size for file in files}
        (unfinished / _STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        rename_folder(unfinished, final)
        delete_folder(_set_aside(final))

    def delete_old():
        for old in list(list_checkpoints(output_dir).values())[: -args.checkpoints_total_limit]:
            delete_folder(old)

    kwargs = {"exclude_frozen_parameters": True} if uses_deepspeed(accelerator) else {}
    try:
        together(accelerator, lambda: accelerator.save_state(unfinished, **kwargs))
        on_main_process(accelerator, complete)
    # torch and safetensors have errors of their own for a disk that is full.
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        problem = str(error)
        if "inline_container" in problem or "iostream" in problem:  # torch does not say why
            problem = f"a file was cut off, as where the disk is full ({problem})"
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise FailedError(
            f"{final.name} cannot be written to {output_dir}: {problem}. The checkpoints before it are as they were; "
            "make room and continue with --resume_from_checkpoint latest."
        ) from error
    if args.checkpoints_total_limit is not None:
        on_main_process(accelerator, delete_old)


def _delete_unfinished(output_dir):
    """Delete what a run that was killed has left of checkpoints that it was writing or deleting."""
    for left in (*output_dir.glob("checkpoint-*.tmp"), *output_dir.glob("checkpoint-*.old")):
        shutil.rmtree(left, ignore_errors=True)


def _set_aside(path):
    return path.with_name(path.name + ".replaced")


def load_checkpoint(accelerator, path, lr_scheduler):
    """Load the training state that `save_checkpoint` wrote. Every process must call it.

    Args:
        accelerator (`Accelerator`), path (`pathlib.Path`)
        lr_scheduler (`LambdaLR`): That of this run; it holds, also where the length of the run changed.
    """

    def set_later_ones_aside():
        output_dir, step = pathlib.Path(accelerator.project_dir), _read_state(path)["step"]
        _delete_unfinished(output_dir)  # no later save might do it
        for later in [other for number, other in list_checkpoints(output_dir).items() if number > step]:
            # Or `latest` would resume from them before this run is as far.
            delete_folder(_set_aside(later))
            later.rename(_set_aside(later))
            logger.warning(
                "%s is later than %s, from which this run continues: it is set aside as %s until there is a new one",
                *(later, path.name, _set_aside(later).name),
            )

    on_main_process(accelerator, set_later_ones_aside)
    kwargs = {"load_module_strict": False} if uses_deepspeed(accelerator) else {}
    accelerator.load_state(path, **kwargs)
    # It counts micro-batches, of which a step may have another number now; a checkpoint is of the end of a step.
    accelerator.step = 0
    # The rate in the state was made by the schedule of that run, whose end may be the middle of this one.
    rate = lr_scheduler.base_lrs[0] * lr_scheduler.lr_lambdas[0](lr_scheduler.last_epoch)
    lr_scheduler.optimizer.param_groups[0]["lr"] = rate
    lr_scheduler._last_lr = [rate]
