"""run.json and dataset.jsonl: what a run is made of, what it will need, and at its end what it needed."""

import functools
import json
import math
import pathlib
import platform

import psutil
import torch

from blockwise import offload
from dataset.cache import installed_versions
from dataset.report import describe_data
from runtime.files import whole_file, write_json_lines, write_text
from runtime.processes import on_main_process
from training.checkpoints import list_checkpoints
from training.drawing import draw_metrics
from training.forecast import check_fits, compare_forecast, describe_disk, describe_forecast
from training.metrics import METRICS_FILE, read_metrics


_PACKAGES = ("torchvision", "accelerate", "diffusers", "transformers", "peft", "datasets", "safetensors", "numpy")
_PACKAGES += ("deepspeed",)


class RunRecord:
    """Writes run.json and dataset.jsonl, and prints what is about to be trained and what it will need.

    Every process makes one and calls its methods; the main process writes and prints.

    Args:
        run (`Run`): With all that is planned. Its log is told what to expect, and asked at the end what was measured.

    Raises:
        RefusedError: The device is too small. The files are written before.
    """

    def __init__(self, run):
        args, plan, forecast = run.args, run.plan, run.forecast
        self.accelerator, self.log, self.batches = run.accelerator, run.log, run.batches
        self.output_dir = pathlib.Path(args.output_dir)
        # The version of torch with its build, which the metadata of its CUDA wheels lack.
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions |= {package: version for package, version in installed_versions(_PACKAGES).items() if version}
        trainable = [
            {"name": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
            for name, (shape, dtype) in forecast.parameters.items()
        ]
        self.content = {"arguments": vars(args), "versions": versions, "plan": plan.as_dict()}
        self.content |= {"trainable": trainable, "forecast": forecast.describe(plan)}
        self.log.forecast_bytes = self.content["forecast"]["training_peak_bytes"]
        self.log.suggestions = functools.partial(forecast.suggestions, plan)
        # A dry run replaces nothing in the folder of a run.
        is_in_a_run = args.dry_run and (self.output_dir / METRICS_FILE).exists()
        self.path = self.output_dir / ("dry_run.json" if is_in_a_run else "run.json")
        if not is_in_a_run:
            records = [item.record for item in run.inspected]
            on_main_process(self.accelerator, lambda: write_json_lines(self.output_dir / "dataset.jsonl", records))
        on_main_process(self.accelerator, self._write)
        count = sum(math.prod(shape) for shape, _ in forecast.parameters.values())
        num_steps = run.batches.last_step * len(run.family.stages)
        lines = [
            f"{len(forecast.parameters)} tensors with {count:,} parameters are trained, in fp32",
            *describe_data(args, run.inspected, run.batches, run.family.num_tokens, forecast.cache_bytes),
            run.batches.describe(),
            *plan.describe(),
            *describe_forecast(self.content["forecast"]),
            describe_disk(forecast, num_steps, len(list_checkpoints(self.output_dir))),
        ]
        self.accelerator.print("\n".join(lines))
        self.accelerator.print(check_fits(forecast, plan))

    def finish(self):
        """Add what was measured, plot it, and print forecast against measured and the points of the log."""
        on_main_process(self.accelerator, self._finish)

    def _finish(self):
        self.log.point("final")
        lines = read_metrics(self.output_dir / METRICS_FILE)
        measured = self._measured(lines)
        self.content |= {"measured": measured, "memory_points": self.log.points}
        with whole_file(self.output_dir / "memory.png") as path:
            self.log.plot(path)
        # Those of earlier runs were deleted when this one started.
        files = self.output_dir.glob("validation/step-*/loss.json")
        validations = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        with whole_file(self.output_dir / "metrics.png") as path:
            draw_metrics(path, lines, sorted((record["step"], record["loss"]) for record in validations))
        self._write()  # last: it means that all else is there
        print("\n".join(compare_forecast(self.content["forecast"], measured)))
        print(self.log.table())

    def _measured(self, lines):
        """Return what the run needed, with the keys of the forecast.

        Args:
            lines (`list[dict]`): Of metrics.jsonl.
        """
        watched, phases = self.log.watched, self.log.phases()
        device_peak_bytes = max(line["device_peak_bytes"] or 0 for line in lines)
        host_bytes = max(line["host_rss_bytes"] for line in lines)
        # What all local processes hold if each holds what this one does. They share some pages; only Linux tells.
        shared_bytes = getattr(psutil.Process().memory_info(), "shared", 0)
        host_bytes += (self.content["forecast"]["launch"]["num_local_processes"] - 1) * (host_bytes - shared_bytes)
        # Without the first step of each transformer, in which shared tensors are not known yet. A step has as many
        # micro-batches as the first one, or fewer.
        parked = [line["offloaded_bytes"] for line in lines if (line["step"] - 1) % self.batches.last_step]
        return {
            "training_peak_bytes": device_peak_bytes or (watched and watched.peak_bytes) or None,
            "peak_phase": max(phases, key=phases.get, default=None),
            "phases": phases,
            "by_category": watched.by_category_at_peak if watched else {},
            # Of one forward pass.
            "parked_bytes": max(parked or [lines[-1]["offloaded_bytes"]]) // len(self.batches.micro_batches(1)),
            "host_bytes": host_bytes,
            "parking": {**(self.log.parking or {}), "pool_peak_bytes": offload.counters()["pool_peak_bytes"]},
        }

    def _write(self):
        write_text(self.path, json.dumps(self.content, indent=2, ensure_ascii=False) + "\n")
