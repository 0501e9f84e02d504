"""Reads tables and texts of a dataset as they were written, and finds the columns that matter.

No value is guessed: a caption "007" or "null" stays one. What is not clear is refused with its file and line.
"""

import codecs
import collections
import csv
import difflib
import io
import json
import logging
import os
import reprlib
from pathlib import Path

from runtime.errors import RefusedError


logger = logging.getLogger(__name__)

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")

# Hugging Face (file_name + text), DiffSynth-Studio (image or video + prompt), Open-Sora (path + text).
FILE_COLUMNS = {"media": ("file_name", "image", "video", "path"), "caption": ("text", "prompt")}
HUB_COLUMNS = {"media": ("image", "video"), "caption": ("text", "caption", "prompt")}
# Of what an item has in addition to its target; each holds a path or a list of paths.
ROLE_COLUMNS = {
    "references": ("edit_image", "reference_images"),
    "control": ("control_image", "blockwise_controlnet_image"),
    "mask": ("mask", "blockwise_controlnet_inpaint_mask"),
    "layers": ("layers",),
    "control_video": ("control_video",),
}


def first_five(problems):
    """Returns the first five problems, one a line, and how many more there are."""
    lines = [f"  {problem}" for problem in problems[:5]]
    if len(problems) > 5:
        lines.append(f"  and {len(problems) - 5} more")
    return "\n".join(lines)


def nearest(name, choices):
    """Returns the choice that is spelt most like `name`, whatever the case, or None."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def read_text(path, name):
    """Returns the text of a file in UTF-8, or in UTF-16 if it begins with a byte order mark.

    Raises:
        RefusedError: It is encoded otherwise; names the file and the byte.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise RefusedError(f"{name} cannot be read: {error.strerror}.") from error
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"
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


def read_table(path, name):
    """Returns the column names of a table and its rows, each as (origin, record by column name).

    Args:
        path: Ends in one of `TABLE_SUFFIXES`.
        name: How messages call it.

    Raises:
        RefusedError: It cannot be read without doubt; names the line.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".parquet":
        return _read_parquet(path, name)
    text = read_text(path, name)
    if suffix in (".csv", ".tsv"):
        return _read_delimited(text, name, "," if suffix == ".csv" else "\t")
    if suffix == ".jsonl":
        # Not splitlines, which also splits at U+2028, as a caption may have it. A mark at the start of a later line is
        # left by joining files.
        lines = [(f"{name} line {n}", line.strip().lstrip("\ufeff")) for n, line in enumerate(text.split("\n"), 1)]
        records = [(origin, _parse_json(line, origin)) for origin, line in lines if line]
    else:
        value = _parse_json(text, name)
        if not isinstance(value, list):
            raise RefusedError(f"{name} must hold a list of objects, not {reprlib.repr(value)}.")
        records = [(f"{name} item {n}", record) for n, record in enumerate(value, 1)]
    for origin, record in records:
        if not isinstance(record, dict):
            raise RefusedError(f"{origin} is not an object: {reprlib.repr(record)}.")
    return list(dict.fromkeys(column for _, record in records for column in record)), records


def _read_parquet(path, name):
    # pyarrow takes a while to import, and only this kind of file needs it.
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise RefusedError(f"{name} cannot be read as parquet: {error}") from error
    return table.column_names, [(f"{name} row {n}", record) for n, record in enumerate(table.to_pylist(), 1)]


def _read_delimited(text, name, delimiter):
    # Python's limit guards against quotes that are never closed in streams; here all of the text is in memory already.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    # newline="" keeps the line ends inside a caption; strict refuses stray quotes, which would change one.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header, records, problems, origin = None, [], [], f"{name} line 1"
    try:
        for fields in reader:
            # Neither an empty line nor the bare delimiters that spreadsheets leave below the table is a row.
            if any(fields) and header is None:
                header = fields
            elif any(fields) and len(fields) != len(header):
                problems.append(f"{origin}: {len(fields)} fields")
            elif any(fields):
                records.append((origin, dict(zip(header, fields, strict=True))))
            origin = f"{name} line {reader.line_num + 1}"
    except csv.Error as error:
        raise RefusedError(f"{origin} cannot be read: {error}.") from error
    if header is None:
        raise RefusedError(f"{name} is empty.")
    if len(set(header)) < len(header):
        raise RefusedError(f"{name} has several columns of one name: {', '.join(map(repr, header))}.")
    if problems:
        raise RefusedError(
            f"{name} has {len(problems)} rows that do not have the header's {len(header)} fields (a caption that "
            f"holds {delimiter!r} needs quotes):\n{first_five(problems)}"
        )
    return header, records


def _parse_json(text, name):
    def unique_keys(pairs):
        record = dict(pairs)
        if len(record) < len(pairs):
            (key, _), *_ = collections.Counter(key for key, _ in pairs).most_common()
            raise ValueError(f"the key {key!r} occurs twice")
        return record

    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{name} is not JSON: {error}.") from error


def as_list(value):
    """Returns the paths that a column of a role holds: one, or a list, which in a table of texts is JSON."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return [value]
    return value if isinstance(value, list) else [] if value in (None, "") else [value]


def pick_columns(columns, name, known, given, needs):
    """Returns the columns of a dataset that are read: {"target", "caption" or role: column}, without those it lacks.

    Args:
        columns: The names that the dataset has.
        name: The file or dataset, for messages.
        known: `FILE_COLUMNS` or `HUB_COLUMNS`.
        given: The values of the flags, for "media" and "caption" where there is one.
        needs: {"target", "caption" or role of `ROLE_COLUMNS`: whether there must be one}.

    Raises:
        RefusedError: One that is needed is missing, misspelt, or one of several.
    """
    picked = {}
    for role, is_needed in needs.items():
        what = "media" if role == "target" else role
        names = [given[what]] if what in given else {**known, **ROLE_COLUMNS}[what]
        others = [column for column in columns if column not in picked.values()]
        present = [column for column in others if column in names]
        near = [column for column in others if nearest(column, names)]
        if len(present) == 1:
            picked[role] = present[0]
        # An optional role may well be spelt like another one.
        elif present or is_needed or what in given or what in known and near:
            how = f"name it by --{what}_column" if what in known else "this model takes one"
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near and not present else ""
            raise RefusedError(
                f"{name} has {'several' if present else 'no'} {what} columns ({', '.join(present or names)}): {how}."
                f"{hint} Columns found: {', '.join(map(repr, columns)) or 'none'}."
            )
    unused = [column for column in columns if column not in picked.values()]
    if unused:
        logger.info("%s: columns not used: %s", name, ", ".join(map(repr, unused)))
    return picked
