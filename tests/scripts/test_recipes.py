"""Every shipped recipe is run by bash, with an `accelerate` that only writes down its arguments, and these are parsed.

The reference is the parser of the training scripts themselves, and for video what `find_variant` makes of the
published configs: what a run would refuse, or read otherwise than the recipe says, fails here.
"""

import ast
import dataclasses
import functools
import math
import os
import pathlib
import re
import shutil
import subprocess

import pytest
import torch

from benchmarks.forecasts import GIB, MODELS, dry_run, model_folder, predict
from blockwise import offload
from pipelines.wan_video import find_variant
from runtime.errors import RefusedError
from training.arguments import parse_args, resolve_for_model
from training.optimizers import find_optimizer


ROOT = pathlib.Path(__file__).parents[2]
SHELL_SCRIPTS = sorted(path.relative_to(ROOT) for path in (ROOT / "scripts").rglob("*.sh"))
RECIPES = [path for path in SHELL_SCRIPTS if len(path.parts) == 4]
FULL_RECIPES = [path for path in RECIPES if path.parts[2] == "full"]
WAN_RECIPES = [path for path in RECIPES if path.parts[1] == "wan_video"]
ON = "  --use_gradient_checkpointing \\\n"
OFFLOAD_OFF = "  # --use_gradient_checkpointing_offload \\\n"
OFFLOAD_ON = "  --use_gradient_checkpointing_offload \\\n"

HUB_IDS = {"qwen_image": "Qwen/{}", "wan_video": "Wan-AI/{}-Diffusers"}
DATASETS = {"qwen_image": "data/my_pictures", "wan_video": "data/my_clips"}
# Parameters of the published transformers, one expert's where there are two.
NUM_PARAMETERS = {
    "Qwen-Image": 20_430_401_088,
    "Qwen-Image-2512": 20_430_401_088,
    "Wan2.1-T2V-1.3B": 1_418_996_800,
    "Wan2.1-T2V-14B": 14_288_491_584,
    "Wan2.1-I2V-14B-480P": 16_394_878_784,
    "Wan2.1-I2V-14B-720P": 16_394_878_784,
    "Wan2.1-FLF2V-14B-720P": 16_395_536_704,
    "Wan2.2-T2V-A14B": 14_288_491_584,
    "Wan2.2-I2V-A14B": 14_288_901_184,
    "Wan2.2-TI2V-5B": 4_999_787_712,
}

STUB = """#!/bin/sh
pwd > "$RECORD/folder"
printf '%s\\0' "$@" > "$RECORD/arguments"
exit "${STUB_EXIT_CODE:-0}"
"""


def write_stub(folder):
    folder.mkdir(parents=True)
    (folder / "accelerate").write_text(STUB)
    (folder / "accelerate").chmod(0o755)
    return folder


@pytest.fixture
def checkout(tmp_path):
    """A copy of the recipes without a .venv, so that they take the `accelerate` that is first in PATH."""
    root = tmp_path / "a checkout"  # a blank, as in the folders of many people
    for family in HUB_IDS:
        shutil.copytree(ROOT / "scripts" / family, root / "scripts" / family)
    write_stub(tmp_path / "bin")
    return root


def run_recipe(checkout, recipe, *flags, **environment):
    """Run a recipe of `checkout` from another folder; return the finished process and the recorded command line."""
    record = checkout.parent / "record"
    shutil.rmtree(record, ignore_errors=True)
    record.mkdir()
    of_recipes = ("DATASET_PATH", "OUTPUT_DIR", "EXPERT")
    inherited = {key: value for key, value in os.environ.items() if key not in of_recipes}
    path = f"{checkout.parent / 'bin'}{os.pathsep}{inherited['PATH']}"
    done = subprocess.run(
        ["bash", str(checkout / recipe), *flags],
        cwd=checkout.parent,
        env={**inherited, "PATH": path, "RECORD": str(record), **environment},
        capture_output=True,
        text=True,
    )
    # "command not found" is what bash says when a comment has cut a command in two.
    assert done.stderr == ""
    assert (record / "folder").read_text().strip() == str(checkout)
    return done, (record / "arguments").read_text().split("\0")[:-1]


def split_command(command):
    """Return the config file, the training script and the flags of `accelerate launch`."""
    assert command[:2] == ["launch", "--config_file"]
    return command[2], command[3], command[4:]


def parse(training_script, flags):
    tree = ast.parse((ROOT / training_script).read_text())
    assigned = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    family = ast.literal_eval(assigned["FAMILY"])
    depends_on_model = training_script == "train_wan_video.py"
    args = parse_args(flags, description="", values=family, resolve=not depends_on_model)
    if depends_on_model:
        resolve_for_model(args, wan_values(args.pretrained_model_name_or_path))
    return args


