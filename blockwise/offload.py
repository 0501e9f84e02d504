"""Parks the inputs of checkpointed blocks in host memory until the block is recomputed.

What is parked: the tensors that only one block call needs. A tensor that a second block call is given as well (time
embedding, text context, rotary tables, masks) stays alive on the device anyway, so a copy of it would free nothing.
A block call cannot know at first sight which of its arguments the next one will get too. So it parks all of them, and
when a later call brings the same storage, the copy is dropped and the tensor kept; the position of that argument is
remembered for the block, and from the second step on no such copy is made at all.

When: all tensors of a block call are a group. Their copies start before the block runs and overlap with its
computation. The device's memory is released when the next group is parked, so the newest group is still there when the
backward pass begins. There a block's recomputation starts the reload of the group before it: one group ahead, never
more, or the host, which runs ahead of the device, would allocate them all at once. Streams wait for each other, the
host for none.

A limit on the host memory that is taken can be set. A block call that finds it used up, or no host memory that can be
pinned, keeps its inputs on the device and is recomputed from there: counted, logged once, never an error.

Who owns a parked tensor: the autograd graph, through the checkpoint's saved arguments, and nothing else. A graph that
is dropped, an exception in the middle of a step, two forwards before a backward: the host copies go with their graph.
"""

import contextlib
import logging
import weakref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from blockwise.copier import Copier, StreamCopier


logger = logging.getLogger(__name__)

# Smaller tensors stay on the device: their copy costs more than their memory is worth.
MIN_PARKED_BYTES = 1 << 20

# Bytes of host memory that this process may take; None: no limit.
_limit_bytes = None
_has_warned = False  # of block calls that are refused

_counters = dict.fromkeys(("parked_tensors", "parked_bytes", "blocks_refused", "pool_bytes", "pool_peak_bytes"), 0)
_counters["bytes_to_device"] = 0

# Device -> what copies from and to it.
_copiers: dict[torch.device, Copier] = {}

# Storage address -> where it was first seen. An address cannot come back for another tensor while its entry is here:
# `Sighting.storage` is a weak reference that keeps the (emptied) storage object itself alive.
_sightings: "weakref.WeakValueDictionary[int, Sighting]" = weakref.WeakValueDictionary()

# Block -> positions among its tensor arguments that were found to be shared with other block calls.
_shared_positions: "weakref.WeakKeyDictionary[nn.Module, set[int]]" = weakref.WeakKeyDictionary()


def counters():
    """Return what was parked since the last reset.

    Returns:
        `dict[str, int]`: `parked_tensors` and `parked_bytes` (copies made to host memory, also on a CPU device),
        `blocks_refused` (block calls that could not park), `pool_bytes` (parked bytes alive now) and
        `pool_peak_bytes` (their highest value); `bytes_to_device` (what was copied back), `slab_bytes` (host memory
        held now, in use or not).
    """
    return {**_counters, "slab_bytes": _slab_bytes()}


def reset_counters():
    """Set the counters to zero; those of what is alive keep describing it, and the peak starts from there."""
    alive = _counters["pool_bytes"]
    _counters.update(dict.fromkeys(_counters, 0), pool_bytes=alive, pool_peak_bytes=alive)


def set_limit(num_bytes):
    """Take at most `num_bytes` of host memory from now on, None: without a limit. What is parked already stays.

    It is the memory that counts, not what is parked in it: a pinned allocation is rounded up to a power of two.
    """
    global _limit_bytes, _has_warned
    _limit_bytes, _has_warned = num_bytes, False


def _slab_bytes():
    return sum(copier.pool.slab_bytes for copier in _copiers.values())


def _copier(device):
    if device not in _copiers:
        _copiers[device] = (Copier if device.type == "cpu" else StreamCopier)(device)
    return _copiers[device]


# ---------------------------------------------------------------- parked tensors


