"""scripts/demo.sh end to end, and the parts of scripts/demo.py on which its numbers and pictures rest."""

import json
import logging
import os
import pathlib
import subprocess

import pytest
import torch
from PIL import Image


ROOT = pathlib.Path(__file__).parents[2]


def run_demo(*arguments):
    return subprocess.run(
        ["bash", "scripts/demo.sh", *map(str, arguments)], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def demo():
    import scripts.demo

    logging.disable(logging.NOTSET)  # the demo keeps its screen clean; other tests look at warnings
    return scripts.demo


@pytest.mark.parametrize("family", ["wan", "", "--output_dir", "../x"])
def test_an_unknown_family_is_refused_by_name(family):
    result = run_demo(family)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == f"error: there is no demo for '{family}'; allowed is qwen_image.\n"


def test_a_folder_with_files_in_it_is_refused(demo, monkeypatch, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr("sys.argv", ["demo", "--output_dir", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        demo.main()
    assert stop.value.code == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_failing_script_ends_the_demo_with_its_message(demo, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        demo.run_script("train_qwen_image.py", "--learning_rte", "1", log_path=tmp_path / "log")
    assert "nearest is --learning_rate" in stop.value.code and "exit code 2" in stop.value.code


def test_live_bytes_counts_what_is_alive(demo):
    weight = torch.ones(1000, requires_grad=True)  # 4000 bytes, there before
    with demo.LiveBytes() as live:
        view = weight.view(10, 100)
        assert live.device_bytes() == 0
        kept = (view * 2).exp()  # exp saves its output, a product with a number saves nothing
        assert live.device_bytes() == 4000 and live.peak_bytes == 8000
        loss = kept.sum()
        del kept, view
        assert live.device_bytes() == 4000 + 4  # no name is left, but the graph has it
        loss.backward()
        del loss
        assert live.device_bytes() == 4000  # the gradient
        weight.grad = None
        assert live.device_bytes() == 0
        torch.zeros(1)
        assert live.peak_bytes >= 8000


def test_the_view_finds_a_linear_map(demo):
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(5, 16, 12, 12, generator=generator)
    # The brightness of a picture's 8x8 pixels is one channel of the latent below them, its colour another one.
    grey, red = latents[:, 3:4], latents[:, 7:8]
    pictures = torch.cat([grey + red, grey, grey + 0.5], dim=1).repeat_interleave(8, 2).repeat_interleave(8, 3)
    view = demo.fit_view(latents, pictures, ridge=1e-6)
    torch.testing.assert_close(view(latents), pictures, atol=1e-3, rtol=0)
    # And pictures are nothing that the map itself contains.
    assert (view(torch.zeros_like(latents)) - torch.tensor([0, 0, 0.5]).view(3, 1, 1)).abs().max() < 1e-2


def test_nearest_is_counted_by_row(demo):
    assert demo.count_nearest([[1, 2], [0, 3]]) == 1
    points = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 4, 4)
    assert demo.distances(points[:1] + 1, points).tolist() == [[1, 0, 1]]


@pytest.mark.slow
def test_the_whole_demo(tmp_path):
    folder = tmp_path / "demo"
    result = run_demo("qwen_image", "--output_dir", folder)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert str(folder) in lines[-1]
    assert len(lines) < 30
    results = json.loads((folder / "results.json").read_text())

    photos = sorted((folder / "photos").glob("*.png"))
    assert len(photos) == 5 and all(photo.with_suffix(".txt").read_text().strip() for photo in photos)
    used = [json.loads(line) for line in (folder / "run" / "dataset.jsonl").read_text().splitlines()]
    assert [record["id"] for record in used] == [photo.name for photo in photos]
    assert (folder / "run" / "pytorch_lora_weights.safetensors").is_file()

    losses = list(results["loss_on_fixed_noise"].values())
    assert len(losses) == 9 and losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.1 * losses[0]
    assert f"{losses[0]:.3f}" in result.stdout and f"{losses[-1]:.3f}" in result.stdout

    for index in range(5):
        assert results["distances_with_lora"][index][index] < 0.1 * results["distances_without_lora"][index][index]
        assert results["distances_with_lora"][index][index] == min(results["distances_with_lora"][index])

    keep, recompute, parked = results["memory"].values()
    assert keep["loss"] == recompute["loss"] == parked["loss"]
    assert keep["peak_bytes"] > 3 * recompute["peak_bytes"] > 3 * parked["peak_bytes"]
    assert keep["host_bytes"] == recompute["host_bytes"] == 0
    # The input of each block but the last, 48x48 tokens of 128 fp32 numbers, moves from the device to the host.
    assert parked["host_bytes"] == 11 * 48 * 48 * 128 * 4
    if results["device"] == "cpu":
        assert recompute["held_bytes"] - parked["held_bytes"] == parked["host_bytes"]

    for name in ("loss.png", "samples.png", "memory.png"):
        with Image.open(folder / name) as picture:
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 20, f"{name} shows nothing"
