"""Previews and the loss of what is held out, on tiny models: what they show, and that training does not feel them."""

import functools
import json
import os
import shutil
import signal
import types

import av
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, DiffusionPipeline
from PIL import Image, ImageChops

from blockwise import offload
from dataset.draws import Draw
from pipelines.qwen_image import QwenImage
from pipelines.wan_video import NEGATIVE_PROMPT, WanVideo
from runtime.errors import RefusedError, StoppedError, exit_codes
from tests.runs import LORA_FILE, lora_files, metrics, parse, read_lines, records
from training import validation
from training.forecast import RunForecast


# The rate is high, so that a step can be seen.
COMMON = ["--mixed_precision", "no", "--lora_rank", "2", "--lora_dtype", "fp32", "--learning_rate", "5e-2"]
SIZE = ["--height", "80", "--width", "96"]  # of the photographs

# What most tests look at: three steps on images, with all that draws random numbers, that validation leaves out, or
# that it has to put aside. Inputs are really parked.
FLAGS = [*COMMON, *SIZE, "--num_train_epochs", "1", "--validation_split", "0.4", "--validation_seed", "9"]
FLAGS += ["--lora_dropout", "0.5", "--caption_dropout", "0.5", "--loss_weighting", "sigma_sqrt", "--sigma_shift", "7"]
FLAGS += [
    "--ema",
    "--ema_decay",
    "0.5",
    "--offload_ema",
    "--use_gradient_checkpointing_offload",
    "--logging_steps",
    "3",
]
PROMPTS = ["--validation_prompt", "a cat", "--validation_prompt", "a dog", "--validation_prompt", "a cat"]
SHOWN = ["--num_inference_steps", "2", "--validation_steps", "2"]
# And one step of each transformer on clips.
CLIPS = [*COMMON, "--height", "64", "--width", "96", "--num_frames", "5", "--fps", "8", "--max_train_steps", "1"]
CLIPS += ["--validation_split", "0.4"]


def held_out_of(folder):
    held_out = [record for record in records(folder) if record["decision"] == "dropped"]
    assert {record["reason"] for record in held_out} == {"held out for validation (--validation_split)"}
    return {record["id"] for record in held_out}


def loss_of(folder, step):
    return json.loads((folder / "validation" / f"step-{step}" / "loss.json").read_text())


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def bytes_in(folder):
    return {name: (folder / name).read_bytes() for name in files_in(folder)}


def same_pixels(frames, others):
    pairs = list(zip(frames, others, strict=True))
    return all(one.size == other.size and not ImageChops.difference(one, other).getbbox() for one, other in pairs)


@pytest.fixture(scope="module", autouse=True)
def sampled():
    """The frames of each preview as the stock pipeline gave them. To sample draws random numbers, as it may."""
    frames = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "MIN_PARKED_BYTES", 512)
        for family in (QwenImage, WanVideo):

            def spy(*args, sample=family.sample, **kwargs):
                torch.rand(5)
                frames.append(sample(*args, **kwargs))
                return frames[-1]

            patch.setattr(family, "sample", staticmethod(spy))
        yield frames


@pytest.fixture(scope="module")
def given_images(tmp_path_factory):
    """Two images of the size of the clips."""
    paths = [tmp_path_factory.mktemp("images") / f"{name}.png" for name in ("first", "last")]
    for path, color in zip(paths, ("orange", "teal"), strict=True):
        Image.new("RGB", (96, 64), color).save(path)
    return paths


@pytest.fixture(scope="module")
def plain(train):
    """A run that only measures what is held out, at its end."""
    return train("qwen_image", *FLAGS)


@pytest.fixture(scope="module")
def shown(train, sampled, given_images):
    """Function from a family to the folder of a run with previews, which is made once, and the frames of each."""
    flags = {"qwen_image": FLAGS, "wan_t2v": CLIPS, "wan_t2v_a14b": [*CLIPS, "--expert", "both"]}
    flags["wan_flf2v"] = [*CLIPS, *(word for path in given_images for word in ("--validation_image", path))]
    prompts = {"qwen_image": PROMPTS, "wan_t2v_a14b": PROMPTS[2:]}

    @functools.cache
    def make(family):
        before = len(sampled)
        return train(family, *flags[family], *prompts.get(family, PROMPTS[4:]), *SHOWN), sampled[before:]

    return make


