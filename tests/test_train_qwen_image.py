"""The command line from end to end, on a tiny model and real photographs."""

import functools
import json
import math
import os
import re
import shutil

import huggingface_hub
import pytest
import torch
from diffusers import DiffusionPipeline, QwenImageTransformer2DModel
from PIL import Image
from safetensors.torch import load_file, save_file

from dataset.draws import Draw
from runtime.errors import RefusedError
from tests.runs import LORA_FILE, metrics, read_lines
from training.flow_matching import SigmaLaw


SMALL = ["--height", "64", "--width", "80", "--mixed_precision", "no", "--logging_steps", "3"]
LORA = [*SMALL, "--lora_rank", "4", "--lora_alpha", "6", "--lora_dropout", "0.3", "--caption_dropout", "0.2"]
LORA += ["--train_batch_size", "2", "--gradient_accumulation_steps", "2", "--max_train_steps", "4"]
LORA += ["--lr_scheduler", "cosine", "--learning_rate", "1e-3"]


@pytest.fixture(scope="module")
def train(train):
    return functools.partial(train, "qwen_image")


@pytest.fixture(scope="module")
def lora_run(train):
    return train(*LORA, "--checkpointing_steps", "2")


def refused(train, *flags, **kwargs):
    """Return the sentence with which a run is refused."""
    with pytest.raises(RefusedError) as error:
        train(*flags, **kwargs)
    return str(error.value)


# ---------------------------------------------------------------- what a run leaves


def test_files_of_a_lora_run(lora_run, photos):
    assert {path.name for path in lora_run.iterdir()} == {
        "README.md",
        "checkpoint-2",
        "checkpoint-4",
        "dataset.jsonl",
        "metrics.jsonl",
        LORA_FILE,
        "memory.png",
        "metrics.png",
        "run.json",
    }
    run = json.loads((lora_run / "run.json").read_text())
    assert run["arguments"]["lora_rank"] == 4 and run["arguments"]["learning_rate"] == 1e-3
    assert run["arguments"]["weight_decay"] == 0.01, "resolved, not only what was given"
    assert run["versions"]["torch"] == torch.__version__
    mode = {"activations": "keep", "weights": "resident", "units": 1}
    assert run["plan"] == {"transformer_blocks": [mode, mode]}
    assert {entry["dtype"] for entry in run["trainable"]} == {"float32"}
    assert len(run["trainable"]) == 2 * (24 - 4)
    assert not [e for e in run["trainable"] if "blocks.1.txt_mlp" in e["name"] or "blocks.1.attn.to_add" in e["name"]]
    dataset = [json.loads(line) for line in (lora_run / "dataset.jsonl").read_text().splitlines()]
    assert [record["id"] for record in dataset] == sorted(path.name for path in photos.glob("*.png"))
    assert dataset[1]["caption"] == "a tabby cat"
    assert dataset[0]["source"] == {"size": [96, 80], "frames": 1, "fps": None}
    assert dataset[0]["used"] == {"size": [80, 64], "frames": 1}
    assert dataset[0]["decision"] == "used" and dataset[0]["reason"] is None
    card = (lora_run / "README.md").read_text()
    assert "base_model" in card and "pipeline_tag: text-to-image\n" in card


def test_the_model_card_runs(lora_run, tiny_qwen_image, run_model_card):
    folder = run_model_card(lora_run, tiny_qwen_image)
    assert Image.open(folder / "image.png").size == (80, 64)
    assert f'it was called "{tiny_qwen_image.name}"' in (lora_run / "README.md").read_text()


