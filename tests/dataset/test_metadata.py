import codecs
import csv
import json
import logging
import os
import shutil
import tempfile
import unicodedata
from argparse import Namespace
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataset import hugging_face, metadata
from dataset.images import IMAGE_FORMATS
from dataset.inspection import Inspector, inspect_each
from dataset.metadata import IMAGE_SUFFIXES, read_datasets
from runtime.errors import RefusedError


def read_rows(path, **kwargs):
    """Reads rows and refuses the bad ones, as a run does, without decoding."""
    record = {"id": "", "decision": "used", "reason": None, "source": {"size": [1, 1]}, "used": {"size": [1, 1]}}
    rows = metadata.read_rows(path, **kwargs)
    if rows:
        inspect_each(rows, Inspector("images", lambda *_: None, "", lambda row, _: record))
    return rows


def write(path, text="", encoding="utf-8"):
    """Writes bytes as they are: newline translation would hide what the reader does with line ends."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
    return path


def folder_of(root, captions):
    """Writes empty image files with sidecar texts; the reader never decodes an image."""
    for name, caption in captions.items():
        write(root / name)
        if caption is not None:
            write((root / name).with_suffix(".txt"), caption)
    return root


def refused(path, **kwargs):
    """Returns the message with which a dataset is refused."""
    with pytest.raises(RefusedError) as info:
        read_rows(path, **kwargs)
    return str(info.value)


def pairs(rows):
    return [(row.id, row.caption) for row in rows]


def write_table(path, columns, rows):
    """Writes the same table in the format of the file's suffix, each by that format's own library."""
    records = [dict(zip(columns, row, strict=True)) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    else:
        with open(path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([columns, *rows])
    return path


# Sidecar folders


def test_sidecars_are_read_recursively_and_ordered_by_id(tmp_path):
    folder_of(tmp_path, {"b.jpg": "two", "a.PNG": "one", "sub/deep/c.webp": "three", "Z.bmp": "zero"})
    write(tmp_path / ".cache" / "x.jpg")
    write(tmp_path / "._a.PNG")
    rows = read_rows(tmp_path)
    assert pairs(rows) == [("Z.bmp", "zero"), ("a.PNG", "one"), ("b.jpg", "two"), ("sub/deep/c.webp", "three")]
    assert [row.content for row in rows] == [tmp_path / row.id for row in rows]
    assert [row.origin for row in rows] == [row.id for row in rows]
    assert read_rows(str(tmp_path)) == rows


def test_equal_stems_are_refused_in_one_folder_only(tmp_path):
    folder_of(tmp_path, {"a.jpg": "one", "a.png": "one", "sub/a.jpg": "two"})
    message = refused(tmp_path)
    assert "a.jpg, a.png" in message and "a.txt" in message and "sub" not in message.split("\n")[1]
    (tmp_path / "a.png").unlink()
    assert pairs(read_rows(tmp_path)) == [("a.jpg", "one"), ("sub/a.jpg", "two")]


def test_linked_folders_are_followed(tmp_path):
    store = folder_of(tmp_path / "store", {"a.jpg": "one"})
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    (dataset / "link").symlink_to(store)
    assert pairs(read_rows(dataset)) == [("link/a.jpg", "one")]


@pytest.mark.parametrize("target", ["store", "dataset"])
def test_a_folder_that_is_there_twice_is_refused(tmp_path, target):
    store = folder_of(tmp_path / "store", {"a.jpg": "one"})
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "link").symlink_to(store)
    (tmp_path / "dataset" / "second").symlink_to(tmp_path / target)
    message = refused(tmp_path / "dataset")
    assert "second" in message and "are links to one folder, or one to the other" in message


def test_two_texts_of_one_image_are_refused(tmp_path):
    folder_of(tmp_path, {"a.jpg": "one", "b.jpg": "two"})
    write(tmp_path / "a.TXT", "other")
    assert "a.jpg: several files or texts have one name: a.jpg, a.TXT, a.txt" in refused(
        tmp_path
    ) and "1 of 2 images" in refused(tmp_path)


def test_texts_beside_a_table_are_said(tmp_path, caplog):
    folder_of(tmp_path, {"a.jpg": "new", "b.jpg": None})
    write_table(tmp_path / "metadata.csv", ["file_name", "text"], [["a.jpg", "old"], ["b.jpg", "two"]])
    assert pairs(read_rows(tmp_path)) == [("a.jpg", "old"), ("b.jpg", "two")]
    assert (
        "metadata.csv: 1 texts next to files are not read, since this table has the captions:\n  a.txt" in caplog.text
    )


def test_a_table_of_a_sub_folder_does_not_hide_the_texts_outside(tmp_path):
    folder_of(tmp_path, {"a.jpg": "one", "x/b.jpg": None})
    write_table(tmp_path / "x" / "metadata.csv", ["file_name", "text"], [["b.jpg", "two"]])
    assert "has x/metadata.csv: give one by --dataset_metadata" in refused(tmp_path)
    assert pairs(read_rows(tmp_path, dataset_metadata="x/metadata.csv")) == [("x/b.jpg", "two")]


def test_metadata_of_one_name_in_two_places_is_refused(tmp_path, monkeypatch):
    folder_of(tmp_path / "dataset", {"a.jpg": None})
    for place in (tmp_path, tmp_path / "dataset"):
        write_table(place / "captions.csv", ["file_name", "text"], [["a.jpg", place.name]])
    monkeypatch.chdir(tmp_path)
    assert "captions.csv there are 2." in refused("dataset", dataset_metadata="captions.csv")
    path = str(tmp_path / "dataset" / "captions.csv")
    assert pairs(read_rows("dataset", dataset_metadata=path)) == [("a.jpg", "dataset")]


def test_image_and_text_in_different_normal_forms_belong_together(tmp_path):
    write(tmp_path / unicodedata.normalize("NFC", "é.jpg"))
    write(tmp_path / unicodedata.normalize("NFD", "é.txt"), "one")
    assert [row.caption for row in read_rows(tmp_path)] == ["one"]


def test_column_flags_are_refused_without_metadata(tmp_path):
    folder_of(tmp_path, {"a.jpg": "one"})
    assert "--media_column x has no effect" in refused(tmp_path, columns={"media": "x"})
    assert "--caption_column x has no effect" in refused(tmp_path, columns={"caption": "x"})


def test_texts_without_an_image_are_logged(tmp_path, caplog):
    folder_of(tmp_path, {"a.jpg": "one"})
    write(tmp_path / "b.txt", "two")
    read_rows(tmp_path)
    assert "1 texts have no image or clip of their name:\n  b.txt\n" in caplog.text


def test_endings_of_images_are_those_of_the_formats_that_are_read():
    Image.init()
    formats = {*IMAGE_FORMATS, "MPO", "DIB"}
    assert set(IMAGE_SUFFIXES) == {suffix for suffix, name in Image.registered_extensions().items() if name in formats}


@pytest.mark.parametrize("suffix", [".heic", ".CR2", ".jpg_large", ".mp4", ".wmv", ""])
def test_other_files_are_items_where_they_have_a_text_and_nothing_else_has_it(tmp_path, caplog, suffix):
    caplog.set_level(logging.INFO)
    folder_of(tmp_path, {"a.jpg": "one", f"b{suffix}": "two", "c.jpg": "three"})
    write(tmp_path / f"c{suffix}")
    write(tmp_path / f"without{suffix}")
    assert pairs(read_rows(tmp_path)) == [("a.jpg", "one"), (f"b{suffix}", "two"), ("c.jpg", "three")]
    assert f"1 files of other kinds without texts are no items:\n  without{suffix}" in caplog.text
    assert "no image or clip of their name" not in caplog.text


# Captions


@pytest.mark.parametrize("kind", [".csv", ".tsv", ".jsonl", ".json", ".parquet", ".txt", "saved"])
def test_captions_have_no_blanks_around_them_and_one_kind_of_line_end(tmp_path, kind):
    written = {
        *(
            "a cat\n",
            "a cat\r\n\r\n",
            " a\tcat  \n",
            "one\r\ntwo\r",
            "one\r\rtwo",
            "\t\n\ufeff a\u3000cat\u3000",
            "one \n two",
        ),
    }
    read = {"a cat", "a\tcat", "one\ntwo", "one\n\ntwo", "a\u3000cat", "one \n two"}
    if kind == "saved":
        image_dataset(tmp_path, sorted(written))[0].save_to_disk(str(tmp_path / "saved"))
        assert {row.caption for row in read_rows(tmp_path / "saved")} == read
        return
    folder_of(tmp_path, {f"{n}.png": text if kind == ".txt" else None for n, text in enumerate(sorted(written))})
    if kind != ".txt":
        rows = [[f"{n}.png", text] for n, text in enumerate(sorted(written))]
        write_table(tmp_path / f"metadata{kind}", ["file_name", "text"], rows)
    assert {row.caption for row in read_rows(tmp_path)} == read


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".json", ".parquet", ".txt"])
def test_captions_are_never_taken_for_values(tmp_path, suffix):
    captions = ["NA", "null", "None", "NaN", "1e5", "007", "true", "-", "1,5", '"', "'a'", 'say "hi"', "x\ty", "#"]
    names = [f"{n:02}.jpg" for n in range(len(captions))]
    for name, caption in zip(names, captions, strict=True):
        folder_of(tmp_path, {name: caption if suffix == ".txt" else None})
    if suffix != ".txt":
        write_table(tmp_path / f"metadata{suffix}", ["file_name", "text"], list(zip(names, captions, strict=True)))
    assert pairs(read_rows(tmp_path)) == list(zip(names, captions, strict=True))


ENCODED = {
    "utf-8": "a café".encode(),
    "utf-8 with mark": "a café".encode("utf-8-sig"),
    "utf-16-le": codecs.BOM_UTF16_LE + "a café".encode("utf-16-le"),
    "utf-16-be": codecs.BOM_UTF16_BE + "a café".encode("utf-16-be"),
}


@pytest.mark.parametrize("encoding", ENCODED)
def test_encodings_give_one_caption_from_sidecars(tmp_path, encoding):
    folder_of(tmp_path, {"a.jpg": ENCODED[encoding]})
    assert read_rows(tmp_path)[0].caption == "a café"


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.tsv", "metadata.jsonl", "metadata.json"])
@pytest.mark.parametrize("encoding", ENCODED)
def test_encodings_give_one_caption_from_metadata(tmp_path, name, encoding):
    write(tmp_path / "a.jpg")
    path = write_table(tmp_path / name, ["file_name", "text"], [["a.jpg", "a café"]])
    text = path.read_text(encoding="utf-8")
    write(path, ENCODED[encoding].replace("a café".encode(encoding.split()[0]), text.encode(encoding.split()[0])))
    assert pairs(read_rows(tmp_path)) == [("a.jpg", "a café")]


def test_other_encodings_are_refused_by_file_and_byte(tmp_path):
    folder_of(tmp_path, {"a.jpg": "fine", "b.jpg": "it’s".encode("cp1252"), "c.jpg": "a café".encode("latin-1")})
    message = refused(tmp_path)
    assert "2 of 3 images cannot be used" in message
    assert "b.txt is not UTF-8 at byte 2 (0x92)" in message and "c.txt is not UTF-8 at byte 5 (0xe9)" in message
    write(tmp_path / "metadata.csv", "file_name,text\na.jpg,it’s\n", "cp1252")
    assert "metadata.csv is not UTF-8 at byte 23 (0x92)" in refused(tmp_path)
    write(tmp_path / "metadata.csv", codecs.BOM_UTF16_LE + "fi".encode("utf-16-le") + b"x")
    assert "metadata.csv is not UTF-16 at byte 6" in refused(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32"])
def test_wide_encodings_without_their_mark_are_refused(tmp_path, encoding):
    folder_of(tmp_path, {"a.jpg": "cat".encode(encoding)})
    assert "a.txt has a NUL character at byte" in refused(tmp_path)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".txt"])
def test_no_mark_survives_in_a_caption(tmp_path, suffix):
    """A script that read marked texts as plain UTF-8 leaves a mark before each caption."""
    folder_of(tmp_path, {"a.jpg": "\ufeff\ufeffa cat" if suffix == ".txt" else None})
    if suffix != ".txt":
        write_table(tmp_path / f"metadata{suffix}", ["file_name", "text"], [["a.jpg", "\ufeffa cat"]])
    assert read_rows(tmp_path)[0].caption == "a cat"


def test_missing_and_empty_captions_are_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    captions = {f"{n}.jpg": None for n in range(4)} | {f"{n}.jpg": " \n" for n in range(4, 7)} | {"7.jpg": "a cat"}
    folder_of(tmp_path, captions)
    message = refused(tmp_path)
    assert "1 found, 3 empty, 4 missing" in caplog.text
    assert message.startswith("7 of 8 images cannot be used") and "--allow_missing_captions" in message
    assert message.split("\n")[1:-1] == [
        *(f"  {n}.jpg: caption missing" for n in range(4)),
        *(f"  {n}.jpg: caption empty" for n in range(4, 7)),
    ]
    caplog.clear()
    rows = read_rows(tmp_path, allow_missing_captions=True)
    assert [row.caption for row in rows] == [""] * 7 + ["a cat"]
    assert "1 found, 3 empty, 4 missing" in caplog.text


def test_four_images_without_any_caption(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder_of(tmp_path, {f"{n}.jpg": None for n in range(4)})
    assert "4 of 4 images cannot be used" in refused(tmp_path)
    assert "0 found, 0 empty, 4 missing" in caplog.text
    caplog.clear()
    assert [row.caption for row in read_rows(tmp_path, allow_missing_captions=True)] == [""] * 4
    assert "0 found, 0 empty, 4 missing" in caplog.text


def test_found_captions_are_reported(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    read_rows(folder_of(tmp_path, {"a.jpg": "one", "b.jpg": "two"}))
    assert "captions: 2 found, 0 empty, 0 missing" in caplog.text


@pytest.mark.parametrize("value", [5, 1.5, True, ["a"], {"a": 1}, "\ud800"])
def test_captions_that_are_not_text_are_refused_by_row(tmp_path, value):
    folder_of(tmp_path, {"a.jpg": None, "b.jpg": None})
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in (("a.jpg", "fine"), ("b.jpg", value))]
    write(tmp_path / "metadata.jsonl", "\n".join(lines))
    message = refused(tmp_path, allow_missing_captions=True)
    assert "b.jpg (metadata.jsonl line 2): caption" in message and "is not text" in message
    message.encode()


def test_null_and_absent_captions_are_missing(tmp_path):
    folder_of(tmp_path, {"a.jpg": None, "b.jpg": None, "c.jpg": None})
    records = [{"file_name": "a.jpg", "text": None}, {"file_name": "b.jpg"}, {"file_name": "c.jpg", "text": ""}]
    write(tmp_path / "metadata.json", json.dumps(records))
    message = refused(tmp_path)
    assert "b.jpg (metadata.json item 2): caption missing" in message and "item 3): caption empty" in message
    assert [row.caption for row in read_rows(tmp_path, allow_missing_captions=True)] == ["", "", ""]


# Metadata files


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize(
    "columns", [("file_name", "text"), ("image", "prompt"), ("video", "prompt"), ("path", "text"), ("bild", "satz")]
)
def test_every_format_and_naming_in_file_order(tmp_path, suffix, columns):
    folder_of(tmp_path, {"b.jpg": None, "sub/a #1 é.png": None})
    write_table(tmp_path / f"metadata{suffix}", columns, [["b.jpg", "two, or\nmore"], ["sub/a #1 é.png", "one"]])
    flags = {"columns": {"media": "bild", "caption": "satz"}} if columns[0] == "bild" else {}
    rows = read_rows(tmp_path, **flags)
    assert pairs(rows) == [("b.jpg", "two, or\nmore"), ("sub/a #1 é.png", "one")]
    assert [row.content for row in rows] == [tmp_path / "b.jpg", tmp_path / "sub" / "a #1 é.png"]
    places = {".csv": ("line 2", "line 4"), ".tsv": ("line 2", "line 4"), ".jsonl": ("line 1", "line 2")}
    default = ("item 1", "item 2") if suffix == ".json" else ("row 1", "row 2")
    assert [row.origin for row in rows] == [f"metadata{suffix} {place}" for place in places.get(suffix, default)]


def test_metadata_in_a_sub_folder_is_relative_to_itself_and_must_be_given(tmp_path):
    folder_of(tmp_path, {"train/a.jpg": None})
    write(tmp_path / "train" / "metadata.csv", "file_name,text\na.jpg,one\n")
    assert "has train/metadata.csv: give one by --dataset_metadata" in refused(tmp_path)
    assert pairs(read_rows(tmp_path, dataset_metadata="train/metadata.csv")) == [("train/a.jpg", "one")]


def test_several_metadata_files_are_refused_unless_one_is_picked(tmp_path):
    folder_of(tmp_path, {"a.jpg": None})
    write(tmp_path / "metadata.csv", "file_name,text\na.jpg,one\n")
    write(tmp_path / "metadata.jsonl", '{"file_name": "a.jpg", "text": "two"}')
    message = refused(tmp_path)
    assert "metadata.csv, metadata.jsonl" in message and "--dataset_metadata" in message
    rows = read_rows(tmp_path, dataset_metadata=str(tmp_path / "metadata.jsonl"))
    assert pairs(rows) == pairs(read_rows(tmp_path, dataset_metadata="metadata.jsonl")) == [("a.jpg", "two")]


def test_given_metadata_must_exist_and_be_a_table(tmp_path):
    folder_of(tmp_path, {"a.jpg": "one"})
    message = refused(tmp_path, dataset_metadata="captions.csv")
    assert "--dataset_metadata captions.csv" in message and str(tmp_path / "captions.csv") in message
    message = refused(tmp_path, dataset_metadata=tmp_path / "a.txt")
    assert "a.txt must be one file that ends in .csv, .tsv, .jsonl, .json, .parquet" in message


def test_metadata_outside_the_dataset_may_name_files_of_both_folders(tmp_path):
    folder_of(tmp_path, {"dataset/a.jpg": None, "tables/b.jpg": None})
    write(tmp_path / "tables" / "t.csv", "file_name,text\na.jpg,one\nb.jpg,two\n../dataset/c.jpg,three\n")
    write(tmp_path / "dataset" / "c.jpg")
    rows = read_rows(tmp_path / "dataset", dataset_metadata=tmp_path / "tables" / "t.csv")
    assert pairs(rows) == [("a.jpg", "one"), ("../tables/b.jpg", "two"), ("c.jpg", "three")]


@pytest.mark.parametrize("name", ["metadata.json1", "metadata.jsnol"])
def test_misnamed_metadata_is_not_ignored(tmp_path, name):
    folder_of(tmp_path, {"a.jpg": None})
    write(tmp_path / name, "{}")
    message = refused(tmp_path, allow_missing_captions=True)
    assert f"has {name}: " in message and "rename" in message and "metadata.jsonl" in message


def test_other_tables_are_pointed_at(tmp_path, caplog):
    folder_of(tmp_path, {"a.jpg": None})
    write(tmp_path / "captions.csv", "file_name,text\na.jpg,one\n")
    refused(tmp_path)
    assert "1 tables are not read; --dataset_metadata names one that is to be:\n  captions.csv" in caplog.text


def test_names_of_other_systems(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    nfc, nfd = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    folder_of(
        tmp_path,
        dict.fromkeys(
            ["sub/img 1.png", f"sub/{nfc}1.png", f"sub/{nfd}2.png", f"{nfd}/{nfc}.png", "a#b.png", "ä\\.png"]
        ),
    )
    names = ["sub\\img 1.png", f"sub/{nfd}1.png", f"sub\\{nfc}2.png", f"{nfd}\\{nfc}.png", "./a#b.png", "ä\\.png"]
    write_table(tmp_path / "metadata.csv", ["file_name", "text"], [[name, "x"] for name in names])
    ids = ["sub/img 1.png", f"sub/{nfc}1.png", f"sub/{nfd}2.png", f"{nfd}/{nfc}.png", "a#b.png", "ä\\.png"]
    assert [row.id for row in read_rows(tmp_path)] == ids
    assert "4 files found under another spelling" in caplog.text


@pytest.mark.parametrize("name", ["images/a.jpg", "train/images/a.jpg", "train\\images\\a.jpg", "a.jpg", "./a.jpg"])
def test_folders_repeated_in_front_of_names(tmp_path, name):
    folder_of(tmp_path, {"train/images/a.jpg": None})
    write(tmp_path / "train" / "images" / "metadata.csv", f"file_name,text\n{name},one\n")
    table = "train/images/metadata.csv"
    assert pairs(read_rows(tmp_path, dataset_metadata=table)) == [("train/images/a.jpg", "one")]
    assert pairs(read_rows(tmp_path / "train" / "images")) == [("a.jpg", "one")]


def test_the_name_as_written_wins_over_other_readings(tmp_path):
    folder_of(tmp_path, {"images/a.jpg": None, "images/images/a.jpg": None, "a.jpg": None})
    write(tmp_path / "images" / "metadata.csv", "file_name,text\nimages/a.jpg,one\na.jpg,two\n")
    rows = read_rows(tmp_path, dataset_metadata="images/metadata.csv")
    assert pairs(rows) == [("images/images/a.jpg", "one"), ("images/a.jpg", "two")]


def test_absolute_paths(tmp_path):
    folder_of(tmp_path, {"dataset/a.jpg": None, "elsewhere/b.jpg": None})
    rows = [[str(tmp_path / "dataset" / "a.jpg"), "one"], [str(tmp_path / "elsewhere" / "b.jpg"), "two"]]
    write_table(tmp_path / "dataset" / "metadata.csv", ["file_name", "text"], rows)
    assert pairs(read_rows(tmp_path / "dataset")) == [("a.jpg", "one"), ("../elsewhere/b.jpg", "two")]


@pytest.mark.parametrize("name", ["../out.jpg", "..\\out.jpg", "sub/../../out.jpg", "./../dataset2/x.jpg"])
def test_paths_out_of_the_dataset_are_refused(tmp_path, name):
    folder_of(tmp_path, {"dataset/a.jpg": None, "out.jpg": None, "dataset2/x.jpg": None})
    write(tmp_path / "dataset" / "metadata.csv", f"file_name,text\n{name},one\n")
    message = refused(tmp_path / "dataset")
    assert "metadata.csv line 2" in message and repr(name) in message and "leads out of the dataset" in message


def test_missing_files_are_all_counted(tmp_path):
    folder_of(tmp_path, {"a.jpg": None})
    names = ["a.jpg", *(f"x{n}.jpg" for n in range(7)), "", ".", "C:\\x.jpg", "bad?"]
    rows = [{"file_name": name, "text": "x"} for name in names] + [{"text": "x"}, {"file_name": 5, "text": "x"}]
    rows += [{"file_name": "nul\0.jpg", "text": "x"}, {"file_name": "\ud800.jpg", "text": "x"}]
    rows += [{"file_name": "n" * 5000, "text": "x"}]
    write(tmp_path / "metadata.json", json.dumps(rows))
    message = refused(tmp_path)
    assert "16 of 17 images cannot be used" in message and len(message.splitlines()) == 18
    assert "x0.jpg (metadata.json item 2): 'x0.jpg' names no file" in message


def test_images_without_a_row_are_counted(tmp_path, caplog):
    folder_of(tmp_path, {f"{n}.jpg": None for n in range(8)} | {"sub/x.png": None})
    write(tmp_path / "metadata.csv", "file_name,text\n0.jpg,one\n")
    assert len(read_rows(tmp_path)) == 1
    assert "metadata.csv: 8 files have no row:\n  1.jpg\n" in caplog.text and "and 3 more" in caplog.text


def test_rows_that_repeat_a_file_are_refused(tmp_path):
    folder_of(tmp_path, {"a.jpg": None, "b.jpg": None})
    write(tmp_path / "metadata.csv", "file_name,text\na.jpg,one\nb.jpg,two\n./a.jpg,three\n")
    assert "a.jpg (metadata.csv line 4): it repeats the file of metadata.csv line 2" in refused(tmp_path)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".txt"])
def test_a_caption_has_no_largest_length(tmp_path, suffix):
    # Python's csv module refuses fields of more than 131072 characters, a limit of the whole process.
    before = csv.field_size_limit(131072)
    caption = "日本語, " * 30000 + "end"
    try:
        if suffix == ".txt":
            folder_of(tmp_path, {"a.png": caption})
        else:
            write(tmp_path / "a.png")
            write_table(tmp_path / f"metadata{suffix}", ["file_name", "text"], [["a.png", caption]])
        assert pairs(read_rows(tmp_path)) == [("a.png", caption)]
    finally:
        csv.field_size_limit(before)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            "file_name,text\na.jpg,one\na.jpg,two,three\na.jpg\n",
            "line 3: 3 fields\n  metadata.csv line 4: 1 fields",
        ),
        ('file_name,text\na.jpg,"two\nlines"\na.jpg,x,y\n', "line 4: 3 fields"),
        ('file_name,text\n\na.jpg,"say "hi""\n', "metadata.csv line 3 cannot be read"),
        ('file_name,text\na.jpg,one\na.jpg,"open\n\n', "metadata.csv line 3 cannot be read"),
        ("file_name,text,text\na.jpg,x,y\n", "several columns of one name: 'file_name', 'text', 'text'"),
        ("", "metadata.csv is empty"),
        ("\n\n", "metadata.csv is empty"),
        ("file_name,text\n", "has no items"),
    ],
)
def test_bad_csv_is_refused_by_line(tmp_path, table, expected):
    folder_of(tmp_path, {"a.jpg": None})
    write(tmp_path / "metadata.csv", table)
    assert expected in refused(tmp_path)


def test_blank_rows_are_no_rows(tmp_path):
    folder_of(tmp_path, {"a.jpg": None})
    write(tmp_path / "metadata.csv", "\r\nfile_name,text\r\na.jpg,one\r\n\r\n,\r\n")
    assert pairs(read_rows(tmp_path)) == [("a.jpg", "one")]
    (tmp_path / "metadata.csv").unlink()
    write(tmp_path / "metadata.jsonl", '\r\n{"file_name": "a.jpg", "text": "o\u2028ne"}\r\n\r\n  \r\n')
    assert pairs(read_rows(tmp_path)) == [("a.jpg", "o\u2028ne")]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("metadata.jsonl", '{"file_name": "a.jpg"}\n{"file_name\nx\n', "metadata.jsonl line 2 is not JSON: "),
        ("metadata.jsonl", '["a"]\n5\n', "metadata.jsonl line 1 is not an object: ['a']"),
        ("metadata.jsonl", "[" * 100_000, "line 1"),
        ("metadata.json", '{"file_name": "a.jpg"}', "must hold a list of objects"),
        ("metadata.json", "[{]", "metadata.json is not JSON: "),
        ("metadata.json", '["a.jpg"]', "metadata.json item 1 is not an object: 'a.jpg'"),
        ("metadata.json", "[]", "no media column"),
        ("metadata.parquet", "PAR1", "metadata.parquet cannot be read as parquet"),
    ],
)
def test_bad_json_and_parquet_are_refused(tmp_path, name, text, expected):
    folder_of(tmp_path, {"a.jpg": None})
    write(tmp_path / name, text)
    assert expected in refused(tmp_path)


# Columns


@pytest.mark.parametrize(
    ("columns", "flags", "expected"),
    [
        ("file_nmae,text", {}, ["no media columns", "Did you mean 'file_nmae'?", "--media_column", "'text'"]),
        ("File_Name,text", {}, ["no media columns", "Did you mean 'File_Name'?"]),
        ("file_name,txt", {}, ["no caption columns", "mean 'txt'", "--caption_column", "found: 'file_name', 'txt'"]),
        (
            "file_name,satz",
            {},
            ["no caption columns (text, prompt)", "--caption_column", "found: 'file_name', 'satz'"],
        ),
        ("file_name,image,text", {}, ["several media columns (file_name, image)", "--media_column"]),
        ("image,text,prompt", {}, ["several caption columns (text, prompt)", "--caption_column"]),
        ("image,text", {"columns": {"caption": "txet"}}, ["csv has no caption columns (txet)", "mean 'text'?"]),
        ("image,text", {"columns": {"media": "imgae"}}, ["no media columns (imgae)", "mean 'image'?"]),
        ("image,text", {"columns": {"media": "xyz"}}, ["--media_column. Columns found: 'image', 'text'."]),
        ("image,text", {"columns": {"caption": "image"}}, ["no caption columns (image)"]),
    ],
)
def test_columns_in_doubt_are_refused_with_the_flag_to_use(tmp_path, columns, flags, expected):
    folder_of(tmp_path, {"a.jpg": None})
    write(tmp_path / "metadata.csv", f"{columns}\n" + "a.jpg" + ",x" * columns.count(",") + "\n")
    message = refused(tmp_path, **flags)
    assert all(part in message for part in expected), message


def test_flags_decide_between_columns_and_the_rest_is_listed(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder_of(tmp_path, {"a.jpg": None, "b.jpg": None})
    write(tmp_path / "metadata.csv", "file_name,image,text,prompt,score\na.jpg,b.jpg,one,two,5\n")
    args = Namespace(dataset_path=str(tmp_path), dataset_metadata=None, dataset_repeat=1, datasets=None)
    args.media_column, args.caption_column, args.allow_missing_captions = "image", "prompt", False
    assert pairs(read_datasets(args)) == [("b.jpg", "two")]
    assert "columns not used: 'file_name', 'text', 'score'" in caplog.text


def test_a_table_of_names_only_needs_permission_and_no_misspelling(tmp_path):
    folder_of(tmp_path, {"a.jpg": None})
    write(tmp_path / "metadata.csv", "file_name,score\na.jpg,5\n")
    assert "no caption columns" in refused(tmp_path)
    assert pairs(read_rows(tmp_path, allow_missing_captions=True)) == [("a.jpg", "")]
    write(tmp_path / "metadata.csv", "file_name,txt\na.jpg,5\n")
    assert "mean 'txt'" in refused(tmp_path, allow_missing_captions=True)


# Where a dataset is


def test_zero_items_are_refused(tmp_path):
    assert str(tmp_path) in refused(tmp_path) and "no items" in refused(tmp_path)
    write(tmp_path / "a.txt", "a caption alone")
    assert "no items" in refused(tmp_path, allow_missing_captions=True)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "a/b/c", "photos/", "two words", "", "../x"])
def test_a_path_that_is_neither_folder_nor_hub_id_is_named(path):
    assert f"--dataset_path {path} is not there: " in refused(path)


def test_a_file_is_no_dataset(tmp_path):
    path = write(tmp_path / "metadata.csv", "file_name,text\n")
    assert str(path) in refused(path) and "--dataset_metadata" in refused(path)


def test_file_names_that_are_not_unicode_are_refused(tmp_path):
    folder_of(tmp_path, {"a.jpg": "one"})
    write(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jpg"))
    message = refused(tmp_path)
    assert "caf\\udce9.jpg" in message
    message.encode()


def test_unreadable_folders_are_named(tmp_path, monkeypatch):
    folder_of(tmp_path, {"a.jpg": "one", "sub/b.jpg": "two"})
    scandir = os.scandir

    def deny(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    # Not chmod, which does not keep root out.
    monkeypatch.setattr(os, "scandir", deny)
    assert f"{tmp_path / 'sub'} cannot be read: Permission denied" in refused(tmp_path)


# Hugging Face datasets


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def image_dataset(folder, captions, column="text"):
    """Returns a dataset of grey images that embeds a PNG for each caption, and these PNGs."""
    files = []
    for n, _ in enumerate(captions):
        files.append(folder / f"p{n}.png")
        folder.mkdir(exist_ok=True)
        Image.new("L", (8, 8), n).save(files[-1])
    data = {"image": [{"bytes": file.read_bytes(), "path": file.name} for file in files], column: captions}
    features = datasets.Features({"image": datasets.Image(), column: datasets.Value("string")})
    return datasets.Dataset.from_dict(data, features=features), [file.read_bytes() for file in files]


@pytest.mark.parametrize("column", ["text", "caption", "prompt"])
def test_saved_dataset(tmp_path, column):
    data, images = image_dataset(tmp_path / "source", ["NA", "two"], column)
    data.save_to_disk(tmp_path / "saved")
    rows = read_rows(tmp_path / "saved")
    assert [(row.name, row.caption, row.content) for row in rows] == [
        ("train/0", "NA", images[0]),
        ("train/1", "two", images[1]),
    ]


def test_saved_dataset_of_several_splits(tmp_path):
    data, images = image_dataset(tmp_path / "source", ["one", "two", "three"])
    splits = {"test": data.select([0]), "train": data.select([1, 2])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "with_train")
    assert [(row.id, row.content) for row in read_rows(tmp_path / "with_train")] == [
        ("train/0", images[1]),
        ("train/1", images[2]),
    ]
    datasets.DatasetDict({"a": splits["test"], "b": splits["train"]}).save_to_disk(tmp_path / "without")
    assert "Splits found: a, b" in refused(tmp_path / "without")
    datasets.DatasetDict({"a": splits["test"]}).save_to_disk(tmp_path / "single")
    assert [row.id for row in read_rows(tmp_path / "single")] == ["a/0"]


def test_hub_layout_folder(tmp_path):
    data, images = image_dataset(tmp_path / "source", ["one", "two"])
    (tmp_path / "repo" / "data").mkdir(parents=True)
    data.to_parquet(tmp_path / "repo" / "data" / "train-00000-of-00001.parquet")
    data.select([0]).to_parquet(tmp_path / "repo" / "data" / "test-00000-of-00001.parquet")
    write(tmp_path / "repo" / "README.md", "# Photographs\n")
    write(tmp_path / "repo" / "assets" / "example.png", images[0])
    rows = read_rows(tmp_path / "repo")
    assert [(row.id, row.caption, row.content) for row in rows] == [
        ("train/0", "one", images[0]),
        ("train/1", "two", images[1]),
    ]


def test_folder_of_one_parquet_file(tmp_path):
    data, images = image_dataset(tmp_path / "source", ["one"])
    (tmp_path / "repo").mkdir()
    data.to_parquet(tmp_path / "repo" / "photographs.parquet")
    assert [(row.id, row.content) for row in read_rows(tmp_path / "repo")] == [("train/0", images[0])]


def test_saved_dataset_that_refers_to_files(tmp_path):
    folder_of(tmp_path, {"a.jpg": None})
    data = datasets.Dataset.from_dict({"image": [str(tmp_path / "a.jpg")], "text": ["one"]})
    data.save_to_disk(tmp_path / "saved")
    assert [row.content for row in read_rows(tmp_path / "saved")] == [tmp_path / "a.jpg"]
    (tmp_path / "a.jpg").unlink()
    assert f"train/0: '{tmp_path / 'a.jpg'}' names no file" in refused(tmp_path / "saved")


def test_problems_of_hugging_face_datasets(tmp_path):
    data, _ = image_dataset(tmp_path / "source", ["one", None, ""])
    data.save_to_disk(tmp_path / "saved")
    message = refused(tmp_path / "saved")
    assert "train/1: caption missing" in message and "2 of 3 images" in message
    data.rename_column("image", "photo").save_to_disk(tmp_path / "photo")
    message = refused(tmp_path / "photo")
    assert "no media columns (image)" in message and "'photo', 'text'" in message and "--media_column" in message
    assert len(read_rows(tmp_path / "photo", columns={"media": "photo"}, allow_missing_captions=True)) == 3
    data.add_column("caption", ["a", "b", "c"]).save_to_disk(tmp_path / "both")
    assert "several caption columns (text, caption)" in refused(tmp_path / "both")
    data.add_column("score", [1, 2, 3]).save_to_disk(tmp_path / "score")
    assert "column 'score' holds" in refused(tmp_path / "score", columns={"media": "score"})
    assert "is not text" in refused(tmp_path / "score", columns={"caption": "score"})
    assert "x.csv must be one file" in refused(tmp_path / "saved", dataset_metadata="x.csv")
    empty = datasets.Dataset.from_dict({"image": [None], "text": ["one"]}, features=data.features)
    empty.save_to_disk(tmp_path / "empty")
    assert "train/0: image is empty" in refused(tmp_path / "empty")


def test_damaged_saved_dataset_is_refused(tmp_path):
    write(tmp_path / "dataset_info.json", "{}")
    write(tmp_path / "state.json", "{}")
    assert f"{tmp_path} cannot be loaded as a Hugging Face dataset" in refused(tmp_path)


@pytest.mark.parametrize("name", ["a[b]", "a*b", "[x]/a?b c#%20", "a::b", "$HOME"])
def test_folders_that_the_library_would_look_for_elsewhere_are_refused(tmp_path, name):
    """It takes these paths for patterns, archives in archives, and variables."""
    folder = tmp_path / name
    folder.mkdir(parents=True)
    with open(folder / "a.parquet", "wb") as file:
        image_dataset(tmp_path, ["one"])[0].to_parquet(file)
    assert "the path of a Hugging Face dataset must have none of ('::', '$', '*', '?', '[')" in refused(folder)
    # Which holds for datasets of that library only, and for most not where they are loaded without a search.
    if "::" not in name:
        image_dataset(tmp_path, ["saved"])[0].save_to_disk(str(tmp_path / "saved"))
        (tmp_path / "saved").rename(folder / "saved")
        assert [row.caption for row in read_rows(folder / "saved")] == ["saved"]
        shutil.rmtree(folder / "saved")
    (folder / "a.parquet").unlink()
    assert read_rows(folder_of(folder, {"a.jpg": "one"}))[0].caption == "one"


def test_hub_id(tmp_path, monkeypatch):
    data, images = image_dataset(tmp_path / "source", ["one"])
    asked = []

    def load_dataset(name):
        asked.append(name)
        return datasets.DatasetDict({"train": data})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [(row.id, row.content) for row in read_rows("owner/photographs")] == [("train/0", images[0])]
    read_rows("photographs")
    assert asked == ["owner/photographs", "photographs"]
    assert "--dataset_metadata" in refused("owner/photographs", dataset_metadata="metadata.csv")


def test_hub_id_that_cannot_be_loaded_may_be_a_mistyped_folder(tmp_path, monkeypatch):
    def load_dataset(name):
        raise ConnectionError(f"no way to {name}\nand more")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = refused("data/photos")
    assert "data/photos is not a folder here" in message and "no way to data/photos" in message


def test_a_dataset_that_is_neither_a_folder_nor_to_be_had_from_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hugging_face, "why_not_on_hub", lambda name, kind: f"{kind} {name} is nowhere")
    monkeypatch.setattr(datasets, "load_dataset", None)  # which would try for half a minute
    assert refused("data/photos") == "--dataset_path data/photos: dataset data/photos is nowhere."


# Clips


MEDIA_SUFFIXES = (*IMAGE_SUFFIXES, ".mp4", ".webm")


def read_clips(path, **kwargs):
    return read_rows(path, media_suffixes=MEDIA_SUFFIXES, **kwargs)


def test_other_suffixes_are_items_when_they_are_asked_for(tmp_path):
    folder_of(tmp_path, {"a.MP4": "one", "sub/é.webm": "two", "b.png": "three"})
    write(tmp_path / "c.mkv")
    assert pairs(read_clips(tmp_path)) == [("a.MP4", "one"), ("b.png", "three"), ("sub/é.webm", "two")]
    # A clip with a text is meant to be an item also where images are trained, and is refused there once it is read.
    assert pairs(read_rows(tmp_path)) == [("a.MP4", "one"), ("b.png", "three"), ("sub/é.webm", "two")]
    for name in ("a.txt", "b.png", "sub/é.txt"):
        (tmp_path / name).unlink()
    assert "no items" in refused(tmp_path)
    assert "nor files that end in .avi, .mov" in refused(tmp_path, media_suffixes=(".avi", ".mov"))


def test_a_clip_and_its_text_in_different_normal_forms_belong_together(tmp_path):
    write(tmp_path / unicodedata.normalize("NFC", "é.mp4"))
    write(tmp_path / unicodedata.normalize("NFD", "é.txt"), "one")
    write(tmp_path / unicodedata.normalize("NFD", "frames é") / "0.png")
    write(tmp_path / unicodedata.normalize("NFC", "frames é.txt"), "two")
    assert [row.caption for row in read_clips(tmp_path)] == ["two", "one"]


def test_a_folder_of_images_with_a_text_of_its_name_is_one_item(tmp_path):
    for name in ("clip.v2/0.png", "clip.v2/1.jpg", "sub/deep/0.png", "loose/0.png", "mixed/0.png", "mixed/a.mp4"):
        write(tmp_path / name)
    for name in ("clip.v2", "sub/deep", "sub", "loose/0", "mixed", "mixed/0", "mixed/a"):
        write(tmp_path / f"{name}.txt", f"caption of {name}")
    rows = read_clips(tmp_path)
    assert pairs(rows) == [
        ("clip.v2", "caption of clip.v2"),
        ("loose/0.png", "caption of loose/0"),
        ("mixed/0.png", "caption of mixed/0"),
        ("mixed/a.mp4", "caption of mixed/a"),
        ("sub/deep", "caption of sub/deep"),
    ]
    assert [row.content for row in rows] == [tmp_path / row.id for row in rows]
    # Without being asked, a folder is a place and its images are the items.
    rows = read_rows(tmp_path, allow_missing_captions=True)
    assert [row.id for row in rows] == [
        *("clip.v2/0.png", "clip.v2/1.jpg", "loose/0.png", "mixed/0.png", "mixed/a.mp4", "sub/deep/0.png")
    ]


def test_a_text_that_belongs_to_a_folder_and_a_clip_is_refused(tmp_path):
    folder_of(tmp_path, {"a.mp4": "one", "a/0.png": None})
    message = refused(tmp_path, media_suffixes=MEDIA_SUFFIXES)
    assert "a: several files or texts have one name: a, a.mp4, a.txt" in message


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_rows_name_clips_and_folders(tmp_path, suffix, caplog):
    caplog.set_level(logging.INFO)
    for name in ("a.mp4", "sub/é 1.webm", "sub/frames/0.png", "sub/frames/1.png", "b.png", "more.mp4", "rest/0.png"):
        write(tmp_path / name)
    rows = [["a.mp4", "one"], ["sub\\é 1.webm", "two"], ["sub\\frames", "three"], ["b.png", "four"]]
    write_table(tmp_path / f"metadata{suffix}", ["video", "prompt"], rows)
    rows = read_clips(tmp_path)
    assert pairs(rows) == [("a.mp4", "one"), ("sub/é 1.webm", "two"), ("sub/frames", "three"), ("b.png", "four")]
    assert [row.content for row in rows] == [tmp_path / row.id for row in rows]
    assert f"metadata{suffix}: 2 files have no row:\n  more.mp4\n  rest/0.png" in caplog.text
    assert "2 files found under another spelling" in caplog.text


def test_rows_that_name_no_folder_of_frames(tmp_path):
    for name in ("dataset/a/0.png", "out/0.png"):
        write(tmp_path / name)
    names = ["", ".", "a/..", "..", "../out", "/", str(tmp_path), "a/0", "nul\0", "\ud800", "n" * 5000]
    write(tmp_path / "dataset" / "metadata.json", json.dumps([{"file_name": name, "text": "x"} for name in names]))
    with pytest.raises(RefusedError, match="11 of 11 images cannot be used"):
        read_clips(tmp_path / "dataset")
    write_table(tmp_path / "dataset" / "metadata.json", ["file_name", "text"], [["./a/", "x"]])
    assert pairs(read_clips(tmp_path / "dataset")) == [("a", "x")]
    write_table(tmp_path / "dataset" / "metadata.json", ["file_name", "text"], [[str(tmp_path / "out"), "x"]])
    assert pairs(read_clips(tmp_path / "dataset")) == [("../out", "x")]


@pytest.mark.parametrize("embedded", [False, True])
def test_hugging_face_datasets_of_clips(tmp_path, embedded):
    clip = write(tmp_path / "a.mp4", b"what a clip holds")
    column = [{"bytes": clip.read_bytes(), "path": "a.mp4"} if embedded else {"bytes": None, "path": str(clip)}]
    features = datasets.Features({"video": datasets.Video(decode=False), "text": datasets.Value("string")})
    data = datasets.Dataset.from_dict({"video": column, "text": ["one"]}, features=features)
    data.save_to_disk(tmp_path / "saved")
    (tmp_path / "shards").mkdir()
    data.to_parquet(tmp_path / "shards" / "train-00000-of-00001.parquet")
    for name in ("saved", "shards"):
        # save_to_disk embeds the files that the dataset refers to, to_parquet does not.
        media = b"what a clip holds" if embedded or name == "saved" else clip
        rows = [(row.id, row.caption, row.content) for row in read_clips(tmp_path / name)]
        assert rows == [("train/0", "one", media)]


def test_hugging_face_columns_of_plain_paths_and_of_images(tmp_path):
    clip = write(tmp_path / "a.mp4")
    datasets.Dataset.from_dict({"video": [str(clip)], "text": ["one"]}).save_to_disk(tmp_path / "paths")
    assert [row.content for row in read_clips(tmp_path / "paths")] == [clip]
    data, images = image_dataset(tmp_path / "source", ["one"])
    data.save_to_disk(tmp_path / "images")
    assert [row.content for row in read_clips(tmp_path / "images")] == images
    data.add_column("video", [str(clip)]).save_to_disk(tmp_path / "both")
    with pytest.raises(RefusedError, match=r"several media columns \(image, video\): name it by --media_column"):
        read_clips(tmp_path / "both")
    assert [row.content for row in read_clips(tmp_path / "both", columns={"media": "video"})] == [clip]
    datasets.Dataset.from_dict({"video": [1.5], "text": ["one"]}).save_to_disk(tmp_path / "numbers")
    with pytest.raises(RefusedError, match="column 'video' holds .*, not images or clips"):
        read_clips(tmp_path / "numbers")


# Any text


# Cs are halves of surrogate pairs, which no encoding writes.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
NAME = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(NAME, TEXT, min_size=1, max_size=3), st.sampled_from([".csv", ".tsv", ".jsonl", ".txt"]))
def test_any_text_comes_back_or_is_refused(captions, suffix):
    """Whatever the csv and json modules write comes back, or a RefusedError says why; nothing else is raised."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stem, caption in captions.items():
            write(folder / f"{stem}.png")
            if suffix == ".txt":
                write(folder / f"{stem}.txt", caption)
        if suffix != ".txt":
            rows = [[f"{stem}.png", caption] for stem, caption in captions.items()]
            write_table(folder / f"metadata{suffix}", ["file_name", "text"], rows)
        try:
            rows = read_rows(folder)
        except RefusedError as error:
            assert not plain(captions), error
            return
        expected = {f"{stem}.png": cleaned(text) for stem, text in captions.items()}
        if suffix == ".txt":
            expected = {name: text for name, text in expected.items() if not name.startswith(".")}
        assert dict(pairs(rows)) == expected


