"""Reads the rows of a dataset: which picture or clip, with which caption, and where that was written.

A dataset is a folder with a sidecar text beside each picture or clip, a folder with a metadata file, or a Hugging Face
dataset. Every problem that shows without decoding is found here, before any model loads.
"""

import codecs
import csv
import difflib
import glob
import io
import itertools
import json
import logging
import os
import re
import reprlib
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path

from dataset.settings import DATASET_FLAGS
from runtime.errors import RefusedError
from runtime.hub import is_hub_id, why_not_on_hub


logger = logging.getLogger(__name__)

# The endings of what is read: of Pillow's formats in `images.py`, and of FFmpeg's containers in `videos.py`.
IMAGE_SUFFIXES = (
    *(".apng", ".avif", ".avifs", ".bmp", ".dib", ".gif", ".j2c", ".j2k", ".jfif", ".jp2", ".jpc", ".jpe", ".jpeg"),
    *(".jpf", ".jpg", ".jpx", ".mpo", ".pbm", ".pfm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"),
)
VIDEO_SUFFIXES = (
    *(".264", ".265", ".3g2", ".3gp", ".3gpp", ".asf", ".avc", ".avi", ".divx", ".f4v", ".flv", ".gif", ".h264"),
    *(".h265", ".hevc", ".ismv", ".m1v", ".m2p", ".m2t", ".m2ts", ".m2v", ".m4v", ".mj2", ".mk3d", ".mkv", ".mov"),
    *(".mp4", ".mp4v", ".mpe", ".mpeg", ".mpg", ".mpv", ".mts", ".ogv", ".qt", ".tod", ".trp", ".ts", ".vob", ".webm"),
    *(".wmv", ".xvid"),
)
# And of what people take for images and clips, and is read only where the file is something else than it is called.
FOREIGN_IMAGE_SUFFIXES = (
    *(".3fr", ".ai", ".arw", ".bpg", ".cr2", ".cr3", ".crw", ".dcr", ".dds", ".dng", ".emf", ".eps", ".erf", ".exr"),
    *(".fff", ".hdr", ".heic", ".heics", ".heif", ".hif", ".icns", ".ico", ".iiq", ".jls", ".jxl", ".jxr", ".kdc"),
    *(".mef", ".mos", ".mrw", ".nef", ".nrw", ".orf", ".pcx", ".pdf", ".pef", ".psb", ".psd", ".qoi", ".raf", ".raw"),
    *(".rw2", ".rwl", ".sgi", ".sr2", ".srf", ".srw", ".svg", ".svgz", ".tga", ".wdp", ".wmf", ".x3f", ".xcf"),
)
FOREIGN_VIDEO_SUFFIXES = (
    *(".amv", ".av1", ".braw", ".dv", ".ivf", ".mjpeg", ".mjpg", ".mod", ".mxf", ".nut", ".obu", ".ogg", ".ogm"),
    *(".r3d", ".rm", ".rmvb", ".swf", ".wtv", ".y4m"),
)
_MEDIA_SUFFIXES = {*IMAGE_SUFFIXES, *VIDEO_SUFFIXES, *FOREIGN_IMAGE_SUFFIXES, *FOREIGN_VIDEO_SUFFIXES}
METADATA_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")

# Blanks, line ends and byte order marks, in every script.
_BLANKS = "\ufeff" + "".join(chr(number) for number in range(0x3001) if chr(number).isspace())

# Hugging Face (file_name + text), DiffSynth-Studio (image or video + prompt), Open-Sora (path + text).
FILE_COLUMNS = {"media": ("file_name", "image", "video", "path"), "caption": ("text", "prompt")}
HUB_COLUMNS = {"media": ("image",), "caption": ("text", "caption", "prompt")}
HUB_COLUMNS_WITH_VIDEOS = {**HUB_COLUMNS, "media": ("image", "video")}
# Of what an item has in addition to its target; each holds a path or a list of paths.
ROLE_COLUMNS = {
    "references": ("edit_image", "reference_images"),
    "control": ("control_image", "blockwise_controlnet_image"),
    "mask": ("mask", "blockwise_controlnet_inpaint_mask"),
    "layers": ("layers",),
    "control_video": ("control_video",),
}


