"""What is committed: sources, and nothing that a run left or that belongs to one machine."""

import pathlib
import re
import subprocess

import pytest


ROOT = pathlib.Path(__file__).parents[1]

# What runs leave in their folders; see the README.
OUTPUTS = re.compile(
    r"(^|/)(out|outputs|wandb|checkpoint-\d+|step-\d+)/|(^|/)((run|dry_run)\.json|(metrics|dataset)\.jsonl)$"
    r"|(^|/)(contact_sheet|memory|metrics|grid|prompt-\d+)\.png$|\.(safetensors|pt|ckpt|log|mp4)$|(^|/)events\.out"
)
# Folders of one machine; /home/you and the like are examples.
MACHINE = re.compile(r"(?<![\w.])/(work|root|mnt)/\w|(?<![\w.])/home/(?!you\b|user\b|me\b)\w")


@pytest.fixture(scope="module")
def committed():
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in names.split("\0") if (ROOT / name).is_file()]


def test_no_output_of_a_run(committed):
    assert [name for name in committed if OUTPUTS.search(name)] == []
    left = (
        "out/real/run.json",
        "a/metrics.jsonl",
        "checkpoint-2/state.json",
        "x.safetensors",
        "validation/step-1/grid.png",
    )
    assert all(map(OUTPUTS.search, left)), "or the test could not fail"


def test_no_path_of_a_machine(committed):
    assert [name for name in committed if MACHINE.search((ROOT / name).read_text(errors="replace"))] == []
    machine = "/".join(["see ", "root", "x"])  # not as one string, which would be found here
    assert MACHINE.search(machine) and not MACHINE.search("see /home/you/x and a/work/x")
