"""scripts/make_metadata.py: its tables against the files that they describe, and back through `read_rows`."""

import csv
import json
import os
import re
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet
import pytest
from PIL import ExifTags, Image

from dataset import videos
from dataset.metadata import IMAGE_SUFFIXES, TABLE_SUFFIXES, VIDEO_SUFFIXES, read_rows
from runtime.errors import RefusedError
from scripts import make_metadata


SCRIPT = Path(make_metadata.__file__)
HEADER = "path,text,num_frames,height,width,aspect_ratio,resolution,fps"
CAPTIONS = {
    "a": "two lines\nand a third\r\nand an old one\rend",
    "b": 'she said "hello", twice; a\ttab',
    "c": "  two spaces before, one after ",
    "d": "007",
    "e": "=1+1",
    "f": "日本語 e\u0301 \u00e9 😀 a\u2028b",
    "g": "nan",
    "h": "'",
    "i": "an old\rline end",
}


def write_image(path, size=(30, 20), orientation=None, caption="an image"):
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    if orientation is not None:
        exif[ExifTags.Base.Orientation] = orientation
    Image.new("RGB", size, "red").save(path, exif=exif)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8", newline="")
    return path


def write_clip(path, num_frames=5, size=(64, 48), rate=8, caption="a clip"):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.thread_count = 1
        for k in range(num_frames):
            pixels = np.full((size[1], size[0], 3), 10 * k, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        container.mux(stream.encode())
    path.with_suffix(".txt").write_text(caption)
    return path


def make(*arguments):
    make_metadata.main([str(argument) for argument in arguments])


def refused(*arguments):
    """Returns the message with which a command line is refused."""
    with pytest.raises(RefusedError) as info:
        make(*arguments)
    return str(info.value)


def read_csv(path, **kwargs):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, **kwargs))


def read_back(folder, **kwargs):
    """Returns the captions by id as training on clips reads them."""
    rows = read_rows(folder, media_suffixes=(*VIDEO_SUFFIXES, *IMAGE_SUFFIXES), **kwargs)
    return {row.id: row.caption for row in rows}


def kept_of(table):
    """Returns the folder that keeps what was measured until the table is complete."""
    return table.with_name(f".{table.name}.partial")


@pytest.fixture
def measured(monkeypatch):
    """Names of all that was measured, in the order in which it was."""
    names, measure = [], videos.measure

    def count(media, name, fps):
        names.append(name)
        return measure(media, name, fps)

    monkeypatch.setattr(videos, "measure", count)
    return names


@pytest.fixture
def mixed(tmp_path):
    """Folder of two images, a clip and a folder of three frames."""
    folder = tmp_path / "mixed"
    write_image(folder / "sub" / "a b.png")
    write_image(folder / "turned.jpg", (30, 20), orientation=6)
    write_clip(folder / "clip.mp4")
    for k in range(3):
        write_image(folder / "frames" / f"{k}.png", (16, 40), caption=None)
    (folder / "frames.txt").write_text("frames")
    return folder


def test_the_columns_are_open_soras(mixed, capsys):
    make(mixed)
    table = mixed / "metadata.csv"
    assert table.read_text().split("\n")[0] == HEADER
    values = [[*row.values()] for row in read_csv(table)]
    assert values == [
        ["clip.mp4", "a clip", "5", "48", "64", "0.75", "3072", "8.0"],
        ["frames", "frames", "3", "40", "16", "2.5", "640", ""],
        ["sub/a b.png", "an image", "1", "20", "30", str(20 / 30), "600", ""],
        # Stored 30 wide and 20 high, and shown turned by a quarter.
        ["turned.jpg", "an image", "1", "30", "20", "1.5", "600", ""],
    ]
    assert capsys.readouterr().out == f"2 images and 2 clips in {table}\n"
    assert sorted(path.name for path in mixed.glob("*metadata*")) == ["metadata.csv"]
    assert not kept_of(table).exists()


def test_pandas_reads_numbers_and_leaves_the_rate_of_images_empty(mixed):
    pandas = pytest.importorskip("pandas")
    make(mixed)
    table = pandas.read_csv(mixed / "metadata.csv")
    assert ",".join(table.columns) == HEADER
    assert table["num_frames"].tolist() == [5, 3, 1, 1]
    assert table["fps"].isna().tolist() == [False, True, True, True]


