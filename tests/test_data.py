"""The way of a dataset into a run: what is trained, cached and logged, from the command line."""

import collections
import functools
import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from dataset import encoding, images, videos
from dataset.batches import TrainingDataset
from pipelines.qwen_image import QwenImage, encode_image
from pipelines.wan_video import WanVideo
from runtime.errors import RefusedError
from tests.runs import LORA_FILE, metrics, records, run_here
from training import run as run_module


FLAGS = ["--mixed_precision", "no", "--lora_rank", "2", "--learning_rate", "1e-3"]
STEPS = ["--max_train_steps", "3"]
SIZE = ["--height", "64", "--width", "64"]
# Alike where a test leaves the choice: what is forecast of one step is remembered for all runs with such steps.
IN_PAIRS = ["--train_batch_size", "2", "--caption_dropout", "0.5"]


@pytest.fixture
def train(tiny_model, tmp_path):
    """Function that makes one run in this process and returns its output folder."""

    def run(dataset, *flags, out="out", family="qwen_image", config=None):
        argv = ["--pretrained_model_name_or_path", tiny_model(family), "--output_dir", tmp_path / out, *FLAGS]
        argv += [*([] if "--num_train_epochs" in flags else STEPS), *flags]
        if dataset is not None:
            argv += ["--dataset_path", dataset]
        if config is not None:
            path = tmp_path / f"{out}.yaml"
            path.write_text(yaml.safe_dump(config))
            argv += ["--config", path]
        run.forecast = run_here(family, argv)
        return tmp_path / out

    return run


class Stopped(Exception):
    """A `Run` has come as far as a test needs it; it is the argument."""


@pytest.fixture
def run_until(train, monkeypatch):
    """Function that makes a run as `train` does, up to a method of `Run`, and returns that."""

    def run(method, *args, encode=False, **kwargs):
        def stop(this, *_):
            if encode:
                this.encode()
            raise Stopped(this)

        with monkeypatch.context() as context, pytest.raises(Stopped) as stopped:
            context.setattr(run_module.Run, method, stop)
            train(*args, **kwargs)
        return stopped.value.args[0]

    return run


@pytest.fixture
def encode(run_until):
    """Function that makes a run that encodes what it trains and plans no memory, and returns it."""
    return functools.partial(run_until, "plan_memory", encode=True)


def planned(run):
    """The ids of the samples of each step of a run."""
    return [[run.items[n].record["id"] for n in run.batches.step(s)] for s in range(1, run.batches.last_step + 1)]


@pytest.fixture
def data(photos, tmp_path):
    """A copy of the photographs that a test may change."""
    return shutil.copytree(photos, tmp_path / "data")


@pytest.fixture
def encoded(monkeypatch):
    """What is handed to the encoders, by kind."""
    seen = collections.defaultdict(list)
    encode_share = encoding._encode_share

    def spy(share, *args):
        for _, entry in share:
            seen[entry.kind].append(entry.item.row.id if entry.roles else entry.texts[0])
        return encode_share(share, *args)

    monkeypatch.setattr(encoding, "_encode_share", spy)
    return seen


def weights(folder):
    return (folder / LORA_FILE).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a[b] *?{c,d}#%20 e", "hf::x y [0-9]$HOME"])
def test_no_path_of_a_run_is_read_as_a_pattern(train, tiny_qwen_image, photos, tmp_path, name):
    place = tmp_path / name
    model, data = shutil.copytree(tiny_qwen_image, place / "model"), shutil.copytree(photos, place / "data")
    where = [
        "--pretrained_model_name_or_path",
        model,
        "--cache_dir",
        place / "cache",
        *SIZE,
        "--report_to",
        "tensorboard",
    ]
    previews = ["--validation_prompt", "x", "--validation_steps", "3", "--num_inference_steps", "2"]
    out = train(data, *where, *previews, "--checkpointing_steps", "1", out=f"{name}/out")
    expected = weights(out)
    shutil.rmtree(out / "checkpoint-3")
    train(data, *where, "--checkpointing_steps", "1", "--resume_from_checkpoint", "latest", out=f"{name}/out")
    assert weights(out) == expected and len(metrics(out)) == 3
    train(data, *where, "--lora_init_path", out, out=f"{name}/second")
    # All there is stands in that folder.
    assert os.listdir(tmp_path) == [name]
    assert sorted(os.listdir(place)) == ["cache", "data", "model", "out", "second"]


