"""Host memory in few large slabs, handed out in pieces.

One allocation per tensor would waste up to half of it, since every pinned allocation is rounded up to a power of two,
and pinning takes long. So slabs are kept, and used again in every step.
"""

import bisect
import collections

import torch
from torch.utils._python_dispatch import _disable_current_modes


ALIGNMENT = 256  # bytes: what copy engines like, and a multiple of the size of every dtype
TENSORS_PER_SLAB = 8


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

    @property
    def slab_bytes(self):
        """Bytes of host memory that the pool holds, in use or not."""
        return sum(len(slab.bytes) for slab in self._slabs)

    def take(self, num_bytes, room=None):
        """Return a `Buffer` of `num_bytes`.

        Args:
            num_bytes (`int`): More than zero.
            room (`int`, *optional*): A new slab should not be larger than this, unless the buffer is.

        Raises:
            RuntimeError: There is no host memory for a new slab, or it cannot be pinned.
        """
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        for slab in self._slabs:
            if (offset := slab.take(size)) is not None:
                return Buffer(slab, offset, size, num_bytes)
        wanted = TENSORS_PER_SLAB * size if room is None else min(TENSORS_PER_SLAB * size, room)
        slab = _Slab(1 << (max(size, wanted) - 1).bit_length(), self.pin_memory)
        self._slabs.append(slab)
        return Buffer(slab, slab.take(size), size, num_bytes)

    def release(self):
        """Free the slabs of which nothing is in use."""
        self._slabs = [slab for slab in self._slabs if not slab.is_unused()]
        if self.pin_memory:
            torch.accelerator.empty_host_cache()


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
        self._close_gaps()
        for index, (offset, free) in enumerate(self._gaps):
            if free >= size:
                self._gaps[index : index + 1] = [(offset + size, free - size)] if free > size else []
                return offset
        return None

    def is_unused(self):
        """Whether all of it is free."""
        self._close_gaps()
        return self._gaps == [(0, len(self.bytes))]

    def _close_gaps(self):
        """Free what was returned, each piece together with the free ones that it touches."""
        while self.returned:
            offset, size = self.returned.popleft()
            first = last = bisect.bisect(self._gaps, (offset, size))
            if first > 0 and sum(self._gaps[first - 1]) == offset:
                first -= 1
                offset, size = self._gaps[first][0], self._gaps[first][1] + size
            if last < len(self._gaps) and self._gaps[last][0] == offset + size:
                size += self._gaps[last][1]
                last += 1
            self._gaps[first:last] = [(offset, size)]
