"""A run that was killed and resumed cannot be told from one that never stopped; a file is complete or absent."""

import contextlib
import json
import logging
import math
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file, save_file

import training.loop
from runtime.errors import RefusedError, StoppedError
from tests.runs import LORA_FILE, REPO, free_port, metrics, parse, run_here
from training.checkpoints import check_same_weights, find_checkpoint, list_checkpoints, register_state
from training.optimizers import MasterWeights


# All that has a state: dropout, dropped captions, the schedule, the average, sizes, epochs, batches made ahead.
SHARED = ["--max_pixels", "5120", "--caption_dropout", "0.2", "--ema", "--train_batch_size", "2"]
SHARED += ["--gradient_accumulation_steps", "2", "--dataloader_num_workers", "2", "--logging_steps", "1"]
SHARED += ["--learning_rate", "1e-3", "--lr_scheduler", "cosine", "--lr_warmup_steps", "2"]
RANK = ["--lora_rank", "4", "--lora_alpha", "6"]
LORA = [*SHARED, *RANK, "--lora_dropout", "0.3", "--mixed_precision", "no", "--max_train_steps", "9"]
FULL = [*SHARED, "--training_mode", "full", "--mixed_precision", "bf16", "--max_train_steps", "5"]
SAVES = ["--checkpointing_steps", "2"]
LATEST = ["--resume_from_checkpoint", "latest"]
WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"


# ---------------------------------------------------------------- processes


@pytest.fixture(scope="module")
def images(photos, tmp_path_factory):
    """The photographs, two of them upright: two sizes with --max_pixels."""
    folder = tmp_path_factory.mktemp("images") / "images"
    shutil.copytree(photos, folder)
    for name in ("chelsea", "rocket"):
        Image.open(folder / f"{name}.png").crop((0, 0, 56, 80)).save(folder / f"{name}.png")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def required(tiny_qwen_image, images, cache):
    """Function from an output folder to the flags that every run needs."""

    def flags(output_dir):
        model = ["--pretrained_model_name_or_path", tiny_qwen_image, "--dataset_path", images]
        return [*map(str, model), "--output_dir", str(output_dir), "--cache_dir", str(cache)]

    return flags


@pytest.fixture(scope="module")
def start(fork_server, required):
    """Function that starts training images in a process of its own, which can be killed while it writes."""

    def run(output_dir, *flags, **kwargs):
        return fork_server.start("train_qwen_image.py", *required(output_dir), *flags, slow_disk=True, **kwargs)

    return run


@pytest.fixture(scope="module")
def train(required):
    """Function that trains images in this process."""

    def run(output_dir, *flags):
        run_here("qwen_image", [*required(output_dir), *flags])
        return output_dir

    return run


def finished(process):
    """Wait for a process that has to end well, and return what it said."""
    assert process.wait() == 0, process.said
    return process.said


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """Function from flags to the folder of a run that was never stopped, which is made once."""
    done = {}

    def run(*flags):
        if flags not in done:
            done[flags] = tmp_path_factory.mktemp("whole") / "out"
            finished(start(done[flags], *flags))
        return done[flags]

    return run


@pytest.fixture(scope="module")
def lora_run(whole):
    return whole(*LORA, *SAVES)


# ---------------------------------------------------------------- what is compared


def result_files(folder):
    """The exported files by name, with their bytes."""
    files = [*folder.rglob(LORA_FILE), *folder.glob("transformer*/*")]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def assert_same_run(folder, expected, num_steps):
    assert result_files(expected) and result_files(folder) == result_files(expected)
    assert [line["step"] for line in metrics(folder)] == list(range(1, num_steps + 1))
    assert metrics(folder) == metrics(expected)
    assert (folder / "dataset.jsonl").read_bytes() == (expected / "dataset.jsonl").read_bytes()
    assert not [*folder.rglob("*.tmp"), *folder.rglob("*.old")]


def assert_complete_or_absent(folder):
    """What has its final name can be read to the end, and holds all of it."""
    for name in ("run.json", "transformer/config.json"):
        if (folder / name).exists():
            json.loads((folder / name).read_text())
    for file in [*folder.rglob(LORA_FILE), *folder.glob("transformer*/*.safetensors")]:
        if ".tmp" not in str(file):
            load_file(file)
    names = {path.name for path in folder.glob("checkpoint-*") if not path.suffix}
    assert names == {path.name for path in list_checkpoints(folder).values()}


# ---------------------------------------------------------------- killed


