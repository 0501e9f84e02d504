"""Parks the inputs of checkpointed blocks in host memory until the block is recomputed.

What is parked: the tensors that only one block call needs. A tensor that a second block call is given as well (time
embedding, text context, rotary tables, masks) stays alive on the device anyway, so a copy of it would free nothing.
A block call cannot know at first sight which of its arguments the next one will get too. So it parks all of them, and
when a later call brings the same storage, the copy is dropped and the tensor kept; the position of that argument is
remembered for the block, and from the second step on no such copy is made at all.

A limit on the bytes that are parked at a time can be set. A block call that finds it used up keeps its inputs on the
device and is recomputed from there: counted, said once, never an error.

Who owns a parked tensor: the autograd graph, through the checkpoint's saved arguments, and nothing else. A graph that
is dropped, an exception in the middle of a step, two forwards before a backward: the host copies go with their graph.
"""

import contextlib
import logging
import weakref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef


logger = logging.getLogger(__name__)

# Smaller tensors stay on the device: their copy costs more than their memory is worth.
MIN_PARKED_BYTES = 1 << 20

# Bytes that this process may have parked at a time; None: no limit.
_limit_bytes = None
_warned = False

_counters = dict.fromkeys(("parked_tensors", "parked_bytes", "blocks_refused", "pool_bytes", "pool_peak_bytes"), 0)

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
        `pool_peak_bytes` (their highest value).
    """
    return dict(_counters)


def reset_counters():
    """Set the counters to zero; `pool_bytes` goes on describing what is alive, and the peak starts from it."""
    alive = _counters["pool_bytes"]
    _counters.update(dict.fromkeys(_counters, 0), pool_bytes=alive, pool_peak_bytes=alive)


def set_limit(num_bytes):
    """Park at most `num_bytes` at a time from now on, None: without a limit. What is parked already stays."""
    global _limit_bytes, _warned
    _limit_bytes, _warned = num_bytes, False


class Sighting:
    """The block call that was first given a tensor. Lives as long as that call's part of the graph."""

    def __init__(self, tensor, block, position):
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.block = weakref.ref(block)
        self.position = position

    def stay(self, storage):
        """Take notice that another block call needs the tensor too."""


class ParkedTensor(Sighting):
    """A tensor argument that waits in host memory until its block is recomputed."""

    def __init__(self, tensor, block, position):
        super().__init__(tensor, block, position)
        self.device, self.offset = tensor.device, tensor.storage_offset()
        # Same strides, since a kernel may sum in another order over another layout.
        self.host = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu"
        )
        self.host.copy_(tensor.detach())
        self.resident = None
        nbytes = tensor.nbytes
        _counters["parked_tensors"] += 1
        _counters["parked_bytes"] += nbytes
        _counters["pool_bytes"] += nbytes
        _counters["pool_peak_bytes"] = max(_counters["pool_peak_bytes"], _counters["pool_bytes"])
        self.release = weakref.finalize(self, _release, nbytes)
        self.release.atexit = False

    def stay(self, storage):
        """Drop the host copy and keep `storage`, the tensor's own, alive on the device instead."""
        if self.resident is None:
            self.resident = torch.empty(0, dtype=self.host.dtype, device=self.device).set_(
                storage, self.offset, self.host.size(), self.host.stride()
            )
            self.host = None
            self.release()

    def restore(self):
        """Return the tensor on its device, with the strides that it had."""
        if self.resident is not None:
            return self.resident
        restored = torch.empty_strided(self.host.size(), self.host.stride(), dtype=self.host.dtype, device=self.device)
        return restored.copy_(self.host, non_blocking=True)


class KeptTensor(Sighting):
    """A tensor argument that found no room and stays on its device."""

    def __init__(self, tensor, block, position):
        super().__init__(tensor, block, position)
        self.tensor = tensor.detach()

    def restore(self):
        """Return the tensor."""
        return self.tensor


def _release(nbytes):
    _counters["pool_bytes"] -= nbytes


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
    needed = 0 if _limit_bytes is None else _num_bytes_to_park(block, tensors)
    fits = _limit_bytes is None or _counters["pool_bytes"] + needed <= _limit_bytes
    saved = {}
    for position, tensor in enumerate(tensors):
        # What does not fit is taken note of as well, so that it is known as shared if another call brings it.
        if sighting := first_sighting(block, position, tensor, ParkedTensor if fits else KeptTensor):
            saved[id(tensor)] = sighting
    if saved and not fits:
        _refuse(block, needed)
    return saved


def _num_bytes_to_park(block, tensors):
    """Return how many bytes of `tensors` no other call is known to need."""
    shared = _shared_positions.get(block, ())
    return sum(
        tensor.nbytes
        for position, tensor in enumerate(tensors)
        if position not in shared and _can_be_parked(tensor) and tensor.untyped_storage()._cdata not in _sightings
    )


def _refuse(block, needed):
    """Count a block call whose inputs, of `needed` bytes, stay on the device; say so the first time."""
    global _warned
    _counters["blocks_refused"] += 1
    if not _warned:
        _warned = True
        logger.warning(
            "Of %d bytes for parked inputs %d are in use, and a %s needs %d: its inputs stay on the device, as do "
            "those of further blocks that find no room. Raise --offload_buffer_size to park them.",
            *(_limit_bytes, _counters["pool_bytes"], type(block).__name__, needed),
        )


def first_sighting(block, position, tensor, kind=Sighting):
    """Take note that `block` is given `tensor` (any shape) as its tensor argument number `position`.

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
    known.stay(storage)
    _shared_positions.setdefault(block, set()).add(position)
    if (first_block := known.block()) is not None:
        _shared_positions.setdefault(first_block, set()).add(known.position)
    return None


def _can_be_parked(tensor):
    """Whether moving `tensor` (any shape) to host memory would free its memory on the device.

    Not so for parameters and other leaves that collect a gradient (autograd keeps them), for views of a part of a
    storage and expanded tensors (their base keeps the bytes), for tensor subclasses (fp8, DTensor: more than one
    storage), for small tensors, and on devices that share their memory with the host.
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.nbytes >= MIN_PARKED_BYTES
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and not (tensor.is_leaf and tensor.requires_grad)
        and tensor.device.type not in ("meta", "mps")
    )
