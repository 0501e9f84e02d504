"""The ways in which a run ends early, and their exit codes."""

import contextlib
import ctypes
import errno
import os
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

# What a disk reports when nothing can be written to it (any more).
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


@contextlib.contextmanager
def exit_codes(*failures):
    """Context that turns these errors into one sentence on stderr and the exit code. Other errors pass unchanged.

    Args:
        *failures (`type`): Further classes of errors that are treated like `FailedError`.
    """
    rank = os.environ.get("RANK", "0")
    try:
        if signal.getsignal(signal.SIGINT) is _end_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        return
    except StoppedError as stopped:
        code, text = 3, str(stopped) if rank == "0" else ""
    except KeyboardInterrupt:
        code, text = 1, _INTERRUPTED
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        code, text = 1, f"error: {error}; what was complete before still is"
    except (RefusedError, FailedError, *failures) as error:
        code, text = 2 if isinstance(error, RefusedError) else 1, f"error: {error}"
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            # Only the first process prints a list.
            text = str(error) if rank == "0" else str(error).partition("\n")[0]
            text = f"error (process {rank}): {text}"
    if text:
        print(text, file=sys.stderr)
    sys.exit(code)


def interrupt_quietly():
    """Let Ctrl-C end the process with one line until `exit_codes` is entered: some imports would swallow it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as in the background
        signal.signal(signal.SIGINT, _end_at_once)


def _end_at_once(number, frame):
    os.write(2, f"{_INTERRUPTED}\n".encode())
    os._exit(1)


def end_with_launcher():
    """Receive a SIGTERM when the launcher of Accelerate or torchrun ends, however it ends. Only Linux can do this.

    A process that was started by a shell outlives it.
    """
    # The launchers set these.
    if sys.platform != "linux" or {"TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_MODE"}.isdisjoint(os.environ):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGTERM)


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