@functools.cache
def wan_values(hub_id):
    """Return what training takes from a model of the hub, by way of a folder with the configs published there."""
    model = hub_id.removeprefix("Wan-AI/").removesuffix("-Diffusers")
    variant = find_variant(model_folder(model).name)
    return dataclasses.asdict(variant) | {"experts": variant.experts, "lora_target_modules": "to_q"}


def header(recipe):
    return re.match(r"(#.*\n)+", (ROOT / recipe).read_text())[0]


def flowing(text):
    """Return comments without their line breaks."""
    return text.replace("\n# ", " ")


# ---------------------------------------------------------------- what a recipe runs


def test_there_is_a_recipe_for_every_model_and_mode():
    families = {"Qwen": "qwen_image", "Wan2": "wan_video"}
    expected = {f"scripts/{families[m[:4]]}/{mode}/{m}.sh" for m in NUM_PARAMETERS for mode in ("lora", "full")}
    assert {str(path) for path in RECIPES} == expected


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=str)
def test_bash_can_read_it_and_anyone_run_it(script):
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_recipe_parses_and_means_what_its_path_says(recipe, checkout):
    done, command = run_recipe(checkout, recipe)
    assert done.returncode == 0
    config, training_script, flags = split_command(command)
    assert config == "accelerate_configs/single_gpu.yaml" and (ROOT / config).is_file()
    args = parse(training_script, flags)

    family, mode, model = recipe.parts[1], recipe.parts[2], recipe.stem
    one_expert = mode == "full" and "A14B" in model
    assert training_script == f"train_{family}.py"
    assert args.training_mode == mode
    assert args.pretrained_model_name_or_path == HUB_IDS[family].format(model)
    assert args.dataset_path == DATASETS[family]
    assert args.output_dir == f"outputs/{model}-{mode}" + ("-high_noise" if one_expert else "")
    assert args.use_gradient_checkpointing
    # Behind the commented line, so bash has read on.
    assert args.checkpointing_steps and args.checkpoints_total_limit
    if mode == "lora":
        assert (args.lora_rank, args.learning_rate, args.optimizer) == (32, 1e-4, "adamw")
    else:
        assert (args.learning_rate, args.optimizer, args.caption_dropout) == (1e-5, "adamw_8bit", 0.1)
        assert args.lr_warmup_steps > 0
    find_optimizer(args, torch.device("cpu"))

    # Those of the header's figures.
    size = (args.height, args.width, args.train_batch_size)
    if family == "qwen_image":
        assert size == ((1024, 1024, 1) if mode == "lora" else (1328, 1328, 4))
        assert not args.use_gradient_checkpointing_offload
        return
    if "TI2V" in model:
        assert (*size, args.num_frames, args.fps) == (704, 1280, 1, 121, 24)
    else:
        assert (*size, args.num_frames, args.fps) == (*((720, 1280) if "720P" in model else (480, 832)), 1, 81, 16)
    assert args.use_gradient_checkpointing_offload == ("14B" in model and args.height == 720)
    assert args.task == ("i2v" if "TI2V" in model else None)
    assert args.expert == (None if "A14B" not in model else "both" if mode == "lora" else "high_noise")


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_offload_is_one_comment_sign_away(recipe, checkout):
    """From off to on, or from on to off where the recipe has it on."""
    text = (checkout / recipe).read_text()
    assert text.count(ON + OFFLOAD_OFF) + text.count(ON + OFFLOAD_ON) == 1, "it stands directly below the switch"
    _, shipped = run_recipe(checkout, recipe)
    if OFFLOAD_OFF in text:
        (checkout / recipe).write_text(text.replace(OFFLOAD_OFF, OFFLOAD_ON))
    else:
        (checkout / recipe).write_text(text.replace(OFFLOAD_ON, OFFLOAD_OFF))
    done, changed = run_recipe(checkout, recipe)
    assert done.returncode == 0
    off, on = sorted((shipped, changed), key=len)
    assert (OFFLOAD_OFF in text) == (shipped == off)
    position = off.index("--use_gradient_checkpointing") + 1
    assert on == off[:position] + ["--use_gradient_checkpointing_offload"] + off[position:]
    for command in (off, on):
        _, training_script, flags = split_command(command)
        args = parse(training_script, flags)
        assert args.use_gradient_checkpointing and args.use_gradient_checkpointing_offload == (command == on)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_environment_and_further_flags_win(recipe, checkout):
    further = ["--max_train_steps", "7", "--height", "512", "--width", "768"]
    further += ["--lr_warmup_steps", "2"] * (recipe in FULL_RECIPES)  # theirs is longer than these steps
    _, command = run_recipe(checkout, recipe, *further, DATASET_PATH="data/my pets", OUTPUT_DIR="outputs/a b")
    _, training_script, flags = split_command(command)
    args = parse(training_script, flags)
    assert (args.dataset_path, args.output_dir) == ("data/my pets", "outputs/a b")
    assert (args.max_train_steps, args.height, args.width) == (7, 512, 768)

    _, command = run_recipe(checkout, recipe, "--use_gradient_checkpointing_ofload")
    with pytest.raises(RefusedError, match="--use_gradient_checkpointing_offload"):
        parse(*split_command(command)[1:])


