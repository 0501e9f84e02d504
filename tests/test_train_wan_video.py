"""The Wan command line from end to end, on tiny models of every variant and short clips of photographs.

Most runs are made in this process, as the script would make them after its imports.
"""

import json
import math
import shutil
import weakref

import av
import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline, WanTransformer3DModel
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from blockwise import offload
from dataset.batches import collate
from pipelines import wan_video
from pipelines.wan_video import WanVideo
from runtime.errors import RefusedError
from tests.runs import LORA_FILE, lora_files, metrics, parse, records
from training import run as run_module
from training.arguments import resolve_for_model
from training.module import DiffusionTrainingModule


SMALL = ["--height", "64", "--width", "64", "--num_frames", "9", "--mixed_precision", "no", "--logging_steps", "3"]
LORA = [*SMALL, "--lora_rank", "4", "--lora_alpha", "6", "--lora_dropout", "0.3", "--caption_dropout", "0.2"]
LORA += ["--train_batch_size", "2", "--max_train_steps", "3", "--learning_rate", "1e-3", "--lr_scheduler", "cosine"]

# Name -> family and the flags that it needs.
VARIANTS = {
    "t2v": ("wan_t2v", []),
    "i2v": ("wan_i2v", []),
    "flf2v": ("wan_flf2v", []),
    "ti2v from text": ("wan_ti2v", ["--task", "t2v"]),
    "ti2v from an image": ("wan_ti2v", ["--task", "i2v"]),
    "t2v_a14b": ("wan_t2v_a14b", ["--expert", "both"]),
    "i2v_a14b": ("wan_i2v_a14b", ["--expert", "both"]),
}
MEMORY_MODES = {
    "recompute": ["--use_gradient_checkpointing"],
    "park": ["--use_gradient_checkpointing_offload"],
}
# Those of which each has something that the others do not have; the rest is slow.
DIFFERENT = ("t2v", "flf2v", "ti2v from an image", "i2v_a14b")


def but_slow(names, quick):
    """Parameters of which those that are not `quick` are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def lora_run(train):
    """Function from the name of a variant to the folder of its LoRA run, which is made once."""
    done = {}

    def run(name):
        if name not in done:
            family, flags = VARIANTS[name]
            done[name] = train(family, *LORA, *flags, "--checkpointing_steps", "2")
        return done[name]

    return run


# ---------------------------------------------------------------- every variant


@pytest.mark.parametrize("mode", but_slow(MEMORY_MODES, ["park"]))
@pytest.mark.parametrize("name", but_slow(VARIANTS, ["t2v", "i2v_a14b"]))
def test_same_bytes_in_every_memory_mode(name, mode, lora_run, train, monkeypatch):
    monkeypatch.setattr(offload, "MIN_PARKED_BYTES", 512)  # at this size every tensor is below the real threshold
    expected = lora_run(name)
    family, flags = VARIANTS[name]
    offload.reset_counters()
    other = train(family, *LORA, *flags, *MEMORY_MODES[mode])
    assert (offload.counters()["parked_bytes"] > 0) == (mode == "park")
    assert lora_files(other) == lora_files(expected) and lora_files(other)
    assert metrics(other) == metrics(expected)


@pytest.mark.parametrize("name", but_slow(VARIANTS, [*DIFFERENT, "t2v_a14b"]))
def test_lora_file(name, lora_run, tiny_model):
    """The authors' names, the expert in folder and header; and stock sampling with it differs."""
    family, _ = VARIANTS[name]
    folder = lora_run(name)
    two_experts = family.endswith("a14b")
    names = ["high_noise", "low_noise"] if two_experts else [""]
    assert set(lora_files(folder)) == {f"{name}/{LORA_FILE}".lstrip("/") for name in names}
    pipeline = DiffusionPipeline.from_pretrained(tiny_model(family))
    pipeline.set_progress_bar_config(disable=True)
    settings = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 6, "output_type": "latent"}
    if family in ("wan_i2v", "wan_flf2v", "wan_i2v_a14b"):
        settings["image"] = Image.new("RGB", (64, 64), "gray")
    if family == "wan_flf2v":
        settings["last_image"] = Image.new("RGB", (64, 64), "white")
    samples = []
    for expert in [None, *names]:
        if expert is not None:
            with safe_open(folder / expert / LORA_FILE, "pt") as file:
                assert all(key.startswith("diffusion_model.blocks.") for key in file.keys())
                assert file.metadata().get("expert") == (expert or None)
                assert file.metadata()["base_model"] == family
            options = {"load_into_transformer_2": True} if expert == "low_noise" else {}
            pipeline.load_lora_weights(folder / expert, adapter_name=expert or "lora", **options)
        samples.append(pipeline(prompt="a cat", generator=torch.Generator().manual_seed(0), **settings).frames)
    assert all(not torch.equal(one, other) for one, other in zip(samples, samples[1:], strict=False))
    card = (folder / "README.md").read_text()
    assert ('/low_noise", load_into_transformer_2=True)' in card) == two_experts
    assert f"{type(pipeline).__name__}.from_pretrained" in card or name == "ti2v from an image"
    from_text = name in ("t2v", "ti2v from text", "t2v_a14b")
    assert f"pipeline_tag: {'text' if from_text else 'image'}-to-video\n" in card


