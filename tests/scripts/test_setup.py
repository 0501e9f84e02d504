"""What scripts/setup.sh installs, with a pip that only writes down its arguments and packages that are but a name."""

import pathlib
import shutil
import subprocess
import sys

import pip
import pytest


ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def set_up(tmp_path):
    """Function from the version of torch that is installed, None for none, to the finished script and what pip got."""

    def run(torch_version):
        (tmp_path / "scripts").mkdir()
        shutil.copy(ROOT / "scripts/setup.sh", tmp_path / "scripts")
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        packages, python = tmp_path / "packages", tmp_path / ".venv/bin/python"
        packages.mkdir()
        (packages / "pip").symlink_to(pathlib.Path(pip.__file__).parent)
        if torch_version is not None:
            (packages / f"torch-{torch_version}.dist-info").mkdir()
            metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {torch_version}\n"
            (packages / f"torch-{torch_version}.dist-info/METADATA").write_text(metadata)
        python.parent.mkdir(parents=True)
        python.write_text(
            f'#!/bin/sh\nif [ "$2" = pip ]; then echo "$@" >> pip.txt; exit; fi\n'
            f'PYTHONPATH={packages} exec {sys.executable} -S "$@"\n'
        )
        python.chmod(0o755)
        done = subprocess.run(["bash", "scripts/setup.sh"], cwd=tmp_path, capture_output=True, text=True)
        return done, (tmp_path / "pip.txt").read_text() if (tmp_path / "pip.txt").exists() else ""

    return run


@pytest.mark.parametrize("installed, kept", [(None, "2.13.0"), ("2.14.1+cu130", "2.14.1+cu130"), ("2.13.0", "2.13.0")])
def test_a_torch_in_the_range_stays(installed, kept, set_up, tmp_path):
    done, calls = set_up(installed)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".venv/torch.txt").read_text() == f"torch=={kept}\n"
    assert "-r .venv/torch.txt\n" in calls and "-r .venv/requirements.txt -c .venv/torch.txt\n" in calls
    assert len(list((tmp_path / ".venv").glob(".installed-*"))) == 1
    assert "accelerate>=" in (tmp_path / ".venv/requirements.txt").read_text()


@pytest.mark.parametrize("version", ["2.12.1", "3.0.0+cpu"])
def test_another_torch_is_named(version, set_up, tmp_path):
    done, calls = set_up(version)
    assert done.returncode == 2 and not calls
    assert done.stderr.startswith(f"error: .venv has torch {version}, and torch") and done.stderr.count("\n") == 1
    assert not list((tmp_path / ".venv").glob(".installed-*"))