def test_metrics_of_a_lora_run(lora_run):
    lines = read_lines(lora_run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [(line["epoch"], len(line["samples"])) for line in lines] == [(0, 4), (0, 1), (1, 4), (1, 1)]
    assert all(len(line["sigmas"]) == len(line["samples"]) for line in lines)
    assert lines[0]["lr"] == 1e-3 and lines[3]["lr"] < lines[2]["lr"] < 1e-3
    assert all(line["loss"] > 0 and line["grad_norm"] > 0 and line["seconds"] > 0 for line in lines)
    assert lines[0]["device_peak_bytes"] is lines[0]["device_reserved_bytes"] is None
    assert {"offloaded_bytes", "host_rss_bytes"} <= set(lines[0])
    assert len({sigma for line in lines for sigma in line["sigmas"]}) == 10


def test_stock_pipeline_loads_the_lora(lora_run, tiny_qwen_image):
    pipeline = DiffusionPipeline.from_pretrained(tiny_qwen_image)
    settings = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent"}
    base = pipeline("a cat", generator=torch.Generator().manual_seed(0), **settings).images
    pipeline.load_lora_weights(lora_run)
    assert pipeline.get_active_adapters()
    assert not torch.equal(pipeline("a cat", generator=torch.Generator().manual_seed(0), **settings).images, base)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--use_gradient_checkpointing_offload"],
        ["--use_gradient_checkpointing", "--checkpoint_blocks", "1"],
    ],
    ids=["again", "park", "recompute one block"],
)
def test_same_bytes_again_and_in_every_memory_mode(flags, lora_run, train):
    other = train(*LORA, *flags)
    assert (other / LORA_FILE).read_bytes() == (lora_run / LORA_FILE).read_bytes()
    assert metrics(other) == metrics(lora_run)
    if "--checkpoint_blocks" in flags:
        plan = json.loads((other / "run.json").read_text())["plan"]["transformer_blocks"]
        assert [block["activations"] for block in plan] == ["recompute", "keep"]


def test_same_bytes_when_the_inputs_are_really_parked(lora_run, fork_server, tiny_qwen_image, photos, tmp_path):
    """At this size every tensor is below the threshold, so the threshold is lowered."""
    required = ["--pretrained_model_name_or_path", tiny_qwen_image, "--dataset_path", photos, "--output_dir", tmp_path]
    fork_server.run("train_qwen_image.py", *required, *LORA, "--use_gradient_checkpointing_offload", parked=True)
    offloaded = [line["offloaded_bytes"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert all(offloaded)
    measured = json.loads((tmp_path / "run.json").read_text())["measured"]
    parking = measured["parking"]
    assert parking["parked_bytes"] == offloaded[-1]
    # Of one micro-batch, of which a whole step has two; the last step of an epoch has one of a single sample.
    assert offloaded[-2] == 2 * measured["parked_bytes"] > 2 * parking["parked_bytes"]
    assert parking["blocks_refused"] == 0 and parking["pool_peak_bytes"] >= measured["parked_bytes"]
    assert (tmp_path / LORA_FILE).read_bytes() == (lora_run / LORA_FILE).read_bytes()


def test_resume_gives_the_same_bytes(lora_run, train, tmp_path):
    output_dir = tmp_path / "out"
    output_dir.mkdir()
    shutil.copytree(lora_run / "checkpoint-2", output_dir / "checkpoint-2")
    shutil.copy(lora_run / "metrics.jsonl", output_dir)
    train(*LORA, "--resume_from_checkpoint", "latest", output_dir=output_dir)
    assert (output_dir / LORA_FILE).read_bytes() == (lora_run / LORA_FILE).read_bytes()
    assert metrics(output_dir) == metrics(lora_run)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--learning_rate", "2e-3"], ["--learning_rate is 0.002 and was 0.001"]),
        (["--seed", "1"], ["--seed is 1 and was 42"]),
        (["--train_batch_size", "1"], ["its run had 4 samples per step, and this one has 2"]),
        (["--max_train_steps", "3"], ["at step 4", "ends at step 3"]),
        (["--dataset_repeat", "2"], ["its run had 5 samples per epoch, and this one has 10"]),
    ],
)
def test_resume_with_other_settings_is_refused(flags, said, lora_run, train):
    message = refused(train, *LORA, *flags, "--resume_from_checkpoint", lora_run / "checkpoint-4")
    assert all(text in message for text in said), message


