"""Follows every byte that tensors hold, from outside the allocator: also on a CPU, and for tensors without content."""

import collections
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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

    Attributes:
        category (`str`): Of what is made from now on.
        live_bytes, peak_bytes (`int`)
        by_category, by_category_at_peak (`dict[str, int]`)
    """

    def __init__(self, device_type=None):
        super().__init__()
        self.device_type, self.category = device_type, "activations"
        self.live_bytes = self.peak_bytes = 0
        self.by_category, self.by_category_at_peak = collections.Counter(), {}
        self._known = {}  # address of a storage -> [its category, its bytes, what notices its end]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = self._known
        new = [tensor for tensor in _tensors((result,)) if tensor.untyped_storage()._cdata not in known]
        if new:
            # Views, perhaps, of what was made before, or by what this mode does not see.
            for source in _tensors((*args, *kwargs.values())):
                self._see(source, None)
            counted = [self._see(tensor, self.category) for tensor in new]
            if any(counted):
                self.changed()
        return result

    def count(self, tree, category):
        """Count the existing tensors in `tree` in a category; those that are counted already change theirs."""
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, torch.Tensor) or self.device_type not in (None, tensor.device.type):
                continue
            if not self._see(tensor, category):
                entry = self._known[tensor.untyped_storage()._cdata]
                self._add(entry[0], -entry[1])
                entry[:2] = category, tensor.untyped_storage().nbytes()
                self._add(*entry[:2])
        self.changed()

    def changed(self):
        """Note the peak. Called after each operation that made a tensor, and after each `count`."""
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.by_category_at_peak = self.live_bytes, dict(self.by_category)

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
