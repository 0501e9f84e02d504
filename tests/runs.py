"""Training runs for tests: the table of families, one run in this process, and processes that need no imports."""

import collections
import contextlib
import functools
import gc
import hashlib
import importlib
import itertools
import json
import os
import pathlib
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest import mock


REPO = pathlib.Path(__file__).parents[1]

# One thread: tiny models gain nothing from more, and threads that wait for each other lose a lot under load.
SETTINGS = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

# Of metrics.jsonl: what is measured, and differs between two runs of the same flags.
MEASURED = ("seconds", "device_peak_bytes", "device_reserved_bytes", "offloaded_bytes", "host_rss_bytes")

LORA_FILE = "pytorch_lora_weights.safetensors"

# What each family of scripts/make_tiny_model.py is trained with: the entry, the fixture with the data, and a size.
Family = collections.namedtuple("Family", ["entry", "data", "size"])
_IMAGE = Family("train_qwen_image", "photos", ["--height", "64", "--width", "80"])
_VIDEO = Family("train_wan_video", "clips", ["--height", "64", "--width", "64", "--num_frames", "5"])
_WAN = ("wan_t2v", "wan_i2v", "wan_flf2v", "wan_ti2v", "wan_t2v_a14b", "wan_i2v_a14b")
FAMILIES = {"qwen_image": _IMAGE, **dict.fromkeys(_WAN, _VIDEO)}


def entry_of(family):
    """Return the module of the command line that trains a family."""
    return importlib.import_module(FAMILIES[family].entry)


def parse(family, argv):
    """Return the arguments that the entry of a family makes of a command line."""
    from training.arguments import parse_args

    return parse_args(
        [*map(str, argv)], description="", values=entry_of(family).VALUES, resolve=FAMILIES[family] is _IMAGE
    )


def run_here(family, argv, *, figures=False):
    """Make a run in this process, as its script would after its imports; return what `main` returns.

    Args:
        family (`str`), argv (`list`)
        figures (`bool`): Draw them, too; else the files that show memory and metrics are empty.
    """
    main = entry_of(family).main
    with quick_run(figures=figures, of_similar_steps=True) as log:
        return main(parse(family, argv), log)


@contextlib.contextmanager
def quick_run(*, figures=False, of_similar_steps=False):
    """Context for a run in this process, with its `MemoryLog`; see `run_here` and `forecasts_are_remembered`."""
    from blockwise.log import MemoryLog

    _freeze_imports()
    remembered, drawn = forecasts_are_remembered(of_similar_steps=of_similar_steps), contextlib.nullcontext()
    with MemoryLog() as log, remembered, drawn if figures else _without_figures():
        yield log


@functools.cache
def _freeze_imports():
    """Let each later search for garbage leave out what was imported: a run makes several."""
    gc.collect()
    gc.freeze()


# The flags on which the memory of a step depends most, and the others, the plan apart.
_MOST = ("pretrained_model_name_or_path", "revision", "transformer_path", "task", "training_mode", "mixed_precision")
_OTHERS = ("lora_rank", "lora_dropout", "loss_weighting")
_remembered = {}


def forecasts_are_remembered(*, of_similar_steps=False):
    """Context in which a forecast takes what any run of this session has found out of the same step.

    Most of the time of a tiny run would go into that. Runs of which forecasts are compared are made without this.

    Args:
        of_similar_steps (`bool`): Also of steps with another rank or batch, where nobody looks at the forecast.
    """
    from blockwise import offload
    from blockwise.estimate import StepProfile
    from training.forecast import RunForecast

    encode, profile = RunForecast._encode, vars(RunForecast)["profile"].func

    def remember(key, make):
        file = pathlib.Path(os.environ["FORECASTS"]) / f"{hashlib.sha256(key.encode()).hexdigest()}.pickle"
        if key not in _remembered and file.exists():
            _remembered[key] = pickle.loads(file.read_bytes())
        if key not in _remembered:
            _remembered[key] = make()
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(_remembered[key]))
            part.replace(file)
        return _remembered[key]

    def remembered_encode(self, size, *phases):
        model = [getattr(self.args, name, None) for name in ("pretrained_model_name_or_path", "revision", "task")]
        key = model, size, phases, max(self.caption_tokens.values()), self.launch.device_type
        return remember(repr(key), lambda: encode(self, size, *phases))

    class Known(StepProfile):
        def __init__(self, forecast, key):
            self.key, self.real = key, functools.cache(lambda: profile(forecast))
            names = ("_lists", "_names", "_counterparts")
            blocks = remember(f"{key} blocks", lambda: [getattr(self.real(), name) for name in names])
            vars(self).update(zip(names, blocks, strict=True))

        def _recording(self, activations):
            return remember(
                f"{self.key} {activations} {offload.MIN_PARKED_BYTES}", lambda: self.real()._recording(activations)
            )

        @property
        def _inference(self):
            return remember(f"{self.key} inference", lambda: self.real()._inference)

    def remembered_profile(self):
        key = [self.launch.device_type, self.family.block_lists]
        key += [getattr(self.args, name, None) for name in _MOST]
        if not of_similar_steps:
            key += [getattr(self.args, name, None) for name in _OTHERS]
            key += [self.names, self._heaviest, len(set(self.caption_tokens.values()))]
        return vars(self).setdefault("_known", Known(self, repr(key)))

    return mock.patch.multiple(RunForecast, _encode=remembered_encode, profile=property(remembered_profile))