@pytest.mark.parametrize(
    "file, content", [("training_state.json", "{"), ("trainable.safetensors", "cut"), ("trainable.safetensors", None)]
)
def test_damaged_checkpoint_is_refused(file, content, lora_run, train, tmp_path):
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(lora_run / "checkpoint-2", checkpoint)
    (checkpoint / file).unlink()
    if content is not None:
        (checkpoint / file).write_text(content)
    message = refused(train, *LORA, "--resume_from_checkpoint", checkpoint)
    assert f"{checkpoint} is not a complete checkpoint: its {file} " in message


def test_a_new_run_does_not_mix_with_old_checkpoints(lora_run, train):
    before = {path: path.stat().st_mtime_ns for path in lora_run.rglob("*")}
    assert "--resume_from_checkpoint latest" in refused(train, *LORA, output_dir=lora_run)
    assert {path: path.stat().st_mtime_ns for path in lora_run.rglob("*")} == before


def test_resume_after_a_crash_in_the_middle_of_a_line(lora_run, train, tmp_path):
    output_dir = tmp_path / "out"
    output_dir.mkdir()
    shutil.copytree(lora_run / "checkpoint-4", output_dir / "checkpoint-4")
    text = (lora_run / "metrics.jsonl").read_text()
    (output_dir / "metrics.jsonl").write_text(text + '{"step": 5, "epo')
    train(*LORA, "--resume_from_checkpoint", "latest", output_dir=output_dir)
    assert (output_dir / "metrics.jsonl").read_text() == text
    assert (output_dir / LORA_FILE).read_bytes() == (lora_run / LORA_FILE).read_bytes()


def test_checkpoints_hold_what_is_trained_only(lora_run):
    tensors = load_file(lora_run / "checkpoint-2" / "trainable.safetensors")
    assert all("lora_" in name and tensor.dtype == torch.float32 for name, tensor in tensors.items())
    assert not list((lora_run / "checkpoint-2").glob("model*"))


@pytest.fixture(scope="module")
def full_run(train):
    return train(*SMALL, "--training_mode", "full", "--max_train_steps", "2", "--learning_rate", "1e-3")


def test_full_run_opens_in_diffusers_and_differs_everywhere(full_run, tiny_qwen_image):
    trained = QwenImageTransformer2DModel.from_pretrained(full_run / "transformer").state_dict()
    base = QwenImageTransformer2DModel.from_pretrained(tiny_qwen_image / "transformer").state_dict()
    entries = {entry["name"] for entry in json.loads((full_run / "run.json").read_text())["trainable"]}
    assert trained.keys() == base.keys()
    for name, tensor in base.items():
        assert torch.equal(trained[name], tensor) == (f"transformer.{name}" not in entries), name
    assert len(base) - len(entries) == 6 + 3  # the last text branch: its output, its MLP, its query and norm


def test_results_hold_no_path(full_run, lora_run, tiny_qwen_image):
    for folder in (full_run, lora_run):
        for file in [*folder.glob("*.safetensors"), *folder.glob("transformer/*"), folder / "README.md"]:
            for path in (str(tiny_qwen_image), str(folder)):
                assert path.encode() not in file.read_bytes(), file


def test_full_result_can_be_trained_on(full_run, train):
    again = train(
        *SMALL, "--training_mode", "full", "--max_train_steps", "1", "--transformer_path", full_run / "transformer"
    )
    before = QwenImageTransformer2DModel.from_pretrained(full_run / "transformer").state_dict()
    after = QwenImageTransformer2DModel.from_pretrained(again / "transformer").state_dict()
    distance = max((after[name] - before[name]).abs().max() for name in before)
    assert 0 < distance < 1e-4, "one step of 1e-5 from where the first run ended"


def test_bf16_full_training_keeps_fp32_masters(train, tiny_qwen_image):
    """At this rate every single update is below the resolution of bf16 weights."""
    flags = ["--height", "64", "--width", "80", "--training_mode", "full", "--checkpointing_steps", "2"]
    folder = train(*flags, "--max_train_steps", "2", "--learning_rate", "1e-6")
    masters = load_file(folder / "checkpoint-2" / "trainable.safetensors")
    base = QwenImageTransformer2DModel.from_pretrained(tiny_qwen_image / "transformer", dtype=torch.bfloat16)
    for name, parameter in base.named_parameters():
        if (master := masters.get(f"transformer.{name}")) is not None:
            assert master.dtype == torch.float32 and not torch.equal(master, parameter.float())
    saved = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}


