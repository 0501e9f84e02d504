"""What each memory mode costs and saves, on the blocks of both model families: forward and backward of a LoRA step.

    python benchmarks/memory_modes.py                              # on a CPU, blocks of middle size; three minutes
    python benchmarks/memory_modes.py --device cuda --real_size    # on a GPU, blocks of real size; under eight minutes

All modes run in this process, alternating. In addition to ours: `keyword` and `positional`, torch's own recipe of
`save_on_cpu` around a checkpoint, with the block's arguments given by name (which moves nothing) and by position
(which moves what all blocks share, too). Then: the plan for a budget halfway between keeping and recomputing, and what
the dispatcher adds to torch's own checkpoint called by hand. On a GPU also: the bandwidth of pinned memory, the
forecast against the allocator, and 20 steps under allocator churn, whose gradients have to be those of `keep`.
"""

import argparse
import contextlib
import gc
import inspect
import os
import pathlib
import platform
import statistics
import sys
import time
from unittest import mock

import torch
from accelerate import init_empty_weights
from diffusers import QwenImageTransformer2DModel, WanTransformer3DModel
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint


sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from blockwise import offload  # noqa: E402
from blockwise.checkpointing import gradient_checkpoint_forward  # noqa: E402
from blockwise.estimate import StepProfile, shrink  # noqa: E402
from blockwise.plan import MemoryPlan  # noqa: E402
from blockwise.stock import install_plan  # noqa: E402
from blockwise.tracking import LiveBytes  # noqa: E402
from pipelines import qwen_image, wan_video  # noqa: E402
from train_qwen_image import VALUES  # noqa: E402
from training.module import DiffusionTrainingModule, find_lora_targets, make_trainable  # noqa: E402


MIB = 2**20


class Case:
    """Some blocks of a model family, with a LoRA, and a batch for them.

    Args:
        family (`str`): "qwen_image" or "wan_video".
        real_size (`bool`): Blocks of Qwen-Image at 1024x1024 or Wan 14B at 832x480x81, instead of small ones.
        device (`torch.device`)
    """

    def __init__(self, family, real_size, device):
        self.device, self.dtype = device, torch.float32 if device.type == "cpu" else torch.bfloat16
        if family == "qwen_image":
            self.pipeline, self.family = qwen_image, object.__new__(qwen_image.QwenImage)
            self.model_class, self.block_list, self.num_blocks = QwenImageTransformer2DModel, "transformer_blocks", 12
            heads = 24 if real_size else 4
            self.config = {"num_attention_heads": heads, "joint_attention_dim": 3584 if real_size else 256}
            self.latents, self.text = (16, 128, 128) if real_size else (16, 48, 48), 512 if real_size else 64
        else:
            self.pipeline, self.family = wan_video, object.__new__(wan_video.WanVideo)
            self.model_class, self.block_list, self.num_blocks = WanTransformer3DModel, "blocks", 8
            sizes = (40, 4096, 13824) if real_size else (3, 256, 1344)
            self.config = dict(zip(("num_attention_heads", "text_dim", "ffn_dim"), sizes, strict=True))
            self.latents, self.text = (16, 21, 60, 104) if real_size else (16, 3, 32, 32), 512
        self.transformer = self._make(self.num_blocks, device)
        for parameter in self.transformer.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.02)  # B as well, which would start at zero
        self.batch = self._batch(device)
        tokens, width = self.batch["latents"].numel() // 16 // 4, 128 * self.config["num_attention_heads"]
        self.name = f"{family}: {self.num_blocks} blocks of width {width}, {tokens} tokens, {self.text} of text"

    def _make(self, num_blocks, device):
        with init_empty_weights() if device == "meta" else torch.device(device):
            transformer = self.model_class(num_layers=num_blocks, **self.config)
        for parameter in transformer.parameters():
            parameter.data = parameter.data.to(self.dtype)
        if self.pipeline is wan_video:
            never_trained, wanted = [], wan_video.default_lora_targets(transformer)
        else:
            never_trained = qwen_image.never_trained_modules(transformer)
            wanted = VALUES["lora_target_modules"].split(",")
        names = find_lora_targets(transformer, wanted, never_trained=never_trained)
        args = {"training_mode": "lora", "lora_rank": 32, "lora_alpha": 32.0, "lora_dropout": 0.0, "seed": 0}
        make_trainable(transformer, argparse.Namespace(**args), names)
        return transformer

    def _batch(self, device):
        width = self.config.get("joint_attention_dim", self.config.get("text_dim"))
        tensors = {name: torch.randn(1, *self.latents, device=device) for name in ("latents", "noise")}
        tensors["prompt_embeds"] = torch.randn(1, self.text, width, device=device).to(self.dtype)
        return tensors | {"prompt_embeds_mask": None, "sigmas": torch.full((1,), 0.5, device=device)}

    def profile(self):
        """Return the `StepProfile` of these blocks."""

        def make_step(transformer):
            module, batch = DiffusionTrainingModule(self.family, transformer).train(), self._batch("cpu")
            return lambda: module(batch)

        model = shrink(self._make(self.num_blocks, "meta"), {self.block_list: self.num_blocks})
        return StepProfile(model, make_step, device_type=self.device.type)

    def plan(self, mode):
        """Return the `MemoryPlan` of all blocks for "keep", "recompute" or "park"."""
        flags = {
            "use_gradient_checkpointing": mode == "recompute",
            "use_gradient_checkpointing_offload": mode == "park",
        }
        args = argparse.Namespace(**flags, checkpoint_blocks=None)
        return MemoryPlan.from_args(args, {self.block_list: self.num_blocks})

    @contextlib.contextmanager
    def mode(self, name, plan=None):
        """Context with a function that runs one step in a mode, up to the point in between, and returns the loss."""
        dispatcher = {"keyword": save_by_keyword, "positional": save_by_position}.get(name)
        plan = self.plan("recompute" if dispatcher else name) if plan is None else plan
        module = DiffusionTrainingModule(self.family, self.transformer).train()
        with install_plan(self.transformer, plan) as stack:
            if dispatcher is not None:
                stack.enter_context(mock.patch.object(self.pipeline, "gradient_checkpoint_forward", dispatcher))
            yield lambda: module(self.batch)

    def gradients(self):
        """Return all gradients, and take them away."""
        grads = [p.grad for p in self.transformer.parameters() if p.requires_grad]
        self.transformer.zero_grad()
        return grads


