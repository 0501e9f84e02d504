"""Where the time of a short run goes, phase by phase; and how long any other command takes.

    python benchmarks/startup.py
    python benchmarks/startup.py --other 'python their_script.py --model $MODEL --data $DATASET --output $OUTPUT'

A LoRA of Qwen-Image is trained for 12 steps on five photographs of 256x256, with a random transformer of half a
gigabyte. The other command, run by a shell, takes turns with ours, and finds the paths of the same model, of the
photographs and of a new folder in its environment. Seconds of the processor are steadier than those of the clock.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import json
import operator
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time


ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = "train_qwen_image"
FLAGS = "--height 256 --width 256 --max_train_steps 12 --mixed_precision no --lora_rank 8".split()

# Phase -> the functions that it is made of, by their names in `training.run` or in its family.
PHASES = {
    "Accelerate": ("start_accelerator",),
    "configs, tokenizer": ("read_family", "optimizers.find_optimizer"),
    "weights checked": (
        "check_weights",
        "fetch_weights",
        "lora_init.check_base_of_lora",
        "checkpoints.check_same_weights",
    ),
    "dataset": ("read_datasets", "inspect_rows", "plan_batches", "count_caption_tokens"),
    "digests, cache": ("encoder_identities", "plan_sample", "EncodingPlan.find_missing"),
    "forecast": ("plan_memory", "RunRecord"),
    "encoding": ("encode_missing",),
    "transformer": ("load_transformer", "make_trainable"),
    "training": ("train",),
    "result, loaded back": ("export.save_result", "export.check_result"),
    "figures, record": ("RunRecord.finish",),
}


class Clock:
    """Hands out the seconds of this process, of the clock and of the processor, by phase."""

    def __init__(self):
        self.phases = {}
        self._is_running = False

    @contextlib.contextmanager
    def phase(self, name):
        """Context whose time counts for a phase, unless it is part of another one."""
        if self._is_running:
            yield
            return
        self._is_running, before = True, (time.perf_counter(), time.process_time())
        yield
        after = time.perf_counter(), time.process_time()
        counted = self.phases.get(name, (0.0, 0.0))
        self.phases[name] = [sum(entry) - start for *entry, start in zip(counted, after, before, strict=True)]
        self._is_running = False

    def timed(self, name, function):
        @functools.wraps(function, updated=())
        def call(*args, **kwargs):
            with self.phase(name):
                return function(*args, **kwargs)

        return call


def run_by_phase(flags, path):
    """Make one run in this process, and write the seconds of its phases and those of the processor at each step."""
    sys.path.insert(0, str(ROOT))
    clock, steps = Clock(), [0.0]
    with clock.phase("imports"):
        gc.disable()  # as the script has it
        script = importlib.import_module(SCRIPT)
        from blockwise.log import MemoryLog
        from training import command
        from training import run as module

        gc.freeze()
        gc.enable()
    with clock.phase("command line"):
        args = command.parse_args(flags, description="", values=script.VALUES)
    found = []
    for phase, names in PHASES.items():
        for place, _, name in (name.rpartition(".") for name in names):
            owner = operator.attrgetter(place)(module) if place else module
            owner = owner if hasattr(owner, name) else script.QwenImage
            found.append((owner, name, clock.timed(phase, getattr(owner, name))))
    for owner, name, function in found:
        setattr(owner, name, function)

    class Log(MemoryLog):
        def watch(self, *args, **kwargs):
            steps[0] = time.process_time()
            return super().watch(*args, **kwargs)

        def end_step(self):
            steps.append(time.process_time())
            return super().end_step()

    with Log() as log:
        script.main(args, log)
    path.write_text(json.dumps({"phases": clock.phases, "steps": steps}))


def measure(command, environment):
    """Run a command (`str`: by a shell) and return its seconds of the clock and of the processor."""
    started = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, shell=isinstance(command, str), env=os.environ | environment, stdout=output, stderr=output
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.exit(f"{output.read().decode(errors='replace')}\nexit code {process.returncode} of {command}")
    return time.perf_counter() - started, used.ru_utime + used.ru_stime


def make_model_and_dataset(folder):
    """Write the model and the photographs, and return their folders."""
    from PIL import Image
    from skimage import data

    sizes = "--num_layers 6 --num_attention_heads 12 --attention_head_dim 64".split()
    make = [sys.executable, "scripts/make_tiny_model.py", "--family", "qwen_image", "--output", folder / "model"]
    subprocess.run([*make, *sizes], cwd=ROOT, check=True, capture_output=True)
    dataset = folder / "photographs"
    dataset.mkdir()
    for name in ("astronaut", "chelsea", "coffee", "hubble_deep_field", "rocket"):
        Image.fromarray(getattr(data, name)()).resize((512, 512)).save(dataset / f"{name}.png")
        (dataset / f"{name}.txt").write_text(f"a photograph called {name}")
    return folder / "model", dataset


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command; medians are printed")
    parser.add_argument("--other", metavar="COMMAND", help="to alternate with ours")
    parser.add_argument("--by_phase", type=pathlib.Path, help=argparse.SUPPRESS)
    options, flags = parser.parse_known_args()
    if options.by_phase:
        return run_by_phase(flags, options.by_phase)
    if flags:
        parser.error(f"unknown: {' '.join(flags)}")

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model, dataset = make_model_and_dataset(folder)
        runs = {"ours": [], "by phase": [], "the other": []}
        for number in range(options.rounds):
            outputs = {name: str(folder / f"{name} {number}") for name in runs}

            def flags_for(name, outputs=outputs):
                paths = {"pretrained_model_name_or_path": model, "dataset_path": dataset, "output_dir": outputs[name]}
                return [*FLAGS, *(part for key, path in paths.items() for part in (f"--{key}", str(path)))]

            runs["ours"].append(measure([sys.executable, str(ROOT / f"{SCRIPT}.py"), *flags_for("ours")], {}))
            if options.other:
                places = {"MODEL": str(model), "DATASET": str(dataset), "OUTPUT": outputs["the other"]}
                runs["the other"].append(measure(options.other, places))
            record = folder / f"{number}.json"
            command = [sys.executable, __file__, "--by_phase", str(record), *flags_for("by phase")]
            total = measure(command, {})
            runs["by phase"].append((total, json.loads(record.read_text())))

    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "diffusers", "transformers")
    )
    print(f"{versions}, Python {platform.python_version()}; {os.cpu_count()} cores; medians of {options.rounds} runs")
    print(f"{'seconds':20} {'clock':>6} {'processor':>10}")

    def show(name, pairs):
        print(
            f"{name:20} {statistics.median(p[0] for p in pairs):6.2f} {statistics.median(p[1] for p in pairs):10.2f}"
        )

    for name in ("ours", "the other"):
        if runs[name]:
            show(name, runs[name])
    print("\nours by phase")
    totals, records = zip(*runs["by phase"], strict=True)
    for phase in records[0]["phases"]:
        show(phase, [record["phases"][phase] for record in records])
    others = [
        [total[which] - sum(pair[which] for pair in record["phases"].values()) for which in (0, 1)]
        for total, record in runs["by phase"]
    ]
    show("all else, ending", others)
    show("in all", totals)
    steps = [statistics.median(r["steps"][n + 1] - r["steps"][n] for r in records) for n in range(12)]
    print("\nsteps, seconds of the processor: " + " ".join(f"{step:.2f}" for step in steps))


if __name__ == "__main__":
    main()