def cleaned(text):
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    while text != (text := text.strip().strip("\ufeff")):
        pass
    return text


def plain(captions):
    """Tells whether nothing about these names and captions can be a reason to refuse them."""
    return all(
        "\0" not in stem + text and cleaned(text) and not stem.startswith((".", "metadata"))
        for stem, text in captions.items()
    ) and len({unicodedata.normalize("NFC", stem) for stem in captions}) == len(captions)


# What would be trained without being meant


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_key_that_stands_twice_is_refused(tmp_path, suffix):
    folder_of(tmp_path, {"a.jpg": None})
    record = '{"file_name": "a.jpg", "text": "first", "text": "second"}'
    write(tmp_path / f"metadata{suffix}", record if suffix == ".jsonl" else f"[{record}]")
    assert "the key 'text' occurs twice" in refused(tmp_path)


@pytest.mark.parametrize(
    ("path", "repeat", "said"),
    [("", 1, ["10_a cat"]), ("10_a cat", 1, ["10_a cat"]), ("10_a cat", 10, []), ("", 10, ["2_dog"])],
)
def test_repeats_in_names_of_folders_are_not_taken_and_logged(tmp_path, caplog, path, repeat, said):
    folder_of(tmp_path, {"10_a cat/a.jpg": "one", "2_dog/a.jpg": "two", "2024_trip/a.jpg": "three", "b.jpg": "four"})
    flags = {"dataset_path": str(tmp_path / path), "dataset_metadata": None, "media_column": None}
    args = Namespace(**flags, caption_column=None, dataset_repeat=repeat, datasets=None, allow_missing_captions=False)
    rows = read_datasets(args)
    assert {row.repeat for row in rows} == {repeat}
    assert ("as kohya's scripts want them, which are not used" in caplog.text) == bool(said)
    for name in said:
        assert f"\n  {name}" in caplog.text