class CountedSaveOnCpu(save_on_cpu):
    """Torch's `save_on_cpu`, with the bytes that it is shown, and copies."""

    num_bytes = 0
    pins = False

    def __init__(self):
        super().__init__(pin_memory=self.pins)
        pack = self.pack_hook

        def counted(tensor):
            CountedSaveOnCpu.num_bytes += tensor.nbytes
            return pack(tensor)

        self.pack_hook = counted


def save_by_keyword(block, checkpointing, offloading, /, *args, **kwargs):
    """Torch's recipe, with the arguments as the model functions give them."""
    with CountedSaveOnCpu():
        return checkpoint(block, *args, **kwargs, use_reentrant=False)


def save_by_position(block, checkpointing, offloading, /, *args, **kwargs):
    """The same with the arguments in the order of the block's signature."""
    bound = inspect.signature(block.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    with CountedSaveOnCpu():
        return checkpoint(block, *bound.args, use_reentrant=False)


def synchronize(device):
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_memory(case, run):
    """Return the bytes held between forward and backward, the peak above what was there before, and the counters."""
    gc.collect()
    offload.reset_counters()
    CountedSaveOnCpu.num_bytes = 0
    if case.device.type == "cpu":
        with LiveBytes() as live:
            loss = run()
            held = live.live_bytes
            loss.backward()
        peak = live.peak_bytes
    else:
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        loss = run()
        held = torch.accelerator.memory_allocated() - before
        loss.backward()
        synchronize(case.device)
        peak = torch.accelerator.max_memory_allocated() - before
    counters = offload.counters()
    for key in ("parked_bytes", "bytes_to_device"):
        counters[key] += CountedSaveOnCpu.num_bytes
    return held, peak, counters


def measure_seconds(case, run):
    """Return the seconds of one forward and backward pass."""
    synchronize(case.device)
    start = time.perf_counter()
    run().backward()
    synchronize(case.device)
    return time.perf_counter() - start


def plan_for_half(case, profile):
    """Return the plan for a budget halfway between keeping and recomputing everything."""
    ends = [profile.peak(case.plan(mode)).num_bytes for mode in ("keep", "recompute")]
    return MemoryPlan.from_budget({case.block_list: case.num_blocks}, sum(ends) // 2, profile.costs)


def compare_modes(case, rounds):
    """Print the table of one case.

    Returns:
        `dict[str, float]`: Mode -> its median time as a share of that of "recompute".
    """
    profile = case.profile()
    plans = {name: case.plan(name) for name in ("keep", "recompute", "park")}
    plans |= {"keyword": None, "positional": None, "half budget": plan_for_half(case, profile)}
    memory, seconds, expected = {}, {name: [] for name in plans}, None
    for name, plan in plans.items():
        with case.mode(name, plan) as run:
            run().backward()  # learns what is shared, and warms up
            case.gradients()
            memory[name] = measure_memory(case, run)
        grads = case.gradients()
        expected = expected or grads
        assert all(map(torch.equal, grads, expected)), f"the gradients of {name} are not those of keep"
    for _ in range(rounds):
        for name, plan in plans.items():
            with case.mode(name, plan) as run:
                seconds[name].append(measure_seconds(case, run))
            case.gradients()

    middle = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"\n{case.name}, {str(case.dtype).removeprefix('torch.')}; gradients of all modes are equal")
    print(f"half budget: {'; '.join(line.strip() for line in plans['half budget'].describe()[1:])}")
    print(
        f"{'mode':12} {'ms':>8} {'of recompute':>12} {'held MiB':>9} {'peak MiB':>9} {'forecast':>9} {'error':>7} "
        f"{'to host':>8} {'back':>8}"
    )
    for name, plan in plans.items():
        held, peak, counters = memory[name]
        predicted = f"{'':17}"
        if plan is not None:
            num_bytes = profile.peak(plan).num_bytes
            predicted = f"{num_bytes / MIB:9.1f} {num_bytes / peak - 1:+7.1%}"
        moved = [counters[key] / MIB for key in ("parked_bytes", "bytes_to_device")]
        print(
            f"{name:12} {1000 * middle[name]:8.1f} {middle[name] / middle['recompute']:12.3f} {held / MIB:9.1f} "
            f"{peak / MIB:9.1f} {predicted} {moved[0]:8.1f} {moved[1]:8.1f}",
            flush=True,
        )
    return {name: value / middle["recompute"] for name, value in middle.items()}


def dispatcher_overhead(device, num_blocks=40, rounds=30):
    """Return what a block call through the dispatcher takes longer than torch's own checkpoint called by hand.

    Returns:
        `dict[str, float]`: Mode -> milliseconds per block, forward and backward together.
    """

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64, device=device)

        def forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb):
            hidden_states = self.linear(hidden_states) * temb + rotary_emb[0] * rotary_emb[1]
            return encoder_hidden_states * 1, torch.tanh(hidden_states)

    def by_hand(block, checkpointing, offloading, /, **kwargs):
        return checkpoint(block, **kwargs, use_reentrant=False)

    blocks = [Block() for _ in range(num_blocks)]
    shared = {"temb": torch.randn(8, 64, device=device), "rotary_emb": (torch.randn(8, 64, device=device),) * 2}

    def milliseconds(dispatch, offloading):
        text = hidden_states = torch.randn(8, 64, device=device, requires_grad=True) * 1
        synchronize(device)
        start = time.perf_counter()
        for block in blocks:
            inputs = {"hidden_states": hidden_states, "encoder_hidden_states": text}
            text, hidden_states = dispatch(block, True, offloading, **inputs, **shared)
        hidden_states.sum().backward()
        synchronize(device)
        return 1000 * (time.perf_counter() - start) / num_blocks

    ours = gradient_checkpoint_forward
    variants = {"by hand": (by_hand, False), "recompute": (ours, False), "park": (ours, True)}
    times = {name: [] for name in variants}
    with mock.patch.object(offload, "MIN_PARKED_BYTES", 0):
        for _ in range(rounds):
            for name, variant in variants.items():
                times[name].append(milliseconds(*variant))
    base = statistics.median(times["by hand"])
    return {name: statistics.median(times[name]) - base for name in ("recompute", "park")}


