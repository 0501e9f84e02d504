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


def keep_metrics(accelerator, output_dir, first_step, checkpoint=None):
    """Delete the lines of metrics.jsonl, and the results of validation, from `first_step` on.

    They are of an earlier run, or of steps after the checkpoint, which are made again. Every process must call it.

    Args:
        accelerator (`Accelerator`), output_dir (`str`)
        first_step (`int`): Counted over the whole run.
        checkpoint (`pathlib.Path`, *optional*): That the run resumes from; the earlier lines are next to it.

    Returns:
        `int`: How many of the last steps before were skipped since their gradients were not finite.
    """
    path, kept = pathlib.Path(output_dir) / METRICS_FILE, []
    earlier = checkpoint.parent / METRICS_FILE if checkpoint is not None else path
    earlier = earlier if earlier.exists() else path

    def keep():
        if first_step > 1 and earlier.exists():
            kept.extend(line for line in read_metrics(earlier) if line["step"] < first_step)
        if len(kept) != first_step - 1:
            logger.warning("%s lacks %d of the steps before step %d", path, first_step - 1 - len(kept), first_step)
        write_json_lines(path, kept)
        for folder in path.parent.glob("validation/step-*"):
            if int(folder.name.rpartition("-")[2]) >= first_step:
                delete_folder(folder)
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
            grad_norm (`torch.Tensor`, a scalar): Before clipping, of the whole gradient.
            may_be_bad (`bool`): The step was skipped since loss or gradient is not finite, and that is allowed.
        """
        now, parked = time.perf_counter(), offload.counters()
        record = {"step": step, "lr": lr, "seconds": now - self.last_time, "device_peak_bytes": self.log.end_step()}
        record["offloaded_bytes"] = parked["parked_bytes"] - self.last_parked["parked_bytes"]
        self.log.parking = {name: parked[name] - self.last_parked[name] for name in _PARKING}
        record["host_rss_bytes"] = self.process.memory_info().rss
        self.last_time, self.last_parked = now, parked
        self.pending.append((record, loss.detach(), grad_norm.detach(), sample_losses, may_be_bad))
        self.bar.update()

    @contextlib.contextmanager
    def aside(self):
        """Context for what is done between two steps and belongs to neither."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.last_time += seconds
        if not self.bar.disable:
            self.bar.start_t += seconds  # or the time that is left would be wrong
        self.last_parked = offload.counters()

    def flush(self):
        """Write what was collected and show the last step. Every process must call it, at the same steps.

        Raises:
            FailedError: A loss or gradient norm is not finite.
        """
        if not self.pending:
            return
        records, losses, norms, sample_losses, may_be_bad = zip(*self.pending, strict=True)
        self.pending = []
        losses = self.accelerator.reduce(torch.stack(losses).float(), reduction="mean").tolist()
        norms = torch.stack(norms).float().tolist()
        if self.accelerator.is_main_process:
            lines = [self._line(*entry) for entry in zip(records, losses, norms, strict=True)]
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())  # a checkpoint may follow, which counts on them
            for line in lines:
                values = {f"train/{name}": line[name] for name in _TRACKED if line[name] is not None}
                self.accelerator.log(values, step=line["step"])
        self.bar.set_postfix(loss=f"{losses[-1]:.4f}", lr=f"{records[-1]['lr']:.2e}")
        for entry in zip(records, losses, norms, sample_losses, may_be_bad, strict=True):
            self._check(*entry)

    def _check(self, record, loss, norm, sample_losses, may_be_bad):
        """Raise if the numbers of a step are not finite, or warn if that is allowed."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        own = itertools.chain(*self.batches.own_part(record["step"], self.accelerator.process_index))
        finite = sample_losses.isfinite().tolist()
        bad = [self.dataset.ids[index] for (*_, index), good in zip(own, finite, strict=True) if not good]
        bad = set(itertools.chain(*gather_from_all(self.accelerator, bad)))
        what = "the loss is not finite for" if bad else "its samples are"
        samples = bad or {self.dataset.ids[index] for index in self.batches.step(record["step"])}
        where = f"step {self.training.steps_before + record['step']} has loss {loss} and gradient norm {norm}; "
        where += f"{what} {', '.join(sorted(samples))}"
        if not may_be_bad:
            raise FailedError(f"{where}. Nothing was saved after the last checkpoint.")
        logger.warning("%s; the step was skipped, as --max_skipped_steps allows", where)

    def _line(self, record, loss, grad_norm):
        """Return the line of metrics.jsonl for one optimizer step."""
        step, indices = record["step"], self.batches.step(record["step"])
        return {
            "step": self.training.steps_before + step,
            "epoch": self.batches.epoch(step),
            **({} if self.training.stage.name is None else {"expert": self.training.stage.name}),
            "loss": loss if math.isfinite(loss) else None,  # JSON has no other word for it
            "lr": record["lr"],
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
            "sigmas": [self.dataset.sigma(step, position, index) for position, index in enumerate(indices)],
            "samples": [self.dataset.ids[index] for index in indices],
        } | {name: value for name, value in record.items() if name != "step"}

    def close(self):
        """Write what is left, and end the bar and the watch over memory."""
        self.flush()
        self.bar.close()
        self.log.end_training()
