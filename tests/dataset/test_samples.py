"""Samples of several files and several text tensors: a made-up family of references, pooled embeddings and masks."""

import json

import datasets
import numpy as np
import pytest
from PIL import Image

from dataset.metadata import describe_rows, read_rows
from runtime.errors import RefusedError


ROLES = {"references": True, "mask": False}


@pytest.fixture
def folder(tmp_path):
    """Three targets with one, two and three references, one of them with a mask."""
    for n in range(3):
        for name, size in (("target", (64, 48)), ("one", (40, 40)), ("two", (48, 32))):
            Image.new("RGB", size, (20 * n, 80, 10)).save(tmp_path / f"{name}{n}.png")
    return tmp_path


def write_table(folder, *rows):
    """Write metadata.jsonl: of each row the number of its target, its references, and further columns."""
    lines = [
        {"image": f"target{n}.png", "prompt": f"caption {n}", "edit_image": references} | further
        for n, references, further in rows
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))


def names(row):
    return {role: [path.name for path in files] for role, files in row.media.items()}


def test_rows_have_files_by_role(folder, caplog):
    caplog.set_level("INFO")
    write_table(
        folder, (0, "one0.png", {}), (1, ["one1.png", "two1.png"], {"mask": "two0.png", "layers": ["one0.png"]})
    )
    rows = read_rows(folder, roles=ROLES)
    assert [names(row) for row in rows] == [
        {"target": ["target0.png"], "references": ["one0.png"]},
        {"target": ["target1.png"], "references": ["one1.png", "two1.png"], "mask": ["two0.png"]},
    ]
    assert [row.problem for row in rows] == [None, None]
    assert rows[1].contents("references") == [folder / "one1.png", folder / "two1.png"]
    assert rows[0].contents("mask") == [] and rows[0].content == folder / "target0.png"
    assert "columns not used: 'layers'" in caplog.text
    assert "3 files have no row" in caplog.text, "the references have"
    assert [names(row) for row in read_rows(folder)] == [{"target": ["target0.png"]}, {"target": ["target1.png"]}]


def test_a_table_of_texts_has_lists_in_json(folder):
    table = 'file_name,text,reference_images\ntarget0.png,a,one0.png\ntarget1.png,b,"[""one1.png"", ""two1.png""]"\n'
    (folder / "metadata.csv").write_text(table)
    rows = read_rows(folder, roles=ROLES)
    assert [names(row)["references"] for row in rows] == [["one0.png"], ["one1.png", "two1.png"]]


def test_a_file_of_a_role_that_is_missing_is_named(folder):
    write_table(folder, (0, "none.png", {}), (1, [], {}), (2, ["one2.png", 3], {"mask": ""}))
    problems = [row.problem for row in read_rows(folder, roles=ROLES)]
    assert problems == ["'none.png' names no file", "no references", "edit_image is 3, not a path"]


def test_a_dataset_without_the_column_is_refused(folder):
    (folder / "metadata.csv").write_text("file_name,text\ntarget0.png,a\n")
    with pytest.raises(
        RefusedError,
        match="has no references column .edit_image, reference_images.: this model",
    ):
        read_rows(folder, roles=ROLES)
    (folder / "metadata.csv").write_text("file_name,text,edit_image,reference_images\ntarget0.png,a,b,c\n")
    with pytest.raises(RefusedError, match="several references columns .edit_image, reference_images."):
        read_rows(folder, roles=ROLES)
    (folder / "metadata.csv").unlink()
    (folder / "target0.txt").write_text("a")
    with pytest.raises(RefusedError, match="has no metadata file, and this model needs one, with references"):
        read_rows(folder, roles=ROLES)


def test_references_inside_a_hugging_face_dataset(folder):
    content = {
        "image": [str(folder / f"target{n}.png") for n in range(3)],
        "text": ["a", "b", "c"],
        "edit_image": [[str(folder / f"{name}{n}.png") for name in ("one", "two")[:n]] for n in range(3)],
        "mask": [None, str(folder / "two0.png"), None],
    }
    images = datasets.Image()
    features = {"image": images, "text": datasets.Value("string"), "edit_image": datasets.List(images), "mask": images}
    made = datasets.Dataset.from_dict(content, features=datasets.Features(features))
    made.save_to_disk(folder / "saved")
    (folder / "saved" / "x").mkdir()
    rows = read_rows(folder / "saved", roles=ROLES)
    assert [row.problem for row in rows] == ["no references", None, None]
    assert [len(row.contents("references")) for row in rows] == [0, 1, 2]
    assert [len(row.contents("mask")) for row in rows] == [0, 1, 0]
    contents = [[*row.contents("references"), *row.contents("mask")] for row in rows]
    expected = [[], ["one1", "two0"], ["one2", "two2"]]
    for of_row, of_names in zip(contents, expected, strict=True):
        for data, name in zip(of_row, of_names, strict=True):
            (folder / "read.png").write_bytes(data)
            assert np.array_equal(Image.open(folder / "read.png"), Image.open(folder / f"{name}.png"))


def test_processes_compare_all_files_of_a_row(folder, tmp_path_factory):
    def described(*references):
        write_table(folder, (0, list(references), {}))
        return describe_rows(read_rows(folder, roles=ROLES))

    assert described("one0.png") == described("one0.png") != described("one0.png", "two0.png")
    assert described("one0.png") != described("two0.png")
    rows = read_rows(folder, roles=ROLES)
    elsewhere = tmp_path_factory.mktemp("mount") / "data"
    folder.rename(elsewhere)
    assert describe_rows(read_rows(elsewhere, roles=ROLES)) == describe_rows(rows), "another mount point is alike"
    elsewhere.rename(folder)
