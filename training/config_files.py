"""Config files: YAML with the keys of the flags, or the run.json of a run."""

import json
import pathlib

from dataset.settings import DATASET_FLAGS, LINES, bucket_pixels, round_down_frames
from runtime.errors import RefusedError
from training.flags import BUDGET, FRACTION, KEY_VALUE, POSITIVE_INT, SIZE, TRACKERS, literal, suggest


def read_config(path, flags):
    """Return the settings of one file by name; None stands for those that are taken back.

    Args:
        path (`str`)
        flags (`dict[str, Flag]`): Of `flags_of`.

    Raises:
        RefusedError: It cannot be read, or a key or a value is not allowed; with its line.
    """
    content = _load(path, flags)
    if not isinstance(content, dict):
        raise RefusedError(f"--config: {path} must hold one key per flag, such as 'lora_rank: 16'.")
    return _read_settings(path, content, {name: flag for name, flag in flags.items() if name != "config"})


def _read_settings(path, mapping, flags, of=""):
    settings = {}
    for key, value in mapping.items():
        where = _place(path, mapping, key) + of
        if key not in flags:
            raise RefusedError(f"{where}unknown key {key!r}; {suggest(str(key), flags, '')}.")
        if value is None or (value == [] and (flags[key].is_repeatable or flags[key].kind is TRACKERS)):
            settings[key] = None
        elif key == "datasets":
            settings[key] = _read_datasets(path, where, value, flags)
        elif key == "bucket_config":
            settings[key] = _read_bucket_config(path, where, value)
        else:
            settings[key] = _read_value(flags[key], value, where)
    return settings


def _read_value(flag, value, where):
    if flag.kind is KEY_VALUE and isinstance(value, dict):
        return [(name, literal(item)) for name, item in value.items()]
    if flag.kind.is_list and isinstance(value, list):
        value = ",".join(map(str, value))
    values = value if flag.has_several and isinstance(value, list) else [value]
    for item in values:
        if not isinstance(item, str):
            raise RefusedError(f"{where}{flag.name} takes one value, not {type(item).__name__}.")
    values = [flag.convert(item, where) for item in values]
    return values if flag.has_several else values[0]


def _read_datasets(path, where, value, flags):
    """Return the settings of several datasets, each with all of `DATASET_FLAGS`."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value) or not value:
        raise RefusedError(f"{where}datasets must be a list of settings with a dataset_path each.")
    known = {name: flags[name] for name in DATASET_FLAGS}
    datasets = []
    for number, item in enumerate(value, 1):
        settings = _read_settings(path, item, known, f"dataset {number}: ")
        given = {name: setting for name, setting in settings.items() if setting is not None}
        if "dataset_path" not in given:
            raise RefusedError(f"{where}dataset {number} has no dataset_path.")
        datasets.append(dict.fromkeys(known) | {"dataset_repeat": 1} | given)
    return datasets


def _read_bucket_config(path, where, value):
    """Return the sizes as written -> number of frames (`str`, as JSON has it) -> [share, batch size]."""
    shape = "bucket_config must map sizes to frames to [share, batch size], such as 480p: {1: [1.0, 8], 81: [0.5, 1]}"
    if not isinstance(value, dict) or not value:
        raise RefusedError(f"{where}{shape}.")
    buckets = {}
    for size, lengths in value.items():
        where = _place(path, value, size)
        try:
            bucket_pixels(size)
        except ValueError:
            raise RefusedError(
                f"{where}bucket_config: {size!r} is no size; allowed are the side of a square such as 512px, lines of "
                f"16:9 such as {', '.join(LINES)}, or one size as WIDTHxHEIGHT such as 832x480."
            ) from None
        if not isinstance(lengths, dict) or not lengths:
            raise RefusedError(f"{where}{shape}; {size} has {lengths!r}.")
        buckets[size] = {}
        for num_frames, entry in lengths.items():
            try:
                share, batch_size = FRACTION.convert(entry[0]), POSITIVE_INT.convert(entry[1])
                frames = POSITIVE_INT.convert(num_frames)
                if str(frames) in buckets[size] or frames != round_down_frames(frames) or not share or len(entry) > 2:
                    raise ValueError
            except (ValueError, TypeError, LookupError):
                raise RefusedError(
                    f"{_place(path, lengths, num_frames)}bucket_config: {size} has {num_frames}: {entry!r}; allowed "
                    "are frames 4n + 1 and [share above 0 to 1, batch size of at least 1]."
                ) from None
            buckets[size][str(frames)] = [share, batch_size]
    return buckets


# ---------------------------------------------------------------- the text of a file


def _load(path, flags):
    """Return the content of a file. Values stay text, so that `no`, `1e-5` and `007` mean what they mean as flags."""
    import yaml

    if not pathlib.Path(path).is_file():
        raise RefusedError(f"--config: there is no file {path}.")
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")
        record = _read_record(text, flags)
        return (yaml.load(text, Loader=_with_lines(yaml)) or {}) if record is None else record
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise RefusedError(f"--config: {path}, line {line}: the byte 0x{byte:02x} is not UTF-8.") from None
    except yaml.YAMLError as error:
        raise RefusedError(f"--config: {path}, {_problem_in_yaml(text, error)}.") from None


def _read_record(text, flags):
    """Return the arguments of a run from its run.json as a config file would hold them, or None for another text."""
    try:
        content = json.loads(text)
        arguments, _ = content["arguments"].items(), content["versions"]
    except (ValueError, TypeError, LookupError, AttributeError):
        return None
    settings = {}
    for name, value in arguments:
        flag = flags.get(name)
        if flag is not None and flag.is_of_start:  # what was in its config files is there
            continue
        if flag is not None and flag.kind in (SIZE, BUDGET) and isinstance(value, int):
            value = f"{value}B"
        if flag is not None and flag.kind is KEY_VALUE and value is not None:
            value = [f"{key}={_tuples(item)!r}" for key, item in value.items()]
        settings[name] = _as_text(value)
    return settings


def _as_text(value):
    if isinstance(value, dict):
        return {key: _as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class _Mapping(dict):
    """A mapping from YAML, with the line of each key in `lines`."""


def _with_lines(yaml):
    """Return a loader of texts, and None for an empty value, that refuses a key which stands twice."""

    class Loader(yaml.BaseLoader):
        def construct_scalar(self, node):
            return None if node.style is None and node.value in ("", "null", "~") else super().construct_scalar(node)

        def construct_mapping(self, node, deep=False):
            mapping, lines = _Mapping(super().construct_mapping(node, deep)), {}
            for key, _ in node.value:
                if key.value in lines:
                    problem = f"the key {key.value!r} stands twice, before in line {lines[key.value]}"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                lines[key.value] = key.start_mark.line + 1
            mapping.lines = lines
            return mapping

    return Loader


def _place(path, mapping, key):
    """Return where a key stands, to begin a message with: the file and, in YAML, the line."""
    return f"{path}, line {mapping.lines[key]}: " if key in getattr(mapping, "lines", ()) else f"{path}: "


def _problem_in_yaml(text, error):
    """Return where a text is no YAML, and why, in one line."""
    mark, context = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    if mark is None:  # a character that YAML does not have
        line, column = text.count("\n", 0, error.position) + 1, error.position - text.rfind("\n", 0, error.position)
        return f"line {line}, column {column}: the character {chr(error.character)!r} is not allowed"
    # What is not closed shows later only, at the next key or at the end.
    within = f"{error.context} from line {context.line + 1} on, " if context and context.line < mark.line else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {within}{error.problem}"