# ---------------------------------------------------------------- weights


def test_weights_at_another_place_go_on_and_others_are_refused(lora_run, train, tiny_qwen_image, tmp_path):
    """As a checkpoint and as a LoRA to start from; what the file says of its base is no name and no place."""
    moved, out = shutil.copytree(tiny_qwen_image, tmp_path / "moved"), shutil.copytree(lora_run, tmp_path / "out")
    resume = [*LORA, "--checkpointing_steps", "2", "--resume_from_checkpoint", str(out / "checkpoint-2")]
    start = [*SMALL, "--lora_rank", "4", "--max_train_steps", "1", "--lora_init_path", str(lora_run), "--dry_run"]
    train(*resume, model=moved, output_dir=out)
    assert load_file(out / LORA_FILE).keys() == load_file(lora_run / LORA_FILE).keys()
    for name, tensor in load_file(lora_run / LORA_FILE).items():
        assert torch.equal(load_file(out / LORA_FILE)[name], tensor)
    train(*start, model=moved)
    for part in ("transformer", "text_encoder", "vae"):
        (file,) = (moved / part).glob("*.safetensors")
        before = file.read_bytes()
        tensors = load_file(file)
        name = max(name for name in tensors if tensors[name].ndim > 1)
        save_file(tensors | {name: tensors[name] * 1.01}, file)
        assert f"its run had a {part} of other weights" in refused(
            train, *resume, "--dry_run", model=moved, output_dir=out
        )
        if part == "transformer":
            assert f"was trained on other weights (of {tiny_qwen_image.name})" in refused(train, *start, model=moved)
        file.write_bytes(before)


@pytest.mark.parametrize("part", ["text_encoder", "vae", "transformer", "tokenizer"])
def test_parts_are_looked_at_before_anything_is_encoded(part, train, tiny_qwen_image, photos, tmp_path):
    model = shutil.copytree(tiny_qwen_image, tmp_path / "model")
    file = model / part / "tokenizer.json" if part == "tokenizer" else next((model / part).glob("*.safetensors"))
    whole = file.read_bytes()
    for content, said in (
        (f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n".encode(), "`git lfs pull`"),
        (whole[: len(whole) - 9], "cut short"),
    ):
        file.write_bytes(content)
        for flags in ((), ("--dry_run",)):
            sentence = refused(train, *LORA, *flags, "--cache_dir", tmp_path / "cache", model=model)
            assert str(file) in sentence and said in sentence
    assert not (tmp_path / "cache").exists()


# ---------------------------------------------------------------- flags that no other test uses


def test_variant(lora_run, train, tiny_qwen_image, tmp_path):
    """Weights under other names are found with it, and not without."""
    model = shutil.copytree(tiny_qwen_image, tmp_path / tiny_qwen_image.name)  # which the header holds
    for path in model.rglob("*.safetensors"):
        path.rename(path.with_name(f"{path.stem}.bf16.safetensors"))
    assert (train(*LORA, "--variant", "bf16", model=model) / LORA_FILE).read_bytes() == (
        lora_run / LORA_FILE
    ).read_bytes()
    assert "--pretrained_model_name_or_path" in refused(train, *LORA, model=model)


def test_revision(train, tiny_qwen_image, tmp_path, monkeypatch):
    """Two revisions of a repository, whose transformers have two and three blocks."""
    repo = tmp_path / "hub" / "models--owner--tiny"
    (repo / "refs").mkdir(parents=True)
    for name, num_layers in (("main", 2), ("large", 3)):
        commit = f"{num_layers}" * 40
        (repo / "refs" / name).write_text(commit)
        config = shutil.copytree(tiny_qwen_image, repo / "snapshots" / commit) / "transformer" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": num_layers}))
    config.with_name("diffusion_pytorch_model.safetensors").unlink()  # which is of two blocks
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(repo.parent))
    folder = train(*LORA, "--dry_run", "--revision", "large", model="owner/tiny")
    (blocks,) = json.loads((folder / "run.json").read_text())["plan"].values()
    assert len(blocks) == 3


