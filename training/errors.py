"""The ways in which a run ends early, and their exit codes."""

import contextlib
import errno
import os
import sys


class RefusedError(ValueError):
    """Bad input, found before training: one sentence that names the file, row or flag, what is wrong and what is
    allowed. Exit code 2."""


class FailedError(RuntimeError):
    """Failure while running. Exit code 1."""


class StoppedError(RuntimeError):
    """A signal asked the run to stop; its checkpoint is complete. Exit code 3."""


# What a disk says on which nothing can be written (any more).
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


@contextlib.contextmanager
def exit_codes(*failures):
    """Context that turns these errors into one sentence on stderr and the exit code. Others pass as they are.

    Args:
        *failures (`type`): Further classes of errors that are treated as `FailedError` is.
    """
    try:
        yield
    except StoppedError as stopped:
        if os.environ.get("RANK", "0") == "0":
            print(stopped, file=sys.stderr)
        sys.exit(3)
    except KeyboardInterrupt:
        print("error: interrupted; what was complete before still is", file=sys.stderr)
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
