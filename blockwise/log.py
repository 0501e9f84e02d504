"""Where the memory of a run goes: named points, the first steps by category, and what to say when it runs out."""

import contextlib
import re
import time
import weakref

import torch
from torch.utils._pytree import tree_leaves

from blockwise import checkpointing, offload
from blockwise.tracking import LiveBytes


NUM_WATCHED_STEPS = 3
MAX_SAMPLES = 4000

# From the bottom of the picture to its top: what is there all the time comes first.
CATEGORIES = ("weights", "adapters", "optimizer_state", "ema", "gradients", "batch", "activations")

# One of them is in the message of every error that means "no memory is left", whatever its class.
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)


class OutOfMemory(RuntimeError):
    """No memory is left; one paragraph says where, and what would help."""


class MemoryLog:
    """Measures the memory of one process over a run. None of it waits for the device.

    As a context it covers the whole run: it ends the watch whatever happens, and turns an error that means that no
    memory is left, and no other, into `OutOfMemory`.

    Attributes:
        points (`list[dict]`): What `point` recorded.
        watched (`Watch` or None): The last training that `watch` followed.
        parking (`dict` or None): What `offload.counters` said of the last optimizer step, if someone sets it.
        data (`dict` or None): How long training waited for data, if someone sets it.
        forecast_bytes (`int` or None): Predicted peak of the training, if someone sets it.
        suggestions (callable or None): If someone sets it: function from the phase, "training" or None (another), to
            a list of settings that would save memory, as pairs of text and bytes. Called when memory has run out.
    """

    def __init__(self):
        self.points = []
        self.watched = None
        self.parking = self.data = None
        self.forecast_bytes = None
        self.suggestions = None
        self._device = torch.device("cpu")
        self._start = time.perf_counter()
        self._repeated = set()  # points that the table leaves out
        self._peaks = {}  # mark -> the highest peak since `peak_since` was asked about it
        self._step = None  # the optimizer step that is being made
        self._aside = None  # the phase between two of them
        self._module = lambda: None  # a weak reference to what is trained

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, (RuntimeError, MemoryError)) and _means_out_of_memory(error):
            message = self._explain(error)
            self.end_training()
            raise OutOfMemory(message) from error
        self.end_training()

    # ---- named points

    def begin(self, device):
        """Record the point "start"; from here on it is `device` (`torch.device`) that is measured."""
        self._device = device
        self.point("start")

    def point(self, name):
        """Record what is held now and, of the device, the peak since the last point; in bytes, None: not reported."""
        has_counters = self._has_counters()
        self.points.append(
            {
                "name": name,
                "seconds": time.perf_counter() - self._start,
                "allocated_bytes": torch.accelerator.memory_allocated(self._device) if has_counters else None,
                "reserved_bytes": torch.accelerator.memory_reserved(self._device) if has_counters else None,
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
        """Return all points as a text table."""
        keys = ("allocated_bytes", "reserved_bytes", "peak_bytes", "host_rss_bytes", "pinned_bytes")
        scale, unit = _unit(max((point[key] or 0 for point in self.points for key in keys), default=0))
        rows = [("memory at", "seconds", "allocated", "reserved", "peak since", "host", "pinned", unit)]
        for number, point in enumerate(self.points):
            if number in self._repeated:
                continue
            sizes = ["-" if point[key] is None else f"{point[key] / scale:.2f}" for key in keys]
            rows.append((point["name"], f"{point['seconds']:.1f}", *sizes, ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
        )

    # ---- training

    def watch(self, module, optimizer, *, step, average=()):
        """Follow memory by category from now on until three optimizer steps are made; see `Watch`.

        Args:
            module (`nn.Module`): What is trained.
            optimizer (`torch.optim.Optimizer`): As `accelerator.prepare` returned it.
            step (`int`): Number of the first optimizer step, for messages.
            average (`list[torch.Tensor]`): Of what is trained, if one is kept.
        """
        self._module, self._step = weakref.ref(module), step
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
        watched, where = self.watched, (self._step, self._module)
        if any(point["name"] == name for point in self.points):
            self._repeated |= {len(self.points), len(self.points) + 1}
        self.point(name)
        watched.pause()
        self._step, self._module, self._aside = None, lambda: None, name
        yield
        (self._step, self._module), self._aside = where, None
        watched.go_on()
        self.point("training")
        self.peak_since("step")

    def end_training(self):
        """Stop watching, also after fewer than three steps."""
        self._step, self._module = None, lambda: None
        if self.watched is not None:
            self.watched.close()

    def plot(self, path, forecast_bytes=None):
        """Draw the memory of the steps that were watched, by category; nothing if there were none.

        Args:
            path (`pathlib.Path`): Of the PNG.
            forecast_bytes (`int`, *optional*): What the peak was predicted to be.
        """
        if self.watched is not None and self.watched.samples:
            _plot(self.watched, path, forecast_bytes)

    # ---- out of memory

    def _explain(self, error):
        asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        sentences = [f"Out of memory {self._where()}{f', when asked for {asked[1]}' if asked else ''}."]
        if self._has_counters():
            actual = {
                "allocated": torch.accelerator.memory_allocated(self._device),
                "reserved": torch.accelerator.memory_reserved(self._device),
                "at the peak": self.peak_since("step" if self._step is not None else "point"),
            }
        else:
            actual = {"of host memory in use": _host_rss_bytes()}
            if self._step is not None and self.watched.peak_bytes:
                actual["at the peak of the first steps' tensors"] = self.watched.peak_bytes
        forecast = ""
        if self.forecast_bytes is not None and self._aside is None:
            forecast = f"Forecast for training: {_size(self.forecast_bytes)}; "
        actual = ", ".join(f"{_size(num_bytes)} {what}" for what, num_bytes in actual.items() if num_bytes is not None)
        sentences.append(f"{forecast}{'actual' if forecast else 'Actual'}: {actual}.")
        if self.suggestions is not None:
            phase = self._aside or (None if self._step is None else "training")
            best = sorted(self.suggestions(phase), key=lambda pair: -pair[1])[:3]
            if best:
                listed = "; ".join(f"{setting} ({_size(num_bytes)})" for setting, num_bytes in best)
                sentences.append(f"What would save most: {listed}.")
        return " ".join(sentences)

    def _where(self):
        if self._step is None:
            return f"after the point '{self.points[-1]['name']}'" if self.points else "at the start"
        place = f"in step {self._step}"
        if self.watched.is_open:
            place += f" ({self.watched.phase})"
        block, recomputed = checkpointing.last_run["block"](), checkpointing.last_run["recomputed"]
        for name, module in self._module().named_modules():
            if module is block:
                return f"{place}, in or after {name} ({'recomputation' if recomputed else 'forward'})"
        return place

    def _has_counters(self):
        return self._device.type not in ("cpu", "mps")


def _means_out_of_memory(error):
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(_OUT_OF_MEMORY.search(str(error)))


# ---------------------------------------------------------------- the first steps, by category


class Watch:
    """Follows the tensors on the device through the first optimizer steps, from outside the training.

    Weights, adapters (names with ".lora_"), gradients, the batch and the optimizer's state (with fp32 masters of
    weights) are known from the objects themselves, and everything else counts as activations. What an optimizer makes
    on the way of its step belongs to its state. Parked inputs are host memory, also on a CPU.

    Attributes:
        peak_bytes (`int`): Most bytes on the device at one moment, with what was there before.
        by_category (`dict[str, int]`): Of these.
        held_bytes (`int` or None): What the first forward pass leaves for its backward pass.
        samples (`list[tuple]`): (event, bytes, by category, parked bytes), where events are the operations that made
            tensors, counted; at most `MAX_SAMPLES`, each the highest of its stretch.
        marks (`list[tuple]`): (event, what ended there).
        is_open (`bool`): Whether it goes on.
    """

    def __init__(self, log, module, optimizer, *, device_type, average=()):
        while hasattr(optimizer, "optimizer"):  # the wrappers of Accelerate and DeepSpeed hold what they wrap
            optimizer = optimizer.optimizer
        self.peak_bytes, self.by_category, self.held_bytes = 0, {}, None
        self.samples, self.marks = [], []
        self.phase = "batch"
        self.num_steps = 0
        self._num_events, self._stride = 0, 1
        self._log, self._device_type, self._average = log, device_type, average
        self._hooks = [
            module.register_forward_pre_hook(lambda module, args: self._begin_forward(module, optimizer, args)),
            module.register_forward_hook(lambda module, args, loss: self._end_forward(loss)),
            optimizer.register_step_pre_hook(lambda *_: self._begin("optimizer", "optimizer_state")),
            optimizer.register_step_post_hook(lambda *_: self._begin("batch", "batch")),
        ]
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._masters = []
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(lambda parameter: self._count([parameter.grad], "gradients"))
            for parameter in self._trained
        ]
        self.is_open, self._is_paused = True, False
        self._knows_all = False  # weights and the optimizer's state
        self._live = LiveBytes(device_type, on_change=lambda live: self._sample())
        self._live.category = "batch"
        self._live.by_category.update(dict.fromkeys(CATEGORIES, 0))
        self._live.__enter__()

    def end_step(self):
        """Record that an optimizer step is made; after the third nothing is followed, or costs anything, more."""
        if not self.is_open:
            return
        self.num_steps += 1
        self._mark("step")
        self._begin("batch", "batch")
        if self.num_steps == 1:
            self._log.point("first step")
        if self.num_steps == NUM_WATCHED_STEPS:
            self.close()

    def pause(self):
        """Leave out what comes now, until `go_on`."""
        if self.is_open:
            self._live.__exit__(None, None, None)
            self._is_paused = True

    def go_on(self):
        """Follow what comes again."""
        if self.is_open:
            self._live.__enter__()
            self._is_paused, self._knows_all = False, False

    def close(self):
        """Let go of everything; again: nothing."""
        if self.is_open:
            self.is_open = False
            if not self._is_paused:
                self._live.__exit__(None, None, None)
            for hook in self._hooks:
                hook.remove()
            self._live, self._hooks, self._trained, self._masters, self._average = None, [], [], [], ()

    def _begin(self, phase, category):
        self.phase, self._live.category = phase, category

    def _begin_forward(self, module, optimizer, args):
        if not self._knows_all:
            self._knows_all = True
            # Now, since preparing or resuming may have replaced the tensors. The parameters come last: an optimizer
            # has them too, where they are their own fp32 masters.
            masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._masters = masters
            self._count([*masters, *tree_leaves(list(optimizer.state.values()))], "optimizer_state")
            self._count(self._average, "ema")
            self._count([*module.parameters(), *module.buffers()], "weights")
            self._count([p for name, p in module.named_parameters() if ".lora_" in name], "adapters")
        self._count(tree_leaves(args), "batch")
        self._begin("forward", "activations")
        self._before_forward = self._sample()

    def _end_forward(self, loss):
        after = self._sample()
        self._mark("forward")
        if self.held_bytes is None:
            self.held_bytes = after - self._before_forward
            self._log.point("first forward")
        self._begin("backward", "activations")
        if loss.requires_grad:
            # Called when the whole backward pass has ended, which is later than any hook of a tensor.
            engine = torch.autograd.Variable._execution_engine
            loss.register_hook(lambda _: engine.queue_callback(self._end_backward))

    def _end_backward(self):
        if not self.is_open:
            return
        if not any(what == "backward" for _, what in self.marks):
            self._log.point("first backward")
        # Again, since DDP has put views of its buckets in their place, and may have made sums of those of the masters.
        self._count([parameter.grad for parameter in (*self._trained, *self._masters)], "gradients")
        self._mark("backward")
        self._begin("after backward", "gradients")  # such as those of fp32 masters

    def _count(self, leaves, category):
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device_type]
        self._live.count(tensors, category)

    def _mark(self, what):
        self.marks.append((self._num_events, what))

    def _sample(self):
        """Record what is alive, and return its bytes."""
        event, live = self._num_events, self._live
        self._num_events += 1
        num_bytes, parked = live.live_bytes, offload.pool_bytes()
        is_peak = num_bytes > self.peak_bytes
        starts_stretch = not self.samples or self.samples[-1][0] // self._stride != event // self._stride
        if is_peak or starts_stretch or num_bytes > self.samples[-1][1]:
            by_category = dict(live.by_category)
            if is_peak:
                self.peak_bytes, self.by_category = num_bytes, by_category
            if not starts_stretch:
                self.samples.pop()
            self.samples.append((event, num_bytes, by_category, parked))
            if len(self.samples) > MAX_SAMPLES:
                self._thin()
        return num_bytes

    def _thin(self):
        self._stride *= 2
        highest = {}
        for sample in self.samples:
            stretch = sample[0] // self._stride
            if stretch not in highest or sample[1] > highest[stretch][1]:
                highest[stretch] = sample
        self.samples = list(highest.values())


# ---------------------------------------------------------------- for people


def _unit(num_bytes):
    return (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")


def _host_rss_bytes():
    """Return the bytes of host memory that this process has in use, None without psutil."""
    try:
        import psutil
    except ImportError:
        return None
    return psutil.Process().memory_info().rss


def _size(num_bytes):
    scale, unit = _unit(num_bytes)
    return f"{num_bytes / scale:.1f} {unit}"


def _plot(watch, path, forecast_bytes):
    # Here, so that a run pays for the import when it has ended.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scale, unit = _unit(max(watch.peak_bytes, forecast_bytes or 0))
    events = [sample[0] for sample in watch.samples]
    shown = [category for category in CATEGORIES if any(sample[2][category] for sample in watch.samples)]
    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.stackplot(
        events,
        [[sample[2][category] / scale for sample in watch.samples] for category in shown],
        labels=[category.replace("_", " ") for category in shown],
        colors=[f"C{CATEGORIES.index(category)}" for category in shown],
        step="post",
        linewidth=0,
    )
    if any(sample[3] for sample in watch.samples):
        parked = [sample[3] / scale for sample in watch.samples]
        axes.step(events, parked, where="post", color="black", linestyle="--", label="parked in host memory")
    if forecast_bytes is not None:
        axes.axhline(forecast_bytes / scale, color="crimson", label=f"forecast peak, {_size(forecast_bytes)}")
    styles = {"forward": (":", 0.8, "a forward pass ends"), "backward": ("-.", 0.8, "a backward pass ends")}
    styles["step"] = ("-", 1.2, "an optimizer step ends")
    for what, (linestyle, linewidth, label) in styles.items():
        for number, event in enumerate(event for event, mark in watch.marks if mark == what):
            label = None if number else label  # once in the legend
            axes.axvline(event, color="0.3", linestyle=linestyle, linewidth=linewidth, label=label)
    axes.set(
        xlabel="operations that made tensors, in their order",
        ylabel=unit,
        xlim=(0, 1.01 * events[-1] + 1),
        ylim=(0, None),
        title=f"Memory by category, optimizer steps 1 to {watch.num_steps}: at most {_size(watch.peak_bytes)}",
    )
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)
