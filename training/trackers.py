"""What a run shows elsewhere: TensorBoard, Weights & Biases and trackio, by Accelerate's trackers; and metrics.png.

Needs the standard library only until it is used: `check_trackers` comes before anything heavy is loaded.
"""

import contextlib
import importlib
import importlib.util
import itertools
import json
import math
import pathlib
import random
import textwrap

from runtime.errors import FailedError, RefusedError


PROJECT = "blockwise"
_SCALARS = (bool, int, float, str, type(None))
_STRIP_FRAMES, _STRIP_SIDE = 8, 256


def check_trackers(args):
    """Check that what `--report_to` names is installed and, for W&B, that somebody is logged in.

    Args:
        args (`argparse.Namespace`): `report_to` is a list out of tensorboard, wandb and trackio.

    Raises:
        RefusedError: A package is missing, or W&B has no key and is not offline.
    """
    for name in args.report_to:
        if importlib.util.find_spec(name) is None:
            raise RefusedError(f"--report_to {name} needs a package that is not installed: pip install {name}")
    if "wandb" not in args.report_to:
        return

    import wandb
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    instead = "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE to offline"
    # Not `wandb.login`: it asks the server. This looks where W&B will look: environment, settings, netrc.
    try:
        settings = wandb_setup.singleton().settings
        is_ready = settings.mode in ("offline", "dryrun", "disabled") or wbauth.authenticate_session(
            host=settings.base_url, source="--report_to", prompt=False, update_session=False
        )
    except (wandb.Error, OSError, ValueError) as error:
        raise RefusedError(f"--report_to wandb: {' '.join(str(error).split())}; {instead}.") from error
    if not is_ready:
        raise RefusedError(f"--report_to wandb: nobody is logged in to Weights & Biases; {instead}.")


@contextlib.contextmanager
def _same_randomness():
    """Context after which the generators that training draws from are as they were before."""
    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class Trackers:
    """The trackers of this run, which never change what training draws. Does nothing but on the main process.

    TensorBoard's files and W&B's are in the output folder, trackio's where the user has them. On a resume the same
    runs go on. W&B drops what comes with a lower step than before: log in the order of the steps.

    Args:
        accelerator (`Accelerator`): Made with `log_with=args.report_to or None` and `project_dir=args.output_dir`.
        args (`argparse.Namespace`): Logged as the configuration.
        first_step (`int`): Above 1 on a resume.

    Raises:
        FailedError: A tracker does not start.
    """

    def __init__(self, accelerator, args, *, first_step):
        self.accelerator = accelerator
        if not args.report_to or not accelerator.is_main_process:
            return
        config = {
            name: value if isinstance(value, _SCALARS) else json.dumps(value, ensure_ascii=False, default=str)
            for name, value in vars(args).items()
        }
        output_dir, resumes = pathlib.Path(args.output_dir), first_step > 1
        run_name, id_file = output_dir.resolve().name, output_dir / "wandb_run_id.txt"
        settings = {
            # Steps after the checkpoint, or of a start before, are made again: TensorBoard forgets the first ones.
            "tensorboard": {"purge_step": first_step},
            "wandb": {"name": run_name, "dir": str(output_dir), "config": config},
            "trackio": {"name": run_name, "config": config, "resume": "allow" if resumes else "never"},
        }
        if resumes and id_file.exists():
            settings["wandb"] |= {"id": id_file.read_text(encoding="utf-8").strip(), "resume": "allow"}
        with _same_randomness():
            try:
                # Without `config`: as hyperparameters, TensorBoard would get a run of its own, named by the time.
                accelerator.init_trackers(PROJECT, init_kwargs=settings)
            except Exception as error:
                raise FailedError(
                    f"--report_to {','.join(args.report_to)}: a tracker did not start: "
                    f"{type(error).__name__}: {' '.join(str(error).split())}"
                ) from error
            if "tensorboard" in args.report_to:
                # The text is Markdown, in which what is indented is shown as it is.
                text = textwrap.indent(json.dumps(config, indent=2, ensure_ascii=False), "    ")
                accelerator.get_tracker("tensorboard").log({"config": text}, step=first_step - 1)
            if "wandb" in args.report_to:
                id_file.write_text(accelerator.get_tracker("wandb", unwrap=True).id + "\n", encoding="utf-8")

    def log(self, values, step):
        """Log scalars.

        Args:
            values (`dict[str, float | None]`): None is left out.
            step (`int`)
        """
        if self.accelerator.trackers:
            with _same_randomness():
                self.accelerator.log({name: v for name, v in values.items() if v is not None}, step=step)

    def log_media(self, pictures, videos, step):
        """Log pictures and clips; TensorBoard, which plays no clips, gets a few frames of each side by side.

        Args:
            pictures (`dict[str, PIL.Image.Image]`)
            videos (`dict[str, pathlib.Path]`): MP4 files.
            step (`int`)
        """
        import numpy as np

        for tracker in self.accelerator.trackers:
            with _same_randomness():
                if tracker.name == "tensorboard":
                    shown = pictures | {name: _film_strip(path) for name, path in videos.items()}
                    shown = {name: np.asarray(picture.convert("RGB"))[None] for name, picture in shown.items()}
                    tracker.log_images(shown, step=step, dataformats="NHWC")
                else:
                    # The two have the same classes.
                    package = importlib.import_module(tracker.name)
                    media = {name: package.Image(picture) for name, picture in pictures.items()}
                    media |= {name: package.Video(str(path), format="mp4") for name, path in videos.items()}
                    tracker.log(media, step=step)

    def finish(self):
        """Write what is left and end the runs, once; the process group stays."""
        while self.accelerator.trackers:
            with _same_randomness():
                self.accelerator.trackers.pop().finish()


