"""What a run draws: the curves of metrics.png, and the grid and clips of its previews."""

import fractions
import itertools
import math

import numpy as np
from diffusers.utils import make_image_grid
from PIL import Image


# ---------------------------------------------------------------- metrics.png


def draw_metrics(path, lines, validation=()):
    """Draw loss, learning rate and memory over the optimizer steps.

    Args:
        path (`pathlib.Path`): Of the PNG.
        lines (`list[dict]`): Of metrics.jsonl.
        validation (`list[tuple[int, float]]`): Steps and validation losses.
    """
    # Here, so that a run pays for the import when it has ended.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    loss_axes, rate_axes, memory_axes = figure.subplots(3, sharex=True)
    # A line of a few points is hard to see, and one of a single point has no length.
    marker = "." if len(lines) < 50 else None
    runs = itertools.groupby(lines, key=lambda line: line.get("expert"))
    for number, (expert, run) in enumerate((expert, list(run)) for expert, run in runs):
        color, of_expert = f"C{number}", f", {expert}" if expert else ""
        steps, losses = _points(run, "loss")
        look = {"color": color, "alpha": 0.35, "linewidth": 0.6, "marker": marker}
        loss_axes.plot(steps, losses, **look, label=f"training{of_expert}")
        if (window := len(losses) // 20) > 1:
            means = np.convolve(losses, np.full(window, 1 / window), "valid")
            loss_axes.plot(steps[window - 1 :], means, color=color, label=f"mean of {window} steps{of_expert}")
        rate_axes.plot(*_points(run, "lr"), color=color, marker=marker)
    if validation:
        loss_axes.plot(*zip(*validation, strict=True), color="black", marker="o", label="validation")
    for key, label in (("device_peak_bytes", "peak on the device"), ("host_rss_bytes", "host memory of the process")):
        steps, sizes = _points(lines, key)
        if steps:
            memory_axes.plot(steps, [size / 2**30 for size in sizes], marker=marker, label=label)
    loss_axes.set(ylabel="loss", title="Training, one point per optimizer step")
    rate_axes.set(ylabel="learning rate", ylim=(0, None))
    memory_axes.set(ylabel="GiB", xlabel="optimizer step", ylim=(0, None))
    for axes in (loss_axes, memory_axes):
        axes.legend()
    figure.savefig(path, dpi=120)


def _points(lines, key):
    """Return the steps and values of the lines that have a finite value."""
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None and math.isfinite(line[key])]
    return [step for step, _ in points], [value for _, value in points]


# ---------------------------------------------------------------- previews


def draw_grid(previews):
    """Return images next to each other, or of clips the first, middle and last frame, one line for each.

    Args:
        previews (`list[list[PIL.Image.Image]]`): The frames of each preview.
    """
    if all(len(frames) == 1 for frames in previews):
        images = [frames[0] for frames in previews]
        columns = math.ceil(math.sqrt(len(images)))
    else:
        images = [frames[k * (len(frames) - 1) // 2] for frames in previews for k in range(3)]
        columns = 3
    rows = math.ceil(len(images) / columns)
    images += [Image.new("RGB", images[0].size)] * (rows * columns - len(images))
    return make_image_grid(images, rows, columns)


def write_clip(path, frames, fps):
    """Write a clip as H.264 in an mp4.

    Args:
        path (`pathlib.Path`), frames (`list[PIL.Image.Image]`), fps (`float`)
    """
    import av

    rate = fractions.Fraction(fps).limit_denominator(1001)
    with av.open(str(path), "w") as container:
        width, height = frames[0].size
        stream = container.add_stream("libx264", rate=rate, width=width, height=height, pix_fmt="yuv420p")
        stream.thread_count = 1
        # With B-frames the bytes of x264 are not the same each time.
        stream.options = {"crf": "18", "bf": "0"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
