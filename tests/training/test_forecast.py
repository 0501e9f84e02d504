"""What a run is forecast to need: against the real parts, against arithmetic by hand, and through the command line."""

import dataclasses
import json
import math
import shutil
import types

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan

import train_qwen_image
import train_wan_video
from benchmarks import forecasts as benchmark
from blockwise import offload
from blockwise.log import MemoryLog
from blockwise.plan import MemoryPlan
from pipelines import qwen_image, wan_video
from runtime.errors import RefusedError
from training import forecast as forecasting
from training.arguments import parse_args
from training.forecast import Launch, check_fits, compare_forecast, describe_forecast
from training.module import find_lora_targets, make_trainable, parameters_to_train, trainable_parameters


GIB = 2**30
FAMILIES = ["qwen_image", "wan_t2v", "wan_i2v", "wan_flf2v", "wan_ti2v", "wan_t2v_a14b", "wan_i2v_a14b"]


@pytest.fixture(autouse=True)
def no_limit_is_left():
    yield
    offload.set_limit(None)


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


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.fixture
def command(tmp_path, tiny_model, photos, clips, monkeypatch):
    """Function that makes a dry run in this process; returns run.json and what it printed."""

    def run(family, *flags, model=None, refused=False, capsys=None):
        script = train_qwen_image if family == "qwen_image" else train_wan_video
        data = photos if family == "qwen_image" else clips
        argv = ["--pretrained_model_name_or_path", str(model or tiny_model(family)), "--dataset_path", str(data)]
        argv += ["--output_dir", str(tmp_path / "out"), "--max_train_steps", "2", "--mixed_precision", "no"]
        argv += ["--height", "64", "--width", "64"]
        argv += ["--num_frames", "9"] if family != "qwen_image" else []
        options = {"description": None, "values": script.VALUES, "resolve": family == "qwen_image"}
        args = parse_args([*argv, *flags, "--dry_run"], **options)
        script.main(args, MemoryLog())
        return json.loads((tmp_path / "out" / "run.json").read_text())

    return run


@pytest.fixture
def forecast(command, monkeypatch):
    """Function from flags to the `RunForecast` and the `MemoryPlan` of a run."""

    def make(family, *flags):
        caught = {}
        original = forecasting.RunForecast.describe

        def describe(self, plan):
            caught.update(forecast=self, plan=plan)
            return original(self, plan)

        with monkeypatch.context() as context:
            context.setattr(forecasting.RunForecast, "describe", describe)
            command(family, *flags)
        return caught["forecast"], caught["plan"]

    return make


