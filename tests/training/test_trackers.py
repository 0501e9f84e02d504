"""The trackers by what they leave on disk."""

import argparse
import importlib.util
import json
import os
import pathlib
import socket
import sqlite3
import sys

import av
import numpy as np
import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import TensorBoardTracker
from PIL import Image

from runtime.errors import FailedError, RefusedError
from training.trackers import check_trackers, log_previews, start_trackers


@pytest.fixture
def output_dir(tmp_path):
    folder = tmp_path / "my-run"
    folder.mkdir()
    return folder


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """Neither keys nor settings of who runs the tests; `monkeypatch`, to set others."""
    pytest.importorskip("wandb")
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    wandb.teardown()  # what it read of the environment before
    yield monkeypatch
    wandb.teardown()


@pytest.fixture
def trackio_dir(monkeypatch, tmp_path):
    """A folder of its own, which trackio asks for when it is imported."""
    pytest.importorskip("trackio")
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    yield tmp_path / "trackio"
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A clip that gets brighter."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8, width=64, height=48, pix_fmt="yuv420p")
        for k in range(15):
            image = Image.new("RGB", (64, 48), (16 * k, 16 * k, 16 * k))
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    return path


def start(output_dir, *names, first_step=1):
    args = argparse.Namespace(
        report_to=list(names), output_dir=str(output_dir), lr=0.5, expert=None, names=["a", "b"], args={"x": 1}
    )
    accelerator = Accelerator(log_with=args.report_to or None, project_dir=args.output_dir, cpu=True)
    start_trackers(accelerator, args, first_step=first_step)
    return accelerator


def log_steps(accelerator, steps, offset=0.0):
    for step in steps:
        accelerator.log({"loss": offset + 1 / step, "odd": float("nan")}, step=step)


def finish(accelerator):
    for tracker in accelerator.trackers:
        tracker.finish()


GRID = Image.new("RGB", (40, 30), "red")


def check_randomness(output_dir, clip, name):
    """Dropout draws from torch's generator: no tracker may."""
    before = torch.get_rng_state()
    accelerator = start(output_dir, name)
    log_steps(accelerator, [1, 2])
    log_previews(accelerator, GRID, {"validation/clip": clip}, 2)
    finish(accelerator)
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------- TensorBoard


def read_events(output_dir):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(output_dir / "blockwise")).Reload()


def test_tensorboard(output_dir, clip):
    pytest.importorskip("tensorboard")
    accelerator = start(output_dir, "tensorboard")
    log_steps(accelerator, [1, 2, 3, 4])
    log_previews(accelerator, GRID, {"validation/clip": clip}, 4)
    finish(accelerator)
    events = read_events(output_dir)
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (step, pytest.approx(1 / step)) for step in (1, 2, 3, 4)
    ]
    assert set(events.Tags()["scalars"]) == {"loss", "odd"} and np.isnan(events.Scalars("odd")[0].value)
    (grid,) = events.Images("validation/grid")
    assert (grid.step, grid.width, grid.height) == (4, 40, 30) and events.Tags()["images"] == ["validation/grid"]
    (config,) = events.Tensors("config/text_summary")
    text = config.tensor_proto.string_val[0].decode()
    assert json.loads(text)["lr"] == 0.5 and json.loads(text)["names"] == ["a", "b"]
    assert [path.is_file() for path in (output_dir / "blockwise").iterdir()] == [True]  # no folders named by the time


def test_tensorboard_forgets_the_steps_that_a_resume_makes_again(output_dir):
    pytest.importorskip("tensorboard")
    accelerator = start(output_dir, "tensorboard")
    log_steps(accelerator, [1, 2, 3, 4])
    finish(accelerator)
    accelerator = start(output_dir, "tensorboard", first_step=3)
    log_steps(accelerator, [3, 4, 5], offset=10.0)
    finish(accelerator)
    events = read_events(output_dir)
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (step, pytest.approx(value)) for step, value in [(1, 1), (2, 1 / 2), (3, 10 + 1 / 3), (4, 10.25), (5, 10.2)]
    ]
    assert [event.step for event in events.Tensors("config/text_summary")] == [0, 2]


def test_tensorboard_draws_no_random_numbers(output_dir, clip):
    pytest.importorskip("tensorboard")
    check_randomness(output_dir, clip, "tensorboard")


def test_nothing_happens_without_trackers_or_on_other_processes(output_dir, monkeypatch):
    log_steps(start(output_dir), [1])
    monkeypatch.setattr(PartialState, "is_main_process", False)
    accelerator = start(output_dir, "tensorboard", "wandb")
    log_steps(accelerator, [1])
    log_previews(accelerator, GRID, {}, 1)
    finish(accelerator)
    assert not any(output_dir.iterdir())


