"""Looks at every item once before anything expensive happens: what it is, at which size it trains, or why it cannot.

What decoding found is kept in the cache by the content of the file, so that only new and changed files are decoded.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tqdm.auto import tqdm

from dataset.buckets import cropped_share
from dataset.cache import code_identity
from dataset.metadata import Row, first_five
from runtime.errors import RefusedError
from runtime.processes import gather_from_all


logger = logging.getLogger(__name__)

# What decides what a decoder makes of a file.
_DECODER_FILES = tuple(
    os.path.join(os.path.dirname(__file__), name) for name in ("colours.py", "images.py", "videos.py")
)
_DECODER_PACKAGES = ("pillow", "av", "numpy")


class Item(NamedTuple):
    """A row that was looked at.

    Args:
        row: The row.
        record: Its line of dataset.jsonl, a dict.
        digest: Of the file's bytes; None without a cache, or where the file cannot be used.
    """

    row: Row
    record: dict
    digest: str | None


class Inspector(NamedTuple):
    """How items of one kind are looked at.

    Args:
        what: What they are, in the plural.
        measure: From a file or bytes, and its name in messages, to what decoding finds: a value that JSON takes.
        measured_as: What that depends on beside the file.
        decide: From a row and that value to the record.
        max_threads: Of each process.
    """

    what: str
    measure: Callable
    measured_as: str
    decide: Callable
    max_threads: int | None = None


def decoder_identity():
    """Returns the digest of what decoding depends on beside the file."""
    return code_identity(_DECODER_FILES, _DECODER_PACKAGES)


def dropped_record(row, source, reason=None):
    """Returns the line of dataset.jsonl of a row that is not used, or not yet: a dict.

    Args:
        row: The row.
        source: Its `size` (width, height), `frames` and `fps`, or None where nothing is known.
        reason: Why it is not used.
    """
    record = {"id": row.id, "caption": row.caption, "source": source, "used": None}
    return record | {"decision": "dropped", "reason": reason}


def inspect_each(rows, inspector, *, on_bad_sample="error", cache=None, accelerator=None):
    """Looks at every row, says which are bad, and which are enlarged a lot.

    Args:
        rows: A list of rows.
        inspector: How.
        on_bad_sample: "error", or "skip" to drop what cannot be used.
        cache: A `Cache`, or None to decode all.
        accelerator: Each of its processes looks at a part, and all get the same result; None for one process.

    Returns:
        A list of `Item` in the order of the rows.

    Raises:
        RefusedError: If any row is bad, or with "skip" if all are; lists all of them with their reasons.
    """
    if not rows:
        raise RefusedError("The dataset has no items.")
    rank, num_processes = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    share = rows[rank::num_processes]
    look = _decoded if cache is None else _cached(cache, inspector.measured_as)
    # Threads: Pillow and FFmpeg decode without holding Python's lock.
    # By the handful in large datasets, where most of what there is to do for a row may be to hand it to a thread.
    handful = 1 if len(share) < 1000 else 32
    handfuls = [share[n : n + handful] for n in range(0, len(share), handful)]
    shown = rank == 0 and len(share) >= 50
    results = []
    with (
        ThreadPoolExecutor(inspector.max_threads) as pool,
        tqdm(total=len(share), desc=f"looking at {inspector.what}", disable=not shown) as bar,
    ):
        for done in pool.map(lambda rows: [_inspect(row, inspector, look) for row in rows], handfuls):
            results += done
            bar.update(len(done))
    if num_processes > 1:
        gathered = gather_from_all(accelerator, results)
        results = [gathered[n % num_processes][n // num_processes] for n in range(len(rows))]
    items = [Item(row, *result[:2]) for row, result in zip(rows, results, strict=True)]
    _judge(items, [problem for *_, problem in results], inspector.what, on_bad_sample)
    return items


def _inspect(row, inspector, look):
    """Returns the record of a row, the digest of its file, and what is wrong with it or None."""
    digest = None
    try:
        if row.problem is not None:
            raise RefusedError(row.problem)
        digest, measured = look(row, inspector.measure)
        return inspector.decide(row, measured), digest, None
    except RefusedError as error:
        text = str(error)
        record = dropped_record(row, None, text.removeprefix(row.name).lstrip(": "))
        named = text.startswith((f"{row.name} ", f"{row.name}:"))
        return record, digest, text if named else f"{row.name}: {text}"


def _decoded(row, measure):
    return None, measure(row.content, row.name)


def _cached(cache, measured_as):
    identity = decoder_identity()  # here, and not in the threads: Python 3.11 cannot parse code in several at a time

    def look(row, measure):
        content = row.content
        try:
            digest = cache.digest(content)
        except OSError as error:
            raise RefusedError(f"{row.name} cannot be read: {error.strerror}.") from error
        # The name ends in what tells the kinds of files apart.
        suffix = "" if isinstance(content, bytes) else os.path.splitext(content)[1].lower()
        key = f"{digest} {suffix} {measured_as} {identity}"
        return digest, cache.measured(key, lambda: measure(content, row.name))

    return look


def _judge(items, marks, what, on_bad_sample):
    bad = [problem for problem in marks if problem]
    if bad:
        listing = "\n".join(f"  {problem}" for problem in bad)
        if on_bad_sample == "error":
            captions = any(problem.endswith(("caption missing", "caption empty")) for problem in bad)
            hint = " --allow_missing_captions trains items without a caption on an empty one." if captions else ""
            raise RefusedError(
                f"{len(bad)} of {len(items)} {what} cannot be used:\n{listing}\n"
                f"Mend or remove them, or leave them out by --on_bad_sample skip.{hint}"
            )
        if len(bad) == len(items):
            raise RefusedError(f"All {len(items)} {what} cannot be used:\n{listing}")
        logger.warning("--on_bad_sample skip: %d of %d %s are left out:\n%s", len(bad), len(items), what, listing)

    dropped = [
        f"{record['id']}: {record['reason']}"
        for (_, record, _), is_bad in zip(items, marks, strict=True)
        if record["decision"] == "dropped" and not is_bad
    ]
    if len(dropped) + len(bad) == len(items):
        listing = "\n".join(f"  {line}" for line in (*bad, *dropped))
        raise RefusedError(f"All {len(items)} {what} are dropped:\n{listing}")
    if dropped:
        logger.warning("%d of %d %s are dropped:\n%s", len(dropped), len(items), what, first_five(dropped))
    enlarged, cropped = [], []
    for _, record, _ in items:
        if record["decision"] == "used":
            source, used = record["source"]["size"], record["used"]["size"]
            change = f"{record['id']}: {source[0]}x{source[1]} to {used[0]}x{used[1]}"
            scale, share = max(used[0] / source[0], used[1] / source[1]), cropped_share(source, used)
            if scale > 2:
                enlarged.append(f"{change}, {scale:.1f} times")
            if share > 0.25:
                cropped.append(f"{change}, {share:.0%}")
    if enlarged:
        logger.warning("%d %s are enlarged more than 2 times:\n%s", len(enlarged), what, first_five(enlarged))
    if cropped:
        logger.warning("%d %s lose more than a quarter of a side:\n%s", len(cropped), what, first_five(cropped))