@pytest.mark.parametrize("model", ["Wan2.2-T2V-A14B", "Wan2.2-I2V-A14B"])
def test_second_run_of_a_full_recipe_trains_the_other_expert(model, checkout):
    recipe = f"scripts/wan_video/full/{model}.sh"
    assert "EXPERT " in header(recipe) and "run it twice" in header(recipe)
    _, command = run_recipe(checkout, recipe, EXPERT="low_noise")
    args = parse(*split_command(command)[1:])
    assert (args.expert, args.output_dir) == ("low_noise", f"outputs/{model}-full-low_noise")
    _, command = run_recipe(checkout, recipe, EXPERT="both")
    with pytest.raises(RefusedError, match="--expert is both; allowed with --training_mode full are high_noise, low_"):
        parse(*split_command(command)[1:])


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_ti2v_recipe_trains_t2v_as_its_header_says(mode, checkout):
    recipe = f"scripts/wan_video/{mode}/Wan2.2-TI2V-5B.sh"
    assert "--task t2v behind the command" in header(recipe)
    _, command = run_recipe(checkout, recipe, "--task", "t2v")
    assert parse(*split_command(command)[1:]).task == "t2v"


def test_failure_of_the_run_is_the_failure_of_the_recipe(checkout):
    done, _ = run_recipe(checkout, RECIPES[0], STUB_EXIT_CODE="3")
    assert done.returncode == 3


def test_accelerate_of_the_venv_comes_first(checkout):
    # The one in PATH must not be reached: it would be another version, or none.
    (checkout.parent / "bin" / "accelerate").write_text("#!/bin/sh\nexit 9\n")
    write_stub(checkout / ".venv" / "bin")
    done, _ = run_recipe(checkout, RECIPES[0])
    assert done.returncode == 0


# ---------------------------------------------------------------- what recipes repeat of each other


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("family", HUB_IDS)
def test_recipes_of_one_family_and_mode_run_the_same_code(family, mode):
    """Each is copied alone, so what they share stands in all of them: there it is to stay the same."""
    may_differ = ("pretrained_model_name_or_path", "output_dir", "height", "width", "num_frames", "fps", "task")
    may_differ += ("expert", "use_gradient_checkpointing_offload")
    shared = set()
    for path in (ROOT / "scripts" / family / mode).glob("*.sh"):
        lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
        flags = [line.split()[0].removeprefix("--") if line.split() else "" for line in lines]
        kept = [line for line, flag in zip(lines, flags, strict=True) if flag not in may_differ]
        shared.add("\n".join(line for line in kept if line != 'EXPERT="${EXPERT:-high_noise}"'))
    assert len(shared) == 1


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize(
    ("first", "second", "numbers_differ"),
    [
        ("qwen_image/{}/Qwen-Image.sh", "qwen_image/{}/Qwen-Image-2512.sh", False),
        ("wan_video/{}/Wan2.1-I2V-14B-480P.sh", "wan_video/{}/Wan2.1-I2V-14B-720P.sh", True),
    ],
)
def test_recipes_of_one_architecture_differ_in_names_and_sizes_only(mode, first, second, numbers_differ):
    texts = []
    for path in (first, second):
        path = ROOT / "scripts" / path.format(mode)
        text = re.sub(rf"\b{re.escape(path.stem)}\b(?!-\d)", "MODEL", path.read_text())
        if numbers_differ:
            text = re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?", "N", flowing(text.replace(OFFLOAD_OFF, OFFLOAD_ON))))
        texts.append(text)
    assert texts[0] == texts[1]


