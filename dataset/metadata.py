"""Reads the rows of a dataset: which image or clip, with which caption, and where that was written.

A dataset is a folder with a sidecar text next to each image or clip, a folder with a metadata file, or a Hugging Face
dataset. Every problem that shows without decoding is found here, before any model loads.
"""

import itertools
import logging
import os
import re
import reprlib
import unicodedata
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

from dataset import tables
from dataset.settings import DATASET_FLAGS
from dataset.tables import TABLE_SUFFIXES, as_list, first_five, nearest, pick_columns, read_table, read_text
from runtime.errors import RefusedError
from runtime.hub import is_hub_id, why_not_on_hub


logger = logging.getLogger(__name__)


def _suffixes(names):
    return tuple(f".{name}" for name in names.split())


# The endings of what is read: of Pillow's formats in `images.py`, and of FFmpeg's containers in `videos.py`.
IMAGE_SUFFIXES = _suffixes(
    "apng avif avifs bmp dib gif j2c j2k jfif jp2 jpc jpe jpeg jpf jpg jpx mpo pbm pfm pgm png pnm ppm tif tiff webp"
)
VIDEO_SUFFIXES = _suffixes(
    "264 265 3g2 3gp 3gpp asf avc avi divx f4v flv gif h264 h265 hevc ismv m1v m2p m2t m2ts m2v m4v mj2 mk3d mkv mov "
    "mp4 mp4v mpe mpeg mpg mpv mts ogv qt tod trp ts vob webm wmv xvid"
)
# And of what people take for images and clips, and is read only where the file is something else than it is called.
FOREIGN_IMAGE_SUFFIXES = _suffixes(
    "3fr ai arw bpg cr2 cr3 crw dcr dds dng emf eps erf exr fff hdr heic heics heif hif icns ico iiq jls jxl jxr kdc "
    "mef mos mrw nef nrw orf pcx pdf pef psb psd qoi raf raw rw2 rwl sgi sr2 srf srw svg svgz tga wdp wmf x3f xcf"
)
FOREIGN_VIDEO_SUFFIXES = _suffixes("amv av1 braw dv ivf mjpeg mjpg mod mxf nut obu ogg ogm r3d rm rmvb swf wtv y4m")
_MEDIA_SUFFIXES = {*IMAGE_SUFFIXES, *VIDEO_SUFFIXES, *FOREIGN_IMAGE_SUFFIXES, *FOREIGN_VIDEO_SUFFIXES}

# Blanks, line ends and byte order marks, in every script.
_BLANKS = "\ufeff" + "".join(chr(number) for number in range(0x3001) if chr(number).isspace())


@dataclass(frozen=True)
class Embedded:
    """An image or clip inside a Hugging Face dataset, which stays on disk until it is read.

    Args:
        data: The `datasets.Dataset`, not decoded.
        index: Of the row.
        column: Of the images or clips.
        place: Where the column holds a list, which of it.
    """

    data: object
    index: int
    column: str
    place: int | None = None

    def read(self):
        """Returns the bytes of the file."""
        value = self.data[self.index][self.column]
        return (value if self.place is None else value[self.place])["bytes"]


@dataclass(frozen=True, slots=True)
class Row:
    """One item of a dataset.

    Args:
        id: Unique name: the path relative to the dataset with forward slashes, or `split/index` for a Hugging Face
            dataset, whose items need not have a path. With several datasets its own name comes before it.
        caption: The text without blanks around it and with line feeds as line ends; empty where there is none.
        media: The files by their role, a tuple for each: the path of an image, a video or a folder of frames, or where
            a dataset embeds it. "target" is the one that is trained on, the others are of `tables.ROLE_COLUMNS`.
        origin: Where the row was found, for messages: `metadata.csv line 3`, or the id for sidecar folders.
        problem: Why the row cannot be used, as far as that shows without decoding; else None.
        repeat: How often the item comes in one epoch.
    """

    id: str
    caption: str
    media: dict[str, tuple]
    origin: str
    problem: str | None = None
    repeat: int = 1

    def contents(self, role):
        """Returns what decoders take of each file of a role: the path, or the bytes."""
        return [file.read() if isinstance(file, Embedded) else file for file in self.media.get(role, ())]

    @property
    def content(self):
        """What decoders take of the target."""
        return self.contents("target")[0]

    @property
    def name(self):
        """How messages call the row: by its id, and where it was found."""
        return self.id if self.id == self.origin else f"{self.id} ({self.origin})"


