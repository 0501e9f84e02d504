"""Asynchronous parking: on streams that do as little as they may, and on the CPU, whose copies are made at once."""

import contextlib
import gc
import math
import pathlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from blockwise import offload, pinned_pool
from blockwise.checkpointing import gradient_checkpoint_forward as dispatch
from blockwise.copier import Copier, StreamCopier
from blockwise.plan import MemoryPlan, Mode
from blockwise.stock import install_plan
from blockwise.tracking import LiveBytes
from pipelines.qwen_image import model_fn_qwen_image
from pipelines.wan_video import model_fn_wan_video


CPU = torch.device("cpu")
POISON = 0xFF  # a NaN in every floating point type, if all its bytes are this


# ---------------------------------------------------------------- streams that do as little as they may


class LazyCopier(StreamCopier):
    """The streams of an accelerator, as a test sees them: each copy is made as late as the order of streams allows.

    Its target is poison until then. Device memory is only known weakly: when it is freed before the copy was waited
    for, the copy never happens, and `complaints` says so, as it does of host memory that two copies without an order
    between them use. The computation, real and on the CPU, is always at the last thing that it was given; so a copy
    that does not wait for it is too early, and leaves poison.

    Args:
        without (`set[tuple[str, str]]`): (who, for whom): waits between streams that are not made.
    """

    pin_memory = False

    def __init__(self, without=()):
        self.without, self.pending, self.complaints, self.log = set(without), [], [], []
        self.clock = self.worked_at = 0
        self.current = LazyStream(self, "compute")
        self.names = iter(["to_host", "to_device"])
        super().__init__(CPU)

    def new_stream(self):
        return LazyStream(self, next(self.names))

    def new_event(self):
        return LazyEvent()

    def compute_stream(self):
        return self.current

    def enqueue(self, stream, target, source):
        LazyCopy(self, stream, target, source)
        self.clock += 1
        self.worked_at = self.clock  # the computation may have gone on since this copy

    def go_to(self, stream):
        """Compute on another stream from now on."""
        self.current = stream
        stream.run()

    @contextlib.contextmanager
    def omitting(self, *waits):
        before, self.without = self.without, {*self.without, *waits}
        yield
        self.without = before

    def check(self):
        """Return whether nothing went wrong, now that copies are not waited for any more."""
        for copy in self.pending:
            copy.check_memory()
        return not self.complaints


class LazyStream:
    def __init__(self, copier, name):
        self.copier, self.name = copier, name
        self.past, self.seen = set(), {}  # unfinished copies before what comes next; compute stream -> its time

    def wait_stream(self, other):
        self.wait_event(other.record_event(LazyEvent()))

    def record_event(self, event):
        copier = self.copier
        event.stream, event.past, event.seen = self, {copy for copy in self.past if not copy.done_at}, dict(self.seen)
        if self.name.startswith("compute"):
            event.seen[self] = copier.clock
        copier.clock += 1
        return event

    def wait_event(self, event):
        if (self.name, event.stream.name) not in self.copier.without:
            self.past |= event.past
            for stream, time in event.seen.items():
                self.seen[stream] = max(time, self.seen.get(stream, -1))
        if self is self.copier.current:
            self.run()
        elif self.name.startswith("compute"):  # it comes that far later, but nothing of it overtakes the copies
            for copy in self.past:
                copy.waited_for = True

    def run(self):
        for copy in sorted(self.past, key=lambda copy: copy.number):
            copy.run()
        self.past.clear()


class LazyEvent:
    """What is recorded is set by `LazyStream.record_event`."""


