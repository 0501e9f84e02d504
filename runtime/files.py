"""Files and folders that are on disk whole, or as they were before: written beside, then renamed."""

import contextlib
import json
import os
import pathlib
import shutil


def to_disk(path):
    """Make sure that a file, or the names in a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def whole_file(path):
    """Context with a path to write to, which takes the place of `path` when all of it is there, if anything is.

    Args:
        path (`pathlib.Path` or `str`): The other path has its suffix, by which writers of pictures choose a format.
    """
    path = pathlib.Path(path)
    beside = path.with_name(f"{path.stem}.tmp{path.suffix}")
    try:
        yield beside
        if beside.exists():
            to_disk(beside)
            os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path, text):
    """Write a text file, whole."""
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


def write_json_lines(path, records):
    """Write one JSON object per line, whole."""
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def rename_folder(beside, path):
    """Give a folder that is complete its name, in the place of one that has it."""
    for file in (*beside.rglob("*"), beside):
        to_disk(file)
    delete_folder(path)
    beside.rename(path)
    to_disk(path.parent)  # or what is deleted next might be gone and this not be there


def delete_folder(path):
    """Delete a folder, if it is there, so that it is never there in part under its name."""
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
        shutil.rmtree(old)


def refuse_pointer(path):
    """Make sure that a file is here itself, and not what Git leaves in the place of a large one.

    Raises:
        ValueError: It is a pointer of Git LFS.
    """
    with open(path, "rb") as file:
        if file.read(43) == b"version https://git-lfs.github.com/spec/v1\n":
            raise ValueError(f"{path} is a Git LFS pointer and not the file itself; get the files with `git lfs pull`")