@pytest.fixture(scope="module")
def changed(train):
    """A run with other settings of previews, and what `QwenImage.sample` was given for its only one."""
    given, sample = [], QwenImage.sample

    def spy(pipeline, prompt, negative_prompt, **settings):
        def sample_again(**changed):
            return sample(pipeline, *(changed.pop(key, of) for key, of in texts.items()), **settings | changed)[0]

        texts = {"prompt": prompt, "negative_prompt": negative_prompt}
        variants = [{}, {"num_inference_steps": 2}, {"guidance_scale": 4.0}, {"seed": 9}, {"negative_prompt": None}]
        variants += [{"prompt": negative_prompt}, {"negative_prompt": {"prompt_embeds": -prompt["prompt_embeds"]}}]
        given.extend([settings, [sample_again(**variant).tobytes() for variant in variants]])
        return sample(pipeline, prompt, negative_prompt, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QwenImage, "sample", staticmethod(spy))
        return train("qwen_image", *FLAGS, *CHANGED), given


CHANGED = ["--validation_prompt", "a cat", "--negative_prompt", "a dog", "--guidance_scale", "8"]
CHANGED += ["--num_inference_steps", "3", "--validation_seed", "1"]


# ---------------------------------------------------------------- training does not feel it


def test_training_is_the_same_with_and_without(plain, shown):
    """Dropout and dropped captions draw random numbers, and the average (--offload_ema) takes the place of weights."""
    assert "--offload_ema" in FLAGS and files_in(plain / "validation") == ["step-3/loss.json"]
    looked_at, frames = shown("qwen_image")
    assert len(frames) == 6 and len(list((looked_at / "validation").glob("step-*/loss.json"))) == 2
    assert lora_files(looked_at) == lora_files(plain) and lora_files(plain)
    assert metrics(looked_at) == metrics(plain) and read_lines(plain / "metrics.jsonl")[-1]["offloaded_bytes"]
    assert loss_of(looked_at, 3) == loss_of(plain, 3)


@pytest.mark.slow
@pytest.mark.parametrize("family, ema", [("qwen_image", []), ("wan_t2v", ["--ema"]), ("wan_t2v", [])])
def test_training_of_others_is_the_same_with_and_without(family, ema, train, sampled):
    flags = [*(COMMON + SIZE if family == "qwen_image" else CLIPS), "--max_train_steps", "4", "--lora_dropout", "0.3"]
    flags += ["--caption_dropout", "0.3", "--validation_split", "0.3", *ema]
    without, looked_at = train(family, *flags), train(family, *flags, *PROMPTS, *SHOWN)
    assert lora_files(looked_at) == lora_files(without) and metrics(looked_at) == metrics(without)
    assert loss_of(looked_at, 4) == loss_of(without, 4)


# ---------------------------------------------------------------- previews


def load_stock(model):
    """The stock pipeline in fp32, with a text encoder that was loaded in bf16, as in training.

    One that is cast later has coarser frequencies, too.
    """
    parts = {"transformer": None, "vae": None}
    text_encoder = DiffusionPipeline.from_pretrained(model, dtype=torch.bfloat16, **parts).text_encoder
    return DiffusionPipeline.from_pretrained(model, dtype=torch.float32, text_encoder=text_encoder)


