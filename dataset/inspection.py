"""Inspects every item once before anything expensive happens: what it is, at which size it trains, or why it cannot.

What decoding found is kept in the cache by the content of the file, so that only new and changed files are decoded.
"""

import dataclasses
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tqdm.auto import tqdm

from dataset.cache import digest_of, installed_versions
from dataset.metadata import Row, first_five
from runtime.errors import RefusedError
from runtime.processes import gather_from_all


logger = logging.getLogger(__name__)

# What decoding depends on in addition to the file. Raise the number when files are decoded to other pixels or times.
DECODING = {"version": 1} | installed_versions(("pillow", "av", "numpy"))


class Item(NamedTuple):
    """A row that was inspected.

    Args:
        row: The row.
        record: Its line of dataset.jsonl, a dict.
        digests: Of the bytes of its files, by role; none without a cache, or where a file cannot be used.
    """

    row: Row
    record: dict
    digests: dict[str, tuple[str, ...]]

    @property
    def digest(self):
        """That of all its files: of one alone its own, None without any."""
        (digest,) = self.digests.get("target", (None,))
        return digest if len(self.digests) < 2 else digest_of(self.digests)

    def files(self, role):
        """Returns for each file of a role a row with it as target, its digest, and how it is used (size, frames)."""
        used = self.record["used"]
        of_files = [used] if role == "target" else used.get("files", {}).get(role, ())
        files = zip(self.row.media.get(role, ()), self.digests.get(role, ()), of_files, strict=True)
        return [(dataclasses.replace(self.row, media={"target": (file,)}), *rest) for file, *rest in files]


class Inspector(NamedTuple):
    """How items of one kind are inspected.

    Args:
        what: What they are, in the plural.
        measure: From a file or bytes, and its name in messages, to what decoding finds: a value that JSON takes.
        measured_as: What that depends on in addition to the file.
        decide: From a row and that value of its target to the record.
        max_threads: Of each process.
    """

    what: str
    measure: Callable
    measured_as: str
    decide: Callable
    max_threads: int | None = None


def dropped_record(row, source, reason=None):
    """Returns the line of dataset.jsonl of a row that is not used, or not yet: a dict.

    Args:
        row: The row.
        source: Its `size` (width, height), `frames` and `fps`, or None where nothing is known.
        reason: Why it is not used.
    """
    record = {"id": row.id, "caption": row.caption, "source": source, "used": None}
    return record | {"decision": "dropped", "reason": reason}


def like_target(role, measured, used):
    """Returns how a further file of an item is used: as the target, at its size and, of a clip, with the same frames.

    Args:
        role: Of the file.
        measured: What decoding found in it.
        used: How the target is used.
    """
    num_frames = len(measured.get("times", [0]))
    if num_frames == 1:
        return {"size": used["size"], "frames": 1}
    if num_frames <= (last := max(used["source_frames"])):
        raise RefusedError(f"its {role} has {num_frames} frames, and the target is used up to frame {last} (from 0).")
    return {name: used[name] for name in ("size", "frames", "source_frames")}


