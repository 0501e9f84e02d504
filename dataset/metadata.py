"""Reads the rows of a dataset: which image or clip, with which caption, and where that was written.

A dataset is a folder with a sidecar text next to each image or clip, a folder with a metadata file, or a Hugging Face
dataset. Every problem that shows without decoding is found here, before any model loads.
"""

import logging
import os
import re
import reprlib
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from dataset import hugging_face, tables
from dataset.settings import DATASET_FLAGS
from dataset.tables import TABLE_SUFFIXES, as_list, first_five, nearest, pick_columns, read_table, read_text
from runtime.errors import RefusedError
from runtime.hub import is_hub_id


logger = logging.getLogger(__name__)


def _suffixes(names):
    return tuple(f".{name}" for name in names.split())


# The endings of what is read: of Pillow's formats in `images.py`, and of FFmpeg's containers in `videos.py`.
IMAGE_SUFFIXES = _suffixes("apng avif avifs bmp dib gif jfif jpe jpeg jpg mpo pbm pfm pgm png pnm ppm tif tiff webp")
VIDEO_SUFFIXES = _suffixes(
    "264 265 3g2 3gp 3gpp asf avc avi divx f4v flv gif h264 h265 hevc ismv m1v m2p m2t m2ts m2v m4v mj2 mk3d mkv mov "
    "mp4 mp4v mpe mpeg mpg mpv mts ogv qt tod trp ts vob webm wmv xvid"
)
# Also of what people take for images, and is read only where the file is something else than it is called.
KNOWN_IMAGE_SUFFIXES = IMAGE_SUFFIXES + _suffixes(
    "3fr ai arw bpg cr2 cr3 crw dcr dds dng emf eps erf exr fff hdr heic heics heif hif icns ico iiq j2c j2k jls jp2 "
    "jpc jpf jpx jxl jxr kdc mef mos mrw nef nrw orf pcx pdf pef psb psd qoi raf raw rw2 rwl sgi sr2 srf srw svg svgz "
    "tga wdp wmf x3f xcf"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One item of a dataset.

    Args:
        id: Unique name: the path relative to the dataset with forward slashes, or `split/index` for a Hugging Face
            dataset, whose items need not have a path. With several datasets its own name comes before it.
        caption: The text without blanks around it and with line feeds as line ends; empty where there is none.
        media: The files by their role, a tuple for each: the path of an image, a video or a folder of frames, or where
            a dataset embeds it. "target" is the one that is trained on, the others are of `tables.ROLE_COLUMNS`.
        origin: Where the row was found, for messages: `metadata.csv line 3`, or the id.
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
        files = self.media.get(role, ())
        return [file.read() if isinstance(file, hugging_face.Embedded) else file for file in files]

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
    rows, names, owners, twice = [], [], {}, []
    for dataset in args.datasets or [{name: getattr(args, name) for name in DATASET_FLAGS}]:
        path, metadata, *columns, repeat = (dataset[name] for name in DATASET_FLAGS)
        place = os.path.realpath(path)
        where = {"dataset_metadata": metadata, "columns": dict(zip(("media", "caption"), columns, strict=True))}
        own = read_rows(path, **where, allow_missing_captions=args.allow_missing_captions, **kind)
        _report_repeats_in_names(path, own, repeat)
        names.append(os.path.basename(os.path.normpath(path)))
        name = f"{names[-1]}#{names.count(names[-1])}".removesuffix("#1")
        for row in own:
            if args.datasets is not None:
                row = replace(row, id=f"{name}/{row.id}", origin=f"{name}: {row.origin}")
            rows.append(replace(row, repeat=repeat))
            for target in row.media.get("target", ()) if args.datasets is not None else ():
                if not isinstance(target, Path):
                    continue
                owner, name_there = owners.setdefault((os.path.realpath(target), row.caption), (place, row.name))
                if owner != place:  # a folder that is named twice is meant to be
                    twice.append(f"{name_there} and {row.name}")
    if twice:
        raise RefusedError(
            f"{len(twice)} items are in two datasets with the same caption, since one folder is inside the other: "
            f"leave them out of one, and use dataset_repeat to train them more often.\n{first_five(twice)}"
        )
    return rows


def _report_repeats_in_names(name, rows, repeat):
    """Warns where names of folders are kohya's, 10_cat, and the number is not that of our repeats."""
    folders = sorted({os.path.basename(os.path.dirname(os.path.abspath(os.path.join(name, row.id)))) for row in rows})
    found = [place for place in folders if re.match(r"[0-9]{1,3}_.", place) and int(place.split("_")[0]) != repeat]
    what = "folders have repeats in their names, as kohya's scripts want them, which are not used; each item comes"
    _report(name, f"{what} {repeat} times in an epoch (dataset_repeat)", found)


def describe_rows(rows):
    """Returns that in which all processes have to find the same rows, of what `read_datasets` returns."""
    # Of further files the name only: each machine may have the dataset at another place.
    described = [
        [row.id, row.caption, row.problem, row.repeat]
        + [[role, getattr(file, "name", None)] for role, files in row.media.items() for file in files]
        for row in rows
    ]
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
        media_suffixes: Which files of a folder are items, in lower case. Other files are items only with a text of
            their own, and what reads them reports what is wrong. With suffixes of videos among them, a folder can be
            one item: where it holds images and a text of its name is next to it. Its images are no items then.
        roles: Which further files of an item the model takes: {role: whether every item needs one}.
        only_sidecars: Reads the sidecar texts of a folder also where it has a metadata file.

    Returns:
        A list of `Row`: sidecar folders in order of their ids, all others in order of their rows. Those without a
        `problem` have unique ids.

    Raises:
        RefusedError: If the dataset or its metadata is missing, ambiguous or unreadable as a whole.
    """
    given, roles = {what: name for what, name in (columns or {}).items() if name is not None}, dict(roles)
    # abspath, not resolve: images are often links into a store, and an id is the name inside the dataset.
    name, folder = str(dataset_path), os.path.abspath(dataset_path)
    is_folder = os.path.isdir(dataset_path)
    if not is_folder and (os.path.exists(dataset_path) or dataset_metadata is not None or not is_hub_id(name)):
        what = "a file" if os.path.exists(dataset_path) else "not there"
        raise RefusedError(
            f"--dataset_path {name} is {what}: give a folder, where --dataset_metadata may name a metadata file, or a "
            "Hugging Face dataset by its hub id ('name' or 'owner/name')."
        )
    files = _list_files(folder) if is_folder else []
    table = None if only_sidecars or not is_folder else _find_table(folder, files, dataset_metadata)
    pick = {"given": given, "needs": {"target": True, "caption": not allow_missing_captions, **roles}}
    if table is not None:
        source = _name_in(folder, table) if Path(table).is_relative_to(folder) else table
        columns, records = read_table(table, source)
        picked = pick_columns(columns, source, tables.FILE_COLUMNS, **pick)
        rows = _rows_of(records, picked, os.path.dirname(table), folder, roles)
        _report_unused(source, folder, files, rows, media_suffixes)
    elif not is_folder or not only_sidecars and hugging_face.is_dataset(files, media_suffixes):
        data, split = hugging_face.load(name, folder, files)
        known = dict(tables.HUB_COLUMNS)
        if set(media_suffixes) <= set(IMAGE_SUFFIXES):
            known["media"] = ("image",)
        picked = pick_columns(data.column_names, name, known, **pick)
        records = hugging_face.read_records(data, split, name, picked)
        rows = _rows_of(records, picked, None, folder, roles)
    else:
        if given:
            flags = ", ".join(f"--{what}_column {column}" for what, column in given.items())
            raise RefusedError(f"{flags} has no effect: {name} has no metadata file.")
        if any(roles.values()):
            raise RefusedError(f"{name} has no metadata file, and this model needs one, with {', '.join(roles)}.")
        unread = [file for file in files if _suffix(file) in TABLE_SUFFIXES and not only_sidecars]
        _report(name, "tables are not read; --dataset_metadata names one that is to be", unread)
        rows = _sidecar_rows(folder, files, media_suffixes)
    if not rows:
        suffixes = ", ".join(sorted(set(media_suffixes)))
        raise RefusedError(f"{name} has no items: neither rows of metadata nor files that end in {suffixes}.")
    return _judge_captions(rows, name, allow_missing_captions)


def frame_names(folder):
    """Returns the names of the images in a folder of frames, in no order, also of those that cannot be read."""
    return [name for name in os.listdir(folder) if not name.startswith(".") and _suffix(name) in KNOWN_IMAGE_SUFFIXES]


def _report(name, what, lines, log=logger.warning):
    """Logs that a dataset has something that is listed, if anything is."""
    if lines:
        log("%s: %d %s:\n%s", name, len(lines), what, first_five(lines))


def _judge_captions(rows, name, allow_missing_captions):
    """Returns the rows with their captions as they train, by the one rule that holds for every kind of dataset."""
    judged, without = [], {"empty": [], "missing": []}
    for row in rows:
        caption, problem = "", None
        if isinstance(row.caption, str) and _is_unicode(row.caption):
            # What surrounds a text, and how its lines end, comes from the file or system that it was written on.
            caption = re.sub(r"\A[\s\ufeff]+|[\s\ufeff]+\Z", "", re.sub(r"\r\n?", "\n", row.caption))
        elif row.caption is not None:
            problem = f"caption {reprlib.repr(row.caption)} is not text (numbers need quotes)"
        if not caption and problem is None:
            kind = "missing" if row.caption is None else "empty"
            without[kind].append(f"{row.origin}: caption {kind}")
            problem = None if allow_missing_captions else f"caption {kind}"
        judged.append(replace(row, caption=caption, problem=row.problem or problem))
    found, (empty, missing) = sum(bool(row.caption) for row in judged), without.values()
    logger.info("%s: captions: %d found, %d empty, %d missing", name, found, len(empty), len(missing))
    _report(name, "items have no caption", [*empty, *missing])
    return judged


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

    names, seen = [], {}
    for place, subfolders, files in os.walk(folder, onerror=refuse, followlinks=True):
        if place != folder and {"run.json", "dataset.jsonl"} <= set(files):
            _report(folder, "folders are left out, since they hold the results of a run", [place])
            subfolders.clear()
            continue
        # A link to a folder above it would be walked for ever.
        first = seen.setdefault(os.path.realpath(place), place)
        if first != place:
            raise RefusedError(f"{place} and {first} are links to one folder, or one to the other: keep one.")
        # Names with a leading dot are made by systems, not by people: .cache, ._a.jpg, .ipynb_checkpoints.
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        names += [_name_in(folder, os.path.join(place, name)) for name in files if not name.startswith(".")]
    for name in names:
        if not _is_unicode(name):
            raise RefusedError(f"{folder} has a file whose name is not UTF-8: {ascii(name)}.")
    return sorted(names)


def _name_in(folder, path):
    return os.path.relpath(path, folder).replace(os.sep, "/")


def _find_table(folder, files, dataset_metadata):
    """Returns the path of the metadata file, or None if there is none."""
    if dataset_metadata is not None:
        tried = [os.path.abspath(dataset_metadata), os.path.join(folder, dataset_metadata)]
        found = {os.path.realpath(path): path for path in tried if os.path.isfile(path)}
        if len(found) != 1 or _suffix(dataset_metadata) not in TABLE_SUFFIXES:
            raise RefusedError(
                f"--dataset_metadata {dataset_metadata} must be one file that ends in {', '.join(TABLE_SUFFIXES)}; of "
                f"{' and '.join(tried)} there are {len(found)}."
            )
        return found.popitem()[1]
    named = [name for name in files if os.path.splitext(os.path.basename(name))[0].lower() == "metadata"]
    # Left unread, metadata.json1 would leave a folder without captions.
    named = [name for name in named if nearest(_suffix(name), TABLE_SUFFIXES)]
    here = [name for name in named if "/" not in name] or named
    if here and (len(here) > 1 or "/" in here[0] or _suffix(here[0]) not in TABLE_SUFFIXES):
        raise RefusedError(
            f"{folder} has {', '.join(here)}: give one by --dataset_metadata, or rename what is no metadata file "
            f"(metadata{', metadata'.join(TABLE_SUFFIXES)} in the folder itself is read without it)."
        )
    return os.path.join(folder, here[0]) if here else None


# Sidecar folders


def _sidecar_rows(folder, files, media_suffixes):
    texts = _by_stem(name for name in files if _suffix(name) == ".txt")
    clips = {} if set(media_suffixes) <= set(IMAGE_SUFFIXES) else _folders_of_frames(files, texts)
    frames = {name for names in clips.values() for name in names}
    media = {_normal(place): [place] for place in clips}
    for key, names in _by_stem(name for name in files if _suffix(name) in media_suffixes).items():
        media[key] = media.get(key, []) + [name for name in names if name not in frames]
    # Next to what is read, photos may have their raw data, and images the files that they were painted in.
    others = _by_stem(name for name in files if _suffix(name) not in (".txt", *TABLE_SUFFIXES))
    media |= {key: names for key, names in others.items() if key in texts and key not in media}
    left_out = [name for key, names in others.items() if key not in media for name in names]
    for is_media, log in ((True, logger.warning), (False, logger.info)):
        listed = [name for name in left_out if (_suffix(name) in (*KNOWN_IMAGE_SUFFIXES, *VIDEO_SUFFIXES)) == is_media]
        _report(folder, "files of other kinds without texts are no items", listed, log)
    orphans = [name for key, names in texts.items() if key not in media for name in names]
    _report(folder, "texts have no image or clip of their name", orphans)
    rows = []
    for key, names in media.items():
        caption, problem, sidecars = None, None, texts.get(key, [])
        try:
            caption = read_text(os.path.join(folder, sidecars[0]), sidecars[0]) if sidecars else None
        except RefusedError as error:
            problem = str(error)
        if sidecars and len(sidecars + names) > 2:
            problem = f"several files or texts have one name: {', '.join([*names, *sidecars])}"
        rows += [Row(name, caption, {"target": (Path(folder, name),)}, name, problem) for name in names]
    return sorted(rows, key=lambda row: row.id)


def _normal(name):
    # In one normal form: an image and its text can come from systems that write accents differently.
    return unicodedata.normalize("NFC", name)


def _stem(name):
    return _normal(os.path.splitext(name)[0])


def _by_stem(files):
    """Returns names by their stems: one each, in an orderly folder."""
    names = {}
    for name in files:
        names.setdefault(_stem(name), []).append(name)
    return names


def _folders_of_frames(files, texts):
    """Returns the images of each folder that has a text, has no folder in it, and whose images have no texts."""
    above = {str(parent) for place in set(map(os.path.dirname, files)) for parent in PurePosixPath(place).parents}
    folders = {}
    for name in files:
        place = os.path.dirname(name)
        if _suffix(name) in IMAGE_SUFFIXES and _normal(place) in texts and place not in above:
            folders.setdefault(place, []).append(name)
    return {place: names for place, names in folders.items() if texts.keys().isdisjoint(map(_stem, names))}


# Tables and Hugging Face datasets


def _rows_of(records, picked, base, folder, roles):
    """Returns the rows of a table or a Hugging Face dataset, whose captions may be of any type.

    Args:
        records: Each as (origin, record by column name).
        picked: From `pick_columns`.
        base: The folder that the names of files are relative to; None of a Hugging Face dataset, whose ids are the
            origins.
        folder: The dataset's folder, where names are tried too.
        roles: See `read_rows`.
    """
    rows, first, respelt = [], {}, []
    for origin, record in records:
        value, media, problem = record.get(picked["target"]), {}, None
        try:
            for role in picked.keys() - {"caption"}:
                column = picked[role]
                written = [value] if role == "target" else as_list(record.get(column))
                if roles.get(role) and not written:
                    raise RefusedError(f"no {role}")
                if files := [_find_file(name, column, base or folder, folder) for name in written]:
                    media[role] = tuple(files)
                for name, file in zip(written, files, strict=True):
                    if base is not None and str(file) != os.path.normpath(os.path.join(base, name)):
                        respelt.append(f"{origin}: {name!r} is {file}")
        except RefusedError as error:
            problem = str(error)
        row_id = origin
        if base is not None and "target" in media:
            row_id = _name_in(folder, media["target"][0])
            if first.setdefault(row_id, origin) != origin:
                problem = problem or f"it repeats the file of {first[row_id]}"
        elif base is not None and value not in (None, ""):
            row_id = value if isinstance(value, str) and _is_unicode(value) else reprlib.repr(value)
        rows.append(Row(row_id, record.get(picked.get("caption")), media, origin, problem))
    _report(folder, "files found under another spelling", respelt, logger.info)
    return rows


def _find_file(value, column, base, folder):
    """Returns the path of the file or folder of frames that a row names, or what a Hugging Face dataset embeds.

    It is looked for as it is written first, then as other systems would write it, and then with names of folders in
    front: images/a.jpg in images/metadata.csv.

    Raises:
        RefusedError: There is none in the dataset. A path that is not relative may lead out of it.
    """
    if isinstance(value, hugging_face.Embedded):
        return value
    if value in (None, ""):
        raise RefusedError(f"{column} is empty")
    if isinstance(value, list):
        raise RefusedError(f"{column} names {len(value)} files, and an item has one")
    if not isinstance(value, str) or not _is_unicode(value):
        raise RefusedError(f"{column} is {reprlib.repr(value)}, not a path")
    slashed = value.replace("\\", "/")
    spellings = [value, slashed, unicodedata.normalize("NFC", slashed), unicodedata.normalize("NFD", slashed)]
    roots, problem = (Path(base), Path(folder)), "names no file in the dataset"
    for place in dict.fromkeys([*roots, *roots[0].parents, *roots[1].parents]):
        for spelling in dict.fromkeys(spellings):
            path = Path(os.path.normpath(os.path.join(place, spelling)))
            is_allowed = os.path.isabs(spelling) or any(path.is_relative_to(root) for root in roots)
            is_clip = os.path.isdir(path) and not any(root.is_relative_to(path) for root in roots)
            if is_clip or os.path.isfile(path):
                if is_allowed:
                    return path
                problem = "leads out of the dataset"
    raise RefusedError(f"{value!r} {problem}")


def _report_unused(name, folder, files, rows, media_suffixes):
    """Logs which texts and files of a folder its table does not use."""
    used = {_name_in(folder, file) for row in rows for files in row.media.values() for file in files}
    stems = set(map(_stem, used))
    texts = [name for name in files if _suffix(name) == ".txt" and _stem(name) in stems]
    _report(name, "texts next to files are not read, since this table has the captions", texts)
    media = [name for name in files if _suffix(name) in media_suffixes]
    _report(name, "files have no row", [file for file in media if used.isdisjoint((file, os.path.dirname(file)))])
