"""What a run writes about itself: run.json, dataset.jsonl, metrics.jsonl, the progress bar."""

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import pathlib
import platform
import time

import psutil
import torch
from tqdm.auto import tqdm

from blockwise import offload
from dataset.cache import installed_version
from dataset.report import describe_data
from runtime.errors import FailedError
from runtime.files import delete_folder, whole_file, write_json_lines, write_text
from runtime.processes import gather_from_all
from training.checkpoints import list_checkpoints
from training.forecast import check_fits, compare_forecast, describe_disk, describe_forecast
from training.trackers import draw_metrics


logger = logging.getLogger(__name__)

_PACKAGES = ("torchvision", "accelerate", "diffusers", "transformers", "peft", "datasets", "safetensors", "numpy")
_PACKAGES += ("deepspeed",)


# What trackers get of each line of metrics.jsonl.
_TRACKED = ("loss", "lr", "grad_norm", "epoch", "seconds", "device_peak_bytes", "offloaded_bytes", "host_rss_bytes")

# What run.json says of parking in the last step, beside how many bytes it was.
_PARKING = ("bytes_to_host", "bytes_to_device", "blocks_refused", "waits", "unsatisfied_waits")


class RunRecord:
    """run.json and dataset.jsonl; says on the screen what is about to be trained, and what it will need.

    Args:
        accelerator (`Accelerator`): The main process writes.
        args (`argparse.Namespace`)
        log (`MemoryLog`): Is told what to expect, and asked at the end what was.
        plan (`MemoryPlan`)
        forecast (`RunForecast`)
        items (`list[Item]`): From `inspect_rows`, also those that are dropped.
        batches (`BatchPlan`)
        num_tokens (`Callable[[int, int, int], int]`): From height, width and frames to the tokens of a sample.

    Raises:
        RefusedError: The device is too small. The files are written before.
    """

    def __init__(self, accelerator, args, log, plan, forecast, items, batches, *, num_tokens):
        self.log, self.batches = log, batches
        self.output_dir = pathlib.Path(args.output_dir)
        # That of torch with its build, which the metadata of its CUDA wheels lack.
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions |= {package: version for package in _PACKAGES if (version := installed_version(package))}
        self.content = {
            "arguments": vars(args),
            "versions": versions,
            "plan": plan.as_dict(),
            "trainable": [
                {"name": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
                for name, (shape, dtype) in forecast.parameters.items()
            ],
            "forecast": forecast.describe(plan),
        }
        log.forecast_bytes = self.content["forecast"]["training_peak_bytes"]
        log.suggestions = functools.partial(forecast.suggestions, plan)
        self.path = self.output_dir / "run.json"
        if args.dry_run and _is_record_of_a_run(self.path):
            self.path = self.output_dir / "dry_run.json"  # all else of that run is left alone, too
        if accelerator.is_main_process:
            if self.path.name == "run.json":
                write_json_lines(self.output_dir / "dataset.jsonl", [item.record for item in items])
            self._write()
        count = sum(math.prod(shape) for shape, _ in forecast.parameters.values())
        accelerator.print(f"{len(forecast.parameters)} tensors with {count:,} parameters are trained, in fp32")
        data = describe_data(args, items, batches, num_tokens=num_tokens, cache_bytes=forecast.cache_bytes)
        accelerator.print(batches.describe())
        stages = 2 if getattr(args, "expert", None) == "both" else 1
        disk = describe_disk(forecast, stages * batches.last_step, len(list_checkpoints(self.output_dir)))
        for line in (*data, *plan.describe(), *describe_forecast(self.content["forecast"]), disk):
            accelerator.print(line)
        accelerator.print(check_fits(forecast, plan))

    def finish(self):
        """Add what was measured, draw it, and print forecast against measured and the points of the log."""
        self.log.point("final")
        steps, watched = read_metrics(self.output_dir / "metrics.jsonl"), self.log.watched
        device_peak_bytes = max((step["device_peak_bytes"] or 0 for step in steps), default=0)
        phases = self.log.phases()
        # Not of the first step of a transformer, in which shared tensors are not known yet. A step has as many
        # micro-batches as the first one, or fewer.
        parked = [step["offloaded_bytes"] for step in steps if (step["step"] - 1) % self.batches.last_step]
        parked_bytes = max(parked or [steps[-1]["offloaded_bytes"]]) // len(self.batches.micro_batches(1))
        measured = {
            "training_peak_bytes": device_peak_bytes or (watched and watched.peak_bytes) or None,
            "peak_phase": max(phases, key=phases.get, default=None),
            "phases": phases,
            "by_category": watched.by_category if watched else {},
            "parked_bytes": parked_bytes,  # of one forward pass
            "host_bytes": self._host_bytes(max(step["host_rss_bytes"] for step in steps)),
            "parking": {**(self.log.parking or {}), "pool_peak_bytes": offload.counters()["pool_peak_bytes"]},
            "data": self.log.data,
        }
        self.content |= {"measured": measured, "memory_points": self.log.points}
        with whole_file(self.output_dir / "memory.png") as picture:
            self.log.plot(picture, forecast_bytes=self.log.forecast_bytes)
        with whole_file(self.output_dir / "metrics.png") as picture:
            draw_metrics(picture, steps, self._validation_losses())
        self._write()  # says that all else is there
        print("\n".join(compare_forecast(self.content["forecast"], measured)))
        if measured["parked_bytes"] or (self.log.parking and self.log.parking["blocks_refused"]):
            print(
                "parking in the last step: " + ", ".join(f"{key} {value}" for key, value in self.log.parking.items())
            )
        print(self.log.table())

    def _host_bytes(self, rss_bytes):
        """Return what all local processes hold if each holds what this one does; the pages that they share once."""
        shared = getattr(psutil.Process().memory_info(), "shared", 0)  # only Linux tells
        return rss_bytes + (self.content["forecast"]["num_local_processes"] - 1) * (rss_bytes - shared)

    def _validation_losses(self):
        """Return [(step, loss of what is held out)]; what runs before have left went when this one started."""
        files = self.output_dir.glob("validation/step-*/loss.json")
        records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        return sorted((record["step"], record["loss"]) for record in records)

    def _write(self):
        write_text(self.path, json.dumps(self.content, indent=2, ensure_ascii=False) + "\n")


def _is_record_of_a_run(path):
    """Return whether this is the run.json of a run, of which a dry run replaces nothing."""
    try:
        return not json.loads(path.read_text(encoding="utf-8"))["arguments"]["dry_run"]
    except FileNotFoundError:
        return False
    except (OSError, ValueError, LookupError, TypeError):
        return True


def read_metrics(path):
    """Return the lines of metrics.jsonl, without a last one that a crash cut off."""
    lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Metrics:
    """Collects one record per optimizer step, keeps its tensors on the device, writes and shows them now and then.

    Args:
        accelerator (`Accelerator`)
        path (`pathlib.Path`): metrics.jsonl. On a resume the lines of earlier steps are kept; later ones come from
            steps after the checkpoint, which are made again.
        steps (`range`): The optimizer steps of this run.
        batches (`BatchPlan`), dataset (`TrainingDataset`): Tell which samples a step had, and their sigmas.
        log (`MemoryLog`): Is told of each step, and of the end.
        resumed_path (`pathlib.Path`, *optional*): The metrics.jsonl of the run that is resumed, if not in this folder.
        trackers (`Trackers`, *optional*): Get the numbers too.
        expert (`str`, *optional*), steps_before (`int`): See `train`.

    Attributes:
        num_skipped (`int`): On the main process, how many of the last steps before a resume were left out.
    """

    def __init__(
        self,
        accelerator,
        path,
        steps,
        batches,
        dataset,
        *,
        log,
        resumed_path=None,
        trackers=None,
        expert=None,
        steps_before=0,
    ):
        self.accelerator, self.path = accelerator, pathlib.Path(path)
        self.batches, self.dataset, self.log, self.trackers = batches, dataset, log, trackers
        self.expert, self.steps_before = expert, steps_before
        self.pending, self.waiting_seconds, self.num_skipped = [], 0.0, 0
        self.start_time = time.perf_counter()
        self.process = psutil.Process()
        self.last_parked = offload.counters()
        self.last_time = time.perf_counter()
        if accelerator.is_main_process:
            first = steps_before + steps.start
            sources = [source for source in (resumed_path, self.path) if source is not None and source.exists()]
            kept = read_metrics(sources[0]) if first > 1 and sources else []
            kept = [line for line in kept if line["step"] < first]
            if len(kept) != first - 1:
                logger.warning("%s lacks %d of the steps before step %d", self.path, first - 1 - len(kept), first)
            write_json_lines(self.path, kept)
            for folder in self.path.parent.glob("validation/step-*"):
                if int(folder.name.rpartition("-")[2]) >= first:
                    delete_folder(folder)  # of a run before, or to be made again
            self.num_skipped = len(list(itertools.takewhile(lambda line: line["grad_norm"] is None, reversed(kept))))
        desc, shown = f"training {expert or ''}".rstrip(), accelerator.is_main_process
        self.bar = tqdm(total=steps.stop - 1, initial=steps.start - 1, desc=desc, disable=not shown)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Or the reason for an early end would stand in one line with it.
        self.bar.close()

    def waiting_for(self, batches):
        """Yield from an iterable, and take the time of waiting for it, but for the first, which could not be ahead."""
        start = None
        for batch in batches:
            if start is not None:
                self.waiting_seconds += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def add(self, *, step, loss, sample_losses, lr, grad_norm, may_be_bad=False):
        """Record an optimizer step, without waiting for the device.

        Args:
            step (`int`)
            loss (`torch.Tensor`, a scalar): Its mean over the processes is that over the samples of the step.
            sample_losses (`torch.Tensor`): Of each sample of that part.
            lr (`float`)
            grad_norm (`torch.Tensor`, a scalar): Before clipping, of the whole gradient.
            may_be_bad (`bool`): The step was left out because loss or gradient is not finite, and that is allowed.
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
        """Context for what is done between two steps and belongs to none of them."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.last_time += seconds
        self.start_time += seconds
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
            if self.trackers is not None:
                for line in lines:
                    self.trackers.log({f"train/{name}": line[name] for name in _TRACKED}, line["step"])
        self._show(records, losses)
        for entry in zip(records, losses, norms, sample_losses, may_be_bad, strict=True):
            self._check(*entry)

    def _show(self, records, losses):
        first, last = records[0]["step"], records[-1]["step"]
        num_samples = self.batches.samples_before(last + 1) - self.batches.samples_before(first)
        seconds = sum(record["seconds"] for record in records)
        peaks = [record["device_peak_bytes"] or record["host_rss_bytes"] for record in records]
        shown = {"loss": f"{losses[-1]:.4f}", "lr": f"{records[-1]['lr']:.2e}"}
        shown |= {"samples/s": f"{num_samples / seconds:.3g}", "memory": f"{max(peaks) / 2**30:.1f} GiB"}
        self.bar.set_postfix(shown)

    def _check(self, record, loss, norm, sample_losses, may_be_bad):
        """Raise if the numbers of a step are not finite, or warn if that may be."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        own = itertools.chain(*self.batches.own_part(record["step"], self.accelerator.process_index))
        finite = sample_losses.isfinite().tolist()
        bad = [self.dataset.ids[index] for (*_, index), good in zip(own, finite, strict=True) if not good]
        bad = sorted(set(itertools.chain(*gather_from_all(self.accelerator, bad))))
        step = self.steps_before + record["step"]
        samples = sorted({self.dataset.ids[index] for index in self.batches.step(record["step"])})
        what = f"the loss of {', '.join(bad)} is" if bad else "the losses are finite; the gradient is"
        where = (
            f"step {step}, whose samples were {', '.join(samples)}, has loss {loss} and gradient norm {norm}: {what}"
        )
        if may_be_bad:
            logger.warning("%s not finite; the step was left out, as --max_skipped_steps allows", where)
        else:
            raise FailedError(f"{where} not finite. Nothing was saved after the last checkpoint.")

    def _line(self, record, loss, grad_norm):
        """Return the line of metrics.jsonl for one optimizer step."""
        step, indices = record["step"], self.batches.step(record["step"])
        return {
            "step": self.steps_before + step,
            "epoch": self.batches.epoch(step),
            **({} if self.expert is None else {"expert": self.expert}),
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
        share = self.waiting_seconds / (time.perf_counter() - self.start_time)
        self.log.data = {"waiting_seconds": self.waiting_seconds, "waiting_share": share}
        if share > 0.05 and self.waiting_seconds > 10:
            self.accelerator.print(
                f"{share:.0%} of the training time was spent waiting for data; raise --dataloader_num_workers"
            )