class Moments:
    """When a run is killed.

    Args:
        folder (`pathlib.Path`): Output folder.
        seed (`int`)
        num_steps (`int`): Of the whole run.
    """

    def __init__(self, folder, seed, num_steps):
        self.folder, self.random, self.num_steps = folder, random.Random(seed), num_steps

    def start(self, process):
        """Somewhere before the first step, or thereabouts."""
        time.sleep(self.random.uniform(0, 1))

    def step(self, process):
        """Some steps after it has begun."""
        before, more = self._num_lines(), self.random.randint(1, 3)
        process.until(lambda: self._num_lines() >= min(self.num_steps, before + more))
        time.sleep(self.random.uniform(0, 0.05))

    def save(self, process):
        """In the middle of a checkpoint, when some of its files are there."""
        begin, num_files = time.time_ns(), self.random.randint(0, 6)

        def is_there(path):
            # Not one that an earlier kill has left, nor one that is just being renamed.
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_mtime_ns > begin and len(list(path.iterdir())) >= num_files

        process.until(lambda: any(map(is_there, self.folder.glob("checkpoint-*.tmp"))))

    def export(self, process):
        """When the last step is made, or thereabouts."""
        process.until(lambda: self._num_lines() == self.num_steps)
        time.sleep(self.random.uniform(0, 0.3))

    def _num_lines(self):
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0


def kill_and_resume(begin, folder, moments, num_steps, seed):
    """Start a run with `begin()`, kill it at each of the moments and start it again; then let it end.

    Returns:
        How many of the kills left a checkpoint that was being written.
    """
    at = Moments(folder, seed, num_steps)
    num_cut, newest = 0, 0
    for kind in moments:
        since = time.time_ns()
        process = begin()
        getattr(at, kind)(process)
        process.signal(signal.SIGKILL)
        assert process.wait() in (-signal.SIGKILL, 0), process.said
        if folder.exists():
            assert_complete_or_absent(folder)
            num_cut += any(path.stat().st_mtime_ns > since for path in folder.glob("checkpoint-*.tmp"))
            last = max(list_checkpoints(folder), default=0)
            assert last >= newest, "what was complete stays, until a newer one is"
            newest = last
    finished(begin())
    return num_cut


@pytest.mark.parametrize("often", [1, *(pytest.param(often, marks=pytest.mark.slow) for often in (3, 6))])
def test_killed_again_and_again(often, start, whole, tmp_path):
    """SIGKILL at moments of two runs, the one with fp32 masters of bf16 weights: as if they never stopped.

    At 8 moments, 22 or 43.
    """
    lora, full = (*LORA, *SAVES), (*FULL,)
    runs = {
        # Keeps two checkpoints, and encodes everything again.
        lora: (
            9,
            ["--checkpoints_total_limit", "2"],
            ["start", *["save", "step", "save"] * often, *["export"] * often],
        ),
        full: (5, ["--checkpointing_steps", "1"], [*["save", "step"] * often, *["export"] * often]),
    }

    def run(flags):
        num_steps, more, moments = runs[flags]
        folder = tmp_path / str(num_steps)
        more = [*more, *LATEST, *(["--cache_dir", tmp_path / "cache"] if flags == lora else [])]
        num_cut = kill_and_resume(lambda: start(folder, *flags, *more), folder, moments, num_steps, f"{often} {flags}")
        return folder, num_cut

    with ThreadPoolExecutor(2) as pool:
        expected = list(pool.map(lambda flags: whole(*flags), runs))
        (lora_run, num_cut), (full_run, num_cut_full) = pool.map(run, runs)
    assert num_cut + num_cut_full > 0, "no kill came in the middle of a checkpoint"
    assert_same_run(lora_run, expected[0], 9)
    assert_same_run(full_run, expected[1], 5)
    assert list(list_checkpoints(lora_run)) == [6, 8]
    assert result_files(full_run).keys() == {f"transformer/{name}" for name in ("config.json", WEIGHTS_FILE)}


@pytest.mark.slow
def test_two_experts_killed_again_and_again(fork_server, tiny_model, clips, cache, tmp_path):
    """Wan2.2 A14B, whose experts are trained one after the other: at twenty moments, also between the two."""
    flags = ["--pretrained_model_name_or_path", tiny_model("wan_t2v_a14b"), "--dataset_path", clips]
    flags += ["--cache_dir", cache, "--expert", "both", "--height", "64", "--width", "64", "--num_frames", "5"]
    flags += ["--caption_dropout", "0.2", "--ema", "--dataloader_num_workers", "2", "--logging_steps", "1"]
    flags += ["--learning_rate", "1e-3", "--lr_scheduler", "cosine", "--max_train_steps", "4"]
    flags += ["--mixed_precision", "no", *RANK, "--lora_dropout", "0.3"]

    def begin(folder, *more):
        return fork_server.start("train_wan_video.py", *flags, "--output_dir", folder, *more, slow_disk=True)

    finished(begin(tmp_path / "whole"))
    folder = tmp_path / "out"
    moments = ["start"] * 2 + ["save", "step", "save", "step", "save"] * 3 + ["export"] * 3
    saves = ["--checkpointing_steps", "1"]
    assert kill_and_resume(lambda: begin(folder, *saves, *LATEST), folder, moments, 8, seed=2) > 0
    assert_same_run(folder, tmp_path / "whole", 8)


