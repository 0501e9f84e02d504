"""The paths that a run is given: which must exist, which may be on the hub, which must not lie inside each other."""

import fnmatch
import itertools
import os
import pathlib

from runtime.errors import RefusedError
from runtime.hub import fetched_folder, is_hub_id, why_not_on_hub
from training.export import LORA_FILE


# What a run writes, replaces or deletes at the top of its output folder, and of its cache.
_RUN_FILES = ("checkpoint-*", "validation", "blockwise", "wandb", "README.md", "run.json", "dataset.jsonl")
_RUN_FILES += ("dry_run.json", "metrics.jsonl", "metrics.png", "memory.png", "contact_sheet.png", "wandb_run_id.txt")
_RESULTS = {"full": ("transformer", "transformer_2"), "lora": (LORA_FILE, "high_noise", "low_noise")}
_CACHE_ENTRIES = ("captions", "media", "index-*.jsonl")


def check_paths(args):
    """Check the paths that the flags and config files give, before anything is read or written.

    Args:
        args (`argparse.Namespace`): From `parse_args`.

    Raises:
        RefusedError: Something is missing, on this machine and, for a model, on the hub; or a folder lies where it
            would do harm.
    """
    model = args.pretrained_model_name_or_path
    names = ("pretrained_model_name_or_path", "transformer_path", "lora_init_path")
    read = [(f"--{name}", getattr(args, name)) for name in names]
    for number, dataset in enumerate(args.datasets or [vars(args)], 1):
        of = f" of dataset {number}" if args.datasets else ""
        read += [(f"--{name}{of}", dataset[name]) for name in ("dataset_path", "dataset_metadata")]
    read += [("--validation_image", path) for path in getattr(args, "validation_image", None) or ()]
    read = [(setting, path) for setting, path in read if path is not None]
    for setting, path in read:
        is_local = setting in ("--transformer_path", "--lora_init_path")
        if setting.startswith(("--dataset_metadata", "--validation_image")) or os.path.exists(path):
            continue  # the former may be relative to the dataset
        if is_local or not is_hub_id(path):
            what = "file or folder" if is_local else "folder, and it is no hub id ('name' or 'owner/name')"
            raise RefusedError(f"{setting} {path}: there is no such {what}; the full path is {os.path.abspath(path)}.")
    if os.path.isfile(model):
        raise RefusedError(f"--pretrained_model_name_or_path {model} is a file; give the folder of a whole pipeline.")
    if os.path.isdir(model) and args.revision is not None:
        raise RefusedError(f"--revision has no effect with a folder ({model}); remove it, or give a hub id.")
    _check_folders(args, read)
    # In one request: the libraries would try for half a minute.
    if not os.path.isdir(model) and fetched_folder(model, args.revision) is None:
        if problem := why_not_on_hub(model, "model", args.revision):
            raise RefusedError(f"--pretrained_model_name_or_path {model}: {problem}.")


def _check_folders(args, read):
    """Raise if this run would replace something that it reads, or the next run would read something that it writes.

    Args:
        args (`argparse.Namespace`)
        read (`list[tuple[str, str]]`): Settings and paths of what the run reads.
    """
    written = {("--output_dir", args.output_dir): (*_RUN_FILES, *_RESULTS[args.training_mode])}
    written[("--cache_dir", args.cache_dir)] = _CACHE_ENTRIES
    walked = [entry for entry in read if "_metadata" not in entry[0] and "lora_init" not in entry[0]]
    for (setting, place), (other, folder) in itertools.product(written, walked):
        parts = _parts_inside(place, folder)
        # Names with a leading dot are never read.
        if parts is not None and not any(part.startswith(".") for part in parts):
            found = f"{setting} {place} {'lies in' if parts else 'is'} {other} {folder}"
            raise RefusedError(f"{found}: the next run would read the files of this one; give a folder outside of it.")
    for (setting, path), (other, folder) in itertools.product([*read, *written], written):
        if setting == "--lora_init_path" and os.path.isdir(path):
            path = os.path.join(path, LORA_FILE)
        parts = _parts_inside(path, folder)
        if parts and any(fnmatch.fnmatchcase(parts[0], pattern) for pattern in written[other, folder]):
            found = f"{setting} {path} would be replaced or deleted by the run, which writes its own {parts[0]}"
            raise RefusedError(f"{found} to {other} {folder}; give another of the two.")


def _parts_inside(path, folder):
    """Return the names on the way from a folder to a path, () if they are the same, None if it is not inside."""
    path, folder = pathlib.Path(path).resolve(), pathlib.Path(folder).resolve()
    return path.relative_to(folder).parts if path.is_relative_to(folder) else None