def of_several(*paths, **settings):
    keys = dict.fromkeys(("dataset_metadata", "media_column", "caption_column"))
    several = [keys | {"dataset_path": str(path), "dataset_repeat": 1} | settings for path in paths]
    return Namespace(datasets=several, allow_missing_captions=False)


def test_a_dataset_in_another_one_doubles_items(tmp_path):
    folder_of(tmp_path, {"all/a.png": "one", "all/cats/b.png": "two", "other/c.png": "three"})
    os.symlink(tmp_path / "all" / "cats", tmp_path / "cats")
    assert len(read_datasets(of_several(tmp_path / "all", tmp_path / "other"))) == 3
    for inner in ("all/cats", "cats", "other/../all/cats"):
        with pytest.raises(RefusedError, match="1 items are in two datasets.*\n  all/cats/b.png .*and cats/b.png "):
            read_datasets(of_several(tmp_path / "all", tmp_path / inner))


def test_one_image_may_have_two_captions(tmp_path):
    folder_of(tmp_path, {"all/cats/b.png": "two"})
    write(tmp_path / "all" / "cats" / "metadata.jsonl", '{"file_name": "b.png", "text": "deux"}')
    write(tmp_path / "all" / "metadata.jsonl", '{"file_name": "cats/b.png", "text": "zwei"}')
    rows = read_datasets(of_several(tmp_path / "all", tmp_path / "all" / "cats"))
    assert pairs(rows) == [("all/cats/b.png", "zwei"), ("cats/b.png", "deux")]
    assert len(read_datasets(of_several(tmp_path / "all", tmp_path / "all"))) == 2  # which is meant


