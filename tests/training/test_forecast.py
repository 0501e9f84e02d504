"""What a run is forecast to need: against the real parts, against arithmetic by hand, and through the command line."""

import copy
import dataclasses
import functools
import json
import math
import pathlib
import shutil
import types

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan

import train_qwen_image
from blockwise import offload
from blockwise.estimate import StepProfile
from blockwise.log import MemoryLog
from blockwise.plan import MemoryPlan
from pipelines import qwen_image, wan_video
from runtime.errors import RefusedError
from tests import runs
from training import forecast as forecasting
from training.arguments import parse_args
from training.forecast import Launch, RunForecast, check_fits, compare_forecast, describe_forecast
from training.module import find_lora_targets, make_trainable, parameters_to_train, trainable_parameters


GIB = 2**30
FAMILIES = ["qwen_image", "wan_t2v", "wan_i2v", "wan_flf2v", "wan_ti2v", "wan_t2v_a14b", "wan_i2v_a14b"]
# With different encoders.
FIVE = [*FAMILIES[:5], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[5:])]


@pytest.fixture(autouse=True)
def no_limit_is_left():
    yield
    offload.set_limit(None)


I2V = ["--task", "i2v"]
FULL_BF16 = ["--training_mode", "full", "--mixed_precision", "bf16"]


def num_trained(made):
    return sum(math.prod(shape) for shape, _ in made.parameters.values())


def on(made, strategy, num_processes):
    """Return a copy of a forecast, as of a launch of several processes."""
    made = copy.copy(made)
    made.launch = Launch("cuda", num_processes, strategy=strategy, zero_bucket_bytes=1000)
    return made


def held_by(made):
    """Return what a process holds all the time, other than its batch."""
    held, _ = made._held()
    return sum(held.values()) - held["batch"]


def family_of(name, model):
    return (qwen_image.QwenImage if name == "qwen_image" else wan_video.WanVideo)(model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_parameters_are_known_before_there_are_any(family, mode, tiny_model):
    """Names, order, shapes and dtypes, those that stay in fp32 in a bf16 model included."""
    of_model = family_of(family, tiny_model(family))
    skeleton, transformer = of_model.skeleton, of_model.load_transformer()
    dtypes = {name: parameter.dtype for name, parameter in transformer.named_parameters()}
    assert {name: parameter.dtype for name, parameter in skeleton.named_parameters()} == dtypes
    names = of_model.never_trained
    args = parse_args(
        ["--pretrained_model_name_or_path", "m", "--dataset_path", "d", "--output_dir", "o", "--training_mode", mode],
        description=None,
        values=train_qwen_image.VALUES,
    )
    if mode == "lora":
        wanted = args.lora_target_modules
        wanted = wanted if family == "qwen_image" else wan_video.default_lora_targets(skeleton)
        names = find_lora_targets(skeleton, wanted, never_trained=names)
    make_trainable(transformer, args, names)
    real = trainable_parameters(torch.nn.ModuleDict({"transformer": transformer}))
    expected = [(name, tuple(parameter.shape), parameter.dtype) for name, parameter in real.items()]
    found = parameters_to_train(skeleton, args, names).items()
    assert [(name, shape, dtype) for name, (shape, dtype) in found] == expected


@pytest.mark.parametrize(
    "family", [*FAMILIES[:5], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[5:])]
)
def test_encoders_give_samples_of_the_shapes_that_they_are_said_to_give(family, tiny_model):
    from blockwise.estimate import fake_tensors, without_content

    model, size = str(tiny_model(family)), {"height": 64, "width": 96}
    if family == "qwen_image":
        prompt_encoder = qwen_image.QwenImage(model).load_prompt_encoder("cpu")
        vae = qwen_image.QwenImage(model).load_media_encoder("cpu")
        modules = {"text encoder": prompt_encoder.text_encoder, "VAE": vae, "previews": vae}
        sample = qwen_image.encode_prompt(prompt_encoder, "a cat")
        sample |= qwen_image.encode_image(vae, torch.zeros(3, 64, 96))
        _, num_tokens = qwen_image.count_prompt_tokens(prompt_encoder, "a cat")
        skeletons = qwen_image.encoder_skeletons(model, num_tokens=num_tokens, **size)
    else:
        task = wan_video.WanVideo(model).variant.tasks[-1]
        prompt_encoder = wan_video.WanVideo(model).load_prompt_encoder("cpu")
        clip_encoder = wan_video.WanVideo(model).load_media_encoder("cpu")
        modules = {"text encoder": prompt_encoder.text_encoder, "VAE": clip_encoder, "previews": clip_encoder}
        sample = wan_video.encode_prompt(prompt_encoder, "a cat")
        sample |= wan_video.encode_clip(clip_encoder, torch.zeros(3, 9, 64, 96), task=task)
        skeletons = wan_video.encoder_skeletons(model, task=task, num_frames=9, **size)
    found = {}
    with fake_tensors("cuda"):
        for parts, encode in skeletons.values():
            for part in parts:
                without_content(part)
            found |= encode()  # of previews nothing, since what they decode is seen and not trained
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in sample.items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == shapes
    # The weights are all there, in the dtypes in which they are loaded.
    for phase, (parts, _) in skeletons.items():
        real = modules[phase]
        real = [real] if isinstance(real, torch.nn.Module) else [real.vae, *filter(None, [real.image_encoder])]
        weights = [sum(p.nbytes for module in of for p in module.parameters()) for of in (parts, real)]
        assert weights[0] == weights[1], phase
    assert isinstance(modules["VAE"], AutoencoderKLQwenImage) or isinstance(modules["VAE"].vae, AutoencoderKLWan)


