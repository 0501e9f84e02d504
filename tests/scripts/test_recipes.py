"""Every shipped recipe is run by bash, with an `accelerate` that only writes down its arguments, and these are parsed.

The reference is the parser of the training scripts themselves, and for video what `WanVideo` makes of the
published configs: what a run would refuse, or read otherwise than the recipe says, fails here.
"""

import ast
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import pytest
import torch

from benchmarks.forecasts import GIB, MODELS, describe_size, dry_run, memory_row, size_class
from blockwise import offload
from pipelines.wan_video import find_variant
from runtime.errors import RefusedError
from training.arguments import parse_args, resolve_for_model
from training.optimizers import find_optimizer


ROOT = pathlib.Path(__file__).parents[2]
SHELL_SCRIPTS = sorted(path.relative_to(ROOT) for path in (ROOT / "scripts").rglob("*.sh"))
RECIPES = [path for path in SHELL_SCRIPTS if len(path.parts) == 4]
FULL_RECIPES = [path for path in RECIPES if path.parts[2] == "full"]
ON = "  --use_gradient_checkpointing \\\n"
OFFLOAD_OFF = "  # --use_gradient_checkpointing_offload \\\n"
OFFLOAD_ON = "  --use_gradient_checkpointing_offload \\\n"

HUB_IDS = {"qwen_image": "Qwen/{}", "wan_video": "Wan-AI/{}-Diffusers"}
DATASETS = {"qwen_image": "data/my_images", "wan_video": "data/my_clips"}
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
echo $$ > "$RECORD/pid"
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
    shutil.copy(ROOT / "scripts" / "launch.sh", root / "scripts")
    write_stub(tmp_path / "bin")
    return root


