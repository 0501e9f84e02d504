"""Where the memory of a run goes: named points, the first steps by category, and what to say when it runs out."""

import contextlib
import math
import re
import time
import weakref

import torch

from blockwise import checkpointing, offload
from blockwise.tracking import LiveBytes


NUM_WATCHED_STEPS = 3
MAX_SAMPLES = 4000  # an even number

# From the bottom of the plot to its top: what is there all the time comes first.
CATEGORIES = ("weights", "adapters", "optimizer_state", "ema", "gradients", "batch", "activations")

# One of them is in the message of every error that means "no memory is left", whatever its class.
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)


class OutOfMemory(RuntimeError):
    """No memory is left; one paragraph names the place and what would help."""


class MemoryLog:
    """Measures the memory of one process over a run. None of it waits for the device.

    As a context it covers the whole run: it ends the watch whatever happens, and turns an error that means that no
    memory is left, and no other, into `OutOfMemory`.

    Attributes:
        points (`list[dict]`): What `point` recorded.
        watched (`Watch` or None): The last training that `watch` followed.
        parking (`dict` or None): What `offload.counters` returned for the last optimizer step, if someone sets it.
        forecast_bytes (`int` or None): Predicted peak of the training, if someone sets it.
        suggestions (callable or None): If someone sets it: function from the phase, "training" or None (another), to
            a list of settings that would save memory, as pairs of text and bytes, the most first. Called when memory
            has run out.
    """

    def __init__(self):
        self.points = []
        self.watched = self.parking = self.forecast_bytes = self.suggestions = None
        self._device = torch.device("cpu")
        self._start = time.perf_counter()
        self._repeated = set()  # points that the table leaves out
        self._peaks = {}  # mark -> the highest peak since `peak_since` was asked about it
        self._step = None  # the number of the optimizer step that is being made
        self._aside = None  # the phase between two of them

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        message = self._explain(error) if _means_out_of_memory(error) else None
        self.end_training()
        if message is not None:
            raise OutOfMemory(message) from error

    # ---- named points

    def begin(self, device):
        """Record the point "start"; from here on it is `device` (`torch.device`) that is measured."""
        self._device = device
        self.point("start")

    def point(self, name):
        """Record what is held now and, of the device, the peak since the last point; in bytes, None: not reported."""
        now = self._allocated()
        self.points.append(
            {
                "name": name,
                "seconds": time.perf_counter() - self._start,
                "allocated_bytes": now.get("allocated"),
                "reserved_bytes": now.get("reserved"),
                "peak_bytes": self.peak_since("point"),
                "host_rss_bytes": _host_rss_bytes(),
                "pinned_bytes": offload.counters()["slab_bytes"],
            }
        )

    def peak_since(self, mark):
        """Return the peak of allocated bytes since the last call with the same `mark` (`str`), None on a CPU.

        The device has one peak, which begins again when it is reset. Only this method resets it, and remembers it for
        all the other marks.
        """
        if not self._has_counters():
            return None
        peak = torch.accelerator.max_memory_allocated(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._peaks = {known: max(peak, before) for known, before in self._peaks.items()}
        highest = self._peaks.get(mark, peak)
        self._peaks[mark] = 0
        return highest

    def phases(self):
        """Return the peak of the device in each phase, `{name: bytes}`; empty where it reports nothing.

        A phase begins at the point of its name, but for "training", between "prepared" and "saving", and "export".
        """
        phases, phase = {}, None
        for point in self.points:
            if phase is not None and point["peak_bytes"] is not None:
                phases[phase] = max(phases.get(phase, 0), point["peak_bytes"])
            if not (phase == "training" and point["name"].startswith("first ")):
                phase = {"prepared": "training", "saving": "export"}.get(point["name"], point["name"])
        return phases

    def table(self):
        """Return the points as a text table, of those that `aside` records again and again the first."""
        points = [point for index, point in enumerate(self.points) if index not in self._repeated]
        keys = ("allocated_bytes", "reserved_bytes", "peak_bytes", "host_rss_bytes", "pinned_bytes")
        rows = [("memory at", "seconds", "allocated", "reserved", "peak since", "host", "pinned")]
        for point in points:
            sizes = ["-" if point[key] is None else format_bytes(point[key]) for key in keys]
            rows.append((point["name"], f"{point['seconds']:.1f}", *sizes))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))) for row in rows)

    # ---- training

    def watch(self, module, optimizer, *, step, average=()):
        """Follow memory by category from now on until three optimizer steps are made; see `Watch`.

        Args:
            module (`nn.Module`): What is trained.
            optimizer (`torch.optim.Optimizer`): As `accelerator.prepare` returned it.
            step (`int`): Number of the first optimizer step, for messages.
            average (`list[torch.Tensor]`): Of what is trained, if one is kept.
        """
        self._step = step
        self.peak_since("step")
        self.watched = Watch(self, module, optimizer, device_type=self._device.type, average=average)

    def end_step(self):
        """Record that an optimizer step is made; return the peak of allocated bytes during it, None on a CPU."""
        self._step += 1
        self.watched.end_step()
        return self.peak_since("step")

    @contextlib.contextmanager
    def aside(self, name):
        """Context for what is done between two optimizer steps: a phase of its own, and no part of the next step.

        Args:
            name (`str`): Of the phase.
        """
        step = self._step
        if any(point["name"] == name for point in self.points):
            self._repeated |= {len(self.points), len(self.points) + 1}
        self.point(name)
        self.watched.pause()
        self._step, self._aside = None, name
        yield
        self._step, self._aside = step, None
        self.watched.resume()
        self.point("training")
        self.peak_since("step")

    def end_training(self):
        """Stop watching, also after fewer than three steps."""
        self._step = None
        if self.watched is not None:
            self.watched.close()

    def plot(self, path):
        """Draw the memory of the steps that were watched, by category, as the PNG `path`; nothing if none were."""
        if self.watched is not None and self.watched.samples:
            _plot(self.watched, path, self.forecast_bytes)

    # ---- out of memory

    def _explain(self, error):
        asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        sentences = [f"Out of memory {self._where()}" + (f", when asked for {asked[1]}" if asked else "")]
        if self.forecast_bytes is not None and self._aside is None:
            sentences.append(f"Forecast for training: {format_bytes(self.forecast_bytes)}")
        actual = {"of host memory in use": _host_rss_bytes()}
        if self._has_counters():
            actual = self._allocated() | {"at the peak": self.peak_since("point" if self._step is None else "step")}
        listed = ", ".join(f"{format_bytes(size)} {what}" for what, size in actual.items() if size is not None)
        sentences.append(f"Actual: {listed or 'unknown without psutil'}")
        phase = self._aside or (None if self._step is None else "training")
        if self.suggestions is not None and (best := self.suggestions(phase)[:3]):
            listed = "; ".join(f"{setting} ({format_bytes(num_bytes)})" for setting, num_bytes in best)
            sentences.append(f"What would save most: {listed}")
        return ". ".join(sentences) + "."

    def _where(self):
        if self._step is None:
            return f"after the point '{self.points[-1]['name']}'" if self.points else "at the start"
        place = f"in step {self._step}" + (f" ({self.watched.phase})" if self.watched.is_open else "")
        block, recomputed = checkpointing.last_run["block"](), checkpointing.last_run["recomputed"]
        for name, module in self.watched.module().named_modules():
            if module is block:
                return f"{place}, in or after {name} ({'recomputation' if recomputed else 'forward'})"
        return place

    def _has_counters(self):
        return self._device.type not in ("cpu", "mps")

    def _allocated(self):
        """Return what the allocator of the device holds, empty where it does not report it."""
        if not self._has_counters():
            return {}
        functions = {"allocated": torch.accelerator.memory_allocated, "reserved": torch.accelerator.memory_reserved}
        return {name: function(self._device) for name, function in functions.items()}


