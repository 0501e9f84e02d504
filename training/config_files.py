"""Config files: YAML with the keys of the flags, or the run.json of a run.

Values stay text, so that `no`, `1e-5` and `007` mean what they mean as flags.
"""

import json

from dataset.settings import DATASET_FLAGS, LINES, bucket_pixels, round_down_frames
from runtime.errors import RefusedError
from training.flags import BUDGET, COUNT, SHARE, SIZE, START, TRACKERS, suggest


def read_config(path, flags):
    """Return the settings of one file by name, None for those that it removes.

    Args:
        path (`str`)
        flags (`dict[str, Flag]`): Of `flags_of`.

    Raises:
        RefusedError: It cannot be read, or a key or value is not allowed.
    """
    import yaml

    try:
        with open(path, "rb") as file:
            content = _read_record(file.read(), flags)
            if content is None:
                file.seek(0)
                content = yaml.load(file, Loader=_without_repeats(yaml)) or {}
    except OSError as error:
        raise RefusedError(f"--config {path} cannot be read: {error.strerror}.") from None
    except yaml.YAMLError as error:
        raise RefusedError(f"--config: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise RefusedError(f"--config: {path} must hold one key per flag, such as 'lora_rank: 16'.")
    return _read_settings(path, content, {name: flag for name, flag in flags.items() if name != "config"})


def _read_settings(path, mapping, flags, of=""):
    settings = {}
    for key, value in mapping.items():
        where = f"{path}: {of}"
        if key not in flags:
            raise RefusedError(f"{where}unknown key {key!r}; {suggest(str(key), flags, '')}.")
        if value is None or (value == [] and (flags[key].kind.is_repeatable or flags[key].kind is TRACKERS)):
            settings[key] = None
        elif key == "datasets":
            settings[key] = _read_datasets(path, where, value, flags)
        elif key == "bucket_config":
            settings[key] = _read_bucket_config(where, value)
        else:
            settings[key] = flags[key].read(value, where)
    return settings


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
        datasets.append(dict.fromkeys(known) | {"dataset_repeat": known["dataset_repeat"].default} | given)
    return datasets


def _read_bucket_config(where, value):
    """Return the buckets: size as written -> number of frames (`str`, as in JSON) -> [share, batch size]."""
    if not isinstance(value, dict) or not value:
        raise RefusedError(f"{where}bucket_config must map sizes to frames to [share, batch size]; {_BUCKETS}.")
    buckets = {}
    for size, lengths in value.items():
        try:
            bucket_pixels(size)
            buckets[size] = dict(_read_bucket(*length) for length in lengths.items())
            if not lengths or len(lengths) > len(buckets[size]):
                raise ValueError
        except (ValueError, TypeError, AttributeError):
            raise RefusedError(f"{where}bucket_config: {size} has {lengths!r}; {_BUCKETS}.") from None
    return buckets


_BUCKETS = (
    f"allowed are sizes such as 512px (a square), {', '.join(LINES)} or 832x480 (width x height), frames 4n + 1, and "
    "[share above 0 to 1, batch size of at least 1], such as 480p: {1: [1.0, 8], 81: [0.5, 1]}"
)


def _read_bucket(num_frames, entry):
    share, batch_size = entry
    if round_down_frames(COUNT.convert(num_frames)) != int(num_frames):
        raise ValueError
    return str(int(num_frames)), [SHARE.convert(share), COUNT.convert(batch_size)]


# ---------------------------------------------------------------- the text of a file


def _read_record(text, flags):
    """Return the arguments in a run.json as a config file would hold them, or None if the text is something else."""
    try:
        content = json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
        settings = dict(content["arguments"]) if "versions" in content else None
    except (ValueError, TypeError, LookupError):
        return None
    for name, flag in flags.items() if settings else ():
        value = settings.get(name)
        if flag.change is START:  # the settings of its config files are among the arguments
            settings.pop(name, None)
        elif flag.kind in (SIZE, BUDGET) and str(value).isdecimal():
            settings[name] += "B"
        elif isinstance(value, bool):
            settings[name] = str(value)
    return settings


def _without_repeats(yaml):
    """Return a loader of texts, and None for an empty value, that refuses a key that is given twice."""

    class Loader(yaml.BaseLoader):
        def construct_scalar(self, node):
            return None if node.style is None and node.value in ("", "null", "~") else super().construct_scalar(node)

        def construct_mapping(self, node, deep=False):
            keys = [key.value for key, _ in node.value]
            for index, (key, _) in enumerate(node.value):
                if key.value in keys[:index]:
                    problem = f"the key {key.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            return super().construct_mapping(node, deep)

    return Loader