# ---------------------------------------------------------------- the order on disk


def test_files_are_on_disk_before_the_name_and_the_old_ones_go_last(train, tmp_path, monkeypatch):
    """A loss of power, too, leaves a checkpoint complete or absent."""
    events = []

    def watch(name):
        original = getattr(os, name)

        def call(path, *more, **kwargs):
            path_ = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
            events.append((name, path_.removeprefix(f"{tmp_path}/out/")))
            return original(path, *more, **kwargs)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "rename"):
        watch(name)
    folder = train(tmp_path / "out", *LORA, "--checkpointing_steps", "4", "--checkpoints_total_limit", "1")
    own = [(name, path) for name, path in events if "checkpoint" in path or not path]
    renamed = own.index(("rename", "checkpoint-8.tmp"))
    synced = [path for name, path in own[:renamed] if name == "fsync"]
    assert {f"checkpoint-8.tmp/{path.name}" for path in (folder / "checkpoint-8").iterdir()} <= set(synced)
    assert synced[-1] == "checkpoint-8.tmp"
    assert own.index(("rename", "checkpoint-4")) > renamed
    assert events[events.index(("rename", "checkpoint-8.tmp")) + 1] == ("fsync", str(folder)), "before one is deleted"


def test_an_old_checkpoint_that_cannot_be_deleted_is_not_said_to_fail_the_new_one(train, tmp_path, monkeypatch):
    def fail(path):
        raise OSError("busy")

    monkeypatch.setattr("training.checkpoints.delete_folder", fail)
    with pytest.raises(OSError, match="busy"):
        train(tmp_path / "out", *LORA, *SAVES)
    assert list(list_checkpoints(tmp_path / "out")) == [2]


# ---------------------------------------------------------------- disks that are full, or cannot be written


@pytest.fixture
def disk(tmp_path):
    """Function from options of mount to a disk of its own in memory; again, to change them; ro: that is read-only."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def read_only():
        # Of the disk itself the kernel would not take it while a run has a file open, as it has its lock.
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        done = subprocess.run(["mount", "-o", "remount,bind,ro", folder], capture_output=True)
        if done.returncode:
            subprocess.run(["umount", "--lazy", folder], check=True)
        return done.returncode == 0

    def mount(options):
        if options == "ro":
            return read_only()
        if os.path.ismount(folder):
            options = f"remount,{options}"
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no mount")
        if done.returncode:
            pytest.skip(
                f"{done.stderr.strip()}; it may be permitted under: unshare --user --map-root-user --mount pytest"
            )
        return folder

    yield mount
    while os.path.ismount(folder):
        subprocess.run(["umount", folder], check=True)


def blocks(folder):
    """What a folder takes of a disk of blocks of 4 KiB, in bytes."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*"))


def assert_checkpoint_failed(process, number, reason):
    assert process.wait() == 1, process.said
    assert f"error: checkpoint-{number} cannot be written to " in process.error and reason in process.error


def test_disk_full_in_the_middle_of_a_checkpoint(start, train, lora_run, disk, capsys):
    """The one before is complete, and where the run continues from when there is room."""
    room = blocks(lora_run / "checkpoint-2") * 3 // 2 + 10 * 4096  # and run.json, dataset.jsonl, metrics.jsonl
    folder = disk(f"size={room}") / "out"
    assert_checkpoint_failed(start(folder, *LORA, *SAVES), 4, "make room and continue with")
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    disk("size=16m")
    train(folder, *LORA, *SAVES, *LATEST)
    assert "resumed from checkpoint-2, learning rate of the next step" in capsys.readouterr().out
    assert_same_run(folder, lora_run, 9)


@pytest.mark.parametrize("name", [pytest.param("trainable.safetensors", marks=pytest.mark.slow), "optimizer.bin"])
def test_file_of_a_checkpoint_cannot_grow(name, start, lora_run, tmp_path):
    """The same without a disk of its own, at each of the large files: no file may be larger than a half of it."""
    folder = tmp_path / "out"
    shutil.copytree(lora_run / "checkpoint-2", folder / "checkpoint-2")
    largest = sorted(path.stat().st_size for path in (lora_run / "checkpoint-2").iterdir())
    size = (lora_run / "checkpoint-2" / name).stat().st_size
    smaller = max((other for other in largest if other < size), default=0)
    process = start(folder, *LORA, *SAVES, *LATEST, file_size=(size + smaller) // 2)
    assert_checkpoint_failed(process, 4, "File too large" if "safetensors" in name else "make room")
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]


