"""The loop against arithmetic: one weight, plain gradient descent."""

import io
import itertools
import json
import re
import traceback
import types

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from tqdm.auto import tqdm

from blockwise.log import MemoryLog
from dataset.batches import Sample, TrainingDataset, plan_batches
from dataset.draws import Draw
from dataset.inspection import Item
from dataset.metadata import Row
from pipelines.family import Family, Stage
from runtime.errors import FailedError
from train_qwen_image import VALUES
from training.arguments import parse_args
from training.flow_matching import SigmaLaw
from training.launch import start_accelerator
from training.loop import Training, clip_gradients, train
from training.metrics import Metrics, keep_steps_before
from training.module import DiffusionTrainingModule
from training.optimizers import find_optimizer


LAW = SigmaLaw("uniform")
NUM_ITEMS = 6


class Scale(Family):
    """Predicts weight * noisy latents."""

    def __init__(self):
        self.timesteps = []

    def predict(self, transformer, noisy_latents, timestep, batch, **memory):
        self.timesteps += timestep.tolist()
        return transformer["weight"] * noisy_latents


def make_module():
    weight = torch.nn.Parameter(torch.tensor(0.5))
    return DiffusionTrainingModule(Scale(), torch.nn.ParameterDict({"weight": weight}))


def make_dataset(infinite=()):
    generator = torch.Generator().manual_seed(0)
    latents = [torch.randn(2, 4, 4, generator=generator) for _ in range(NUM_ITEMS)]
    for number in infinite:
        latents[number][0, 0, 0] = float("inf")

    def read(index):
        return {"latents": latents[index], "prompt_embeds": torch.zeros(1, 1)}

    return TrainingDataset([Sample(str(n), (n,), law=LAW) for n in range(NUM_ITEMS)], read, seed=42)


