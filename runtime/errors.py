"""The ways in which a run ends early, and their exit codes."""

import contextlib
import ctypes
import errno
import os
import pathlib
import re
import signal
import sys


class RefusedError(ValueError):
    """Bad input, found before training: one sentence that names the file, row or flag, what is wrong and what is
    allowed. Exit code 2."""


class FailedError(RuntimeError):
    """Failure while running. Exit code 1."""


class StoppedError(RuntimeError):
    """A signal asked the run to stop; its checkpoint is complete. Exit code 3."""


_INTERRUPTED = "error: interrupted; what was complete before still is"

# How a command line begins that starts processes for training, after Python and its options.
_LAUNCHER = re.compile(
    r"(^|/)(accelerate|accelerate-launch|torchrun)$|accelerate[./]commands[./]|torch[./]distributed[./](run|launch)"
)

# What a disk says on which nothing can be written (any more).
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


@contextlib.contextmanager
def exit_codes(*failures):
    """Context that turns these errors into one sentence on stderr and the exit code. Others pass as they are.

    Args:
        *failures (`type`): Further classes of errors that are treated as `FailedError` is.
    """
    try:
        if signal.getsignal(signal.SIGINT) is _end_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    except StoppedError as stopped:
        if os.environ.get("RANK", "0") == "0":
            print(stopped, file=sys.stderr)
        sys.exit(3)
    except KeyboardInterrupt:
        print(_INTERRUPTED, file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}; what was complete before still is", file=sys.stderr)
        sys.exit(1)
    except (RefusedError, FailedError, *failures) as error:
        rank, text = "", str(error)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            rank = f" (process {os.environ['RANK']})"
            # A list stands there once.
            text = text if os.environ["RANK"] == "0" else text.partition("\n")[0]
        print(f"error{rank}: {text}", file=sys.stderr)
        sys.exit(2 if isinstance(error, RefusedError) else 1)


def interrupt_quietly():
    """Let Ctrl-C end the process with one line until `exit_codes` is entered. Not every import would pass it on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as in the background
        signal.signal(signal.SIGINT, _end_at_once)


def _end_at_once(number, frame):
    os.write(2, f"{_INTERRUPTED}\n".encode())
    os._exit(1)


def end_with_launcher():
    """Get a SIGTERM when the launcher of Accelerate or torchrun ends, however it does, if this process is its child.

    Only Linux tells. A process with another parent, such as a shell, outlives it.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    # As torchrun or Accelerate set them; it was so quick to end that there is another parent already.
    is_orphan = parent == 1 and not {"TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_MODE"}.isdisjoint(os.environ)
    if _is_launcher(parent):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        is_orphan = os.getppid() != parent
    if is_orphan:
        os.kill(os.getpid(), signal.SIGTERM)


def _is_launcher(pid):
    try:
        words = iter(pathlib.Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[1:])
    except OSError:
        return False
    for word in words:
        if word in ("-W", "-X"):
            next(words, None)
        elif not word.startswith("-"):
            return _LAUNCHER.search(word) is not None
    return False


@contextlib.contextmanager
def refuse_unreadable_model(args):
    """Context for reading the configs of the model, which turns what the libraries raise into a refusal."""
    try:
        yield
    except (OSError, ValueError) as error:
        where = f"--pretrained_model_name_or_path {args.pretrained_model_name_or_path}"
        if args.transformer_path is not None:
            where += f" or --transformer_path {args.transformer_path}"
        raise RefusedError(f"{where} cannot be read: {' '.join(str(error).split())}") from error