@pytest.mark.parametrize("name", ["t2v", "flf2v"])
def test_the_model_card_runs(name, lora_run, tiny_model, run_model_card):
    folder = run_model_card(lora_run(name), tiny_model(VARIANTS[name][0]))
    with av.open(str(folder / "video.mp4")) as video:
        frames = list(video.decode(video=0))
    assert len(frames) > 1 and frames[0].width == 64


def test_image_keys_need_not_be_adapted(train):
    """diffusers adds adapters of zeros for them when it loads such a file into an image-to-video model."""
    flags = [*SMALL, "--lora_rank", "4", "--max_train_steps", "1", "--lora_target_modules", "to_q,to_k"]
    assert len(load_file(train("wan_i2v", *flags) / LORA_FILE)) == 2 * 8


@pytest.mark.parametrize("name", but_slow(VARIANTS, DIFFERENT))
def test_full_run_opens_in_diffusers_and_differs_everywhere(name, train, tiny_model):
    family, flags = VARIANTS[name]
    flags = ["--expert", "low_noise"] if "--expert" in flags else flags
    full = [*SMALL, "--training_mode", "full", "--max_train_steps", "2", "--learning_rate", "1e-3"]
    folder = train(family, *full, *flags)
    subfolder = "transformer_2" if "low_noise" in flags else "transformer"
    trained = WanTransformer3DModel.from_pretrained(folder / subfolder).state_dict()
    base = WanTransformer3DModel.from_pretrained(tiny_model(family) / subfolder).state_dict()
    assert trained.keys() == base.keys()
    assert all(not torch.equal(trained[key], tensor) for key, tensor in base.items())
    entries = json.loads((folder / "run.json").read_text())["trainable"]
    assert {entry["name"] for entry in entries} == {f"transformer.{key}" for key in base}


def test_run_json_and_dataset(lora_run, clips):
    folder = lora_run("i2v_a14b")
    run = json.loads((folder / "run.json").read_text())
    assert [block["activations"] for block in run["plan"]["blocks"]] == ["keep", "keep"]
    assert (run["arguments"]["num_frames"], run["arguments"]["fps"], run["arguments"]["expert"]) == (9, 16, "both")
    assert len(run["trainable"]) == 2 * 2 * 10
    dataset = records(folder)
    assert [record["id"] for record in dataset] == sorted(path.name for path in clips.glob("*.mp4"))
    assert dataset[0]["source"] == {"size": [96, 80], "frames": 9, "fps": 16.0}
    assert dataset[0]["used"]["frames"] == 9 and dataset[0]["used"]["size"] == [64, 64]
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["expert"] for line in lines] == ["high_noise"] * 3 + ["low_noise"] * 3
    assert lines[0]["lr"] == lines[3]["lr"] == 1e-3, "the schedule starts again"
    assert "expert" not in metrics(lora_run("t2v"))[0]