def test_file_of_the_result_cannot_grow(start, whole, lora_run, tmp_path):
    limit = (lora_run / LORA_FILE).stat().st_size * 3 // 4
    process = start(tmp_path / "lora", *LORA, file_size=limit)
    assert process.wait() == 1 and "arge" in process.error, process.said
    assert not list(tmp_path.rglob(LORA_FILE))


@pytest.mark.slow
def test_file_of_the_full_result_cannot_grow(start, whole, tmp_path):
    size = len(result_files(whole(*FULL))[f"transformer/{WEIGHTS_FILE}"])
    process = start(tmp_path / "full", *FULL, file_size=size * 3 // 4)
    assert process.wait() == 1 and "arge" in process.error, process.said
    assert not (tmp_path / "full" / "transformer").exists()


def test_disk_that_becomes_read_only(start, train, lora_run, disk):
    folder = disk("size=16m") / "out"
    process = start(folder, *LORA, "--max_train_steps", "400", *SAVES)
    process.until(lambda: (folder / "checkpoint-2").exists())
    process.until(lambda: disk("ro"))  # refused while a file is opened in between
    assert process.wait() == 1, process.said
    assert "ead-only file system" in process.error
    assert_complete_or_absent(folder)
    with pytest.raises(RefusedError, match=f"--output_dir {folder} cannot be written: Read-only file system"):
        train(folder, *LORA, *LATEST)
    for file in (folder / "checkpoint-2").iterdir():
        assert file.stat().st_size == (lora_run / "checkpoint-2" / file.name).stat().st_size or file.suffix == ".json"


# ---------------------------------------------------------------- asked to stop


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal(number, start, train, lora_run, tmp_path, capsys):
    """The current step is finished and saved, and the run continues from there."""
    folder = tmp_path / "out"
    process = start(folder, *LORA)
    process.until(lambda: (folder / "metrics.jsonl").exists() and len(metrics(folder)) >= 3)
    process.signal(number)
    assert process.wait() == 3, process.said
    (step,) = list_checkpoints(folder)
    assert step == len(metrics(folder)) and 3 <= step < 9
    said = f"stopped by {signal.Signals(number).name} after step {step}; checkpoint-{step} is complete, continue with "
    assert f"{said}--resume_from_checkpoint latest\n" in process.said
    train(folder, *LORA, *LATEST)
    assert f"resumed from checkpoint-{step}, " in capsys.readouterr().out
    assert_same_run(folder, lora_run, 9)


@pytest.mark.parametrize("step", [4, 9])
def test_signal_in_the_last_step_saves_too(step, train, lora_run, tmp_path, monkeypatch):
    """And what is left to do then is to write the result."""
    folder, add = tmp_path / "out", training.loop.Metrics.add

    def add_and_signal(self, number, *record):
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)
        add(self, number, *record)

    with monkeypatch.context() as context:
        context.setattr(training.loop.Metrics, "add", add_and_signal)
        with pytest.raises(StoppedError, match=f"after step {step}; checkpoint-{step} is complete"):
            train(folder, *LORA)
    assert not (folder / LORA_FILE).exists()
    train(folder, *LORA, *LATEST)
    assert_same_run(folder, lora_run, 9)


def test_second_interrupt_ends_at_once(start, tmp_path):
    process = start(tmp_path, *LORA, "--gradient_accumulation_steps", "300", "--dataset_repeat", "300")  # long steps
    process.until(lambda: (tmp_path / "metrics.jsonl").exists())
    time.sleep(0.3)
    process.signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.signal(signal.SIGINT)
    assert process.wait(timeout=3) == 1
    assert process.error == "error: interrupted; what was complete before still is"


