"""The memory of a run against arithmetic, and the message when it runs out."""

import gc
import json
import re

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from blockwise import log as memory_log
from blockwise import offload
from blockwise.checkpointing import gradient_checkpoint_forward
from blockwise.log import MemoryLog, OutOfMemory


WIDTH = 64
SQUARE = 4 * WIDTH * WIDTH  # bytes of a weight, and of the hidden states of as many tokens
SMALL = ["--height", "64", "--width", "80", "--mixed_precision", "no", "--lora_rank", "4", "--max_train_steps", "4"]


class Block(nn.Module):
    """Keeps two tensors for its backward pass: its input, which the adapter needs, and the output of exp."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, WIDTH, bias=False)})

    def forward(self, hidden_states):
        return (self.base(hidden_states) + self.lora_A["default"](hidden_states)).mul(1e-3).exp()


class Model(nn.Module):
    def __init__(self, mode=(False, False), num_blocks=3):
        super().__init__()
        self.blocks, self.mode = nn.ModuleList(Block() for _ in range(num_blocks)), mode

    def forward(self, batch):
        hidden_states = batch["hidden_states"] + 0
        for block in self.blocks:
            hidden_states = gradient_checkpoint_forward(block, *self.mode, hidden_states)
        return hidden_states.sum()


def make_training(mode=(False, False), **options):
    torch.manual_seed(0)
    model = Model(mode, **options)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=False)


def make_steps(log, model, optimizer, num_steps, accumulation=1):
    for _ in range(num_steps):
        for _ in range(accumulation):
            batch = {"hidden_states": torch.ones(WIDTH, WIDTH)}
            model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        log.end_step()


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert _get_current_dispatch_mode_stack() == []


# ---------------------------------------------------------------- named points


class FakeDevice:
    """Counts as an allocator of a device does, with one peak that starts again when it is reset."""

    def __init__(self, monkeypatch):
        self.allocated = self.peak = 0
        monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 2**31)
        monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: self.hold(self.allocated, 0))

    def hold(self, num_bytes, peak=None):
        """Let `num_bytes` be allocated, with a peak of `peak` on the way."""
        self.allocated, self.peak = num_bytes, max(num_bytes, self.peak if peak is None else peak)


def test_points_and_steps_each_have_their_own_peak(monkeypatch):
    device, log = FakeDevice(monkeypatch), MemoryLog()
    log.begin(torch.device("cuda"))
    device.hold(10, peak=90)
    log.point("text encoder")
    log.point("prepared")
    assert log.peak_since("step") == 10, "the peak of loading is no step's"
    device.hold(20, peak=50)
    log.point("first forward")
    device.hold(20, peak=40)
    log.point("first backward")
    assert log.peak_since("step") == 50, "the points within the step did not hide it"
    device.hold(20, peak=30)
    assert log.peak_since("step") == 30
    log.point("first step")
    log.point("saving")
    assert [point["peak_bytes"] for point in log.points] == [0, 90, 10, 50, 40, 30, 20]
    assert [point["allocated_bytes"] for point in log.points] == [0, 10, 10, 20, 20, 20, 20]


@pytest.mark.parametrize(
    "peaks, phase",
    [
        ({"text encoder": 9, "VAE": 90, "first step": 50}, "text encoder"),
        ({"caching done": 60, "first step": 50, "saving": 70}, "training"),
        ({"caching done": 60, "first forward": 61, "final": 50}, "training"),
        ({"caching done": 60, "final": 70}, "export"),
    ],
)
def test_the_peak_is_of_the_phase_before_the_point(peaks, phase, monkeypatch):
    device, log = FakeDevice(monkeypatch), MemoryLog()
    log.begin(torch.device("cuda"))
    names = ["text encoder", "VAE", "caching done", "prepared", "first forward", "first backward", "first step"]
    for name in [*names, "saving", "final"]:
        device.hold(1, peak=peaks.get(name, 2))
        log.point(name)
    phases = log.phases()
    assert max(phases, key=phases.get) == phase and phases[phase] == max(peaks.values())


def test_table_has_what_follows_a_repeated_aside_once_and_both_trainings():
    log, model = MemoryLog(), nn.Linear(2, 2)
    log.begin(torch.device("cpu"))
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        log.watch(model, optimizer, step=1)
        for _ in range(2):
            with log.aside("previews"):
                pass
        log.point("saving")
        log.end_training()
    names = [line.split()[0] for line in log.table().split("\n")]
    assert names == ["memory", "start", "previews", "training", "saving", "saving"]


def test_table(monkeypatch):
    monkeypatch.setattr(offload, "counters", lambda: {"slab_bytes": 0})  # other tests may have left slabs
    log = MemoryLog()
    log.begin(torch.device("cpu"))
    with monkeypatch.context() as context:
        context.setattr(offload, "counters", lambda: {"slab_bytes": 3 * 2**29})
        log.point("transformer loaded")
    header, *lines = log.table().split("\n")
    assert header.split() == "memory at seconds allocated reserved peak since host pinned".split()
    assert [line.split()[-7:-4] for line in lines] == [["-"] * 3] * 2
    assert lines[0].startswith("start  ") and lines[0].endswith(" 0.00 MiB")
    assert lines[1].startswith("transformer loaded  ") and lines[1].endswith(" 1.50 GiB")
    assert len({len(line) for line in (header, *lines)}) == 1 and header.endswith("pinned")
    FakeDevice(monkeypatch)
    log.begin(torch.device("cuda"))
    log.point("VAE")
    assert log.table().split("\n")[-1].split()[2:8] == ["0.00", "MiB", "2.00", "GiB", "0.00", "MiB"]


# ---------------------------------------------------------------- the first steps, by category


def test_categories_are_those_of_the_objects():
    log, (model, optimizer) = MemoryLog(), make_training()
    log.watch(model, optimizer, step=1)
    make_steps(log, model, optimizer, 3)
    watched = log.watched
    weights = {"weights": 3 * SQUARE, "adapters": 3 * SQUARE}
    moments = 2 * 3 * SQUARE
    assert {name: watched.by_category_at_peak[name] for name in weights} == weights
    assert watched.by_category_at_peak["optimizer_state"] == moments
    assert watched.peak_bytes == sum(watched.by_category_at_peak.values())
    ends = [event for event, what in watched.marks if what == "step"]
    assert len(ends) == watched.num_steps == 3
    after_step = [sample for sample in watched.samples if sample[0] < ends[0]][-1]
    assert after_step[2]["gradients"] == 3 * SQUARE and after_step[2]["optimizer_state"] >= moments
    before_backward = [sample for sample in watched.samples if sample[0] < watched.marks[0][0]][-1]
    assert before_backward[2] == weights | {
        "optimizer_state": 0,
        "ema": 0,
        "gradients": 0,
        "batch": SQUARE,
        "activations": 4 * SQUARE + 4,  # the model's own first tensor, three times exp's output; the loss
    }
    assert [point["name"] for point in log.points] == ["first forward", "first backward", "first step"]
    assert max(sample[1] for sample in watched.samples) == watched.peak_bytes


def test_masters_are_state_of_the_optimizer():
    model = Model(num_blocks=2).to(torch.bfloat16).requires_grad_(True)
    masters = [parameter.detach().float() for parameter in model.parameters()]
    log, optimizer = MemoryLog(), torch.optim.SGD(masters)
    log.watch(model, optimizer, step=1)
    with pytest.raises(RuntimeError, match="dtype"):  # the weights are bf16
        model({"hidden_states": torch.ones(WIDTH, WIDTH)})
    log.end_training()
    last = log.watched.samples[-1][2]
    assert last["optimizer_state"] == 4 * SQUARE and last["weights"] == last["adapters"] == SQUARE


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_the_watch_ends(num_steps):
    log, (model, optimizer) = MemoryLog(), make_training()
    log.watch(model, optimizer, step=1)
    assert len(_get_current_dispatch_mode_stack()) == 1
    make_steps(log, model, optimizer, num_steps)
    assert len(_get_current_dispatch_mode_stack()) == (num_steps < 3)
    log.end_training()
    log.end_training()
    hooks = [model._forward_pre_hooks, model._forward_hooks, optimizer._optimizer_step_pre_hooks]
    hooks += [optimizer._optimizer_step_post_hooks]
    hooks += [parameter._post_accumulate_grad_hooks or {} for parameter in model.parameters()]
    assert not any(hooks)
    assert log.watched.num_steps == min(num_steps, 3)


def test_the_watch_ends_with_an_error_and_keeps_nothing_alive():
    with pytest.raises(ZeroDivisionError), MemoryLog() as log:
        model, optimizer = make_training()
        log.watch(model, optimizer, step=1)
        make_steps(log, model, optimizer, 1)
        raise ZeroDivisionError
    weight = model.blocks[0].base.weight
    assert not [referrer for referrer in gc.get_referrers(weight) if isinstance(referrer, memory_log.Watch)]
    assert log.watched.num_steps == 1


@pytest.mark.parametrize("mode", [(False, False), (True, False), (False, True)], ids=["keep", "recompute", "park"])
def test_no_bit_of_the_training_changes(mode, monkeypatch):
    monkeypatch.setattr(offload, "MIN_PARKED_BYTES", 512)
    results = []
    for watches in (True, False):
        model, optimizer = make_training(mode)
        log = MemoryLog()
        log.watch(model, optimizer, step=1)
        if not watches:
            log.watched.close()
        make_steps(log, model, optimizer, 4, accumulation=2)
        results.append(model.state_dict())
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_parked_inputs_are_in_host_memory(monkeypatch):
    monkeypatch.setattr(offload, "MIN_PARKED_BYTES", 512)
    held = {}
    for name, mode in {"recompute": (True, False), "park": (False, True)}.items():
        log, (model, optimizer) = MemoryLog(), make_training(mode, num_blocks=4)
        log.watch(model, optimizer, step=1)
        make_steps(log, model, optimizer, 1)
        log.end_training()
        (end, _), *_ = log.watched.marks
        held[name] = [sample[2]["activations"] for sample in log.watched.samples if sample[0] < end][-1]
        assert max(sample[3] for sample in log.watched.samples) == (4 * SQUARE if name == "park" else 0)
        assert all(min(sample[2].values()) >= 0 for sample in log.watched.samples)
    assert held["recompute"] - held["park"] == 3 * SQUARE, "the newest is still on the device"


def test_the_samples_are_few_and_keep_the_peak(monkeypatch):
    watched = []
    for limit in (4000, 20):
        monkeypatch.setattr(memory_log, "MAX_SAMPLES", limit)
        log, (model, optimizer) = MemoryLog(), make_training(num_blocks=8)
        log.watch(model, optimizer, step=1)
        torch.empty(100 * WIDTH, WIDTH)  # more than all that follows
        make_steps(log, model, optimizer, 3)
        watched.append(log.watched)
    every, few = watched
    assert len(every.samples) > 200 and 10 <= len(few.samples) <= 20
    assert max(sample[1] for sample in few.samples) == every.peak_bytes == few.peak_bytes
    stride = few.samples[-1][0] // len(few.samples)
    assert all(sample in every.samples for sample in few.samples)
    assert all(after[0] - before[0] < 4 * stride for before, after in zip(few.samples, few.samples[1:], strict=False))


def test_picture(tmp_path):
    log, (model, optimizer) = MemoryLog(), make_training()
    log.plot(tmp_path / "none.png")
    log.watch(model, optimizer, step=1)
    make_steps(log, model, optimizer, 3)
    for name, forecast_bytes in {"a": None, "b": None, "forecast": 2**22}.items():
        log.forecast_bytes = forecast_bytes
        log.plot(tmp_path / f"{name}.png")
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "b.png", "forecast.png"}
    images = {path.stem: path.read_bytes() for path in tmp_path.iterdir()}
    assert images["a"] == images["b"] != images["forecast"]
    with Image.open(tmp_path / "a.png") as image:
        assert set(image.info) <= {"Software", "dpi"}
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 24)}
    # As matplotlib names them: C0 weights, C1 adapters, C2 optimizer state, C4 gradients, C5 batch, C6 activations.
    assert {(31, 119, 180), (255, 127, 14), (44, 160, 44), (148, 103, 189), (140, 86, 75), (227, 119, 194)} <= colors


# ---------------------------------------------------------------- out of memory


class Exhausted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total ...")


class Failing(Block):
    """Has no memory in its call number `call`, or in its backward pass."""

    def __init__(self, call=None):
        super().__init__()
        self.call, self.num_calls = call, 0

    def forward(self, hidden_states):
        self.num_calls += 1
        if self.num_calls == self.call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total ...")
        return super().forward(Exhausted.apply(hidden_states) if self.call is None else hidden_states)


@pytest.mark.parametrize(
    "block, mode, where",
    [
        (Failing(1), (False, False), "step 7 (forward), in or after blocks.1 (forward)"),
        (Failing(1), (True, False), "step 7 (forward), in or after blocks.1 (forward)"),
        (Failing(2), (True, False), "step 7 (backward), in or after blocks.1 (recomputation)"),
        (Failing(3), (True, False), "step 8 (forward), in or after blocks.1 (forward)"),
        (Failing(9), (True, False), "step 11, in or after blocks.1 (forward)"),
        (Failing(), (True, False), "step 7 (backward), in or after blocks.1 (recomputation)"),
        (Failing(), (False, False), "step 7 (backward), in or after blocks.2 (forward)"),
    ],
)
def test_out_of_memory_names_step_and_block(block, mode, where):
    block.num_calls = 0
    with pytest.raises(OutOfMemory) as error, MemoryLog() as log:
        model, optimizer = make_training(mode)
        model.blocks[1] = block
        log.begin(torch.device("cpu"))
        log.watch(model, optimizer, step=7)
        make_steps(log, model, optimizer, 5)
    message = str(error.value)
    assert message.startswith(f"Out of memory in {where}, when asked for 20.00 MiB. Actual: "), message
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError) and "\n" not in message


def test_out_of_memory_compares_with_the_forecast_and_says_what_would_help(monkeypatch):
    device = FakeDevice(monkeypatch)
    with pytest.raises(OutOfMemory) as error, MemoryLog() as log:
        log.begin(torch.device("cuda"))
        log.forecast_bytes = 2**30
        log.suggestions = lambda phase: [("--b", 2**30), ("--d", 2**21), ("--c", 2**20), ("--a", 1)]
        log.point("VAE")
        device.hold(2**31, peak=3 * 2**30)
        raise MemoryError
    assert str(error.value) == (
        "Out of memory after the point 'VAE'. Forecast for training: 1.00 GiB. Actual: 2.00 GiB allocated, 2.00 GiB "
        "reserved, 3.00 GiB at the peak. What would save most: --b (1.00 GiB); --d (2.00 MiB); --c (1.00 MiB)."
    )


def test_the_error_of_the_cpu_allocator_is_understood():
    with pytest.raises(OutOfMemory, match="when asked for 4503599627370496 bytes. Actual: .* host memory"):
        with MemoryLog() as log:
            log.begin(torch.device("cpu"))
            torch.empty(1 << 50, dtype=torch.float32)


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes"), ValueError("out of memory"), SystemExit(3)])
def test_other_errors_pass_as_they_are(error):
    with pytest.raises(type(error)) as caught, MemoryLog() as log:
        log.suggestions = lambda phase: pytest.fail("not asked for")
        raise error
    assert caught.value is error


def test_command_line_out_of_memory_ends_with_1_and_one_paragraph(fork_server, tiny_qwen_image, photos, tmp_path):
    program = """
