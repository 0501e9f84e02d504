"""The folder of a run: one run at a time has it, and all of its processes see the same one."""

import contextlib
import datetime
import fcntl
import hashlib
import logging
import os
import pathlib
import platform
import time
import uuid

from runtime.errors import RefusedError
from runtime.processes import agreed, gather_from_all
from training.flags import PATH, PATHS, ROWS


logger = logging.getLogger(__name__)

# A kill leaves the file behind: the lock on it counts, not the file.
LOCK_FILE = "run.lock"

# A process that was killed may have much memory to free before it releases its lock.
_PATIENCE_SECONDS = 5

# What every process reads for itself. Dataset and checkpoint are compared when they are read.
_INPUTS = ("pretrained_model_name_or_path", "transformer_path", "lora_init_path", "validation_image")
# Machines may have the same thing at different places.
_PLACES = {"datasets", *(name for name, flag in ROWS.items() if flag.kind in (PATH, PATHS))}


@contextlib.contextmanager
def claim_output_dir(args, accelerator):
    """Context in which the output folder exists and belongs to this run alone. Every process must enter it.

    Several processes also check that they were started alike and see the same folders and inputs.

    Args:
        args (`argparse.Namespace`), accelerator (`Accelerator`)

    Raises:
        RefusedError: Another run has the folder, it cannot be written, or the processes differ; on all of them.
    """
    output_dir = pathlib.Path(args.output_dir)
    with contextlib.ExitStack() as stack:
        agreed(accelerator, lambda: accelerator.is_main_process and stack.enter_context(_locked(output_dir)))
        if accelerator.num_processes > 1:
            alike = {flag.label: getattr(args, name, None) for name, flag in ROWS.items() if name not in _PLACES}
            alike |= {f"what is at --{name}": _sizes_at(getattr(args, name, None)) for name in _INPUTS}
            agreed(accelerator, lambda: alike, dict)
            _check_shared("output_dir", output_dir, accelerator)
            _check_shared("cache_dir", pathlib.Path(args.cache_dir), accelerator)
        yield


@contextlib.contextmanager
def _locked(output_dir):
    """Context in which this process has the lock of a folder, which is made if need be."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_made(output_dir))
            file = stack.enter_context(_take_lock(output_dir))
            started = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}, started {started}\n")
            file.flush()
        except OSError as error:
            raise RefusedError(f"--output_dir {output_dir} cannot be written: {error.strerror}.") from None
        stack.callback(pathlib.Path(file.name).unlink, missing_ok=True)  # before the lock is released
        yield


def _take_lock(output_dir):
    """Return the lock file of a folder, open, and locked if its file system can do that."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        file = open(output_dir / LOCK_FILE, "a+", encoding="utf-8")
        try:
            # This kind of lock belongs to the process alone, not to workers that it forks and that may outlive it. It
            # is also gone when the process closes the file, however often it has it open: nothing here reads it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                # Or the run before has deleted it in between, and another one may have the lock of a new file.
                if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
                    return file
            file.close()
        except (BlockingIOError, PermissionError):
            with file:
                file.seek(0)
                holder = file.read().strip() or "a process that has just started"
            if time.monotonic() > end:
                where = f"--output_dir {output_dir} is in use by another run: {holder}"
                raise RefusedError(f"{where}; wait until it ends, stop it, or give another folder.") from None
            time.sleep(0.1)
        except OSError as error:
            where = f"--output_dir {output_dir} is on a file system without locks ({error.strerror})"
            logger.warning(f"{where}: nothing keeps another run out of it")
            return file


@contextlib.contextmanager
def _made(folder):
    """Context in which a folder exists. What was made of it is deleted if it is empty at the end."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


def _check_shared(flag, folder, accelerator):
    """Raise on all processes if one of them does not see what the main process writes into a folder."""
    probe = folder / f".{gather_from_all(accelerator, uuid.uuid4().hex)[0]}"

    def is_seen():
        # Listing it makes a network file system ask for what is there now.
        return folder.is_dir() and probe.name in os.listdir(folder)

    with contextlib.ExitStack() as stack:
        if accelerator.is_main_process:
            with contextlib.suppress(OSError):  # a cache that is complete need not be writable
                stack.enter_context(_made(folder))
                probe.touch()
                stack.callback(probe.unlink, missing_ok=True)
        if gather_from_all(accelerator, probe.exists())[0]:
            agreed(accelerator, is_seen, lambda seen: {f"the folder of --{flag}": seen}, patience_seconds=10)


def _sizes_at(paths):
    """Return what is at some paths in a form that can be compared: the sizes of files, not all of their bytes."""
    if isinstance(paths, list):
        return [_sizes_at(path) for path in paths]
    if paths is None or not os.path.exists(paths):
        return None
    path = pathlib.Path(paths)
    if path.is_dir():
        files = sorted(file for suffix in ("json", "safetensors") for file in path.rglob(f"*.{suffix}"))
        return [[file.relative_to(path).as_posix(), file.stat().st_size] for file in files]
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.sha256(file.read(2**20)).hexdigest()]
