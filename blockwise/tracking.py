"""Follows every byte that tensors hold, from outside the allocator: also on a CPU, and for tensors without content."""

import collections
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def _tensors(values):
    """Yield the tensors among what an operator takes or returns: values, and lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that were made inside and are still alive, by category, and their peak.

    It is what an allocator without rounding would report as allocated. Not in it: scratch memory inside one operation,
    and the host memory of `blockwise.offload`. Tensors from before are not counted unless they are given to `count`.

    Args:
        device_type (`str`, *optional*):
            Count tensors on devices of this type only.
        on_change (`Callable[[LiveBytes], None]`, *optional*):
            Called after each operation that made a tensor.
    """

    def __init__(self, device_type=None, on_change=None):
        super().__init__()
        self.device_type, self.on_change = device_type, on_change
        self.category = "activations"  # of what is made from now on
        self.by_category = collections.Counter()
        self.live_bytes = self.peak_bytes = 0
        self.by_category_at_peak = {}
        self._known = {}  # address of a storage -> [its category, its bytes, what notices its end]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = self._known
        new = [tensor for tensor in _tensors((result,)) if tensor.untyped_storage()._cdata not in known]
        if not new:
            return result
        # Views, perhaps, of what was made before, or by what this mode does not see.
        for source in _tensors((*args, *kwargs.values())):
            self._see(source, None)
        counted = [self._see(tensor, self.category) for tensor in new]
        if any(counted):
            self._note_peak()
            if self.on_change is not None:
                self.on_change(self)
        return result

    def count(self, tensors, category):
        """Count existing `tensors` (any shapes) in a category; those that are counted already change theirs."""
        for tensor in tensors:
            entry = self._known.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                self._add(entry[0], -entry[1])
                entry[:2] = category, tensor.untyped_storage().nbytes()
                self._add(*entry[:2])
            else:
                self._see(tensor, category)
        self._note_peak()

    def mark(self):
        """Return the live bytes, the peak and its categories, and let the peak begin again."""
        marked = self.live_bytes, self.peak_bytes, self.by_category_at_peak
        self.peak_bytes, self.by_category_at_peak = self.live_bytes, dict(self.by_category)
        return marked

    def _see(self, tensor, category):
        """Follow the storage of `tensor` if it is new, and return whether its bytes count."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return False
        counts = category is not None and self.device_type in (None, tensor.device.type)
        address, num_bytes = storage._cdata, storage.nbytes() if counts else 0
        # The reference is to the storage: views and what autograd saves keep it alive.
        gone = weakref.ref(storage, lambda _: self._forget(address))
        self._known[address] = [category, num_bytes, gone]
        self._add(category, num_bytes)
        return counts

    def _add(self, category, num_bytes):
        if num_bytes:
            self.by_category[category] += num_bytes
            self.live_bytes += num_bytes

    def _forget(self, address):
        category, num_bytes, _ = self._known.pop(address)
        self._add(category, -num_bytes)

    def _note_peak(self):
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.by_category_at_peak = dict(self.by_category)
