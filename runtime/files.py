"""Files and folders that are on disk whole, or as they were before: written under another name, then renamed."""

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
    """Context with a temporary path to write to, which replaces `path` when the file is complete, if there is one.

    Args:
        path (`pathlib.Path` or `str`): The temporary path has the same suffix, by which writers choose a format.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.stem}.tmp{path.suffix}")
    try:
        yield temporary
        if temporary.exists():
            to_disk(temporary)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path, text):
    """Write a text file, whole."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json_lines(path, records):
    """Write one JSON object per line, whole."""
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def rename_folder(temporary, path):
    """Rename a folder that is complete to `path`, and replace the folder that is there."""
    for file in (*temporary.rglob("*"), temporary):
        to_disk(file)
    delete_folder(path)
    temporary.rename(path)
    to_disk(path.parent)  # or what is deleted next might be gone and this folder not be there


def delete_folder(path):
    """Delete a folder, if it is there, in such a way that no part of it is left under its name."""
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
        shutil.rmtree(old)


def refuse_pointer(path):
    """Make sure that a file is not the pointer that Git LFS leaves in the place of a large file.

    Raises:
        ValueError: It is a pointer.
    """
    with open(path, "rb") as file:
        if file.read(43) == b"version https://git-lfs.github.com/spec/v1\n":
            raise ValueError(f"{path} is a Git LFS pointer and not the file itself; get the files with `git lfs pull`")