class _HostCopy:
    """The bytes of a parked tensor: on the device (`source`), in host memory (`buffer`), or on their way back."""

    def __init__(self, storage, buffer):
        self.copier, self.buffer, self.num_bytes = _copier(storage.device), buffer, storage.nbytes()
        self.source, self.target, self.loading = _as_bytes(storage), None, None
        self.leaving = self.copier.to_host(buffer.bytes, self.source)
        _counters["parked_tensors"] += 1
        _counters["parked_bytes"] += self.num_bytes
        _counters["pool_bytes"] += self.num_bytes
        _counters["pool_peak_bytes"] = max(_counters["pool_peak_bytes"], _counters["pool_bytes"])

    def free_source(self):
        """Free the memory on the device, in the order of the compute stream: behind the copy. Not if it stays."""
        self._end_leaving()
        if self.buffer is not None:
            self.source = None

    def is_away(self):
        """Whether the bytes are neither on the device nor on their way to it."""
        return self.buffer is not None and self.source is None and self.target is None

    def reload(self):
        """Start to bring the bytes back if they are away."""
        if self.is_away():
            self.target = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.copier.device)
            self.loading = self.copier.to_device(self.target, self.buffer.bytes)
            _counters["bytes_to_device"] += self.num_bytes

    def take(self):
        """Return the bytes on the device, a `torch.uint8` tensor of shape (num_bytes,), and keep no reloaded ones."""
        if self.source is not None:
            return self.source
        self.copier.wait(self.loading, self.copier.compute_stream())
        target, self.target = self.target, None
        return target

    def stay(self, storage):
        """Keep the tensor's own `storage` on the device, and give the host memory back."""
        if self.source is None:
            self.source = _as_bytes(storage)
        self._give_back()

    def close(self):
        """Give all memory back, that on the device in the order of the compute stream: behind copies in flight."""
        self._end_leaving()
        if self.target is not None:
            self.copier.wait(self.loading)
        self.source = self.target = None
        self._give_back()

    def _end_leaving(self):
        if self.leaving is not None:
            self.copier.wait(self.leaving)
            self.leaving = None

    def _give_back(self):
        if self.buffer is not None:
            self.buffer.give_back()
            self.buffer = None
            _counters["pool_bytes"] -= self.num_bytes


class _Group:
    """What one block call has parked. Owned by its parked tensors; knows the group before it by a weak reference."""

    def __init__(self, previous):
        self.copies, self.previous = [], previous

    def reload(self):
        """Start to bring back what is away."""
        for copy in self.copies:
            copy.reload()


def _latest_group():  # replaced by a weak reference to the group that was parked last
    return None


class Sighting:
    """The block call that was first given a tensor. Lives as long as that call's part of the graph."""

    def __init__(self, tensor, block, position):
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.block = weakref.ref(block)
        self.position = position

    def stay(self, storage):
        """Take notice that another block call needs the tensor too."""


class ParkedTensor(Sighting):
    """A tensor argument that waits in host memory, a `buffer` of it, until its block is recomputed."""

    def __init__(self, tensor, block, position, group, buffer):
        super().__init__(tensor, block, position)
        # Same strides, since a kernel may sum in another order over another layout.
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.group, self.copy = group, _HostCopy(tensor.untyped_storage(), buffer)
        group.copies.append(self.copy)
        # Not at exit, when the device may be gone.
        weakref.finalize(self, self.copy.close).atexit = False

    def stay(self, storage):
        """Drop the host copy and keep `storage`, the tensor's own, alive on the device instead."""
        self.copy.stay(storage)

    def restore(self):
        """Return the tensor on its device, with the strides that it had; start the reload of the group before."""
        if self.copy.is_away():
            self.group.reload()
        tensor = self.copy.take().view(self.dtype).as_strided(self.size, self.stride)
        if (previous := self.group.previous()) is not None:
            previous.reload()
        return tensor


class KeptTensor(Sighting):
    """A tensor argument that found no room and stays on its device."""

    def __init__(self, tensor, block, position):
        super().__init__(tensor, block, position)
        self.tensor = tensor.detach()

    def restore(self):
        """Return the tensor."""
        return self.tensor


def _as_bytes(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# ---------------------------------------------------------------- block calls


@contextlib.contextmanager
def parked_inputs(block, tensors):
    """Context in which a checkpoint of `block` saves its arguments `tensors` through host memory.

    Args:
        block (`nn.Module` or function):
            The block that is about to be called.
        tensors (`list[torch.Tensor]`):
            Its tensor arguments, of any shape, in an order that is the same at each call of the block.
    """
    parked = _park(block, tensors)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: parked.get(id(tensor), tensor),
        lambda saved: saved.restore() if isinstance(saved, Sighting) else saved,
    ):
        # The hooks see the checkpoint's arguments, as the very objects that were passed, and nothing of the block's
        # inside, where the checkpoint's own hooks are in force.
        yield
        # From here on the graph alone owns the parked tensors.
        parked.clear()


