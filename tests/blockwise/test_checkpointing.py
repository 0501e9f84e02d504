"""The dispatcher on blocks made to be nasty: every mode equals the plain call, bit for bit."""

import collections
import dataclasses
import gc

import pytest
import torch
from torch import nn

from blockwise import offload
from blockwise.checkpointing import configure_deepspeed_checkpointing
from blockwise.checkpointing import gradient_checkpoint_forward as dispatch


MODES = {"recompute": (True, False), "park": (False, True), "both": (True, True)}
Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Streams:
    hidden: torch.Tensor
    parts: dict
    name: str = "streams"


class Keyword(nn.Module):
    """Two optional keyword tensors, used asymmetrically."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x, scale=None, shift=None, model=None, flag=True):
        y = self.linear(x)
        y = y if scale is None else y * scale
        y = y if shift is None else y + shift
        return torch.tanh(y) if flag else y


class Nested(nn.Module):
    """Tensors in tuples, lists, dicts and dataclasses, in and out; a list that it writes into."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, pair, extra, streams, log):
        first, second = pair
        y = torch.sigmoid(self.linear(first) * extra["gain"][0]) + second
        log.append(tuple(y.shape))
        hidden = streams.hidden + streams.parts["shift"] * y.mean()
        return Pair(y, {"streams": dataclasses.replace(streams, hidden=hidden), "constant": 7})


class Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return nn.functional.dropout(torch.relu(self.linear(x)), 0.3, training=True)


@pytest.fixture(autouse=True)
def park_small_tensors(monkeypatch):
    monkeypatch.setattr(offload, "MIN_PARKED_BYTES", 1024)
    yield
    offload.set_limit(None)
    if offload.counters()["pool_bytes"]:
        gc.collect()
    assert offload.counters()["pool_bytes"] == 0, "a host copy outlived its graph"


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    """DeepSpeed in a process group of one over gloo."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
        deepspeed = pytest.importorskip("deepspeed")
        # One process shares no memory, and the extension for it is compiled for minutes.
        monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
        rendezvous = f"file://{tmp_path_factory.mktemp('gloo')}/rendezvous"
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method=rendezvous, rank=0, world_size=1)
        yield deepspeed
        torch.distributed.destroy_process_group()


@pytest.fixture
def deepspeed_checkpointing(gloo, monkeypatch):
    """DeepSpeed's activation checkpointing, configured by our own function; undone afterwards."""
    state = gloo.runtime.activation_checkpointing.checkpointing
    monkeypatch.setattr(state, "deepspeed_checkpointing_enabled", False)
    config = {"activation_checkpointing": {"cpu_checkpointing": False}}
    assert configure_deepspeed_checkpointing(
        config, use_gradient_checkpointing=True, use_gradient_checkpointing_offload=False, device="cpu"
    )
    return state


def run_nasty_blocks(checkpointing, offloading):
    """Return outputs, all gradients, what a block wrote into its argument, and the random state afterwards."""
    torch.manual_seed(0)
    first, second, nested, dropout = Keyword(), Keyword(), Nested(), Dropout()
    x = torch.randn(40, 32)  # needs no gradient, as latents do
    scale, shift = torch.randn(40, 32, requires_grad=True), torch.randn(32, requires_grad=True)
    gain, log = [torch.tensor(1.5, requires_grad=True)], []
    torch.manual_seed(1)
    mode = (checkpointing, offloading)
    h = dispatch(first, *mode, flag=True, shift=shift, x=x, scale=scale)  # out of the order of the signature
    h = dispatch(second, *mode, h, shift=shift, model="a keyword that the dispatcher must not take")
    h = dispatch(dropout, *mode, h)
    streams = Streams(h, {"shift": shift})
    pair = dispatch(nested, *mode, pair=(h, x), extra={"gain": gain}, streams=streams, log=log)
    assert isinstance(pair, Pair) and pair.second["constant"] == 7 and pair.second["streams"].name == "streams"
    h2 = dispatch(dropout, *mode, pair.first + pair.second["streams"].hidden)
    h2.square().mean().backward()
    parameters = [p for block in (first, second, nested, dropout) for p in block.parameters()]
    grads = [t.grad for t in (*parameters, scale, shift, gain[0])]
    assert all(grad is not None for grad in grads)
    return [h2.detach(), *grads, torch.get_rng_state()], log