def read_datasets(args, **kind):
    """Reads the rows of the dataset, or of all datasets, that the flags or a config file name.

    Args:
        args: From `parse_args`.
        kind: `media_suffixes` and `roles` of `read_rows`.

    Returns:
        A list of `Row`.

    Raises:
        RefusedError: See `read_rows`.
    """

    def read(dataset):
        columns = {what: dataset[f"{what}_column"] for what in ("media", "caption")}
        where = {"dataset_metadata": dataset["dataset_metadata"], "columns": columns}
        rows = read_rows(dataset["dataset_path"], **where, allow_missing_captions=args.allow_missing_captions, **kind)
        _report_repeats_in_names(rows, dataset)
        return [replace(row, repeat=dataset["dataset_repeat"]) for row in rows]

    if args.datasets is None:
        return read({name: getattr(args, name) for name in DATASET_FLAGS})
    names = [os.path.basename(os.path.normpath(dataset["dataset_path"])) for dataset in args.datasets]
    rows, items = [], {}
    for n, (name, dataset) in enumerate(zip(names, args.datasets, strict=True)):
        number = names[:n].count(name) + 1
        name += f"#{number}" if number > 1 else ""
        own = [replace(row, id=f"{name}/{row.id}", origin=f"{name}: {row.origin}") for row in read(dataset)]
        rows += own
        for row in own:
            target = row.media.get("target", (None,))[0]
            if isinstance(target, Path):
                found = items.setdefault((os.path.realpath(target), row.caption), {})
                found.setdefault(os.path.realpath(dataset["dataset_path"]), row.name)
    # A folder that is named twice is meant to be.
    twice = [" and ".join(names.values()) for names in items.values() if len(names) > 1]
    if twice:
        raise RefusedError(
            f"{len(twice)} items are in two datasets with the same caption, since one folder is inside the other: "
            f"leave them out of one, and use dataset_repeat to train them more often.\n{first_five(twice)}"
        )
    return rows


def _report(name, what, lines, log=logger.warning):
    """Logs that a dataset has something that is listed, if anything is."""
    if lines:
        log("%s: %d %s:\n%s", name, len(lines), what, first_five(lines))


def _report_repeats_in_names(rows, dataset):
    """Warns where names of folders are kohya's, 10_cat, and the number is not that of our repeats."""
    path, repeat = os.path.abspath(dataset["dataset_path"]), dataset["dataset_repeat"]
    folders = sorted({os.path.basename(os.path.dirname(os.path.join(path, row.id))) for row in rows})
    found = [name for name in folders if re.match(r"[0-9]{1,3}_.", name) and int(name.split("_")[0]) != repeat]
    what = "folders have repeats in their names, as kohya's scripts want them, which are not used; each item comes"
    what += f" {repeat} times in an epoch (dataset_repeat, or `datasets` of a --config file with one for each)"
    _report(dataset["dataset_path"], what, found)


def describe_rows(rows):
    """Returns that in which all processes have to find the same rows, of what `read_datasets` returns."""

    def files(row):
        # By their way from the target: each machine may have the dataset at another place.
        paths = {role: [file for file in files if isinstance(file, Path)] for role, files in row.media.items()}
        start = next(iter(paths.pop("target", ())), "")
        return {role: [os.path.relpath(path, start) for path in files] for role, files in paths.items()}

    described = [[row.id, row.caption, row.problem, row.repeat, files(row)] for row in rows]
    return {"what is at --dataset_path": described}