class LazyCopy:
    def __init__(self, copier, stream, target, source):
        self.copier, self.stream, self.past = copier, stream, set(stream.past)
        self.name, self.number, self.done_at = f"{stream.name} {copier.clock}", copier.clock, 0
        self.waited_for = False
        self.poisons_next = []
        self.to_host = stream.name == "to_host"
        self.host, device_side = (target, source) if self.to_host else (source, target)
        self.device_side = StorageWeakRef(device_side.untyped_storage())
        # The compute stream has made what is copied, or used the target's memory, at any time until now.
        self.too_early = stream.seen.get(copier.current, -1) < copier.worked_at
        rivals = [copy for copy in copier.pending if copy.shares_host_memory(self) and (copy.to_host or self.to_host)]
        copier.complaints += [f"{self.name} races {copy.name}" for copy in rivals if copy not in self.past]
        if self.to_host and rivals:
            rivals[-1].poisons_next.append(target)
        else:
            target.fill_(POISON)
        copier.log.append((stream.name, device_side.data_ptr(), len(target)))
        copier.pending.append(self)
        stream.past.add(self)

    def shares_host_memory(self, other):
        start, others_start = self.host.data_ptr(), other.host.data_ptr()
        return start < others_start + len(other.host) and others_start < start + len(self.host)

    def check_memory(self):
        if self.device_side.expired() and not self.waited_for:
            self.copier.complaints.append(f"{self.name}: the device memory was freed before the copy was waited for")

    def run(self):
        if self.done_at:
            return
        for copy in sorted(self.past, key=lambda copy: copy.number):
            copy.run()
        self.check_memory()
        if not self.device_side.expired() and not self.too_early:
            device_side = torch.empty(0, dtype=torch.uint8)
            device_side.set_(torch.UntypedStorage._new_with_weak_ptr(self.device_side.cdata))
            target, source = (self.host, device_side) if self.to_host else (device_side, self.host)
            target.copy_(source)
        for target in self.poisons_next:
            target.fill_(POISON)
        self.copier.pending.remove(self)
        self.copier.clock += 1
        self.done_at, self.past = self.copier.clock, set()


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch):
    """Small tensors are parked too, into a pool of their own."""
    monkeypatch.setattr(offload, "MIN_PARKED_BYTES", 1024)
    monkeypatch.setitem(offload._copiers, CPU, Copier(CPU))
    offload.reset_counters()
    yield
    offload.set_limit(None)
    if offload.counters()["pool_bytes"]:
        gc.collect()
    assert offload.counters()["pool_bytes"] == 0, "a host copy outlived its graph"


@pytest.fixture
def lazy(monkeypatch):
    """The copier of the CPU, which is a `LazyCopier` in this test."""
    copier = LazyCopier()
    monkeypatch.setitem(offload._copiers, CPU, copier)
    return copier


# ---------------------------------------------------------------- equal gradients


ROWS = 40
INPUT_BYTES = ROWS * 32 * 4


class Block(nn.Module):
    def __init__(self, fails_in_run=None):
        super().__init__()
        self.linear, self.fails_in_run, self.runs = nn.Linear(32, 32), fails_in_run, 0

    def forward(self, x, skip=None):
        self.runs += 1
        if self.runs == self.fails_in_run:
            raise KeyError("in the middle")
        y = torch.tanh(self.linear(nn.functional.dropout(x, 0.2)))
        return y if skip is None else y * skip


