"""metrics.jsonl and the progress bar: one record per optimizer step."""

import contextlib
import itertools
import json
import logging
import math
import os
import pathlib
import time

import psutil
import torch
from tqdm.auto import tqdm

from blockwise import offload
from runtime.errors import FailedError
from runtime.files import delete_folder, write_json_lines
from runtime.processes import gather_from_all, on_main_process
from training.checkpoints import clear_later_steps


logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"

# What trackers get of each line.
_TRACKED = ("loss", "lr", "grad_norm", "epoch", "seconds", "device_peak_bytes", "offloaded_bytes", "host_rss_bytes")

# What run.json records about parking in the last step.
_PARKING = ("parked_bytes", "bytes_to_device", "blocks_refused")


def read_metrics(path):
    """Return the lines of metrics.jsonl, without a last one that a crash cut off."""
    lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def keep_steps_before(first_step, accelerator, output_dir, checkpoint=None):
    """Take out of the output folder what is of `first_step` or later. Every process must call it.

    That is what an earlier run has left, or what a run did after the checkpoint, which is done again: lines of
    metrics.jsonl, results of validation, checkpoints.

    Args:
        first_step (`int`): The next step, counted over the whole run.
        accelerator (`Accelerator`), output_dir (`str`)
        checkpoint (`pathlib.Path`, *optional*): That the run resumes from; the earlier lines are next to it.

    Returns:
        `int`: How many of the last steps before were skipped since their gradients were not finite.
    """
    path = pathlib.Path(output_dir) / METRICS_FILE
    places = (checkpoint or path).parent / METRICS_FILE, path

    def keep():
        lines = next((read_metrics(place) for place in places if place.exists()), [])
        kept = [line for line in lines if line["step"] < first_step]
        if num_missing := first_step - 1 - len(kept):
            logger.warning("%s lacks %d of the steps before step %d", path, num_missing, first_step)
        write_json_lines(path, kept)
        for folder in path.parent.glob("validation/step-*"):
            if int(folder.name.rpartition("-")[2]) >= first_step:
                delete_folder(folder)
        clear_later_steps(path.parent, first_step - 1)
        return len(list(itertools.takewhile(lambda line: line["grad_norm"] is None, reversed(kept))))

    return on_main_process(accelerator, keep)


class Metrics:
    """Collects one record per optimizer step, keeps its tensors on the device, writes and shows them now and then.

    Args:
        training (`Training`): The trackers of its accelerator get the numbers too.
    """

    def __init__(self, training):
        self.training, self.accelerator, self.log = training, training.accelerator, training.log
        self.batches, self.dataset = training.batches, training.dataset
        self.path = pathlib.Path(training.args.output_dir) / METRICS_FILE
        self.pending, self.process = [], psutil.Process()
        self.last_time, self.last_parked = time.perf_counter(), offload.counters()
        steps, desc = training.steps, f"training {training.stage.name or ''}".rstrip()
        is_shown = self.accelerator.is_main_process
        self.bar = tqdm(total=steps.stop - 1, initial=steps.start - 1, desc=desc, disable=not is_shown)

    def add(self, step, loss, sample_losses, lr, grad_norm, may_be_bad=False):
        """Record an optimizer step, without waiting for the device.

        Args:
            step (`int`): Counted within the stage.
            loss (`torch.Tensor`, a scalar): Its mean over the processes is the mean over the samples of the step.
            sample_losses (`torch.Tensor`): Of each sample of this process.
            lr (`float`)
            grad_norm (`torch.Tensor`, a scalar, or `float`): Before clipping, of the whole gradient.
            may_be_bad (`bool`): The step was skipped since loss or gradient is not finite, and that is allowed.
        """
        now, parked, stage = time.perf_counter(), offload.counters(), self.training.stage
        peak_bytes, device = self.log.end_step(), self.accelerator.device
        line = {
            "step": self.training.steps_before + step,
            "epoch": self.batches.epoch(step),
            **({} if stage.name is None else {"expert": stage.name}),
            "loss": loss.detach(),
            "lr": lr,
            "grad_norm": torch.as_tensor(grad_norm).detach(),
            "sigmas": None,  # see `flush`
            "samples": [self.dataset.ids[index] for index in self.batches.step(step)],
            "seconds": now - self.last_time,
            "device_peak_bytes": peak_bytes,
            "device_reserved_bytes": None if peak_bytes is None else torch.accelerator.memory_reserved(device),
            "offloaded_bytes": parked["parked_bytes"] - self.last_parked["parked_bytes"],
            "host_rss_bytes": self.process.memory_info().rss,
        }
        self.pending.append((line, step, sample_losses, may_be_bad))
        self.log.parking = {name: parked[name] - self.last_parked[name] for name in _PARKING}
        self.last_time, self.last_parked = now, parked
        self.bar.update()

    @contextlib.contextmanager
    def aside(self):
        """Context for what is done between two steps and belongs to neither."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.last_time += seconds
        if not self.bar.disable:
            self.bar.last_print_t += seconds  # or it would count in the time that is left
        self.last_parked = offload.counters()

    def flush(self):
        """Write what was collected and show the last step. Every process must call it, at the same steps.

        Raises:
            FailedError: A loss or gradient norm is not finite.
        """
        if not self.pending:
            return
        pending, self.pending = self.pending, []
        lines = [line for line, *_ in pending]
        losses = self.accelerator.reduce(torch.stack([line["loss"] for line in lines]).float(), reduction="mean")
        norms = torch.stack([line["grad_norm"] for line in lines]).float()
        for line, loss, norm in zip(lines, losses.tolist(), norms.tolist(), strict=True):
            # JSON has no word for a number that is not finite.
            values = {"loss": loss, "grad_norm": norm}
            line |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        if self.accelerator.is_main_process:
            for line, step, *_ in pending:
                places = enumerate(self.batches.step(step))
                line["sigmas"] = [self.dataset.sigma(step, position, index) for position, index in places]
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())  # a checkpoint may follow, which counts on them
            for line in lines:
                values = {f"train/{name}": line[name] for name in _TRACKED if line[name] is not None}
                self.accelerator.log(values, step=line["step"])
        self.bar.set_postfix(loss=lines[-1]["loss"], lr=lines[-1]["lr"])
        for entry in pending:
            self._check(*entry)

    def _check(self, line, step, sample_losses, may_be_bad):
        """Raise if the numbers of a step are not finite, or warn if that is allowed."""
        if None not in (line["loss"], line["grad_norm"]):
            return
        own = itertools.chain(*self.batches.own_part(step, self.accelerator.process_index))
        finite = sample_losses.isfinite().tolist()
        bad = [self.dataset.ids[index] for (*_, index), good in zip(own, finite, strict=True) if not good]
        bad = set(itertools.chain(*gather_from_all(self.accelerator, bad)))
        what = "the loss is not finite for" if bad else "the gradient norm is not finite; its samples are"
        found = f"step {line['step']}: {what} {', '.join(sorted(bad or {*line['samples']}))}"
        if not may_be_bad:
            raise FailedError(f"{found}. Nothing was saved after the last checkpoint.")
        logger.warning("%s; the step was skipped, as --max_skipped_steps allows", found)