def _without_figures():
    from matplotlib.figure import Figure

    def savefig(figure, target, **kwargs):
        pathlib.Path(target).touch()

    return mock.patch.object(Figure, "savefig", savefig)


# ---------------------------------------------------------------- what a run leaves


def read_lines(file):
    """Return the objects of a file with one JSON object per line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def metrics(folder):
    """Return the lines of metrics.jsonl, without what is measured."""
    return [
        {key: value for key, value in line.items() if key not in MEASURED}
        for line in read_lines(folder / "metrics.jsonl")
    ]


def records(folder):
    """Return the lines of dataset.jsonl."""
    return read_lines(folder / "dataset.jsonl")


def lora_files(folder):
    """Return the exported LoRA files by name, with their bytes."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob(LORA_FILE)}


# ---------------------------------------------------------------- processes


def run_script(*arguments, check=True, **kwargs):
    """Run a script of this repository in an interpreter of its own; return the process with its output as text."""
    environment = {**os.environ, **SETTINGS, **kwargs.pop("env", {})}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, **kwargs)
    if check and done.returncode:
        raise AssertionError(f"exit code {done.returncode} of {' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done


def free_port():
    """Return a port that nothing listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


class Process:
    """A process that a `ForkServer` has started.

    Args:
        ask (`Callable`): Asks the server that has forked it.
        pid (`int`)
        log (`pathlib.Path`): What it prints.
    """

    def __init__(self, ask, pid, log):
        self.ask, self.pid, self.log, self.code = ask, pid, log, None

    def poll(self):
        """Return the exit code, negative for a signal, or None while it runs."""
        if self.code is None:
            self.code = self.ask({"poll": self.pid})
        return self.code

    def until(self, condition, timeout=120, pause=0.001):
        """Wait until `condition()` holds or the process has ended; return whether it still runs."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if condition():
                return True
            assert time.monotonic() < end, f"nothing happened:\n{self.said}"
            time.sleep(pause)
        return False

    def wait(self, timeout=120):
        """Return the exit code at the end."""
        self.until(lambda: False, timeout, pause=0.02)  # each look costs time that the process needs
        return self.code

    def signal(self, number):
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    @property
    def said(self):
        """All that it printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def error(self):
        """Its only error, a sentence."""
        assert "Traceback" not in self.said, self.said
        (sentence,) = re.findall(r"error: .*", self.said)
        return sentence


class ForkServer:
    """Runs scripts in processes of their own that need not import everything again. See forked_script.py.

    Args:
        logs (`pathlib.Path`): Folder for what they print.
    """

    def __init__(self, logs):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, REPO / "tests" / "forked_script.py"]
        self.logs, self.lock, self.numbers, self.started = logs, threading.Lock(), itertools.count(), []
        self.server = subprocess.Popen(command, cwd=REPO, env={**os.environ, **SETTINGS}, **pipes)

    def ask(self, request):
        with self.lock:
            self.server.stdin.write(json.dumps(request) + "\n")
            self.server.stdin.flush()
            return json.loads(self.server.stdout.readline())

    def start(self, script, *arguments, environment=None, **options):
        """Start a script, whose output goes to one log.

        Args:
            script (`str`), *arguments
            environment (`dict[str, str]`, *optional*): Further variables.
            file_size (`int`, *optional*): Size in bytes that no file may exceed.
            slow_disk (`bool`, *optional*): Leave the time to kill it in the middle of what it writes.
            parked (`bool`, *optional*): Park tensors of 512 bytes, too.

        Returns:
            `Process`
        """
        log = self.logs / f"{next(self.numbers)}.txt"
        log.touch()
        request = {"script": str(script), "arguments": [str(word) for word in arguments], "output": str(log)}
        pid = self.ask(request | {"environment": environment or {}} | options)
        self.started.append(Process(self.ask, pid, log))
        return self.started[-1]

    def start_two(self, script, *arguments, **kwargs):
        """Start the two processes of one run on the CPU, without a launcher."""
        world = {"ACCELERATE_USE_CPU": "true", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2))
        return [self.start(script, *arguments, environment=world | rank, **kwargs) for rank in ranks]

    def run(self, script, *arguments, check=True, num_processes=1, **kwargs):
        """Run a script, on one process or two, to its end.

        Returns:
            `subprocess.CompletedProcess`: With all that was printed as `stdout`.
        """
        start = self.start if num_processes == 1 else self.start_two
        processes = start(script, *arguments, **kwargs)
        processes = [processes] if num_processes == 1 else processes
        codes = [process.wait(timeout=400) for process in processes]
        said = "".join(process.said for process in processes)
        if check and any(codes):
            raise AssertionError(f"exit codes {codes} of {script} {' '.join(map(str, arguments))}\n{said}")
        return subprocess.CompletedProcess([script, *arguments], max(codes, key=abs), said, said)

    def close(self):
        """End the server, and what a test that failed has left."""
        for process in self.started:
            process.signal(signal.SIGKILL)
        self.server.stdin.close()
        self.server.wait()
