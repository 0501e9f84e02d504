"""Asynchronous parking: on streams that do as little as they may, and on the CPU, whose copies are made at once."""

import contextlib
import gc
import pathlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from memory import offload, pinned_pool
from memory.checkpointing import gradient_checkpoint_forward as dispatch
from memory.copier import Copier, StreamCopier
from memory.plan import MemoryPlan
from memory.tracking import LiveBytes
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
        event.recorded_at = copier.clock
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
    def query(self):
        return all(copy.done_at for copy in self.past) or self.stream.name.startswith("compute")

    def elapsed_time(self, done):
        return max((copy.done_at for copy in done.past), default=0) - self.recorded_at


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
    """The second argument of the first block comes again while its copy is in flight, and when that is long done."""
    blocks = nn.ModuleList(Block() for _ in range(5))
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
    counters = offload.counters()
    assert counters["bytes_to_host"] == counters["parked_bytes"] > 0 == counters["unsatisfied_waits"]


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


def test_source_is_not_let_go_before_its_copy(lazy):
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
    """Return the end of a graph whose backward pass has failed, while the reload for its second block was in flight."""
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


def test_waits_are_counted_and_those_for_unfinished_copies(lazy):
    blocks = [Block() for _ in range(4)]
    chain(blocks, [PARK] * 4, latents()).square().mean().backward()
    counters = offload.counters()
    # For three copies before their sources are let go, for three reloads, and for the last copy at the end.
    assert counters["waits"] == 7 == counters["unsatisfied_waits"]
    offload.reset_counters()
    assert offload.counters()["waits"] == offload.counters()["unsatisfied_waits"] == 0

    class Slow(Block):
        def forward(self, x):
            for copy in list(lazy.pending):  # beside so much computation the copies are done
                copy.run()
            return super().forward(x)

    chain([Slow() for _ in range(4)], [PARK] * 4, latents()).square().mean().backward()
    assert offload.counters()["waits"] == 7 and offload.counters()["unsatisfied_waits"] == 0


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
    assert offload.counters()["bytes_to_host"] == 2 * ROWS * 4 * sum(widths[:5])


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