@pytest.mark.parametrize("mode", MODES)
def test_equal_to_plain(mode):
    plain, plain_log = run_nasty_blocks(False, False)
    ours, log = run_nasty_blocks(*MODES[mode])
    assert all(map(torch.equal, plain, ours))
    assert log == plain_log, "what a block writes into its arguments is seen once, as in a plain call"


@pytest.mark.parametrize("mode", MODES)
def test_equal_to_plain_under_deepspeed(mode, deepspeed_checkpointing):
    plain, _ = run_nasty_blocks(False, False)
    ours, _ = run_nasty_blocks(*MODES[mode])
    assert all(map(torch.equal, plain, ours))


def test_same_object_back_when_off():
    tensor = torch.randn(3)
    assert dispatch(lambda x: x, False, False, tensor) is tensor


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(32, 32), 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.linear(x))


def count_calls(checkpointing, offloading):
    blocks = [Counted() for _ in range(3)]
    h = torch.randn(40, 32)
    for block in blocks:
        h = dispatch(block, checkpointing, offloading, h)
    h.sum().backward()
    return [block.calls for block in blocks]


@pytest.mark.parametrize("mode", MODES)
def test_forward_runs_once_plain_and_twice_recomputed(mode):
    assert count_calls(False, False) == [1, 1, 1]
    assert count_calls(*MODES[mode]) == [2, 2, 2]


@pytest.mark.parametrize("mode", MODES)
def test_plain_call_when_gradients_are_disabled(mode):
    offload.reset_counters()
    block, x = Counted(), torch.randn(40, 32)
    with torch.no_grad():
        dispatch(block, *MODES[mode], x)
        assert dispatch(lambda x: x, *MODES[mode], x) is x
    assert block.calls == 1 and offload.counters()["parked_tensors"] == 0


def test_every_block_is_recomputed_under_deepspeed(deepspeed_checkpointing):
    assert count_calls(True, False) == [2, 2, 2], "block 0 too, though its input needs no gradient"
    assert count_calls(False, False) == [1, 1, 1]


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        y = self.linear(x)
        x.add_(1)
        return torch.tanh(y)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["in the block", "after the block", "through a view"])
def test_input_changed_in_place(mode, when):
    check_changed_input(MODES[mode], when)


@pytest.mark.parametrize("when", ["in the block", "after the block", "through a view"])
def test_input_changed_in_place_under_deepspeed(when, deepspeed_checkpointing):
    check_changed_input((True, False), when)


def check_changed_input(mode, when):
    x = torch.randn(40, 32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        if when == "in the block":
            dispatch(ChangesItsInput(), *mode, x=x)
        else:
            y = dispatch(Counted(), *mode, x=x)
            (x if when == "after the block" else x[:3]).mul_(2)
            y.sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_two_forwards_before_a_backward(mode):
    def run(mode):
        torch.manual_seed(0)
        block, x = Dropout(), torch.randn(40, 32)
        first, second = dispatch(block, *mode, x * 2), dispatch(block, *mode, x * 3)
        (first.sum() * second.mean()).backward()
        return [p.grad for p in block.parameters()]

    assert all(map(torch.equal, run((False, False)), run(MODES[mode])))


def test_backward_twice_over_a_parked_graph():
    block, x = Counted(), torch.randn(40, 32)
    y = dispatch(block, False, True, x * 1).sum()
    y.backward(retain_graph=True)
    once = block.linear.weight.grad.clone()
    y.backward()
    assert torch.equal(block.linear.weight.grad, 2 * once)


# ---------------------------------------------------------------- what is parked


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, hidden_states, temb, rope, weight, small, expanded):
        y = torch.tanh(self.linear(hidden_states)) * temb + rope[0] * rope[1]
        return y + weight.mean() + small + expanded.mean()


