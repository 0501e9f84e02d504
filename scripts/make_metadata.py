"""Write what a folder of pictures and clips holds as a table with Open-Sora's columns.

    python scripts/make_metadata.py data/my_clips
    python scripts/make_metadata.py data/my_clips --output data/my_clips/metadata.parquet --on_bad_sample skip

The captions are those of the `.txt` files beside the pictures and clips. The columns are the ones that Open-Sora asks
for, so that its tables and these can be exchanged:

    path           relative to the table with forward slashes; absolute where the table stands in another folder
    text           the caption as it is written
    num_frames     decoded and counted; 1 for a picture
    height, width  in pixels, upright as displayed
    aspect_ratio   height / width
    resolution     height * width
    fps            empty for pictures and folders of frames

Every file is decoded completely, as for training. What is measured is kept at once in `<table>.partial.jsonl`, so that
a run which was stopped goes on from there; with the table complete that file is removed.
"""

import argparse
import csv
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path


# The script may be started from anywhere; the folder that Python adds is this script's own.
sys.path.insert(0, str(Path(__file__).parents[1]))
from training.data import metadata  # noqa: E402
from training.data.metadata import IMAGE_SUFFIXES, METADATA_SUFFIXES  # noqa: E402
from training.errors import RefusedError, exit_codes  # noqa: E402


# In Open-Sora's order, with their types in parquet.
COLUMNS = {
    "path": "string",
    "text": "string",
    "num_frames": "int64",
    "height": "int64",
    "width": "int64",
    "aspect_ratio": "double",
    "resolution": "int64",
    "fps": "double",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise RefusedError(message)


def parse_args(argv):
    """Read the command line.

    Args:
        argv (`list[str]`): without the name of the script.

    Returns:
        `argparse.Namespace`: one attribute per flag; `folder` and `output` are absolute.

    Raises:
        RefusedError: if a flag is unknown or its value is not allowed, or if the table exists.
    """
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    suffixes = ", ".join(METADATA_SUFFIXES)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of pictures and clips")
    parser.add_argument(
        "--output", type=Path, help=f"table to write, ends in {suffixes} (default: metadata.csv in FOLDER)"
    )
    parser.add_argument(
        "--num_workers",
        type=int,
        # A decoder holds up to 17 frames of the clip's size.
        default=min(8, os.cpu_count() or 1),
        help="files that are decoded at a time, 1 or more (default: as many as there are CPUs, at most 8)",
    )
    parser.add_argument(
        "--allow_missing_captions",
        action="store_true",
        help="leave the text of items without a caption empty (default: they are refused)",
    )
    parser.add_argument(
        "--on_bad_sample",
        choices=("error", "skip"),
        default="error",
        help="what to do about files that cannot be used: list all of them and write no table, or leave them out and "
        "list them (default: %(default)s)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a table that exists (default: it is refused)"
    )
    args = parser.parse_args(argv)
    if args.num_workers < 1:
        raise RefusedError(f"--num_workers is {args.num_workers}; allowed is 1 or more.")
    if not args.folder.is_dir():
        raise RefusedError(f"{args.folder} is not a folder.")
    # absolute, not resolve: files are often links into a store, and a path is the name inside the folder.
    args.folder = Path(os.path.abspath(args.folder))
    args.output = args.folder / "metadata.csv" if args.output is None else Path(os.path.abspath(args.output))
    if args.output.suffix.lower() not in METADATA_SUFFIXES:
        raise RefusedError(f"--output {args.output} must end in {suffixes}.")
    if not args.output.parent.is_dir():
        raise RefusedError(f"--output {args.output} is to stand in a folder that does not exist.")
    if args.output.is_dir() or (args.output.exists() and not args.overwrite):
        what = "is a folder" if args.output.is_dir() else "exists already; --overwrite builds it anew"
        raise RefusedError(f"--output {args.output} {what}.")
    return args


def read_folder(folder, allow_missing_captions):
    """List the items of a folder as training on it would, but by the sidecar texts even if there is a table.

    Args:
        folder (`Path`): absolute.
        allow_missing_captions (`bool`)

    Returns:
        `list[training.data.metadata.Row]`: in the order of their ids, the paths inside the folder.

    Raises:
        RefusedError: if there are no items, or captions are missing or unreadable.
    """
    # Here, since the import takes seconds with torch.
    from training.data.videos import VIDEO_SUFFIXES

    suffixes = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)
    items = metadata._sidecar_items(str(folder), metadata._list_files(str(folder)), suffixes, frame_folders=True)
    return metadata._judge_captions(items, folder, allow_missing_captions, suffixes)


def measure_row(row, known):
    """Decode an item, unless what is known of it still holds.

    Args:
        row (`training.data.metadata.Row`)
        known (`dict` or None): what an earlier call returned for it.

    Returns:
        `dict`: `path`, absolute; `files`, each with its name, bytes and time of change, by which a change shows;
            `size` (width, height); `num_frames`; `fps`, None for pictures and folders of frames.

    Raises:
        RefusedError: if the item cannot be used.
    """
    from training.data import videos

    try:
        files = sorted(row.media.iterdir()) if row.media.is_dir() else [row.media]
        files = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    except OSError as error:
        raise RefusedError(f"{row.id} cannot be used: {error.strerror}.") from error
    if known is not None and known["files"] == files:
        return known
    # The rate is that of folders of frames, of which only the duration would follow.
    size, times, _, fps = videos.measure(row.media, row.id, fps=1)
    # As in training, a single frame is a picture whatever it is stored in, and has no rate.
    fps = fps if len(times) > 1 else None
    return {"path": str(row.media), "files": files, "size": list(size), "num_frames": len(times), "fps": fps}


