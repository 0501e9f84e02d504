"""How a command of this repository begins, before torch is imported, and how it ends."""

import gc
import logging
import os
import sys

from runtime.errors import end_with_launcher, exit_codes, interrupt_quietly
from training.arguments import parse_args


# What these say at import is meant for others: kernels that are not used here, and that images are resized by Pillow,
# as they are to be.
_TALKATIVE = ("bitsandbytes.backends.cpu.ops", "transformers.utils.import_utils")


def begin(description, values, **how):
    """Parse the command line at once, so that a typo costs nothing, and prepare the process for the imports to come.

    Args:
        description (`str`), values (`dict`), how: See `parse_args`.

    Returns:
        `argparse.Namespace`
    """
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    with exit_codes():
        end_with_launcher()
        args = parse_args(sys.argv[1:], description=description, values=values, **how)
    interrupt_quietly()
    if "." not in args.optimizer:  # bitsandbytes would load torch's compiler, which only a class of one's own may use
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    gc.disable()  # the imports make many objects, and no garbage worth the search
    return args


def finish(main, args):
    """Call `main(args, log)` with the `MemoryLog` of the run, and end with the exit code of what it raises."""
    from blockwise.log import MemoryLog, OutOfMemory

    gc.freeze()  # what the imports made stays, and need not be searched again
    gc.enable()
    with exit_codes(OutOfMemory), MemoryLog() as log:
        main(args, log)
