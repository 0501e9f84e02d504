"""Predicts what a training step takes of a device's memory, from shapes alone: no weights, no accelerator.

One forward and backward pass of the real model runs on tensors without content (`FakeTensorMode`), with few blocks of
each list: the first, the last, and one of each kind between them. Its pieces (a block forward, a block backward, what
comes before and after) are then put together for the real number of blocks and for any `MemoryPlan`. Not in it: the
context of the device, workspaces of its libraries, fragmentation.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import math
import re
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from blockwise import offload
from blockwise.plan import ACTIVATIONS, Cost, MemoryPlan
from blockwise.stock import install_plan
from blockwise.tracking import LiveBytes


# What plans are compared by: assumed figures of a large accelerator in bf16, and of its link to the host.
FLOPS_PER_SECOND, LINK_BYTES_PER_SECOND = 450 * 10**12, 50 * 10**9
NUM_MULTIPROCESSORS = 132  # of the same accelerator

PARK, KEEP = map(ACTIVATIONS.index, ("park", "keep"))
PLANS_AT_ONCE = 2048  # of many that are compared


# ---------------------------------------------------------------- tensors without content


@contextlib.contextmanager
def fake_tensors(device_type):
    """Context in which tensors have shapes but no content, and save for the backward pass what they would there.

    Args:
        device_type (`str`):
            `"cpu"`, or the type of an accelerator. A build without that accelerator cannot even pretend to have it, so
            the tensors are on "cpu" either way; where the CPU's kernels save something else, they are replaced.
    """
    with contextlib.ExitStack() as stack:
        if device_type != "cpu":
            stack.enter_context(mock.patch("torch.nn.functional.rms_norm", _fused_rms_norm))
            stack.enter_context(mock.patch("torch.nn.functional.dropout", _fused_dropout))
            attention = functools.partial(_fused_attention, torch.nn.functional.scaled_dot_product_attention)
            stack.enter_context(mock.patch("torch.nn.functional.scaled_dot_product_attention", attention))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


class _FusedRMSNorm(torch.autograd.Function):
    """Saves what the fused kernel of accelerators does; the CPU, which has none, saves copies in fp32."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


def _fused_rms_norm(x, normalized_shape, weight=None, eps=None):
    return _FusedRMSNorm.apply(x, weight)


def _fused_dropout(x, p=0.5, training=True, inplace=False):
    """Keep a mask of one byte per element, where the CPU keeps one of the dtype of `x`."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


class _FusedAttention(torch.autograd.Function):
    """Saves and takes what the fused kernels of accelerators do; the CPU's sums up in the gradients themselves."""

    @staticmethod
    def forward(ctx, attention, query, key, value):
        result = attention(query, key, value)
        ctx.save_for_backward(query, key, value, result, query.new_empty(query.shape[:-1], dtype=torch.float32))
        ctx.is_flash = attention.keywords["attn_mask"] is None and query.dtype != torch.float32
        return result

    @staticmethod
    def backward(ctx, grad):
        query, key, value, *_ = ctx.saved_tensors
        scratch_bytes = attention_scratch_bytes(*query.shape, is_flash=ctx.is_flash)
        scratch = query.new_empty(scratch_bytes, dtype=torch.uint8)
        gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
        del scratch  # only now
        return None, *gradients


def _fused_attention(attention, query, key, value, attn_mask=None, **settings):
    attention = functools.partial(attention, attn_mask=attn_mask, **settings)
    if not torch.is_grad_enabled():
        return attention(query, key, value)
    return _FusedAttention.apply(attention, query, key, value)


