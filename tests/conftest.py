import collections
import fcntl
import functools
import multiprocessing
import os
import pathlib
import re
import traceback

import pytest

from tests import runs


# Read at import: a name that is no folder is not to be looked for on the network, with all its retries.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def script():
    """`runs.run_script`, for tests of what a new interpreter does."""
    return runs.run_script


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory, shared_folder):
    """A `runs.ForkServer`, for all other tests that launch the command line."""
    server = runs.ForkServer(tmp_path_factory.mktemp("logs"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def on_two_processes(fork_server):
    """Function that runs a script on two CPU processes, under DDP or, with its config, DeepSpeed with its launcher."""

    def run(*arguments, accelerate_config=None):
        if accelerate_config is None:
            return fork_server.run(*arguments, num_processes=2)
        command = ["accelerate.commands.launch", "--num_processes", "2", "--config_file", accelerate_config]
        command += ["--main_process_port", runs.free_port()]
        return runs.run_script("-m", *command, *arguments, env={"DS_ACCELERATOR": "cpu"}, timeout=400)

    return run


@pytest.fixture
def on_two_ranks(tmp_path):
    """Function that calls `work(rank)` in two forked processes of one process group and returns what both return."""

    def begin(work, rank, connection):
        import torch.distributed

        rendezvous = f"file://{tmp_path}/rendezvous"
        torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
        try:
            connection.send((work(rank), None))
        except BaseException:
            connection.send((None, traceback.format_exc()))

    def run(work):
        fork, ranks = multiprocessing.get_context("fork"), []
        for rank in range(2):
            here, there = fork.Pipe(duplex=False)
            process = fork.Process(target=begin, args=(work, rank, there), daemon=True)
            process.start()
            there.close()
            ranks.append((process, here))
        results = [connection.recv() for _, connection in ranks]
        for process, _ in ranks:
            process.join()
        assert not any(error for _, error in results), "\n".join(error or "" for _, error in results)
        return [value for value, _ in results]

    return run


@pytest.fixture(scope="session", autouse=True)
def shared_folder(tmp_path_factory):
    """Folder that all workers of this session have in common, with the forecasts that runs remember."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "shared"
    (folder / "forecasts").mkdir(parents=True, exist_ok=True)
    os.environ["FORECASTS"] = str(folder / "forecasts")
    return folder


@pytest.fixture(scope="session")
def tiny_model(fork_server, shared_folder):
    """Function from a family to the folder of its complete tiny pipeline, which is made once for all workers."""

    @functools.cache
    def make(family):
        folder = shared_folder / "models" / family
        with open(shared_folder / f"{family}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                fork_server.run("scripts/make_tiny_model.py", "--family", family, "--output", folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_qwen_image(tiny_model):
    """Folder of a complete tiny Qwen-Image pipeline."""
    return tiny_model("qwen_image")


@pytest.fixture
def run_model_card(tmp_path, monkeypatch):
    """Function that runs the code of the model card in `folder`, as its reader would, and returns where it did so."""

    def run(folder, base_model):
        from PIL import Image

        code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
        assert code.count("FOLDER_OF_THE_BASE_MODEL") == 1 and code.count("num_inference_steps") == 0
        code = code.replace("FOLDER_OF_THE_BASE_MODEL", str(base_model)).replace("FOLDER_OF_THIS_FILE", str(folder))
        monkeypatch.chdir(tmp_path)
        for name in ("IMAGE.png", "LAST_IMAGE.png"):
            Image.new("RGB", (64, 64), "gray").save(name)
        exec(code.replace("(prompt=", "(num_inference_steps=2, prompt="), {})
        return tmp_path

    return run


@pytest.fixture(scope="session")
def clips(tmp_path_factory):
    """Folder of three clips of 9 frames at 16 fps, photographs under a moving window, with captions."""
    import av
    from PIL import Image
    from skimage import data

    folder = tmp_path_factory.mktemp("clips")
    captions = {
        "astronaut": "an astronaut in an orange suit before a flag",
        "chelsea": "a tabby cat",
        "coffee": "a cup of coffee on a wooden table",
    }
    for name, caption in captions.items():
        photograph = Image.fromarray(getattr(data, name)()).resize((128, 112))
        with av.open(str(folder / f"{name}.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=16, width=96, height=80, pix_fmt="yuv420p")
            for k in range(9):
                window = photograph.crop((3 * k, 3 * k, 3 * k + 96, 3 * k + 80))
                container.mux(stream.encode(av.VideoFrame.from_image(window)))
            container.mux(stream.encode())
        (folder / f"{name}.txt").write_text(caption)
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


@pytest.fixture(scope="session")
def train(tiny_model, fork_server, request, shared_folder, tmp_path_factory):
    """Function that makes one run, on photographs or clips.

    In this process, and it returns the output folder; with `check=False` in one of its own, and it returns that.
    """
    cache = shared_folder / "cache"  # of all runs: what is encoded is not what these tests are about

    def run(family, *flags, output_dir=None, dataset=None, model=None, only=(), check=True):
        output_dir = output_dir or tmp_path_factory.mktemp("run") / "out"
        argv = ["--output_dir", output_dir, *only]
        if not only:
            argv += ["--pretrained_model_name_or_path", model or tiny_model(family), "--cache_dir", cache]
            argv += ["--dataset_path", dataset or request.getfixturevalue(runs.FAMILIES[family].data), *flags]
        if not check:
            return fork_server.run(f"{runs.FAMILIES[family].entry}.py", *argv, check=False)
        runs.run_here(family, argv)
        return output_dir

    return run


# ---------------------------------------------------------------- seconds by folder

_seconds = collections.Counter()


def pytest_runtest_logreport(report):
    """Add up the seconds of each folder; with several workers their reports come here, too."""
    _seconds[str(pathlib.PurePath(report.nodeid.split("::")[0]).parent)] += report.duration


def pytest_terminal_summary(terminalreporter):
    if _seconds:
        terminalreporter.section("seconds of computing by folder")
        for folder, seconds in _seconds.most_common():
            terminalreporter.write_line(f"{seconds:8.1f}  {folder}")
        terminalreporter.write_line(f"{sum(_seconds.values()):8.1f}  in all")