def test_what_a_run_has_left_is_no_data(tmp_path, caplog):
    folder_of(tmp_path, {"a.png": "one", "run/memory.png": None, "run/validation/step-1/grid.png": None})
    assert len(metadata.read_rows(tmp_path)) == 3
    for name in ("run.json", "dataset.jsonl"):
        write(tmp_path / "run" / name, "{}")
    assert pairs(read_rows(tmp_path)) == [("a.png", "one")]
    assert "1 folders are left out, since they hold the results of a run" in caplog.text


def test_a_column_that_is_named_and_not_there_is_refused_also_where_captions_may_be_missing(tmp_path):
    folder_of(tmp_path, {"a.jpg": None})
    write(tmp_path / "metadata.csv", "file_name,text\na.jpg,one\n")
    for what in ("media", "caption"):
        with pytest.raises(RefusedError, match=f"no {what} columns .zzz.: name it by --{what}_column"):
            read_rows(tmp_path, columns={what: "zzz"}, allow_missing_captions=True)


def test_a_row_has_one_target_and_its_name_is_no_list(tmp_path):
    folder_of(tmp_path, {"a.jpg": None, "[1].jpg": None, "[1]/1.jpg": None})
    rows = [{"file_name": name, "text": "x"} for name in ("", None, ["a.jpg", "b.jpg"], "[1].jpg", "[1]")]
    write(tmp_path / "metadata.json", json.dumps(rows))
    found = metadata.read_rows(tmp_path)
    assert [row.problem for row in found[:2]] == ["file_name is empty"] * 2 and found[0].id != found[1].id
    assert found[2].problem == "file_name names 2 files, and an item has one"
    assert [(row.id, row.problem) for row in found[3:]] == [("[1].jpg", None), ("[1]", None)]