def read_rows(
    dataset_path,
    *,
    dataset_metadata=None,
    columns=None,
    allow_missing_captions=False,
    media_suffixes=IMAGE_SUFFIXES,
    roles=(),
    only_sidecars=False,
):
    """Reads all rows of a dataset without decoding anything.

    Args:
        dataset_path: A folder, or the id of a dataset on the Hugging Face hub when there is no such path.
        dataset_metadata: A metadata file; without it the folder's own `metadata.*` is read if there is one.
        columns: The columns that have none of the known names, or None: {"media" or "caption": name or None}.
        allow_missing_captions: Gives items without a caption the caption `""` instead of refusing them.
        media_suffixes: Which files of a folder are items, in lower case. Other images and clips are items only with a
            text of their own, and what reads them reports what is wrong. With suffixes of videos among them, a Hugging
            Face dataset may have a column of videos, and a folder can be one item: where it holds images only and a
            text of its name is next to it, or where a row names it. Its images are no items then.
        roles: Which further files of an item the model takes: {role: whether every item needs one}.
        only_sidecars: Reads the sidecar texts of a folder also where it has a metadata file.

    Returns:
        A list of `Row`: sidecar folders in order of their ids, all others in order of their rows. Those without a
        `problem` have unique ids.

    Raises:
        RefusedError: If the dataset or its metadata is missing, ambiguous or unreadable as a whole.
    """
    given = columns or {}
    with_videos = not set(media_suffixes) <= set(IMAGE_SUFFIXES)
    pick = partial(pick_columns, given=given, allow_missing_captions=allow_missing_captions, roles=roles)
    # abspath, not resolve: images are often links into a store, and an id is the name inside the dataset.
    folder = os.path.abspath(dataset_path) if os.path.exists(dataset_path) else None
    if folder is None and not is_hub_id(str(dataset_path)):
        raise RefusedError(
            f"--dataset_path {dataset_path} does not exist and is not a hub id ('name' or 'owner/name')."
        )
    if folder is not None and not os.path.isdir(folder):
        raise RefusedError(
            f"--dataset_path {dataset_path} is a file: give the folder, and a metadata file by --dataset_metadata."
        )
    files = [] if folder is None else _list_files(folder)
    saved = "dataset_dict.json" in files or {"dataset_info.json", "state.json"} <= set(files)
    is_hub = folder is None or saved
    metadata = None if is_hub or only_sidecars else _find_metadata(folder, files, dataset_metadata, media_suffixes)
    hint = ""
    if metadata is not None:
        items = _metadata_items(folder, files, metadata, pick, roles, media_suffixes, with_videos)
    elif is_hub or not only_sidecars and _is_hub_layout(files, media_suffixes):
        if dataset_metadata is not None:
            raise RefusedError(
                f"--dataset_metadata {dataset_metadata} cannot be used with {dataset_path}, a Hugging Face dataset."
            )
        items = _hub_items(dataset_path, folder, saved, pick, roles, with_videos)
    else:
        useless = [f"--{what}_column {value}" for what, value in given.items() if value is not None]
        if useless:
            raise RefusedError(f"{useless[0]} has no effect: {dataset_path} has no metadata file.")
        if any(dict(roles).values()):
            raise RefusedError(
                f"{dataset_path} has no metadata file, and this model needs one, with {', '.join(roles)}."
            )
        items = _sidecar_items(folder, files, media_suffixes, with_videos)
        tables = [name for name in files if _suffix(name) in TABLE_SUFFIXES]
        hint = f" If {tables[0]} holds them, give it by --dataset_metadata." if tables else ""
    return _judge_captions(items, dataset_path, allow_missing_captions, media_suffixes, hint)


def frame_names(folder):
    """Returns the names of the images in a folder of frames, in no order, also of those that cannot be read."""
    suffixes = (*IMAGE_SUFFIXES, *FOREIGN_IMAGE_SUFFIXES)
    return [name for name in os.listdir(folder) if not name.startswith(".") and _suffix(name) in suffixes]


def _judge_captions(items, name, allow_missing_captions, media_suffixes, hint=""):
    """Returns the rows with their captions as they train, by the one rule that holds for every kind of dataset."""
    if not items:
        suffixes = ", ".join(sorted(set(media_suffixes)))
        raise RefusedError(f"{name} has no items: neither rows of metadata nor files that end in {suffixes}.")
    rows, without = [], {"empty": [], "missing": []}
    for item in items:
        caption, problem = "" if item.caption is None else item.caption, item.problem
        if not isinstance(caption, str) or not _is_unicode(caption):
            problem = problem or f"caption {reprlib.repr(caption)} is not text (numbers need quotes)"
            rows.append(replace(item, caption="", problem=problem))
            continue
        # What surrounds a text, and how its lines end, comes from the file or the system that it was written on.
        caption = re.sub(r"\r\n?", "\n", caption).strip(_BLANKS)
        if not caption:
            kind = "missing" if item.caption is None else "empty"
            without[kind].append(f"{item.origin}: caption {kind}")
            if not allow_missing_captions:
                problem = problem or f"caption {kind}"
        rows.append(replace(item, caption=caption, problem=problem))

    found = sum(bool(row.caption) for row in rows)
    counts = ", ".join([f"{found} found", *(f"{len(lines)} {kind}" for kind, lines in without.items())])
    lines = [*without["empty"], *without["missing"]]
    if lines:
        counts += "; these train on an empty caption" if allow_missing_captions else "; these are refused"
        logger.warning("%s: captions: %s.%s\n%s", name, counts, hint, first_five(lines))
    else:
        logger.info("%s: captions: %s.", name, counts)
    return rows


