import os
import pathlib
import subprocess
import sys

import pytest


REPO = pathlib.Path(__file__).parents[1]


def run_script(*arguments, check=True, **kwargs):
    """Run a script of this repository as a user would; return the finished process with its output as text."""
    # One thread: tiny models gain nothing from more, and threads that wait for each other lose a lot under load.
    settings = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **settings, **kwargs.pop("env", {})}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, **kwargs)
    if check and done.returncode:
        raise AssertionError(f"exit code {done.returncode} of {' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done


@pytest.fixture(scope="session")
def script():
    """`run_script`, for tests that launch the command line."""
    return run_script


@pytest.fixture(scope="session")
def tiny_qwen_image(tmp_path_factory):
    """Folder of a complete tiny Qwen-Image pipeline."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen-image"
    run_script("scripts/make_tiny_model.py", "--family", "qwen_image", "--output", folder)
    return folder


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """Folder of five photographs with captions in sidecar files."""
    from PIL import Image
    from skimage import data

    folder = tmp_path_factory.mktemp("photos")
    captions = {
        "astronaut": "an astronaut in an orange suit before a flag",
        "chelsea": "a tabby cat",
        "coffee": "a cup of coffee on a wooden table",
        "rocket": "a rocket on its pad at night",
        "hubble_deep_field": "galaxies",
    }
    for name, caption in captions.items():
        Image.fromarray(getattr(data, name)()).resize((96, 80)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(caption)
    return folder
