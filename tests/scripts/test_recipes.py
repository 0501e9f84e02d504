"""Every shipped recipe is run by bash, with an `accelerate` that only writes down its arguments, and these are parsed.

The reference is the parser of the training scripts themselves: what they would refuse, or read otherwise than the
recipe says, fails here.
"""

import ast
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from training.arguments import parse_args
from training.errors import RefusedError
from training.optimizers import find_optimizer


ROOT = pathlib.Path(__file__).parents[2]
SHELL_SCRIPTS = sorted(path.relative_to(ROOT) for path in (ROOT / "scripts").rglob("*.sh"))
RECIPES = [path for path in SHELL_SCRIPTS if path.parts[1] == "qwen_image"]
ON = "  --use_gradient_checkpointing \\\n"
OFFLOAD_OFF = "  # --use_gradient_checkpointing_offload \\\n"
OFFLOAD_ON = "  --use_gradient_checkpointing_offload \\\n"

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
    shutil.copytree(ROOT / "scripts" / "qwen_image", root / "scripts" / "qwen_image")
    write_stub(tmp_path / "bin")
    return root


def run_recipe(checkout, recipe, *flags, **environment):
    """Run a recipe of `checkout` from another folder; return the finished process and the recorded command line."""
    record = checkout.parent / "record"
    shutil.rmtree(record, ignore_errors=True)
    record.mkdir()
    inherited = {key: value for key, value in os.environ.items() if key not in ("DATASET_PATH", "OUTPUT_DIR")}
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
    return parse_args(flags, description="", values=ast.literal_eval(assigned["FAMILY"]))


def test_the_four_recipes_are_found():
    assert [str(path.relative_to("scripts/qwen_image")) for path in RECIPES] == [
        "full/Qwen-Image-2512.sh",
        "full/Qwen-Image.sh",
        "lora/Qwen-Image-2512.sh",
        "lora/Qwen-Image.sh",
    ]


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=str)
def test_bash_can_read_it(script):
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_recipe_parses_and_means_what_its_path_says(recipe, checkout):
    done, command = run_recipe(checkout, recipe)
    assert done.returncode == 0
    config, training_script, flags = split_command(command)
    assert (ROOT / config).is_file()
    args = parse(training_script, flags)

    family, mode, model = recipe.parts[1], recipe.parts[2], recipe.stem
    assert training_script == f"train_{family}.py"
    assert args.training_mode == mode
    assert args.pretrained_model_name_or_path == f"Qwen/{model}"
    assert args.dataset_path == "data/my_pictures"
    assert args.output_dir == f"outputs/{model}-{mode}"
    assert args.use_gradient_checkpointing and not args.use_gradient_checkpointing_offload
    # Behind the commented line, so bash has read on.
    assert args.checkpointing_steps and args.checkpoints_total_limit
    if mode == "lora":
        assert (args.height, args.width, args.train_batch_size) == (1024, 1024, 1)  # those of the header's figures
        assert (args.lora_rank, args.learning_rate, args.optimizer) == (32, 1e-4, "adamw")
    else:
        assert (args.height, args.width, args.train_batch_size) == (1328, 1328, 4)
        assert (args.learning_rate, args.optimizer) == (1e-5, "adamw_8bit")
    find_optimizer(args)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_offload_is_one_comment_sign_away(recipe, checkout):
    _, command = run_recipe(checkout, recipe)
    text = (checkout / recipe).read_text()
    assert text.count(ON + OFFLOAD_OFF) == 1, "the commented line stands directly below the switch"

    (checkout / recipe).write_text(text.replace(OFFLOAD_OFF, OFFLOAD_ON))
    done, offloading_command = run_recipe(checkout, recipe)
    assert done.returncode == 0
    position = command.index("--use_gradient_checkpointing") + 1
    assert offloading_command == command[:position] + ["--use_gradient_checkpointing_offload"] + command[position:]
    _, training_script, flags = split_command(offloading_command)
    args = parse(training_script, flags)
    assert args.use_gradient_checkpointing and args.use_gradient_checkpointing_offload


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_environment_and_further_flags_win(recipe, checkout):
    further = ["--max_train_steps", "7", "--height", "512", "--width", "768"]
    _, command = run_recipe(checkout, recipe, *further, DATASET_PATH="data/my pets", OUTPUT_DIR="outputs/a b")
    _, training_script, flags = split_command(command)
    args = parse(training_script, flags)
    assert (args.dataset_path, args.output_dir) == ("data/my pets", "outputs/a b")
    assert (args.max_train_steps, args.height, args.width) == (7, 512, 768)

    _, command = run_recipe(checkout, recipe, "--use_gradient_checkpointing_ofload")
    with pytest.raises(RefusedError, match="--use_gradient_checkpointing_offload"):
        parse(*split_command(command)[1:])


def test_failure_of_the_run_is_the_failure_of_the_recipe(checkout):
    done, _ = run_recipe(checkout, RECIPES[0], STUB_EXIT_CODE="3")
    assert done.returncode == 3


def test_accelerate_of_the_venv_comes_first(checkout):
    # The one in PATH must not be reached: it would be another version, or none.
    (checkout.parent / "bin" / "accelerate").write_text("#!/bin/sh\nexit 9\n")
    write_stub(checkout / ".venv" / "bin")
    done, _ = run_recipe(checkout, RECIPES[0])
    assert done.returncode == 0


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_header_says_what_for_on_what_and_how_much(recipe):
    header = re.match(r"(#.*\n)+", (ROOT / recipe).read_text())[0]
    for word in ("# Goal: ", f"# Usage: bash {recipe} ", "DATASET_PATH", "OUTPUT_DIR", "# Hardware: ", "# Memory"):
        assert word in header, word
    # Until a run on a GPU has given figures, no reader may take these for such.
    assert "NOT measured on a GPU" in header


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_recipes_of_one_architecture_differ_in_the_name_only(mode):
    folder = ROOT / "scripts" / "qwen_image" / mode
    older, newer = ((folder / f"{model}.sh").read_text() for model in ("Qwen-Image", "Qwen-Image-2512"))
    assert older.replace("Qwen-Image", "Qwen-Image-2512").replace("Qwen-Image-2512-2512", "Qwen-Image-2512") == newer


def test_bytes_per_parameter_of_full_training_add_up():
    """The header's GiB follow from its bytes per parameter, and these from the dtypes that it names."""
    header = (ROOT / "scripts" / "qwen_image" / "full" / "Qwen-Image.sh").read_text()
    row = {
        name: [float(number) for number in re.findall(r"[\d.]+", re.search(rf"# +{name} +(.*)", header)[1])]
        for name in ("weights, bf16", "masters, fp32", "their gradients, fp32, at the step", "at the optimizer step")
    }
    state = [8, 2 + 2 * 4 / 256, 0]  # two fp32 moments; two of one byte with a fp32 scale per 256; next to nothing
    num_parameters = 20_430_401_088
    gib = [int(number) for number in re.search(r"# +(\d+) GiB +(\d+) GiB +(\d+) GiB", header).groups()]
    for i in range(3):
        total = row["weights, bf16"][i] + row["masters, fp32"][i] + row["their gradients, fp32, at the step"][i]
        assert total == 2 + 4 + 4
        assert row["at the optimizer step"][i] == pytest.approx(total + state[i], abs=0.01)
        assert gib[i] == round((total + state[i]) * num_parameters / 2**30)