TOKENS = 256
INPUT_BYTES = TOKENS * 32 * 4


def forward_of(blocks, parameter):
    h = torch.randn(TOKENS, 32) * 1
    temb = torch.randn(TOKENS, 32, requires_grad=True) * 1
    rope = (torch.randn(TOKENS, 32), torch.randn(TOKENS, 32))
    small = torch.randn(32)
    for block in blocks:
        expanded = torch.randn(1, 32).expand(TOKENS, 32)
        h = dispatch(
            block, True, True, hidden_states=h, temb=temb, rope=rope, weight=parameter, small=small, expanded=expanded
        )
    return h.sum()


def test_parked_bytes_are_what_arithmetic_says():
    blocks, parameter = nn.ModuleList(Block() for _ in range(5)), nn.Parameter(torch.randn(TOKENS, 32))
    forward_of(blocks, parameter).backward()  # the first step learns which tensors are shared
    offload.reset_counters()
    loss = forward_of(blocks, parameter)
    assert offload.counters()["parked_tensors"] == 5, "one per block: no shared, small, expanded one, no parameter"
    assert offload.counters()["parked_bytes"] == 5 * INPUT_BYTES
    assert offload.counters()["pool_bytes"] == offload.counters()["pool_peak_bytes"] == 5 * INPUT_BYTES
    loss.backward()
    del loss
    assert offload.counters()["pool_bytes"] == 0


@pytest.mark.parametrize("room", [0, 1, 0.99, 1.0, 2.5, 4.99, 5.0, 100])
def test_a_pool_of_any_size_gives_the_same_gradients(room, caplog):
    """`room` is the limit in inputs of a block. What finds none stays on the device: counted, said once."""

    def steps():
        torch.manual_seed(0)
        blocks, parameter = nn.ModuleList(Block() for _ in range(5)), nn.Parameter(torch.randn(TOKENS, 32))
        for _ in range(3):  # the first step learns which tensors are shared
            offload.reset_counters()
            forward_of(blocks, parameter).backward()
        return [tensor.grad for tensor in (*blocks.parameters(), parameter)], offload.counters()

    expected, without_limit = steps()
    assert without_limit["blocks_refused"] == 0
    offload.set_limit(int(room * INPUT_BYTES))
    grads, counters = steps()
    assert all(map(torch.equal, grads, expected))
    parked = min(int(room), 5)
    assert (counters["parked_tensors"], counters["blocks_refused"]) == (parked, 5 - parked)
    assert counters["pool_peak_bytes"] == parked * INPUT_BYTES and counters["pool_bytes"] == 0
    said = [record.getMessage() for record in caplog.records if "--offload_buffer_size" in record.getMessage()]
    assert len(said) == (parked < 5)
    if said:
        assert f"(the limit is {int(room * INPUT_BYTES)})" in said[0] and "of a Block were refused" in said[0]


@pytest.mark.parametrize("num_bytes", [0, 40 * 32 * 4, None])
def test_equal_to_plain_with_little_room(num_bytes):
    plain, _ = run_nasty_blocks(False, False)
    offload.set_limit(num_bytes)
    ours, _ = run_nasty_blocks(False, True)
    assert all(map(torch.equal, plain, ours))


def test_room_comes_back_with_the_graph():
    offload.set_limit(3 * 40 * 32 * 4)
    blocks = [Counted() for _ in range(3)]
    for _ in range(4):
        offload.reset_counters()
        h = torch.randn(40, 32) * 1
        for block in blocks:
            h = dispatch(block, False, True, x=h)
        assert offload.counters()["blocks_refused"] == 0
        del h  # without a backward pass