@torch.no_grad()  # with gradients, attention would take another kernel
def stock_frames(family, model, *runs, guidance_scale, images=()):
    """What the stock pipeline samples with the LoRAs in the folders of each run."""
    pipeline, sampled = load_stock(model), []
    pipeline.set_progress_bar_config(disable=True)
    settings = {"width": 96, "num_inference_steps": 2}
    if family == "qwen_image":
        for name, text in (("prompt_embeds", "a cat"), ("negative_prompt_embeds", " ")):
            embeds = pipeline.encode_prompt(text)[0].float()
            settings |= {name: embeds, f"{name}_mask": torch.ones(embeds.shape[:2], dtype=torch.bool)}
        settings |= {"height": 80, "true_cfg_scale": guidance_scale}
    else:
        encode = functools.partial(pipeline.encode_prompt, do_classifier_free_guidance=False, max_sequence_length=512)
        for name, text in (("prompt_embeds", "a cat"), ("negative_prompt_embeds", NEGATIVE_PROMPT)):
            settings[name], _ = encode(text)
        settings |= dict(zip(("image", "last_image"), images, strict=False)) | {"output_type": "pil"}
        if isinstance(guidance_scale, tuple):
            guidance_scale, settings["guidance_scale_2"] = guidance_scale
        settings |= {"height": 64, "num_frames": 5, "guidance_scale": guidance_scale}
    for folders in runs:
        for folder in folders:
            options = {"load_into_transformer_2": True} if folder.name == "low_noise" else {}
            pipeline.load_lora_weights(folder, adapter_name=folder.name, **options)
        generator = torch.Generator().manual_seed(9 if family == "qwen_image" else 42)
        result = pipeline(generator=generator, **settings)
        sampled.append(result.images if family == "qwen_image" else result.frames[0])
        pipeline.unload_lora_weights()
    return sampled


@pytest.mark.parametrize(
    "family, guidance_scale",
    [
        ("qwen_image", 4.0),
        pytest.param("wan_t2v", 5.0, marks=pytest.mark.slow),
        ("wan_flf2v", 5.0),
        ("wan_t2v_a14b", (4.0, 3.0)),
    ],
)
def test_last_preview_is_what_the_stock_pipeline_samples(family, guidance_scale, shown, tiny_model, given_images):
    """Pixel for pixel, with the exported file: of the averaged weights with --ema, and not in training mode.

    Averaged weights are those of --ema_decay; a clip between two images (--validation_image) is given both.
    """
    folder, frames = shown(family)
    images = [Image.open(path).convert("RGB") for path in given_images] if family == "wan_flf2v" else []
    settings = {"guidance_scale": guidance_scale, "images": images}
    places = sorted(path.parent for path in folder.rglob(LORA_FILE))
    # Before the second expert is trained, the first one samples with the stock weights.
    before = places[: len(places) - 1]
    stock, alone = stock_frames(family, tiny_model(family), places, before, **settings)
    assert same_pixels(frames[-1], stock) and not same_pixels(frames[-1], alone)
    if family == "wan_t2v_a14b":
        assert same_pixels(frames[1], alone) and len(frames) == 4
        assert sorted(path.name for path in (folder / "validation").iterdir()) == ["step-1", "step-2"]


def test_previews_that_fail_cost_nothing(train, shown, tmp_path, monkeypatch):
    """Neither the checkpoint of their step nor the result; and when it is resumed, what is missing is made."""
    folder, sample, numbers = tmp_path / "out", QwenImage.sample, iter(range(9))

    def fail_at_times(*args, **kwargs):
        if next(numbers) in (0, 4):
            raise ValueError("no preview")
        return sample(*args, **kwargs)

    monkeypatch.setattr(QwenImage, "sample", staticmethod(fail_at_times))
    flags = [*FLAGS, *PROMPTS, *SHOWN, "--checkpointing_steps", "2"]
    with pytest.raises(ValueError, match="no preview"):
        train("qwen_image", *flags, output_dir=folder)
    assert files_in(folder / "checkpoint-2") and not (folder / "validation").exists()
    with pytest.raises(ValueError, match="no preview"):
        train("qwen_image", *flags, "--resume_from_checkpoint", "latest", output_dir=folder)
    whole, _ = shown("qwen_image")
    assert lora_files(folder) == lora_files(whole)
    assert [path.name for path in (folder / "validation").iterdir()] == ["step-2"]
    assert bytes_in(folder / "validation/step-2") == bytes_in(whole / "validation/step-2")