def _means_out_of_memory(error):
    is_said = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error))
    return is_said or isinstance(error, (torch.OutOfMemoryError, MemoryError))


# ---------------------------------------------------------------- the first steps, by category


class Watch(LiveBytes):
    """Follows the tensors on the device through the first optimizer steps, from outside the training.

    Weights, adapters (names with ".lora_"), gradients, the batch and the optimizer's state (with fp32 masters of
    weights) are known from the objects themselves, and everything else counts as activations. What an optimizer makes
    on the way of its step belongs to its state. Parked inputs are host memory, also on a CPU.

    Attributes:
        samples (`list[tuple]`): (event, bytes, by category, parked bytes), where events are the operations that made
            tensors, counted; at most `MAX_SAMPLES`, each the highest of its stretch.
        marks (`list[tuple]`): (event, what ended there).
        module (weak reference): To what is trained.
        is_open (`bool`): Whether it continues.
    """

    def __init__(self, log, module, optimizer, *, device_type, average=()):
        super().__init__(device_type)
        while hasattr(optimizer, "optimizer"):  # the wrappers of Accelerate and DeepSpeed hold what they wrap
            optimizer = optimizer.optimizer
        self.module, self._optimizer, self._average = weakref.ref(module), weakref.ref(optimizer), average
        self._log, self.category, self.phase = log, "batch", "batch"
        self.by_category.update(dict.fromkeys(CATEGORIES, 0))
        self.samples, self.marks, self._num_events, self._stride = [], [], 0, 1
        self.num_steps, self.is_open = 0, True
        self._following, self._hooks = contextlib.ExitStack(), contextlib.ExitStack()
        hooks = [
            module.register_forward_pre_hook(self._begin_forward),
            module.register_forward_hook(self._end_forward),
            optimizer.register_step_pre_hook(lambda *_: self._begin("optimizer", "optimizer_state")),
            optimizer.register_step_post_hook(lambda *_: self._begin("batch", "batch")),
        ]
        for parameter in module.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(lambda p: self.count([p.grad], "gradients"))
                hooks.append(hook)
        for hook in hooks:
            self._hooks.callback(hook.remove)
        self.resume()

    def end_step(self):
        """Record that an optimizer step is made; after the third nothing is followed, or costs anything, more."""
        if self.is_open:
            self.num_steps += 1
            self._mark("step")
            self._begin("batch", "batch")
            if self.num_steps == NUM_WATCHED_STEPS:
                self.close()

    def pause(self):
        """Leave out what comes now, until `resume`."""
        self._following.close()

    def resume(self):
        """Follow what comes again."""
        if self.is_open:
            self._following.enter_context(self)
            self._knows_all = False

    def close(self):
        """Release everything; again: nothing."""
        self.is_open, self._average = False, ()
        self._following.close()
        self._hooks.close()

    def changed(self):
        super().changed()
        sample = self._num_events, self.live_bytes, dict(self.by_category), offload.counters()["pool_bytes"]
        if self._num_events % self._stride == 0:
            self.samples.append(sample)
        elif sample[1] > self.samples[-1][1]:
            self.samples[-1] = sample
        self._num_events += 1
        if len(self.samples) == MAX_SAMPLES:
            self._stride *= 2
            pairs = zip(self.samples[::2], self.samples[1::2], strict=True)
            self.samples = [max(pair, key=lambda sample: sample[1]) for pair in pairs]

    def _begin(self, phase, category):
        self.phase, self.category = phase, category

    def _mark(self, what):
        if not any(ended == what for _, ended in self.marks):
            self._log.point(f"first {what}")
        self.marks.append((self._num_events, what))

    def _masters(self):
        return [parameter for group in self._optimizer().param_groups for parameter in group["params"]]

    def _begin_forward(self, module, args):
        if not self._knows_all:
            self._knows_all = True
            # Now, since preparing or resuming may have replaced the tensors.
            own = set(module.parameters())
            self.count([*own, *module.buffers()], "weights")
            self.count([p for name, p in module.named_parameters() if ".lora_" in name], "adapters")
            masters = [parameter for parameter in self._masters() if parameter not in own]
            self.count([masters, list(self._optimizer().state.values())], "optimizer_state")
            self.count(self._average, "ema")
        self.count(args, "batch")
        self._begin("forward", "activations")

    def _end_forward(self, module, args, loss):
        self._mark("forward")
        self._begin("backward", "activations")
        if loss.requires_grad:
            # Called when the whole backward pass has ended, which is later than any hook of a tensor.
            engine = torch.autograd.Variable._execution_engine
            loss.register_hook(lambda _: engine.queue_callback(self._end_backward))

    def _end_backward(self):
        if self.is_open:
            # Again, since DDP has put views of its buckets in their place, and may have made sums of the masters'.
            parameters = [*self.module().parameters(), *self._masters()]
            self.count([parameter.grad for parameter in parameters], "gradients")
            self._mark("backward")
            self._begin("after backward", "gradients")  # such as those of fp32 masters