def test_deterministic(lora_run, train, monkeypatch):
    """The kernels are asked for, and no memory is filled in vain; on a CPU they give what all others give."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        folder = train(*LORA, "--deterministic")
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    assert (folder / LORA_FILE).read_bytes() == (lora_run / LORA_FILE).read_bytes()


def test_strength_rate_dropout_and_dtype(lora_run, train):
    """In its first step AdamW moves B by the rate, whatever the gradient: what is exported is alpha / rank times that.

    B is zero until then, so that dropout is in the losses from the second step on.
    """
    flags = [*SMALL, "--lora_rank", "4", "--weight_decay", "0", "--lora_dtype", "fp32"]

    def change(*more):
        tensors = load_file(train(*flags, "--max_train_steps", "1", *more) / LORA_FILE)
        names = sorted(name for name in tensors if "lora_B" in name)
        return torch.cat([(tensors[b] @ tensors[b.replace("lora_B", "lora_A")]).flatten() for b in names])

    plain = change("--learning_rate", "1e-3")
    for more in (["--learning_rate", "2e-3"], ["--learning_rate", "1e-3", "--lora_alpha", "8"]):
        assert (change(*more) - 2 * plain).norm() < 0.05 * plain.norm()
    folder = train(*flags, "--max_train_steps", "2", "--learning_rate", "1e-2")
    for result, expected in ((folder, torch.float32), (lora_run, torch.bfloat16)):
        assert {tensor.dtype for tensor in load_file(result / LORA_FILE).values()} == {expected}
    dropped = train(*flags, "--max_train_steps", "2", "--learning_rate", "1e-2", "--lora_dropout", "0.5")
    with_dropout, without = metrics(dropped), metrics(folder)
    assert with_dropout[0]["loss"] == without[0]["loss"] and with_dropout[1]["loss"] != without[1]["loss"]


def test_sigmas_follow_the_flags(train):
    """Against the law by hand; and each law another."""
    flags = [*SMALL, "--lora_rank", "4", "--max_train_steps", "2", "--sigma_shift", "7"]
    flags += ["--min_sigma", "0.2", "--max_sigma", "0.6"]
    drawn = {}
    for name in ("uniform", "logit_normal"):
        drawn[name] = [line["sigmas"] for line in metrics(train(*flags, "--timestep_sampling", name))]
        law = SigmaLaw(name, 7.0, 0.2, 0.6)
        assert drawn[name] == [[Draw(42, step, 0).sigma(law)] for step in (1, 2)]
    assert drawn["uniform"] != drawn["logit_normal"]


@pytest.mark.parametrize(
    "name, weight", [("sigma_sqrt", lambda s: s**-2), ("cosmap", lambda s: 2 / (math.pi * (1 - 2 * s + 2 * s**2)))]
)
def test_loss_weighting(name, weight, train):
    """Before anything is trained the loss is that without weights, times the weight of the sigma."""
    flags = [*SMALL, "--lora_rank", "4", "--max_train_steps", "1"]
    (plain,), (weighted,) = metrics(train(*flags)), metrics(train(*flags, "--loss_weighting", name))
    assert weighted["sigmas"] == plain["sigmas"]
    assert weighted["loss"] == pytest.approx(plain["loss"] * weight(plain["sigmas"][0]), rel=1e-5)


def test_report_to(lora_run, train):
    """TensorBoard gets the numbers of metrics.jsonl, and training does not feel it."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = train(*LORA, "--report_to", "tensorboard")
    (file,) = folder.rglob("events.out.tfevents*")
    events = accumulator.EventAccumulator(str(file)).Reload()
    for name in ("loss", "lr", "grad_norm"):
        expected = [(line["step"], pytest.approx(line[name])) for line in metrics(folder)]
        assert [(event.step, event.value) for event in events.Scalars(f"train/{name}")] == expected
    assert (folder / LORA_FILE).read_bytes() == (lora_run / LORA_FILE).read_bytes()
    assert not list(lora_run.rglob("events.out.tfevents*"))


