"""The package `blockwise`: what it is made of, and that it needs torch alone."""

import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest


ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Imports all modules of the package, and trains a step with what they offer.
PROGRAM = """
import importlib, pathlib, sys
sys.path[:0] = sys.argv[1:]
import warnings
warnings.simplefilter('ignore')
import blockwise
assert not {'torch', 'blockwise.estimate'} & sys.modules.keys(), 'nothing is imported before it is used'
folder = pathlib.Path(blockwise.__file__).parent
assert folder.parent == pathlib.Path(sys.argv[1])
for path in folder.glob('*.py'):
    importlib.import_module(f'blockwise.{path.stem}')
for name in blockwise.__all__:
    assert getattr(blockwise, name) is not None
promised = {'gradient_checkpoint_forward', 'MemoryPlan', 'StepProfile', 'install_plan', 'block_lists', 'counters'}
assert promised <= set(blockwise.__all__)

import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = lambda: (torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512))
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*layers()) for _ in range(4))
    def forward(self, hidden_states):
        for block in self.blocks:
            hidden_states = blockwise.gradient_checkpoint_forward(block, False, False, hidden_states)
        return hidden_states.sum()

model, lists = Model(), {'blocks': 4}
with torch.device('meta'):
    small = blockwise.shrink(Model(), lists)
profile = blockwise.StepProfile(small, lambda model: lambda: model(torch.empty(1024, 512)), device_type='cpu')
peaks = [profile.peak(blockwise.MemoryPlan.uniform(lists, mode)).num_bytes for mode in ('keep', 'recompute', 'park')]
assert peaks[0] > peaks[1] > peaks[2] and blockwise.MemoryPlan.from_budget(lists, peaks[1], profile.costs)
plan = blockwise.MemoryPlan.uniform(lists, 'park')
with blockwise.MemoryLog() as log, blockwise.install_plan(model, plan):
    log.begin(torch.device('cpu'))
    model(torch.randn(1024, 512) * 1).backward()
    log.point('step')
assert 'step' in log.table()
assert blockwise.counters()['parked_tensors'] == 4 and model.blocks[0][0].weight.grad is not None
for name in ('accelerate', 'diffusers', 'psutil', 'matplotlib', 'numpy'):
    assert importlib.util.find_spec(name) is None, f'{name} is here'
print('trained')
"""


def required_by(name, found=()):
    """Return the distributions that one requires, and their own, with itself."""
    found = {*found, name}
    for requirement in importlib.metadata.requires(name) or ():
        required = re.match(r"[\w.-]+", requirement)[0]
        if ";" not in requirement and required not in found:
            found |= required_by(required, found)
    return found


def train_alone(folder, tmp_path):
    """Train in a process that finds nothing but the package in `folder`, torch, and what torch requires."""
    alone = tmp_path / "torch alone"
    alone.mkdir()
    for name in required_by("torch"):
        distribution = importlib.metadata.distribution(name)
        for top in {path.parts[0] for path in distribution.files if ".." not in path.parts} - {"__pycache__"}:
            if not (alone / top).exists():
                (alone / top).symlink_to(distribution.locate_file(top))
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(folder), str(alone)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "trained\n", done.stderr


def test_the_package_needs_torch_alone(tmp_path):
    assert [re.match(r"\w+", name)[0] for name in PROJECT["project"]["dependencies"]] == ["torch"]
    assert PROJECT["tool"]["setuptools"]["packages"] == ["blockwise"]
    assert any(name.startswith("diffusers") for name in PROJECT["project"]["optional-dependencies"]["train"])
    train_alone(ROOT, tmp_path)


def test_an_unknown_name_is_an_attribute_error():
    import blockwise

    with pytest.raises(AttributeError, match="has no attribute 'checkpoint'"):
        _ = blockwise.checkpoint


@pytest.mark.slow
def test_the_package_is_built_and_installed(tmp_path):
    """With what is here: nothing is fetched."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    shutil.copytree(ROOT / "blockwise", source / "blockwise", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", str(site), str(source)], check=True)
    found = {path.name for path in site.iterdir()}
    assert found == {"blockwise", f"blockwise-{PROJECT['project']['version']}.dist-info"}
    (distribution,) = importlib.metadata.distributions(path=[str(site)])
    needed = [requirement for requirement in distribution.requires if "extra ==" not in requirement]
    assert len(needed) == 1 and needed[0].startswith("torch")
    train_alone(site, tmp_path)