@dataclass(frozen=True)
class Embedded:
    """A picture or clip inside a Hugging Face dataset, which stays on disk until it is read.

    Args:
        data: The `datasets.Dataset`, not decoded.
        index: Of the row.
        column: Of the pictures or clips.
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
            dataset, whose items need not have a path. With several datasets the name of its own stands before it.
        caption: The text without blanks around it and with line feeds as line ends; empty where there is none.
        media: The files by their role, a tuple for each: the path of an image, a video or a folder of frames, or where
            a dataset embeds it. "target" is the one that is trained on, the others are of `ROLE_COLUMNS`.
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


@dataclass(frozen=True, slots=True)
class _Item:
    """A row before its caption is judged: None is missing, and metadata can hold values of any type."""

    id: str
    caption: object
    media: dict[str, tuple]
    origin: str
    problem: str | None = None


def read_datasets(args, **kind):
    """Reads the rows of the dataset, or of all datasets, that the flags or a config file name.

    Args:
        args: From `parse_args`.
        kind: `media_suffixes`, `frame_folders` and `roles` of `read_rows`.

    Returns:
        A list of `Row`.

    Raises:
        RefusedError: See `read_rows`.
    """

    def read(dataset):
        columns = {name: dataset[name] for name in ("dataset_metadata", "media_column", "caption_column")}
        rows = read_rows(
            dataset["dataset_path"], **columns, allow_missing_captions=args.allow_missing_captions, **kind
        )
        _say_repeats_in_names(rows, dataset)
        return [replace(row, repeat=dataset["dataset_repeat"]) for row in rows]

    if args.datasets is None:
        return read({name: getattr(args, name) for name in DATASET_FLAGS})
    rows, taken, items = [], set(), {}
    for dataset in args.datasets:
        name = os.path.basename(os.path.normpath(dataset["dataset_path"]))
        number = next(n for n in itertools.count(1) if (name, n) not in taken)
        taken.add((name, number))
        name += f"#{number}" if number > 1 else ""
        own = [replace(row, id=f"{name}/{row.id}", origin=f"{name}: {row.origin}") for row in read(dataset)]
        for row in own:
            target = row.media.get("target", (None,))[0]
            if isinstance(target, Path):
                found = items.setdefault((os.path.realpath(target), row.caption), {})
                found.setdefault(os.path.realpath(dataset["dataset_path"]), row.name)
        rows += own
    # Of one folder that is named twice it is meant.
    twice = [" and ".join(names.values()) for names in items.values() if len(names) > 1]
    if twice:
        raise RefusedError(
            f"{len(twice)} items stand in two datasets with the same caption, since one folder is in the other, and "
            "would be trained once for each: leave them out of one, and use dataset_repeat to train them more often.\n"
            f"{first_five(twice)}"
        )
    return rows


def _say_repeats_in_names(rows, dataset):
    """Says where folders are named as kohya's scripts want them, 10_cat, and the number is not that of our repeats."""
    path, repeat = os.path.abspath(dataset["dataset_path"]), dataset["dataset_repeat"]
    folders = sorted({os.path.basename(os.path.dirname(os.path.join(path, row.id))) for row in rows})
    found = [name for name in folders if re.match(r"[0-9]{1,3}_.", name) and int(name.split("_")[0]) != repeat]
    if found:
        logger.warning(
            "%s: the numbers in the names of these folders, repeats in kohya's scripts, are not taken: an epoch has "
            "each item as often as --dataset_repeat says (%d). Folders with repeats of their own can stand in "
            "`datasets` of a --config file.\n%s",
            *(dataset["dataset_path"], repeat, first_five(found)),
        )


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
    media_column=None,
    caption_column=None,
    allow_missing_captions=False,
    media_suffixes=IMAGE_SUFFIXES,
    frame_folders=False,
    roles=(),
):
    """Reads all rows of a dataset without decoding anything.

    Args:
        dataset_path: A folder, or the id of a dataset on the Hugging Face hub when there is no such path.
        dataset_metadata: A metadata file; without it the folder's own `metadata.*` is read if there is one.
        media_column: Column of the pictures or clips, if it has none of the known names.
        caption_column: Column of the captions, if it has none of the known names.
        allow_missing_captions: Gives items without a caption the caption `""` instead of refusing them.
        media_suffixes: Which files of a folder are items, in lower case; others that are images or clips by their
            ending are so only with a text of their own, and what reads them says what is wrong. With others than
            pictures among them, a Hugging Face dataset may have a column of videos.
        frame_folders: Whether a folder can be one item: where it holds pictures only and a text of its name stands
            beside it, or where a row names it. Its pictures are no items then.
        roles: Which further files of an item the model takes: {role of `ROLE_COLUMNS`: whether every item needs one}.

    Returns:
        A list of `Row`: sidecar folders in order of their ids, all others in order of their rows. Those without a
        `problem` have unique ids.

    Raises:
        RefusedError: If the dataset or its metadata is missing, ambiguous or unreadable as a whole.
    """
    given_columns = {"media": media_column, "caption": caption_column}
    if not os.path.exists(dataset_path):
        if not is_hub_id(str(dataset_path)):
            raise RefusedError(
                f"--dataset_path {dataset_path} does not exist and is not a hub id ('name' or 'owner/name')."
            )
        _refuse_metadata_flag(dataset_metadata, f"{dataset_path}, which is not a folder here")
        items = _hub_items(dataset_path, None, False, given_columns, allow_missing_captions, media_suffixes, roles)
        return _judge_captions(items, dataset_path, allow_missing_captions, media_suffixes)
    if not os.path.isdir(dataset_path):
        raise RefusedError(
            f"--dataset_path {dataset_path} is a file: give the folder, and a metadata file by --dataset_metadata."
        )

    # abspath, not resolve: pictures are often links into a store, and an id is the name inside the dataset.
    folder = os.path.abspath(dataset_path)
    files = _list_files(folder)
    hint = ""
    saved = "dataset_dict.json" in files or {"dataset_info.json", "state.json"} <= set(files)
    metadata = None if saved else _find_metadata(folder, files, dataset_metadata, media_suffixes)
    if metadata is not None:
        items = _metadata_items(
            folder, files, metadata, given_columns, allow_missing_captions, media_suffixes, frame_folders, roles
        )
    elif saved or _is_hub_layout(files, media_suffixes):
        _refuse_metadata_flag(dataset_metadata, f"{dataset_path}, which is a Hugging Face dataset")
        items = _hub_items(dataset_path, folder, saved, given_columns, allow_missing_captions, media_suffixes, roles)
    else:
        for what, value in given_columns.items():
            if value is not None:
                raise RefusedError(f"--{what}_column {value} has no effect: {dataset_path} has no metadata file.")
        _pick_role_columns((), roles, f"{dataset_path}, which has no metadata file,")
        items = _sidecar_items(folder, files, media_suffixes, frame_folders)
        tables = [name for name in files if _suffix(name) in METADATA_SUFFIXES]
        hint = f" If {tables[0]} holds them, give it by --dataset_metadata." if tables else ""
    return _judge_captions(items, dataset_path, allow_missing_captions, media_suffixes, hint)