def test_frames_are_counted_and_not_taken_from_the_container(tmp_path):
    # The header of this avi is made to promise one frame.
    clip = write_clip(tmp_path / "a.avi")
    data = clip.read_bytes()
    for chunk, offset in ((b"avih", 24), (b"strh", 40)):
        start = data.index(chunk) + offset
        data = data[:start] + (1).to_bytes(4, "little") + data[start + 4 :]
    clip.write_bytes(data)
    with av.open(str(clip)) as container:
        assert container.streams.video[0].frames == 1
    make(tmp_path)
    assert [row["num_frames"] for row in read_csv(tmp_path / "metadata.csv")] == ["5"]


def test_a_gif_of_one_frame_is_an_image(tmp_path, capsys):
    write_image(tmp_path / "still.gif")
    make(tmp_path)
    (row,) = read_csv(tmp_path / "metadata.csv")
    assert (row["num_frames"], row["fps"]) == ("1", "")
    assert capsys.readouterr().out.startswith("1 images and 0 clips")


@pytest.mark.parametrize("suffix", TABLE_SUFFIXES)
def test_every_format_gives_the_captions_back(tmp_path, suffix):
    for name, caption in CAPTIONS.items():
        write_image(tmp_path / f"{name}.png", caption=caption)
    write_image(tmp_path / "without.png", caption=None)
    expected = {f"{name}.png": re.sub("\r\n?", "\n", caption).strip() for name, caption in CAPTIONS.items()}
    expected["without.png"] = ""
    assert read_back(tmp_path, allow_missing_captions=True) == expected

    table = tmp_path / f"metadata{suffix}"
    make(tmp_path, "--output", table, "--allow_missing_captions")
    for path in tmp_path.glob("*.txt"):
        path.unlink()
    assert read_back(tmp_path, allow_missing_captions=True) == expected


def test_numbers_keep_their_types_where_the_format_has_types(mixed):
    for suffix in (".jsonl", ".json", ".parquet"):
        make(mixed, "--output", mixed / f"table{suffix}")
    lines = [json.loads(line) for line in (mixed / "table.jsonl").read_text().splitlines()]
    assert lines == json.loads((mixed / "table.json").read_text())
    table = pyarrow.parquet.read_table(mixed / "table.parquet")
    assert lines == table.to_pylist()
    assert [str(kind) for kind in table.schema.types] == [*make_metadata.COLUMNS.values()]
    assert [*lines[0].values()] == ["clip.mp4", "a clip", 5, 48, 64, 0.75, 3072, 8.0]
    assert lines[1]["fps"] is None
    assert all(",".join(line) == HEADER for line in lines)


def test_a_parquet_of_images_only_has_the_type_of_rates(tmp_path):
    write_image(tmp_path / "a.png")
    make(tmp_path, "--output", tmp_path / "metadata.parquet")
    assert str(pyarrow.parquet.read_schema(tmp_path / "metadata.parquet").field("fps").type) == "double"


@pytest.mark.parametrize("place, path", [("..", "mixed/clip.mp4"), ("sub", None), ("../elsewhere", None)])
def test_a_table_in_another_folder_finds_the_files(mixed, place, path):
    (mixed / place).mkdir(exist_ok=True)
    table = mixed / place / "table.csv"
    make(mixed, "--output", table)
    assert read_csv(table)[0]["path"] == (path or str(mixed / "clip.mp4"))
    rows = read_back(mixed, dataset_metadata=str(table.resolve()))
    assert sorted(rows) == ["clip.mp4", "frames", "sub/a b.png", "turned.jpg"]


def test_names_in_both_normal_forms(tmp_path):
    names = [unicodedata.normalize(form, f"é {form}.png") for form in ("NFC", "NFD")]
    for name, other in zip(names, ("NFD", "NFC"), strict=True):
        image = write_image(tmp_path / name, caption=None)
        # The text's name is written in the other form, as by another system.
        text = unicodedata.normalize(other, image.with_suffix(".txt").name)
        (tmp_path / text).write_text(name, encoding="utf-8")
    write_image(tmp_path / 'a "b", c.png', caption="c")
    make(tmp_path)
    assert [row["path"] for row in read_csv(tmp_path / "metadata.csv")] == sorted([*names, 'a "b", c.png'])
    assert read_back(tmp_path) == {**{name: name for name in names}, 'a "b", c.png': "c"}


