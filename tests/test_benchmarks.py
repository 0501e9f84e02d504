"""The benchmarks that no other test runs still run, at their smallest."""

import json
import operator
import os
import re
import subprocess
import sys

import pytest

from benchmarks import data_loading, startup
from pipelines.qwen_image import QwenImage
from training import run


@pytest.mark.slow
def test_loop_overhead(script):
    done = script("benchmarks/loop_overhead.py", "--rounds", "1", "--steps", "5", timeout=300)
    assert re.search(r"bare loop +[0-9.]+ ms per step\ntraining loop +[0-9.]+ ms per step \([+-]", done.stdout)


@pytest.mark.slow
def test_data_loading(script):
    flags = ["--num_steps", "5", "--num_items", "4", "--dataset_rows", "50"]
    done = script("benchmarks/data_loading.py", *flags, timeout=300)
    assert len(re.findall(r"^(?:Qwen|Wan).* [0-9.]+% ", done.stdout, re.MULTILINE)) == 12
    assert 'second start {"rows": 50' in done.stdout


def test_the_start_of_a_run_over_rows(tmp_path, capsys):
    data_loading.make_rows(tmp_path, 5)
    data_loading.time_start(tmp_path)
    assert json.loads(capsys.readouterr().out)["rows"] == 5


def test_every_phase_of_the_startup_is_a_function():
    for name in (name for names in startup.PHASES.values() for name in names):
        owner = run if hasattr(run, name.split(".")[0]) else QwenImage
        assert callable(operator.attrgetter(name)(owner)), name


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("torch.optim.SGD", marks=pytest.mark.slow)])
def test_a_run_imports_nothing_that_it_may_not_need(optimizer, tmp_path):
    """Clips and figures have libraries of their own, and only an optimizer of the user's own may use torch's compiler,
    which bitsandbytes loads unless told not to.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    flags = [
        "--pretrained_model_name_or_path",
        tmp_path / "none",
        "--dataset_path",
        tmp_path,
        "--optimizer",
        optimizer,
    ]
    command = [sys.executable, "-X", "importtime", "train_qwen_image.py", *flags, "--output_dir", tmp_path / "out"]
    done = subprocess.run(list(map(str, command)), cwd=startup.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "there is no such folder" in done.stderr
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "diffusers" in imported and not imported & {"matplotlib", "av", "datasets"}
    assert ("torch._inductor.compile_fx" in imported) == (optimizer != "adamw")


@pytest.mark.slow
def test_startup(script):
    done = script(
        "benchmarks/startup.py", "--rounds", "1", "--other", 'test -d "$MODEL" -a -d "$DATASET"', timeout=500
    )
    rows = dict(re.findall(r"^([a-z][a-z, ]*?) +[0-9.]+ +([0-9.]+)$", done.stdout, re.MULTILINE))
    assert {"ours", "the other", "imports", "forecast", "training", "in all"} <= set(rows)
    phases = [float(rows[name]) for name in rows if name not in ("ours", "the other", "in all")]
    assert sum(phases) == pytest.approx(float(rows["in all"]), abs=0.1)
    assert len(done.stdout.splitlines()[-1].split()) == len("steps, seconds of the processor:".split()) + 12


def test_startup_ends_with_a_command_that_fails(tmp_path):
    with pytest.raises(SystemExit, match="exit code 3 of exit 3"):
        startup.measure("exit 3", {})
