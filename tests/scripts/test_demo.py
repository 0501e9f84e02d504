"""scripts/demo.sh end to end, and the parts of the demos on which their numbers and plots rest."""

import importlib
import json
import logging
import os
import pathlib
import subprocess

import av
import pytest
import torch
from PIL import Image
from skimage import data

from dataset.buckets import Sizing
from dataset.images import to_tensor
from dataset.metadata import VIDEO_SUFFIXES, read_rows
from dataset.videos import inspect_clips, read_clip


ROOT = pathlib.Path(__file__).parents[2]


def run_demo(*arguments):
    return subprocess.run(
        ["bash", "scripts/demo.sh", *map(str, arguments)], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )


def load(name):
    module = importlib.import_module(f"scripts.{name}")
    logging.disable(logging.NOTSET)  # the demos keep their screen clean; other tests check warnings
    return module


@pytest.fixture(scope="module")
def demo():
    return load("demo")


@pytest.fixture(scope="module")
def wan_video():
    return load("demo_wan_video")


@pytest.mark.parametrize("family", ["wan", "", "--output_dir", "../x"])
def test_an_unknown_family_is_refused_by_name(family):
    result = run_demo(family)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == f"error: there is no demo for '{family}'; allowed are qwen_image and wan_video.\n"


@pytest.mark.parametrize("family", ["qwen_image", "wan_video"])
def test_a_folder_with_files_in_it_is_refused(family, monkeypatch, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr("sys.argv", ["demo", "--output_dir", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        load(f"demo_{family}").main()
    assert stop.value.code == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_failing_script_ends_the_demo_with_its_message(demo, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        demo.run_script("train_qwen_image.py", "--learning_rte", "1", log_path=tmp_path / "log")
    assert "nearest is --learning_rate" in stop.value.code and "exit code 2" in stop.value.code


def test_the_view_finds_a_linear_map(demo):
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(5, 16, 1, 12, 12, generator=generator)
    # The brightness of an image's 8x8 pixels is one channel of the latent below them, its colour another one.
    grey, red = latents[:, 3:4], latents[:, 7:8]
    images = torch.cat([grey + red, grey, grey + 0.5], dim=1).repeat_interleave(8, 3).repeat_interleave(8, 4)
    view = demo.fit_view(latents, images, ridge=1e-6)
    torch.testing.assert_close(view(latents), images, atol=1e-3, rtol=0)
    # And images are nothing that the map itself contains.
    assert (view(torch.zeros_like(latents)) - torch.tensor([0, 0, 0.5]).view(3, 1, 1, 1)).abs().max() < 1e-2


def test_the_view_finds_a_linear_map_of_clips(demo):
    def clips_of(latents):
        """Let brightness change from one latent frame to the next in the four frames that the latter stands for."""
        grey = latents[:, 3:4]
        frames = [grey[:, :, 0]]
        for k in range(1, grey.shape[2]):
            frames += [torch.lerp(grey[:, :, k - 1], grey[:, :, k], share) for share in (0.25, 0.5, 0.75, 1)]
        clips = torch.stack(frames, dim=2)  # (B, 1, N, H, W)
        return torch.cat([clips, clips, clips + 0.5], dim=1).repeat_interleave(8, 3).repeat_interleave(8, 4)

    generator = torch.Generator().manual_seed(0)
    latents, unseen = torch.randn(2, 8, 16, 4, 12, 12, generator=generator)
    view = demo.fit_view(latents, clips_of(latents), ridge=1e-6)
    torch.testing.assert_close(view(unseen), clips_of(unseen), atol=1e-3, rtol=0)


def test_loss_on_fixed_noise_is_fixed_and_zero_for_the_flow_itself(demo):
    latents = torch.randn(2, 16, 3, 4, 4, generator=torch.Generator().manual_seed(1))

    def exact(noisy, sigmas):
        sigmas = sigmas.view(-1, 1, 1, 1, 1)
        return (noisy - (1 - sigmas) * latents) / sigmas - latents

    assert demo.fixed_noise_loss(exact, latents) < 1e-10
    losses = {demo.fixed_noise_loss(lambda noisy, sigmas: torch.zeros_like(noisy), latents) for _ in range(2)}
    assert len(losses) == 1 and losses.pop() == pytest.approx(2, rel=0.1)  # the variances of noise and latents


def test_a_loss_that_did_not_fall_ends_the_demo_with_one_sentence(demo, tmp_path, capsys):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "memory.png").write_bytes(b"plot")
    with pytest.raises(SystemExit) as stop:
        demo.finish(tmp_path, run_dir, {"loss_on_fixed_noise": {0: 1.5, 100: 1.0, 200: 1.5}}, "loss.png")
    assert stop.value.code == "error: the loss on fixed noise did not fall: 1.500 before, 1.500 after."
    assert json.loads((tmp_path / "results.json").read_text())["loss_on_fixed_noise"]["200"] == 1.5
    demo.finish(tmp_path, run_dir, {"loss_on_fixed_noise": {0: 1.5, 100: 1.0}}, "loss.png")
    assert capsys.readouterr().out.startswith("loss.png, memory.png")
    assert (tmp_path / "memory.png").read_bytes() == b"plot"


def test_a_sheet_has_every_frame_in_its_place(demo):
    values = torch.linspace(-1, 1, 2 * 2 * 3).view(2, 2, 3)  # rows, columns, frames
    rows = {str(row): values[row].view(2, 1, 3, 1, 1).expand(2, 3, 3, 8, 10) for row in range(2)}
    sheet = demo.draw_sheet(["one", "two"], rows, scale=2)
    for row in range(2):
        for column in range(2):
            for frame in range(3):
                middle = (6 + column * 66 + frame * 20 + 10, 44 + row * 44 + 8)
                grey = round(255 * (values[row, column, frame].item() + 1) / 2)
                assert sheet.getpixel(middle) == (grey, grey, grey)


def test_the_clips_are_used_whole_and_as_the_photographs_are(wan_video, tmp_path):
    """Compared with the photographs themselves, cropped by Pillow where the window is a whole number of pixels."""
    wan_video.write_clips(tmp_path / "clips")
    rows = read_rows(tmp_path / "clips", media_suffixes=VIDEO_SUFFIXES)
    assert {row.id: row.caption.strip() for row in rows} == {
        f"{name}.mp4": caption for name, caption in wan_video.CAPTIONS.items()
    }
    items = inspect_clips(rows, Sizing(64, 64, None, 16, 81), fps=16, clip_part="start")
    for (row, record, _), windows in zip(items, wan_video.WINDOWS.values(), strict=True):
        assert record["decision"] == "used" and record["reason"] is None
        assert record["used"] == {"size": [64, 64], "frames": 13, "fps": 16, "source_frames": list(range(13))}
        clip = read_clip(row, record)
        photograph = Image.fromarray(getattr(data, row.id.removesuffix(".mp4"))())
        for frame, (left, top, side) in ((0, windows[0]), (12, windows[1])):
            box = (left, top, left + side, top + side)
            assert box[2] <= photograph.width and box[3] <= photograph.height
            image = photograph.crop(box).resize((64, 64), Image.Resampling.LANCZOS)
            # Compression costs up to 2.7 levels of 255, a wrong matrix 5.6 of the coffee's, a wrong range 5 and more.
            assert (clip[:, frame] - to_tensor(image)).abs().mean() < 4 / 127.5


def test_samples_play_there_and_back(wan_video, monkeypatch, tmp_path):
    monkeypatch.setattr(wan_video, "NUM_FRAMES", 5)
    clips = torch.linspace(-1, 1, 5).view(1, 1, 5, 1, 1).expand(3, 3, 5, 16, 16)
    wan_video.save_samples(tmp_path, {"the clips": clips, "sampled": -clips})
    with av.open(str(tmp_path / "samples.mp4")) as container:
        assert container.streams.video[0].average_rate == 16
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    greys = [round(2 * (frame[60, 30].mean() / 127.5 - 1)) for frame in frames]
    assert greys == 3 * [-2, -1, 0, 1, 2, 1, 0, -1]
    with Image.open(tmp_path / "samples.png") as sheet:
        assert sheet.width == 6 + 3 * (2 * 2 * 16 + 6)  # frames 0 and 4 of three clips


def test_nearest_is_counted_by_row(demo):
    assert demo.count_nearest([[1, 2], [0, 3]]) == 1
    points = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 4, 4)
    assert demo.distances(points[:1] + 1, points).tolist() == [[1, 0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "media", "num_items", "num_steps"),
    [("qwen_image", "photos/*.png", 5, 800), ("wan_video", "clips/*.mp4", 3, 700)],
)
def test_the_whole_demo(family, media, num_items, num_steps, tmp_path):
    folder = tmp_path / "demo"
    result = run_demo(family, "--output_dir", folder)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert str(folder) in lines[-1]
    assert len(lines) < 30
    results = json.loads((folder / "results.json").read_text())

    items = sorted(folder.glob(media))
    assert len(items) == num_items and all(item.with_suffix(".txt").read_text().strip() for item in items)
    used = [json.loads(line) for line in (folder / "run" / "dataset.jsonl").read_text().splitlines()]
    assert [record["id"] for record in used] == [item.name for item in items]
    assert (folder / "run" / "pytorch_lora_weights.safetensors").is_file()

    assert list(results["loss_on_fixed_noise"]) == [str(step) for step in range(0, num_steps + 1, 100)]
    losses = list(results["loss_on_fixed_noise"].values())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.1 * losses[0]
    assert f"{losses[0]:.3f}" in result.stdout and f"{losses[-1]:.3f}" in result.stdout

    for index in range(num_items):
        assert results["distances_with_lora"][index][index] < 0.1 * results["distances_without_lora"][index][index]
        assert results["distances_with_lora"][index][index] == min(results["distances_with_lora"][index])

    for name in ("loss.png", "samples.png", "memory.png"):
        with Image.open(folder / name) as image:
            assert len(image.convert("RGB").getcolors(1 << 24)) > 20, f"{name} shows nothing"
    assert (folder / "samples.mp4").is_file() == (family == "wan_video")