def test_a_signal_ends_previews_and_saves(train, shown, tmp_path, monkeypatch):
    """Between two steps of the sampler; what is there of them is not kept, and is made on resume."""
    folder, sample, steps = tmp_path / "out", QwenImage.sample, []

    def interrupted(pipeline, *args, callback_on_step_end, **kwargs):
        def look(*state):
            steps.append(state[1])
            if len(steps) in (3, 6):
                os.kill(os.getpid(), signal.SIGTERM)
            return callback_on_step_end(*state)

        return sample(pipeline, *args, callback_on_step_end=look, **kwargs)

    monkeypatch.setattr(QwenImage, "sample", staticmethod(interrupted))
    with pytest.raises(StoppedError, match="stopped by SIGTERM after step 2; checkpoint-2 is complete"):
        train("qwen_image", *FLAGS, *PROMPTS, *SHOWN, output_dir=folder)
    assert steps == [0, 1, 0] and not list((folder / "validation").rglob("*.png"))
    resumed, saved = [*FLAGS, *PROMPTS, *SHOWN, "--resume_from_checkpoint", "latest"], folder / "checkpoint-2"
    inode = saved.stat().st_ino
    with pytest.raises(StoppedError, match="stopped by SIGTERM after step 2; checkpoint-2 is complete"):
        train("qwen_image", *resumed, output_dir=folder)
    assert saved.stat().st_ino == inode, "the checkpoint that was just loaded is not written again"
    train("qwen_image", *resumed, output_dir=folder)
    whole, _ = shown("qwen_image")
    assert lora_files(folder) == lora_files(whole)
    assert bytes_in(folder / "validation") == bytes_in(whole / "validation")


@pytest.mark.parametrize(
    "family, flags, step",
    [
        pytest.param("qwen_image", FLAGS, 3, marks=pytest.mark.slow),
        ("wan_t2v_a14b", [*CLIPS, "--expert", "high_noise"], 1),
    ],
)
def test_previews_are_the_same_whether_parts_take_turns_or_not(family, flags, step, shown, train, monkeypatch):
    """As the forecast says; the files are the same bytes. On a CPU it never says so by itself."""
    together, seen, on_device = shown(family)[0], [], validation._on_device

    def spy(*args, takes_turns):
        seen.append(takes_turns)
        return on_device(*args, takes_turns=takes_turns)

    monkeypatch.setattr(validation, "_on_device", spy)
    monkeypatch.setattr(RunForecast, "previews_take_turns", lambda self, modes: True)
    folder = train(family, *flags, *(PROMPTS[2:] if "--expert" in flags else PROMPTS), "--num_inference_steps", "2")
    assert seen == [True] and len(files_in(folder / "validation")) >= 4
    assert bytes_in(folder / f"validation/step-{step}") == bytes_in(together / f"validation/step-{step}")


def test_settings_of_previews(changed):
    """Each flag reaches the pipeline, and changes the image."""
    assert CHANGED[2:] == [
        *("--negative_prompt", "a dog", "--guidance_scale", "8"),
        *("--num_inference_steps", "3", "--validation_seed", "1"),
    ]
    _, (settings, images) = changed
    assert (settings["guidance_scale"], settings["num_inference_steps"], settings["seed"]) == (8.0, 3, 1)
    assert len(set(images)) == len(images) == 7


def test_without_previews_nothing_is_encoded_for_them():
    """Not the negative prompt either, which every run has."""
    args = types.SimpleNamespace(validation_prompt=None, negative_prompt=" ")
    assert validation.preview_prompts(args) == []
    args.validation_prompt = ["a cat"]
    assert validation.preview_prompts(args) == ["a cat", " "]


