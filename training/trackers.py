"""What a run shows elsewhere: TensorBoard, Weights & Biases and trackio, by Accelerate's trackers.

Needs the standard library only until it is used: `check_trackers` comes before anything heavy is loaded.
"""

import importlib
import importlib.util
import json
import pathlib
import textwrap

from runtime.errors import FailedError, RefusedError


PROJECT = "blockwise"


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
    if "wandb" in args.report_to:
        import wandb

        try:
            is_online = wandb.setup().settings.mode not in ("offline", "dryrun", "disabled")
            problem = is_online and not wandb.login(prompt=False, verify=False) and "nobody is logged in"
        except (wandb.Error, OSError, ValueError) as error:
            problem = " ".join(str(error).split())
        if problem:
            raise RefusedError(
                f"--report_to wandb: {problem}; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE to offline."
            )


def start_trackers(accelerator, args, *, first_step):
    """Start the trackers of a run, `accelerator.trackers`. On other processes than the main one there are none.

    The files of TensorBoard and W&B are in the output folder, those of trackio where the user has them. After a
    resume the same runs continue. W&B drops steps below the last one: log in the order of the steps.

    Args:
        accelerator (`Accelerator`): Made with `log_with=args.report_to or None` and `project_dir=args.output_dir`.
        args (`argparse.Namespace`): Logged as the configuration.
        first_step (`int`): Above 1 on a resume.

    Raises:
        FailedError: A tracker does not start.
    """
    if not args.report_to or not accelerator.is_main_process:
        return
    config = json.loads(json.dumps(vars(args), default=str))
    output_dir, is_resumed = pathlib.Path(args.output_dir), first_step > 1
    run_name, id_file = output_dir.resolve().name, output_dir / "wandb_run_id.txt"
    settings = {
        # TensorBoard forgets steps from here on: those of an earlier run, or after the checkpoint.
        "tensorboard": {"purge_step": first_step},
        "wandb": {"name": run_name, "dir": str(output_dir), "config": config},
        "trackio": {"name": run_name, "config": config, "resume": "allow" if is_resumed else "never"},
    }
    if is_resumed and id_file.exists():
        settings["wandb"] |= {"id": id_file.read_text(encoding="utf-8").strip(), "resume": "allow"}
    try:
        # Without `config`: as hyperparameters, TensorBoard would get a run of its own, named by the time.
        accelerator.init_trackers(PROJECT, init_kwargs=settings)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise FailedError(f"--report_to {','.join(args.report_to)}: a tracker did not start: {reason}") from error
    if "tensorboard" in args.report_to:
        # The text is Markdown, in which indented text is shown unchanged.
        text = textwrap.indent(json.dumps(config, indent=2, ensure_ascii=False), "    ")
        accelerator.get_tracker("tensorboard").log({"config": text}, step=first_step - 1)
    if "wandb" in args.report_to:
        id_file.write_text(accelerator.get_tracker("wandb", unwrap=True).id + "\n", encoding="utf-8")


def log_previews(accelerator, grid, clips, step):
    """Log previews to all trackers. TensorBoard gets the grid alone, since it plays no clips.

    Args:
        accelerator (`Accelerator`), grid (`PIL.Image.Image`)
        clips (`dict[str, pathlib.Path]`): MP4 files, by the names that trackers show.
        step (`int`)
    """
    import numpy as np

    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.log_images({"validation/grid": np.asarray(grid)[None]}, step=step, dataformats="NHWC")
        else:
            package = importlib.import_module(tracker.name)  # the two have the same classes
            media = {name: package.Video(str(path), format="mp4") for name, path in clips.items()}
            tracker.log({"validation/grid": package.Image(grid)} | media, step=step)