# ---------------------------------------------------------------- what a header says


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_header_says_what_for_on_what_and_how_much(recipe):
    text = header(recipe)
    for word in ("# Goal: ", f"# Usage: bash {recipe} ", "DATASET_PATH", "OUTPUT_DIR", "# Hardware: ", "# Memory"):
        assert word in text, word
    # Until a run on a GPU has given figures, no reader may take these for such.
    assert "Predicted with fake tensors, NOT measured on a GPU. (benchmarks/forecasts.py)" in flowing(text)
    if recipe in WAN_RECIPES:
        words = ["Clips: ", "--clip_part", "--fps"]
        words += ["if that is 5 or more: pictures are left out"] * ("-T2V" not in recipe.stem)
        for word in words:
            assert word in flowing(text), word


@pytest.mark.parametrize("recipe", FULL_RECIPES, ids=str)
def test_bytes_per_parameter_of_full_training_add_up(recipe):
    """The header's GiB follow from its bytes per parameter, and these from the dtypes that it names."""
    text, num_parameters = header(recipe), NUM_PARAMETERS[recipe.stem]
    row = {
        name: [float(number) for number in re.findall(r"[\d.]+", re.search(rf"# +{name} +(.*)", text)[1])]
        for name in ("weights, bf16", "masters, fp32", "their gradients, fp32, at the step", "at the optimizer step")
    }
    state = [8, 2 + 2 * 4 / 256, 0]  # two fp32 moments; two of one byte with a fp32 scale per 256; next to nothing
    assert f"# Memory: {num_parameters / 1e9:.2f}e9 parameters" in text
    gib = re.search(r"# +([\d.]+) GiB +([\d.]+) GiB +([\d.]+) GiB\n", text).groups()
    for i in range(3):
        total = row["weights, bf16"][i] + row["masters, fp32"][i] + row["their gradients, fp32, at the step"][i]
        assert total == 2 + 4 + 4
        assert row["at the optimizer step"][i] == pytest.approx(total + state[i], abs=0.01)
        calculated = (total + state[i]) * num_parameters / 2**30
        assert gib[i] == (f"{calculated:.1f}" if "." in gib[i] else f"{calculated:.0f}")
    # A checkpoint has the masters and the state of adamw_8bit.
    for what, bytes_each in (("for the result", 2), ("for each checkpoint", 4 + state[1])):
        gb = re.search(rf"([\d.]+) GB {what}", text)[1]
        calculated = bytes_each * num_parameters / 1e9
        assert gb == (f"{calculated:.1f}" if "." in gb else f"{calculated:.0f}")


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(
            path, marks=[] if path.stem in ("Qwen-Image", "Wan2.1-T2V-1.3B") else pytest.mark.slow, id=str(path)
        )
        for path in RECIPES
    ],
)
def test_memory_in_the_header_is_what_the_benchmark_forecasts(recipe, request):
    request.addfinalizer(lambda: offload.set_limit(None))  # a dry run sets one
    mode, model = recipe.parts[2], recipe.stem.removesuffix("-2512")
    text = header(recipe)
    memory = text[text.index("# Memory") :]
    sizes = [size for size in MODELS[model][2] if "{}x{}".format(*size[:2]) in memory]
    batch = re.search(r"(\d+) pictures of", memory)
    flags = ["--train_batch_size", batch[1], "--dataset_repeat", batch[1]] if batch else []
    forecast = dry_run(model, sizes[0], mode, *flags)
    predictions = [predict(model, size, mode, *flags) for size in sizes]
    assert sum(parameter.numel() for parameter in forecast.skeleton.parameters()) == NUM_PARAMETERS[model]
    for label, key in (
        ("no checkpointing flag", "keep"),
        ("--use_gradient_checkpointing", "recompute"),
        ("--use_gradient_checkpointing_offload", "park"),
    ):
        line = re.search(rf"^#   {label} +(\d.*)$", text, re.MULTILINE)[1]
        expected = [predicted[key]["training_peak_bytes"] for predicted in predictions]
        if key == "park":
            expected += [predicted[key]["parked_bytes"] for predicted in predictions]
        assert re.findall(r"\d+\.\d+", line) == [f"{num_bytes / GIB:.1f}" for num_bytes in expected]
    parked = predictions[-1]["park"]
    if parked["peak_phase"] == "text encoder":
        assert f"the text encoder is alone on the GPU, with {parked['phases']['text encoder'] / GIB:.1f} GiB" in text
    else:
        assert parked["peak_phase"] == "training"
    if mode == "lora":
        assert f"weights ({parked['by_category']['weights'] / GIB:.1f} GiB)" in text
        num_trained = sum(math.prod(shape) for shape, _ in forecast.parameters.values())
        # The file is in bf16; a checkpoint has fp32 and two moments.
        disk = f"takes {2 * num_trained / 1e9:.2f} GB of disk, a checkpoint {12 * num_trained / 1e9:.1f} GB."
        assert disk in flowing(text)