def test_files_of_previews(shown):
    """At every second step and at the last one, whatever the steps at which metrics are written."""
    folder, frames = shown("qwen_image")
    assert SHOWN[-2:] == ["--validation_steps", "2"] and PROMPTS.count("--validation_prompt") == 3
    names = ["grid.png", "loss.json", *(f"prompt-0{n}.png" for n in range(3))]
    assert files_in(folder / "validation") == [f"step-{step}/{name}" for step in (2, 3) for name in names]
    first, dog, again = frames[-3:]
    assert len(frames) == 6 and same_pixels(first, again) and not same_pixels(first, dog)
    for number, image in enumerate(frames[-3:]):
        assert same_pixels(image, [Image.open(folder / f"validation/step-3/prompt-0{number}.png")])
    grid = Image.open(folder / "validation/step-3/grid.png")
    assert grid.size == (2 * 96, 2 * 80) and same_pixels([grid.crop((96, 0, 192, 80))], dog)


def test_clips_of_previews_play(shown):
    folder, frames = shown("wan_t2v_a14b")
    names = ["grid.png", "loss.json", "prompt-00.mp4", "prompt-01.mp4"]
    assert files_in(folder / "validation") == [f"step-{step}/{name}" for step in (1, 2) for name in names]
    dog, cat = frames[-2:]
    grid = Image.open(folder / "validation/step-2/grid.png")
    assert grid.size == (3 * 96, 2 * 64), "first, middle and last frame of each"
    assert same_pixels([grid.crop((96 * k, 0, 96 * (k + 1), 64)) for k in range(3)], dog[::2])
    with av.open(str(folder / "validation/step-2/prompt-00.mp4")) as container:
        assert container.streams.video[0].average_rate == 8
        decoded = [frame.to_image() for frame in container.decode(video=0)]
    assert len(decoded) == len(dog) == 5 and {frame.size for frame in decoded} == {(96, 64)}
    error = np.abs(np.stack(decoded).astype(float) - np.stack(dog)).mean()
    assert error < 16, "noise loses its colour to H.264; a frame of another place would be far off"
    assert error < np.abs(np.stack(decoded).astype(float) - np.stack(cat)).mean()


# ---------------------------------------------------------------- what is held out


def test_what_is_held_out_is_not_trained(plain, photos):
    assert FLAGS[FLAGS.index("--validation_split") + 1] == "0.4"
    dropped = held_out_of(plain)
    trained = [name for line in metrics(plain) for name in line["samples"]]
    assert len(dropped) == loss_of(plain, 3)["num_items"] == 2
    assert set(trained) | dropped == {path.name for path in photos.glob("*.png")}
    assert not set(trained) & dropped and len(trained) == 3, "an epoch is what is trained"


def held_out_digests(digests, *, share=0.4, seed=42):
    items = [types.SimpleNamespace(digest=digest, record={"decision": "used", "reason": None}) for digest in digests]
    trained, held_out = validation.hold_out(types.SimpleNamespace(validation_split=share, seed=seed), items)
    assert len(trained) + len(held_out) == len(items)
    return [item.digest for item in held_out]


def test_what_is_held_out_depends_on_seed_and_content_only(train, plain, photos, tmp_path):
    names = ["one", "two", "three", "four", "five"]
    expected = held_out_digests(names)
    assert len(expected) == 2 and set(held_out_digests(names[::-1])) == set(expected)
    assert any(set(held_out_digests(names, seed=seed)) != set(expected) for seed in (1, 2))
    assert len(set(held_out_digests([*names, "six"])) & set(expected)) >= 1, "at most the new one is dealt in"
    assert len(held_out_digests(names, share=0.01)) == 1
    copies = held_out_digests(["one", "two", "three"] * 4, share=0.2)
    assert len(copies) == 4 and len(set(copies)) == 1, "copies are on one side"
    moved = shutil.copytree(photos, tmp_path / "elsewhere" / "data")
    (moved / "coffee.png").rename(moved / "zebra.png")
    (moved / "coffee.txt").rename(moved / "zebra.txt")
    there = train("qwen_image", *FLAGS, "--dry_run", "--validation_seed", "7", dataset=moved)
    assert held_out_of(plain) == {name.replace("zebra", "coffee") for name in held_out_of(there)}