def test_a_table_of_open_sora_is_read(mixed, tmp_path):
    # As its documentation shows one: numbers are floats. Its paths are absolute, or relative to the working directory.
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "metadata.csv").write_text(
        f'{HEADER}\n{mixed / "clip.mp4"},"a view of, a clip",5.0,48.0,64.0,0.75,3072.0,8.0\n'
        f"{mixed / 'turned.jpg'},an image,1.0,30.0,20.0,1.5,600.0,\n"
    )
    assert sorted(read_back(folder).values()) == ["a view of, a clip", "an image"]
    assert read_back(mixed, dataset_metadata=str(folder / "metadata.csv")) == {
        "clip.mp4": "a view of, a clip",
        "turned.jpg": "an image",
    }


def test_every_number_of_workers_writes_the_same(tmp_path, monkeypatch):
    for k in range(12):
        write_image(tmp_path / f"{k:02}.png", (20 + k, 20))
    measure = videos.measure

    def late_first(media, name, fps):
        time.sleep(0.02 * (name < "04.png"))
        return measure(media, name, fps)

    monkeypatch.setattr(videos, "measure", late_first)
    tables = [tmp_path / f"{n}.csv" for n in (1, 2, 7)]
    for table in tables:
        make(tmp_path, "--output", table, "--num_workers", table.stem)
    assert len({table.read_bytes() for table in tables}) == 1
    assert [row["width"] for row in read_csv(tables[0])] == [str(20 + k) for k in range(12)]


def test_a_stopped_run_goes_on_and_measures_what_has_changed(mixed, monkeypatch, measured):
    def stop(media, name, fps, measure=videos.measure):
        if name == "turned.jpg":
            raise KeyboardInterrupt
        return measure(media, name, fps)

    with monkeypatch.context() as context:
        context.setattr(videos, "measure", stop)
        with pytest.raises(KeyboardInterrupt):
            make(mixed, "--num_workers", 1)
    assert measured == ["clip.mp4", "frames", "sub/a b.png"]
    assert not (mixed / "metadata.csv").exists()
    (index,) = kept_of(mixed / "metadata.csv").iterdir()
    # Killed amid a line: the last item is not known.
    index.write_text(index.read_text()[:-20])
    measured.clear()

    with monkeypatch.context() as context:
        context.setattr(videos, "measure", stop)
        with pytest.raises(KeyboardInterrupt):
            make(mixed, "--num_workers", 1)
    assert measured == ["sub/a b.png"]
    measured.clear()

    # Frames that are written over, which the folder's own time does not show. A new caption is not measured.
    for k in range(3):
        write_image(mixed / "frames" / f"{k}.png", (20, 40), caption=None)
    (mixed / "clip.txt").write_text("a new text")
    make(mixed)
    assert sorted(measured) == ["frames", "turned.jpg"]
    assert not kept_of(mixed / "metadata.csv").exists()
    rows = {row["path"]: row for row in read_csv(mixed / "metadata.csv")}
    assert [rows["frames"][name] for name in ("width", "height", "num_frames")] == ["20", "40", "3"]
    assert [rows["clip.mp4"][name] for name in ("text", "num_frames")] == ["a new text", "5"]


def test_a_stopped_run_ends_before_the_other_files(tmp_path, monkeypatch):
    for k in range(30):
        write_image(tmp_path / f"{k:02}.png")
    names = []

    def stop(media, name, fps):
        names.append(name)
        if name == "00.png":
            raise KeyboardInterrupt
        time.sleep(0.02)
        raise RefusedError(name)

    monkeypatch.setattr(videos, "measure", stop)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, "--num_workers", 1)
    assert len(names) < 15