def test_shared_tensors_do_not_stay_parked_in_the_first_step():
    blocks, parameter = nn.ModuleList(Block() for _ in range(5)), nn.Parameter(torch.randn(TOKENS, 32))
    loss = forward_of(blocks, parameter)
    assert offload.counters()["pool_bytes"] == 5 * INPUT_BYTES
    loss.backward()


@pytest.mark.parametrize("others", [(False, False), (True, False)])
def test_one_block_that_parks_among_others_leaves_alone_what_it_shares_with_them(others):
    blocks, parameter = nn.ModuleList(Block() for _ in range(3)), nn.Parameter(torch.randn(TOKENS, 32))

    def forward():
        h, temb = torch.randn(TOKENS, 32) * 1, torch.randn(TOKENS, 32, requires_grad=True) * 1
        shared = {"temb": temb, "rope": (temb * 2, temb * 3), "weight": parameter, "small": temb[0], "expanded": temb}
        for block, mode in zip(blocks, ((False, True), others, others), strict=True):
            h = dispatch(block, *mode, hidden_states=h, **shared)
        return h.sum()

    first = forward()
    assert offload.counters()["pool_bytes"] == INPUT_BYTES, "the second block has brought back what it is given too"
    first.backward()
    offload.reset_counters()
    forward().backward()
    assert offload.counters()["parked_bytes"] == INPUT_BYTES


def test_parked_tensors_leave_the_device():
    """The tensor itself is gone once the next is parked, not only copied. The newest, needed first, stays."""
    from torch.multiprocessing.reductions import StorageWeakRef

    blocks, storages = [Counted() for _ in range(3)], []
    h = torch.randn(40, 32) * 1
    for block in blocks:
        storages.append(StorageWeakRef(h.untyped_storage()))
        h = dispatch(block, False, True, x=h)
    assert [storage.expired() for storage in storages] == [True, True, False]
    h.sum().backward()


def test_leaves_that_collect_a_gradient_are_not_parked():
    """Autograd keeps them on the device anyway, parameters and others."""
    offload.reset_counters()
    x = torch.randn(40, 32, requires_grad=True)
    dispatch(Counted(), False, True, x).sum().backward()
    assert offload.counters()["parked_tensors"] == 0 and x.grad is not None


def test_tensor_in_two_arguments_of_one_block_is_parked_once():
    def add(x, y):
        return (x * y).tanh()

    offload.reset_counters()
    x = torch.randn(40, 32, requires_grad=True) * 1
    y = dispatch(add, False, True, x, y=[x][0])
    assert offload.counters()["parked_tensors"] == 1
    y.sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_tensor_given_twice_is_one_object_in_the_recomputation(mode):
    """Some modules ask `query is key`."""
    seen = []

    def block(x, y, z):
        seen.append(x is y and y is z["z"])
        return (x * y + z["z"]).tanh()

    x = torch.randn(40, 32, requires_grad=True) * 1
    dispatch(block, *MODES[mode], x, y=x, z={"z": x}).sum().backward()
    assert seen == [True, True]


class Features(dict):
    """A dict subclass, as feature extractors return."""