def test_a_file_of_the_system_does_not_make_a_folder_a_saved_dataset(tmp_path):
    folder_of(tmp_path, {"a.jpg": "one"})
    write(tmp_path / "state.json", "{}")
    assert pairs(read_rows(tmp_path)) == [("a.jpg", "one")]


def test_a_folder_with_a_folder_in_it_is_no_clip(tmp_path):
    folder_of(tmp_path, {"c/1.png": None, "c/2.png": None, "c/sub/3.png": "three"})
    write(tmp_path / "c.txt", "a clip?")
    rows = metadata.read_rows(tmp_path, media_suffixes=(*metadata.VIDEO_SUFFIXES, *IMAGE_SUFFIXES))
    assert [(row.id, row.problem) for row in rows] == [
        ("c/1.png", "caption missing"),
        ("c/2.png", "caption missing"),
        ("c/sub/3.png", None),
    ]


def test_an_image_model_takes_the_images_of_a_dataset_that_has_clips_too(tmp_path):
    data, _ = image_dataset(tmp_path / "source", ["one"])
    data.add_column("video", ["a.mp4"]).save_to_disk(tmp_path / "both")
    (row,) = metadata.read_rows(tmp_path / "both")
    assert row.caption == "one" and row.problem is None
    suffixes = (*metadata.VIDEO_SUFFIXES, *IMAGE_SUFFIXES)
    with pytest.raises(RefusedError, match="several media columns .image, video."):
        metadata.read_rows(tmp_path / "both", media_suffixes=suffixes)


def test_what_looks_like_an_image_and_is_not_read_is_a_warning(tmp_path, caplog):
    folder_of(tmp_path, {"a.jpg": "one", "b.heic": None, "notes.md": None})
    caplog.set_level(logging.INFO)
    read_rows(tmp_path)
    levels = {name: r.levelname for r in caplog.records for name in ("b.heic", "notes.md") if name in r.getMessage()}
    assert levels == {"b.heic": "WARNING", "notes.md": "INFO"}
