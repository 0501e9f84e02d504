"""How the processes of a run agree: on values, on refusals, on a request to stop."""

import datetime
import functools
import hashlib
import json
import platform
import signal
import time

import torch

from runtime.errors import FailedError, RefusedError


@functools.cache
def _patient_group():
    # One process may prepare data for hours while the others wait. The group that trains has a shorter limit, since
    # it is to notice when a process hangs.
    return torch.distributed.new_group(backend="gloo", timeout=datetime.timedelta(days=30))


def gather_from_all(accelerator, value):
    """Return the values of all processes, in their order. Every process must call it; it waits as long as it takes."""
    if accelerator.num_processes == 1:
        return [value]
    values = [None] * accelerator.num_processes
    try:
        torch.distributed.all_gather_object(values, value, group=_patient_group())
    except RuntimeError as error:
        raise FailedError(f"another process of this run has ended, see its own message ({error})") from error
    return values


def agreed(accelerator, look, describe=lambda value: {}, patience_seconds=0):
    """Return what `look` returns. Every process must call it.

    Args:
        accelerator (`Accelerator`)
        look (`Callable[[], object]`): May refuse.
        describe (`Callable[[object], dict]`):
            From what `look` returns to what must be the same on all processes: by name, values that JSON takes.
        patience_seconds (`float`): How long all look again where they do not see the same.

    Raises:
        RefusedError: On all processes: one of them refuses, or differs from the main one.
    """
    if accelerator.num_processes == 1:
        return look()
    end = time.monotonic() + patience_seconds
    while True:
        value, problem, digests = None, None, {}
        try:
            value = look()
            digests = {name: _digest(part) for name, part in describe(value).items()}
        except RefusedError as error:
            problem = str(error)
        seen = gather_from_all(accelerator, (platform.node(), problem, digests, time.monotonic() > end))
        host, first_problem, first_digests, is_over = seen[0]
        if first_problem is not None:
            raise RefusedError(first_problem)
        if all(other[1:3] == seen[0][1:3] for other in seen):
            return value
        if is_over:
            break
        time.sleep(0.5)
    for index, (other_host, problem, digests, _) in enumerate(seen):
        where = f"process {index} on {other_host}"
        if problem is not None:
            raise RefusedError(f"{where}: {problem}")
        for name in {**first_digests, **digests}:
            if first_digests.get(name) != digests.get(name):
                raise RefusedError(f"{name} differs between {where} and process 0 on {host}; all need the same.")


def _digest(value):
    # A class is described by its name; a default that is not known yet by null.
    text = json.dumps(value, sort_keys=True, default=lambda value: getattr(value, "name", None))
    return hashlib.sha256(text.encode()).hexdigest()


def together(accelerator, work):
    """Return what `work` returns on each process, in their order. Every process must call it.

    Raises:
        Exception: On all processes if `work` fails on one: there its own error, on the others a `RefusedError` or
            `FailedError` with the same words.
    """
    value = error = None
    try:
        value = work()
    except Exception as raised:  # whatever it is, the others wait
        error = raised
    seen = gather_from_all(accelerator, (value, error and str(error), isinstance(error, RefusedError)))
    if error is not None:
        raise error
    for _, problem, is_refused in seen:
        if problem is not None:
            raise (RefusedError if is_refused else FailedError)(problem)
    return [value for value, *_ in seen]


def on_main_process(accelerator, work):
    """Return on all processes what `work` returns on the main one, which alone calls it; raises as `together` does."""
    return together(accelerator, work if accelerator.is_main_process else lambda: None)[0]


def full_tensors(tensors):
    """Yield named tensors whole, where every process may hold a part of each only.

    Every process must take them all. Those that are not sharded are not copied.

    Args:
        tensors (`Iterable[tuple[str, torch.Tensor]]`)
    """
    for name, tensor in tensors:
        tensor = tensor.detach()
        yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # a DTensor


class StopRequest:
    """Context in which SIGTERM and SIGINT do not end the process, but ask it to stop after the current step.

    In a run of one process a second Ctrl-C ends it at once.

    Args:
        accelerator (`Accelerator`)
    """

    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.signal = 0

    def __enter__(self):
        self._before = {number: signal.signal(number, self._record) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number, frame):
        # The first signal counts: where a terminal sends SIGINT, a SIGTERM follows when the launcher has ended.
        self.signal = self.signal or number
        if number == signal.SIGINT and self.accelerator.num_processes == 1:
            # With several processes the launcher repeats what the terminal has already sent to each of them.
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])

    def agreed(self):
        """Return the name of a signal that any of the processes has received, or None: the same on all of them.

        Every process must call it, after the same steps. It waits for the hosts of the others, not for a device.
        """
        number = max(gather_from_all(self.accelerator, self.signal))
        return signal.Signals(number).name if number else None
