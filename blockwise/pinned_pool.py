"""Host memory in few large slabs, handed out in pieces.

One allocation per tensor would waste up to half of it, since every pinned allocation is rounded up to a power of two,
and pinning takes long. So slabs are kept, and used again in every step.
"""

import collections
import math

import torch
from torch.utils._python_dispatch import _disable_current_modes


ALIGNMENT = 256  # bytes: what copy engines like, and a multiple of the size of every dtype
TENSORS_PER_SLAB = 8  # fewer where there is no memory for as many


def allocated_bytes(num_bytes, pin_memory):
    """Return what an allocation of host memory takes: torch rounds a pinned one up to a power of two."""
    return 1 << (num_bytes - 1).bit_length() if pin_memory else num_bytes


class Buffer:
    """A piece of a slab: `bytes` is a `torch.uint8` tensor of shape (num_bytes,)."""

    def __init__(self, slab, offset, size, num_bytes):
        self._slab, self._piece = slab, (offset, size)
        self.bytes = slab.bytes[offset : offset + num_bytes]

    def give_back(self):
        """Let the pool have it again. May be called by a finalizer: at any moment, in any thread."""
        self._slab.returned.append(self._piece)


class HostPool:
    """Hands out pieces of host memory.

    Args:
        pin_memory (`bool`): Lock the pages, so that an accelerator can copy from and to them on its own.
    """

    def __init__(self, pin_memory):
        self.pin_memory = pin_memory
        self._slabs = []
        self._refused_bytes = math.inf

    @property
    def slab_bytes(self):
        """Bytes of host memory that the pool holds, in use or not."""
        return sum(len(slab.bytes) for slab in self._slabs)

    def take(self, num_bytes, room=None):
        """Return a `Buffer` of `num_bytes`.

        Args:
            num_bytes (`int`): More than zero.
            room (`int`, *optional*): The most bytes that a new slab may take.

        Raises:
            RuntimeError: There is no room or no host memory for a new slab of any size, or it cannot be pinned.
        """
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        for slab in self._slabs:
            if (offset := slab.take(size)) is not None:
                return Buffer(slab, offset, size, num_bytes)
        slab = self._new_slab(size, room)
        self._slabs.append(slab)
        return Buffer(slab, slab.take(size), size, num_bytes)

    def _new_slab(self, size, room):
        num_tensors, reason = TENSORS_PER_SLAB, f"no more than {max(room or 0, 0)} bytes may be taken"
        while num_tensors > 0:
            slab_bytes = allocated_bytes(num_tensors * size, self.pin_memory)
            # What was refused is not asked for again: to lock much memory takes long also where it fails.
            if (room is None or slab_bytes <= room) and (num_tensors == 1 or slab_bytes < self._refused_bytes):
                try:
                    return _Slab(slab_bytes, self.pin_memory)
                except RuntimeError as error:
                    reason, self._refused_bytes = str(error), slab_bytes
            num_tensors //= 2
        raise RuntimeError(reason)  # not the error itself: kept by a frame that it keeps, it would keep all tensors


class _Slab:
    """One allocation, and the list of what is free of it."""

    def __init__(self, num_bytes, pin_memory):
        # Unseen by modes: an observer of device memory would count it, and a fake mode would make no memory of it.
        with _disable_current_modes():
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin_memory)
        self._gaps = [(0, num_bytes)]  # (offset, size), by offset; no two of them touch
        self.returned = collections.deque()  # the same, not yet among the gaps

    def take(self, size):
        """Return the offset of the first free piece of `size` bytes, None where there is none."""
        self._merge_gaps()
        for index, (offset, free) in enumerate(self._gaps):
            if free >= size:
                self._gaps[index : index + 1] = [(offset + size, free - size)] if free > size else []
                return offset
        return None

    def _merge_gaps(self):
        """Free what was returned, each piece together with the free ones that it touches."""
        gaps, self._gaps = self._gaps, []
        while self.returned:
            gaps.append(self.returned.popleft())
        for offset, size in sorted(gaps):
            if self._gaps and sum(self._gaps[-1]) == offset:
                offset, before = self._gaps.pop()
                size += before
            self._gaps.append((offset, size))