def test_checkpoints_total_limit(train):
    flags = [*SMALL, "--lora_rank", "4", "--max_train_steps", "4", "--checkpointing_steps", "1"]
    folder = train(*flags, "--checkpoints_total_limit", "2")
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]


# ---------------------------------------------------------------- what is refused, and what fails


@pytest.fixture(scope="module")
def model_without_weights(tiny_qwen_image, tmp_path_factory):
    """Configs only: whatever is refused with it was refused before a model was loaded."""
    folder = tmp_path_factory.mktemp("models") / "configs-only"
    shutil.copytree(tiny_qwen_image, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--lora_target_modules", "to_q,to_add_out.0"], ["'to_add_out.0'"]),
        (["--optimizer", "torch.optim.Adamm"], ["torch.optim.Adamm"]),
        (
            ["--resume_from_checkpoint", "nowhere"],
            ["--resume_from_checkpoint nowhere: there is no ", "complete ones in "],
        ),
        (["--transformer_path", "nowhere"], ["--transformer_path nowhere"]),
        (
            ["--use_gradient_checkpointing", "--checkpoint_blocks", "1,1"],
            ["--checkpoint_blocks has 2 numbers", "transformer_blocks"],
        ),
        (["--dataset_path", "nowhere/at/all"], ["nowhere/at/all"]),
    ],
)
def test_refused_before_models_load(flags, said, train, model_without_weights):
    message = refused(train, *LORA, *flags, model=model_without_weights)
    assert all(text in message for text in said) and "\n" not in message, message