# ---------------------------------------------------------------- the command, without running it


@pytest.fixture(autouse=True)
def found_out_once():
    """What does not depend on what a test is about is found out once for all of them, as in other tests of runs."""
    with runs.forecasts_are_remembered():
        yield


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory, tiny_model, photos, clips):
    """Function that makes a dry run in this process; returns its `RunForecast`."""

    def run(family, *flags, model=None):
        data, output_dir = photos if family == "qwen_image" else clips, tmp_path_factory.mktemp("run") / "out"
        argv = ["--pretrained_model_name_or_path", model or tiny_model(family), "--dataset_path", data, "--dry_run"]
        argv += ["--output_dir", output_dir, "--max_train_steps", "2", "--height", "64", "--width", "64"]
        argv += [] if family == "qwen_image" else ["--num_frames", "9"]
        argv += [] if "--mixed_precision" in flags else ["--mixed_precision", "no"]
        with MemoryLog() as log:
            return runs.entry_of(family).main(runs.parse(family, [*argv, *flags]), log)

    return run


@pytest.fixture(scope="module")
def forecast(dry_run):
    """Function from flags to a copy of the `RunForecast` of a run, and its `MemoryPlan`."""
    known = functools.cache(dry_run)

    def make(family, *flags):
        made = copy.copy(known(family, *flags))
        made.args, made.to_encode = copy.copy(made.args), dict(made.to_encode)
        return made, MemoryPlan.from_args(made.args, made.family.block_lists)

    return make


def written(made):
    """Return run.json of a dry run."""
    return json.loads(pathlib.Path(made.args.output_dir, "run.json").read_text())