def read_sidecars(dataset_path, *, allow_missing_captions=False, media_suffixes=IMAGE_SUFFIXES, frame_folders=False):
    """Reads the rows of a folder by its sidecar texts, also where a metadata file stands in it; see `read_rows`."""
    folder = os.path.abspath(dataset_path)
    items = _sidecar_items(folder, _list_files(folder), media_suffixes, frame_folders)
    return _judge_captions(items, dataset_path, allow_missing_captions, media_suffixes)


def frame_names(folder):
    """Returns the names of the pictures in a folder of frames, in no order, also of those that cannot be read."""
    suffixes = (*IMAGE_SUFFIXES, *FOREIGN_IMAGE_SUFFIXES)
    return [name for name in os.listdir(folder) if not name.startswith(".") and _suffix(name) in suffixes]


def first_five(problems):
    """Returns the first five problems, one a line, and how many more there are."""
    lines = [f"  {problem}" for problem in problems[:5]]
    if len(problems) > 5:
        lines.append(f"  and {len(problems) - 5} more")
    return "\n".join(lines)


def _judge_captions(items, name, allow_missing_captions, media_suffixes, hint=""):
    """Turns items into rows, with the one rule for captions that holds for every kind of dataset."""
    if not items:
        suffixes = ", ".join(sorted(set(media_suffixes)))
        raise RefusedError(f"{name} has no items: neither rows of metadata nor files that end in {suffixes}.")
    rows, found, without = [], 0, {"empty": [], "missing": []}
    for item in items:
        caption, problem = "" if item.caption is None else item.caption, item.problem
        if not isinstance(caption, str) or not _is_unicode(caption):
            problem = problem or f"caption {reprlib.repr(caption)} is not text (numbers need quotes)"
            caption = ""
        else:
            # What surrounds a text, and how its lines end, comes from the file or the system that it was written on.
            caption = re.sub(r"\r\n?", "\n", caption).strip(_BLANKS)
            if not caption:
                kind, caption = "missing" if item.caption is None else "empty", ""
                without[kind].append(item.origin)
                if not allow_missing_captions:
                    problem = problem or f"caption {kind}"
            else:
                found += 1
        rows.append(Row(item.id, caption, item.media, item.origin, problem))

    counts = ", ".join([f"{found} found", *(f"{len(origins)} {kind}" for kind, origins in without.items())])
    if not any(without.values()):
        logger.info("%s: captions: %s", name, counts)
    elif allow_missing_captions:
        listing = first_five([f"{origin}: caption {kind}" for kind, origins in without.items() for origin in origins])
        logger.warning("%s: captions: %s; these train on an empty caption.%s\n%s", name, counts, hint, listing)
    else:
        logger.warning(
            "%s: captions: %s; write them, or pass --allow_missing_captions to train these items on an empty "
            "caption.%s",
            *(name, counts, hint),
        )
    return rows