def _is_unicode(text):
    # Halves of surrogate pairs cannot be written as UTF-8.
    return not re.search("[\ud800-\udfff]", text)


# Files


def _suffix(name):
    return os.path.splitext(name)[1].lower()


def _list_files(folder):
    """Returns the visible files under `folder`: sorted relative paths with forward slashes."""

    def refuse(error):
        raise RefusedError(f"{error.filename} cannot be read: {error.strerror}.") from error

    names, seen = [], set()
    for place, subfolders, files in os.walk(folder, onerror=refuse, followlinks=True):
        reason = None
        if place != folder and {"run.json", "dataset.jsonl"} <= set(files):
            reason = "it holds the results of a run"
        elif os.path.realpath(place) in seen:
            # A link to a folder above it would be walked for ever.
            reason = "it is a link to a folder that is read already"
        if reason:
            logger.warning("%s: %s is left out: %s", folder, _name_in(folder, place), reason)
            subfolders.clear()
            continue
        seen.add(os.path.realpath(place))
        # Sorted, because the first of two links to one folder is the one that is walked. Names with a leading dot
        # are made by systems, not by people: .cache, ._a.jpg, .ipynb_checkpoints.
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        names += [_name_in(folder, os.path.join(place, name)) for name in files if not name.startswith(".")]
    for name in names:
        if not _is_unicode(name):
            raise RefusedError(f"{folder} has a file whose name is not UTF-8: {ascii(name)}.")
    return sorted(names)


def _name_in(folder, path):
    return os.path.relpath(path, folder).replace(os.sep, "/")


def _find_metadata(folder, files, dataset_metadata, media_suffixes):
    """Returns the path of the metadata file, or None if there is none."""
    if dataset_metadata is not None:
        tried = [os.path.abspath(dataset_metadata), os.path.join(folder, dataset_metadata)]
        existing = [path for path in tried if os.path.isfile(path)]
        if not existing or len(existing) == 2 and not os.path.samefile(*existing):
            what = "names two files" if existing else "is not a file"
            raise RefusedError(f"--dataset_metadata {dataset_metadata} {what}: {' and '.join(tried)}.")
        if _suffix(existing[0]) not in TABLE_SUFFIXES:
            raise RefusedError(f"--dataset_metadata {dataset_metadata} must end in {', '.join(TABLE_SUFFIXES)}.")
        return existing[0]

    named = [name for name in files if os.path.splitext(os.path.basename(name))[0].lower() == "metadata"]
    found = [name for name in named if _suffix(name) in TABLE_SUFFIXES]
    for name in named:
        # Left unread, metadata.json1 would leave a folder without captions.
        if name not in found and (near := nearest(_suffix(name), TABLE_SUFFIXES)):
            raise RefusedError(f"{name} is not read, did you mean metadata{near}?")
    # Hugging Face's own layout puts the file of a split into its sub-folder.
    found = [name for name in found if "/" not in name] or found
    if len(found) > 1:
        raise RefusedError(
            f"{folder} has several metadata files ({', '.join(found)}): pick one by --dataset_metadata."
        )
    if not found:
        return None
    place, texts = os.path.join(os.path.dirname(found[0]), ""), _by_stem(files, (".txt",))
    elsewhere = [name for name in _with_suffix(files, media_suffixes) if not name.startswith(place)]
    outside = [name for name in elsewhere if _stem(name) in texts]
    if outside:
        raise RefusedError(
            f"{folder} has a metadata file in a sub-folder, {found[0]}, and {len(outside)} files with texts "
            f"elsewhere: pick it by --dataset_metadata, or give the sub-folder.\n{first_five(outside)}"
        )
    return os.path.join(folder, found[0])