@pytest.fixture(scope="module")
def start_two(fork_server, required):
    """Function that starts the two processes of one run."""

    def run(output_dir, *flags):
        return fork_server.start_two("train_qwen_image.py", *required(output_dir), *flags)

    return run


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_two_processes_continue_a_run_of_one_until_a_signal_to_one_of_them(rank, start_two, train, tmp_path):
    """The two batches of a step on two processes, where one process had them as two micro-batches.

    Both stop after the same step, and leave a checkpoint with the random states of both.
    """
    folder = tmp_path / "out"
    flags = [*LORA, "--lora_dropout", "0", "--lr_scheduler", "constant_with_warmup"]
    whole = train(tmp_path / "whole", *flags, "--max_train_steps", "4", *SAVES)
    shutil.copytree(whole / "checkpoint-2", folder / "checkpoint-2")
    shutil.copy(whole / "metrics.jsonl", folder)
    flags += ["--gradient_accumulation_steps", "1", "--max_train_steps", "200"]
    processes = start_two(folder, *flags, *LATEST)
    processes[0].until(lambda: (folder / "metrics.jsonl").exists() and len(metrics(folder)) >= 5)
    processes[rank].signal(signal.SIGTERM)
    assert [process.wait() for process in processes] == [3, 3], processes[0].said + processes[1].said
    (step,) = set(list_checkpoints(folder)) - {2}
    assert step == len(metrics(folder)) < 200
    states = {path.name for path in (folder / f"checkpoint-{step}").glob("random_states_*")}
    assert states == {"random_states_0.pkl", "random_states_1.pkl"}
    assert f"stopped by SIGTERM after step {step}; checkpoint-{step} is complete" in processes[0].said
    assert "stopped by" not in processes[1].said
    notice = "this run has 2 processes, that of the checkpoint had 1; samples, noise and sigmas stay the same"
    assert processes[0].said.count(notice) == 1 and notice not in processes[1].said
    for ours, expected in zip(metrics(folder), metrics(whole), strict=False):
        for name in ("step", "samples", "sigmas", "lr"):
            assert ours[name] == expected[name]
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-4)


@pytest.mark.slow
def test_signal_to_one_of_two_processes_of_a_launcher(required, tmp_path):
    """torchrun has an exit code of its own."""
    import psutil

    folder = tmp_path / "out"
    command = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    flags = [*required(folder), *LORA, "--max_train_steps", "400", "--train_batch_size", "1"]
    settings = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, *command, "train_qwen_image.py", *flags]
    with subprocess.Popen(command, cwd=REPO, env={**os.environ, **settings}, **pipes) as launcher:
        end = time.monotonic() + 120
        while not ((folder / "metrics.jsonl").exists() and len(metrics(folder)) >= 3):
            assert launcher.poll() is None and time.monotonic() < end, launcher.communicate()[0]
            time.sleep(0.01)
        ranks = [
            process for process in psutil.Process(launcher.pid).children() if process.cmdline()[-len(flags) :] == flags
        ]
        ranks[1].terminate()
        said = launcher.communicate(timeout=60)[0]
    (step,) = list_checkpoints(folder)
    assert launcher.returncode == 1 and step == len(metrics(folder)) < 400
    assert f"stopped by SIGTERM after step {step}; checkpoint-{step} is complete" in said


def steps_made(folder):
    return len(metrics(folder)) if (folder / "metrics.jsonl").exists() else 0