def _refuse_metadata_flag(dataset_metadata, what):
    if dataset_metadata is not None:
        raise RefusedError(f"--dataset_metadata {dataset_metadata} cannot be used with {what}.")


def _is_unicode(text):
    """Tells whether a text can be written as UTF-8, which halves of surrogate pairs cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _nearest(name, choices):
    """Returns the choice that is spelt most like `name`, whatever the case, or None."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


# Files


def _suffix(name):
    return os.path.splitext(name)[1].lower()


def _list_files(folder):
    """Returns the visible files under `folder`: sorted relative paths with forward slashes."""

    def refuse(error):
        raise RefusedError(f"{error.filename} cannot be read: {error.strerror}.") from error

    names, seen, passed_over = [], set(), []
    for place, subfolders, files in os.walk(folder, onerror=refuse, followlinks=True):
        if place != folder and {"run.json", "dataset.jsonl"} <= set(files):
            # Sheets, previews and curves, which are no data.
            logger.warning("%s: %s is left out: it holds what a run has left", folder, _name_in(folder, place))
            subfolders.clear()
            continue
        # A link to a folder above it would be walked for ever.
        if os.path.realpath(place) in seen:
            passed_over.append(_name_in(folder, place))
            subfolders.clear()
            continue
        seen.add(os.path.realpath(place))
        # Sorted, because the first of two links to one folder is the one that is walked. Names with a leading dot
        # are made by systems, not by people: .cache, ._a.jpg, .ipynb_checkpoints.
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        names += [os.path.join(place, name) for name in files if not name.startswith(".")]
    if passed_over:
        listed = first_five(passed_over)
        logger.warning("%s: %d links lead to folders that are read already:\n%s", folder, len(passed_over), listed)
    names = sorted(_name_in(folder, name) for name in names)
    undecodable = [ascii(name) for name in names if not _is_unicode(name)]
    if undecodable:
        raise RefusedError(
            f"{folder} has {len(undecodable)} file names that are not UTF-8:\n{first_five(undecodable)}"
        )
    return names


def _name_in(folder, path):
    return os.path.relpath(path, folder).replace(os.sep, "/")


def _find_metadata(folder, files, dataset_metadata, media_suffixes):
    """Returns the path of the metadata file, or None if there is none."""
    if dataset_metadata is not None:
        tried = [os.path.abspath(dataset_metadata), os.path.join(folder, dataset_metadata)]
        existing = [path for path in tried if os.path.isfile(path)]
        if len(existing) == 2 and not os.path.samefile(*existing):
            raise RefusedError(
                f"--dataset_metadata {dataset_metadata} names two files: {' and '.join(existing)}. Give the full path."
            )
        if not existing:
            raise RefusedError(f"--dataset_metadata {dataset_metadata} is not a file (tried {' and '.join(tried)}).")
        if _suffix(existing[0]) not in METADATA_SUFFIXES:
            raise RefusedError(f"--dataset_metadata {dataset_metadata} must end in {', '.join(METADATA_SUFFIXES)}.")
        return existing[0]

    named = [name for name in files if os.path.splitext(os.path.basename(name))[0].lower() == "metadata"]
    # Left unread, metadata.json1 would leave a folder without captions.
    for name in named:
        near = _nearest(_suffix(name), METADATA_SUFFIXES)
        if near is not None and near != _suffix(name):
            raise RefusedError(f"{name} is not read, did you mean metadata{near}?")
    named = [name for name in named if _suffix(name) in METADATA_SUFFIXES]
    # Hugging Face's own layout puts the file of a split into its sub-folder.
    found = [name for name in named if "/" not in name] or named
    if len(found) > 1:
        raise RefusedError(
            f"{folder} has several metadata files ({', '.join(found)}): pick one by --dataset_metadata."
        )
    if not found:
        return None
    if "/" in found[0]:
        place, texts = os.path.dirname(found[0]) + "/", _texts_by_stem(files)
        elsewhere = [name for name in files if _suffix(name) in media_suffixes and not name.startswith(place)]
        outside = [name for name in elsewhere if _stem(name) in texts]
        if outside:
            raise RefusedError(
                f"{folder} has a metadata file in a sub-folder, {found[0]}, and {len(outside)} files with texts "
                f"elsewhere: pick it by --dataset_metadata, or give the sub-folder.\n{first_five(outside)}"
            )
    return os.path.join(folder, found[0])


def _is_hub_layout(files, media_suffixes):
    # Shards are named like nothing else; a repository of them may hold pictures or clips too, for its README.
    if any(re.search(r"-\d{5}-of-\d{5}\.(parquet|arrow)$", name) for name in files):
        return True
    suffixes = {_suffix(name) for name in files}
    return not suffixes.isdisjoint((".parquet", ".arrow")) and suffixes.isdisjoint(media_suffixes)


