"""Whatever dataset is written comes back as it was written, or is refused for a reason that can be stated.

What is expected follows from what was generated alone: which rows are to be refused and why, and which id, caption and
size all others have. Every image of a dataset has a size of its own, so that a caption at the wrong one shows.
"""

import codecs
import collections
import contextlib
import csv
import io
import json
import re
import tempfile
import unicodedata
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from dataset.buckets import Sizing
from dataset.images import inspect_rows
from dataset.metadata import read_rows
from runtime.errors import exit_codes
from runtime.files import write_json_lines


FOLDER = "my data"
MEDIA_COLUMNS, CAPTION_COLUMNS = {"file_name", "image", "video", "path"}, {"text", "prompt"}
OPEN_SORA = {"num_frames": 1, "height": 720, "width": 1280, "aspect_ratio": 0.5625, "resolution": 921600, "fps": None}
MARKS = {"utf-8-sig": codecs.BOM_UTF8, "utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}

STEMS = ("a", "b", "a b", " a ", "a#b", "100%", "%20", "é", "e\u0301", "\u00c5", "\u212b", "日本", "😀", "007")
STEMS += ("1e5", "null", "NaN", "true", "=1+1", "a,b", 'say "a"', "'", "a\tb", "a\nb", "metadata", "a\\b", "-")
STEMS += ("~", "*", "a.txt", "c:", ".a", "")
SUFFIXES = (".png", ".png", ".PNG", ".jpg", ".JPEG", ".webp")
FOLDERS = ("", "", "", "sub", "sub", "Sub #1", "50%", "é", "e\u0301", "007", "a/b c", "train.csv", ".hidden")
CAPTIONS = ("a cat", "a dog", "007", "1e5", "-0.0", "true", "null", "None", "NaN", "inf", "=1+1", "@a", "#a")
CAPTIONS += ("{}", "[1]", '"', '"a"', '""', "'", "a, b", "a;b", "a\\nb", "\\", "a\0b", "é", "e\u0301", "ﬁ")
CAPTIONS += ("Ã©", "ÿþa", "日本", "😀", "a\tb", "a\nb", "a\r\nb", "a\rb", "a\n", "a\r\n\n", "\na", " a ", "\ta\t")
CAPTIONS += ("a\u2028b", "\x85a", "a\x1cb", "\ufeffa", "a\ufeffb", "\ufeff\ufeff a\ufeff", "", " ", "\n")
CAPTIONS += ("\ufeff", "\u3000", "\u200b", *["long, " * 30000] * 3)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAME = st.builds(
    lambda folder, stem, suffix: f"{folder}/{stem}{suffix}".lstrip("/"),
    st.sampled_from(FOLDERS),
    st.sampled_from(STEMS) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), max_size=8),
    st.sampled_from(SUFFIXES),
)
# What reads as a byte order mark at the start of a table is not part of a name.
COLUMN = st.sampled_from(["id", "caption", "score", "", " ", "a,b", "日本", "Text"]) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff\ufffe"), max_size=8
)


class Written(NamedTuple):
    """A row as it is written, and what must come of it.

    Args:
        name: Of the file in the dataset's folder.
        spelling: Of the name in the table, or of the text next to the file.
        caption: As it is written.
    """

    name: str
    spelling: str
    caption: str


class Dataset(NamedTuple):
    """What is written.

    Args:
        suffix: Of the table; ".txt" for texts next to the files.
        table: Relative to the dataset's folder.
        columns: Of files and captions.
        extra: Columns and their values, one for all rows.
        order: Of all columns.
        rows: A list of `Written`.
        encoding: With "-bare" at its end there is no mark.
        form: Of the format.
        allow_missing_captions: The flag.
    """

    suffix: str
    table: str
    columns: tuple
    extra: dict
    order: list
    rows: list
    encoding: str
    form: dict
    allow_missing_captions: bool


def key(name):
    return unicodedata.normalize("NFC", name)


@st.composite
def datasets(draw):
    suffix = draw(st.sampled_from([".csv", ".tsv", ".jsonl", ".json", ".parquet", ".txt"]))
    columns = draw(st.sampled_from([("image", "prompt"), ("file_name", "text"), ("path", "text")]))
    extra = dict(OPEN_SORA) if columns[0] == "path" else {}
    values = st.none() | st.integers(-9, 9) | st.floats() | st.sampled_from(["", "NaN", "a\nb", "é"])
    extra |= draw(st.dictionaries(COLUMN, values, max_size=2))
    if not draw(st.integers(0, 15)):
        extra[draw(st.sampled_from(sorted(MEDIA_COLUMNS | CAPTION_COLUMNS)))] = "a"
    extra = {name: value for name, value in extra.items() if name not in columns}
    order = draw(st.permutations([*columns, *extra]))

    form = {"quoting": csv.QUOTE_MINIMAL, "lineterminator": "\r\n"}
    if draw(st.booleans()):
        # Python's writer leaves a bare carriage return without quotes where lines end in a line feed.
        form = {"quoting": csv.QUOTE_ALL, "lineterminator": "\n"}
    if suffix in (".json", ".jsonl"):
        form = {"ensure_ascii": draw(st.booleans())}
    captions = st.sampled_from(CAPTIONS) | TEXT
    if form.get("ensure_ascii"):
        captions |= st.sampled_from(["\ud800", "a\udfffb"])

    names = draw(st.lists(NAME, min_size=1, max_size=4, unique=True))
    rows = [Written(name, draw(spellings(name, names, suffix)), draw(captions)) for name in names]
    if suffix != ".txt" and not draw(st.integers(0, 7)):
        rows.append(Written(rows[0].name, rows[0].spelling, draw(captions)))
    place, stem = draw(st.sampled_from([("", "metadata"), ("", "Metadata"), ("tables", "a #1"), ("../sibling", "b")]))
    table = f"{place}/{stem}".lstrip("/") + draw(st.sampled_from([suffix, suffix.upper()]))
    encoding = draw(st.sampled_from(["utf-8"] * 5 + [*MARKS, *MARKS, "cp1252", "utf-16-le-bare"]))
    return Dataset(suffix, table, columns, extra, order, rows, encoding, form, draw(st.booleans()))