import runpy, torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock as Block
forward, calls = Block.forward, []
def failing(self, *args, **kwargs):
    if type(self.img_mod[1].weight.data) is torch.Tensor:  # not those without content, of the forecast
        calls.append(self)
        if len(calls) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return forward(self, *args, **kwargs)
Block.forward = failing
runpy.run_path('train_qwen_image.py', run_name='__main__')
"""
    required = ["--pretrained_model_name_or_path", tiny_qwen_image, "--dataset_path", photos, "--output_dir", tmp_path]
    (tmp_path / "failing.py").write_text(program)
    flags = [*SMALL, "--use_gradient_checkpointing"]
    done = fork_server.run(tmp_path / "failing.py", *required, *flags, check=False)
    assert done.returncode == 1
    (error,) = re.findall("error: (.*)", done.stderr)  # behind the progress bar
    assert error.startswith(
        "Out of memory in step 2 (backward), in or after transformer.transformer_blocks.1 (recomputation), "
        "when asked for 2.00 GiB. Forecast for training: "
    )
    assert re.search(r"\. Actual: .* What would save most: --.* \(.* MiB\)\.$", error)
    assert "Traceback" not in done.stderr


def test_command_line_leaves_points_and_peak(fork_server, tiny_qwen_image, photos, tmp_path):
    required = ["--pretrained_model_name_or_path", tiny_qwen_image, "--dataset_path", photos, "--output_dir", tmp_path]
    done = fork_server.run("train_qwen_image.py", *required, *SMALL)
    run = json.loads((tmp_path / "run.json").read_text())
    names = ["start", "text encoder", "VAE", "caching done", "encoders gone", "transformer loaded", "adapters"]
    names += ["prepared", "first forward", "first backward", "first step", "saving", "final"]
    assert [point["name"] for point in run["memory_points"]] == names
    lines = done.stdout.splitlines()[-len(names) :]
    assert [line.split("  ")[0] for line in lines] == names
    measured = run["measured"]
    assert measured["training_peak_bytes"] == sum(measured["by_category"].values())
    num_trained = sum(torch.Size(entry["shape"]).numel() for entry in run["trainable"])
    assert measured["by_category"]["adapters"] == 4 * num_trained
    assert (tmp_path / "memory.png").is_file()