@pytest.mark.parametrize("digests", [["one", "two"], ["one"] * 4], ids=["few", "copies"])
def test_nothing_left_to_train_is_refused(digests):
    with pytest.raises(
        RefusedError, match=f"--validation_split 0.75 of {len(digests)} items.* leaves nothing to train"
    ):
        held_out_digests(digests, share=0.75)


def test_loss_by_hand(shown, tiny_qwen_image, photos):
    """The stock transformer with the exported LoRA, at four sigmas, with noise that is the same each time."""
    folder, _ = shown("qwen_image")
    assert loss_of(folder, 2)["loss"] != loss_of(folder, 3)["loss"]
    pipeline = load_stock(tiny_qwen_image)
    pipeline.load_lora_weights(folder)
    vae = AutoencoderKLQwenImage.from_pretrained(tiny_qwen_image, subfolder="vae")
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    losses = {}
    for name in held_out_of(folder):
        pixels = torch.from_numpy(np.array(Image.open(photos / name).convert("RGB"))).permute(2, 0, 1)[None, :, None]
        caption = (photos / name).with_suffix(".txt").read_text()
        with torch.no_grad():
            latents = (vae.encode(pixels.float() / 127.5 - 1).latent_dist.mode() - mean) / std
            embeds = pipeline.encode_prompt(caption)[0].float()
        losses[name] = [
            [stock_loss(pipeline, latents, embeds, noise, sigma) for sigma in (0.125, 0.375, 0.625, 0.875)]
            for noise in (Draw(9, 0, number).noise(latents.shape) for number in range(2))
        ]
    # Which of the two is the first is not said anywhere.
    one, other = losses.values()
    candidates = [np.mean([one[0], other[1]], axis=0), np.mean([other[0], one[1]], axis=0)]
    record = loss_of(folder, 3)
    measured = list(record["by_sigma"].values())
    assert list(record["by_sigma"]) == ["0.125", "0.375", "0.625", "0.875"]
    assert any(measured == pytest.approx(list(by_hand), rel=1e-4) for by_hand in candidates)
    assert record["loss"] == pytest.approx(np.mean(measured)) and record["step"] == 3