class TwoStreams(nn.Module):
    """A block in the manner of Qwen-Image: two streams of its own, and what it shares with all others."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, hidden_states, encoder_hidden_states, temb, rope):
        mixed = nn.functional.dropout(hidden_states.mean(0) + encoder_hidden_states.mean(0), 0.2)
        hidden_states = hidden_states + torch.tanh(self.image(hidden_states) * temb[0] + mixed) * rope[0]
        return torch.tanh(self.text(encoder_hidden_states) * temb[1, :20] + mixed), hidden_states


def latents(rows=ROWS):
    return torch.randn(rows, 32) * 1


def chain(blocks, modes, h):
    for block, mode in zip(blocks, modes, strict=True):
        h = dispatch(block, mode != "keep", mode == "park", h)
    return h


def one_stream(mode):
    blocks = nn.ModuleList(Block() for _ in range(5))
    chain(blocks, [mode] * 5, latents()).square().mean().backward()
    return blocks


def two_streams(mode):
    """Accumulated over three steps; the first one learns which tensors are shared, with their copies in flight."""
    blocks = nn.ModuleList(TwoStreams() for _ in range(4))
    for _ in range(3):
        temb, rope = torch.randn(2, ROWS, 32) * 1, (latents(), latents())
        image, text = latents(), latents(20)
        for block in blocks:
            arguments = {"temb": temb, "rope": rope, "hidden_states": image, "encoder_hidden_states": text}
            text, image = dispatch(block, mode != "keep", mode == "park", **arguments)
        image.square().mean().backward()
    return blocks


def two_forwards_before_a_backward(mode):
    blocks = nn.ModuleList(Block() for _ in range(3))
    losses = [chain(blocks, [mode] * 3, latents()).square().mean() for _ in range(2)]
    (losses[0] * losses[1]).backward()
    return blocks


def graph_retained(mode):
    blocks = nn.ModuleList(Block() for _ in range(4))
    first = chain(blocks, [mode] * 4, latents()).square().mean()
    first.backward(retain_graph=True)
    first.backward(retain_graph=True)
    chain(blocks, [mode] * 4, latents()).square().mean().backward()
    first.backward()
    return blocks


def graphs_dropped(mode):
    blocks = nn.ModuleList(Block() for _ in range(3))
    kept = chain(blocks, [mode] * 3, latents())
    for _ in range(5):
        chain(blocks, [mode] * 3, latents())
        chain(blocks, [mode] * 3, latents()).square().mean().backward()
    kept.square().mean().backward()
    return blocks


def exceptions(mode):
    """In a forward pass, then in a backward pass, while what it has fetched ahead is on its way."""
    blocks = nn.ModuleList(Block() for _ in range(4))
    broken = [*blocks[:3], Block(fails_in_run=1), blocks[3]]
    with pytest.raises(KeyError):
        chain(broken, [mode] * 5, latents())
    chain(blocks, [mode] * 4, latents()).square().mean().backward()
    if mode != "keep":
        state = torch.get_rng_state()
        with pytest.raises(KeyError):
            chain([*blocks[:3], Block(fails_in_run=2)], [mode] * 4, latents()).square().mean().backward()
        torch.set_rng_state(state)
    chain(blocks, [mode] * 4, latents()).square().mean().backward()
    return blocks


def skipping(mode):
    """An argument comes again: with its copy in flight, to a block that parks nothing and one that parks; or later."""
    blocks = nn.ModuleList(Block() for _ in range(5))
    for _ in range(2):
        first = latents()
        h = dispatch(blocks[0], mode != "keep", mode == "park", latents(), skip=first)
        h = h + dispatch(blocks[1], mode != "keep", mode == "park", first)
        del first
        chain(blocks[2:], [mode] * 3, h).square().mean().backward()
    for _ in range(2):
        early, late = latents(), latents()
        h = dispatch(blocks[0], mode != "keep", mode == "park", latents(), skip=early)
        h = dispatch(blocks[1], mode != "keep", mode == "park", h, skip=early)
        h = dispatch(blocks[2], mode != "keep", mode == "park", h, skip=late)
        h = chain(blocks[3:4], [mode], h)
        dispatch(blocks[4], mode != "keep", mode == "park", h, skip=late).square().mean().backward()
    return blocks


def backward_in_order(order):
    def in_another_order(mode):
        blocks = nn.ModuleList(Block() for _ in range(3))
        losses = [chain(blocks, [mode] * 3, latents()).square().mean() for _ in order]
        for index in order:
            losses[index].backward()
            losses[index] = None
        return blocks

    return in_another_order


def mixed(*modes):
    def of_several_modes(mode):
        blocks = nn.ModuleList(Block() for _ in modes)
        for _ in range(2):
            chain(blocks, ["keep"] * len(modes) if mode == "keep" else modes, latents()).square().mean().backward()
        return blocks

    return of_several_modes


KEEP, REDO, PARK = "keep", "recompute", "park"
SCENARIOS = {
    **{f.__name__: f for f in (one_stream, two_streams, two_forwards_before_a_backward, graph_retained)},
    **{f.__name__: f for f in (graphs_dropped, exceptions, skipping)},
    **{f"backward in order {order}": backward_in_order(order) for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0))},
    "first": mixed(PARK, KEEP, REDO, KEEP),
    "last": mixed(KEEP, REDO, PARK),
    "alternating": mixed(PARK, KEEP, PARK, REDO, PARK, REDO),
    "all but the last": mixed(PARK, PARK, PARK, REDO),
}


def gradients(scenario, mode):
    torch.manual_seed(0)
    blocks = SCENARIOS[scenario](mode)
    grads = [parameter.grad for parameter in blocks.parameters() if parameter.grad is not None]
    return grads + [torch.get_rng_state()]


def equal(tensors, others):
    return all(torch.equal(*pair) for pair in zip(tensors, others, strict=True))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_equal_to_plain(scenario):
    plain = gradients(scenario, KEEP)
    assert equal(gradients(scenario, PARK), plain)
    assert offload.counters()["parked_bytes"] > 0


@pytest.mark.parametrize("limit", [None, 3 * INPUT_BYTES, 0])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_equal_to_plain_with_copies_as_late_as_can_be(scenario, limit, lazy):
    plain = gradients(scenario, KEEP)
    offload.set_limit(limit)
    assert equal(gradients(scenario, PARK), plain)
    assert lazy.check(), lazy.complaints
    assert (offload.counters()["parked_bytes"] > 0) == (limit != 0)


# ---------------------------------------------------------------- every wait is needed


def is_right(lazy, scenario="one_stream"):
    """Whether parking gave the gradients of a plain run, and no copy went wrong."""
    plain = gradients(scenario, KEEP)
    return equal(gradients(scenario, PARK), plain) and lazy.check()


def test_copy_to_the_host_waits_for_the_computation_of_what_it_copies(lazy):
    with lazy.omitting(("to_host", "compute")):
        assert not is_right(lazy)


def test_source_is_not_freed_before_its_copy(lazy):
    with lazy.omitting(("compute", "to_host")):
        assert not is_right(lazy)


def test_reload_waits_for_the_memory_that_it_fills(lazy):
    with lazy.omitting(("to_device", "compute")):
        assert not is_right(lazy)


def test_recomputation_waits_for_the_reload(lazy):
    with lazy.omitting(("compute", "to_device")):
        assert not is_right(lazy)


@pytest.mark.parametrize("wait_is_made", [True, False])
def test_reload_waits_for_the_copy_to_the_host(lazy, wait_is_made):
    """Also when no computation has waited for that copy; here, since its source is known to stay."""

    def gradient(mode):
        torch.manual_seed(0)
        blocks, h, inputs = nn.ModuleList(Block() for _ in range(4)), latents(), []
        for block in blocks:
            inputs.append(h)
            h = dispatch(block, mode != KEEP, mode == PARK, h)
        h.square().mean().backward()
        return [parameter.grad for parameter in blocks.parameters()]

    plain = gradient(KEEP)
    with lazy.omitting(("compute", "to_host"), *[("to_device", "to_host")] * (not wait_is_made)):
        assert equal(gradient(PARK), plain) == wait_is_made


def interrupted_backward():
    """Return the end of a graph whose backward pass failed while the reload for its second block was in flight."""
    blocks = [Block(), Block(), Block(fails_in_run=2), Block()]
    loss = chain(blocks, [PARK] * 4, latents()).square().mean()
    try:
        loss.backward()
    except KeyError as error:
        error.__traceback__ = None
    return loss


@pytest.mark.parametrize("wait_is_made", [True, False])
def test_buffer_is_not_written_before_its_last_reload(lazy, wait_is_made):
    """A graph is dropped whose reload is in flight, and computation has gone on to another stream since."""
    loss = interrupted_backward()
    assert any(not copy.to_host for copy in lazy.pending)
    lazy.go_to(LazyStream(lazy, "compute of another thread"))
    del loss
    with lazy.omitting(*[("to_host", "to_device")] * (not wait_is_made)):
        assert is_right(lazy) == wait_is_made


@pytest.mark.parametrize("wait_is_made", [True, False])
def test_memory_of_a_dropped_graph_is_not_free_before_its_reload(lazy, wait_is_made):
    loss = interrupted_backward()
    assert any(not copy.to_host for copy in lazy.pending)
    with lazy.omitting(*[("compute", "to_device")] * (not wait_is_made)):
        del loss
        assert lazy.check() == wait_is_made


@pytest.mark.parametrize("wait_is_made", [True, False])
def test_memory_of_a_dropped_graph_is_not_free_before_its_copy(lazy, wait_is_made):
    h = chain([Block(), Block()], [PARK] * 2, latents())
    assert lazy.pending
    with lazy.omitting(*[("compute", "to_host")] * (not wait_is_made)):
        del h
        assert lazy.check() == wait_is_made


def test_finalizer_waits_on_the_stream_of_the_copy(lazy):
    """Not on the one that is current where the graph happens to be dropped: that one's memory is another."""
    loss = interrupted_backward()
    (reload,) = (copy for copy in lazy.pending if not copy.to_host)
    stream = lazy.current
    lazy.go_to(LazyStream(lazy, "compute of another thread"))
    del loss
    assert reload in stream.past and reload not in lazy.current.past
    assert lazy.check()


