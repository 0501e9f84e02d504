"""Runs scripts as processes of their own that need not import everything again.

Reads requests from stdin, one JSON object per line, and answers each with one line:
    {"script": ..., "arguments": [...], "output": FILE, "environment": {...}, and options: `ForkServer.start`}: the pid
    {"poll": PID}: its exit code, negative for a signal, or null while it runs
"""

import gc
import json
import os
import resource
import runpy
import signal
import sys
import time


sys.path.insert(0, os.getcwd())

import peft  # noqa: F401
from diffusers import QwenImagePipeline, WanPipeline  # noqa: F401
from matplotlib import pyplot  # noqa: F401
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer, UMT5EncoderModel  # noqa: F401

import dataset.videos  # noqa: F401
import train_qwen_image  # noqa: F401
import train_wan_video  # noqa: F401
from blockwise import offload
from tests import runs


def become(request):
    """Make this process, which was just forked, look as if it was started by a shell."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if request.get("file_size") is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"], resource.RLIM_INFINITY))
    if request.get("slow_disk"):
        os.fsync = as_on_a_slow_disk
    if request.get("parked"):
        offload.MIN_PARKED_BYTES = 512
    sys.argv = [request["script"], *request["arguments"]]


def as_on_a_slow_disk(descriptor, to_disk=os.fsync):
    """Leave the time to kill a process in the middle of what it writes."""
    time.sleep(0.005)
    to_disk(descriptor)


gc.freeze()  # what was imported need not be inspected again by each process
for line in sys.stdin:
    request = json.loads(line)
    if "poll" in request:
        pid, status = os.waitpid(request["poll"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
    elif (pid := os.fork()) > 0:
        print(pid, flush=True)
    else:
        become(request)
        with runs.forecasts_are_remembered(of_similar_steps=True):
            runpy.run_path(request["script"], run_name="__main__")
        break