@torch.no_grad()
def stock_loss(pipeline, latents, embeds, noise, sigma):
    height, width = latents.shape[-2:]
    noisy = (1 - sigma) * latents + sigma * noise
    flow = pipeline.transformer(
        hidden_states=pipeline._pack_latents(noisy, 1, 16, height, width),
        timestep=torch.tensor([sigma]),
        encoder_hidden_states=embeds,
        encoder_hidden_states_mask=torch.ones(embeds.shape[:2], dtype=torch.bool),
        img_shapes=[[(1, height // 2, width // 2)]],
        return_dict=False,
    )[0]
    target = pipeline._pack_latents(noise - latents, 1, 16, height, width)
    return float((flow - target).square().mean())


def test_validation_seed_changes_the_loss_only(plain, changed):
    assert CHANGED[-2:] == ["--validation_seed", "1"]
    other, _ = changed
    assert loss_of(plain, 3)["loss"] != loss_of(other, 3)["loss"]
    assert lora_files(plain) == lora_files(other) and metrics(plain) == metrics(other)


def test_an_expert_is_measured_on_its_own_side(shown):
    folder, _ = shown("wan_t2v_a14b")
    for step, low, high in ((1, 0.875, 1.0), (2, 0.0, 0.875)):
        sigmas = [float(sigma) for sigma in loss_of(folder, step)["by_sigma"]]
        expected = [low + (high - low) * share for share in (0.125, 0.375, 0.625, 0.875)]
        assert sigmas == pytest.approx(expected, rel=1e-3)


# ---------------------------------------------------------------- what of the pipeline is on the device


class Parts:
    """A pipeline of three parts, one of them trained in part; devices are names that tensors are said to be on."""

    def __init__(self, monkeypatch):
        self.components = {name: torch.nn.Linear(2, 2) for name in ("transformer", "transformer_2", "vae")}
        self.components["vae"].register_buffer("shift", torch.zeros(2))
        self.components["scheduler"] = object()
        self.trained = self.components["transformer"]
        self.trained.weight.requires_grad_(True)
        self.trained.bias.requires_grad_(False)
        self.devices = dict.fromkeys(self.frozen(), "cpu") | {self.trained.bias: "accelerator"}
        self.moves = []  # (name of a part, device)
        move = validation._move_frozen
        # Every move is made, and only the device is not there.
        to = torch.Tensor.to

        def moved(module, device):
            seen = []
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "to", lambda tensor, where: seen.append(where) or to(tensor, "cpu"))
                move(module, device)
            frozen = [tensor for tensor in (*module.parameters(), *module.buffers()) if not tensor.requires_grad]
            assert len(seen) == len(frozen)
            self.devices |= dict(zip(frozen, seen, strict=True))
            self.moves += [(name, device) for name, part in self.components.items() if part is module]

        monkeypatch.setattr(validation, "_move_frozen", moved)

    def frozen(self):
        modules = [part for part in self.components.values() if isinstance(part, torch.nn.Module)]
        tensors = [tensor for part in modules for tensor in (*part.parameters(), *part.buffers())]
        return [tensor for tensor in tensors if tensor is not self.trained.weight]

    def on_device(self):
        return {
            name for name, part in self.components.items() if name != "scheduler" and "accelerator" in self.of(part)
        }

    def of(self, part):
        return {self.devices[tensor] for tensor in (*part.parameters(), *part.buffers()) if tensor in self.devices}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("takes_turns", [True, False])
def test_parts_take_turns_or_come_together(takes_turns, fails, monkeypatch):
    pipeline = Parts(monkeypatch)
    trained, memory = pipeline.trained, pipeline.trained.weight.data_ptr()
    there = {"transformer"}

    def use():
        with validation._on_device(pipeline, trained, "accelerator", takes_turns=takes_turns):
            for name in ("transformer_2", "vae", "transformer", "transformer", "vae"):
                pipeline.components[name](torch.ones(1, 2))
                there.add(name)
                assert pipeline.on_device() == ({name} if takes_turns else there)
                assert ("transformer", "cpu") in pipeline.moves or not takes_turns
                assert pipeline.components[name]._hf_hook.execution_device == "accelerator"
            if fails:
                raise ZeroDivisionError

    if fails:
        pytest.raises(ZeroDivisionError, use)
    else:
        use()
    assert pipeline.on_device() == {"transformer"} and trained.weight.data_ptr() == memory
    if not takes_turns:
        moved = [(name, device) for name, device in pipeline.moves if name == "transformer"]
        assert {device for _, device in moved} == {"accelerator"}, "where it is"
    assert trained.weight.requires_grad and trained.weight not in pipeline.devices
    assert not pipeline.components["vae"].weight.requires_grad, "or it would not move"
    assert not any(hasattr(pipeline.components[name], "_hf_hook") for name in ("transformer", "transformer_2", "vae"))
    trained(torch.ones(1, 2)).sum().backward()
    assert pipeline.on_device() == {"transformer"}


# ---------------------------------------------------------------- several processes


@pytest.fixture
def run_on_two(on_two_processes, tiny_qwen_image, photos, tmp_path, plain):
    """Function that makes a run of two steps on two processes, with the encodings of the runs here."""
    cache = json.loads((plain / "run.json").read_text())["arguments"]["cache_dir"]

    def run(*flags):
        folder = tmp_path / f"{len(flags)}"
        required = ["--pretrained_model_name_or_path", tiny_qwen_image, "--dataset_path", photos]
        on_two_processes("train_qwen_image.py", *required, "--output_dir", folder, "--cache_dir", cache, *flags)
        return folder

    return run


TWO_STEPS = [*COMMON, *SIZE, "--max_train_steps", "2", "--validation_split", "0.4"]


def test_two_processes_share_it_out(run_on_two, train):
    """And train what one trains with the samples of both, after they have looked."""
    prompts = [*PROMPTS[:4], "--validation_prompt", "a house", "--num_inference_steps", "2", "--validation_steps", "1"]
    both, alone = run_on_two(*TWO_STEPS, *prompts), train("qwen_image", *TWO_STEPS, "--train_batch_size", "2")
    names = ["grid.png", "loss.json", *(f"prompt-0{n}.png" for n in range(3))]
    assert files_in(both / "validation") == [f"step-{step}/{name}" for step in (1, 2) for name in names]
    assert len({(both / "validation" / "step-2" / f"prompt-0{n}.png").read_bytes() for n in range(3)}) == 3
    assert held_out_of(both) == held_out_of(alone) and len(held_out_of(alone)) == 2
    assert loss_of(both, 2)["loss"] == pytest.approx(loss_of(alone, 2)["loss"], rel=1e-2)
    losses = [[line["loss"] for line in metrics(folder)] for folder in (both, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.slow
def test_training_on_two_processes_is_the_same_with_and_without(run_on_two):
    flags = [*TWO_STEPS, "--lora_dropout", "0.3"]
    plain, shown = run_on_two(*flags), run_on_two(*flags, *PROMPTS, *SHOWN, "--validation_steps", "1")
    assert lora_files(shown) == lora_files(plain) and metrics(shown) == metrics(plain)
    assert loss_of(shown, 2) == loss_of(plain, 2)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "family, images, said",
    [
        ("wan_flf2v", [], "--validation_image is given 0 times; previews of this model take 2"),
        ("wan_t2v_a14b", ["first.png"], "--validation_image is given 1 times; previews of this model take 0"),
        ("wan_flf2v", ["first.png"] * 3, "--validation_image is given 3 times; previews of this model take 2"),
        ("wan_flf2v", ["first.png", "notes.txt"], "--validation_image notes.txt is not an image"),
        ("wan_flf2v", ["first.png", "nowhere.png"], "--validation_image nowhere.png"),
    ],
)
def test_images_that_do_not_fit_the_model(
    family, images, said, train, tiny_model, given_images, tmp_path, capsys, monkeypatch
):
    """The model has no weights: it is refused before they are looked for."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model(family), model, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(given_images[0], tmp_path)
    (tmp_path / "notes.txt").write_text("no image")
    monkeypatch.chdir(tmp_path)
    flags = [*CLIPS, *PROMPTS, *SHOWN, *(word for name in images for word in ("--validation_image", name))]
    flags += ["--expert", "both"] if family == "wan_t2v_a14b" else []
    with pytest.raises(SystemExit) as stopped, exit_codes():
        train(family, *flags, model=model, output_dir=tmp_path / "out")
    errors = capsys.readouterr().err
    (sentence,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert stopped.value.code == 2 and said in sentence and "Traceback" not in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags, said",
    [
        (
            ["--validation_steps", "2"],
            "--validation_steps has no effect without --validation_prompt or --validation_s",
        ),
        (["--validation_seed", "2"], "--validation_seed has no effect without --validation_prompt or --validation_s"),
        (["--validation_image", "a.png"], "--validation_image has no effect without --validation_prompt"),
        (["--negative_prompt", ""], "--negative_prompt has no effect without --validation_prompt"),
        (["--guidance_scale", "2"], "--guidance_scale has no effect without --validation_prompt"),
        (["--validation_split", "0.5", "--num_inference_steps", "2"], "--num_inference_steps has no effect without"),
        (
            [*PROMPTS[:2], "--negative_prompt", "a", "--guidance_scale", "1"],
            "--negative_prompt has no effect with a --gui",
        ),
        (["--validation_split", "1"], "--validation_split is '1'; allowed is a number from 0 to below 1"),
        (
            [*PROMPTS[:2], "--validation_steps", "0"],
            "--validation_steps is '0'; allowed is a whole number of at least 1",
        ),
    ],
)
def test_refused_by_the_command_line(flags, said):
    required = ["--pretrained_model_name_or_path", "m", "--dataset_path", "d", "--output_dir", "o"]
    with pytest.raises(RefusedError, match=said):
        parse("wan_t2v", [*required, *flags])