def test_no_record_stream():
    for path in pathlib.Path(offload.__file__).parent.glob("*.py"):
        assert ".record_stream" not in path.read_text(), path


# ---------------------------------------------------------------- the order of reloads


def test_one_group_is_fetched_ahead_and_the_newest_not_at_all(lazy):
    events, widths = [], [32, 40, 48, 56, 64, 72]

    class Named(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.linear, self.index = nn.Linear(widths[index], widths[index + 1]), index

        def forward(self, x, y):
            events.append(f"run {self.index}")
            return torch.tanh(self.linear(x)) + y.mean(), torch.tanh(self.linear(y))

    enqueue, group_of = lazy.enqueue, {ROWS * 4 * width: index for index, width in enumerate(widths)}

    def noted(stream, target, source):
        events.append(f"{stream.name} {group_of[len(target)]}")
        enqueue(stream, target, source)

    lazy.enqueue = noted
    x, y = latents(), latents()
    for index in range(5):
        x, y = dispatch(Named(index), True, True, x, y)
    assert events == [event for k in range(5) for event in (*[f"to_host {k}"] * 2, f"run {k}")]
    events.clear()
    (x + y).sum().backward()
    expected = [[f"to_device {k - 1}"] * 2 * (k > 0) + [f"run {k}"] for k in (4, 3, 2, 1, 0)]
    assert events == sum(expected, [])
    assert offload.counters()["bytes_to_device"] == 2 * ROWS * 4 * sum(widths[:4])
    assert offload.counters()["parked_bytes"] == 2 * ROWS * 4 * sum(widths[:5])


def test_at_most_one_group_waits_on_the_device_for_its_copy(lazy):
    storages, h = [], latents()
    for block in [Block() for _ in range(5)]:
        storages.append(StorageWeakRef(h.untyped_storage()))
        h = dispatch(block, True, True, h)
        assert [storage.expired() for storage in storages] == [True] * (len(storages) - 1) + [False]


def test_a_second_backward_reloads_again():
    blocks = [Block() for _ in range(4)]
    loss = chain(blocks, [PARK] * 4, latents()).square().mean()
    for times in (1, 2):
        loss.backward(retain_graph=True)
        assert offload.counters()["bytes_to_device"] == times * 3 * INPUT_BYTES


# ---------------------------------------------------------------- host memory


@pytest.fixture
def locked_slabs(monkeypatch):
    """Slabs that are said to be pinned and are not; of each the bytes that torch would allocate."""
    allocate, made = pinned_pool._Slab, []

    def make(num_bytes, pin_memory):
        made.append(1 << (num_bytes - 1).bit_length())  # what torch's CachingHostAllocator makes of it
        return allocate(num_bytes, pin_memory=False)

    monkeypatch.setattr(pinned_pool, "_Slab", make)
    return made


@pytest.mark.parametrize("pin_memory", [False, True])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_slabs(pin_memory, data, locked_slabs):
    """Any order of taking and giving back: pieces are whole, aligned and apart, and slabs never above their room."""
    pool, taken = pinned_pool.HostPool(pin_memory), []
    locked_slabs.clear()
    for _ in range(data.draw(st.integers(1, 40))):
        if taken and data.draw(st.booleans()):
            buffer, mark = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            assert (buffer.bytes == mark).all(), "another buffer was written into it"
            buffer.give_back()
            continue
        num_bytes, room = data.draw(st.integers(1, 5000)), data.draw(st.none() | st.integers(0, 20000))
        before, size = pool.slab_bytes, -(-num_bytes // 256) * 256
        mark = data.draw(st.integers(0, 255))
        try:
            buffer = pool.take(num_bytes, room)
        except RuntimeError:
            assert room < (1 << (size - 1).bit_length() if pin_memory else size) and pool.slab_bytes == before
            continue
        assert buffer.bytes.shape == (num_bytes,) and buffer.bytes.storage_offset() % 256 == 0
        buffer.bytes.fill_(mark)
        taken.append((buffer, mark))
        if slab_bytes := pool.slab_bytes - before:
            assert size <= slab_bytes <= (math.inf if room is None else room)
            assert 8 * size <= slab_bytes if room is None else min(8 * size, room // 2) <= slab_bytes
    slabs = pool.slab_bytes
    assert not pin_memory or slabs == sum(locked_slabs), "what is really allocated"
    for buffer, _ in taken:
        buffer.give_back()
    largest = max((len(slab.bytes) for slab in pool._slabs), default=0)
    if largest:
        pool.take(largest).give_back()  # all of its free pieces have become one
        assert pool.slab_bytes == slabs


def test_pieces_that_were_given_back_are_taken_first():
    pool = pinned_pool.HostPool(pin_memory=False)
    first, second, third = (pool.take(1000) for _ in range(3))
    first.give_back()
    third.give_back()
    assert pool.take(1024).bytes.data_ptr() == first.bytes.data_ptr()
    second.give_back()
    assert pool.take(7 * 1024).bytes.data_ptr() == second.bytes.data_ptr() and pool.slab_bytes == 8 * 1024


def test_a_refused_slab_is_tried_smaller(monkeypatch):
    """Down to one tensor, and the sizes that were refused not again."""
    allocate, made = pinned_pool._Slab, []

    def refuse(num_bytes, pin_memory):
        made.append(num_bytes)
        if num_bytes > 2048:
            raise RuntimeError("no memory can be locked")
        return allocate(num_bytes, pin_memory)

    monkeypatch.setattr(pinned_pool, "_Slab", refuse)
    pool = pinned_pool.HostPool(pin_memory=False)
    first = pool.take(1024)
    assert made == [8192, 4096, 2048] and pool.slab_bytes == 2048
    pool.take(1024), pool.take(1024)
    assert made[3:] == [2048]
    with pytest.raises(RuntimeError, match="no memory can be locked"):
        pool.take(4096)
    assert made[4:] == [4096], "the smallest that would do"
    assert pool.take(1024, room=1500) and made[5:] == [], "of the piece that is free"
    assert pool.take(1024, room=1500) and made[5:] == [1024]
    with pytest.raises(RuntimeError, match="no more than 1023 bytes may be taken"):
        pool.take(1024, room=1023)
    assert made[6:] == []
    del first


@pytest.mark.parametrize("num_inputs, parked", [(4, 5), (3.9, 4), (2, 3), (1, 1), (0.9, 0)])
def test_the_limit_counts_what_is_allocated(num_inputs, parked, locked_slabs, monkeypatch):
    """Inputs of 5120 bytes, pinned in slabs of a power of two: 8192 hold one, 16384 three, 32768 six."""
    monkeypatch.setattr(Copier, "pin_memory", True)
    monkeypatch.setitem(offload._copiers, CPU, Copier(CPU))
    offload.set_limit(int(num_inputs * 8192))
    gradients("one_stream", PARK)
    counters = offload.counters()
    assert counters["slab_bytes"] == sum(locked_slabs) <= num_inputs * 8192
    assert counters["parked_tensors"] == parked and counters["blocks_refused"] == 5 - parked


@pytest.mark.parametrize("slabs_before", [0, 1])
def test_refused_pinning_means_recompute(slabs_before, monkeypatch, caplog):
    """Counted, and said once, with the numbers and the reason; never pageable memory."""
    plain, allocate, made = gradients("one_stream", KEEP), pinned_pool._Slab, []

    def refuse(num_bytes, pin_memory):
        made.append(num_bytes)
        if len(made) > slabs_before:
            raise torch.OutOfMemoryError("no memory can be locked")
        return allocate(num_bytes, pin_memory)

    monkeypatch.setattr(pinned_pool, "_Slab", refuse)
    monkeypatch.setattr(pinned_pool, "TENSORS_PER_SLAB", 2)
    assert equal(gradients("one_stream", PARK), plain)
    parked = 2 * slabs_before
    counters = offload.counters()
    assert (counters["parked_tensors"], counters["blocks_refused"]) == (parked, 5 - parked)
    gradients("one_stream", PARK)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "no memory can be locked" in said[0]
    assert f"use {parked * INPUT_BYTES} of the {parked * INPUT_BYTES} bytes" in said[0]
    assert f"the {INPUT_BYTES} more of a Block were refused" in said[0]
    assert "Lower --offload_buffer_size" in said[0]


def test_refused_in_the_middle_of_a_block_call(monkeypatch):
    """Then none of its tensors is parked, and what was taken for them is given back."""
    allocate, made = pinned_pool._Slab, []

    def refuse(num_bytes, pin_memory):
        made.append(num_bytes)
        if len(made) > 1:
            raise RuntimeError("no memory can be locked")
        return allocate(num_bytes, pin_memory)

    monkeypatch.setattr(pinned_pool, "_Slab", refuse)
    monkeypatch.setattr(pinned_pool, "TENSORS_PER_SLAB", 1)
    h = dispatch(Block(), True, True, latents(), skip=torch.randn(100, 1, 32) * 1)
    assert made == [5120, 12800]
    counters = offload.counters()
    assert (counters["parked_tensors"], counters["blocks_refused"]) == (0, 1)
    assert counters["slab_bytes"] == 5120 and offload._copiers[CPU].pool.take(5120)
    h.sum().backward()


def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_steady_over_200_steps():
    blocks = [Block() for _ in range(4)]

    def steps(num_steps):
        for step in range(num_steps):
            h = chain(blocks, [PARK] * 3 + [REDO], latents(rows=2048))  # 256 KiB each
            if step % 5 < 4:
                h.sum().backward()
        return offload.counters()["slab_bytes"], resident_bytes()

    slab_bytes, resident = steps(20)
    slab_bytes_after, resident_after = steps(180)
    assert slab_bytes_after == slab_bytes == 2 << 20
    assert resident_after - resident < 8 << 20, "45 MiB is one tensor in each step"


def test_slabs_stay_within_the_limit():
    offload.set_limit(2 * 4096)
    h = chain([Block() for _ in range(4)], [PARK] * 4, latents(rows=32))
    counters = offload.counters()
    assert counters["pool_bytes"] == counters["slab_bytes"] == 2 * 4096 and counters["blocks_refused"] == 2
    del h


def test_observers_of_device_memory_do_not_see_the_slabs():
    """Unlike recompute, parking holds one input of a block instead of all; a `TorchDispatchMode` counts them."""
    live_bytes = {}
    for mode in (REDO, PARK):
        torch.manual_seed(0)
        blocks = [Block() for _ in range(6)]
        with LiveBytes() as live:
            h = chain(blocks, [mode] * 6, latents())
        live_bytes[mode] = live.live_bytes
        del h
    assert offload.counters()["slab_bytes"] > 0
    assert live_bytes[REDO] - live_bytes[PARK] == 5 * INPUT_BYTES


# ---------------------------------------------------------------- inputs of any kind


def test_sizes_and_types_that_change_from_call_to_call():
    """Small, then large inputs, fp32 and bf16, after five forward passes whose loss is thrown away."""

    def run(mode):
        torch.manual_seed(0)
        blocks = nn.ModuleList(TwoStreams() for _ in range(3))

        def forward(rows):
            temb, rope = torch.randn(2, rows, 32) * 1, (latents(rows), latents(rows))
            image, text = latents(rows), (latents(20) * 1).bfloat16()
            for block in blocks:
                text, image = dispatch(block, mode != KEEP, mode == PARK, image, text.bfloat16(), temb, rope)
            return image.sum()

        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(5):
                forward(40)
            in_use = offload.counters()["pool_bytes"]
            for rows in (24, 200, 24):
                forward(rows).backward()
        return [parameter.grad for parameter in blocks.parameters() if parameter.grad is not None], in_use

    plain, _ = run(KEEP)
    grads, in_use = run(PARK)
    assert equal(grads, plain) and in_use == 0
    assert offload.counters()["blocks_refused"] == 0 < offload.counters()["parked_tensors"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.float8_e4m3fn])
def test_every_type_comes_back_with_its_bits_and_strides(dtype, lazy):
    """Behind a tensor of an odd size, so that it begins in the middle of a slab."""
    odd = torch.randint(255, (1025,), dtype=torch.uint8)
    x = torch.randint(2, (30, 3, 64)).to(dtype).permute(2, 0, 1)
    expected, seen, weight = (odd.clone(), x.contiguous()), [], torch.ones(2, requires_grad=True)

    def block(odd, x, weight):
        seen.append((odd.clone(), x.contiguous(), x.stride()))
        return weight * weight

    y = dispatch(block, True, True, odd, x, weight)
    of_next_block = dispatch(block, True, True, latents(), latents(), weight)
    del odd, x  # the last that held them, as the next block call has released the first one
    y.sum().backward()
    *restored, strides = seen[-1]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(restored, expected, strict=True))
    assert restored[1].dtype == dtype and strides == (1, 192, 64)
    assert offload.counters()["bytes_to_device"] == 1025 + expected[1].nbytes
    of_next_block.sum().backward()


@pytest.mark.parametrize(
    "view", [torch.conj, lambda x: x.conj().imag, lambda x: x[:20], lambda x: x.expand(2, 40, 32)]
)
def test_views_whose_bytes_are_not_their_values_stay(view):
    weight = torch.ones(1, requires_grad=True)
    x = torch.view_as_complex(torch.randn(40, 32, 2))
    y = dispatch(lambda x, weight: (x * weight).real, True, True, view(x), weight)
    assert offload.counters()["parked_tensors"] == 0
    y.sum().backward()


def test_the_callers_tensors_are_left_alone(lazy):
    blocks, x, temb, rope = [TwoStreams() for _ in range(3)], latents(), torch.randn(2, 40, 32), (latents(), latents())
    text = latents(20)
    given_tensors = (x, text, temb, *rope)
    before = [(tensor.data_ptr(), tensor.device, tensor.clone()) for tensor in given_tensors]
    e, h = text, x
    for block in blocks:
        e, h = dispatch(block, True, True, h, e, temb, rope)
        for tensor, (address, device, values) in zip(given_tensors, before, strict=True):
            assert tensor.data_ptr() == address and tensor.device == device and torch.equal(tensor, values)
    (h.sum() + sum(tensor.sum() for tensor in given_tensors)).backward()
    assert lazy.check(), lazy.complaints


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks(backend, lazy):
    def run(mode):
        torch.manual_seed(0)
        blocks = nn.ModuleList(TwoStreams() for _ in range(3))
        for block in blocks:
            block.compile(backend=backend)
        temb, rope, image, text = torch.randn(2, ROWS, 32), (latents(), latents()), latents(), latents(20)
        for block in blocks:
            text, image = dispatch(block, mode != KEEP, mode == PARK, image, text, temb, rope)
        image.square().mean().backward()
        return [parameter.grad for parameter in blocks.parameters() if parameter.grad is not None]

    plain = run(KEEP)
    assert equal(run(REDO), plain)
    assert equal(run(PARK), plain)
    assert offload.counters()["bytes_to_device"] > 0 and lazy.check()


@pytest.mark.parametrize("state", ["compiling", "capturing"])
def test_nothing_is_parked_while_compiling_or_capturing(state, monkeypatch):
    if state == "compiling":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    else:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x = latents()
    with offload.parked_inputs(Block(), [x]):
        pass
    assert offload.counters()["parked_tensors"] == 0


# ---------------------------------------------------------------- real models


def qwen_image():
    from diffusers import QwenImageTransformer2DModel

    config = {"in_channels": 64, "out_channels": 16, "attention_head_dim": 16, "num_attention_heads": 3}
    transformer = QwenImageTransformer2DModel(
        patch_size=2, num_layers=4, joint_attention_dim=32, axes_dims_rope=(8, 4, 4), **config
    )
    inputs = {
        "hidden_states": torch.randn(1, 64, 64),
        "timestep": torch.tensor([987.3]),
        "encoder_hidden_states": torch.randn(1, 9, 32),
        "encoder_hidden_states_mask": None,
        "img_shapes": [[(1, 8, 8)]],
    }
    return transformer, inputs, model_fn_qwen_image, "transformer_blocks", [64 * 48 * 4, 9 * 48 * 4]


def wan_video(channels, out_channels=16, per_token=False, images=0, **config):
    from diffusers import WanTransformer3DModel

    def make():
        sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 16, "freq_dim": 32, "ffn_dim": 48}
        transformer = WanTransformer3DModel(
            in_channels=channels, out_channels=out_channels, num_layers=4, rope_max_seq_len=32, **sizes, **config
        )
        inputs = {
            "hidden_states": torch.randn(1, channels, 3, 4, 6),
            "timestep": torch.randint(1000, (1, 18)).float() if per_token else torch.tensor([987.25]),
            "encoder_hidden_states": torch.randn(1, 512, 16),
            "encoder_hidden_states_image": torch.randn(images, 5, 20) if images else None,
        }
        return transformer, inputs, model_fn_wan_video, "blocks", [18 * 24 * 4]

    return make