def test_a_dry_run_needs_no_weights_and_writes_what_it_found(dry_run, forecast, tiny_model, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(tiny_model("qwen_image"), model, ignore=shutil.ignore_patterns("*.safetensors*"))
    made = dry_run("qwen_image", "--use_gradient_checkpointing", model=model)
    without, printed = written(made), capsys.readouterr().out
    found, output_dir = without["forecast"], pathlib.Path(made.args.output_dir)
    left = sorted(path.name for path in output_dir.iterdir())
    assert left == ["cache", "contact_sheet.png", "dataset.jsonl", "run.json"]
    assert [path.name for path in (output_dir / "cache").iterdir()] == ["index-0.jsonl"], "nothing is encoded"
    assert found["training_peak_bytes"] == sum(found["by_category"].values()) > 0
    assert found["phases"]["training"] == found["training_peak_bytes"]
    assert found["peak_phase"] == max(found["phases"], key=found["phases"].get)
    assert set(found["phases"]) == {"text encoder", "VAE", "training", "export"}
    assert found["host_bytes"] > 0 and found["launch"]["device_type"] == "cuda"
    mode = {"activations": "recompute", "weights": "resident", "units": 1}
    assert without["plan"] == {"transformer_blocks": [mode] * len(without["plan"]["transformer_blocks"])}
    assert "5 of 5 items are used\n bucket (w x h x frames)" in printed
    assert found["by_mode"]["recompute"] == found["training_peak_bytes"] < found["by_mode"]["keep"]
    assert "training peak" in printed and "no accelerator is here to compare with" in printed
    assert f"disk: {forecasting.format_bytes(made.result_bytes)} for the result; " in printed
    with_weights = written(forecast("qwen_image", "--use_gradient_checkpointing")[0])["forecast"]
    measured = {"host_bytes": 0, "launch": {}}  # with what is free
    assert with_weights | measured == found | measured


@pytest.mark.parametrize("family, flags", [("qwen_image", ["--use_gradient_checkpointing"]), ("wan_ti2v", I2V)])
def test_memory_of_the_modes_is_ordered(family, flags, forecast):
    peaks = written(forecast(family, *flags)[0])["forecast"]["by_mode"]
    assert peaks["keep"] > peaks["recompute"] >= peaks["park"]


def test_the_base_has_the_dtype_that_is_asked_for(forecast):
    """In fp32 it is twice as large."""
    weights = {
        precision: forecast("qwen_image", "--mixed_precision", precision)[0]._bytes["weights"]
        for precision in ("no", "bf16")
    }
    assert weights["no"] == 2 * weights["bf16"]


def test_a_budget_makes_the_plan(dry_run, forecast):
    flags = ["--train_batch_size", "16"]  # else the VAE is the peak of so small a run
    peaks = written(forecast("qwen_image", *flags)[0])["forecast"]["by_mode"]
    budget = (peaks["keep"] + peaks["recompute"]) // 2
    run = written(dry_run("qwen_image", *flags, "--memory_budget", f"{budget / 1000}KB"))
    assert run["forecast"]["training_peak_bytes"] <= budget < peaks["keep"]
    modes = [block["activations"] for block in run["plan"]["transformer_blocks"]]
    assert modes == sorted(modes, key=["park", "recompute", "keep"].index) and set(modes) != {"keep"}
    plan = written(dry_run("qwen_image", *flags, "--memory_budget", "10GiB"))["plan"]["transformer_blocks"]
    assert all(block["activations"] == "keep" for block in plan)


def test_a_budget_that_cannot_be_met_names_the_smallest_and_what_helps(dry_run, monkeypatch):
    asked = []
    monkeypatch.setattr(RunForecast, "suggestions", lambda self, plan: asked.append(plan) or [("--this", 2**20)])
    said = r"--memory_budget: 0.95 MiB .* smallest that can is \d.*MiB.* help most is --this: 1.00 MiB less"
    with pytest.raises(RefusedError, match=said):
        dry_run("qwen_image", "--memory_budget", "1MB")
    assert len(asked) == 1
    with pytest.raises(RefusedError, match="--memory_budget auto: there is no accelerator here; give a size"):
        dry_run("qwen_image", "--memory_budget", "auto")


@pytest.mark.parametrize("device_bytes, says", [((8 * GIB, 80 * GIB), "fits"), ((GIB, 80 * GIB), "tight")])
def test_the_device_that_is_there(device_bytes, says, forecast):
    made, plan = forecast("qwen_image")
    made.launch = dataclasses.replace(made.launch, device_bytes=device_bytes)
    assert says in check_fits(made, plan)


def test_a_run_that_cannot_fit_is_refused_with_the_settings_that_save_most(forecast):
    made, plan = forecast("qwen_image", "--train_batch_size", "4", "--ema", "--validation_prompt", "a cat")
    made.launch = dataclasses.replace(made.launch, device_bytes=(2**20, 2**20))
    best = made.suggestions(plan, "training")
    assert [saved for _, saved in best] == sorted((saved for _, saved in best), reverse=True)
    # The saving that is named is what the forecast of a run with that setting is lower by.
    recomputed = MemoryPlan.uniform(made.family.block_lists, "recompute")
    saved = made.phases(plan)["training"] - made.phases(recomputed)["training"]
    assert dict(best)["--use_gradient_checkpointing"] == saved
    assert {"--offload_ema", "--train_batch_size 2 --gradient_accumulation_steps 2"} < set(dict(best))
    made.suggestions = lambda plan: best
    with pytest.raises(RefusedError, match="needs .* in the phase .* saves most: --.*; or --.*; or --") as error:
        check_fits(made, plan)
    assert best[0][0] in str(error.value)


def test_categories_by_hand(forecast):
    """A LoRA in fp32: weights as they are, 4 bytes per adapter weight, 8 of AdamW, gradients of 4 at the step."""
    made, plan = forecast("qwen_image", "--use_gradient_checkpointing")
    count = num_trained(made)
    by_category, _ = made.training(plan)
    assert by_category["adapters"] == 4 * count
    assert by_category["optimizer_state"] == pytest.approx(8 * count, rel=0.01)
    assert by_category["weights"] == sum(p.nbytes for p in made.family.skeleton.parameters())
    held, at_step = made._held()
    assert at_step["gradients"] == 4 * count and held["gradients"] == made._bytes["masters"] == 0


def test_categories_of_full_training_in_bf16_by_hand(forecast):
    """Weights of 2 bytes, fp32 masters and gradients of 4, AdamW of 8: 18 bytes per weight at the optimizer step."""
    made, plan = forecast("qwen_image", *FULL_BF16)
    count = num_trained(made)
    frozen = sum(p.nbytes for p in made.family.skeleton.parameters()) - 2 * count
    held, at_step = made._held()
    expected = 18 * count + frozen + at_step["batch"]
    assert sum(at_step.values()) - at_step["activations"] == pytest.approx(expected, rel=0.01)
    assert at_step["gradients"] == 4 * count and held["gradients"] == 0
    held, at_step = on(made, "ddp", 2)._held()
    assert held["gradients"] == 2 * count, "the buckets of DDP"
    assert at_step["gradients"] == 6 * count, "and the sums in fp32"


def test_disk_that_a_run_takes(forecast, caplog, tmp_path):
    made, _ = forecast("qwen_image", "--checkpointing_steps", "2")
    assert "for 5 at a time" in forecasting.describe_disk(made, 10, 0) and "another folder" not in caplog.text
    made.args.checkpoints_total_limit = 2
    assert "for 3 at a time" in forecasting.describe_disk(made, 10, 0)
    assert "checkpoint" not in forecasting.describe_disk(made, 1, 0), "there will be none"
    adapters = sum(math.prod(shape) for shape, _ in made.parameters.values())
    assert made.result_bytes == 2 * adapters, "bf16, as --lora_dtype says"
    made._bytes["optimizer_state"] = 2**60
    forecasting.describe_disk(made, 10, 3)
    assert "another folder" not in caplog.text, "all that there will be is there already"
    forecasting.describe_disk(made, 10, 2)
    assert "set --checkpoints_total_limit, or give another folder" in caplog.text


@pytest.mark.parametrize("flags", [[], FULL_BF16])
def test_an_average_takes_four_bytes_per_trained_weight(flags, forecast):
    """On the device, or with --offload_ema on the host; on each process in any case, and in each checkpoint."""
    made, plan = forecast("qwen_image", *flags)
    count = num_trained(made)
    without, _ = made.training(plan)
    with_ema, plan = forecast("qwen_image", *flags, "--ema")
    assert with_ema.training(plan)[0] == without | {"ema": 4 * count}
    assert with_ema.checkpoint_bytes - made.checkpoint_bytes == 4 * count
    assert made.checkpoint_bytes == pytest.approx(12 * count, rel=0.01), "fp32 weights and AdamW's two moments"
    assert on(with_ema, "zero2", 4)._held()[0]["ema"] == 4 * count
    with_ema.args.offload_ema = True
    assert with_ema.training(plan)[0] == without


@pytest.mark.parametrize(
    "family",
    [*(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen_image", "wan_ti2v")), "wan_t2v_a14b"],
)
def test_previews_are_a_phase_of_their_own(family, forecast, tiny_model, photos):
    """At least the decoder and its inputs; in addition what is trained, and nothing of a LoRA's base on a GPU."""
    flags = {"wan_ti2v": I2V, "wan_t2v_a14b": ["--expert", "both"]}.get(family, [])
    previews = [*flags, "--validation_prompt", "a cat", "--width", "512", "--height", "512"]
    previews += ["--validation_image", str(photos / "astronaut.png")] if family == "wan_ti2v" else []
    made, plan = forecast(family, *previews)
    vae_class = AutoencoderKLQwenImage if family == "qwen_image" else AutoencoderKLWan
    vae = vae_class.from_pretrained(tiny_model(family), subfolder="vae")
    weights = sum(parameter.nbytes for parameter in vae.parameters())
    peak, found = made._preview
    frames = 1 if family == "qwen_image" else 9
    assert found == weights and peak > weights + 4 * 3 * frames * 512 * 512
    held, base = held_by(made), made._bytes["weights"]
    second = base if family == "wan_t2v_a14b" else 0
    sampling = made.profile.inference_bytes + made._batch_bytes
    together = held + second + max(weights + sampling, peak)
    in_turns = max(held + sampling, held - base + peak)
    assert in_turns < together

    def previews(**launch):
        made.launch = dataclasses.replace(made.launch, **launch)
        return made.phases(plan)["previews"], made.previews_take_turns(plan)

    # By turns only where a device is too small for all.
    enough = together + forecasting.RESERVED_BYTES
    assert previews(device_bytes=(enough, 80 * GIB)) == (together, False)
    assert previews(device_bytes=(enough - 1, 80 * GIB)) == (in_turns, True)
    assert previews(device_type="cpu") == (together, False), "what would leave it has nowhere to go"
    assert previews(device_type="cuda", device_bytes=None) in ((together, False), (in_turns, True))
    others = max(value for name, value in made.phases(plan).items() if name != "previews")
    assert made.previews_take_turns(plan) == (together > others), "on the smallest device for the rest"
    for budget, expected in ((together, (together, False)), (together - 1, (in_turns, True))):
        made.args.memory_budget = budget
        assert previews() == expected


def test_full_training_of_which_nothing_waits(forecast):
    made, plan = forecast("qwen_image", *FULL_BF16, "--validation_prompt", "a cat")
    made.launch = dataclasses.replace(made.launch, device_bytes=(0, 80 * GIB))
    sampling = made.profile.inference_bytes + made._batch_bytes
    assert made.phases(plan)["previews"] == held_by(made) + max(sampling, made._preview[0])


def test_host_memory_counts_mapped_weights_once(forecast, monkeypatch):
    """What each process has for itself as often as there are processes: batches, what is parked, its own pages."""
    made, plan = forecast("qwen_image", "--use_gradient_checkpointing")
    memory = types.SimpleNamespace(rss=1000, shared=300)
    monkeypatch.setattr(forecasting.psutil, "Process", lambda: types.SimpleNamespace(memory_info=lambda: memory))
    ahead = made._batch_bytes * (2 * made.args.dataloader_num_workers + 1)
    read = max([made._bytes["weights"], *(weights for _, weights, _ in made._encoded.values())])
    for n in (1, 8):
        made.launch = dataclasses.replace(made.launch, num_local_processes=n)
        assert made.host_bytes(plan) == 300 + n * (700 + ahead) + read
    monkeypatch.setattr(StepProfile, "parked_bytes", lambda profile, plan: read)
    assert made.host_bytes(plan) == 300 + 8 * (700 + ahead) + 8 * read


def test_host_memory_of_a_cpu_counts_each_part_of_previews_once(forecast, monkeypatch):
    """They are there from the start, and are in the phase of previews already."""
    flags = ["--expert", "both", "--validation_prompt", "a cat", "--width", "512", "--height", "512"]
    made, plan = forecast("wan_t2v_a14b", *flags)
    made.launch = dataclasses.replace(made.launch, device_type="cpu")
    made.to_encode = {"text encoder": {}, "VAE": {}}  # or it would be the most
    memory = types.SimpleNamespace(rss=0)
    monkeypatch.setattr(forecasting.psutil, "Process", lambda: types.SimpleNamespace(memory_info=lambda: memory))
    phases = made.phases(plan)
    most = max(phases["previews"], *(phases[name] + made._preview[1] for name in ("training", "export")))
    assert made.host_bytes(plan) == most + made._batch_bytes * (2 * made.args.dataloader_num_workers + 1)


def test_shares_of_several_processes_by_hand(forecast):
    made, _ = forecast("qwen_image")
    whole = made._bytes
    held, at_step = on(made, "zero2", 4)._held()
    assert held["optimizer_state"] == whole["optimizer_state"] // 4 + whole["adapters"] // 4, "and fp32 copies"
    assert held["gradients"] == at_step["gradients"] == whole["adapters"] // 4 + 1000
    assert held["weights"] == whole["weights"] and held["adapters"] == whole["adapters"]
    assert Launch("cuda").strategy == "single"


@pytest.mark.parametrize("accumulation, factor", [(1, 2), (2, 0), (3, 1)])
@pytest.mark.parametrize("flags, size", [(FULL_BF16, 2), ([], 4)])
def test_gradients_of_micro_batches_by_hand(flags, size, accumulation, factor, forecast):
    """Their sums, in fp32, are there all the time, with DDP and its buckets; those of bf16 come on top of both."""
    made, _ = forecast("qwen_image", *flags)
    made.args.gradient_accumulation_steps = accumulation
    count = num_trained(made)
    sums = 4 * count if accumulation > 1 else 0
    assert made._held()[0]["gradients"] == sums
    assert made._gradient_factor == (0 if size == 4 and accumulation > 1 else 1)
    made = on(made, "ddp", 2)
    held, at_step = made._held()
    assert held["gradients"] == size * count + sums and at_step["gradients"] == {2: 6, 4: 4}[size] * count
    assert made._gradient_factor == (factor if size == 2 else 0)


def test_what_is_parked_is_limited_by_the_flag_or_by_the_free_memory_of_the_host(forecast, monkeypatch):
    limits = []
    monkeypatch.setattr(offload, "set_limit", limits.append)
    made, _ = forecast("qwen_image", "--use_gradient_checkpointing")
    forecasting.plan_memory(made.args, made)
    made.args.offload_buffer_size = 3_000_000
    forecasting.plan_memory(made.args, made)
    assert 2**20 < limits[0] < 2**45 and limits[1] == 3_000_000


@pytest.mark.parametrize("flag", ["--use_gradient_checkpointing", "--use_gradient_checkpointing_offload"])
def test_a_budget_and_manual_flags_exclude_each_other(flag, dry_run):
    with pytest.raises(RefusedError, match=f"Give {flag}, or --memory_budget, not both"):
        dry_run("qwen_image", "--memory_budget", "1GiB", flag)
    with pytest.raises(RefusedError, match="--checkpoint_blocks, or --memory_budget, not both"):
        dry_run("qwen_image", "--memory_budget", "1GiB", "--checkpoint_blocks", "2")


@pytest.mark.parametrize("text", ["12", "lots", "-1GiB"])
def test_budgets_have_units(text, dry_run):
    with pytest.raises(RefusedError, match=f"--memory_budget is '{text}'; allowed is auto, or a size with its unit"):
        dry_run("qwen_image", f"--memory_budget={text}")


def test_the_tables_are_for_a_person():
    launch = {"num_processes": 1, "device_type": "cpu", "strategy": "single"}
    forecast = {"launch": launch, "training_peak_place": "block 0"}
    forecast |= {"by_category": {"weights": 2**30, "activations": 476 * 2**20, "ema": 0}, "peak_phase": "training"}
    forecast |= {"phases": {"training": 2**30}, "by_mode": {}}
    forecast |= dict.fromkeys(("training_peak_bytes", "parked_bytes", "host_bytes"), 2**30)
    measured = {"by_category": {"weights": 2**31, "activations": 10 * 2**20}}
    measured |= {"training_peak_bytes": 2**29 + 1, "parked_bytes": None, "host_bytes": 2**28}
    lines = compare_forecast(forecast, measured)[1:]
    assert [line.split()[-1] for line in lines] == ["-50.0%", "+4660.0%", "+100.0%", "-", "+300.0%"]
    assert lines[2].startswith("training peak ") and not any(line.startswith("ema") for line in lines)
    assert not any("in one mode" in line for line in describe_forecast(forecast))
    by_mode = forecast | {"by_mode": {"keep": 2**30}}
    assert "  training peak with all blocks in one mode: keep 1.00 GiB" in describe_forecast(by_mode)