def test_a_frame_more_or_less_is_a_change(mixed, measured):
    (mixed / "clip.mp4").write_bytes(b"no clip")
    refused(mixed)
    for change in (
        lambda: write_image(mixed / "frames" / "3.png", (16, 40), caption=None),
        (mixed / "frames" / "0.png").unlink,
    ):
        change()
        measured.clear()
        refused(mixed)
        assert sorted(measured) == ["clip.mp4", "frames"]


def test_what_is_kept_goes_by_content_and_not_by_size_time_or_name(tmp_path, measured):
    before = write_image(tmp_path / "a.bmp", (32, 16)).stat()
    write_image(tmp_path / "b.bmp", (24, 24))
    write_image(tmp_path / "bad.png").write_bytes(b"no image")
    refused(tmp_path)
    after = write_image(tmp_path / "a.bmp", (16, 32)).stat()
    assert after.st_size == before.st_size
    os.utime(tmp_path / "a.bmp", ns=(before.st_atime_ns, before.st_mtime_ns))
    os.utime(tmp_path / "b.bmp", (1, 1))
    for suffix in (".bmp", ".txt"):
        (tmp_path / f"b{suffix}").rename(tmp_path / f"c{suffix}")
    measured.clear()
    make(tmp_path, "--on_bad_sample", "skip")
    assert sorted(measured) == ["a.bmp", "bad.png"]
    assert [(row["path"], row["height"]) for row in read_csv(tmp_path / "metadata.csv")] == [
        ("a.bmp", "32"),
        ("c.bmp", "24"),
    ]


def test_files_are_kept_before_slower_ones_are_done(mixed, monkeypatch):
    measure, seen = videos.measure, []

    def wait(media, name, fps):
        if name == "clip.mp4":
            deadline = time.monotonic() + 10
            while len(seen) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
                lines = [path.read_text() for path in kept_of(mixed / "metadata.csv").glob("index-*")]
                seen[:] = [line for line in "".join(lines).split("\n") if line.startswith('["measured"')]
        return measure(media, name, fps)

    monkeypatch.setattr(videos, "measure", wait)
    make(mixed, "--num_workers", 2)
    assert len(seen) == 3


def test_a_full_disk_leaves_no_table(mixed, monkeypatch, measured):
    table = mixed / "metadata.csv"
    make(mixed)
    before = table.read_bytes()

    def fill(records, path, suffix):
        path.write_text(HEADER)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(make_metadata, "write_table", fill)
        with pytest.raises(OSError, match="No space left"):
            make(mixed, "--overwrite")
    assert table.read_bytes() == before
    measured.clear()
    make(mixed, "--overwrite")
    assert measured == [] and table.read_bytes() == before


def test_the_number_of_workers_is_how_many_files_are_decoded_at_a_time(tmp_path, monkeypatch):
    for k in range(8):
        write_image(tmp_path / f"{k}.png", (20 + k, 20))
    measure, running, most = videos.measure, [], []

    def count(media, name, fps):
        running.append(name)
        most.append(len(running))
        time.sleep(0.02)
        running.remove(name)
        return measure(media, name, fps)

    monkeypatch.setattr(videos, "measure", count)
    for num_workers in (1, 3):
        most.clear()
        make(tmp_path, "--num_workers", num_workers, "--overwrite")
        assert max(most) == num_workers


def test_all_bad_files_are_listed_and_the_rest_is_kept(mixed, capsys, caplog, measured):
    (mixed / "clip.mp4").write_bytes((mixed / "clip.mp4").read_bytes()[:-500])
    (mixed / "sub" / "a b.png").write_bytes(b"no image")
    (mixed / "gone.png").symlink_to("nowhere.png")
    (mixed / "gone.txt").write_text("gone")
    message = refused(mixed)
    assert message.startswith(
        "3 of 5 items cannot be used:\n  clip.mp4 cannot be used: it has no video stream that FFmpeg"
    )
    assert "\n  gone.png cannot be read: No such file" in message
    assert "\n  sub/a b.png is not an image that Pillow can read; save" in message
    assert "--on_bad_sample skip" in message
    assert f"kept in {kept_of(mixed / 'metadata.csv')}" in message
    assert not (mixed / "metadata.csv").exists()

    measured.clear()
    make(mixed, "--on_bad_sample", "skip")
    assert sorted(measured) == ["clip.mp4", "sub/a b.png"]
    assert capsys.readouterr().out == f"1 images and 1 clips in {mixed / 'metadata.csv'}\n"
    assert "3 of 5 items are left out:\n  clip.mp4 cannot be used: it has no video stream that FFmpeg" in caplog.text
    assert [row["path"] for row in read_csv(mixed / "metadata.csv")] == ["frames", "turned.jpg"]