MODELS = {
    "Qwen-Image": qwen_image,
    "Wan T2V": wan_video(16),
    "Wan I2V": wan_video(36, images=1, image_dim=20, added_kv_proj_dim=24),
    "Wan I2V without CLIP": wan_video(36),
    "Wan FLF2V": wan_video(36, images=2, image_dim=20, added_kv_proj_dim=24, pos_embed_seq_len=10),
    "Wan TI2V": wan_video(48, 48),
    "Wan TI2V, modulated per token": wan_video(48, 48, per_token=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_parked_bytes_are_the_hidden_states_of_all_blocks_but_the_last(name, lazy):
    """To the byte. What all blocks share is larger here, and stays: text, per-token modulation, rotary tables."""
    torch.manual_seed(0)
    transformer, inputs, model_fn, block_list, streams = MODELS[name]()

    def step(plan):
        transformer.zero_grad()
        with install_plan(transformer, plan):
            model_fn(transformer, **inputs).square().mean().backward()
        return [parameter.grad for parameter in transformer.parameters() if parameter.grad is not None]

    plain = step(MemoryPlan.uniform({block_list: 4}, "keep"))
    parking = MemoryPlan({block_list: (*(Mode("park"),) * 3, Mode("recompute"))})
    for _ in range(3):  # the first step learns what is shared
        offload.reset_counters()
        assert equal(step(parking), plain)
    counters = offload.counters()
    assert counters["parked_bytes"] == 3 * sum(streams)
    assert counters["parked_tensors"] == 3 * len(streams)
    assert counters["bytes_to_device"] == 2 * sum(streams), "the newest ones were still there"
    assert lazy.check(), lazy.complaints
