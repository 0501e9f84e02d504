"""One run at a time has an output folder, and all of its processes see the same folders and inputs."""

import argparse
import contextlib
import errno
import fcntl
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import time
import types

import pytest
import torch

import training.run_folder
from dataset.metadata import describe_rows, read_datasets
from runtime.errors import FailedError, RefusedError
from runtime.processes import agreed, gather_from_all
from train_qwen_image import VALUES
from training.arguments import parse_args
from training.run_folder import LOCK_FILE, claim_output_dir


ALONE = types.SimpleNamespace(num_processes=1, process_index=0, is_main_process=True)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(training.run_folder, "_PATIENCE_SECONDS", 0.1)


def folders(output_dir):
    return argparse.Namespace(output_dir=str(output_dir))


@contextlib.contextmanager
def running(output_dir, then=time.sleep):
    """Context in which another process has claimed a folder; yields its id. Locks do not count inside one process."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        with claim_output_dir(folders(output_dir), ALONE):
            os.write(told, b"1")
            then(60)
        os._exit(0)
    os.read(ready, 1)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# ---------------------------------------------------------------- two runs


def test_a_second_run_is_refused_by_name(tmp_path):
    """However the folder is spelled, and whatever stands in it stays."""
    folder = tmp_path / "out"
    (tmp_path / "link").symlink_to(folder)
    with running(folder) as pid:
        before = (folder / LOCK_FILE).read_text()
        assert re.fullmatch(rf"process {pid} on {os.uname().nodename}, started \d{{4}}-.*\n", before)
        for spelling in (folder, tmp_path / "link", folder / ".." / "out", os.path.relpath(folder)):
            with pytest.raises(RefusedError) as refused, claim_output_dir(folders(spelling), ALONE):
                pass
            assert before.strip() in str(refused.value)
        assert [path.name for path in folder.iterdir()] == [LOCK_FILE]
        assert (folder / LOCK_FILE).read_text() == before


def test_a_killed_run_releases_its_folder_though_its_workers_live_on(tmp_path):
    """The lock is the process's own: not the file's, and not that of what it has forked."""
    folder, worker = tmp_path / "out", multiprocessing.Value("i", 0)

    def fork_and_wait(seconds):
        worker.value = os.getpid() if (pid := os.fork()) == 0 else pid
        time.sleep(seconds)

    with running(folder, fork_and_wait) as pid:
        while not worker.value:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.kill(worker.value, 0)  # is there still
        with claim_output_dir(folders(folder), ALONE):
            assert (folder / LOCK_FILE).read_text().startswith(f"process {os.getpid()} ")
        os.kill(worker.value, signal.SIGKILL)
    assert not folder.exists() or not any(folder.iterdir())


def test_a_run_waits_for_one_that_is_about_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(training.run_folder, "_PATIENCE_SECONDS", 20)
    with running(tmp_path, lambda _: time.sleep(0.4)), claim_output_dir(folders(tmp_path), ALONE):
        # The other one has deleted its file, which this one was waiting for: it has another.
        assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} ")


def test_only_what_a_run_has_written_is_left(tmp_path):
    (tmp_path / "there").mkdir()
    with claim_output_dir(folders(tmp_path / "a" / "b"), ALONE), claim_output_dir(folders(tmp_path / "there"), ALONE):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    with claim_output_dir(folders(tmp_path / "a" / "b"), ALONE):
        (tmp_path / "a" / "b" / "run.json").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["run.json"]


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, caplog):
    def lockf(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with claim_output_dir(folders(tmp_path), ALONE):
        said = f"--output_dir {tmp_path} is on a file system without locks ({os.strerror(errno.ENOLCK)})"
        assert said in caplog.text


@pytest.mark.parametrize("comes", [False, True])
def test_a_file_that_the_run_before_deletes_is_no_lock(comes, tmp_path, monkeypatch):
    """Between opening it and locking it; another run may have made a new one since."""
    lockf, deleted = fcntl.lockf, []

    def delete_and_lock(*arguments):
        if not deleted:
            deleted.append((tmp_path / LOCK_FILE).unlink())
            if comes:
                (tmp_path / LOCK_FILE).touch()
        lockf(*arguments)

    monkeypatch.setattr(fcntl, "lockf", delete_and_lock)
    with claim_output_dir(folders(tmp_path), ALONE):
        assert deleted and (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} ")


def test_nothing_is_written_before_and_a_dry_run_counts(train, tmp_path):
    """Not even into the cache, which is in the folder here."""
    with running(tmp_path / "out"):
        with pytest.raises(RefusedError, match="is in use by another run"):
            train(
                "qwen_image",
                *("--height", "64", "--width", "64", "--cache_dir", tmp_path / "out" / "cache", "--dry_run"),
                output_dir=tmp_path / "out",
            )
        assert [path.name for path in (tmp_path / "out").iterdir()] == [LOCK_FILE]


# ---------------------------------------------------------------- several processes


@pytest.fixture
def on_ranks(tmp_path):
    """Function that calls a function on two processes of a group, and returns what they return or refuse."""
    context = multiprocessing.get_context("fork")

    def work(function, rank, store, queue):
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        accelerator = types.SimpleNamespace(num_processes=2, process_index=rank, is_main_process=rank == 0)
        try:
            queue.put((rank, function(accelerator)))
        except (RefusedError, FailedError) as error:
            queue.put((rank, error))

    def run(function):
        store, queue = tmp_path / f"store-{time.monotonic_ns()}", context.Queue()
        processes = [context.Process(target=work, args=(function, rank, store, queue)) for rank in range(2)]
        for process in processes:
            process.start()
        results = dict(queue.get(timeout=60) for _ in processes)
        for process in processes:
            process.join()
        return results[0], results[1]

    return run


def claim(arguments):
    """Return a function for `on_ranks` that claims what each of two processes was given."""

    def on_rank(accelerator):
        args = parse_args([*map(str, arguments[accelerator.process_index])], description="", values=VALUES)
        with claim_output_dir(args, accelerator):
            names = sorted(path.name for path in pathlib.Path(args.output_dir).iterdir())
            gather_from_all(accelerator, None)
            return names

    return on_rank


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """Arguments of two processes, each with its inputs at places of its own, as on two machines."""
    original = training.run_folder.agreed
    monkeypatch.setattr(
        training.run_folder,
        "agreed",
        lambda *arguments, patience_seconds=0: original(*arguments, patience_seconds=min(patience_seconds, 0.3)),
    )
    arguments = []
    for rank in range(2):
        inputs = tmp_path / f"machine-{rank}"
        flags = ["--pretrained_model_name_or_path", inputs / "model", "--dataset_path", inputs / "data"]
        arguments.append([*flags, "--output_dir", tmp_path / "out", "--cache_dir", inputs / "cache"])
    return arguments


def test_processes_that_see_the_same_continue(machines, on_ranks, tmp_path):
    assert on_ranks(claim(machines)) == ([LOCK_FILE], [LOCK_FILE])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [["--output_dir", "other"], ["--learning_rate", "2e-4"]])
def test_processes_that_do_not_are_refused_by_name(flags, machines, on_ranks, tmp_path, monkeypatch):
    """Two machines with folders of their own, played on one; on both, without a wait for the other."""
    monkeypatch.chdir(tmp_path)
    machines[1] += flags
    said = f"{'the folder of ' if flags[0] == '--output_dir' else ''}{flags[0]} differs between process 1 on "
    for error in on_ranks(claim(machines)):
        assert isinstance(error, RefusedError) and str(error).startswith(said), error
        assert f"and process 0 on {os.uname().nodename}; all need the same." in str(error)
    assert not (tmp_path / "out").exists() and not (tmp_path / "other").exists()


def test_a_file_that_comes_late_is_waited_for(on_ranks, tmp_path):
    """As over a network file system, whose machines remember for a while what was there."""

    def look(accelerator):
        start = time.monotonic()

        num_looks = 0

        def see():
            nonlocal num_looks
            num_looks += 1
            return accelerator.is_main_process or time.monotonic() > start + 0.2

        return agreed(accelerator, see, lambda is_seen: {"it": is_seen}, patience_seconds=20), num_looks

    (is_seen, num_looks), (is_seen_late, num_late_looks) = on_ranks(look)
    assert is_seen and is_seen_late and 1 < num_looks == num_late_looks


def test_both_processes_of_a_second_run_are_refused(machines, on_ranks, tmp_path):
    with running(tmp_path / "out") as pid:
        for error in on_ranks(claim(machines)):
            assert f"is in use by another run: process {pid} on " in str(error)


def test_a_process_that_ends_is_not_waited_for(on_ranks):
    """By what it alone finds bad, say: the others end with a sentence."""

    def end_early(accelerator):
        gather_from_all(accelerator, None)
        if accelerator.process_index:
            return None
        return gather_from_all(accelerator, "here")

    waiting, _ = on_ranks(end_early)
    assert isinstance(waiting, FailedError) and "another process of this run has ended" in str(waiting)


def test_what_each_process_reads_is_agreed_on(on_ranks, photos, tmp_path):
    """A checkpoint that only one machine has, a caption that differs: named on both."""

    def checkpoint(accelerator):
        found = (None, {"step": 0}) if accelerator.process_index else (tmp_path / "checkpoint-4", {"step": 4})
        return agreed(accelerator, lambda: found, lambda found: {"the checkpoint": found})

    other = tmp_path / "other"
    shutil.copytree(photos, other)
    (other / "rocket.txt").write_text("another rocket")

    def rows(folder, accelerator):
        flags = ["--pretrained_model_name_or_path", "m", "--output_dir", "o"]
        flags += ["--dataset_path", str(folder if accelerator.process_index else photos)]
        args = parse_args(flags, description="", values=VALUES)
        return len(agreed(accelerator, lambda: read_datasets(args), describe_rows))

    for error in on_ranks(checkpoint):
        assert str(error).startswith("the checkpoint differs between process 1 on ")
    for error in on_ranks(lambda accelerator: rows(other, accelerator)):
        assert str(error).startswith("what is at --dataset_path differs between process 1 on ")
    shutil.copy(photos / "rocket.txt", other)
    assert on_ranks(lambda accelerator: rows(other, accelerator)) == (5, 5)
    for error in on_ranks(lambda accelerator: rows(tmp_path / "nowhere", accelerator)):
        assert str(error).startswith(f"process 1 on {os.uname().nodename}: ") and "nowhere" in str(error)