def test_nothing_but_bad_files_is_refused(tmp_path):
    write_image(tmp_path / "a.png").write_bytes(b"no image")
    message = refused(tmp_path, "--on_bad_sample", "skip")
    assert message.startswith("All 1 items are dropped:\n  a.png is not an image")
    assert not (tmp_path / "metadata.csv").exists()


def test_missing_captions_are_refused_unless_allowed(mixed, measured):
    (mixed / "clip.txt").unlink()
    (mixed / "turned.txt").write_text(" \n")
    message = refused(mixed)
    assert message.startswith(
        "2 of 4 items cannot be used:\n  clip.mp4: caption missing\n  turned.jpg: caption empty\n"
    )
    assert "--allow_missing_captions" in message
    assert sorted(measured) == ["frames", "sub/a b.png"]
    make(mixed, "--on_bad_sample", "skip")
    assert [row["path"] for row in read_csv(mixed / "metadata.csv")] == ["frames", "sub/a b.png"]
    (mixed / "metadata.csv").unlink()
    make(mixed, "--allow_missing_captions")
    assert [row["text"] for row in read_csv(mixed / "metadata.csv")] == ["", "frames", "an image", ""]


def test_a_table_is_only_replaced_when_asked(mixed, measured):
    table = mixed / "metadata.csv"
    make(mixed)
    before = table.read_bytes()
    (mixed / "clip.txt").write_text("a new text")
    measured.clear()
    assert refused(mixed) == f"--output {table} exists already; --overwrite builds it again."
    assert table.read_bytes() == before and measured == []
    # By the texts, not by the table that is there.
    make(mixed, "--overwrite")
    assert len(measured) == 4
    assert read_csv(table)[0]["text"] == "a new text"


def test_bad_command_lines_are_refused(mixed):
    assert "unrecognized arguments: --overwite" in refused(mixed, "--overwite")
    assert "unrecognized arguments: --over" in refused(mixed, "--over")
    assert "FOLDER" in refused()
    assert "'drop'" in refused(mixed, "--on_bad_sample", "drop")
    assert "--num_workers is 0; allowed is 1 or more." == refused(mixed, "--num_workers", 0)
    assert "'many'" in refused(mixed, "--num_workers", "many")
    assert "nowhere is not a folder." in refused(mixed / "nowhere")
    assert "must end in .csv, .tsv" in refused(mixed, "--output", mixed / "metadata.txt")
    assert "does not exist" in refused(mixed, "--output", mixed / "nowhere" / "metadata.csv")
    (mixed / "folder.csv").mkdir()
    assert "is a folder" in refused(mixed, "--output", mixed / "folder.csv", "--overwrite")
    assert "has no items" in refused(mixed / "folder.csv")


def test_the_script_itself(fork_server, mixed):
    command = [sys.executable, str(SCRIPT), "mixed", "--num_worker", "2"]
    done = subprocess.run(command, cwd=mixed.parent, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unrecognized arguments: --num_worker 2\n"
    (mixed / "bad.png").write_bytes(b"no image")
    (mixed / "bad.txt").write_text("bad")
    done = fork_server.run("scripts/make_metadata.py", mixed, "--on_bad_sample", "skip")
    assert f"2 images and 2 clips in {mixed / 'metadata.csv'}\n" in done.stdout
    assert "1 of 5 items are left out:\n  bad.png is not an image" in done.stdout


def test_help_comes_before_torch(tmp_path):
    code = f"""
import runpy, sys
sys.argv = ["make_metadata.py", "--help"]
try:
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
except SystemExit as stop:
    assert not stop.code
    print("imported:", *{{"torch", "av", "PIL", "pyarrow"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--allow_missing_captions" in done.stdout and done.stdout.endswith("imported:\n")