# ---------------------------------------------------------------- the cache


@pytest.mark.parametrize("family", ["qwen_image", pytest.param("wan_i2v", marks=pytest.mark.slow)])
def test_a_warm_run_equals_a_cold_one_and_looks_at_nothing(family, train, photos, clips, tmp_path, monkeypatch):
    dataset = photos if family == "qwen_image" else clips
    flags = [] if family == "qwen_image" else ["--num_frames", "5"]
    flags += [*SIZE, *IN_PAIRS, "--cache_dir", tmp_path / "cache"]
    cold = train(dataset, *flags, family=family, out="cold")

    def fail(*_, **__):
        raise AssertionError("nothing is to be decoded or loaded")

    for module, names in (
        (images, ["open_image"]),
        (videos, ["open_image", "_open_video"]),
        (QwenImage, ["load_prompt_encoder", "load_media_encoder"]),
        (WanVideo, ["load_prompt_encoder", "load_media_encoder"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, fail)
    warm = train(dataset, *flags, family=family, out="warm")
    assert weights(warm) == weights(cold)
    forecast = json.loads((warm / "run.json").read_text())["forecast"]
    assert set(forecast["phases"]) == {"training", "export"}, "the forecast knows that no encoder is needed"


def test_what_changes_is_encoded_again(encode, data, encoded, caplog, tmp_path):
    caplog.set_level("INFO")
    flags = [*SIZE, "--cache_dir", tmp_path / "cache"]

    def again(*more):
        encoded.clear()
        caplog.clear()
        encode(data, *flags, *more)
        return dict(encoded)

    assert len(again()["media"]) == 5
    (data / "coffee.txt").write_text("tea")
    assert again() == {"captions": ["tea"]}
    assert "cache: 4 of 5 captions are encoded already" in caplog.text
    (data / "rocket.png").write_bytes((data / "chelsea.png").read_bytes())
    assert again() == {}, "the same image is there under another name"
    Image.new("RGB", (96, 80), "red").save(data / "rocket.png")
    assert again() == {"media": ["rocket.png"]}
    shutil.copy(data / "rocket.png", data / "twin.png")
    (data / "twin.txt").write_text("new")
    assert again() == {"captions": ["new"]}
    assert len(again("--width", "48")["media"]) == 5, "once for the twins"
    assert again("--seed", "7", "--learning_rate", "1e-2", "--caption_dropout", "0.5") == {"captions": [" "]}
    for entry in (tmp_path / "cache" / "media").glob("*/*"):
        entry.write_bytes(entry.read_bytes()[:-5])
    again(), again("--width", "48")
    # Five of each width; that of a file which is no longer there stays as it is.
    assert sum(map(encoding.is_complete, (tmp_path / "cache" / "media").glob("*/*"))) == 10


def test_another_encoder_makes_other_entries(encode, photos, tiny_qwen_image, encoded, tmp_path):
    flags = [*SIZE, "--cache_dir", tmp_path / "cache"]
    encode(photos, *flags)
    model = shutil.copytree(tiny_qwen_image, tmp_path / "model")
    encode(photos, *flags, "--pretrained_model_name_or_path", model, out="copy")
    assert len(encoded["media"]) == 5, "a copy elsewhere is the same encoder"
    path = next((model / "vae").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    encode(photos, *flags, "--pretrained_model_name_or_path", model, out="other")
    assert len(encoded["media"]) == 10 and len(encoded["captions"]) == 5


def test_a_killed_run_goes_on_where_it_was(fork_server, tiny_qwen_image, tmp_path, encode, encoded):
    data = tmp_path / "data"
    data.mkdir()
    generator = np.random.default_rng(0)
    for n in range(14):
        Image.fromarray(generator.integers(0, 256, (256, 256, 3), dtype=np.uint8)).save(data / f"{n}.png")
        (data / f"{n}.txt").write_text(str(n))
    flags = ["--height", "256", "--width", "256"]
    required = ["--pretrained_model_name_or_path", tiny_qwen_image, "--dataset_path", data]
    media = tmp_path / "out" / "cache" / "media"
    run = fork_server.start("train_qwen_image.py", *required, "--output_dir", tmp_path / "out", *flags, *FLAGS, *STEPS)
    assert run.until(lambda: len(list(media.glob("*/*.safetensors"))) >= 3), run.said
    run.signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    done = len(list(media.glob("*/*.safetensors")))
    encode(data, *flags)
    assert len(encoded["media"]) == 14 - done < 12 and "captions" not in encoded
    assert len(list(media.glob("*/*.safetensors"))) == 14


def test_a_file_that_changes_while_the_run_reads_it_is_refused(encode, data, monkeypatch):
    read = run_module.read_image

    def read_and_change(row, record):
        pixels = read(row, record)
        if row.id == "coffee.png":
            shutil.copy(data / "rocket.png", data / "coffee.png")
        return pixels

    monkeypatch.setattr(run_module, "read_image", read_and_change)
    with pytest.raises(RefusedError, match=r"coffee\.png changed while it was read"):
        encode(data, *SIZE)


def test_a_disk_that_is_too_small_is_refused_before_encoding(train, photos, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(RefusedError, match=r"--cache_dir .*GiB are to be written there and 0.00 GiB are free"):
        train(photos, *SIZE)


def test_the_size_of_the_cache_is_known_exactly_and_a_dry_run_adds_nothing(train, encode, data, tmp_path, caplog):
    caplog.set_level("INFO")
    (data / "coffee.txt").write_text("a much longer caption than that of any other image")
    out = train(data, "--max_pixels", "6000", "--caption_dropout", "0.5", "--dry_run", out="dry")
    forecast = train.forecast.cache_bytes
    caplog.clear()
    encode(data, "--max_pixels", "6000", "--caption_dropout", "0.5", "--cache_dir", out / "cache")
    assert "cache: 0 of 6 captions are encoded already" in caplog.text
    held = 0
    for path in (out / "cache").glob("*/*/*.safetensors"):
        held += sum(tensor.nbytes for tensor in load_file(path).values())
    assert forecast == held > 30_000


def test_images_stay_with_their_captions(train, tiny_qwen_image, tmp_path, monkeypatch):
    """Grey images whose captions are their levels, over three epochs, from an empty and from a full cache."""
    data = tmp_path / "data"
    data.mkdir()
    for n in range(7):
        Image.new("RGB", (64 + 16 * (n % 2), 64), (30 * n,) * 3).save(data / f"x{n}.png")
        (data / f"x{n}.txt").write_text(f"{30 * n}")
    expected = {}
    get = TrainingDataset.__getitem__

    def spy(dataset, place):
        sample = get(dataset, place)
        name = dataset.ids[place[2]]
        known = expected.setdefault(name, sample)
        assert torch.equal(sample["latents"], known["latents"])
        assert torch.equal(sample["prompt_embeds"], known["prompt_embeds"])
        return sample

    monkeypatch.setattr(TrainingDataset, "__getitem__", spy)
    flags = ["--max_pixels", "6000", "--train_batch_size", "2", "--dataloader_num_workers", "0"]
    flags += ["--num_train_epochs", "3", "--cache_dir", tmp_path / "cache"]
    runs = [train(data, *flags, out=name) for name in ("cold", "warm")]
    assert weights(runs[0]) == weights(runs[1])
    trained = collections.Counter(name for line in metrics(runs[0]) for name in line["samples"])
    assert len(trained) == 7 and set(trained.values()) == {3} and len(expected) == 7
    vae = QwenImage(tiny_qwen_image).load_media_encoder("cpu")
    for n in range(7):
        grey = images.to_tensor(Image.open(data / f"x{n}.png"))
        latents = encode_image(vae, grey)["latents"]
        assert torch.equal(expected[f"x{n}.png"]["latents"], latents)


@pytest.mark.parametrize("flags", [[], ["--aspect_buckets", "0"]])
def test_an_epoch_is_an_epoch(run_until, flags, tmp_path):
    """Twelve images of twelve shapes, in batches of four: each comes once, in few batches if they share shapes."""
    data = tmp_path / "data"
    data.mkdir()
    for n in range(12):
        Image.new("RGB", (150 + 20 * n, 200), (20 * n,) * 3).save(data / f"{n}.png")
        (data / f"{n}.txt").write_text("a gray area")
    flags = ["--max_pixels", "65536", "--train_batch_size", "4", "--num_train_epochs", "2", *flags]
    run = run_until("plan_memory", data, *flags)
    steps = planned(run)
    for epoch in range(2):
        trained = [name for step, names in enumerate(steps, 1) if run.batches.epoch(step) == epoch for name in names]
        assert sorted(trained) == sorted(f"{n}.png" for n in range(12))
    sizes = [tuple(item.record["used"]["size"]) for item in run.items]
    shapes = len(set(sizes))
    assert len(steps) == 2 * sum(-(-sizes.count(size) // 4) for size in set(sizes))
    assert (shapes == 12) if "--aspect_buckets" in flags else (shapes <= 7)


def test_loaders_change_nothing_but_the_time(train, photos, tmp_path):
    flags = [*SIZE, *IN_PAIRS, "--cache_dir", tmp_path / "cache"]
    runs = [train(photos, *flags, "--dataloader_num_workers", n, out=f"{n}_workers") for n in ("0", "3")]
    assert len({weights(run) for run in runs}) == 1


# ---------------------------------------------------------------- bad samples


@pytest.fixture
def with_bad_ones(data):
    """Five good images, and four that are not."""
    (data / "zero.png").write_bytes(b"")
    content = (data / "coffee.png").read_bytes()
    (data / "half.png").write_bytes(content[: len(content) // 2])
    (data / "text.jpg").write_text("not an image")
    for name in ("zero", "half", "text"):
        (data / f"{name}.txt").write_text(name)
    shutil.copy(data / "coffee.png", data / "silent.png")
    return data


BAD = ("zero.png", "half.png", "text.jpg", "silent.png")


def test_all_bad_items_are_listed_at_once(train, with_bad_ones):
    with pytest.raises(RefusedError) as refused:
        train(with_bad_ones, *SIZE)
    assert str(refused.value).startswith("4 of 9 images cannot be used:")
    assert all(name in str(refused.value) for name in BAD)
    assert "--on_bad_sample skip" in str(refused.value) and "--allow_missing_captions" in str(refused.value)


def test_rows_without_a_file_and_bad_files_come_in_one_list(train, run_until, data):
    (data / "zero.png").write_bytes(b"")
    table = "file_name,text\nzero.png,a\nnone.png,b\ncoffee.png,c\ncoffee.png,d\n"
    (data / "metadata.csv").write_text(table)
    with pytest.raises(RefusedError) as refused:
        train(data, *SIZE)
    lines = str(refused.value).splitlines()
    assert [line.split(" (")[0].strip() for line in lines[1:-1]] == ["zero.png", "none.png", "coffee.png"]
    found = run_until("plan_memory", data, *SIZE, "--on_bad_sample", "skip").inspected
    assert [tuple(item.record[key] for key in ("id", "decision", "caption")) for item in found] == [
        ("zero.png", "dropped", "a"),
        ("none.png", "dropped", "b"),
        ("coffee.png", "used", "c"),
        ("coffee.png", "dropped", "d"),
    ]


def test_skip_trains_on_the_rest(train, with_bad_ones, caplog, capsys):
    out = train(with_bad_ones, *SIZE, *IN_PAIRS, "--on_bad_sample", "skip")
    assert "--on_bad_sample skip: 4 of 9 images are left out" in caplog.text
    assert "5 of 9 items are used" in capsys.readouterr().out
    dropped = {line["id"]: line["reason"] for line in records(out) if line["decision"] == "dropped"}
    assert set(dropped) == set(BAD) and dropped["silent.png"] == "caption missing"
    assert all(line["used"] is None for line in records(out) if line["decision"] == "dropped")
    assert {name for line in metrics(out) for name in line["samples"]}.isdisjoint(BAD)
    for path in with_bad_ones.iterdir():
        if path.stem not in ("zero", "half", "text"):
            path.unlink()
    with pytest.raises(RefusedError, match="All 3 images are dropped"):
        train(with_bad_ones, *SIZE, "--on_bad_sample", "skip", out="none")


def test_two_processes_agree_and_share_the_work(on_two_processes, tiny_qwen_image, with_bad_ones, tmp_path, encode):
    """With items of three sizes, and a limit for collectives that encoding would exceed if it were one."""
    Image.new("RGB", (96, 64), "green").save(with_bad_ones / "coffee.png")
    flags = ["--max_pixels", "6000", "--on_bad_sample", "skip", "--train_batch_size", "2", *FLAGS, *STEPS]
    required = ["--pretrained_model_name_or_path", tiny_qwen_image, "--dataset_path", with_bad_ones]
    done = on_two_processes("train_qwen_image.py", *required, "--output_dir", tmp_path / "two", *flags)
    lines = metrics(tmp_path / "two")
    assert [line["step"] for line in lines] == [1, 2, 3] and all(1 <= len(line["samples"]) <= 4 for line in lines)
    assert "4 of 9 images are left out" in done.stderr and done.stderr.count("are left out") == 1
    assert "media (process 0)" in done.stderr and "media (process 1)" in done.stderr
    one = encode(with_bad_ones, *flags, "--gradient_accumulation_steps", "2", out="one")
    caches = [
        {path.name: path.read_bytes() for path in (tmp_path / name / "cache").glob("*/*/*")} for name in ("one", "two")
    ]
    assert caches[0] == caches[1] and len(caches[0]) == 10
    assert planned(one) == [line["samples"] for line in lines]


# ---------------------------------------------------------------- several datasets, buckets


def test_several_datasets_with_repeats(run_until, data, photos, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    Image.new("RGB", (64, 64), "red").save(other / "coffee.png")
    (other / "table.jsonl").write_text(json.dumps({"image": "coffee.png", "prompt": "red", "score": 3}))
    datasets = [
        {"dataset_path": str(data), "dataset_repeat": 1},
        {"dataset_path": str(other), "dataset_metadata": "table.jsonl", "dataset_repeat": 4},
        {"dataset_path": str(tmp_path / ".." / tmp_path.name / "other"), "dataset_metadata": "table.jsonl"},
    ]
    run = run_until("train", None, *SIZE, "--num_train_epochs", "2", config={"datasets": datasets})
    ids = [line["id"] for line in records(tmp_path / "out")]
    assert ids[-2:] == ["other/coffee.png", "other#2/coffee.png"] and "data/coffee.png" in ids
    trained = collections.Counter(name for names in planned(run) for name in names)
    assert trained["other/coffee.png"] == 8 and set(trained.values()) == {2, 8}
    arguments = json.loads((tmp_path / "out" / "run.json").read_text())["arguments"]
    assert arguments["dataset_path"] is None and arguments["datasets"][1]["dataset_repeat"] == 4


def test_images_at_eight_and_clips_at_one_in_one_run(train, photos, clips, tmp_path, capsys):
    data = shutil.copytree(photos, tmp_path / "data")
    for path in clips.iterdir():
        shutil.copy(path, data / f"clip_{path.name}")
    config = {"bucket_config": {"64px": {1: [1.0, 3], 5: [1.0, 1]}, "48px": {1: [1.0, 5]}}}
    out = train(data, family="wan_t2v", config=config)
    for line in records(out):
        is_clip = line["id"].endswith("mp4")
        assert (line["used"]["frames"], line["used"]["batch_size"]) == ((5, 1) if is_clip else (1, 3))
        assert line["used"]["size"] == [64, 48]
    sizes = {line["id"]: line["used"]["batch_size"] for line in records(out)}
    for line in metrics(out):
        (batch_size,) = {sizes[name] for name in line["samples"]}
        assert len(line["samples"]) == batch_size
    printed = capsys.readouterr().out
    assert "64 x 48 x 5" in printed and "64 x 48 x 1" in printed
    arguments = json.loads((out / "run.json").read_text())["arguments"]
    assert arguments["height"] is arguments["num_frames"] is arguments["train_batch_size"] is None
    assert arguments["bucket_config"]["64px"] == {"1": [1.0, 3], "5": [1.0, 1]}


def test_a_resume_with_batch_sizes_of_their_own(train, data, tmp_path):
    """Batches of three and of one in one step, over which the loss is the mean of all samples."""
    Image.open(data / "coffee.png").resize((200, 160)).save(data / "coffee.png")
    config = {"bucket_config": {"64px": {1: [1.0, 3]}, "128px": {1: [1.0, 1]}}}
    flags = ["--gradient_accumulation_steps", "2", "--checkpointing_steps", "2", "--cache_dir", tmp_path / "cache"]
    whole = train(data, *flags, "--max_train_steps", "5", out="whole", config=config)
    sizes = [len(line["samples"]) for line in metrics(whole)]
    assert sizes == [4, 1, 4, 1, 4]
    shutil.rmtree(whole / "checkpoint-4")
    before = weights(whole)
    train(data, *flags, "--max_train_steps", "5", "--resume_from_checkpoint", "latest", out="whole", config=config)
    assert weights(whole) == before and [len(line["samples"]) for line in metrics(whole)] == sizes
    config["bucket_config"]["64px"][1] = [1.0, 2]
    with pytest.raises(RefusedError, match="bucket_config is .* and was .* in"):
        train(data, *flags, "--max_train_steps", "6", "--resume_from_checkpoint", "latest", out="whole", config=config)


# ---------------------------------------------------------------- the report


def test_the_report_of_a_dry_run(train, data, capsys, caplog, tmp_path):
    caplog.set_level("INFO")
    Image.new("RGB", (20, 16), "red").save(data / "tiny.png")
    (data / "tiny.txt").write_text("tiny")
    (data / "rocket.txt").write_text("rocket " * 3000)
    out = train(data, *SIZE, "--train_batch_size", "2", "--dry_run")
    printed = capsys.readouterr().out
    assert (
        "6 of 6 items are used" in printed
        and "64 x 64 x 1       6         6      2       3           32  16.7%   20.0%" in printed
    )
    assert "tokens per optimizer step: 32 to 32" in printed
    assert "tiny.png: 20x16 to 64x64, 4.0 times" in caplog.text
    assert "1 captions are cut" in caplog.text and "1024 kept: 'rocket rocket" in caplog.text
    (cut,) = [line for line in records(out) if line["reason"]]
    assert cut["id"] == "rocket.png" and cut["reason"].endswith(" to 1024 tokens")
    with Image.open(out / "contact_sheet.png") as sheet:
        assert sheet.format == "PNG" and sheet.width > 6 * 200
        # The red image is the sixth.
        pixels = np.asarray(sheet.convert("RGB")).reshape(-1, 3)
    assert (pixels == [254, 0, 0]).all(1).sum() + (pixels == [255, 0, 0]).all(1).sum() >= 64 * 64
    assert not list((out / "cache").glob("m*")), "nothing was encoded"


def test_the_report_on_clips(train, clips, capsys):
    out = train(clips, *SIZE, "--num_frames", "5", "--fps", "8", "--dry_run", family="wan_t2v")
    printed = capsys.readouterr().out
    assert "frames: 15 of 27 are used; 3 of 3 clips are retimed" in printed
    assert (out / "contact_sheet.png").is_file()
