"""Reads Hugging Face datasets: folders of parquet files, those that `save_to_disk` wrote, and those of the hub."""

import itertools
import logging
import os
import re
from dataclasses import dataclass

from runtime.errors import RefusedError
from runtime.hub import why_not_on_hub


logger = logging.getLogger(__name__)

# What `save_to_disk` writes for one split, and for several.
_SAVED = ({"state.json", "dataset_info.json"}, {"dataset_dict.json"})


@dataclass(frozen=True)
class Embedded:
    """An image or clip inside a dataset, which stays on disk until it is read.

    Args:
        structs: The `pyarrow.ChunkedArray` of a column, each with `bytes`; its memory is that of the file.
        index: Which of them.
    """

    structs: object
    index: int

    def read(self):
        """Returns the bytes of the file."""
        return self.structs[self.index]["bytes"].as_py()


def _is_saved(files):
    return any(names.issubset(files) for names in _SAVED)


def is_dataset(files, media_suffixes):
    """Returns whether the files of a folder, by their relative paths, are those of a Hugging Face dataset."""
    # Shards are named like nothing else; a repository of them may hold images or clips too, for its README.
    if _is_saved(files) or any(re.search(r"-\d{5}-of-\d{5}\.(parquet|arrow)$", name) for name in files):
        return True
    suffixes = {os.path.splitext(name)[1].lower() for name in files}
    return not suffixes.isdisjoint((".parquet", ".arrow")) and suffixes.isdisjoint(media_suffixes)


def load(name, folder, files):
    """Returns the split that is trained on, a `datasets.Dataset`, and what it is called.

    Args:
        name: The dataset as the user wrote it, a folder or a hub id.
        folder: Its absolute path.
        files: What is in it, by their relative paths; none of a hub id.

    Raises:
        RefusedError: It cannot be loaded, or has several splits and none of them is "train".
    """
    # Imported here: it takes seconds, and datasets of files never need it.
    import datasets

    if not files and not datasets.config.HF_HUB_OFFLINE:
        # Asked once, or the library would ask for a minute. What it fetched before it finds by itself.
        fetched = os.path.join(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___"))
        if not os.path.isdir(fetched) and (problem := why_not_on_hub(name, "dataset")):
            raise RefusedError(f"--dataset_path {name}: {problem}.")
    read = datasets.load_from_disk if _is_saved(files) else datasets.load_dataset
    # The library reads these as patterns, variables, and archives in archives.
    special = ("::",) if _is_saved(files) else ("::", "$", "*", "?", "[")
    if files and any(mark in os.path.realpath(folder) for mark in special):
        raise RefusedError(f"{name} cannot be loaded: the path of a Hugging Face dataset must have none of {special}.")
    try:
        data = read(folder if files else name)
    except Exception as error:  # the library, the hub and pyarrow each have their own, without a common base
        what = name if files else f"{name} is not a folder here, and"
        raise RefusedError(f"{what} cannot be loaded as a Hugging Face dataset: {error}") from error
    splits = data if isinstance(data, dict) else {"train": data}
    if "train" not in splits and len(splits) != 1:
        raise RefusedError(f"{name} has no split 'train'. Splits found: {', '.join(splits) or 'none'}.")
    split = "train" if "train" in splits else next(iter(splits))
    if len(splits) > 1:
        logger.info("%s: split %r is used, of %s", name, split, ", ".join(splits))
    return splits[split], split


def read_records(data, split, name, picked):
    """Returns the rows of a split, each as (id, record by column name).

    Args:
        data: The `datasets.Dataset`.
        split: What it is called.
        name: What messages call the dataset.
        picked: {"caption", "target" or role: column}. A file is `Embedded`, the path that is written, or None; where
            a column has lists, a list of them. Captions are as they are.
    """
    columns = [data[column] if what == "caption" else _files(data, column, name) for what, column in picked.items()]
    rows = zip(*columns, strict=True)
    return [(f"{split}/{n}", dict(zip(picked.values(), values, strict=True))) for n, values in enumerate(rows)]


def _files(data, column, name):
    import datasets
    import pyarrow.compute

    kind, undecoded = data.features[column], datasets.Image(decode=False)
    is_list = isinstance(kind, datasets.List)
    try:
        # Not decoded by the library: every item of every kind of dataset goes through our one decoder. Clips, and
        # columns of paths or bytes, are stored as images are.
        data = data.select_columns(column).cast_column(column, datasets.List(undecoded) if is_list else undecoded)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise RefusedError(f"{name}: column {column!r} holds {kind}, not images or clips.") from error
    table = data.with_format("arrow")[:].column(column)
    structs = pyarrow.compute.list_flatten(table) if is_list else table
    has_bytes, paths = (pyarrow.compute.struct_field(structs, field) for field in ("bytes", "path"))
    known = zip(has_bytes.is_valid().to_pylist(), paths.to_pylist(), strict=True)
    files = [Embedded(structs, n) if is_embedded else path for n, (is_embedded, path) in enumerate(known)]
    if not is_list:
        return files
    rest = iter(files)
    return [
        list(itertools.islice(rest, length or 0)) for length in pyarrow.compute.list_value_length(table).to_pylist()
    ]