# Sidecar folders


def _sidecar_items(folder, files, media_suffixes, frame_folders):
    texts = _texts_by_stem(files)
    media, frames = {}, set()
    if frame_folders:
        folders = _picture_folders(files)
        for place in sorted(folders):
            key = unicodedata.normalize("NFC", place)
            if key in texts:
                media.setdefault(key, []).append(place)
                frames.update(folders[place])
    for name in files:
        if _suffix(name) in media_suffixes and name not in frames:
            media.setdefault(_stem(name), []).append(name)
    others, places = {}, {os.path.dirname(name) for name in frames}
    for name in files:
        # Beside what is read, photos may have their raw data, and images the files that they were painted in.
        if _stem(name) not in media and _suffix(name) in _MEDIA_SUFFIXES and os.path.dirname(name) not in places:
            others.setdefault(_stem(name), []).append(name)
    media |= {key: names for key, names in others.items() if key in texts}
    left_out = [name for key, names in others.items() if key not in texts for name in names]
    if left_out:
        logger.warning(
            "%s: %d files of other kinds without texts are no items:\n%s", folder, len(left_out), first_five(left_out)
        )
    captions, problems = {}, {}
    for key in media.keys() & texts.keys():
        text = texts[key][0]
        if texts[key][1:]:
            problems[key] = f"it has more than one text: {', '.join(texts[key])}"
        if media[key][1:]:
            problems[key] = f"{text} is the caption of more than one file: {', '.join(media[key])}"
        try:
            captions[key] = _read_text(os.path.join(folder, text), text)
        except RefusedError as error:
            captions[key], problems[key] = "", str(error)
    beside = {_stem(name): name for name in reversed(files) if _suffix(name) != ".txt"}
    orphans = [
        f"{name} (beside {beside[key]}, which is no image or clip by its ending)" if key in beside else name
        for key, names in texts.items()
        if key not in media
        for name in names
    ]
    if orphans:
        logger.warning(
            "%s has %d texts without an image or clip of their name:\n%s", folder, len(orphans), first_five(orphans)
        )
    items = [
        _Item(name, captions.get(key), {"target": (Path(folder, name),)}, name, problems.get(key))
        for key, names in media.items()
        for name in names
    ]
    return sorted(items, key=lambda item: item.id)


def _stem(name):
    # In one normal form: a picture and its text can come from systems that write accents differently.
    return unicodedata.normalize("NFC", os.path.splitext(name)[0])


def _texts_by_stem(files):
    """Returns the names of the sidecar texts by their stems: one each, in an orderly folder."""
    texts = {}
    for name in files:
        if _suffix(name) == ".txt":
            texts.setdefault(_stem(name), []).append(name)
    return texts


def _picture_folders(files):
    """Returns the pictures of each folder, itself in no other, whose pictures have no texts or clips beside them."""
    folders, no_clips, texts = {}, set(), _texts_by_stem(files)
    for name in files:
        place = os.path.dirname(name)
        if _suffix(name) in IMAGE_SUFFIXES:
            folders.setdefault(place, []).append(name)
            if _stem(name) in texts:
                no_clips.add(place)
        while place:
            place = os.path.dirname(place)
            no_clips.add(place)
    return {place: names for place, names in folders.items() if place not in no_clips}


# Metadata files


def _metadata_items(
    folder, files, metadata, given_columns, allow_missing_captions, media_suffixes, frame_folders, roles
):
    base = os.path.dirname(metadata)
    name = _name_in(folder, metadata) if _is_inside(metadata, folder) else metadata
    columns, records = _read_table(metadata, name)
    media_column, caption_column, role_columns = _pick_columns(
        columns, given_columns, FILE_COLUMNS, name, allow_missing_captions, roles
    )

    items, origins, respelt, further = [], {}, [], set()

    def find(column, value):
        if not isinstance(value, str) or not _is_unicode(value):
            return None, f"{column} is {reprlib.repr(value)}, not a path"
        path, problem = _find_file(value, base, folder, frame_folders)
        if problem is not None:
            return None, f"{value!r} {problem}"
        if path != os.path.normpath(os.path.join(base, value)):
            respelt.append(f"{origin}: {value!r} is {path}")
        return Path(path), None

    for origin, record in records:
        value, caption = record.get(media_column), record.get(caption_column)
        path, problem = find(media_column, value)
        if problem is not None:
            item_id = value if isinstance(value, str) and _is_unicode(value) else reprlib.repr(value)
            items.append(_Item(item_id, caption, {}, origin, problem))
            continue
        item_id, media = _name_in(folder, path), {"target": (path,)}
        first = origins.setdefault(item_id, origin)
        problem = None if first == origin else f"it repeats the file of {first}"
        for role, (column, is_needed) in role_columns.items():
            found = [find(column, path) for path in _as_list(record.get(column))]
            paths = tuple(path for path, _ in found)
            media |= {role: paths} if paths else {}
            further.update(_name_in(folder, path) for path in paths if path is not None)
            missing = f"{column} is empty" if is_needed and not paths else None
            problem = problem or next((problem for _, problem in found if problem), missing)
        items.append(_Item(item_id, caption, media, origin, problem))

    if respelt:
        logger.info("%s: %d files found under another spelling:\n%s", name, len(respelt), first_five(respelt))
    texts = _texts_by_stem(files)
    unread = [text for item_id in origins for text in texts.get(_stem(item_id), ())]
    if unread:
        logger.warning(
            "%d texts beside files are not read, since %s has the captions:\n%s", len(unread), name, first_five(unread)
        )
    named = {*origins, *further}
    rowless = [
        file for file in files if _suffix(file) in media_suffixes and named.isdisjoint((file, os.path.dirname(file)))
    ]
    if rowless:
        logger.warning("%d files have no row in %s:\n%s", len(rowless), name, first_five(rowless))
    return items