def _is_hub_layout(files, media_suffixes):
    # Shards are named like nothing else; a repository of them may hold images or clips too, for its README.
    if any(re.search(r"-\d{5}-of-\d{5}\.(parquet|arrow)$", name) for name in files):
        return True
    suffixes = {_suffix(name) for name in files}
    return not suffixes.isdisjoint((".parquet", ".arrow")) and suffixes.isdisjoint(media_suffixes)


# Sidecar folders


def _sidecar_items(folder, files, media_suffixes, with_videos):
    texts = _by_stem(files, (".txt",))
    frames = _frames_by_folder(files, texts) if with_videos else {}
    in_frames = {name for names in frames.values() for name in names}
    media = {_normal(place): [place] for place in frames}
    for key, names in _by_stem((name for name in files if name not in in_frames), media_suffixes).items():
        media.setdefault(key, []).extend(names)
    # Next to what is read, photos may have their raw data, and images the files that they were painted in.
    others = _by_stem((name for name in files if os.path.dirname(name) not in frames), _MEDIA_SUFFIXES)
    others = {key: names for key, names in others.items() if key not in media}
    media |= {key: names for key, names in others.items() if key in texts}
    left_out = [name for key, names in others.items() if key not in texts for name in names]
    _report(folder, "files of other kinds without texts are no items", left_out)
    near = {_stem(name): f" (next to {name})" for name in reversed(files) if _suffix(name) != ".txt"}
    orphans = [name + near.get(key, "") for key, names in texts.items() if key not in media for name in names]
    _report(folder, "texts have no image or clip of their name, by its ending", orphans)
    items = []
    for key, names in media.items():
        caption, problem, sidecars = None, None, texts.get(key, [])
        if sidecars:
            try:
                caption = read_text(os.path.join(folder, sidecars[0]), sidecars[0])
            except RefusedError as error:
                caption, problem = "", str(error)
        if sidecars[1:]:
            problem = f"it has more than one text: {', '.join(sidecars)}"
        if sidecars and names[1:]:
            problem = f"{sidecars[0]} is the caption of more than one file: {', '.join(names)}"
        items += [Row(name, caption, {"target": (Path(folder, name),)}, name, problem) for name in names]
    return sorted(items, key=lambda item: item.id)


def _normal(name):
    # In one normal form: an image and its text can come from systems that write accents differently.
    return unicodedata.normalize("NFC", name)


def _stem(name):
    return _normal(os.path.splitext(name)[0])


def _with_suffix(files, suffixes):
    return [name for name in files if _suffix(name) in suffixes]


def _by_stem(files, suffixes):
    """Returns the names with one of these suffixes by their stems: one each, in an orderly folder."""
    names = {}
    for name in _with_suffix(files, suffixes):
        names.setdefault(_stem(name), []).append(name)
    return names


def _frames_by_folder(files, texts):
    """Returns the images of each folder that has a text, has no folder in it, and whose images have no texts."""
    above = {str(parent) for place in set(map(os.path.dirname, files)) for parent in PurePosixPath(place).parents}
    folders = {}
    for name in _with_suffix(files, IMAGE_SUFFIXES):
        place = os.path.dirname(name)
        if _normal(place) in texts and place not in above:
            folders.setdefault(place, []).append(name)
    return {place: names for place, names in folders.items() if texts.keys().isdisjoint(map(_stem, names))}


# Metadata files


def _row(item_id, caption, origin, found, roles, problem=None):
    """Returns a row of a table, whose caption may be of any type.

    Args:
        found: The files by role, "target" first, each as (file, what is wrong or None).
        roles: See `read_rows`.
    """
    problems = [problem, *(problem for files in found.values() for _, problem in files)]
    problems += [f"no {role}" for role, is_needed in dict(roles).items() if is_needed and not found.get(role)]
    media = {role: tuple(file for file, _ in files) for role, files in found.items() if files}
    return Row(item_id, caption, media, origin, next(filter(None, problems), None))