def read_journal(path):
    """Return what a run that was stopped has measured, a `dict` from absolute path to the result of `measure_row`."""
    known = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # the line at which it was stopped
            continue
        known[entry["path"]] = entry
    return known


def measure_all(rows, journal_path, num_workers):
    """Measure all items, several at a time, and write each to the journal as soon as it is there.

    Args:
        rows (`list[training.data.metadata.Row]`)
        journal_path (`Path`): made if there is none; what it holds already is not measured again.
        num_workers (`int`): threads; Pillow and FFmpeg decode without holding Python's lock.

    Returns:
        `tuple[dict, dict]`: by the row's id, what `measure_row` returned, and why it was refused.
    """
    from tqdm.auto import tqdm

    known = read_journal(journal_path)
    measured, refused = {}, {}
    pool = ThreadPoolExecutor(num_workers)
    futures = {pool.submit(measure_row, row, known.get(str(row.media))): row for row in rows}
    try:
        with journal_path.open("a") as journal:
            for future in tqdm(as_completed(futures), total=len(rows), desc="files"):
                row = futures[future]
                try:
                    measured[row.id] = future.result()
                except RefusedError as error:
                    refused[row.id] = str(error)
                    continue
                if measured[row.id] is not known.get(str(row.media)):
                    # The line end comes first: the last line may have been cut off.
                    journal.write("\n" + json.dumps(measured[row.id]))
                    journal.flush()
    finally:
        pool.shutdown(cancel_futures=True)
    return measured, refused


def make_record(row, measured, base):
    """Return the row of the table, a `dict` with a value for each of `COLUMNS`.

    Args:
        row (`training.data.metadata.Row`)
        measured (`dict`): from `measure_row`.
        base (`Path`): the table's folder, absolute.
    """
    width, height = measured["size"]
    # A path that leads out of the table's folder would be refused when the table is read.
    path = row.media.relative_to(base) if row.media.is_relative_to(base) else row.media
    values = (path.as_posix(), row.caption, measured["num_frames"], height, width, height / width, height * width)
    return dict(zip(COLUMNS, (*values, measured["fps"]), strict=True))


def write_table(records, path, suffix):
    """Write a table.

    Args:
        records (`list[dict]`): from `make_record`.
        path (`Path`)
        suffix (`str`): its format, one of `METADATA_SUFFIXES`.
    """
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist(records, pyarrow.schema(list(COLUMNS.items())))
        pyarrow.parquet.write_table(table, path)
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        if suffix == ".json":
            json.dump(records, file, ensure_ascii=False, indent=2)
        elif suffix == ".jsonl":
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        else:
            delimiter = "," if suffix == ".csv" else "\t"
            file.write(delimiter.join(COLUMNS) + "\n")
            # All texts in quotes: with this line end Python leaves a bare carriage return without them, and what is
            # in quotes is more often taken for a text even if it looks like a number.
            writer = csv.DictWriter(
                file, COLUMNS, delimiter=delimiter, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n"
            )
            writer.writerows(records)


def main(argv):
    """Measure a folder, write its table and say where it is.

    Args:
        argv (`list[str]`): without the name of the script.

    Raises:
        RefusedError: if the command line, captions or files are refused; lists all files with their reasons.
    """
    args = parse_args(argv)
    rows = read_folder(args.folder, args.allow_missing_captions)
    journal_path = args.output.with_name(f"{args.output.name}.partial.jsonl")
    measured, refused = measure_all(rows, journal_path, args.num_workers)

    if refused:
        # In the order of the folder, not in that in which they were found.
        listing = "\n".join(f"  {refused[row.id]}" for row in rows if row.id in refused)
        counts = f"{len(refused)} of {len(rows)} items"
        if args.on_bad_sample == "error" or not measured:
            hint = "--on_bad_sample skip leaves them out. " if measured else ""
            raise RefusedError(
                f"{counts} cannot be used:\n{listing}\n{hint}No table was written; what was measured is kept in "
                f"{journal_path}, and the next run goes on from there."
            )
        print(f"{counts} are skipped, since they cannot be used:\n{listing}", file=sys.stderr)

    records = [make_record(row, measured[row.id], args.output.parent) for row in rows if row.id in measured]
    # Hidden, so that what a full disk leaves of it is nobody's table.
    unfinished = args.output.with_name(f".{args.output.name}.unfinished")
    write_table(records, unfinished, args.output.suffix.lower())
    unfinished.replace(args.output)
    journal_path.unlink()
    num_pictures = sum(record["num_frames"] == 1 for record in records)
    print(f"{num_pictures} pictures and {len(records) - num_pictures} clips in {args.output}")


if __name__ == "__main__":
    with exit_codes(OSError):
        main(sys.argv[1:])
