"""The command line of the training scripts: parsed, checked for contradictions, and resolved for a model.

Needs the standard library and yaml only: the scripts parse before they import torch, so that a typo costs nothing.
"""

import argparse
import functools
import itertools
import logging

from dataset.settings import bucket_pixels, round_down_frames
from runtime.errors import RefusedError
from training.config_files import read_config
from training.flags import BY_MODEL, FLAGS, KEY_VALUE, REQUIRED, ROWS, STRUCTURE, SWITCH, flags_of, has_cap, suggest


logger = logging.getLogger(__name__)


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one sentence, like everything else here."""

    def error(self, message):
        raise RefusedError(message)


def parse_args(argv, *, description, values, resolve=True):
    """Parse and check a command line and the config files that it names.

    Args:
        argv (`list[str]`):
            The command line without the program.
        description (`str`):
            Shown by `--help`.
        values (`dict[str, Any]`):
            What differs between model families: the optional `flags` of this one, the defaults of
            `resolve_for_model` (or what the help text shows for them), the default `timestep_sampling`, and the
            descriptions `sigma_shift`, `dropped_caption` and `described_negative_prompt`.
        resolve (`bool`):
            False where defaults depend on the model, not only on the family: call `resolve_for_model` as soon as the
            configs of the model are read.

    Returns:
        `argparse.Namespace`: Every flag with its final value.

    Raises:
        RefusedError: A flag is unknown, missing, out of range, contradicts another, or can have no effect.
    """
    flags = flags_of(values)
    given, command_line = {}, _read_command_line(argv, description, flags)
    for settings in (*(read_config(path, flags) for path in command_line.get("config", ())), command_line):
        # Later settings win, also over those that they exclude; None removes a setting.
        replaced = {rival for name, value in settings.items() if _is_on(value) for rival in _rivals(name, flags)}
        settings = {name: value for name, value in given.items() if name not in replaced} | settings
        given = {name: value for name, value in settings.items() if value is not None}

    args = argparse.Namespace()
    for name, flag in flags.items():
        is_later = callable(flag.default) or flag.default in (REQUIRED, BY_MODEL)
        setattr(args, name, given.get(name, None if is_later else flag.default))
    absent = {name: flag for name, flag in flags.items() if name not in given}
    excluded = {rival for name, value in given.items() if _is_on(value) for rival in _rivals(name, flags)}
    void = {name for name, flag in absent.items() if name in excluded or not _has_effect(flag, args)}
    missing = [flag for name, flag in absent.items() if flag.default is REQUIRED and name not in void]
    if missing:
        by = [flag.label + (f" (by --{flag.needs.replace('=', ' ')})" if flag.needs else "") for flag in missing]
        raise RefusedError(f"Required and not given: {', '.join(by)}.")
    _refuse_without_effect(args, given, flags)
    for name, flag in absent.items():
        if name in void:
            setattr(args, name, False if flag.kind is SWITCH else None)
        else:
            setattr(args, name, flag.default(args) if callable(flag.default) else flag.default)
    args.optimizer_args = dict(args.optimizer_args)
    if args.max_train_steps is not None:
        check_length(args, args.max_train_steps)
    if resolve:
        resolve_for_model(args, values)
    return args


def _read_command_line(argv, description, flags):
    """Return the values of the flags that were given; names are checked before any value is read."""
    known = {name: flag for name, flag in flags.items() if flag.kind is not STRUCTURE}
    for token, following in itertools.pairwise([*argv, "-"]):
        label, equals, value = token.partition("=")
        name = label.lstrip("-")
        # For argparse, too, what has a space or is a number is a value, even with a dash in front.
        if not label.startswith("-") or not name[:1].isalpha() or " " in label or label in ("-h", "--help"):
            continue
        if label != f"--{name}" or name not in known:
            raise RefusedError(f"Unknown flag {label}; {suggest(name, known)}.")
        value = value if equals else following
        if known[name].kind is SWITCH and (equals or not value.startswith("-")):
            raise RefusedError(f"{label} is a switch and takes no value such as {value!r}; without it, it is off.")
    parsed, rest = _build_parser(description, known).parse_known_args(argv)
    if rest:
        raise RefusedError(f"{rest[0]!r} is not the value of a flag.")
    return {name: flags[name].read(value) for name, value in vars(parsed).items()}


def _build_parser(description, flags):
    # Flags that are not given stay out of the namespace: defaults are filled in later, so that a flag that was given
    # and has no effect can be told from a default.
    required = " ".join(f"--{name} ..." for name, flag in flags.items() if flag.default is REQUIRED and not flag.needs)
    look = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=44, width=119)
    how = {"formatter_class": look, "allow_abbrev": False, "argument_default": argparse.SUPPRESS}
    parser = Parser(usage=f"%(prog)s {required}", description=description, **how)
    for row in FLAGS:
        if isinstance(row, str):
            group = parser.add_argument_group(row)
        elif row.name in flags:
            flag, options = flags[row.name], {"metavar": row.kind.unit}
            if flag.kind is SWITCH:
                options = {"action": "store_const", "const": "true"}
            elif flag.kind.is_repeatable:
                options |= {"nargs": "+"} if flag.kind is KEY_VALUE else {"action": "append"}
            group.add_argument(f"--{flag.name}", help=flag.text.replace("%", "%%"), **options)
    return parser


# ---------------------------------------------------------------- what contradicts what


def _is_on(value):
    return value is not None and value is not False


def _rivals(name, flags):
    """Return the names of the flags that cannot be given together with a flag."""
    return {*flags[name].excludes.split(), *(row.name for row in flags.values() if name in row.excludes.split())}


def _has_effect(flag, args):
    """Return whether one of the needs of a flag is met, if it has any."""
    met = {need for name, value in vars(args).items() if value for need in (name, f"{name}={value}")}
    return not flag.needs or not met.isdisjoint(flag.needs.split())


def _refuse_without_effect(args, given, flags):
    """Raise for a flag that would be ignored because of the others."""
    for flag in (flags[name] for name, value in given.items() if _is_on(value)):
        both = [flags[name].label for name in flag.excludes.split() if _is_on(given.get(name))]
        if both:
            raise RefusedError(f"Give {' and '.join(both)}, or {flag.label}, not both.")
        if not _has_effect(flag, args):
            needs = " or ".join(f"--{need.replace('=', ' ')}" for need in flag.needs.split())
            raise RefusedError(f"{flag.label} has no effect without {needs}.")
    if ("height" in given) != ("width" in given):
        raise RefusedError("Give --height and --width together, or none of them.")
    if "aspect_buckets" in given and not has_cap(args):
        raise RefusedError("--aspect_buckets has no effect without --max_pixels, or sizes as 480p in bucket_config.")
    if args.lr_warmup_steps and args.lr_scheduler == "constant":
        raise RefusedError("--lr_warmup_steps has no effect with --lr_scheduler constant; use constant_with_warmup.")
    if args.lr_scheduler == "constant_with_warmup" and not args.lr_warmup_steps:
        raise RefusedError("--lr_scheduler constant_with_warmup needs --lr_warmup_steps; without a warm-up: constant.")
    if given.get("guidance_scale", 2.0) <= 1 and "negative_prompt" in given:
        raise RefusedError("--negative_prompt has no effect with a --guidance_scale of 1 or less.")
    if args.min_sigma >= args.max_sigma:
        raise RefusedError(f"--min_sigma {args.min_sigma} must be below --max_sigma {args.max_sigma}.")


def check_length(args, num_steps):
    """Raise if the learning rate would never be reached, or never fall, in this many optimizer steps."""
    warmup, cycles, falling = args.lr_warmup_steps, args.lr_num_cycles, num_steps - args.lr_warmup_steps
    if falling <= 0:
        where = f"in a run of {num_steps} optimizer steps"
        raise RefusedError(f"--lr_warmup_steps {warmup} {where}; allowed are 0 to {num_steps - 1}.")
    if cycles is not None and cycles >= falling:
        where = f"in the {falling} steps after the warm-up"
        raise RefusedError(f"--lr_num_cycles {cycles} {where}: the rate cannot fall in a cycle of one step.")


def log_little_effect(args, num_steps, *, num_stages, num_samples):
    """Log the numbers that have little effect in a run of this length, or none.

    Args:
        args (`argparse.Namespace`): From `parse_args`.
        num_steps (`int`): Optimizer steps of the schedule of the learning rate.
        num_stages (`int`): How often the run makes these steps, each time with another transformer.
        num_samples (`int`): Samples trained in these steps.
    """
    falling, decay, dropped = num_steps - args.lr_warmup_steps, args.ema_decay, args.caption_dropout * num_samples
    in_run, decay_at_end = f"in a run of {num_steps} optimizer steps", num_steps / (9 + num_steps)
    few_falls = falling < 2 * (args.lr_num_cycles or not args.lr_scheduler.startswith("constant"))
    notes = [
        (few_falls, f"--lr_scheduler {args.lr_scheduler} {in_run}: the rate hardly has steps to fall in"),
        (decay == 0, "--ema_decay 0: the average is always the weights of the last step"),
        (decay_at_end < (decay or 0), f"--ema_decay {decay} {in_run}: the decay only rises to {decay_at_end:.4g}"),
        (args.max_skipped_steps >= num_steps, f"--max_skipped_steps {args.max_skipped_steps} {in_run}: all may be"),
        (0 < dropped < 1, f"--caption_dropout {args.caption_dropout}: {dropped:.2g} of {num_samples} samples"),
    ]
    for name in ("checkpointing_steps", "validation_steps", "logging_steps"):
        value, last = getattr(args, name), num_stages * num_steps
        note = f"--{name} {value} in a run of {last} optimizer steps: nothing is due before its end"
        notes.append((value != ROWS[name].default and value > last, note))
    for applies, note in notes:
        if applies:
            logger.warning(note)


# ---------------------------------------------------------------- the model


def resolve_for_model(args, values):
    """Fill in the defaults that depend on the model, and check what it allows.

    Args:
        args (`argparse.Namespace`): From `parse_args`; changed in place.
        values (`dict[str, Any]`):
            `divisor` of sizes, the defaults `height`, `width`, `lora_target_modules` (names, with commas),
            `negative_prompt`, `guidance_scale` and `num_inference_steps`; for video the defaults `num_frames` and
            `fps`, and what can be chosen from: `tasks` and `experts`.

    Raises:
        RefusedError: A size is not a multiple of the divisor, or a choice is missing, not offered or without effect.
    """
    for name in [name for name, value in vars(args).items() if value is BY_MODEL]:
        setattr(args, name, values[name].split(",") if name == "lora_target_modules" else values[name])
    if args.validation_prompt and args.guidance_scale <= 1:
        args.negative_prompt = None
    _check_sizes(args, values["divisor"])
    if "num_frames" not in vars(args):
        return

    num_frames = args.num_frames and round_down_frames(args.num_frames)
    if num_frames != args.num_frames:
        logger.warning(f"--num_frames {args.num_frames} is rounded down to {num_frames}: the VAE takes 4n + 1 frames.")
        args.num_frames = num_frames
    _check_choice(args, "task", values["tasks"])
    if args.validation_prompt:
        wanted = {"t2v": 0, "i2v": 1, "flf2v": 2}[args.task or values["tasks"][0]]
        held = len(args.validation_image or ())
        if held != wanted:
            raise RefusedError(f"--validation_image is given {held} times; previews of this model take {wanted}.")
    both = ("both",) if args.training_mode == "lora" else ()
    _check_choice(args, "expert", (*values["experts"], *both) if values["experts"] else ())
    if args.expert == "both" and args.transformer_path is not None:
        raise RefusedError("--transformer_path names one transformer, and --expert both trains two; give one expert.")


def _check_sizes(args, divisor):
    caps, sides = {"--max_pixels": args.max_pixels}, {"--height": args.height, "--width": args.width}
    for size, lengths in (args.bucket_config or {}).items():
        pixels, shape = bucket_pixels(size)
        caps[f"bucket_config: {size}"] = pixels
        sides |= {f"bucket_config: a side of {size}": side for side in shape or () if side % divisor}
        if "num_frames" not in vars(args) and set(lengths) != {"1"}:
            raise RefusedError(f"bucket_config: {size} has {', '.join(lengths)} frames; allowed for images is 1.")
    for name, pixels in caps.items():
        if pixels is not None and pixels < divisor**2:
            raise RefusedError(f"{name} is {pixels}; allowed is at least {divisor**2}.")
    for name, side in sides.items():
        if side is not None and side % divisor:
            legal = " or ".join(str(n * divisor) for n in (side // divisor, side // divisor + 1) if n)
            raise RefusedError(f"{name} is {side}; allowed are multiples of {divisor}, such as {legal}.")


def _check_choice(args, name, allowed):
    """Raise unless a flag is one of those `allowed`, and is given only where there is a choice."""
    value = getattr(args, name)
    listed = ", ".join(allowed)
    if len(allowed) < 2:
        if value is not None:
            raise RefusedError(f"--{name} {value} has no effect: this model offers {listed or 'none'}. Remove it.")
    elif value is None:
        raise RefusedError(f"--{name} is required for this model; allowed are {listed}.")
    elif value not in allowed:
        raise RefusedError(f"--{name} is {value}; allowed with --training_mode {args.training_mode} are {listed}.")