def spellings(name, names, suffix):
    """Returns how a name can be written such that it can only mean this one of the names; "/" begins the folder's."""
    exact = f"{name.rpartition('.')[0]}.txt" if suffix == ".txt" else name
    known = [exact]
    if sum(key(other) == key(name) for other in names) == 1 and "\\" not in name:
        known += [unicodedata.normalize(form, exact) for form in ("NFC", "NFD")]
    if suffix != ".txt":
        known += [f"./{name}", f".//./{name}", f"sub/../{name}", f"../{FOLDER}/{name}", f"{FOLDER}/{name}", f"/{name}"]
        if not any("\\" in other for other in names):
            known += [name.replace("/", "\\"), ".\\" + name.replace("/", "\\")]
    return st.just(exact) | st.sampled_from(known)


# What is to come of it


def encode(text, encoding):
    """Returns the bytes, and whether they are in an encoding that is refused."""
    if encoding in MARKS:
        return MARKS[encoding] + text.encode(encoding.removesuffix("-sig")), False
    try:
        data = text.encode(encoding.removesuffix("-bare"))
    except UnicodeEncodeError:
        return text.encode("utf-8"), False
    if encoding == "utf-8" or data == text.encode("utf-8"):
        return data, False
    # Some texts are in two encodings at once, and no reader can tell: these are written in the right one.
    ambiguous = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    with contextlib.suppress(UnicodeDecodeError):
        ambiguous = ambiguous or "\0" not in data.decode("utf-8")
    return (text.encode("utf-8"), False) if ambiguous else (data, True)


def kept(caption):
    """Returns a caption by the documented rule: line feeds for line ends, and no blanks or marks around it."""
    caption = caption.replace("\r\n", "\n").replace("\r", "\n")
    while (shorter := caption.strip().strip("\ufeff")) != caption:
        caption = shorter
    return caption


def problems_of_caption(dataset, caption):
    if any("\ud800" <= character <= "\udfff" for character in caption):
        return ["is not text"]
    return ["caption empty"] if not kept(caption).strip() and not dataset.allow_missing_captions else []


def expect_texts(dataset):
    """Returns (row, problems) for each row that must be found next to its text, in order."""
    visible = [row for row in dataset.rows if not any(part.startswith(".") for part in row.name.split("/"))]
    stems = collections.Counter(key(row.name.rpartition(".")[0]) for row in visible)
    expected = []
    for row in sorted(visible):
        problems = problems_of_caption(dataset, row.caption)
        if encode(row.caption, dataset.encoding)[1] or "\0" in row.caption:
            problems.append("save it as UTF-8")
        if stems[key(row.name.rpartition(".")[0])] > 1:
            # The texts of both may be one file, of which the last caption is left.
            problems += ["several files or texts have one name", "save it as UTF-8"]
        expected.append((row, problems))
    return expected


def expect_rows(dataset):
    """Returns (row, problems) for each row of the table."""
    expected, taken = [], set()
    for row in dataset.rows:
        problems = problems_of_caption(dataset, row.caption)
        forms = [unicodedata.normalize(form, row.spelling) for form in ("NFC", "NFD")]
        # Names that are in neither form, such as a mixture, are found as they are written only.
        if key(row.spelling) == key(row.name) and row.name not in (row.spelling, *forms):
            row, problems = row._replace(name=row.spelling), [*problems, "names no file"]
        elif row.name in taken:
            problems.append("it repeats the file of")
        taken.add(row.name)
        expected.append((row, problems))
    return expected


def problems_of_table(dataset, misread):
    """Returns why a table cannot be read as a whole."""
    problems = ["save it as UTF-8"] if misread else []
    if dataset.suffix in (".csv", ".tsv") and any("\0" in row.caption for row in dataset.rows):
        problems.append("NUL character")
    for what, known in (("media", MEDIA_COLUMNS), ("caption", CAPTION_COLUMNS)):
        if len(known.intersection(dataset.order)) > 1:
            problems.append(f"several {what} columns")
    return problems


# Writing