@pytest.mark.parametrize(
    "name", but_slow(["i2v", "ti2v from text", "ti2v from an image"], ["i2v", "ti2v from an image"])
)
def test_in_bf16_the_transformer_gets_what_the_stock_pipeline_gives_it(name, train, monkeypatch):
    """Latents, text and image embeddings in its dtype, timesteps in fp32; the clean frame for one task only."""
    model_fn, seen = wan_video.model_fn_wan_video, []

    def model_fn_wan_video(transformer, **inputs):
        seen.append(inputs)
        return model_fn(transformer, **inputs)

    monkeypatch.setattr(wan_video, "model_fn_wan_video", model_fn_wan_video)
    family, flags = VARIANTS[name]
    flags = [*SMALL[:-4], "--lora_rank", "4", "--max_train_steps", "1", *flags]
    assert "--mixed_precision" not in flags
    train(family, *flags)
    for inputs in seen:
        assert inputs["timestep"].dtype == torch.float32
        assert inputs["timestep"].ndim == (2 if name == "ti2v from an image" else 1)
        tensors = [inputs[key] for key in inputs if "states" in key and inputs[key] is not None]
        assert len(tensors) == (3 if name == "i2v" else 2)
        assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}


def test_flags_reach_the_clips(train, clips, tmp_path):
    """Rate, part, and a seed that moves the random part; a folder of frames is one clip."""
    grey_clip(tmp_path / "long.mp4", 40, 16)
    (tmp_path / "frames").mkdir()
    for k in range(6):
        Image.new("RGB", (64, 64), (k, k, k)).save(tmp_path / "frames" / f"{k}.png")
    (tmp_path / "frames.txt").write_text("frames")
    (tmp_path / "frames" / "notes.md").write_text("not an image")

    def used(*flags):
        flags = [*SMALL, *flags, "--num_frames", "5", "--dry_run"]
        folder = train("wan_t2v", *flags, dataset=tmp_path)
        rows = records(folder)
        assert [record["id"] for record in rows] == ["frames", "long.mp4"]
        return rows[1]["used"]["source_frames"]

    assert used("--fps", "8") == [0, 2, 4, 6, 8]
    assert used("--clip_part", "middle") == [17, 18, 19, 20, 21]
    first = used("--clip_part", "random")
    assert used("--clip_part", "random") == first
    assert any(used("--clip_part", "random", "--seed", str(seed)) != first for seed in (1, 2))


# ---------------------------------------------------------------- experts


def closed_form(shift, sigma):
    """P(sigma' <= sigma) of the shifted uniform law."""
    return sigma / (shift + sigma - shift * sigma)


@pytest.mark.parametrize(
    "family, boundary, shift",
    [
        ("wan_t2v_a14b", 0.875, "default"),
        pytest.param("wan_i2v_a14b", 0.9, 12.0, marks=pytest.mark.slow),
    ],
)
def test_each_expert_is_trained_on_its_own_side(family, boundary, shift, train):
    """In the log of a run: the right side of the boundary, and there the law conditioned on it."""
    flags = [] if shift == "default" else ["--sigma_shift", str(shift)]
    tiny = ["--height", "32", "--width", "32", "--num_frames", "5", "--mixed_precision", "no", "--lora_rank", "1"]
    tiny += ["--train_batch_size", "20", "--max_train_steps", "20", "--logging_steps", "20", "--expert", "both"]
    tiny += ["--dataset_repeat", "20"]  # an epoch is three whole batches
    lines = metrics(train(family, *tiny, *flags))
    shift = 5.0 if shift == "default" else shift
    for expert, low, high in (("high_noise", boundary, 1.0), ("low_noise", 0.0, boundary)):
        sigmas = sorted(sigma for line in lines if line["expert"] == expert for sigma in line["sigmas"])
        assert len(sigmas) == 400 and low <= sigmas[0] and sigmas[-1] <= high
        ends = closed_form(shift, low), closed_form(shift, high)
        cdf = [(closed_form(shift, sigma) - ends[0]) / (ends[1] - ends[0]) for sigma in sigmas]
        distance = max(max(abs(p - i / 400), abs(p - (i + 1) / 400)) for i, p in enumerate(cdf))
        assert distance < 1.95 / math.sqrt(400), "Kolmogorov-Smirnov: above in one of a thousand cases"