def test_tracker_that_does_not_start_ends_the_run_in_one_sentence(output_dir, monkeypatch):
    def fail(self):
        raise OSError("no server\nthere")

    monkeypatch.setattr(TensorBoardTracker, "start", fail)
    with pytest.raises(FailedError, match="--report_to tensorboard: .*OSError: no server there"):
        start(output_dir, "tensorboard")


# ---------------------------------------------------------------- W&B


def test_wandb_offline(output_dir, clip, settings):
    import wandb

    with socket.create_server(("127.0.0.1", 0)) as server:
        settings.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        settings.setenv("WANDB_MODE", "offline")
        check_trackers(argparse.Namespace(report_to=["wandb"]))
        check_randomness(output_dir, clip, "wandb")
        # In the same second, the second folder would have the name of the first.
        earlier = (output_dir / "wandb").rename(output_dir / "earlier")
        accelerator = start(output_dir, "wandb", first_step=3)
        assert accelerator.get_tracker("wandb", unwrap=True).name == "my-run"
        log_steps(accelerator, [3, 4, 5])
        finish(accelerator)
        wandb.teardown()  # as at the end of a process: W&B's own writes the file, and may be behind
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody called
            server.accept()
    run_id = (output_dir / "wandb_run_id.txt").read_text().strip()
    (first,), (second,) = (list(folder.glob(f"offline-run-*-{run_id}")) for folder in (earlier, output_dir / "wandb"))
    assert len(list(first.glob("files/media/images/validation/*.png"))) == 1
    (copy,) = first.glob("files/media/videos/validation/*.mp4")
    assert copy.read_bytes() == clip.read_bytes()
    record, resumed = (next(folder.glob("*.wandb")).read_bytes() for folder in (first, second))
    assert b'["a", "b"]' in record.replace(b'","', b'", "')
    assert b"0.3333333333333333" in resumed and b"0.3333333333333333" not in record


def test_wandb_starts_another_run_from_the_first_step(output_dir, settings):
    settings.setenv("WANDB_MODE", "offline")
    (output_dir / "wandb_run_id.txt").write_text("earlier1\n")
    finish(start(output_dir, "wandb"))
    assert (output_dir / "wandb_run_id.txt").read_text() != "earlier1\n"


def test_wandb_refuses_without_a_login_and_takes_a_key(settings):
    import wandb

    args = argparse.Namespace(report_to=["wandb"])
    with pytest.raises(RefusedError, match="--report_to wandb: nobody is logged in.*wandb login.*WANDB_MODE"):
        check_trackers(args)
    for name, value in {"WANDB_API_KEY": "0123456789" * 4, "WANDB_MODE": "disabled"}.items():
        with settings.context() as patch:
            patch.setenv(name, value)
            wandb.teardown()
            check_trackers(args)
    with settings.context() as patch:
        patch.setenv("WANDB_API_KEY", "short")
        wandb.teardown()
        with pytest.raises(RefusedError, match="--report_to wandb: .*WANDB_API_KEY"):
            check_trackers(args)
    pathlib.Path(os.environ["NETRC"]).write_text(f"machine api.wandb.ai login user password {'0123456789' * 4}\n")
    wandb.teardown()
    check_trackers(args)


# ---------------------------------------------------------------- trackio


def test_trackio(output_dir, clip, trackio_dir):
    check_randomness(output_dir, clip, "trackio")
    accelerator = start(output_dir, "trackio", first_step=3)
    log_steps(accelerator, [3])
    finish(accelerator)
    with sqlite3.connect(trackio_dir / "blockwise.db") as database:
        rows = database.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY step, id").fetchall()
        configs = [json.loads(config) for (config,) in database.execute("SELECT config FROM configs")]
    database.close()
    assert len({row[0] for row in rows}) == 1 and {row[1] for row in rows} == {"my-run"}
    rows = [(step, json.loads(metrics)) for _, _, step, metrics in rows]
    losses = [(step, metrics["loss"]) for step, metrics in rows if "loss" in metrics]
    assert losses == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    ((step, media),) = [(step, metrics) for step, metrics in rows if "validation/clip" in metrics]
    assert step == 2 and media["validation/grid"]["_type"] == "trackio.image"
    assert (trackio_dir / "media" / media["validation/clip"]["file_path"]).read_bytes() == clip.read_bytes()
    assert configs[0]["lr"] == 0.5 and configs[0]["names"] == ["a", "b"] and configs[0]["expert"] is None


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_missing_package_is_refused(name, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else find(wanted))
    with pytest.raises(RefusedError, match=f"--report_to {name} needs .* not installed: pip install {name}"):
        check_trackers(argparse.Namespace(report_to=[name]))
    check_trackers(argparse.Namespace(report_to=[]))