def _metadata_items(folder, files, metadata, pick, roles, media_suffixes, with_videos):
    base = os.path.dirname(metadata)
    name = _name_in(folder, metadata) if _is_inside(metadata, folder) else metadata
    columns, records = read_table(metadata, name)
    picked = pick(columns, name, tables.FILE_COLUMNS)
    caption_column, media_column = picked.pop("caption", None), picked.pop("media")
    items, origins, respelt, named = [], {}, [], set()

    def find(value, column, origin):
        """Returns the file that a value names and None, or None and what is wrong."""
        if not isinstance(value, str) or not _is_unicode(value):
            return None, f"{column} is {reprlib.repr(value)}, not a path"
        path, problem = _find_file(value, base, folder, with_videos)
        if problem is not None:
            return None, f"{value!r} {problem}"
        if path != os.path.normpath(os.path.join(base, value)):
            respelt.append(f"{origin}: {value!r} is {path}")
        named.add(_name_in(folder, path))
        return Path(path), None

    for origin, record in records:
        value = record.get(media_column)
        target = path, _ = find(value, media_column, origin)
        if path is None:
            item_id = value if isinstance(value, str) and _is_unicode(value) else reprlib.repr(value)
            items.append(_row(item_id, record.get(caption_column), origin, {"target": [target]}, ()))
            continue
        item_id = _name_in(folder, path)
        first = origins.setdefault(item_id, origin)
        found = {"target": [target]}
        for role, column in picked.items():
            found[role] = [find(value, column, origin) for value in as_list(record.get(column))]
        problem = None if first == origin else f"it repeats the file of {first}"
        items.append(_row(item_id, record.get(caption_column), origin, found, roles, problem))

    texts = _by_stem(files, (".txt",))
    unread = [text for item_id in origins for text in texts.get(_stem(item_id), ())]
    media = _with_suffix(files, media_suffixes)
    _report(name, "files found under another spelling", respelt, logger.info)
    _report(name, "texts next to files are not read, since this table has the captions", unread)
    _report(name, "files have no row", [file for file in media if named.isdisjoint((file, os.path.dirname(file)))])
    return items


def _is_inside(path, folder):
    return os.path.commonpath([path, folder]) == folder


def _find_file(value, base, folder, with_videos):
    """Looks for the file or folder that a row names: as it is written first, then as other systems would write it.

    Args:
        value: The name in the row.
        base: The metadata file's folder, which names are relative to.
        folder: The dataset's folder, tried second.
        with_videos: Whether it may be a folder of frames.

    Returns:
        The absolute path and None, or None and what is wrong.
    """
    slashed = value.replace("\\", "/")
    spellings = [value, slashed, unicodedata.normalize("NFC", slashed), unicodedata.normalize("NFD", slashed)]
    candidates = [(spelling, place) for spelling in spellings for place in (base, folder)]
    for spelling, place in list(candidates):
        # images/a.jpg in images/metadata.csv: the folder's own name is in front once more.
        parts, ends = spelling.split("/"), place.split(os.sep)
        for n in range(1, len(parts)):
            if parts[:n] == ends[-n:]:
                candidates.append(("/".join(parts[n:]), place))
    problem = "names no file"
    for spelling, place in candidates:
        path = os.path.normpath(os.path.join(place, spelling))
        if not os.path.isabs(spelling) and not _is_inside(path, base) and not _is_inside(path, folder):
            problem = "leads out of the dataset"
        elif os.path.isfile(path):
            return path, None
        elif with_videos and os.path.isdir(path) and not _is_inside(base, path) and not _is_inside(folder, path):
            return path, None
    return None, problem


# Hugging Face datasets