def test_both_experts_in_one_run_equal_two_runs(lora_run, train):
    both = lora_run("t2v_a14b")
    for expert in ("high_noise", "low_noise"):
        alone = train("wan_t2v_a14b", *LORA, "--expert", expert)
        assert lora_files(alone) == {f"{expert}/{LORA_FILE}": lora_files(both)[f"{expert}/{LORA_FILE}"]}
        losses = [line["loss"] for line in metrics(both) if line["expert"] == expert]
        assert [line["loss"] for line in metrics(alone)] == losses


def test_a_full_buffer_changes_nothing(lora_run, train, monkeypatch):
    """The flag reaches the pool: room for one input of the 48 tokens of 32 numbers for each of two samples."""
    monkeypatch.setattr(offload, "MIN_PARKED_BYTES", 512)
    flags = ["--use_gradient_checkpointing_offload", "--offload_buffer_size", "4KB"]
    offload.reset_counters()
    other = train("wan_t2v", *LORA, *flags)
    assert offload.counters()["blocks_refused"] > 0
    assert offload.counters()["pool_peak_bytes"] <= 4000
    assert lora_files(other) == lora_files(lora_run("t2v"))
    offload.set_limit(None)


def test_a_resumed_run_does_not_say_that_it_starts_from_a_lora(lora_run, train, tmp_path, capfd):
    """Steps 1 to 3 are of the first expert, which goes on; the second starts from its file."""
    init = ["--lora_init_path", str(lora_run("t2v_a14b"))]
    flags = [*LORA, *init, "--expert", "both", "--checkpointing_steps", "2"]
    whole = train("wan_t2v_a14b", *flags)
    assert capfd.readouterr().out.count("start from the weights") == 2
    shutil.copytree(whole / "checkpoint-2", tmp_path / "checkpoint-2")
    shutil.copy(whole / "metrics.jsonl", tmp_path)
    train("wan_t2v_a14b", *flags, "--resume_from_checkpoint", "latest", output_dir=tmp_path)
    assert capfd.readouterr().out.count("start from the weights") == 1
    assert lora_files(tmp_path) == lora_files(whole) and metrics(tmp_path) == metrics(whole)


def test_nothing_of_the_first_expert_is_left_when_the_second_is_loaded(train, monkeypatch):
    load, loaded, alive = WanVideo.load_transformer, [], []

    def load_transformer(*args, **kwargs):
        alive.append([reference() is not None for reference in loaded])
        transformer = load(*args, **kwargs)
        loaded.extend(weakref.ref(tensor) for tensor in (transformer, *transformer.parameters()))
        return transformer

    make_trainable = run_module.make_trainable

    def add_adapters(transformer, *args):
        make_trainable(transformer, *args)
        if not transformer.patch_embedding.weight.is_meta:  # which the forecast is made with
            loaded.extend(weakref.ref(tensor) for name, tensor in transformer.named_parameters() if "lora" in name)

    monkeypatch.setattr(WanVideo, "load_transformer", load_transformer)
    monkeypatch.setattr(run_module, "make_trainable", add_adapters)
    train("wan_t2v_a14b", *SMALL, "--lora_rank", "4", "--max_train_steps", "2", "--expert", "both",
          "--checkpointing_steps", "1")  # fmt: skip
    assert len(alive) == 2 and len(alive[1]) > 100 and not any(alive[1])