@pytest.mark.parametrize("mode", MODES)
def test_tensors_in_dict_subclasses_are_seen(mode):
    def block(features):
        assert isinstance(features, Features)
        return (features["x"] * 2).tanh()

    x = torch.randn(40, 32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weight = torch.ones(1, requires_grad=True)
        y = dispatch(lambda features: block(features) * weight, *MODES[mode], Features(x=x))
        x.mul_(2)
        y.sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_generators_are_refused(mode):
    with pytest.raises(TypeError, match="torch.Generator"):
        dispatch(lambda x, generator: x, *MODES[mode], torch.randn(3), generator=torch.Generator())


def test_tensor_that_skips_a_block_is_parked_once_and_right():
    """Given to the blocks 0 and 2, not to 1: the graph of block 0 must get its values back."""

    def run(mode):
        torch.manual_seed(0)
        blocks = [Keyword() for _ in range(3)]
        x = torch.randn(40, 32)
        skip = torch.randn(40, 32, requires_grad=True) * 1
        h = dispatch(blocks[0], *mode, x, scale=skip)
        h = dispatch(blocks[1], *mode, h)
        h = dispatch(blocks[2], *mode, h, shift=skip)
        h.sum().backward()
        return [p.grad for block in blocks for p in block.parameters()]

    assert all(map(torch.equal, run((False, False)), run((True, True))))


def test_caller_keeps_its_tensors():
    x = torch.randn(40, 32)
    address, copy = x.data_ptr(), x.clone()
    y = dispatch(Counted(), False, True, x=x)
    assert x.data_ptr() == address and torch.equal(x, copy)
    y.sum().backward()


def test_strides_survive_parking():
    seen = []

    def block(x):
        seen.append(x.stride())
        return torch.tanh(x)

    x = torch.randn(40, 32, requires_grad=True)
    dispatch(block, False, True, (x * 2).t()).sum().backward()
    assert seen == [(1, 32), (1, 32)]


def test_dropped_graphs_and_exceptions_leave_nothing_behind():
    blocks = [Counted() for _ in range(3)]
    for _ in range(3):
        h = torch.randn(40, 32) * 1
        for block in blocks:
            h = dispatch(block, False, True, x=h)
        assert offload.counters()["pool_bytes"] > 0
        del h
        assert offload.counters()["pool_bytes"] == 0

    def fails(x):
        raise KeyError("in the middle")

    h = dispatch(blocks[0], False, True, torch.randn(40, 32) * 1)
    with pytest.raises(KeyError):
        dispatch(fails, False, True, h)
    del h
    dispatch(blocks[0], False, True, torch.randn(40, 32) * 1).sum().backward()


# ---------------------------------------------------------------- DeepSpeed's config


@pytest.mark.parametrize(
    "section, flags, device, names",
    [
        ({"cpu_checkpointing": False}, (False, True), "cuda", "cpu_checkpointing"),
        ({"cpu_checkpointing": True}, (False, True), "cpu", "cpu_checkpointing"),
        ({"cpu_checkpointing": True}, (True, False), "cuda", "--use_gradient_checkpointing_offload"),
        ({}, (False, False), "cuda", "--use_gradient_checkpointing"),
        ({"partition_activations": True}, (True, False), "cuda", "partition_activations"),
        ({"cpu_checkpointin": True}, (True, False), "cuda", "cpu_checkpointin'"),
    ],
)
def test_deepspeed_section_that_cannot_work(section, flags, device, names):
    with pytest.raises(ValueError, match=names):
        configure_deepspeed_checkpointing(
            {"activation_checkpointing": section},
            use_gradient_checkpointing=flags[0],
            use_gradient_checkpointing_offload=flags[1],
            device=device,
        )


def test_deepspeed_config_without_the_section():
    flags = {"use_gradient_checkpointing": True, "use_gradient_checkpointing_offload": True}
    assert not configure_deepspeed_checkpointing({"zero_optimization": {"stage": 2}}, **flags, device="cuda")


def test_deepspeed_gets_aliases_and_shared_tensors_exempt(deepspeed_checkpointing, monkeypatch):
    """`cpu_checkpointing` empties what it takes: it must not get the caller's objects, nor copy shared tensors."""
    original, taken = deepspeed_checkpointing.non_reentrant_checkpoint, []

    def record(function, *tensors):
        taken.append(tensors)
        return original(function, *tensors)

    monkeypatch.setattr(deepspeed_checkpointing, "non_reentrant_checkpoint", record)
    blocks, parameter = nn.ModuleList(Block() for _ in range(3)), nn.Parameter(torch.randn(TOKENS, 32))
    forward_of(blocks, parameter).backward()
    taken.clear()
    forward_of(blocks, parameter).backward()
    for hidden_states, temb, first_rope, second_rope, weight, small, expanded in taken:
        assert not hidden_states.no_checkpointing
        assert all(t.no_checkpointing for t in (temb, first_rope, second_rope, weight, small, expanded))
        assert weight is not parameter