def test_a_dry_run_needs_no_weights_and_writes_what_it_found(command, tiny_model, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(tiny_model("qwen_image"), model, ignore=shutil.ignore_patterns("*.safetensors*"))
    without = command("qwen_image", "--use_gradient_checkpointing", model=model)
    printed = capsys.readouterr().out
    forecast = without["forecast"]
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == ["cache", "contact_sheet.png", "dataset.jsonl", "run.json"]
    assert [path.name for path in (tmp_path / "out" / "cache").iterdir()] == ["index-0.jsonl"], "nothing is encoded"
    assert forecast["training_peak_bytes"] == sum(forecast["by_category"].values()) > 0
    assert forecast["phases"]["training"] == forecast["training_peak_bytes"]
    assert forecast["peak_phase"] == max(forecast["phases"], key=forecast["phases"].get)
    assert set(forecast["phases"]) == {"text encoder", "VAE", "training", "export"}
    assert forecast["host_bytes"] > 0 and forecast["device_type"] == "cuda"
    mode = {"activations": "recompute", "weights": "resident", "units": 1}
    assert without["plan"] == {"transformer_blocks": [mode] * len(without["plan"]["transformer_blocks"])}
    assert "5 of 5 items are used\n bucket (w x h x frames)" in printed
    assert forecast["by_mode"]["recompute"] == forecast["training_peak_bytes"] < forecast["by_mode"]["keep"]
    assert "training peak" in printed and "no accelerator is here to compare with" in printed
    with_weights = command("qwen_image", "--use_gradient_checkpointing")["forecast"]
    assert with_weights | {"host_bytes": 0} == forecast | {"host_bytes": 0}


@pytest.mark.parametrize("family", ["qwen_image", "wan_ti2v"])
def test_memory_of_the_modes_is_ordered(family, command):
    task = ["--task", "i2v"] if family == "wan_ti2v" else []
    peaks = {}
    for flag in ("", "--use_gradient_checkpointing", "--use_gradient_checkpointing_offload"):
        peaks[flag] = command(family, *task, *filter(None, [flag]))["forecast"]["training_peak_bytes"]
    keep, recompute, park = peaks.values()
    assert keep > recompute >= park


def test_the_base_has_the_dtype_that_is_asked_for(command):
    """In fp32 it is twice as large."""
    weights = {
        precision: command("qwen_image", "--mixed_precision", precision)["forecast"]["by_category"]["weights"]
        for precision in ("no", "bf16")
    }
    assert weights["no"] == 2 * weights["bf16"]


def test_a_budget_makes_the_plan(command, monkeypatch):
    flags = ["--train_batch_size", "16"]  # else the VAE is the peak of so small a run
    kept = command("qwen_image", *flags)["forecast"]["training_peak_bytes"]
    recomputed = command("qwen_image", *flags, "--use_gradient_checkpointing")["forecast"]["training_peak_bytes"]
    budget = (kept + recomputed) // 2
    run = command("qwen_image", *flags, "--memory_budget", f"{budget / 1000}KB")
    assert run["forecast"]["training_peak_bytes"] <= budget < kept
    modes = [block["activations"] for block in run["plan"]["transformer_blocks"]]
    assert modes == sorted(modes, key=["park", "recompute", "keep"].index) and set(modes) != {"keep"}
    plan = command("qwen_image", "--memory_budget", "10GiB")["plan"]["transformer_blocks"]
    assert all(block["activations"] == "keep" for block in plan)


def test_a_budget_that_cannot_be_met_names_the_smallest_and_what_helps(command):
    with pytest.raises(
        RefusedError, match=r"--memory_budget: 0.95 MiB .* smallest that can is \d.*MiB.* help most is"
    ):
        command("qwen_image", "--memory_budget", "1MB")
    with pytest.raises(RefusedError, match="--memory_budget auto: there is no accelerator here; give a size"):
        command("qwen_image", "--memory_budget", "auto")


@pytest.mark.parametrize("device_bytes, says", [((8 * GIB, 80 * GIB), "fits"), ((GIB, 80 * GIB), "tight")])
def test_the_device_that_is_there(device_bytes, says, forecast):
    made, plan = forecast("qwen_image")
    made.launch = dataclasses.replace(made.launch, device_bytes=device_bytes)
    assert says in check_fits(made, plan)


def test_a_run_that_cannot_fit_is_refused_with_the_settings_that_save_most(forecast):
    made, plan = forecast("qwen_image", "--train_batch_size", "4")
    made.launch = dataclasses.replace(made.launch, device_bytes=(2**20, 2**20))
    with pytest.raises(RefusedError, match="needs .* in the phase .* saves most: --.*; or --.*; or --") as error:
        check_fits(made, plan)
    best = made.suggestions(plan)
    assert [saved for _, saved in best] == sorted((saved for _, saved in best), reverse=True)
    assert best[0][0] in str(error.value)
    # The saving that is named is what the forecast of a run with that setting is lower by.
    assert dict(best)["--use_gradient_checkpointing"] == max(made.phases(plan).values()) - max(
        made.phases(MemoryPlan.uniform(made.family.block_lists, "recompute")).values()
    )


def test_categories_by_hand(forecast):
    """A LoRA in fp32: weights as they are, 4 bytes per adapter weight, 8 of AdamW, gradients of 4 at the step."""
    made, plan = forecast("qwen_image", "--lora_rank", "4", "--use_gradient_checkpointing")
    count = sum(math.prod(shape) for shape, _ in made.parameters.values())
    by_category, _ = made.training(plan)
    assert by_category["adapters"] == 4 * count
    assert by_category["optimizer_state"] == pytest.approx(8 * count, rel=0.01)
    assert by_category["weights"] == sum(p.nbytes for p in made.family.skeleton.parameters())
    fixed, at_step = made._shares("single", 1)
    assert at_step == 4 * count and fixed["masters"] == fixed["gradients"] == 0


def test_categories_of_full_training_in_bf16_by_hand(forecast):
    """Weights of 2 bytes, fp32 masters and gradients of 4, AdamW of 8: 18 bytes per weight at the optimizer step."""
    made, plan = forecast("qwen_image", "--training_mode", "full", "--mixed_precision", "bf16")
    count = sum(math.prod(shape) for shape, _ in made.parameters.values())
    by_category, place = made.training(plan)
    if place == "optimizer step":
        frozen = sum(p.nbytes for p in made.family.skeleton.parameters()) - 2 * count
        assert sum(by_category.values()) - by_category["batch"] == pytest.approx(18 * count + frozen, rel=0.01)
    _, at_step = made._shares("single", 1)
    assert at_step == 4 * count
    fixed, _ = made._shares("ddp", 2)
    assert fixed["gradients"] == 2 * count, "the buckets of DDP"


@pytest.mark.parametrize("flags", [[], ["--training_mode", "full", "--mixed_precision", "bf16"]])
def test_an_average_takes_four_bytes_per_trained_weight(flags, forecast):
    """On the device, or with --offload_ema on the host; on each process in any case, and in each checkpoint."""
    made, plan = forecast("qwen_image", *flags)
    count = sum(math.prod(shape) for shape, _ in made.parameters.values())
    without, _ = made.training(plan)
    with_ema, plan = forecast("qwen_image", *flags, "--ema")
    assert with_ema.training(plan)[0] == without | {"ema": 4 * count}
    assert with_ema.checkpoint_bytes - made.checkpoint_bytes == 4 * count
    assert made.checkpoint_bytes == pytest.approx(12 * count, rel=0.01), "fp32 weights and AdamW's two moments"
    assert with_ema._shares("zero2", 4)[0]["ema"] == 4 * count
    on_host, plan = forecast("qwen_image", *flags, "--ema", "--offload_ema")
    assert on_host.training(plan)[0] == without
    assert ("--offload_ema", 4 * count) in with_ema.suggestions(plan, "training")


@pytest.mark.parametrize("family", ["qwen_image", "wan_ti2v", "wan_t2v_a14b"])
def test_previews_are_a_phase_of_their_own(family, forecast, tiny_model, photos):
    """At least the decoder and its inputs; in addition what is trained, and nothing of a LoRA's base on a GPU."""
    flags = {"wan_ti2v": ["--task", "i2v"], "wan_t2v_a14b": ["--expert", "both"]}.get(family, [])
    previews = [*flags, "--validation_prompt", "a cat", "--width", "512", "--height", "512"]
    previews += ["--validation_image", str(photos / "astronaut.png")] if family == "wan_ti2v" else []
    made, plan = forecast(family, *previews)
    vae_class = AutoencoderKLQwenImage if family == "qwen_image" else AutoencoderKLWan
    vae = vae_class.from_pretrained(tiny_model(family), subfolder="vae")
    weights = sum(parameter.nbytes for parameter in vae.parameters())
    peak, found = made._preview
    frames = 1 if family == "qwen_image" else 9
    assert found == weights and peak > weights + 4 * 3 * frames * 512 * 512
    held, _ = made._shares("single", 1)
    held, base = sum(held.values()), held["weights"]
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
    made, plan = forecast("qwen_image", "--training_mode", "full", "--validation_prompt", "a cat")
    made.launch = dataclasses.replace(made.launch, device_bytes=(0, 80 * GIB))
    held, _ = made._shares("single", 1)
    sampling = made.profile.inference_bytes + made._batch_bytes
    assert made.phases(plan)["previews"] == sum(held.values()) + max(sampling, made._preview[0])


def test_host_memory_counts_mapped_weights_once(forecast, monkeypatch):
    """What each process has for itself as often as there are processes: batches, what is parked, its own pages."""
    made, plan = forecast("qwen_image", "--use_gradient_checkpointing_offload")
    memory = types.SimpleNamespace(rss=1000, shared=300)
    monkeypatch.setattr(forecasting.psutil, "Process", lambda: types.SimpleNamespace(memory_info=lambda: memory))
    ahead = made._batch_bytes * (2 * made.args.dataloader_num_workers + 1)
    read = max([made._bytes["weights"], *made._encoded[1].values()])
    for n in (1, 8):
        made.launch = dataclasses.replace(made.launch, num_local_processes=n)
        assert made.host_bytes(plan) == 300 + n * (700 + ahead) + read
    monkeypatch.setattr(made.profile, "parked_bytes", lambda modes: read)
    assert made.host_bytes(plan) == 300 + 8 * (700 + ahead) + 8 * read


def test_host_memory_of_a_cpu_counts_each_part_of_previews_once(forecast, monkeypatch):
    """They are there from the start, and are in the phase of previews already."""
    made, plan = forecast("wan_t2v_a14b", "--expert", "high_noise", "--validation_prompt", "a cat")
    made.launch = dataclasses.replace(made.launch, device_type="cpu")
    made.to_encode = {"text encoder": {}, "VAE": {}}  # or it would be the most
    memory = types.SimpleNamespace(rss=0)
    monkeypatch.setattr(forecasting.psutil, "Process", lambda: types.SimpleNamespace(memory_info=lambda: memory))
    phases = made.phases(plan)
    most = max(phases["previews"], *(phases[name] + made._preview[1] for name in ("training", "export")))
    assert made.host_bytes(plan) == most + made._batch_bytes * (2 * made.args.dataloader_num_workers + 1)


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


def test_shares_of_several_processes_by_hand(forecast):
    made, _ = forecast("qwen_image")
    whole, _ = made._shares("single", 1)
    adapters = whole["adapters"]
    for strategy in ("zero2", "zero3", "fsdp2"):
        fixed, _ = made._shares(strategy, 4)
        assert fixed["optimizer_state"] == whole["optimizer_state"] // 4
        bucket = 0 if strategy == "fsdp2" else made.launch.zero_bucket_bytes
        assert fixed["gradients"] == adapters // 4 + bucket
        if strategy == "zero2":
            assert fixed["weights"] == whole["weights"] and fixed["adapters"] == adapters
        else:
            blocks = made.family.skeleton.transformer_blocks
            gathered = 2 * max(sum(p.nbytes for p in block.parameters()) for block in blocks)
            assert fixed["weights"] == whole["weights"] // 4 + gathered and fixed["adapters"] == adapters // 4
    assert Launch("cuda").strategy == "single"


def test_shares_of_eight_processes_of_a_real_model():
    """Qwen-Image, full, AdamW, at 1024x1024, in GiB: the whole gradient is nowhere.

    By hand: 20.43e9 weights in bf16, their gradients in fp32, masters and two moments are 18 bytes each, of which an
    eighth is 42.8; two whole blocks are 1.3, what a step has alive in addition 2.0. ZeRO-3 has a bucket of 1.9 too.
    """
    made = benchmark.dry_run("Qwen-Image", benchmark.QWEN_1024, "full", "--optimizer", "adamw")
    plan = MemoryPlan.uniform({"transformer_blocks": 60}, "recompute")
    found = {name: num_bytes / GIB for name, num_bytes in made.describe(plan)["per_process"].items()}
    assert found["zero3"] == pytest.approx(48.0, rel=0.003) and found["fsdp2"] == pytest.approx(46.1, rel=0.003)
    # DDP has its buckets in bf16 all the time, and at the optimizer step sums in fp32.
    single = sum(made.training(plan)[0].values()) / GIB
    assert found["ddp"] - single == pytest.approx(2 * 20.43e9 / GIB, rel=0.01)
    # It is the same whether eight processes are thought of or there.
    made.launch = dataclasses.replace(made.launch, strategy="ddp", num_processes=8)
    assert made.describe(plan)["training_peak_bytes"] / GIB == found["ddp"]


@pytest.mark.parametrize("accumulation, factor", [(1, 2), (2, 0), (3, 1)])
@pytest.mark.parametrize("precision, size", [("bf16", 2), ("no", 4)])
def test_gradients_of_micro_batches_by_hand(precision, size, accumulation, factor, forecast):
    """Their sums, in fp32, are there all the time, with DDP and its buckets; those of bf16 come on top of both."""
    flags = ["--mixed_precision", precision, "--gradient_accumulation_steps", str(accumulation)]
    made, _ = forecast("qwen_image", "--training_mode", "full", *flags)
    count = sum(math.prod(shape) for shape, _ in made.parameters.values())
    sums = 4 * count if accumulation > 1 else 0
    assert made._shares("single", 1)[0]["gradients"] == sums
    fixed, at_step = made._shares("ddp", 2)
    assert fixed["gradients"] == size * count + sums and at_step == {"bf16": 6, "no": 4}[precision] * count
    assert made._gradient_factor("ddp") == (factor if precision == "bf16" else 0)
    assert made._gradient_factor("single") == (0 if precision == "no" and accumulation > 1 else 1)


def test_what_is_parked_is_limited_by_the_flag_or_by_the_free_memory_of_the_host(command, monkeypatch):
    limits = []
    monkeypatch.setattr(offload, "set_limit", limits.append)
    command("qwen_image", "--use_gradient_checkpointing_offload", "--offload_buffer_size", "3MB")
    command("qwen_image", "--use_gradient_checkpointing_offload")
    assert limits[0] == 3_000_000 and 2**20 < limits[1] < 2**45


@pytest.mark.parametrize("flag", ["--use_gradient_checkpointing", "--use_gradient_checkpointing_offload"])
def test_a_budget_and_manual_flags_exclude_each_other(flag, command):
    with pytest.raises(RefusedError, match=f"Give {flag}, or --memory_budget, not both"):
        command("qwen_image", "--memory_budget", "1GiB", flag)
    with pytest.raises(RefusedError, match="--checkpoint_blocks, or --memory_budget, not both"):
        command("qwen_image", "--memory_budget", "1GiB", "--checkpoint_blocks", "2")


@pytest.mark.parametrize("text", ["12", "lots", "-1GiB"])
def test_budgets_have_units(text, command):
    with pytest.raises(RefusedError, match=f"--memory_budget is '{text}'; allowed is auto, or a size with its unit"):
        command("qwen_image", f"--memory_budget={text}")


def test_the_tables_are_for_a_person():
    """A forecast that is far off is so many times too high, and other numbers of processes are for those who plan."""
    forecast = {"num_processes": 1, "device_type": "cpu", "strategy": "single", "training_peak_place": "block 0"}
    forecast |= {"by_category": {"weights": 2**30, "activations": 476 * 2**20, "ema": 0}, "peak_phase": "training"}
    forecast |= {"phases": {"training": 2**30}, "per_process": {"num_processes": 8, "ddp": 1, "fsdp2": 1}}
    forecast |= dict.fromkeys(("training_peak_bytes", "parked_bytes", "host_bytes"), 2**30)
    measured = {"by_category": {"weights": 2**31, "activations": 10 * 2**20}}
    measured |= {"training_peak_bytes": 2**29 + 1, "parked_bytes": None, "host_bytes": 2**28}
    lines = compare_forecast(forecast, measured)[1:]
    assert [line.split()[-1] for line in lines[:1]] == ["-50.0%"] and lines[3].split()[-1] == "-"
    assert [" ".join(line.split()[-2:]) for line in lines[1:5:3]] == ["48 times", "4 times"]
    assert lines[2].startswith("training peak ") and lines[2].endswith("+100.0%")
    assert not any("8 processes" in line for line in describe_forecast(forecast))
    assert any("8 processes" in line for line in describe_forecast(forecast | {"by_mode": {}}))
    assert any("8 processes" in line for line in describe_forecast(forecast | {"num_processes": 8}))