# ---------------------------------------------------------------- for people


def _host_rss_bytes():
    """Return the bytes of host memory that this process has in use, None without psutil."""
    try:
        import psutil
    except ImportError:
        return None
    return psutil.Process().memory_info().rss


def _unit(num_bytes):
    return (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")


def format_bytes(num_bytes, up=False):
    """Return a number of bytes in GiB, or in MiB below one; rounded `up` where less would not do."""
    scale, unit = _unit(num_bytes)
    hundredths = num_bytes / scale * 100
    return f"{(math.ceil(hundredths) if up else round(hundredths)) / 100:.2f} {unit}"


def _plot(watch, path, forecast_bytes):
    from matplotlib.figure import Figure  # here, so that a run pays for the import when it has ended

    scale, unit = _unit(max(watch.peak_bytes, forecast_bytes or 0))
    events, _, by_category, parked = zip(*watch.samples, strict=True)
    shown = [category for category in CATEGORIES if any(sizes[category] for sizes in by_category)]
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    heights = [[sizes[category] / scale for sizes in by_category] for category in shown]
    labels = [category.replace("_", " ") for category in shown]
    colors = [f"C{CATEGORIES.index(category)}" for category in shown]
    axes.stackplot(events, heights, labels=labels, colors=colors, step="post", linewidth=0)
    if any(parked):
        parked = [num_bytes / scale for num_bytes in parked]
        axes.step(events, parked, where="post", color="black", linestyle="--", label="parked in host memory")
    if forecast_bytes is not None:
        axes.axhline(forecast_bytes / scale, color="crimson", label=f"forecast peak, {format_bytes(forecast_bytes)}")
    whole_height = axes.get_xaxis_transform()
    for what, linestyle in {"forward": ":", "backward": "-.", "step": "-"}.items():
        ends = [event for event, ended in watch.marks if ended == what]
        style = {"colors": "0.3", "linestyles": linestyle, "linewidth": 1, "transform": whole_height}
        axes.vlines(ends, 0, 1, label=f"{what} ends", **style)
    title = f"Memory by category, optimizer steps 1 to {watch.num_steps}: at most {format_bytes(watch.peak_bytes)}"
    axes.set(xlabel="operations that made tensors, in their order", ylabel=unit, ylim=(0, None), title=title)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)