def test_folder_that_cannot_be_written_is_refused(train):
    done = train(*LORA, "--output_dir", "/proc/nowhere", check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    message = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(message) == 1 and "--output_dir /proc/nowhere cannot be written" in message[0], done.stderr


def test_unreadable_images_are_all_named_before_models_load(train, model_without_weights, photos, tmp_path):
    dataset = tmp_path / "data"
    shutil.copytree(photos, dataset)
    (dataset / "empty.png").write_bytes(b"")
    (dataset / "cut.png").write_bytes((dataset / "coffee.png").read_bytes()[:2000])
    for name in ("empty", "cut"):
        (dataset / f"{name}.txt").write_text("x")
    done = train(*LORA, dataset=dataset, model=model_without_weights, check=False)
    assert done.returncode == 2 and "empty.png" in done.stderr and "cut.png" in done.stderr


def test_lora_without_effect_ends_with_1(train):
    done = train(*SMALL, "--lora_rank", "4", "--max_train_steps", "1", "--learning_rate", "1e-30", check=False)
    assert done.returncode == 1 and "changes nothing" in done.stderr


def test_infinite_loss_ends_with_1_and_names_the_samples(train, photos):
    flags = [*SMALL, "--training_mode", "full", "--learning_rate", "1e30", "--max_train_steps", "9"]
    done = train(*flags, "--checkpointing_steps", "9", check=False)
    assert done.returncode == 1
    assert re.search(r"error: step \d: the (loss|gradient norm) is not finite", done.stderr)
    assert any(path.name in done.stderr for path in photos.glob("*.png"))


# ---------------------------------------------------------------- several processes


@pytest.fixture(scope="module")
def train_on_two_processes(on_two_processes, tiny_qwen_image, photos, shared_folder, tmp_path_factory):
    def run(*flags):
        output_dir = tmp_path_factory.mktemp("ddp") / "out"
        required = ["--pretrained_model_name_or_path", tiny_qwen_image, "--dataset_path", photos]
        required += ["--output_dir", output_dir, "--cache_dir", shared_folder / "cache"]
        on_two_processes("train_qwen_image.py", *required, *flags)
        return output_dir

    return run


# Plain gradient descent at rate 100, no clipping: the weights move by the gradient times 100, and rounding is small.
GRADIENT = [*SMALL, "--optimizer", "torch.optim.SGD", "--learning_rate", "100", "--max_grad_norm", "0", "--seed", "3"]


def trained_weights(folder):
    return load_file(folder / "checkpoint-1" / "trainable.safetensors")


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_two_processes_equal_one_with_twice_the_batch(mode, train, train_on_two_processes, tiny_qwen_image):
    """In the second step, too: there DDP notices parameters without gradient. Schedules count optimizer steps."""
    flags = [*GRADIENT, "--training_mode", mode, "--max_train_steps", "2", "--checkpointing_steps", "1"]
    flags += ["--gradient_accumulation_steps", "2", "--lr_scheduler", "linear"]
    flags += ["--lora_rank", "4", "--lora_dtype", "fp32"] if mode == "lora" else []
    one = train(*flags, "--train_batch_size", "4")
    two = train_on_two_processes(*flags, "--train_batch_size", "2")
    for ours, expected in zip(metrics(two), metrics(one), strict=True):
        assert ours["samples"] == expected["samples"] and ours["sigmas"] == expected["sigmas"]
        assert ours["lr"] == expected["lr"]
        rel = 1e-5 if ours["step"] == 1 else 1e-3
        assert ours["loss"] == pytest.approx(expected["loss"], rel=rel)
        assert ours["grad_norm"] == pytest.approx(expected["grad_norm"], rel=rel)
    ours, expected = trained_weights(two), trained_weights(one)
    assert ours.keys() == expected.keys()
    base = QwenImageTransformer2DModel.from_pretrained(tiny_qwen_image / "transformer").state_dict()
    moved = {}
    for name, tensor in expected.items():
        # lora_B starts at zero and lora_A does not move in the first step, since its gradient is zero.
        start = base[name.removeprefix("transformer.")] if mode == "full" else torch.zeros(())
        if "lora_A" in name:
            assert torch.equal(ours[name], tensor), "adapters start equal on every process"
            continue
        moved[name] = tensor - start, ours[name] - start
    gradient, other = (torch.cat([pair[i].flatten() for pair in moved.values()]) for i in (0, 1))
    assert gradient.norm() > 0 and (other - gradient).norm() < 1e-5 * gradient.norm()
    result = LORA_FILE if mode == "lora" else "transformer/diffusion_pytorch_model.safetensors"
    assert load_file(two / result).keys() == load_file(one / result).keys()


@pytest.mark.slow
def test_zero2_through_the_shipped_config(train, on_two_processes, tiny_qwen_image, photos, tmp_path):
    """Two processes under DeepSpeed end with the file of one process with twice the batch; and they resume."""
    flags = [*SMALL, "--lora_rank", "4", "--lora_dtype", "fp32", "--max_train_steps", "4", "--learning_rate", "1e-3"]
    flags += ["--lr_scheduler", "linear", "--max_grad_norm", "0.02", "--gradient_accumulation_steps", "2"]

    def launch(output_dir, *more):
        required = ["--pretrained_model_name_or_path", tiny_qwen_image, "--dataset_path", photos]
        required += ["--output_dir", output_dir]
        config = "accelerate_configs/deepspeed_zero2.yaml"
        done = on_two_processes("train_qwen_image.py", *required, *flags, *more, accelerate_config=config)
        assert "loaded back by diffusers at the trained strength" in done.stdout
        return load_file(output_dir / LORA_FILE)

    whole = launch(tmp_path / "out", "--checkpointing_steps", "2")
    one = train(*flags, "--train_batch_size", "2")
    expected = load_file(one / LORA_FILE)
    assert whole.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(whole[name], tensor, rtol=1e-3, atol=2e-5)
    for ours, theirs in zip(metrics(tmp_path / "out"), metrics(one), strict=True):
        assert ours["lr"] == theirs["lr"] and ours["samples"] == theirs["samples"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3), "clipped, logged before"
        assert ours["grad_norm"] > 0.02

    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    resumed = launch(tmp_path / "out", "--checkpointing_steps", "2", "--resume_from_checkpoint", "latest")
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-5, atol=1e-7)
