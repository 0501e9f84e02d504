"""Copies between a device and host memory, at once or while it computes."""

import collections

import torch

from blockwise.pinned_pool import HostPool


# When a copy is done, and the compute stream on which it was started: there the memory of its device side was
# allocated, and there it is allocated again as soon as it is free.
Copy = collections.namedtuple("Copy", "done stream")


class Copier:
    """Copies between a device and host memory. This one does it at once, for a device whose memory is the host's.

    Args:
        device (`torch.device`)
    """

    pin_memory = False

    def __init__(self, device):
        self.device, self.pool = device, HostPool(self.pin_memory)

    def to_host(self, target, source):
        """Start to copy `source`, on the device, to `target`, a buffer's bytes, both `torch.uint8` of shape (N,).

        Returns:
            `Copy`, to be waited for before `source` is released; None where it is done.
        """
        target.copy_(source)

    def to_device(self, target, source):
        """Start to copy `source`, a buffer's bytes, to `target`, on the device, both `torch.uint8` of shape (N,).

        Returns:
            `Copy`, to be waited for before `target` is used or released; None where it is done.
        """
        target.copy_(source)

    def wait(self, copy, stream=None):
        """Let a computation continue only when `copy` is done.

        Args:
            copy (`Copy`)
            stream (`torch.Stream`, *optional*): That of the computation, by default the one that `copy` started on.
        """

    def compute_stream(self):
        """Return the stream on which the device computes now, None if it has none."""


class StreamCopier(Copier):
    """Copies while the device computes, on one stream for each direction.

    Not with `record_stream`, which would let the allocator hold memory until the host has queried events: memory
    is used again in the order of the compute stream, which waits for the copy before its memory is free.
    """

    pin_memory = True

    def __init__(self, device):
        super().__init__(device)
        self.host_stream, self.device_stream = self.new_stream(), self.new_stream()

    def to_host(self, target, source):
        return self._copy(self.host_stream, self.device_stream, target, source)

    def to_device(self, target, source):
        return self._copy(self.device_stream, self.host_stream, target, source)

    def _copy(self, stream, opposite, target, source):
        # Before `with stream`, inside of which it would be another.
        compute = self.compute_stream()
        # The source is computed there; the target's memory may still be in use by what it was before.
        stream.wait_stream(compute)
        # The two directions share host memory: what is reloaded was written by the other one, and a buffer that was
        # given back may still be read by the other one.
        stream.wait_stream(opposite)
        self.enqueue(stream, target, source)
        return Copy(stream.record_event(self.new_event()), compute)

    def wait(self, copy, stream=None):
        (copy.stream if stream is None else stream).wait_event(copy.done)

    def compute_stream(self):
        return torch.accelerator.current_stream(self.device)

    def new_stream(self):
        """Return a stream of the device."""
        return torch.Stream(self.device)

    def new_event(self):
        """Return an event of the device."""
        return torch.Event(self.device)

    def enqueue(self, stream, target, source):
        """Let `stream` copy `source` to `target`."""
        with stream:
            target.copy_(source, non_blocking=True)
