"""What an Accelerate config asks for is done or refused; a run ends with its launcher; Ctrl-C during imports."""

import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import accelerate
import pytest

from runtime.errors import RefusedError, exit_codes, interrupt_quietly
from training.launch import _complete_deepspeed_config, start_accelerator


REPO = pathlib.Path(__file__).parents[2]

# What accelerate.utils.launch sets for each of them.
REFUSED = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_MEGATRON_LM": "true",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "ACCELERATE_USE_SAGEMAKER": "true",
    "ACCELERATE_USE_IPEX": "True",
    "ACCELERATE_USE_XPU": "1",
    "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    "ACCELERATE_MIXED_PRECISION": "fp8",
}
# Done by Accelerate, whatever the script.
DONE = {"ACCELERATE_USE_CPU", "ACCELERATE_DEBUG_MODE", "ACCELERATE_CPU_AFFINITY"}
# Checked with the DeepSpeed config, or of stage 3, which is refused; and details of what is refused.
DONE |= {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_GRADIENT_CLIPPING", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"}
DONE |= {"ACCELERATE_CONFIG_DS_FIELDS"}
DONE |= {
    f"ACCELERATE_DEEPSPEED_{name}"
    for name in ("ZERO_STAGE", "ZERO3_INIT", "ZERO3_SAVE_16BIT_MODEL", "CONFIG_FILE", "MOE_LAYER_CLS_NAMES")
}
DONE |= {f"ACCELERATE_DEEPSPEED_OFFLOAD_{name}_DEVICE" for name in ("OPTIMIZER", "PARAM")}
DONE |= {"ACCELERATE_DOWNCAST_BF16"}  # of TPUs
DONE |= {f"ACCELERATE_DYNAMO_{name}" for name in ("MODE", "USE_FULLGRAPH", "USE_DYNAMIC", "USE_REGIONAL_COMPILATION")}
DONE |= {"ACCELERATE_FP8_OVERRIDE_FPROP", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"}


def flags(**more):
    values = {"mixed_precision": "bf16", "gradient_accumulation_steps": 1, "deterministic": False}
    return argparse.Namespace(**values, report_to=[], output_dir="out", **more)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_done_is_refused_by_name(name, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # with which Accelerate ignores most of it
    monkeypatch.setenv(name, REFUSED[name])
    key = name.removeprefix("ACCELERATE_").removeprefix("USE_")
    with pytest.raises(RefusedError, match=f"(?i){key}.* in the Accelerate config"):
        start_accelerator(flags())


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_off_is_not_asked_for(name, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv(name, "false" if "_USE_" in name else "no")
    start_accelerator(flags())


def test_accumulation_that_contradicts_the_flag(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    with pytest.raises(RefusedError, match="gradient_accumulation_steps 8 .* --gradient_accumulation_steps 1; remove"):
        start_accelerator(flags())


def test_precision_that_contradicts_the_flag(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    args = flags()
    args.mixed_precision = "no"
    with pytest.raises(RefusedError, match="mixed_precision bf16 in the Accelerate .* --mixed_precision no; remove"):
        start_accelerator(args)


def test_every_variable_of_the_launcher_is_known_here():
    """With a version of Accelerate that has a new one this fails: it is to be done, or refused."""
    text = (pathlib.Path(accelerate.__file__).parent / "utils" / "launch.py").read_text()
    names = set(re.findall(r'current_env\["(ACCELERATE_\w+)"\]|"(ACCELERATE_USE_\w+)"', text))
    assert {name for pair in names for name in pair if name} - REFUSED.keys() - DONE == set()


@pytest.mark.parametrize(
    "section, said",
    [
        ({"optimizer": {"type": "AdamW"}}, "optimizer in the DeepSpeed config is not supported"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler in the DeepSpeed config is not supported"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel in the DeepSpeed config is not supported"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer cpu in the DeepSpeed config is not supported",
        ),
        ({"bf16": {"enabled": True}}, "bf16.enabled in the DeepSpeed config is not supported"),
    ],
)
def test_what_else_a_deepspeed_config_asks_for(section, said):
    plugin = argparse.Namespace(deepspeed_config={"zero_optimization": {"stage": 2}} | section)
    with pytest.raises(RefusedError, match=said):
        _complete_deepspeed_config(flags(training_mode="lora"), argparse.Namespace(deepspeed_plugin=plugin))


# ---------------------------------------------------------------- launchers


CHILD = """
import sys
sys.path.insert(0, {repo!r})
from runtime.errors import end_with_launcher
import os, signal, time
def record(*_):
    open({file!r}, "w").write("SIGTERM")
    os._exit(3)
signal.signal(signal.SIGTERM, record)
{before}
end_with_launcher()
open({file!r}, "w").write(str(os.getpid()))
time.sleep(0.6)
open({file!r}, "w").write("outlived")
"""


@pytest.fixture
def child(tmp_path):
    """Function that starts a parent with a child, as Accelerate starts its one process; returns the parent."""

    def run(is_launcher=True, before="", more=""):
        script, parent = tmp_path / "child.py", tmp_path / "parent.py"
        script.write_text(CHILD.format(repo=str(REPO), file=str(tmp_path / "said"), before=before))
        begin = f"import subprocess, sys\np = subprocess.Popen([sys.executable, {str(script)!r}])"
        parent.write_text(f"{begin}\n{more}\np.wait()")
        variables = {"ACCELERATE_DYNAMO_MODE": "default"} if is_launcher else {}
        return subprocess.Popen([sys.executable, parent], env={**os.environ, **variables})

    return run


def said(tmp_path, condition, name="said", timeout=30):
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if (tmp_path / name).exists() and condition(text := (tmp_path / name).read_text()):
            return text
        time.sleep(0.01)
    raise AssertionError("nothing was said")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_a_launcher_is_a_sigterm(number, child, tmp_path):
    parent = child()
    said(tmp_path, str.isdigit)
    parent.send_signal(number)
    parent.wait()
    assert said(tmp_path, str.isalpha) == "SIGTERM"


def test_the_end_of_another_parent_is_not(child, tmp_path):
    parent = child(is_launcher=False)
    said(tmp_path, str.isdigit)
    parent.kill()
    parent.wait()
    assert said(tmp_path, str.isalpha) == "outlived"


def test_a_launcher_that_has_already_ended(child, tmp_path):
    """Between the question who the parent is and the request for a signal."""
    waits = "asked = os.getppid\nos.getppid = lambda: [asked(), time.sleep(0.5)][0]"
    child(before=waits, more="import os, time; time.sleep(0.25); os._exit(0)").wait()
    assert said(tmp_path, str.isalpha) == "SIGTERM"


# ---------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("script", ["train_qwen_image.py", "train_wan_video.py"])
def test_interrupted_while_importing(script, tmp_path):
    """By a library that would swallow the exception, too."""
    (tmp_path / "torch.py").write_text(
        f"import time\nopen({str(tmp_path / 'said')!r}, 'w').write('1')\n"
        "try:\n    time.sleep(60)\nexcept BaseException:\n    raise ImportError('torch is broken')\n"
    )
    command = [sys.executable, script, "--pretrained_model_name_or_path", "m", "--dataset_path", "d"]
    process = subprocess.Popen(
        [*command, "--output_dir", tmp_path / "out"],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # also where these tests run behind &
    )
    said(tmp_path, str.isdigit)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[1] == "error: interrupted; what was complete before still is\n"
    assert process.returncode == 1


def test_ctrl_c_after_the_imports_ends_the_run(monkeypatch, capsys):
    """And where it is ignored, as behind & in a script, it stays ignored."""
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt_quietly()
        with pytest.raises(SystemExit) as stopped, exit_codes():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        assert stopped.value.code == 1 and capsys.readouterr().err.startswith("error: interrupted")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupt_quietly()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
