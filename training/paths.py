"""The paths that a run is given: which must be there, which may be on the hub, which must not lie in each other."""

import fnmatch
import itertools
import os

from huggingface_hub import try_to_load_from_cache

from runtime.errors import RefusedError
from runtime.hub import is_hub_id, why_not_on_hub


# What a run writes, replaces or deletes at the top of its output folder.
_RUN_FILES = ("checkpoint-*", "validation", "blockwise", "wandb", "README.md", "run.json", "dataset.jsonl")
_RUN_FILES += ("dry_run.json", "metrics.jsonl", "metrics.png", "memory.png", "contact_sheet.png", "wandb_run_id.txt")
_RESULTS = {
    "full": ("transformer", "transformer_2"),
    "lora": ("pytorch_lora_weights.safetensors", "high_noise", "low_noise"),
}
_CACHE_ENTRIES = ("captions", "media", "index-*.jsonl")


# ---------------------------------------------------------------- what must be there


def check_paths(args):
    """Check the paths that the flags and config files give, before anything is read or written.

    Args:
        args (`argparse.Namespace`): From `parse_args`.

    Raises:
        RefusedError: Something is not there, neither here nor, for a model, on the hub; or a folder lies where it
            would do harm.
    """
    named = [(f"--{name}", getattr(args, name)) for name in ("output_dir", "cache_dir", "resume_from_checkpoint")]
    read = _read_paths(args)
    for setting, path in [*named, *read]:
        if path is not None and path.startswith("~") and not os.path.exists(path):
            raise RefusedError(f"{setting} {path}: ~ stands for no folder here; write {os.path.expanduser(path)}.")
    for setting, path in read:
        is_local = setting in ("--transformer_path", "--lora_init_path")
        if setting.startswith(("--dataset_metadata", "--validation_image")) or os.path.exists(path):
            continue  # those are looked for beside the dataset too, and need no hub
        if is_local or not is_hub_id(path):
            what = "file or folder" if is_local else "folder, and it is no hub id ('name' or 'owner/name')"
            raise RefusedError(f"{setting} {path}: there is no such {what}; looked for was {os.path.abspath(path)}.")
    model = args.pretrained_model_name_or_path
    if os.path.isfile(model):
        raise RefusedError(f"--pretrained_model_name_or_path {model} is a file; give the folder of a whole pipeline.")
    if os.path.isdir(model) and args.revision is not None:
        raise RefusedError(f"--revision has no effect with a folder ({model}); remove it, or give a hub id.")
    _check_folders(args, read)
    # In one request: the libraries would try for half a minute.
    is_here = os.path.isdir(model) or isinstance(
        try_to_load_from_cache(model, "model_index.json", revision=args.revision), str
    )
    if not is_here and (problem := why_not_on_hub(model, "model", args.revision)):
        raise RefusedError(f"--pretrained_model_name_or_path {model}: {problem}.")


def _read_paths(args):
    """Return [(setting, path)] of what the run reads."""
    names = ("pretrained_model_name_or_path", "transformer_path", "lora_init_path")
    found = [(f"--{name}", getattr(args, name)) for name in names]
    for number, dataset in enumerate(args.datasets or [vars(args)], 1):
        of = f" of dataset {number}" if args.datasets else ""
        found += [(f"--{name}{of}", dataset[name]) for name in ("dataset_path", "dataset_metadata")]
    found += [("--validation_image", path) for path in getattr(args, "validation_image", None) or ()]
    return [(setting, path) for setting, path in found if path is not None]


# ---------------------------------------------------------------- folders in each other


def _check_folders(args, read):
    written = [("--output_dir", args.output_dir), ("--cache_dir", args.cache_dir)]
    walked = [entry for entry in read if "_metadata" not in entry[0] and "lora_init" not in entry[0]]
    if args.resume_from_checkpoint not in (None, "latest"):
        walked.append(("--resume_from_checkpoint", args.resume_from_checkpoint))
    for (setting, place), (other, folder) in itertools.product(written, walked):
        parts = _parts_inside(place, folder)
        if parts == [] and other == "--resume_from_checkpoint":
            continue  # it is no checkpoint, which is refused later
        # Names with a leading dot are looked at by nobody.
        if parts is not None and not any(part.startswith(".") for part in parts):
            raise RefusedError(
                f"{setting} {place} {'lies in' if parts else 'is'} {other} {folder}: the next run would find the "
                "files of this one among those that it reads; give a folder outside of it."
            )
    # Of what is read the result of this run must replace nothing.
    names = (*_RUN_FILES, *_RESULTS[args.training_mode])
    for setting, path in [*read, written[1]]:
        parts = _parts_inside(path, args.output_dir)
        replaced = parts and any(fnmatch.fnmatchcase(parts[0], name) for name in names)
        if replaced or (parts == [] and setting == "--lora_init_path"):
            raise RefusedError(
                f"{setting} {path} would be replaced or deleted by the run, which writes its own "
                f"{parts[0] if parts else 'LoRA'} to --output_dir {args.output_dir}; give another of the two."
            )
    for setting, path in [*read, written[0]]:
        parts = _parts_inside(path, args.cache_dir)
        if parts and any(fnmatch.fnmatchcase(parts[0], name) for name in _CACHE_ENTRIES):
            raise RefusedError(
                f"{setting} {path} lies among the entries of --cache_dir {args.cache_dir}; give another of the two."
            )


def _parts_inside(path, folder):
    """Return the names on the way from a folder to a path, [] if they are one, None if it is not inside."""
    parts = os.path.relpath(os.path.realpath(path), os.path.realpath(folder)).split(os.sep)
    return None if parts[0] == ".." else [part for part in parts if part != "."]