@pytest.mark.parametrize("checkpoint, kept", [("checkpoint-2", []), ("checkpoint-4", ["high_noise"])])
def test_resume_in_either_expert_gives_the_same_bytes(checkpoint, kept, lora_run, train, tmp_path):
    """Steps 1 to 3 are those of the expert for high noise."""
    whole = lora_run("t2v_a14b")
    for name in (checkpoint, *kept):
        shutil.copytree(whole / name, tmp_path / name)
    shutil.copy(whole / "metrics.jsonl", tmp_path)
    flags = [*LORA, "--expert", "both", "--checkpointing_steps", "2", "--resume_from_checkpoint", "latest"]
    train("wan_t2v_a14b", *flags, output_dir=tmp_path)
    assert lora_files(tmp_path) == lora_files(whole)
    assert metrics(tmp_path) == metrics(whole)


def test_the_first_expert_of_another_run_is_refused(lora_run, train, tmp_path):
    """A checkpoint of the second expert, resumed next to a LoRA of the first that its run did not make."""
    whole = lora_run("t2v_a14b")
    file = tmp_path / "high_noise" / LORA_FILE
    for name in ("checkpoint-4", "high_noise"):
        shutil.copytree(whole / name, tmp_path / name)
    save_file({name: tensor * 1.5 for name, tensor in load_file(file).items()}, file)
    before = file.read_bytes()
    with pytest.raises(RefusedError, match=f"its run had a high_noise/{LORA_FILE} of other weights"):
        train("wan_t2v_a14b", *LORA, "--expert", "both", "--checkpointing_steps", "2", "--resume_from_checkpoint",
              "latest", output_dir=tmp_path)  # fmt: skip
    assert file.read_bytes() == before and not (tmp_path / "low_noise").exists()


def test_resume_on_another_model_is_refused(lora_run, train, tmp_path):
    """The adapters have the same names and shapes in both."""
    flags = [*LORA, "--expert", "both", "--resume_from_checkpoint", str(lora_run("t2v_a14b") / "checkpoint-2")]
    with pytest.raises(RefusedError, match="its run had 16 in_channels of the model, and this one has 36"):
        train("wan_i2v_a14b", *flags, output_dir=tmp_path)