def run_recipe(checkout, recipe, *flags, **environment):
    """Run a recipe of `checkout` from another folder; return the finished process and the recorded command line."""
    record = checkout.parent / "record"
    shutil.rmtree(record, ignore_errors=True)
    record.mkdir()
    of_recipes = ("DATASET_PATH", "OUTPUT_DIR", "EXPERT", "LAUNCH")
    inherited = {key: value for key, value in os.environ.items() if key not in of_recipes}
    path = f"{checkout.parent / 'bin'}{os.pathsep}{inherited['PATH']}"
    process = subprocess.Popen(
        ["bash", str(checkout / recipe), *flags],
        cwd=checkout.parent,
        env={**inherited, "PATH": path, "RECORD": str(record), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # "command not found" is what bash says when a comment has cut a command in two.
    assert process.communicate()[0] == ""
    assert (record / "folder").read_text().strip() == str(checkout)
    # The launcher has replaced the shell: a signal to the recipe reaches it.
    assert int((record / "pid").read_text()) == process.pid
    return process, (record / "arguments").read_text().split("\0")[:-1]


def split_command(command):
    """Return the config file, the training script and the flags of `accelerate launch`."""
    assert command[:3] == ["launch", "--quiet", "--config_file"]
    return command[3], command[4], command[5:]


def parse(training_script, flags):
    tree = ast.parse((ROOT / training_script).read_text())
    assigned = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    family = ast.literal_eval(assigned["VALUES"])
    depends_on_model = training_script == "train_wan_video.py"
    args = parse_args(flags, description="", values=family, resolve=not depends_on_model)
    if depends_on_model:
        resolve_for_model(args, wan_values(args.pretrained_model_name_or_path))
    return args


def wan_values(hub_id):
    """Return what training takes from a model of the hub, by what its published configs state."""
    two_images, own_timesteps = "FLF2V" in hub_id, "TI2V" in hub_id
    channels = 48 if own_timesteps else 16
    conditions = 20 if two_images or "-I2V-" in hub_id else 0
    variant = find_variant(
        {"boundary_ratio": 0.9 if "A14B" in hub_id else None, "expand_timesteps": own_timesteps},
        {
            "patch_size": [1, 2, 2],
            "in_channels": channels + conditions,
            "out_channels": channels,
            "pos_embed_seq_len": 514 if two_images else None,
        },
        {"scale_factor_spatial": 16 if own_timesteps else 8},
    )
    return dataclasses.asdict(variant) | {"experts": variant.experts, "lora_target_modules": "to_q"}


def header(recipe):
    return re.match(r"(#.*\n)+", (ROOT / recipe).read_text())[0]


# ---------------------------------------------------------------- what a recipe runs


def test_there_is_a_recipe_for_every_model_and_mode():
    families = {"Qwen": "qwen_image", "Wan2": "wan_video"}
    expected = {f"scripts/{families[m[:4]]}/{mode}/{m}.sh" for m in NUM_PARAMETERS for mode in ("lora", "full")}
    assert {str(path) for path in RECIPES} == expected


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=str)
def test_bash_can_read_it_and_anyone_run_it(script):
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    assert os.access(ROOT / script, os.X_OK) == (script.name != "launch.sh"), "that one is sourced"


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
    assert "Run it twice, once for each expert: EXPERT=high_noise" in header(recipe)
    _, command = run_recipe(checkout, recipe, EXPERT="low_noise")
    args = parse(*split_command(command)[1:])
    assert (args.expert, args.output_dir) == ("low_noise", f"outputs/{model}-full-low_noise")
    _, command = run_recipe(checkout, recipe, EXPERT="both")
    with pytest.raises(RefusedError, match="--expert is both; allowed with --training_mode full are high_noise, low_"):
        parse(*split_command(command)[1:])


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_ti2v_recipe_trains_t2v_as_it_says(mode, checkout):
    recipe = f"scripts/wan_video/{mode}/Wan2.2-TI2V-5B.sh"
    assert "  --task i2v  # --task t2v trains from text alone" in (ROOT / recipe).read_text()
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


def test_several_gpus_are_one_variable_away(checkout):
    """As scripts/launch.sh says."""
    launch = re.search(r'LAUNCH="(accelerate launch .*)" bash RECIPE', (ROOT / "scripts" / "launch.sh").read_text())[1]
    _, command = run_recipe(checkout, RECIPES[0], LAUNCH=launch)
    assert command[:4] == ["launch", "--config_file", "accelerate_configs/multi_gpu.yaml", "train_qwen_image.py"]
    assert (ROOT / command[2]).is_file()


# ---------------------------------------------------------------- how a recipe ends


QWEN = "scripts/qwen_image/lora/Qwen-Image.sh"


def start_here(recipe, *flags, **environment):
    """Start a recipe of this checkout, with what it says in one pipe."""
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(
        ["bash", str(ROOT / recipe), *map(str, flags)],
        env={**os.environ, **settings, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_python_as_launcher_gives_the_exact_code_of_a_refusal(tmp_path):
    process = start_here(QWEN, "--lora_rnk", "4", LAUNCH="python", OUTPUT_DIR=str(tmp_path / "out"))
    assert process.communicate()[0] == "error: Unknown flag --lora_rnk; the nearest is --lora_rank.\n"
    assert process.returncode == 2


def test_a_refusal_through_the_launcher_is_one_sentence(tmp_path):
    process = start_here(QWEN, "--lora_rnk", "4", OUTPUT_DIR=str(tmp_path / "out"))
    assert process.communicate()[0] == "error: Unknown flag --lora_rnk; the nearest is --lora_rank.\n"
    assert process.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(("launch", "code"), [("", -signal.SIGTERM), ("python", 3)])
def test_a_signal_ends_the_run_with_its_checkpoint(launch, code, tiny_qwen_image, photos, tmp_path):
    output_dir = tmp_path / "out"
    flags = ["--pretrained_model_name_or_path", tiny_qwen_image, "--height", "64", "--width", "64"]
    flags += ["--max_train_steps", "100000", "--logging_steps", "1"]
    process = start_here(QWEN, *flags, LAUNCH=launch, DATASET_PATH=str(photos), OUTPUT_DIR=str(output_dir))
    deadline = time.monotonic() + 120
    while not (output_dir / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=120)[0]  # until the run, too, has closed it
    assert process.returncode == code, said
    assert len(list(output_dir.glob("checkpoint-*"))) == 1, said


# ---------------------------------------------------------------- what recipes repeat of each other


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("family", HUB_IDS)
def test_recipes_of_one_family_and_mode_run_the_same_code(family, mode):
    """Each is copied alone, so what they share stands in all of them: there it is to stay the same."""
    may_differ = ("pretrained_model_name_or_path", "output_dir", "height", "width", "num_frames", "fps", "task")
    may_differ += ("expert", "use_gradient_checkpointing_offload")
    shared = set()
    for path in (ROOT / "scripts" / family / mode).glob("*.sh"):
        text = re.sub(r"  #(?! --).*", "", path.read_text())  # notes behind a flag
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        flags = [line.split()[0].removeprefix("--") if line.split() else "" for line in lines]
        kept = [line for line, flag in zip(lines, flags, strict=True) if flag not in may_differ]
        shared.add("\n".join(line for line in kept if line != "EXPERT=${EXPERT:-high_noise}"))
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
            text = re.sub(r"\d+(\.\d+)?", "N", text.replace(OFFLOAD_OFF, OFFLOAD_ON))
        texts.append(text)
    assert texts[0] == texts[1]


# ---------------------------------------------------------------- what a header says, and docs/memory.md


def memory_page():
    """Return the rows of the table in docs/memory.md, by their first cell."""
    lines = (ROOT / "docs" / "memory.md").read_text().splitlines()
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith(("| lora/", "| full/"))}


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_header_says_what_for_how_and_how_much(recipe, checkout):
    text = (ROOT / recipe).read_text()
    assert len(text.splitlines()) <= 34
    goal, usage, *more, memory = header(recipe).splitlines()[1:]
    assert goal.startswith("# Goal: ") and len(more) <= 1
    assert usage.startswith(f"# Usage: DATASET_PATH=FOLDER bash {recipe} [")

    args = parse(*split_command(run_recipe(checkout, recipe)[1])[1:])
    size = describe_size((args.width, args.height, getattr(args, "num_frames", 1)))
    label = f"{args.training_mode}/{recipe.stem.removesuffix('-2512')}, {size}"
    cells = memory_page()[label].strip("| ").split(" | ")[1:]
    keep, recompute, park, _, others = cells[:5]
    own = park if args.use_gradient_checkpointing_offload else recompute
    gigabytes = size_class(max(float(own), float(others)) * GIB)
    assert memory == (
        f"# Memory: {keep} GiB with neither flag, {recompute} checkpointing, {park} offload: {gigabytes} GB as below. "
        "Forecast, docs/memory.md."
    )


def test_bytes_per_parameter_of_full_training_add_up():
    """The totals in docs/memory.md follow from the dtypes that it names."""
    text = (ROOT / "docs" / "memory.md").read_text()

    def row(name):
        cells = re.search(rf"^\| {re.escape(name)} \| (.*) \|$", text, re.MULTILINE)[1].split(" | ")
        return [float(cell) for cell in cells]

    parts = ("weights, bf16", "masters, fp32", "their gradients, fp32, at the step")
    assert [row(name) for name in parts] == [[2] * 3, [4] * 3, [4] * 3]
    state = [8, 2 + 2 * 4 / 256, 0]  # two fp32 moments; two of one byte with a fp32 scale per 256; next to nothing
    for i in range(3):
        assert row("optimizer state")[i] == pytest.approx(state[i], abs=0.01)
        assert row("in all")[i] == pytest.approx(10 + state[i], abs=0.01)


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(label, marks=[] if label == "lora/Wan2.1-T2V-1.3B, 832x480x81" else pytest.mark.slow)
        for label in memory_page()
    ],
)
def test_the_page_of_memory_is_what_the_benchmark_forecasts(label, request):
    request.addfinalizer(lambda: offload.set_limit(None))  # a dry run sets one
    mode, model, size = re.fullmatch(r"(\w+)/(.*), (.*)", label).groups()
    size = tuple(map(int, size.split("x")))
    size = size if len(size) == 3 else (*size, 1)
    assert memory_row(model, size, mode) == memory_page()[label]
    forecast = dry_run(model, size, mode)
    assert sum(parameter.numel() for parameter in forecast.family.skeleton.parameters()) == NUM_PARAMETERS[model]


def test_the_page_of_memory_has_every_recipe():
    """At each size of the benchmark, which has those of the recipes."""
    expected = {
        f"{m}/{name}, {describe_size(size)}" for name in MODELS for size in MODELS[name][2] for m in ("lora", "full")
    }
    assert set(memory_page()) == expected