def _as_list(value):
    """Returns the paths of a column of a role: it holds one, or a list, which in a table of texts is JSON."""
    if isinstance(value, str) and value.startswith("["):
        parsed, problem = _parse_json(value)
        value = value if problem else parsed
    return value if isinstance(value, list) else [] if value in (None, "") else [value]


def _is_inside(path, folder):
    return os.path.commonpath([path, folder]) == folder


def _find_file(value, base, folder, frame_folders):
    """Looks for the file or folder that a row names: as it is written first, then as other systems would write it.

    Args:
        value: The name in the row.
        base: The metadata file's folder, which names are relative to.
        folder: The dataset's folder, tried second.
        frame_folders: Whether it may be a folder of frames.

    Returns:
        The absolute path and None, or None and what is wrong.
    """
    slashed = value.replace("\\", "/")
    spellings = [value, slashed, unicodedata.normalize("NFC", slashed), unicodedata.normalize("NFD", slashed)]
    candidates = [(spelling, place) for spelling in spellings for place in (base, folder)]
    for spelling, place in list(candidates):
        # images/a.jpg in images/metadata.csv: the folder's own name stands in front once more.
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
        elif frame_folders and os.path.isdir(path) and not _is_inside(base, path) and not _is_inside(folder, path):
            return path, None
    return None, problem


def _read_table(path, name):
    """Returns the column names of a metadata file and its rows, each as (origin, record by column name)."""
    suffix = _suffix(path)
    if suffix == ".parquet":
        return _read_parquet(path, name)
    text = _read_text(path, name)
    if suffix in (".csv", ".tsv"):
        return _read_delimited(text, name, "," if suffix == ".csv" else "\t")
    records = _read_jsonl(text, name) if suffix == ".jsonl" else _read_json(text, name)
    problems = [f"{origin}: {reprlib.repr(record)}" for origin, record in records if not isinstance(record, dict)]
    if problems:
        raise RefusedError(f"{name} has {len(problems)} rows that are not objects:\n{first_five(problems)}")
    return list(dict.fromkeys(column for _, record in records for column in record)), records


def _read_text(path, name):
    """Returns the text of a file in UTF-8, or in UTF-16 if it begins with a byte order mark.

    Raises:
        RefusedError: If it is encoded otherwise; names the file and the byte.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise RefusedError(f"{name} cannot be read: {error.strerror}.") from error
    encoding = "utf-8"
    if data.startswith(codecs.BOM_UTF16_LE):
        encoding = "utf-16-le"
    elif data.startswith(codecs.BOM_UTF16_BE):
        encoding = "utf-16-be"
    # The mark is decoded too and dropped afterwards, so that offsets count from the start of the file.
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise RefusedError(
            f"{name} is not {encoding.upper()} at byte {error.start} (0x{data[error.start]:02x}): save it as UTF-8."
        ) from error
    # UTF-16 without its mark, and UTF-32, decode without an error: every other character is a NUL.
    if "\0" in text:
        offset = len(text[: text.index("\0")].encode(encoding))
        raise RefusedError(f"{name} has a NUL character at byte {offset}: save it as UTF-8.")
    return text.lstrip("\ufeff")


def _read_parquet(path, name):
    # pyarrow takes a while to import, and only this kind of file needs it.
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise RefusedError(f"{name} cannot be read as parquet: {_first_line(error)}") from error
    return table.column_names, [(f"{name} row {n}", record) for n, record in enumerate(table.to_pylist(), 1)]


def _first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read_delimited(text, name, delimiter):
    # Python's limit guards against quotes that are never closed in streams; here all of the text is in memory already.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    # newline="" keeps the line ends inside a caption; strict refuses stray quotes, which would change one.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header, records, problems, line = None, [], [], 1
    try:
        for fields in reader:
            start, line = line, reader.line_num + 1
            if not any(fields):
                # An empty line, or the bare delimiters that spreadsheets leave below the table.
                continue
            if header is None:
                header = fields
            elif len(fields) != len(header):
                problems.append(f"line {start}: {len(fields)} fields")
            else:
                records.append((f"{name} line {start}", dict(zip(header, fields, strict=True))))
    except csv.Error as error:
        raise RefusedError(f"{name} line {line} cannot be read: {error}.") from error
    if header is None:
        raise RefusedError(f"{name} is empty.")
    if problems:
        raise RefusedError(
            f"{name} has {len(problems)} rows that do not have the header's {len(header)} fields (a caption that "
            f"holds {delimiter!r} needs quotes):\n{first_five(problems)}"
        )
    twice = sorted({column for column in header if header.count(column) > 1})
    if twice:
        raise RefusedError(f"{name} has several columns of one name: {', '.join(map(repr, twice))}.")
    return header, records


def _unique_keys(pairs):
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return record


def _parse_json(text):
    """Returns the value and None, or None and what is wrong."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys), None
    except (ValueError, RecursionError) as error:
        return None, str(error)