def attention_scratch_bytes(batch_size, num_heads, num_rows, width, *, is_flash):
    """Return what the backward pass of attention takes on CUDA in addition to the gradients that it makes.

    FlashAttention-2 (`mha_bwd` in torch's aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp) adds up the
    gradient of the query in fp32, rows rounded up to 128 and the width of a head to 32, with one more number for each
    row. Where it is to be deterministic it makes as many of these sums as keep all multiprocessors busy. The
    memory-efficient kernel (mem_eff_attention/kernel_backward.h) has one such sum in any case.

    Args:
        batch_size, num_heads, num_rows, width (`int`): Of the query; the last is that of a head.
        is_flash (`bool`): torch takes it for bf16 without a mask, and otherwise the memory-efficient kernel.
    """
    num_sums = 1
    if is_flash and torch.are_deterministic_algorithms_enabled():
        is_here = torch.cuda.is_available()
        count = torch.cuda.get_device_properties().multi_processor_count if is_here else NUM_MULTIPROCESSORS
        num_sums = -(-count // (batch_size * num_heads))
    num_rows, width = -(-num_rows // 128) * 128, -(-width // 32) * 32
    return 4 * batch_size * num_heads * num_rows * (num_sums * width + 1)


# ---------------------------------------------------------------- one step, in pieces


@dataclasses.dataclass(frozen=True)
class Peak:
    """The highest moment of a step, in bytes above what was there before it.

    Args:
        num_bytes (`int`)
        gradient_bytes (`int`): The part of it that is gradients of parameters.
        place (`str`): When it is reached, such as "backward of transformer_blocks.7".
    """

    num_bytes: int
    gradient_bytes: int
    place: str


@dataclasses.dataclass
class ShrunkModel:
    """A transformer with few of its blocks, which represent all of them.

    Args:
        transformer (`nn.Module`)
        kept (`dict[str, list[int]]`): Name of a block list -> index in the whole model of each block that it has here.
        stand_ins (`dict[str, list[int]]`): Name of a block list -> for each block of the whole model its index here.
    """

    transformer: nn.Module
    kept: dict
    stand_ins: dict

    def names(self, names):
        """Return the names here of those of the modules `names` of the whole model that are here."""
        found = []
        for name in names:
            block = re.match(rf"({'|'.join(map(re.escape, self.kept))})\.(\d+)\.", name)
            if block is None:
                found.append(name)
            elif (index := int(block[2])) in self.kept[block[1]]:
                found.append(f"{block[1]}.{self.kept[block[1]].index(index)}.{name[block.end() :]}")
        return found


def shrink(transformer, block_lists, names=()):
    """Return a `ShrunkModel`: a copy with the first block of each list, the last, and one of each kind between them.

    Kinds differ in their class, in their parameters, and in which of the modules called `names` they have.

    Args:
        transformer (`nn.Module`): On the meta device.
        block_lists (`dict[str, int]`): Name -> number of blocks, in the order in which they run.
        names (`list[str]`): Of modules that will be trained, or will not.
    """
    kept, stand_ins, dropped = {}, {}, {}
    for list_name, num_blocks in block_lists.items():
        blocks, kinds, of_kind = transformer.get_submodule(list_name), {}, []
        for index, block in enumerate(blocks):
            prefix = f"{list_name}.{index}."
            parameters = [(n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters()]
            named = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
            kind = (index == 0, index == num_blocks - 1, type(block), *parameters, *named)
            of_kind.append(kinds.setdefault(kind, index))
        kept[list_name] = list(kinds.values())
        stand_ins[list_name] = [kept[list_name].index(index) for index in of_kind]
        dropped |= {id(block): nn.Identity() for index, block in enumerate(blocks) if index not in kept[list_name]}
    small = copy.deepcopy(transformer, dropped)  # which is a memo: what it has is not copied
    for list_name, indices in kept.items():
        blocks = small.get_submodule(list_name)
        small.set_submodule(list_name, nn.ModuleList(blocks[index] for index in indices))
    return ShrunkModel(small, kept, stand_ins)


class StepProfile:
    """What a forward and backward pass takes, for any plan.

    Args:
        model (`ShrunkModel`): With all that is trained, such as adapters.
        make_step (`Callable[[nn.Module], Callable[[], torch.Tensor]]`):
            Called with such a transformer without content, inside `fake_tensors`: it makes a batch, and returns a
            function from there to a loss.
        device_type (`str`): See `fake_tensors`.
    """

    def __init__(self, model, make_step, *, device_type):
        self._model, self._make_step, self._device_type = model, make_step, device_type
        self._lists, self._recordings = [*model.stand_ins], {}
        first, self._names, self._counterparts = 0, [], []  # of each block of the whole model
        for name, stand_ins in model.stand_ins.items():
            self._names += [f"{name}.{index}" for index in range(len(stand_ins))]
            self._counterparts += [first + place for place in stand_ins]
            first += len(model.kept[name])

    @contextlib.contextmanager
    def _fake_step(self, activations="keep"):
        """Context with the blocks of a transformer without content, all in one mode, itself, and a step of it."""
        transformer = copy.deepcopy(self._model.transformer)
        lists = {name: len(kept) for name, kept in self._model.kept.items()}
        install_plan(transformer, MemoryPlan.uniform(lists, activations))
        with fake_tensors(self._device_type):
            without_content(transformer)
            blocks = [block for name in lists for block in transformer.get_submodule(name)]
            yield blocks, transformer, self._make_step(transformer)

    def _recording(self, activations):
        """Return the pieces of a step with all blocks in one mode, and what each could park: see `_Recording`."""
        if activations not in self._recordings:
            with self._fake_step(activations) as step:
                recording = _Recording(*step)
            self._recordings[activations] = recording.pieces, recording.input_bytes()
        return self._recordings[activations]

    @property
    def inference_bytes(self):
        """The most bytes that a forward pass without gradients has alive, above what was there before it."""
        return self._inference[0]

    @functools.cached_property
    def _inference(self):
        """The `inference_bytes`, and the floating-point operations of each block of the whole model."""
        with self._fake_step() as (blocks, _, step):
            counts = dict.fromkeys(blocks, 0)

            def count(sign, block):
                counts[block] += sign * counter.get_total_flops()

            for block in blocks:
                block.register_forward_pre_hook(lambda block, *_: count(-1, block))
                block.register_forward_hook(lambda block, *_: count(1, block))
            # By itself the counter misses the attention kernel of the CPU.
            attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            known = {attention: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)}  # their shapes
            with FlopCounterMode(display=False, custom_mapping=known) as counter:
                peak_bytes = peak_of(step)
        return peak_bytes, torch.tensor(list(counts.values()))[self._counterparts]

    def _modes(self, plans):
        """Return the place in `ACTIVATIONS` of the mode of each block of the whole model, of shape (plans, blocks)."""
        modes = ([mode for name in self._lists for mode in plan.modes[name]] for plan in plans)
        return torch.tensor([[ACTIVATIONS.index(mode.activations) for mode in row] for row in modes])

    def _input_bytes(self, modes):
        """Return what each block could park, and of that what needs no gradient: (2, blocks). Zeros if none parks."""
        if not (modes == PARK).any():
            return torch.zeros(2, len(self._names), dtype=torch.int64)
        return torch.tensor(self._recording("recompute")[1]).T[:, self._counterparts]

    def parked_bytes(self, plan):
        """Return the bytes in host memory when the forward pass of a `MemoryPlan` has ended."""
        modes = self._modes([plan])
        return int(((modes == PARK) * self._input_bytes(modes)[0]).sum())

    def peak(self, plan, *, gradient_factor=1):
        """Return the `Peak` of a `MemoryPlan`.

        Args:
            gradient_factor (`float`):
                How many bytes stay of each byte of gradients that the backward pass makes: 0 where they are added to
                those that are there already, or go into a buffer; 2 where it makes fp32 sums of bf16 gradients.
        """
        (alive,), (gradients,) = self._moments(self._modes([plan]), gradient_factor)
        places = ["before the blocks", *(f"forward of {name}" for name in self._names), "after the blocks"]
        places += [f"backward of {name}" for name in reversed(self._names) for _ in range(2)]
        highest = int(alive.argmax())
        return Peak(int(alive[highest]), int(gradients[highest]), places[highest])

    def costs(self, plans, *, gradient_factor=1):
        """Return what each of many plans costs, for `MemoryPlan.from_budget`.

        A recomputed block runs forward again. A parked one also crosses the link to the host, which costs nothing as
        far as the computation of another block hides it.

        Args:
            plans (`list[MemoryPlan]`)
            gradient_factor (`float`): See `peak`.

        Returns:
            `list[Cost]`: Of a step on an accelerator, in addition to what was there before it.
        """
        modes, recomputed = self._modes(plans), self._inference[1]
        input_bytes, _ = self._input_bytes(modes)
        # In whole operations, since sums of them are exact in any order: plans that take equally long are equal.
        moved = input_bytes * (FLOPS_PER_SECOND // LINK_BYTES_PER_SECOND)
        added = torch.stack([torch.maximum(recomputed, moved), recomputed, 0 * recomputed])  # as in `ACTIVATIONS`
        seconds = added[modes, torch.arange(len(self._names))].sum(1) / FLOPS_PER_SECOND
        parked_bytes = ((modes == PARK) * input_bytes).sum(1)
        some = modes.split(PLANS_AT_ONCE)
        peak_bytes = torch.cat([self._moments(each, gradient_factor)[0].amax(1) for each in some]).long()
        return list(map(Cost, seconds.tolist(), parked_bytes.tolist(), peak_bytes.tolist()))

    def _moments(self, modes, gradient_factor):
        """Return what is alive at the highest moment of each piece of a step, and the gradients among it.

        Args:
            modes (`torch.Tensor`): See `_modes`.

        Returns:
            Two `torch.Tensor` in float64 of shape (plans, 2 + 3 * blocks). The pieces: before the blocks, the forward
            pass of each, after them; then of each, the last first, its recomputation and its backward pass.
        """
        recomputed, parked = modes != KEEP, modes == PARK  # (plans, blocks)
        num_blocks = len(self._names)
        backwards = list(reversed(range(num_blocks)))
        block_of_piece = [0, *range(num_blocks), num_blocks - 1, *(index for index in backwards for _ in range(2))]
        tables = [self._pieces("keep")] if not recomputed.all() else []
        tables += [self._pieces("recompute")] if recomputed.any() else []
        pieces = torch.where(recomputed[:, block_of_piece, None], tables[-1], tables[0])
        rise, gradient_rise, rise_of_others, change, gradient_change = pieces.unbind(2)  # (plans, pieces)

        # The newest parked input stays on the device until the next one is parked, and in the backward pass each is
        # fetched while the parked block after it is recomputed: see `blockwise.offload`.
        index = torch.arange(num_blocks)
        newest = torch.where(parked, index, -1).cummax(1).values
        before = torch.cat([torch.full_like(newest[:, :1], -1), newest[:, :-1]], 1)  # the parked one before each block
        input_bytes, frozen_bytes = self._input_bytes(modes)
        moved = torch.where(parked & (before >= 0), input_bytes[before], 0)
        # What was fetched and needs no gradient is gone as soon as the block has run again.
        gone = torch.zeros_like(change)
        gone[:, num_blocks + 3 :: 2] = torch.where(parked & (index != newest[:, -1:]), frozen_bytes, 0).flip(1)
        arrived = torch.zeros_like(change)
        arrived[:, 1 : num_blocks + 1] = -moved
        arrived[:, num_blocks + 2 :: 2] = moved.flip(1)

        start = (change + arrived).cumsum(1) - change
        gradients = gradient_factor * (gradient_change.cumsum(1) - gradient_change)
        # With gradients, and without, the highest may be at two moments of a piece.
        with_gradients = gradients + gradient_factor * gradient_rise
        is_with = rise + with_gradients >= rise_of_others + gradients
        held = torch.where(is_with, with_gradients, gradients).round()
        return start + torch.where(is_with, rise, rise_of_others) + held - gone, held

    def _pieces(self, activations):
        """Return the pieces of a step of the real model as `_moments` has them, of shape (pieces, numbers of one)."""
        (pieces, _), blocks = self._recording(activations), self._counterparts
        names = ["before", *(("forward", block) for block in blocks), "after"]
        names += [(phase, block) for block in reversed(blocks) for phase in ("recomputation", "backward")]
        return torch.tensor([pieces.get(name, (0,) * 5) for name in names], dtype=torch.float64)


class _Recording(LiveBytes):
    """One forward and backward pass in pieces, in which gradients of parameters are counted apart from all others.

    Attributes:
        pieces (`dict`):
            "before" and "after" the blocks, and with the index of a block ("forward", index), ("backward", index) and
            ("recomputation", index), which is the backward pass itself where nothing is recomputed -> five numbers of
            bytes, above what was there at its start: the others and the gradients at its highest moment, the most of
            the others, and the others and the gradients at its end.
    """

    def __init__(self, blocks, transformer, step):
        super().__init__()
        self.pieces, self._begun = {}, ["before"]
        self._start = self._highest = (0, 0)  # the others, and the gradients
        self._most_of_others = 0
        self._inputs = [{} for _ in blocks]  # address -> bytes that could be parked, whether they need a gradient
        for parameter in transformer.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: self.count([p.grad], "gradients"))
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(functools.partial(self._before_block, index), with_kwargs=True)
            # Also where the recomputation is broken off, which is done by an exception.
            block.register_forward_hook(functools.partial(self._after_block, index), always_call=True)
        with self:
            loss = step()
            loss.backward()
            self._begin("end")

    def _now(self):
        gradients = self.by_category["gradients"]
        return self.live_bytes - gradients, gradients

    def changed(self):
        now = self._now()
        if sum(now) > sum(self._highest):
            self._highest = now
        self._most_of_others = max(self._most_of_others, now[0])

    def _begin(self, piece):
        """End a piece, and begin another one unless it has been there."""
        if piece in self._begun:
            return
        now, (others, gradients), highest = self._now(), self._start, self._highest
        rise = highest[0] - others, highest[1] - gradients, self._most_of_others - others
        self.pieces[self._begun[-1]] = (*rise, now[0] - others, now[1] - gradients)
        self._begun.append(piece)
        self._start, self._highest, self._most_of_others = now, now, now[0]

    def _before_block(self, index, block, args, kwargs):
        if "after" not in self._begun:
            self._begin(("forward", index))
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    num_bytes = leaf.nbytes if offload.is_worth_parking(leaf) else 0
                    self._inputs[index][leaf.untyped_storage()._cdata] = num_bytes, leaf.requires_grad

    def _after_block(self, index, block, args, output):
        if "after" in self._begun:
            self._begin(("backward", index))  # it has run again, as far as was needed
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                # The first of its outputs whose gradient is there starts a block's backward pass.
                leaf.register_hook(lambda grad: self._begin(("recomputation", index)))
        if len(self._begun) == 1 + len(self._inputs):
            self._begin("after")

    def input_bytes(self):
        """Return for each block the bytes that no other block is given, and of these those that need no gradient."""
        owners, result = collections.Counter(address for inputs in self._inputs for address in inputs), []
        for inputs in self._inputs:
            own = [entry for address, entry in inputs.items() if owners[address] == 1]
            result.append((sum(size for size, _ in own), sum(size for size, needs in own if not needs)))
        return result


# ---------------------------------------------------------------- the optimizer


def optimizer_bytes(optimizer_class, arguments, shapes):
    """Return what an optimizer keeps of fp32 parameters, and what a step takes in addition for a moment.

    Measured on small tensors. What a matrix needs is linear in its number of entries and in that of its rows and
    columns, so large ones are predicted from smaller ones; small ones are measured themselves.

    Args:
        optimizer_class (`type`), arguments (`dict`): See `training.optimizers.find_optimizer`.
        shapes (`list[tuple[int, ...]]`): Of the parameters.

    Returns:
        `tuple[int, int]`: Bytes of its state, and the most bytes that a step takes above that.
    """

    @functools.cache
    def measure(shape):
        # Of two, since a loop over parameters holds on to something of the one before.
        state_bytes, transient_bytes = _measure_optimizer(optimizer_class, arguments, [shape] * 2)
        return torch.tensor([state_bytes / 2, transient_bytes], dtype=torch.float64)

    # bytes(rows, columns) = a * rows * columns + b * (rows + columns) + c, from three sizes.
    known = [(64, 128), (128, 256), (256, 512)]

    def terms(rows, columns):
        return torch.tensor([rows * columns, rows + columns, 1], dtype=torch.float64)

    def predict(shape):
        if math.prod(shape) <= 1 << 16:
            return measure(shape)
        system = torch.stack([terms(*size) for size in known])
        factors = torch.linalg.solve(system, torch.stack([measure(size) for size in known]))
        return terms(shape[0], math.prod(shape[1:])) @ factors

    counts = collections.Counter(map(tuple, shapes))
    predicted = {shape: predict(shape).tolist() for shape in counts}
    state_bytes = sum(count * predicted[shape][0] for shape, count in counts.items())
    # Some optimizers take all parameters at once, others one after the other.
    _, of_one = _measure_optimizer(optimizer_class, arguments, [known[0]])
    if measure(known[0])[1] > 1.75 * of_one:
        return round(state_bytes), round(sum(count * predicted[shape][1] / 2 for shape, count in counts.items()))
    return round(state_bytes), round(max(transient for _, transient in predicted.values()))


def _measure_optimizer(optimizer_class, arguments, shapes):
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with torch.random.fork_rng(devices=[]), LiveBytes() as live:
        optimizer = optimizer_class(parameters, **arguments)
        optimizer.step()  # makes the state
    state_bytes = live.live_bytes
    with LiveBytes() as live:
        optimizer.step()
    return state_bytes, live.peak_bytes


def without_content(module):
    """Give a module on the meta device parameters and buffers without content. Call it inside `fake_tensors`.

    Returns:
        `nn.Module`: The same.
    """
    fakes = {}  # what is shared stays shared

    def fake(tensor):
        if tensor not in fakes:
            fakes[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                fakes[tensor] = nn.Parameter(fakes[tensor], requires_grad=tensor.requires_grad)
        return fakes[tensor]

    for part in module.modules():
        own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        # And plain attributes, such as tables of frequencies.
        own += [(name, value) for name, value in vars(part).items() if isinstance(value, torch.Tensor)]
        for name, tensor in own:
            setattr(part, name, fake(tensor))
    return module


def peak_of(function):
    """Return the most bytes that `function()` has alive above what was there before, without gradients.

    Call it inside `fake_tensors`.
    """
    with LiveBytes() as live, torch.no_grad():
        function()
    return live.peak_bytes