def wait_until(condition, timeout=120):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def runs(folder):
    """Whether a training process is using a folder."""
    import psutil

    commands = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return any(str(folder) in command and "launch" not in " ".join(command[:4]) for command in commands)


ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize(
    "launcher",
    [[*ACCELERATE, "--config_file", "accelerate_configs/cpu.yaml"], [*TORCHRUN]],
    ids=["accelerate", "torchrun"],
)
def test_a_run_stops_with_its_launcher(launcher, number, required, tmp_path):
    """Of one process or of two: the current step is finished and saved, and nothing is left behind."""
    folder = tmp_path / "out"
    flags = [*required(folder), *LORA, "--max_train_steps", "4000", "--train_batch_size", "1"]
    settings = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    more = ["--master_port", str(free_port())] if "torch.distributed.run" in launcher else []
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*launcher, *more, "train_qwen_image.py", *flags],
            cwd=REPO,
            env={**os.environ, **settings},
            stdout=log,
            stderr=log,
        )
    wait_until(lambda: steps_made(folder) >= 3)
    process.send_signal(number)
    process.wait()
    wait_until(lambda: not runs(folder), timeout=30)
    said = (tmp_path / "log").read_text()
    (step,) = list_checkpoints(folder)
    assert step == len(metrics(folder)) < 4000
    assert re.search(f"stopped by SIG(TERM|INT) after step {step}; checkpoint-{step} is complete", said), said


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["nohup ", "setsid ", ""])
def test_a_run_outlives_its_shell(prefix, required, tmp_path):
    folder = tmp_path / "out"
    command = [sys.executable, "train_qwen_image.py", *required(folder), *LORA]
    settings = {"ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    line = f"{prefix}{' '.join(command)} > {tmp_path / 'log'} 2>&1 & sleep 2"
    subprocess.run(["bash", "-c", line], cwd=REPO, env={**os.environ, **settings}, check=True)
    wait_until(lambda: not runs(folder))
    assert (folder / LORA_FILE).exists(), (tmp_path / "log").read_text()


# ---------------------------------------------------------------- which checkpoint


@pytest.fixture
def find(required, tmp_path):
    """Function that looks for the checkpoint of a run in tmp_path/out."""

    def run(*flags, num_processes=1, resume=LATEST, expert=None, kind=None):
        flags = [*required(tmp_path / "out"), *LORA, *resume, *flags]
        args = parse("qwen_image", flags)
        args.expert = expert
        kind = types.SimpleNamespace(value=kind or ("NO" if num_processes == 1 else "MULTI_CPU"))
        return find_checkpoint(args, types.SimpleNamespace(num_processes=num_processes, distributed_type=kind))

    return run


@pytest.fixture
def copy(lora_run, tmp_path):
    """Function that copies a checkpoint of the whole run to tmp_path/out under another name."""

    def run(step, name=None):
        return pathlib.Path(
            shutil.copytree(lora_run / f"checkpoint-{step}", tmp_path / "out" / (name or f"checkpoint-{step}"))
        )

    return run


def test_a_path_that_deepspeed_would_take_for_a_pattern_is_refused(find, copy, tmp_path):
    copy(4)
    place = (tmp_path / "out").rename(tmp_path / "out [1]")
    resume = ["--resume_from_checkpoint", str(place / "checkpoint-4")]
    assert find(resume=resume)[1]["step"] == 4
    with pytest.raises(RefusedError, match="DeepSpeed takes .* for a pattern; rename the folder"):
        find(resume=resume, kind="DEEPSPEED")


def test_latest_is_the_complete_one_of_the_highest_number(find, copy, tmp_path, caplog):
    copy(2, "checkpoint-9")
    copy(4, "checkpoint-10")
    copy(6, "checkpoint-11.tmp")
    copy(6, "checkpoint-12.old")
    (copy(6, "checkpoint-13") / "training_state.json").unlink()
    with (copy(6, "checkpoint-14") / "optimizer.bin").open("r+b") as file:
        file.truncate(1000)
    (copy(6, "checkpoint-15") / "training_state.json").write_text("{")
    (copy(6, "checkpoint-16") / "random_states_0.pkl").unlink()
    copy(6, "checkpoint-17-mine")  # no name of ours
    (tmp_path / "out" / "checkpoint-18").touch()
    path, state = find()
    assert path == tmp_path / "out" / "checkpoint-10" and state["step"] == 4
    said = dict(record.message.split(" is not a complete checkpoint and is skipped: ") for record in caplog.records)
    assert said.keys() == {f"checkpoint-{number}" for number in (13, 14, 15, 16, 18)}
    assert (
        said["checkpoint-13"]
        == "its training_state.json cannot be read (FileNotFoundError(2, 'No such file or directory'))"
    )
    assert said["checkpoint-14"].startswith("its optimizer.bin is missing, or does not have the ")
    assert said["checkpoint-15"].startswith("its training_state.json cannot be read (JSONDecodeError")
    assert said["checkpoint-16"].startswith("its random_states_0.pkl is missing, or ")


def test_latest_starts_at_the_first_step_where_there_is_none(find, copy, tmp_path, caplog):
    copy(6, "checkpoint-6.tmp")
    assert find() == (None, {"step": 0})
    assert f"{tmp_path / 'out'} holds no complete checkpoint to resume from; the run starts at step 1" in caplog.text


def test_latest_does_not_replace_the_results_of_a_run_that_has_ended(find, lora_run, tmp_path):
    (tmp_path / "out").mkdir()
    run = json.loads((lora_run / "run.json").read_text())
    (tmp_path / "out" / "run.json").write_text(json.dumps(run))
    with pytest.raises(RefusedError, match="holds the results of a run that has ended, and no checkpoint"):
        find()
    del run["measured"]  # that was killed
    (tmp_path / "out" / "run.json").write_text(json.dumps(run))
    assert find() == (None, {"step": 0})


def test_weights_alone_are_not_resumed_from(find, lora_run, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(lora_run / LORA_FILE, alone)
    for path in (alone, alone / LORA_FILE):
        with pytest.raises(RefusedError) as error:
            find(resume=["--resume_from_checkpoint", str(path)])
        for text in (
            "weights only",
            "optimizer's state",
            "schedule",
            "the step",
            "order of the data",
            "--lora_init_path",
        ):
            assert text in str(error.value)


def test_weights_that_cannot_be_opened_are_refused_before_models_load(find, copy):
    with (copy(4) / "trainable.safetensors").open("r+b") as file:
        file.write(b"\xff" * 8)  # the length of its header; that of the file stays
    with pytest.raises(RefusedError, match="checkpoint-4 is not a complete checkpoint: .*header"):
        find()


@pytest.mark.parametrize("saved", [{"a": (2,)}, {"a": (2,), "c": (3,)}, {"a": (2,), "b": (4,)}])
def test_a_checkpoint_of_other_parameters_is_refused(saved, tmp_path):
    accelerator = Accelerator(cpu=True)
    ours = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in {"a": 2, "b": 3}.items()}
    weights = MasterWeights(torch.nn.ParameterDict(ours))
    has_a_state = torch.optim.SGD(weights.masters)
    register_state(accelerator, weights, types.SimpleNamespace(model=None), has_a_state)
    save_file({name: torch.zeros(shape) for name, shape in saved.items()}, tmp_path / "trainable.safetensors")
    with pytest.raises(RefusedError, match="the checkpoint trains other parameters than this run, such as b"):
        accelerator.load_state(tmp_path)


def test_what_is_left_goes_at_the_next_save_and_newer_ones_are_set_aside(train, copy, lora_run, tmp_path, caplog):
    """Gone on from the second of four checkpoints: the later ones are not the latest any more, until made again."""
    folder = tmp_path / "out"
    for step in (2, 4, 6, 8):
        copy(step)
    for name in ("checkpoint-3.tmp", "checkpoint-5.old"):
        copy(2, name)
    flags = ["--resume_from_checkpoint", str(folder / "checkpoint-4"), "--checkpoints_total_limit", "1"]
    train(folder, *LORA, "--checkpointing_steps", "6", *flags)
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-6", "checkpoint-8.replaced"}
    assert "checkpoint-8 is renamed to checkpoint-8.replaced until there is a new one" in caplog.text
    assert result_files(folder) == result_files(lora_run)


# ---------------------------------------------------------------- another plan


def test_longer_run_goes_on_with_the_schedule_of_its_length(train, tmp_path, caplog):
    """At its end the rate was 0; from there on it is what the longer run has at this step."""
    flags = [*LORA, "--lr_warmup_steps", "0"]
    folder = train(tmp_path / "out", *flags, "--max_train_steps", "4", "--checkpointing_steps", "4")
    with caplog.at_level(logging.WARNING):
        train(folder, *flags, "--max_train_steps", "8", *LATEST)
    rates = [line["lr"] for line in metrics(folder)]

    def cosine(step, num_steps):
        return 1e-3 * (1 + math.cos(math.pi * (step - 1) / num_steps)) / 2

    assert rates[:4] == pytest.approx([cosine(step, 4) for step in range(1, 5)])
    assert rates[4:] == pytest.approx([cosine(step, 8) for step in range(5, 9)]), "four more, at the new rates"
    notice = "this run ends after step 8, that of the checkpoint was to end after 4; from here on the learning rate is"
    assert f"{notice} that of --lr_scheduler cosine over the new length" in caplog.text


def test_half_of_a_run_and_the_rest(train, lora_run, tmp_path, monkeypatch):
    """A resume makes the steps that are left, and begins with the optimizer's state as it was."""
    folder = tmp_path / "out"
    shutil.copytree(lora_run / "checkpoint-4", folder / "checkpoint-4")
    shutil.copy(lora_run / "metrics.jsonl", folder)
    loaded = []
    original = training.loop.load_checkpoint

    def load(accelerator, path, lr_scheduler):
        original(accelerator, path, lr_scheduler)
        (optimizer,) = accelerator._optimizers
        loaded.extend({name: value.clone() for name, value in state.items()} for state in optimizer.state.values())

    monkeypatch.setattr(training.loop, "load_checkpoint", load)
    train(folder, *LORA, *LATEST)
    assert_same_run(folder, lora_run, 9)
    assert len(loaded) == len(load_file(folder / "checkpoint-4" / "trainable.safetensors"))
    assert all(state["step"] == 4 and state["exp_avg"].any() and state["exp_avg_sq"].any() for state in loaded)


def test_a_step_may_be_split_in_another_way(train, tmp_path):
    """From a checkpoint after an odd number of micro-batches: steps begin where they began."""
    flags = ["--height", "64", "--width", "64", "--mixed_precision", "no", *RANK, "--max_train_steps", "4"]
    flags += ["--learning_rate", "1e-3", "--logging_steps", "1"]
    whole = train(tmp_path / "whole", *flags, "--train_batch_size", "2", "--checkpointing_steps", "1")
    shutil.copytree(whole / "checkpoint-1", tmp_path / "out" / "checkpoint-1")
    folder = train(tmp_path / "out", *flags, "--gradient_accumulation_steps", "2", *LATEST)
    for name in ("loss", "grad_norm"):
        expected = [line[name] for line in metrics(whole)][1:]
        assert [line[name] for line in metrics(folder)] == pytest.approx(expected, rel=1e-4)


def test_later_checkpoints_are_set_aside_for_one_of_another_folder(train, copy, lora_run, tmp_path):
    """Or rotation would take the new ones for the old ones; and what it was set aside from can be named again."""
    folder = tmp_path / "out"
    copy(8)
    flags = ["--checkpointing_steps", "6", "--checkpoints_total_limit", "1"]
    train(folder, *LORA, *flags, "--resume_from_checkpoint", str(lora_run / "checkpoint-4"))
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-6", "checkpoint-8.replaced"}
    assert_same_run(folder, lora_run, 9)
    (folder / LORA_FILE).unlink()
    train(folder, *LORA, "--resume_from_checkpoint", str(folder / "checkpoint-8.replaced"))
    assert result_files(folder) == result_files(lora_run)


@pytest.fixture(scope="module", params=[[], ["--checkpointing_steps", "1"]], ids=["unsaved", "saved"])
def short_run(request, train, tmp_path_factory):
    """The flags and the folder of a run of one step."""
    flags = ["--height", "64", "--width", "64", *RANK, "--max_train_steps", "1", *request.param]
    return flags, train(tmp_path_factory.mktemp("short") / "out", *flags)


@pytest.mark.parametrize("resume", [[], LATEST], ids=["new", "resumed"])
def test_a_dry_run_keeps_the_record_of_a_run(resume, short_run, train, tmp_path, caplog):
    """Of one that has ended, too; what the run itself would be refused for is reported."""
    flags, folder = short_run[0], shutil.copytree(short_run[1], tmp_path / "out")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    refused = ("--checkpointing_steps" in flags) != bool(resume)
    if refused:
        with pytest.raises(RefusedError, match="of an earlier run|of a run that has ended"):
            train(folder, *flags, *resume)
    # Other sizes, another split: none of it may stand in the record of what was trained.
    train(folder, *flags, *resume, "--dry_run", *([] if resume else ["--validation_split", "0.4"]))
    assert {path: path.read_bytes() for path in before} == before
    new = {path.name for path in folder.rglob("*") if path.is_file()} - {path.name for path in before}
    assert new == {"dry_run.json", "contact_sheet.png"}
    assert json.loads((folder / "dry_run.json").read_text())["arguments"]["dry_run"] is True
    assert ("without --dry_run this would be refused: " in caplog.text) == refused


def test_a_dry_run_keeps_a_damaged_record(short_run, train, tmp_path):
    flags, folder = short_run[0], shutil.copytree(short_run[1], tmp_path / "out")
    (folder / "run.json").write_text("{")
    train(folder, *flags, *LATEST, "--dry_run")
    assert (folder / "run.json").read_text() == "{"


def test_a_bare_name_is_looked_for_in_the_output_folder_first(find, copy, tmp_path, monkeypatch):
    """As diffusers takes it; and else where a path is looked for."""
    here, there = tmp_path / "here", tmp_path / "out" / "checkpoint-2"
    copy(2)
    shutil.copytree(there, here / "checkpoint-2")
    shutil.copytree(there, here / "checkpoint-4")
    monkeypatch.chdir(here)

    def found(name):
        return find(resume=["--resume_from_checkpoint", name])[0].resolve()

    assert found("checkpoint-2") == found("checkpoint-2/") == there
    assert found(f"../{here.name}/checkpoint-2") == here / "checkpoint-2"
    assert found("checkpoint-4") == here / "checkpoint-4"
    for name in ("checkpoint-9", "./checkpoint-9", str(tmp_path / "checkpoint-9")):
        with pytest.raises(RefusedError) as error:
            found(name)
        assert f"{name}: there is no such path" in str(error.value) and "complete ones in " in str(error.value)
        assert str(error.value).endswith(": checkpoint-2.")


def test_another_learning_rate_is_refused(find, copy):
    copy(4)
    with pytest.raises(RefusedError, match="--learning_rate is 0.002 and was 0.001"):
        find("--learning_rate", "2e-3")


def test_weights_are_compared_by_content(find, copy):
    """Those of an older checkpoint are not known; in a dry run those that are not here are not looked at."""
    copy(4)
    _, resumed = find()
    weights = dict(resumed["weights"])
    assert weights.keys() == {"transformer", "text_encoder", "vae"}

    def check(now, state=resumed, dry_run=False):
        batches = types.SimpleNamespace(identity={})
        check_same_weights(types.SimpleNamespace(dry_run=dry_run), state, batches, now)
        assert batches.identity == {"weights": now}

    check(weights)
    check({"vae": "other"}, state={"step": 0})
    check({"vae": weights["vae"]}, dry_run=True)
    for part in weights:
        for dry_run in (False, True):
            with pytest.raises(RefusedError, match=rf"its run had a {part} of other weights"):
                check(weights | {part: "other"}, dry_run=dry_run)
    with pytest.raises(RefusedError, match="its run had a LoRA to start low_noise from of other weights"):
        check(weights | {"LoRA to start low_noise from": "other"})


def test_other_number_of_processes_with_dropout_is_refused(find, copy):
    copy(4)
    with pytest.raises(
        RefusedError, match="this run has 2 processes, that of the checkpoint had 1, each with its own state"
    ):
        find(num_processes=2)
