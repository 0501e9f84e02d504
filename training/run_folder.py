"""The folder of a run: one run at a time has it, and all of its processes see the same one."""

import contextlib
import datetime
import fcntl
import logging
import os
import pathlib
import platform
import time

from runtime.errors import RefusedError
from runtime.processes import agreed
from training.flags import PATH, PATHS, ROWS


logger = logging.getLogger(__name__)

# A kill leaves the file behind: the lock on it counts, not the file.
LOCK_FILE = "run.lock"

# A process that was killed may have much memory to free before it releases its lock.
_PATIENCE_SECONDS = 5

# Machines may have the same thing at different places: what is there is compared when it is read.
_PLACES = {"datasets", *(name for name, flag in ROWS.items() if flag.kind in (PATH, PATHS))}


@contextlib.contextmanager
def claim_output_dir(args, accelerator):
    """Context in which the output folder exists and belongs to this run alone. Every process must enter it.

    Several processes also check that they were started alike and see the same folder.

    Args:
        args (`argparse.Namespace`), accelerator (`Accelerator`)

    Raises:
        RefusedError: Another run has the folder, it cannot be written, or the processes differ; on all of them.
    """
    output_dir, is_main = pathlib.Path(args.output_dir), accelerator.is_main_process
    file = output_dir / LOCK_FILE
    with contextlib.ExitStack() as stack:
        holder = agreed(accelerator, lambda: stack.enter_context(_locked(file)) if is_main else None)
        alike = {flag.label: getattr(args, name, None) for name, flag in ROWS.items() if name not in _PLACES}
        agreed(accelerator, lambda: alike, dict)

        def see():
            found = holder
            with contextlib.suppress(OSError):
                # Listing the folder makes a network file system ask for what is there now.
                if not is_main and LOCK_FILE in os.listdir(output_dir):
                    found = file.read_text(encoding="utf-8")
            return {"the folder of --output_dir": found}

        agreed(accelerator, see, dict, patience_seconds=10)
        yield


@contextlib.contextmanager
def _locked(path):
    """Context in which this process has the lock on a file; yields what it has written there.

    What was made is deleted: the file, and its folders if they are empty at the end.
    """
    missing = [folder for folder in path.parents if not folder.exists()]
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(_remove_empty, missing)
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(_take_lock(path))
            stack.callback(path.unlink, missing_ok=True)  # before the lock is released
            started = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
            holder = f"process {os.getpid()} on {platform.node()}, started {started}\n"
            file.truncate(0)
            file.write(holder)
            file.flush()
        except OSError as error:
            raise RefusedError(f"--output_dir {path.parent} cannot be written: {error.strerror}.") from None
        yield holder


def _take_lock(path):
    """Return the open file of a lock, locked if its file system can do that.

    This kind of lock belongs to the process alone, not to workers that it forks and that may outlive it. It is also
    gone when the process closes the file, however often it has it open: nothing else here opens it.

    Raises:
        RefusedError: Another process has the lock, and keeps it.
    """
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        file = open(path, "a+", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                # Or the run before has deleted it in between, and another one may have the lock of a new file.
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return file
            file.close()
        except (BlockingIOError, PermissionError):
            with file:
                file.seek(0)
                holder = file.read().strip() or "a process that has just started"
            if time.monotonic() > end:
                where = f"--output_dir {path.parent} is in use by another run: {holder}"
                raise RefusedError(f"{where}; wait until it ends, stop it, or give another folder.") from None
            time.sleep(0.1)
        except OSError as error:
            where = f"--output_dir {path.parent} is on a file system without locks ({error.strerror})"
            logger.warning(f"{where}: nothing keeps another run out of it")
            return file


def _remove_empty(folders):
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