def _load_hub(name, folder, saved):
    """Returns the split of a Hugging Face dataset that is trained on, and its name; see `_hub_items`."""
    # Imported here: it takes seconds, and datasets of files never need it.
    import datasets

    if folder is None and not datasets.config.HF_HUB_OFFLINE:
        # Asked once, or the library would ask for a minute. What it fetched before it finds by itself.
        fetched = os.path.join(datasets.config.HF_DATASETS_CACHE, str(name).replace("/", "___"))
        if not os.path.isdir(fetched) and (problem := why_not_on_hub(str(name), "dataset")):
            raise RefusedError(f"--dataset_path {name}: {problem}.")
    # The library reads these as patterns, variables, and archives in archives.
    special = ("::",) if saved else ("::", "$", "*", "?", "[")
    if folder and any(mark in os.path.realpath(folder) for mark in special):
        raise RefusedError(f"{name} cannot be loaded: the path of a Hugging Face dataset must have none of {special}.")
    try:
        data = datasets.load_from_disk(folder) if saved else datasets.load_dataset(str(folder or name))
    except Exception as error:  # the library, the hub and pyarrow each have their own, without a common base
        absent = "" if folder else "is not a folder here and "
        raise RefusedError(f"{name} {absent}cannot be loaded as a Hugging Face dataset: {error}") from error
    if not isinstance(data, dict):
        return data, "train"
    splits = list(data)
    if "train" not in splits and len(splits) != 1:
        raise RefusedError(f"{name} has no split 'train'. Splits found: {', '.join(splits) or 'none'}.")
    split = "train" if "train" in splits else splits[0]
    if len(splits) > 1:
        logger.info("%s: split %r is used, of %s", name, split, ", ".join(splits))
    return data[split], split


def _hub_items(name, folder, saved, pick, roles, with_videos):
    """Reads a Hugging Face dataset.

    Args:
        name: The dataset as the user wrote it, a folder or a hub id.
        folder: Its absolute path, or None if it is on the hub.
        saved: Whether the folder was written by `save_to_disk`.
        pick: `pick_columns` with what the flags say.
        roles: See `read_rows`.
        with_videos: Whether its items may be clips.
    """
    import datasets

    data, split = _load_hub(name, folder, saved)
    picked = pick(data.column_names, name, tables.HUB_COLUMNS_WITH_VIDEOS if with_videos else tables.HUB_COLUMNS)
    caption_column, media_column = picked.pop("caption", None), picked.pop("media")
    of_files = {"target": media_column, **picked}
    data = data.select_columns([*of_files.values(), *([caption_column] if caption_column else [])])
    for column in of_files.values():
        kind = data.features[column]
        is_list = isinstance(kind, datasets.List)
        # A column of paths or bytes reads alike as either.
        is_video = with_videos and not isinstance(kind.feature if is_list else kind, datasets.Image)
        # Not decoded by the library: every item of every kind of dataset goes through our one decoder.
        undecoded = (datasets.Video if is_video else datasets.Image)(decode=False)
        try:
            if is_list and column == media_column:
                raise ValueError("an item has one target")
            data = data.cast_column(column, datasets.List(undecoded) if is_list else undecoded)
        except (TypeError, ValueError, NotImplementedError) as error:
            what = "images or clips" if with_videos else "images"
            raise RefusedError(f"{name}: column {column!r} holds {kind}, not {what}.") from error

    # The captions are read now, the files when they are needed.
    captions = data[caption_column] if caption_column else [None] * len(data)
    files = [_hub_files(data, column, folder) for column in of_files.values()]
    items = []
    for index, (caption, *of_row) in enumerate(zip(captions, *files, strict=True)):
        path = of_row[0][0][2] if of_row[0] else None
        origin = f"{split} row {index} ({os.path.basename(path)})" if path else f"{split} row {index}"
        found = {role: [file[:2] for file in files] for role, files in zip(of_files, of_row, strict=True)}
        items.append(_row(f"{split}/{index}", caption, origin, found, {"target": True, **dict(roles)}))
    return items


def _hub_files(data, column, folder):
    """Yields for each row the files of a column, a list of (file, what is wrong or None, path as it is written)."""
    index = itertools.count()
    for chunk in data.select_columns(column).with_format("arrow")[:].column(0).chunks:
        is_list = hasattr(chunk, "value_lengths")
        lengths = chunk.value_lengths().fill_null(0).to_pylist() if is_list else [1] * len(chunk)
        structs = chunk.flatten() if is_list else chunk
        fields = dict(zip([field.name for field in structs.type], structs.flatten(), strict=True))
        entries = zip(fields["bytes"].is_valid().to_pylist(), fields["path"].to_pylist(), strict=True)
        for length in lengths:
            row, found = next(index), []
            for place, (has_bytes, path) in enumerate(itertools.islice(entries, length)):
                if has_bytes:
                    found.append((Embedded(data, row, column, place if is_list else None), None, path))
                elif path:
                    file = Path(folder or "", path)
                    found.append((file, None if os.path.isfile(file) else f"{path!r} names no file", path))
            yield found