def test_resume_between_the_experts(train, tmp_path):
    """A checkpoint of the last step of the first expert: its file is written, then the second begins."""
    flags = [*LORA, "--expert", "both", "--checkpointing_steps", "3"]
    whole = train("wan_t2v_a14b", *flags)
    shutil.copytree(whole / "checkpoint-3", tmp_path / "checkpoint-3")
    shutil.copy(whole / "metrics.jsonl", tmp_path)
    train("wan_t2v_a14b", *flags, "--resume_from_checkpoint", "latest", output_dir=tmp_path)
    assert lora_files(tmp_path) == lora_files(whole) and metrics(tmp_path) == metrics(whole)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--expert", "low_noise"], "--expert is low_noise and was both"),
        (["--expert", "both", "--max_train_steps", "4"], "--max_train_steps is 4 and was 3"),
        (["--expert", "both"], "has no LoRA of high_noise"),
    ],
)
def test_checkpoint_of_another_expert_is_refused(flags, said, lora_run, train, tmp_path):
    checkpoint = lora_run("t2v_a14b") / "checkpoint-4"
    with pytest.raises(RefusedError, match=said):
        train("wan_t2v_a14b", *LORA, *flags, "--resume_from_checkpoint", str(checkpoint), output_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_starts_from_the_lora_of_its_expert(lora_run, train, tmp_path):
    """Whichever of the two names they have in the file, the first step sees the same adapters."""
    flags = [*SMALL, "--lora_rank", "4", "--max_train_steps", "1", "--expert", "low_noise"]
    path = lora_run("t2v_a14b")
    with pytest.raises(RefusedError, match="of the expert high_noise, and this run trains low_noise"):
        init = str(path / "high_noise" / LORA_FILE)
        train("wan_t2v_a14b", *flags, "--lora_init_path", init, output_dir=tmp_path / "refused")
    state_dict = WanPipeline.lora_state_dict(load_file(path / "low_noise" / LORA_FILE))
    save_file(state_dict, tmp_path / "diffusers.safetensors")
    fresh = metrics(train("wan_t2v_a14b", *flags))[0]["loss"]
    losses = [
        metrics(train("wan_t2v_a14b", *flags, "--lora_init_path", str(init)))[0]["loss"]
        for init in (path, path / "low_noise", tmp_path / "diffusers.safetensors")
    ]
    assert losses[0] == losses[1] == losses[2] != fresh


# ---------------------------------------------------------------- TI2V-5B from an image


def test_the_first_latent_frame_is_clean_and_not_trained():
    """What reaches the transformer, and which part of its prediction gets a gradient (B88)."""
    seen = {}

    def forward(transformer, **inputs):
        seen.update(inputs)
        seen["prediction"] = torch.randn(2, 48, 3, 4, 4, requires_grad=True)
        return seen["prediction"]

    transformer = torch.nn.Module()
    transformer.patch_embedding = torch.nn.Linear(1, 1)
    samples = [
        {
            "latents": torch.randn(48, 3, 4, 4),
            "prompt_embeds": torch.randn(512, 8),
            "noise": torch.randn(48, 3, 4, 4),
            "sigmas": torch.tensor(sigma),
        }
        for sigma in (0.25, 0.75)
    ]
    batch = collate(samples)
    for clean in (True, False):
        module = DiffusionTrainingModule(wan(clean), transformer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wan_video, "model_fn_wan_video", forward)
            loss = module(batch)
        gradient = torch.autograd.grad(loss, seen["prediction"])[0]
        sigma = batch["sigmas"].view(2, 1, 1, 1, 1)
        noisy = (1 - sigma) * batch["latents"] + sigma * batch["noise"]
        if clean:
            assert torch.equal(seen["hidden_states"][:, :, 0], batch["latents"][:, :, 0])
            assert torch.equal(seen["hidden_states"][:, :, 1:], noisy[:, :, 1:])
            assert seen["timestep"].shape == (2, 3 * 2 * 2)
            assert not seen["timestep"][:, :4].any()
            assert torch.equal(seen["timestep"][:, 4:], (batch["sigmas"] * 1000)[:, None].expand(2, 8))
            assert not gradient[:, :, 0].any() and gradient[:, :, 1:].all()
            error = (seen["prediction"] - (batch["noise"] - batch["latents"]))[:, :, 1:]
            torch.testing.assert_close(loss, error.square().mean())
        else:
            assert torch.equal(seen["hidden_states"], noisy)
            assert torch.equal(seen["timestep"], batch["sigmas"] * 1000) and gradient.all()


def wan(cleans_first_frame=False):
    """The family without a pipeline."""
    family = object.__new__(WanVideo)
    family.cleans_first_frame = cleans_first_frame
    return family


def test_condition_channels_follow_the_noisy_ones():
    """16 noisy, 4 mask, 16 condition (B90); image embeddings of all samples one after the other."""
    seen = {}
    transformer = torch.nn.Module()
    transformer.patch_embedding = torch.nn.Linear(1, 1)
    batch = {
        "latents": torch.randn(2, 16, 3, 4, 4),
        "condition": torch.randn(2, 20, 3, 4, 4),
        "image_embeds": torch.randn(2, 2, 257, 8),
        "prompt_embeds": torch.randn(2, 512, 8),
    }
    noisy = torch.randn(2, 16, 3, 4, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wan_video, "model_fn_wan_video", lambda _, **inputs: seen.update(inputs))
        wan().predict(transformer, noisy, torch.tensor([5.0, 7.0]), batch)
    assert torch.equal(seen["hidden_states"], torch.cat([noisy, batch["condition"]], 1))
    expected = [batch["image_embeds"][0, 0], batch["image_embeds"][0, 1], batch["image_embeds"][1, 0]]
    assert torch.equal(seen["encoder_hidden_states_image"][:3], torch.stack(expected))


# ---------------------------------------------------------------- several processes


@pytest.mark.parametrize(
    "family, flags, config",
    [
        pytest.param("wan_i2v", ["--training_mode", "full"], None, marks=pytest.mark.slow),
        ("wan_t2v_a14b", ["--expert", "both", "--lora_rank", "4"], None),
        pytest.param(
            "wan_t2v_a14b",
            ["--expert", "both", "--lora_rank", "4"],
            "accelerate_configs/deepspeed_zero2.yaml",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_processes_equal_one_with_twice_the_batch(
    family, flags, config, on_two_processes, train, tiny_model, clips, shared_folder, tmp_path
):
    flags = [*SMALL, *flags, "--max_train_steps", "3", "--learning_rate", "1e-3", "--lr_scheduler", "linear"]
    required = ["--pretrained_model_name_or_path", tiny_model(family), "--dataset_path", clips]
    required += ["--cache_dir", shared_folder / "cache"]
    on_two_processes("train_wan_video.py", *required, "--output_dir", tmp_path, *flags, accelerate_config=config)
    one, two = metrics(train(family, *flags, "--train_batch_size", "2")), metrics(tmp_path)
    assert len(one) == len(two) == (6 if "both" in flags else 3)
    for ours, expected in zip(two, one, strict=True):
        for key in ("step", "epoch", "lr", "samples", "sigmas"):
            assert ours[key] == expected[key]
        first = expected["lr"] == 1e-3
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-5 if first else 1e-3)
        assert ours["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5 if first else 1e-2)


# ---------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def model_without_weights(tiny_model, tmp_path_factory):
    """Configs only: whatever is refused with it was refused before a model was loaded."""

    def make(family):
        folder = tmp_path_factory.mktemp("configs") / family
        shutil.copytree(tiny_model(family), folder, ignore=shutil.ignore_patterns("*.safetensors"))
        return folder

    return make


@pytest.mark.parametrize(
    "family, flags, said",
    [
        ("wan_ti2v", ["--task", "t2v", "--height", "80", "--width", "112"], "--height is 80; .* multiples of 32"),
        ("wan_t2v", ["--height", "80", "--width", "100"], "--width is 100; .* multiples of 16, such as 96 or 112"),
        ("wan_ti2v", ["--task", "t2v", "--max_pixels", "256"], "--max_pixels is 256; allowed is at least 1024"),
        ("wan_ti2v", [], "--task is required for this model; allowed are t2v, i2v"),
        ("wan_i2v", ["--task", "i2v"], "--task i2v has no effect"),
        ("wan_t2v", ["--expert", "both"], "--expert both has no effect"),
        ("wan_t2v_a14b", [], "--expert is required for this model; allowed are high_noise, low_noise, both"),
        ("wan_t2v_a14b", ["--training_mode", "full", "--expert", "both"], "--expert is both; allowed with .* full"),
        ("wan_t2v_a14b", ["--expert", "both", "--transformer_path", "."], "--transformer_path"),
        ("wan_t2v_a14b", ["--expert", "low_noise", "--min_sigma", "0.9"], "--min_sigma 0.9 .* from 0.0 to 0.875"),
        ("wan_t2v_a14b", ["--expert", "both", "--max_sigma", "0.8"], "--max_sigma 0.8 .* from 0.875 to 1.0"),
        ("wan_i2v", ["--num_frames", "4"], "--num_frames is 1; with a frame given at least 5"),
        ("wan_t2v", ["--lora_target_modules", "to_q,patch_embedding"], "'patch_embedding' is no Linear layer"),
        ("wan_t2v", ["--lora_target_modules", "proj_out"], "--lora_target_modules names no layer in a block"),
        ("wan_t2v", ["--lora_target_modules", "add_k_proj"], "'add_k_proj' is no Linear layer"),
    ],
)
def test_refused_before_models_load(family, flags, said, train, model_without_weights, tmp_path):
    with pytest.raises(RefusedError, match=said):
        train(family, *flags, model=model_without_weights(family), output_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_weights_of_both_experts_are_checked_first(train, tiny_model, tmp_path):
    shutil.copytree(tiny_model("wan_t2v_a14b"), tmp_path / "model")
    (tmp_path / "model" / "transformer_2" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(RefusedError, match="transformer_2"):
        train("wan_t2v_a14b", *LORA, "--expert", "both", model=tmp_path / "model", output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pictures_train_text_to_video_only(train, photos, model_without_weights, tmp_path):
    """As clips of one frame; from an image to a video of that image alone there is nothing to learn."""
    flags = [*SMALL, "--lora_rank", "4", "--max_train_steps", "1"]
    folder = train("wan_t2v", *flags, dataset=photos)
    rows = records(folder)
    assert len(rows) == 5 and all(record["used"]["frames"] == 1 for record in rows)
    with pytest.raises(
        RefusedError, match="(?s)All 5 clips are dropped:.*astronaut.png: 1 frames at .* at least 5 are needed"
    ):
        train("wan_i2v", *flags, dataset=photos, model=model_without_weights("wan_i2v"), output_dir=tmp_path)


@pytest.mark.parametrize("asked, used", [(1, 1), (4, 1), (5, 5), (8, 5), (80, 77), (81, 81), (144, 141)])
def test_frame_counts(asked, used, caplog):
    """4n + 1; another number is rounded down, and both are named."""
    flags = ["--pretrained_model_name_or_path", "m", "--dataset_path", "d", "--output_dir", "o"]
    flags += ["--num_frames", str(asked)]
    args = parse("wan_t2v", flags)
    values = {"divisor": 16, "height": 480, "width": 832, "num_frames": 81, "fps": 16.0, "lora_target_modules": "to_q"}
    resolve_for_model(args, values | {"tasks": ("t2v",), "experts": ()})
    assert args.num_frames == used and (used - 1) % 4 == 0
    assert (f"--num_frames {asked} is rounded down to {used}" in caplog.text) == (asked != used)


def grey_clip(path, num_frames, rate):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate, width=64, height=64, pix_fmt="yuv420p")
        for k in range(num_frames):
            container.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (64, 64), (10 * k,) * 3))))
        container.mux(stream.encode())
    path.with_suffix(".txt").write_text("grey")


def test_retiming_and_lengths_are_in_the_record(train, tmp_path):
    """Clips of one to ten frames, and one of 18 at twice the rate; none is too short for text to video."""
    for n in range(1, 11):
        grey_clip(tmp_path / f"{n:02d}.mp4", n, 16)
    grey_clip(tmp_path / "fast.mp4", 18, 32)
    folder = train("wan_t2v", *SMALL, "--dry_run", dataset=tmp_path)
    rows = records(folder)
    assert [record["used"]["frames"] for record in rows] == [1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9]
    assert rows[-1]["source"]["fps"] == 32 and "retimed from 32 to 16" in rows[-1]["reason"]
    assert rows[-1]["used"]["source_frames"] == list(range(0, 18, 2))


def test_short_clips_are_dropped_from_image_to_video(train, tmp_path, caplog):
    for n in (3, 4, 9):
        grey_clip(tmp_path / f"{n}.mp4", n, 16)
    folder = train("wan_i2v", *SMALL, "--lora_rank", "4", "--max_train_steps", "2", dataset=tmp_path)
    rows = records(folder)
    assert [record["decision"] for record in rows] == ["dropped", "dropped", "used"]
    assert "2 of 3 clips are dropped" in caplog.text
    assert {name for line in metrics(folder) for name in line["samples"]} == {"9.mp4"}


def test_command_line_refuses_with_exit_code_2(fork_server, model_without_weights, clips, tmp_path):
    required = ["--pretrained_model_name_or_path", model_without_weights("wan_t2v"), "--dataset_path", clips]
    done = fork_server.run("train_wan_video.py", *required, "--output_dir", tmp_path, "--height", "99", check=False)
    assert done.returncode == 2 and done.stdout.startswith("error: Give --height and --width together")
    done = fork_server.run("train_wan_video.py", *required, "--output_dir", tmp_path, "--num_frame", "9", check=False)
    assert done.returncode == 2 and "--num_frames" in done.stderr
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.mp4").write_bytes(b"\0" * 10)
    (tmp_path / "bad" / "a.txt").write_text("a")
    bad = ["--dataset_path", tmp_path / "bad", "--output_dir", tmp_path]
    done = fork_server.run("train_wan_video.py", *required, *bad, check=False)
    assert done.returncode == 2 and "a.mp4" in done.stderr and "Traceback" not in done.stderr