def _film_strip(path):
    """Return evenly spaced frames of a clip, small and side by side, as one picture."""
    import av
    from PIL import Image

    # Twice, since not every file says how many frames it has, and all at once may be large.
    with av.open(str(path)) as container:
        count = sum(1 for _ in container.decode(video=0))
    shown = min(count, _STRIP_FRAMES)
    chosen = {round(k * (count - 1) / max(shown - 1, 1)) for k in range(shown)}
    with av.open(str(path)) as container:
        frames = [frame.to_image() for k, frame in enumerate(container.decode(video=0)) if k in chosen]
    for frame in frames:
        frame.thumbnail((_STRIP_SIDE, _STRIP_SIDE))
    width, height = frames[0].size
    strip = Image.new("RGB", (width * len(frames), height))
    for k, frame in enumerate(frames):
        strip.paste(frame, (k * width, 0))
    return strip


def draw_metrics(path, lines, validation=()):
    """Draw loss, learning rate and memory over the optimizer steps.

    Args:
        path (`pathlib.Path`): Of the PNG.
        lines (`list[dict]`): Of metrics.jsonl.
        validation (`list[tuple[int, float]]`): Steps and validation losses.
    """
    # Here, so that a run pays for the import when it has ended.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, rate_axes, memory_axes = figure.subplots(3, sharex=True)
    # A line of a few points is hard to see, and of one point has no length.
    marker = "." if len(lines) < 50 else None
    runs = itertools.groupby(lines, key=lambda line: line.get("expert"))
    for number, (expert, run) in enumerate((expert, list(run)) for expert, run in runs):
        color, of_expert = f"C{number}", f", {expert}" if expert else ""
        steps, losses = _points(run, "loss")
        loss_axes.plot(
            steps, losses, color=color, alpha=0.35, linewidth=0.6, marker=marker, label=f"training{of_expert}"
        )
        window = max(1, len(losses) // 20)
        if window > 1:
            means = _running_means(losses, window)
            loss_axes.plot(steps, means, color=color, label=f"mean of {window} steps{of_expert}")
        rate_axes.plot(*_points(run, "lr"), color=color, marker=marker)
    if validation:
        loss_axes.plot(*zip(*validation, strict=True), color="black", marker="o", label="validation")
    on_device = [line for line in lines if line.get("device_peak_bytes") is not None]
    on_host = [line for line in lines if line.get("device_peak_bytes") is None]
    for part, key, label in (
        (on_device, "device_peak_bytes", "peak on the device"),
        (on_host, "host_rss_bytes", "host memory of the process"),
    ):
        if part:
            steps, sizes = _points(part, key)
            memory_axes.plot(steps, [size / 2**30 for size in sizes], marker=marker, label=label)
    loss_axes.set(ylabel="loss", title="Training, one point per optimizer step")
    rate_axes.set(ylabel="learning rate")
    memory_axes.set(ylabel="GiB", xlabel="optimizer step")
    for axes in (rate_axes, memory_axes):
        axes.axhline(0, linewidth=0)  # takes part in the limits, and so in the margin above
        axes.set_ylim(0, None)
    for axes in (loss_axes, memory_axes):
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.savefig(path, dpi=120)


def _points(lines, key):
    """Return the steps and values of the lines that have a finite value."""
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None and math.isfinite(line[key])]
    return [step for step, _ in points], [value for _, value in points]


def _running_means(values, window):
    """Return for each value the mean of it and those before it, `window` in all where there are as many."""
    return [
        math.fsum(part) / len(part)
        for part in (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    ]