def _read_jsonl(text, name):
    records, problems = [], []
    # Not splitlines, which also splits at U+2028 and others that may stand inside a caption.
    for number, line in enumerate(text.split("\n"), 1):
        # A mark at the start of a later line is left by joining files.
        line = line.strip().lstrip("\ufeff")
        if line:
            record, problem = _parse_json(line)
            records.append((f"{name} line {number}", record))
            if problem is not None:
                problems.append(f"line {number}: {problem}")
    if problems:
        raise RefusedError(f"{name} has {len(problems)} lines that are not JSON:\n{first_five(problems)}")
    return records


def _read_json(text, name):
    value, problem = _parse_json(text)
    if problem is not None:
        raise RefusedError(f"{name} is not JSON: {problem}.")
    if not isinstance(value, list):
        raise RefusedError(f"{name} must hold a list of objects, not {reprlib.repr(value)}.")
    return [(f"{name} item {number}", record) for number, record in enumerate(value, 1)]


# Columns


def _pick_columns(columns, given, known, name, allow_missing_captions, roles):
    """Returns the media column, the caption column or None where there need not be one, and those of the roles.

    Args:
        columns: The names that the dataset has.
        given: The value of the flag or None, for "media" and "caption".
        known: The names that need no flag, for "media" and "caption".
        name: The file or dataset, for messages.
        allow_missing_captions: Whether there may be no caption column.
        roles: See `read_rows`.
    """
    media = _pick_column("media", columns, columns, given, known, name)
    others = [column for column in columns if column != media]
    absent = given["caption"] is None and not any(_nearest(column, known["caption"]) for column in others)
    if absent and allow_missing_captions:
        caption = None
    else:
        caption = _pick_column("caption", others, columns, given, known, name)
    of_roles = _pick_role_columns(columns, roles, name)
    used = {media, caption, *(column for column, _ in of_roles.values())}
    unused = [column for column in columns if column not in used]
    if unused:
        logger.info("%s: columns not used: %s", name, ", ".join(map(repr, unused)))
    return media, caption, of_roles


def _pick_role_columns(columns, roles, name):
    """Returns {role: (column, whether every item needs it)}."""
    picked = {}
    for role, is_needed in dict(roles).items():
        known = ROLE_COLUMNS[role]
        present = [column for column in columns if column in known]
        if len(present) > 1 or is_needed and not present:
            found = f"several columns of {role}, {' and '.join(present)}" if present else f"no {role}"
            raise RefusedError(f"{name} has {found}; this model takes one column: {' or '.join(known)}.")
        if present:
            picked[role] = present[0], is_needed
    return picked


def _pick_column(what, candidates, columns, given, known, name):
    flag, given, known = f"--{what}_column", given[what], known[what]
    found = f"Columns found: {', '.join(map(repr, columns)) or 'none'}."
    if given in candidates:
        return given
    if given is not None:
        near = _nearest(given, candidates)
        hint = f", did you mean {near!r}?" if near else "."
        raise RefusedError(f"{flag} {given} is not a {what} column of {name}{hint} {found}")
    present = [column for column in candidates if column in known]
    if len(present) > 1:
        raise RefusedError(f"{name} has several {what} columns ({', '.join(present)}): pick one by {flag}. {found}")
    if present:
        return present[0]
    misspelt = [f"{column!r} for {_nearest(column, known)!r}" for column in candidates if _nearest(column, known)]
    hint = f" Is it {' or '.join(misspelt)}?" if misspelt else ""
    raise RefusedError(f"{name} has no {what} column ({', '.join(known)}): name it by {flag}.{hint} {found}")


