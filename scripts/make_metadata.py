"""Write a table of the images and clips in a folder, with Open-Sora's columns.

    python scripts/make_metadata.py data/my_clips
    python scripts/make_metadata.py data/my_clips --output data/my_clips/metadata.parquet --on_bad_sample skip

The captions are those of the `.txt` files next to the images and clips. The columns are the ones that Open-Sora asks
for, so that tables can be exchanged with it:

    path           relative to the table with forward slashes; absolute where the table stands in another folder
    text           the caption as it is trained, without blanks around it and with line feeds as line ends
    num_frames     decoded and counted; 1 for an image
    height, width  in pixels, upright as displayed
    aspect_ratio   height / width
    resolution     height * width
    fps            empty for images and folders of frames

Every file is decoded completely, as for training. Measurements are stored at once in the hidden folder
`.<table>.partial` next to the table, so that a run that was stopped continues from there. Once the table is complete,
that folder is removed.
"""

import argparse
import csv
import json
import os
import shutil
import sys
from pathlib import Path


# The script may be started from anywhere; the folder that Python adds is this script's own.
sys.path.insert(0, str(Path(__file__).parents[1]))
from dataset.metadata import IMAGE_SUFFIXES, TABLE_SUFFIXES, VIDEO_SUFFIXES, read_rows  # noqa: E402
from runtime.errors import RefusedError, exit_codes  # noqa: E402
from training.arguments import Parser  # noqa: E402


# In Open-Sora's order, with their types in parquet.
COLUMNS = {"path": "string", "text": "string", "num_frames": "int64", "height": "int64", "width": "int64"}
COLUMNS |= {"aspect_ratio": "double", "resolution": "int64", "fps": "double"}


def parse_args(argv):
    """Read the command line.

    Args:
        argv (`list[str]`): without the name of the script.

    Returns:
        `argparse.Namespace`: one attribute per flag; `folder` and `output` are absolute.

    Raises:
        RefusedError: if a flag is unknown or its value is not allowed, or if the table exists.
    """
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    suffixes = ", ".join(TABLE_SUFFIXES)
    add = parser.add_argument
    add("folder", metavar="FOLDER", type=Path, help="folder of images and clips")
    add("--output", type=Path, help=f"table to write, ends in {suffixes} (default: metadata.csv in FOLDER)")
    # At most 8, since a decoder holds up to 17 frames of the clip's size.
    text = "files that are decoded at a time, 1 or more (default: as many as there are CPUs, at most 8)"
    add("--num_workers", type=int, default=min(8, os.cpu_count() or 1), help=text)
    text = "leave the text of items without a caption empty (default: they are refused)"
    add("--allow_missing_captions", action="store_true", help=text)
    text = "what to do about files that cannot be used: list all of them and write no table, or leave them out and "
    text += "list them (default: %(default)s)"
    add("--on_bad_sample", choices=("error", "skip"), default="error", help=text)
    add("--overwrite", action="store_true", help="replace a table that exists (default: it is refused)")
    args = parser.parse_args(argv)
    if args.num_workers < 1:
        raise RefusedError(f"--num_workers is {args.num_workers}; allowed is 1 or more.")
    if not args.folder.is_dir():
        raise RefusedError(f"{args.folder} is not a folder.")
    # absolute, not resolve: files are often links into a store, and a path is the name inside the folder.
    args.folder = Path(os.path.abspath(args.folder))
    args.output = args.folder / "metadata.csv" if args.output is None else Path(os.path.abspath(args.output))
    if args.output.suffix.lower() not in TABLE_SUFFIXES:
        raise RefusedError(f"--output {args.output} must end in {suffixes}.")
    if not args.output.parent.is_dir():
        raise RefusedError(f"--output {args.output} is to stand in a folder that does not exist.")
    if args.output.is_dir() or (args.output.exists() and not args.overwrite):
        what = "is a folder" if args.output.is_dir() else "exists already; --overwrite builds it again"
        raise RefusedError(f"--output {args.output} {what}.")
    return args