def inspect_each(rows, inspector, *, on_bad_sample="error", cache=None, accelerator=None, use_file=None):
    """Inspects every row, and logs which are bad, and which are enlarged a lot.

    Args:
        rows: A list of rows.
        inspector: How.
        on_bad_sample: "error", or "skip" to drop what cannot be used.
        cache: A `Cache`, or None to decode all.
        accelerator: Each of its processes inspects a part, and all get the same result; None for one process.
        use_file: How further files of an item are used; by default `like_target`.

    Returns:
        A list of `Item` in the order of the rows.

    Raises:
        RefusedError: If any row is bad, or with "skip" if all are; lists all of them with their reasons.
    """
    if not rows:
        raise RefusedError("The dataset has no items.")
    rank, num_processes = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    share = rows[rank::num_processes]
    # Threads: Pillow and FFmpeg decode without holding Python's lock.
    with ThreadPoolExecutor(inspector.max_threads) as pool:
        found = pool.map(lambda row: _inspect(row, inspector, cache, use_file or like_target), share)
        results = list(tqdm(found, f"inspecting {inspector.what}", len(share), disable=rank > 0 or len(share) < 50))
    gathered = [results] if accelerator is None else gather_from_all(accelerator, results)
    results = [gathered[n % num_processes][n // num_processes] for n in range(len(rows))]
    items = [Item(row, *result[:2]) for row, result in zip(rows, results, strict=True)]
    _judge(items, [problem for *_, problem in results], inspector.what, on_bad_sample)
    return items


def _inspect(row, inspector, cache, use_file):
    """Returns the record of a row, the digests of its files, and what is wrong with it or None."""
    digests, measured = {}, {}
    try:
        if row.problem is not None:
            raise RefusedError(row.problem)
        for role in row.media:
            found = []
            for place, content in enumerate(row.contents(role), 1):
                name = row.name if role == "target" else f"{row.name}: file {place} of its {role}"
                found.append(_measure(content, name, inspector, cache))
            digests[role], measured[role] = zip(*found, strict=True)
        record = inspector.decide(row, measured.pop("target")[0])
        used = record["used"]
        if measured and used is not None:
            used["files"] = {role: [use_file(role, one, used) for one in files] for role, files in measured.items()}
        return record, {} if cache is None else digests, None
    except RefusedError as error:
        text = str(error)
        record = dropped_record(row, None, text.removeprefix(row.name).lstrip(": "))
        named = text.startswith((f"{row.name} ", f"{row.name}:"))
        return record, {}, text if named else f"{row.name}: {text}"


def _measure(content, name, inspector, cache):
    """Returns the digest of a file, None without a cache, and what decoding finds in it."""
    if cache is None:
        return None, inspector.measure(content, name)
    try:
        digest = cache.digest(content)
    except OSError as error:
        raise RefusedError(f"{name} cannot be read: {error.strerror}.") from error
    key = f"{digest} {suffix(content)} {inspector.measured_as} {DECODING}"
    return digest, cache.measured(key, lambda: inspector.measure(content, name))


def suffix(file):
    """Returns the ending of a file's name, which tells kinds of files apart; that of embedded ones is empty."""
    return os.path.splitext(file)[1].lower() if isinstance(file, os.PathLike) else ""


def _judge(items, marks, what, on_bad_sample):
    bad = [problem for problem in marks if problem]
    listing = "".join(f"\n  {problem}" for problem in bad)
    if bad and on_bad_sample == "error":
        captions = any(problem.endswith(("caption missing", "caption empty")) for problem in bad)
        hint = " --allow_missing_captions trains items without a caption on an empty one." if captions else ""
        raise RefusedError(
            f"{len(bad)} of {len(items)} {what} cannot be used:{listing}\n"
            f"Repair or remove them, or leave them out by --on_bad_sample skip.{hint}"
        )
    if bad:
        logger.warning("--on_bad_sample skip: %d of %d %s are left out:%s", len(bad), len(items), what, listing)

    notes = {"dropped": [], "shortened or retimed": [], "enlarged more than 2 times": []}
    dropped, changed, enlarged = notes.values()
    for (_, record, _), problem in zip(items, marks, strict=True):
        if record["decision"] == "dropped":
            dropped += [] if problem else [f"{record['id']}: {record['reason']}"]
            continue
        changed += [f"{record['id']}: {record['reason']}"] if record["reason"] else []
        source, used = record["source"]["size"], record["used"]["size"]
        change = f"{record['id']}: {source[0]}x{source[1]} to {used[0]}x{used[1]}"
        scale = max(used[0] / source[0], used[1] / source[1])
        enlarged += [f"{change}, {scale:.1f} times"] if scale > 2 else []
    if len(dropped) + len(bad) == len(items):
        listing = "\n".join(f"  {line}" for line in (*bad, *dropped))
        raise RefusedError(f"All {len(items)} {what} are dropped:\n{listing}")
    for note, names in notes.items():
        if names:
            logger.warning("%d of %d %s are %s:\n%s", len(names), len(items), what, note, first_five(names))