# Hugging Face datasets


def _not_as_pattern(folder):
    """Returns what `datasets.load_dataset` is to be told of a folder or None, since it reads paths as patterns."""
    real = os.path.realpath(folder or os.sep)
    if not glob.has_magic(real):
        return {}
    from huggingface_hub import DatasetCard

    # It lists the files of this place in the folder, which has to be relative to it: up to the root, and down again in
    # letters that are no pattern. Then it no longer reads from the card which files they are.
    told = {"data_dir": os.path.relpath(os.sep, real) + glob.escape(real)}
    card = os.path.join(real, "README.md")
    configs = DatasetCard.load(card).data.to_dict().get("configs", []) if os.path.isfile(card) else []
    if len(configs) > 1:
        raise ValueError(f"it has {len(configs)} configurations, and its path holds one of *, ? and [")
    return told | ({"data_files": configs[0]["data_files"]} if configs and "data_files" in configs[0] else {})


def _hub_items(name, folder, saved, given_columns, allow_missing_captions, media_suffixes, roles):
    """Reads a Hugging Face dataset.

    Args:
        name: The dataset as the user wrote it, a folder or a hub id.
        folder: Its absolute path, or None if it is on the hub.
        saved: Whether the folder was written by `save_to_disk`.
        given_columns, allow_missing_captions: See `_pick_columns`.
        media_suffixes, roles: See `read_rows`.
    """
    # Imported here: it takes seconds, and datasets of files never need it.
    import datasets

    if folder is None and not datasets.config.HF_HUB_OFFLINE:
        # Asked once, or the library would ask for a minute. What it fetched before it finds by itself.
        fetched = os.path.join(datasets.config.HF_DATASETS_CACHE, str(name).replace("/", "___"))
        if not os.path.isdir(fetched) and (problem := why_not_on_hub(str(name), "dataset")):
            raise RefusedError(f"--dataset_path {name}: {problem}.")
    real = os.path.realpath(folder or "")
    if folder and ("::" in real or not saved and os.path.expandvars(real) != real):
        raise RefusedError(f"{name} cannot be loaded: the library for it takes '::' and '$' in {real} for its own.")
    try:
        if saved:
            data = datasets.load_from_disk(folder)
        else:
            data = datasets.load_dataset(str(folder or name), **_not_as_pattern(folder))
    except Exception as error:  # the library, the hub and pyarrow each have their own, without a common base
        absent = "" if folder else "is not a folder here and "
        raise RefusedError(
            f"{name} {absent}cannot be loaded as a Hugging Face dataset: {_first_line(error)}"
        ) from error

    split = "train"
    if isinstance(data, dict):
        splits = list(data)
        if split not in splits and len(splits) != 1:
            raise RefusedError(f"{name} has no split 'train'. Splits found: {', '.join(splits) or 'none'}.")
        split = split if split in splits else splits[0]
        data = data[split]
        if len(splits) > 1:
            logger.info("%s: split %r is used, of %s", name, split, ", ".join(splits))
    with_videos = not set(media_suffixes) <= set(IMAGE_SUFFIXES)
    known = HUB_COLUMNS_WITH_VIDEOS if with_videos else HUB_COLUMNS
    media_column, caption_column, role_columns = _pick_columns(
        data.column_names, given_columns, known, name, allow_missing_captions, roles
    )
    of_files = {"target": media_column} | {role: column for role, (column, _) in role_columns.items()}
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
    files = {role: _hub_files(data, column, folder) for role, column in of_files.items()}
    items = []
    for index, (caption, *of_row) in enumerate(zip(captions, *files.values(), strict=True)):
        media, problem = {}, None
        for (role, column), found in zip(of_files.items(), of_row, strict=True):
            if found:
                media[role] = tuple(file for file, _, _ in found)
                problem = problem or next((problem for *_, problem in found if problem), None)
            elif role == "target" or role_columns[role][1]:
                problem = problem or ("no file" if role == "target" else f"{column} is empty")
        path = of_row[0][0][1] if of_row[0] else None
        origin = f"{split} row {index} ({os.path.basename(path)})" if path else f"{split} row {index}"
        items.append(_Item(f"{split}/{index}", caption, media, origin, problem))
    return items


def _hub_files(data, column, folder):
    """Yields for each row the files of a column, a list of (file, path as it is written, problem)."""
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
                    found.append((Embedded(data, row, column, place if is_list else None), path, None))
                elif path:
                    file = Path(folder or "", path)
                    found.append((file, path, None if os.path.isfile(file) else f"{path!r} names no file"))
            yield found
