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
from blockwise.plan import Cost, MemoryPlan
from blockwise.stock import install_plan
from blockwise.tracking import LiveBytes


# What plans are compared by: assumed figures of a large accelerator in bf16, and of its link to the host.
FLOPS_PER_SECOND, LINK_BYTES_PER_SECOND = 450e12, 50e9
NUM_MULTIPROCESSORS = 132  # of the same accelerator

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
        num_sums = -(-_num_multiprocessors() // (batch_size * num_heads))
    num_rows, width = -(-num_rows // 128) * 128, -(-width // 32) * 32
    return 4 * batch_size * num_heads * num_rows * (num_sums * width + 1)


def _num_multiprocessors():
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties().multi_processor_count
    return NUM_MULTIPROCESSORS


# ---------------------------------------------------------------- one step, in pieces


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of a step, in bytes.

    Args:
        rise_bytes (`int`): The highest that is alive in it, above what was at its start.
        change_bytes (`int`): What is alive at its end, less what was at its start.
        rise_gradient_bytes, change_gradient_bytes (`int`): The part of the two which is gradients of parameters.
        rise_of_others_bytes (`int`): The highest that is alive in it without these, above what was at its start.
    """

    rise_bytes: int = 0
    change_bytes: int = 0
    rise_gradient_bytes: int = 0
    change_gradient_bytes: int = 0
    rise_of_others_bytes: int = 0


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
    kept, stand_ins, whole = {}, {}, {}
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
        whole[blocks] = blocks._modules
    try:
        for blocks, indices in zip(whole, kept.values(), strict=True):
            blocks._modules = {str(place): blocks[index] for place, index in enumerate(indices)}
        return ShrunkModel(copy.deepcopy(transformer), kept, stand_ins)
    finally:
        for blocks, modules in whole.items():
            blocks._modules = modules


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
        self.block_lists = {name: len(indices) for name, indices in model.stand_ins.items()}
        self._model, self._make_step, self._device_type = model, make_step, device_type
        self._recorded = {}
        first, self._blocks = 0, []  # of the whole model: the name of each, and its index in the recordings
        for name, stand_ins in model.stand_ins.items():
            self._blocks += [(f"{name}.{index}", first + place) for index, place in enumerate(stand_ins)]
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

    def _record(self, recompute):
        """Return the `_Recording` with every block kept or with every block recomputed."""
        if recompute not in self._recorded:
            with self._fake_step("recompute" if recompute else "keep") as (blocks, transformer, step):
                self._recorded[recompute] = _record(blocks, transformer, step)
        return self._recorded[recompute]

    @functools.cached_property
    def inference_bytes(self):
        """The most bytes that a forward pass without gradients has alive, above what was there before it."""
        with self._fake_step() as (*_, step):
            return peak_of(step)

    @functools.cached_property
    def _flops(self):
        with self._fake_step() as (blocks, _, step):
            return _count_flops(blocks, step)

    def _activations(self, plan):
        """Return for each block of the real model what a plan does with its activations."""
        return [mode.activations for name in self.block_lists for mode in plan.modes[name]]

    def _input_bytes(self, plans, kind="input_bytes"):
        """Return for each block of the real model what it could park: zero if no plan parks."""
        if not any("park" in self._activations(plan) for plan in plans):
            return [0] * len(self._blocks)
        recorded = getattr(self._record(True), kind)
        return [recorded[block] for _, block in self._blocks]

    def parked_bytes(self, plan):
        """Return the bytes in host memory when the forward pass of a `MemoryPlan` has ended."""
        pairs = zip(self._input_bytes([plan]), self._activations(plan), strict=True)
        return sum(num_bytes for num_bytes, where in pairs if where == "park")

    def peak(self, plan, *, gradient_factor=1):
        """Return the `Peak` of a `MemoryPlan`.

        Args:
            gradient_factor (`float`):
                How many bytes stay of each byte of gradients that the backward pass makes: 0 where they are added to
                those that are there already, or go into a buffer; 2 where it makes fp32 sums of bf16 gradients.
        """
        (alive,), (gradients,) = self._moments([plan], gradient_factor)
        names = [name for name, _ in self._blocks]
        places = ["before the blocks", *(f"forward of {name}" for name in names), "after the blocks"]
        places += [f"backward of {name}" for name in reversed(names) for _ in range(2)]
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
        recomputed = [self._flops[block] / FLOPS_PER_SECOND for _, block in self._blocks]
        input_bytes = self._input_bytes(plans)
        moved = [num_bytes / LINK_BYTES_PER_SECOND for num_bytes in input_bytes]
        seconds = {"keep": [0.0] * len(moved), "recompute": recomputed, "park": list(map(max, recomputed, moved))}
        costs = []
        for first in range(0, len(plans), PLANS_AT_ONCE):
            some = plans[first : first + PLANS_AT_ONCE]
            peaks = self._moments(some, gradient_factor)[0].amax(1).tolist()
            for plan, peak_bytes in zip(some, peaks, strict=True):
                activations = self._activations(plan)
                added = sum(seconds[where][index] for index, where in enumerate(activations))
                parked = sum(input_bytes[index] for index, where in enumerate(activations) if where == "park")
                costs.append(Cost(added, parked, int(peak_bytes)))
        return costs

    def _moments(self, plans, gradient_factor):
        """Return what is alive at the highest moment of each piece of a step, and the gradients among it.

        Returns:
            Two `torch.Tensor` in float64 of shape (plans, 2 + 3 * blocks). The pieces: before the blocks, the forward
            pass of each, after them; then of each, the last first, its recomputation and its backward pass.
        """
        activations = [self._activations(plan) for plan in plans]
        recomputed = torch.tensor([[where != "keep" for where in row] for row in activations])  # (plans, blocks)
        parked = torch.tensor([[where == "park" for where in row] for row in activations])
        num_blocks = len(self._blocks)
        backwards = list(reversed(range(num_blocks)))
        block_of_piece = [0, *range(num_blocks), num_blocks - 1, *(index for index in backwards for _ in range(2))]
        tables = [self._pieces(mode) for mode in (False, True) if (recomputed == mode).any()]
        pieces = torch.where(recomputed[:, block_of_piece, None], tables[-1], tables[0])
        rise, change, gradient_rise, gradient_change, rise_of_others = pieces.unbind(2)  # (plans, pieces)
        change = change - gradient_change

        # The newest parked input stays on the device until the next one is parked, and in the backward pass each is
        # fetched while the parked block after it is recomputed: see `blockwise.offload`.
        index = torch.arange(num_blocks)
        newest = torch.where(parked, index, -1).cummax(1).values
        before = torch.cat([torch.full_like(newest[:, :1], -1), newest[:, :-1]], 1)  # the parked one before each block
        input_bytes = torch.tensor([*self._input_bytes(plans), 0], dtype=torch.float64)
        moved = torch.where(parked, input_bytes[before], 0)
        # What was fetched and needs no gradient is gone as soon as the block has run again.
        frozen = torch.tensor(self._input_bytes(plans, "frozen_input_bytes"), dtype=torch.float64)
        gone = torch.zeros_like(change)
        gone[:, num_blocks + 3 :: 2] = torch.where(parked & (index != newest[:, -1:]), frozen, 0).flip(1)
        arrived = torch.zeros_like(change)
        arrived[:, 1 : num_blocks + 1] = -moved
        arrived[:, num_blocks + 2 :: 2] = moved.flip(1)

        start = (change + arrived).cumsum(1) - change
        gradients = gradient_change.cumsum(1) - gradient_change
        # With gradients, and without, the highest may be at two moments of a piece.
        with_gradients = rise - gradient_rise + gradient_factor * (gradients + gradient_rise)
        is_with = with_gradients >= rise_of_others + gradient_factor * gradients
        held = (gradient_factor * torch.where(is_with, gradients + gradient_rise, gradients)).round()
        return start + torch.where(is_with, rise - gradient_rise, rise_of_others) + held - gone, held

    def _pieces(self, recompute):
        """Return the pieces of a step of the real model as `_moments` has them, of shape (pieces, fields of one)."""
        recording = self._record(recompute)
        counterparts = [block for _, block in self._blocks]
        pieces = [recording.before, *(recording.forward[block] for block in counterparts), recording.after]
        for block in reversed(counterparts):
            pieces += [recording.recomputation[block], recording.backward[block]]
        return torch.tensor([dataclasses.astuple(piece) for piece in pieces], dtype=torch.float64)


@dataclasses.dataclass
class _Recording:
    before: Piece
    forward: list[Piece]
    after: Piece
    recomputation: list[Piece]  # where nothing is recomputed, the backward pass itself
    backward: list[Piece]
    input_bytes: list[int]  # what each block could park
    frozen_input_bytes: list[int]  # of that, what needs no gradient


def _record(blocks, transformer, step):
    """Run `step` once and return its `_Recording`."""
    parameters = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    marks, inputs = {}, [None] * len(blocks)
    in_forward, peak_of_others = True, 0

    def note(live):
        nonlocal peak_of_others
        peak_of_others = max(peak_of_others, live.live_bytes - live.by_category["gradients"])

    with LiveBytes(on_change=note) as live, contextlib.ExitStack() as hooks:
        for parameter in parameters:
            hook = parameter.register_post_accumulate_grad_hook(lambda p: live.count([p.grad], "gradients"))
            hooks.callback(hook.remove)
        start_bytes = live.live_bytes

        def mark(name):
            nonlocal peak_of_others
            if name not in marks:
                live_bytes, peak_bytes, at_peak = live.mark()
                gradients = live.by_category["gradients"]
                marks[name] = live_bytes, peak_bytes, gradients, at_peak.get("gradients", 0), peak_of_others
                peak_of_others = live_bytes - gradients

        def before_block(index):
            def hook(block, args, kwargs):
                if in_forward:
                    mark(("forward", index))
                    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                    inputs[index] = [
                        (t.untyped_storage()._cdata, t.nbytes if offload.is_worth_parking(t) else 0, t.requires_grad)
                        for t in tensors
                    ]

            return hook

        def after_block(index):
            def hook(block, args, output):
                if not in_forward:
                    mark(("backward", index))  # it has run again, as far as was needed
                    return
                for tensor in tree_leaves(output):
                    if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                        # The first of its outputs whose gradient is there starts a block's backward pass.
                        tensor.register_hook(lambda grad: mark(("recomputation", index)))
                if len([name for name in marks if name[0] == "forward"]) == len(blocks):
                    mark("after")

            return hook

        for index, block in enumerate(blocks):
            hooks.callback(block.register_forward_pre_hook(before_block(index), with_kwargs=True).remove)
            # Also where the recomputation is broken off, which is done by an exception.
            hooks.callback(block.register_forward_hook(after_block(index), always_call=True).remove)
        live.mark()
        loss = step()
        in_forward = False
        loss.backward()
        mark("end")
        for parameter in parameters:
            parameter.grad = None

    pieces = _pieces(marks, start_bytes)
    return _Recording(
        before=pieces["before"],
        forward=[pieces["forward", index] for index in range(len(blocks))],
        after=pieces["after"],
        recomputation=[pieces["recomputation", index] for index in range(len(blocks))],
        backward=[pieces["backward", index] for index in range(len(blocks))],
        input_bytes=_parkable_bytes(inputs, (True, False)),
        frozen_input_bytes=_parkable_bytes(inputs, (False,)),
    )


def _pieces(marks, start):
    """Return the `Piece` that begins at each mark, or "before" the first, from what the marks hold in their order."""
    pieces, start_gradients = collections.defaultdict(Piece), 0
    # Each mark holds the peak of the piece that it ends, which began at the mark before it.
    for piece, end in zip(["before", *marks], marks.values(), strict=False):
        live_bytes, peak_bytes, gradients, gradients_at_peak, peak_of_others = end
        pieces[piece] = Piece(
            rise_bytes=peak_bytes - start,
            change_bytes=live_bytes - start,
            rise_gradient_bytes=gradients_at_peak - start_gradients,
            change_gradient_bytes=gradients - start_gradients,
            rise_of_others_bytes=peak_of_others - (start - start_gradients),
        )
        start, start_gradients = live_bytes, gradients
    return pieces


def _parkable_bytes(inputs, requires_grad):
    """Return for each block the bytes of those of its inputs that no other block is given."""
    result = []
    for index, tensors in enumerate(inputs):
        others = {address for i, entries in enumerate(inputs) if i != index for address, *_ in entries or ()}
        own = {address: num_bytes for address, num_bytes, requires in tensors or () if requires in requires_grad}
        result.append(sum(num_bytes for address, num_bytes in own.items() if address not in others))
    return result


def _count_flops(blocks, step):
    """Return for each block the floating-point operations of its forward pass."""
    counts = dict.fromkeys(blocks, 0)

    def count(sign, block):
        counts[block] += sign * counter.get_total_flops()

    # By itself the counter misses the attention kernel of the CPU.
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    known = {attention: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)}  # their shapes
    with FlopCounterMode(display=False, custom_mapping=known) as counter, torch.no_grad():
        for block in blocks:
            block.register_forward_pre_hook(lambda block, *_: count(-1, block))
            block.register_forward_hook(lambda block, *_: count(1, block))
        step()
    return list(counts.values())


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
    measured = {}

    def measure(shape):
        # Of two, since a loop over parameters holds on to something of the one before.
        if shape not in measured:
            state_bytes, transient_bytes = _measure_optimizer(optimizer_class, arguments, [shape] * 2)
            measured[shape] = state_bytes / 2, transient_bytes
        return measured[shape]

    # bytes(rows, columns) = a * rows * columns + b * (rows + columns) + c, from three sizes.
    known = [(64, 128), (128, 256), (256, 512)]
    system = torch.tensor([[rows * columns, rows + columns, 1] for rows, columns in known], dtype=torch.float64)

    def predict(shape):
        if math.prod(shape) <= 1 << 16:
            return measure(shape)
        figures = torch.tensor([measure(size) for size in known], dtype=torch.float64)
        rows, columns = shape[0], math.prod(shape[1:])
        entry = torch.tensor([rows * columns, rows + columns, 1], dtype=torch.float64)
        return tuple((entry @ torch.linalg.solve(system, figures)).tolist())

    counts = collections.Counter(map(tuple, shapes))
    predicted = {shape: predict(shape) for shape in counts}
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
    optimizer = optimizer_class(parameters, **arguments)
    with torch.random.fork_rng(devices=[]), LiveBytes() as live:
        optimizer.step()  # makes the state
    storages = {}
    for state in optimizer.state.values():
        for value in tree_leaves(state):
            if isinstance(value, torch.Tensor):
                storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
    state_bytes = sum(storages.values())
    with LiveBytes() as live:
        optimizer.step()
    return state_bytes, live.peak_bytes


def without_content(module):
    """Give a module on the meta device parameters and buffers without content. Call it inside `fake_tensors`.

    Returns:
        `nn.Module`: The same.
    """
    fakes = {}  # by the identity of what they replace: what is shared stays shared

    def fake(tensor):
        if id(tensor) not in fakes:
            fakes[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                fakes[id(tensor)] = nn.Parameter(fakes[id(tensor)], requires_grad=tensor.requires_grad)
        return fakes[id(tensor)]

    originals = [*module.parameters(), *module.buffers()]  # alive, or an identity could come twice
    for part in module.modules():
        own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        # And plain attributes, such as tables of frequencies.
        own += [(name, value) for name, value in vars(part).items() if isinstance(value, torch.Tensor)]
        originals += [tensor for _, tensor in own]
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