def image(width, height):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "png")
    return buffer.getvalue()


SIZES = [(20, 30), (31, 21), (22, 22), (40, 23)]
IMAGES = [image(*size) for size in SIZES]


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def write_table(dataset, folder):
    """Writes a table with the library of its format; returns whether it is in an encoding that is refused."""
    path, records = folder / dataset.table, []
    path.parent.mkdir(exist_ok=True)
    for row in dataset.rows:
        spelling = f"{folder}{row.spelling}" if row.spelling.startswith("/") else row.spelling
        values = {**dict(zip(dataset.columns, (spelling, row.caption), strict=True)), **dataset.extra}
        records.append({column: values[column] for column in dataset.order})
    if dataset.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
        return False
    if dataset.suffix == ".json":
        text = json.dumps(records, **dataset.form)
    elif dataset.suffix == ".jsonl":
        text = "\n".join(json.dumps(record, **dataset.form) for record in records)
    else:
        buffer = io.StringIO(newline="")
        writer = csv.writer(buffer, delimiter="," if dataset.suffix == ".csv" else "\t", **dataset.form)
        writer.writerows([dataset.order, *([*record.values()] for record in records)])
        text = buffer.getvalue()
    data, misread = encode(text, dataset.encoding)
    path.write_bytes(data)
    return misread


# The property


def run(folder, dataset, on_bad_sample):
    """Does what a run does with its dataset.

    Returns:
        The lines of dataset.jsonl, or None and with what the run ended.
    """
    flags = {"allow_missing_captions": dataset.allow_missing_captions}
    # Tables that are called so are found.
    if dataset.suffix != ".txt" and Path(dataset.table).stem.lower() != "metadata":
        flags["dataset_metadata"] = str(folder / dataset.table)
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), exit_codes():
            items = inspect_rows(read_rows(folder, **flags), Sizing(64, 64, None, 16), on_bad_sample=on_bad_sample)
    except SystemExit as stop:
        assert stop.code == 2
        return None, stderr.getvalue()
    path = folder.parent / "dataset.jsonl"
    write_json_lines(path, [item.record for item in items])
    return [json.loads(line) for line in path.read_bytes().decode().split("\n")[:-1]], None


def check(dataset):
    """Writes a dataset, reads it, and compares; returns what came of it."""
    with tempfile.TemporaryDirectory() as parent:
        folder, sizes = Path(parent, FOLDER), {}
        for row in dataset.rows:
            number = sizes.setdefault(row.name, len(sizes))
            write(folder / row.name, IMAGES[number])
        if dataset.suffix == ".txt":
            for row in dataset.rows:
                write(folder / row.spelling, encode(row.caption, dataset.encoding)[0])
            expected = expect_texts(dataset)
            whole = [] if expected else ["has no items"]
        else:
            whole = problems_of_table(dataset, write_table(dataset, folder))
            expected = expect_rows(dataset)
        bad = [(row, problems) for row, problems in expected if problems]

        for on_bad_sample in ("error", "skip"):
            records, message = run(folder, dataset, on_bad_sample)
            if whole:
                assert any(problem in message for problem in whole), (whole, message)
                assert (folder.name if dataset.suffix == ".txt" else Path(dataset.table).name) in message
            elif len(bad) == len(expected) or (bad and on_bad_sample == "error"):
                counts = f"{len(bad)} of {len(expected)} images cannot be used"
                assert (counts if on_bad_sample == "error" else f"All {len(bad)} images are dropped") in message
                for row, problems in bad:
                    # The name and where it was found, and in the same line why. Names can hold line ends.
                    name, spelling, why = re.escape(row.name), re.escape(row.spelling), "|".join(problems)
                    pattern = rf"\n  {name}( \([^\n]*\))?: ([^\n]|{spelling})*?({why})"
                    assert re.search(pattern, message), (row, problems, message)
            else:
                assert records is not None, message
                compare(records, expected, sizes)
    return "refused" if whole or len(bad) == len(expected) else "partly" if bad else "whole"


def compare(records, expected, sizes):
    assert len(records) == len(expected)
    for record, (row, problems) in zip(records, expected, strict=True):
        if problems:
            assert record["decision"] == "dropped" and any(problem in record["reason"] for problem in problems)
        else:
            caption = kept(row.caption)
            caption = caption if caption.strip() else ""
            assert (record["decision"], record["reason"]) == ("used", None)
            assert (record["id"], record["caption"]) == (row.name, caption)
            assert record["source"]["size"] == [*SIZES[sizes[row.name]]]


SETTINGS = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}


def test_any_dataset_comes_back_or_is_refused():
    outcomes = collections.Counter()

    @settings(max_examples=120, **SETTINGS)
    @given(datasets())
    def every(dataset):
        outcomes[check(dataset)] += 1

    every()
    # It says little where nearly all is refused.
    assert min(outcomes[outcome] for outcome in ("whole", "partly", "refused")) >= 10, outcomes


@pytest.mark.slow
@settings(max_examples=5000, **SETTINGS)
@given(datasets())
def test_any_of_many_datasets_comes_back_or_is_refused(dataset):
    check(dataset)