def pinned_bandwidth(device, num_bytes=2**30):
    """Return the GB/s of copies (to the device, to the host) from and to pinned memory."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    other = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    result = []
    for target, source in ((other, host), (host, other)):
        target.copy_(source, non_blocking=True)
        synchronize(device)
        start = time.perf_counter()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        synchronize(device)
        result.append(4 * num_bytes / (time.perf_counter() - start) / 1e9)
    return result


def check_under_churn(case, num_steps):
    """Park while other memory of many sizes comes and goes on the device; raise if a gradient differs from keep's."""
    with case.mode("keep") as run:
        run().backward()
    expected = case.gradients()
    generator = torch.Generator().manual_seed(0)
    others = []
    for step in range(num_steps):
        for _ in range(8):
            num_bytes = int(2 ** (16 + 11 * torch.rand(1, generator=generator)))
            others.append(torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=case.device))
            if len(others) > 24:
                others.pop(int(torch.randint(len(others), (1,), generator=generator)))
        with case.mode("park") as run:
            run().backward()
        differing = sum(not torch.equal(*pair) for pair in zip(case.gradients(), expected, strict=True))
        assert differing == 0, f"step {step}: {differing} gradients differ under churn"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--real_size", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    hardware = platform.processor() or "CPU"
    if device.type != "cpu":
        hardware = torch.get_device_module(device).get_device_name()
        # Else two runs of one mode may differ.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        CountedSaveOnCpu.pins = True
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {hardware}")
    for family in ("qwen_image", "wan_video"):
        torch.manual_seed(0)
        case = Case(family, options.real_size, device)
        compare_modes(case, options.rounds)
        check_under_churn(case, num_steps=20 if device.type != "cpu" else 2)
        print("gradients of parked steps are those of keep under allocator churn")
        del case
        gc.collect()
    print("\ndispatcher, ms per block, forward and backward, above torch's own checkpoint called by hand:")
    for name, milliseconds in dispatcher_overhead(device).items():
        print(f"  {name:10} {milliseconds:+.3f}")
    if device.type != "cpu":
        to_device, to_host = pinned_bandwidth(device)
        print(f"pinned memory: {to_device:.1f} GB/s to the device, {to_host:.1f} GB/s to the host")


if __name__ == "__main__":
    main()