def _park(block, tensors):
    """Copy to host memory what only this call of `block` needs; return `{id(tensor): ParkedTensor or KeptTensor}`."""
    global _latest_group
    if torch.compiler.is_compiling() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return {}  # a copy would become part of what is compiled or captured
    buffers, group = _reserve(block, tensors), _Group(_latest_group)
    if buffers and (latest := _latest_group()) is not None:
        for copy in latest.copies:
            copy.free_source()

    def kind(tensor, block, position):
        if position in buffers:
            return ParkedTensor(tensor, block, position, group, buffers[position])
        # Recorded as well, so that it is known as shared if another call brings it.
        return KeptTensor(tensor, block, position)

    sightings = ((tensor, first_sighting(block, position, tensor, kind)) for position, tensor in enumerate(tensors))
    saved = {id(tensor): sighting for tensor, sighting in sightings if sighting is not None}
    if buffers:
        _latest_group = weakref.ref(group)
    return saved


def _reserve(block, tensors):
    """Return {position: buffer} for those of `tensors` that no other call is known to need; empty if refused."""
    global _has_warned
    shared, new, buffers = _shared_positions.get(block, ()), {}, {}
    for position, tensor in enumerate(tensors):
        storage = tensor.untyped_storage() if position not in shared and _can_be_parked(tensor) else None
        if storage is not None and storage._cdata not in _sightings:
            new.setdefault(storage._cdata, (position, storage))
    needed, in_use = sum(storage.nbytes() for _, storage in new.values()), _counters["pool_bytes"]
    try:
        if new and _limit_bytes is not None and in_use + needed > _limit_bytes:
            raise RuntimeError(f"the limit is {_limit_bytes}")
        for position, storage in new.values():
            room = None if _limit_bytes is None else _limit_bytes - _slab_bytes()
            buffers[position] = _copier(storage.device).pool.take(storage.nbytes(), room)
    except RuntimeError as error:  # Not pageable memory instead: copies to it hold the computation up.
        for buffer in buffers.values():
            buffer.give_back()
        buffers.clear()
        _counters["blocks_refused"] += 1
        if not _has_warned:
            _has_warned, is_over = True, _limit_bytes is not None and _slab_bytes() + needed > _limit_bytes
            logger.warning(
                "Parked inputs use %d of the %d bytes of host memory that are taken, and the %d more of a %s were "
                "refused (%s): they stay on the device, as do those of further blocks that find no room. %s "
                "--offload_buffer_size to change that.",
                *(in_use, _slab_bytes(), needed, type(block).__name__, str(error), "Raise" if is_over else "Lower"),
            )
    return buffers


def first_sighting(block, position, tensor, kind=Sighting):
    """Record that `block` is given `tensor` (any shape) as its tensor argument number `position`.

    Returns:
        A new `kind` when no other call that waits for its backward pass has this tensor and its memory could be
        freed; None when it is to stay on the device.
    """
    if position in _shared_positions.get(block, ()) or not _can_be_parked(tensor):
        return None
    storage = tensor.untyped_storage()
    known = _sightings.get(storage._cdata)
    if known is None:
        known = _sightings[storage._cdata] = kind(tensor, block, position)
        return known
    _keep_shared(known, storage)
    _shared_positions.setdefault(block, set()).add(position)
    return None


def is_in_use():
    """Whether anything waits for its backward pass."""
    return bool(_sightings)


def keep_shared(tensors):
    """Record that a block call that parks nothing is given `tensors` (any shapes): the parked ones come back.

    Without it a plan in which one block parks would park, of all things, what all blocks share.
    """
    for tensor in tensors:
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if (known := _sightings.get(storage._cdata)) is not None:
                _keep_shared(known, storage)


def _keep_shared(known, storage):
    known.stay(storage)
    if (first_block := known.block()) is not None:
        _shared_positions.setdefault(first_block, set()).add(known.position)


def _can_be_parked(tensor):
    """Whether moving `tensor` (any shape) to host memory would free its memory on the device.

    Not so for parameters and other leaves that collect a gradient (autograd keeps them), for views of a part of a
    storage and expanded tensors (their base keeps the bytes), for views that read it otherwise (conjugated, negated:
    the bytes alone are not the values), for tensor subclasses (fp8, DTensor: more than one storage), for small
    tensors, and on devices that share their memory with the host.
    """
    return type(tensor) is torch.Tensor and is_worth_parking(tensor)


def is_worth_parking(tensor):
    """Whether the memory of `tensor` (any shape), if it is no subclass of `torch.Tensor`, would be freed."""
    return (
        tensor.layout is torch.strided
        and tensor.nbytes >= MIN_PARKED_BYTES
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and not (tensor.is_leaf and tensor.requires_grad)
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.device.type not in ("meta", "mps")
    )