def measure(content, name):
    """Decode an item; return the dict of `size` (width, height), `frames`, and `fps`, None where it has no rate."""
    # Here, since the import takes seconds with torch.
    from dataset import videos

    # The rate is that of folders of frames, of which only the duration would follow.
    measured = videos.measure(content, name, fps=1)
    num_frames = len(measured["times"])
    # As in training, a single frame is an image whatever it is stored in, and has no rate.
    return {"size": measured["size"], "frames": num_frames, "fps": measured["fps"] if num_frames > 1 else None}


def decide(row, measured):
    """Return the record of an item, which is used as it is."""
    record = {"id": row.id, "caption": row.caption, "source": measured, "used": measured}
    return record | {"decision": "used", "reason": None}


def inspect_folder(args, cache_dir):
    """Measure the items of a folder, by the sidecar texts even if there is a table.

    Args:
        args (`argparse.Namespace`): from `parse_args`.
        cache_dir (`Path`): keeps what was measured; what it holds already is not measured again.

    Returns:
        `list[dataset.inspection.Item]`: in the order of their ids, without those that are skipped.

    Raises:
        RefusedError: if there are no items, or any cannot be used; lists all of them with their reasons.
    """
    from dataset.cache import Cache
    from dataset.inspection import Inspector, inspect_each

    suffixes, missing = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES), args.allow_missing_captions
    rows = read_rows(args.folder, only_sidecars=True, allow_missing_captions=missing, media_suffixes=suffixes)
    cache_dir.mkdir(exist_ok=True)
    inspector = Inspector("items", measure, "table", decide, max_threads=args.num_workers)
    try:
        # Without a name, so that its file is closed when the folder is removed, which NFS asks for.
        items = inspect_each(rows, inspector, on_bad_sample=args.on_bad_sample, cache=Cache(cache_dir))
    except RefusedError as error:
        kept = f"what was measured is kept in {cache_dir}, and the next run continues from there"
        raise RefusedError(f"{error}\nNo table was written; {kept}.") from error
    return [item for item in items if item.record["decision"] == "used"]


def make_record(item, base):
    """Return the row of the table for an `Item`: a `dict` with `COLUMNS`. `base` is the table's folder, absolute."""
    (media,), source = item.row.media["target"], item.record["source"]
    width, height = source["size"]
    # A path that leads out of the table's folder would be refused when the table is read.
    path = media.relative_to(base) if media.is_relative_to(base) else media
    values = (path.as_posix(), item.row.caption, source["frames"], height, width, height / width, height * width)
    return dict(zip(COLUMNS, (*values, source["fps"]), strict=True))


def write_table(records, path, suffix):
    """Write what `make_record` returned, in the format of one of `TABLE_SUFFIXES`."""
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
            # What is in quotes is more often taken for a text even if it looks like a number.
            form = {"delimiter": delimiter, "quoting": csv.QUOTE_NONNUMERIC, "lineterminator": "\n"}
            csv.DictWriter(file, COLUMNS, **form).writerows(records)


def main(argv):
    """Measure a folder, write its table and say where it is.

    Args:
        argv (`list[str]`): without the name of the script.

    Raises:
        RefusedError: if the command line, captions or files are refused; lists all files with their reasons.
    """
    args = parse_args(argv)
    # Hidden, so that neither it nor what a full disk leaves of the table in it is taken for an item or a table.
    cache_dir = args.output.with_name(f".{args.output.name}.partial")
    records = [make_record(item, args.output.parent) for item in inspect_folder(args, cache_dir)]
    unfinished = cache_dir / args.output.name
    write_table(records, unfinished, args.output.suffix.lower())
    unfinished.replace(args.output)
    shutil.rmtree(cache_dir)
    num_images = sum(record["num_frames"] == 1 for record in records)
    print(f"{num_images} images and {len(records) - num_images} clips in {args.output}")


if __name__ == "__main__":
    with exit_codes(OSError):
        main(sys.argv[1:])