def run(tmp_path, *flags, module=None, batch_sizes=(None,) * NUM_ITEMS, infinite=()):
    """Train and return the module and the order of the samples, by step and micro-batch."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    required = ["--pretrained_model_name_or_path", "-", "--dataset_path", "-", "--output_dir", str(tmp_path)]
    flags = [*required, "--training_mode", "full", "--optimizer", "torch.optim.SGD", "--learning_rate", "0.1", *flags]
    args = parse_args(flags, description="", values=VALUES)
    row = Row("a", "a", {}, "a")
    items = [
        Item(row, {"id": "a", "caption": "a", "used": {"size": [4, 4], "frames": 1, "batch_size": batch_size}}, {})
        for batch_size in batch_sizes
    ]
    batches = plan_batches(args, items, 1, num_tokens=lambda *size: 1, resumed={"step": 0}, model={})
    module, dataset = module or make_module(), make_dataset(infinite)
    accelerator = start_accelerator(args)
    optimizer = find_optimizer(args, accelerator.device)
    with MemoryLog() as log:
        training = Training(accelerator, args, Stage(), module, dataset, batches, log, optimizer)
        train(training)
    return module, [[batch for (batch,) in batches.micro_batches(step)] for step in training.steps]


def descend(order, max_grad_norm=None, left_out=()):
    """The same training by hand: the gradient of the mean loss over each global batch, but for what is `left_out`."""
    weight, dataset = 0.5, make_dataset()
    for step, micro_batches in enumerate(order, 1):
        gradient, items = 0.0, list(itertools.chain(*micro_batches))
        if set(items) & set(left_out):
            continue
        for position, index in enumerate(items):
            draw, latents = Draw(42, step, position), dataset.read(index)["latents"].double()
            noise, sigma = draw.noise(latents.shape).double(), draw.sigma(LAW)
            noisy = (1 - sigma) * latents + sigma * noise
            gradient += float((2 * (weight * noisy - (noise - latents)) * noisy).mean()) / len(items)
        if max_grad_norm is not None and abs(gradient) > max_grad_norm:
            gradient *= max_grad_norm / abs(gradient)
        weight -= 0.1 * gradient
    return weight


@pytest.mark.parametrize("batch, accumulation", [(4, 1), (2, 2), (1, 4), (1, 1), (6, 1), (3, 4)])
def test_update_is_that_of_the_mean_over_the_global_batch(batch, accumulation, tmp_path):
    flags = ["--train_batch_size", str(batch), "--gradient_accumulation_steps", str(accumulation)]
    module, order = run(tmp_path, *flags, "--max_train_steps", "4", "--max_grad_norm", "0")
    counts = [sum(map(len, micro_batches)) for micro_batches in order]
    whole, rest = divmod(NUM_ITEMS, batch * accumulation)
    epoch = [batch * accumulation] * whole + [rest] * (rest > 0)
    assert counts == (epoch * 4)[:4]
    assert module.transformer["weight"].item() == pytest.approx(descend(order), rel=1e-5)


def test_samples_count_alike_in_micro_batches_of_different_size(tmp_path):
    flags = ["--gradient_accumulation_steps", "2", "--max_train_steps", "5", "--max_grad_norm", "0"]
    module, order = run(tmp_path, *flags, batch_sizes=(3, 3, 3, 1, 1, 1))
    assert any(len({*map(len, micro_batches)}) == 2 for micro_batches in order)
    assert module.transformer["weight"].item() == pytest.approx(descend(order), rel=1e-5)


def test_clipping(tmp_path):
    module, order = run(tmp_path, "--max_train_steps", "4", "--max_grad_norm", "0.05")
    clipped = descend(order, max_grad_norm=0.05)
    assert module.transformer["weight"].item() == pytest.approx(clipped, rel=1e-5)
    assert abs(clipped - descend(order)) > 1e-3


def test_without_clipping_gradients_stay_as_they_are():
    """Also where the norm overflows, by which they would be divided."""
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3e38, 3e38])
    accelerator = types.SimpleNamespace(distributed_type=types.SimpleNamespace(value="NO"))
    assert clip_gradients(accelerator, types.SimpleNamespace(masters=[weight]), 0.0).isinf()
    assert weight.grad.tolist() == torch.tensor([3e38, 3e38]).tolist() and weight.grad._version == 0


def test_the_transformer_is_told_the_sigma_of_the_noise(tmp_path):
    module, order = run(tmp_path, "--max_train_steps", "3", "--train_batch_size", "2")
    sigmas = [Draw(42, step, p).sigma(LAW) for step, (items,) in enumerate(order, 1) for p in range(len(items))]
    expected = [torch.tensor(sigma, dtype=torch.float32).mul(1000).item() for sigma in sigmas]
    assert module.family.timesteps == expected


@pytest.mark.parametrize("num_epochs, num_steps", [(1, 2), (2, 4)])
def test_epochs_become_optimizer_steps(num_epochs, num_steps, tmp_path):
    """Six items in global batches of four: the last step of an epoch has two."""
    flags = ["--train_batch_size", "2", "--gradient_accumulation_steps", "2", "--num_train_epochs", str(num_epochs)]
    _, order = run(tmp_path, *flags)
    assert len(order) == num_steps


def test_silent_parameter_stops_the_run_with_its_name(tmp_path):
    module = make_module()
    module.transformer["forgotten"] = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(FailedError, match="transformer.forgotten"):
        run(tmp_path, "--max_train_steps", "4", module=module)


@pytest.mark.parametrize(
    "flags, num_waits", [([], 0), (["--ema"], 0), (["--max_grad_norm", "0"], 0), (["--max_skipped_steps", "1"], 6)]
)
def test_the_host_waits_for_no_number_between_two_flushes(flags, num_waits, tmp_path):
    """Only where it is asked for, in each of six steps; batches are made in another thread."""
    waits = []

    class Waits(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
                waits.append("".join(traceback.format_stack()))
            return func(*args, **(kwargs or {}))

    with Waits():
        run(tmp_path, "--max_train_steps", "6", "--logging_steps", "100", *flags)
    in_the_loop = [stack for stack in waits if ", in train\n" in stack and ", in flush\n" not in stack]
    assert len(in_the_loop) == num_waits, in_the_loop[0]


# ---------------------------------------------------------------- steps that are left out


def lines_of(folder):
    """The lines of metrics.jsonl, which have to be JSON: it knows no NaN."""

    def refuse(name):
        raise AssertionError(name)

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_whose_loss_is_not_finite_is_left_out(accumulation, tmp_path, caplog):
    """Two epochs, and one bad sample in each: the weights are as if there had been no such step."""
    flags = ["--max_skipped_steps", "1", "--gradient_accumulation_steps", str(accumulation), "--num_train_epochs", "2"]
    module, order = run(tmp_path, *flags, "--max_grad_norm", "1.0", infinite=[3])
    skipped = [step for step, micro_batches in enumerate(order, 1) if [3] in micro_batches]
    assert len(skipped) == 2
    assert module.transformer["weight"].item() == pytest.approx(descend(order, 1.0, left_out=[3]), rel=1e-5)
    for step, line in enumerate(lines_of(tmp_path), 1):
        assert (line["loss"] is None) == (line["grad_norm"] is None) == (step in skipped)
    said = [message for message in caplog.messages if "--max_skipped_steps" in message]
    assert [int(re.search(r"^step (\d+):", message)[1]) for message in said] == skipped
    assert all("the loss is not finite for 3; the step was skipped" in message for message in said)


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_more_steps_in_a_row_than_allowed_end_the_run(allowed, tmp_path):
    """All samples are bad: it ends at the first step that is one too many, and says which sample it had."""
    with pytest.raises(FailedError, match=f"^step {allowed + 1}: .* not finite .* Nothing was saved") as error:
        run(tmp_path, "--max_skipped_steps", str(allowed), "--logging_steps", "1", infinite=range(NUM_ITEMS))
    lines = lines_of(tmp_path)
    assert len(lines) == allowed + 1 and all(line["loss"] is None for line in lines)
    assert f"the loss is not finite for {lines[-1]['samples'][0]}." in str(error.value)


def test_only_steps_in_a_row_are_counted(tmp_path):
    """Five in all, one in each epoch."""
    flags = ["--max_train_steps", "30", "--seed", "42"]
    module, order = run(tmp_path, *flags, "--max_skipped_steps", "2", infinite=[0])
    assert sum([[0]] == micro_batches for micro_batches in order) == 5
    assert module.transformer["weight"].isfinite()


# ---------------------------------------------------------------- when metrics are written


def test_logging_steps(tmp_path, monkeypatch):
    """Metrics are written at every so many steps and at the last one, and none of them is missing."""
    written = []
    flush = Metrics.flush

    def spy(metrics):
        written.extend([metrics.pending[-1][0]["step"]] if metrics.pending else [])
        flush(metrics)

    monkeypatch.setattr(Metrics, "flush", spy)
    run(tmp_path, "--max_train_steps", "7", "--logging_steps", "3")
    assert written == [3, 6, 7]
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(1, 8))


def test_memory_that_the_device_has_reserved(tmp_path, monkeypatch):
    monkeypatch.setattr(MemoryLog, "end_step", lambda log: 5)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 7)
    run(tmp_path, "--max_train_steps", "1")
    assert [(line["device_peak_bytes"], line["device_reserved_bytes"]) for line in lines_of(tmp_path)] == [(5, 7)]


def test_what_is_done_between_two_steps_does_not_count_in_the_time_that_is_left(monkeypatch):
    """Ten steps of a second, and an hour in the middle of them."""
    now = 0.0
    monkeypatch.setattr("training.metrics.time.perf_counter", lambda: now)
    bar = tqdm(total=10, file=io.StringIO())
    bar._time, bar.start_t, bar.last_print_t = lambda: now, 0.0, 0.0
    metrics = types.SimpleNamespace(bar=bar, last_time=0.0)
    for step in range(1, 6):
        now += 1
        bar.update()
        with Metrics.aside(metrics):
            now += 3600 * (step == 3)
    assert bar.format_dict["rate"] == pytest.approx(1.0)
    assert metrics.last_time == 3600


def test_steps_that_metrics_lack_before_a_resume_are_told(tmp_path, caplog):
    path, main = tmp_path / "metrics.jsonl", types.SimpleNamespace(is_main_process=True, num_processes=1)
    path.write_text('{"step": 1, "grad_norm": 1.0}\n')
    for first, said in ((1, []), (2, []), (5, [f"{path} lacks 3 of the steps before step 5"])):
        path.write_text('{"step": 1, "grad_norm": 1.0}\n')
        keep_steps_before(first, main, tmp_path)
        assert caplog.messages == said


def test_steps_left_out_before_a_resume_count(tmp_path):
    lines = [{"step": step, "grad_norm": norm} for step, norm in enumerate((None, 1.0, None, None, None), 1)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for first, expected in ((2, 1), (3, 0), (5, 2), (6, 3)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        main = types.SimpleNamespace(is_main_process=True, num_processes=1)
        assert keep_steps_before(first, main, tmp_path) == expected
