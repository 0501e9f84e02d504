"""Runs the encoders over what of a dataset is not in the cache yet, once, before training."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import shutil

import huggingface_hub
import torch
from diffusers.training_utils import free_memory
from tqdm.auto import tqdm

from dataset.batches import TrainingDataset, map_ahead
from dataset.cache import code_identity, digest_of, is_complete, read_entry, write_entry
from dataset.inspection import decoder_identity
from dataset.metadata import first_five
from runtime.errors import RefusedError
from runtime.processes import gather_from_all


logger = logging.getLogger(__name__)

# With torchvision transformers resizes the images of an image encoder by other code than without.
_ENCODER_PACKAGES = ("torch", "torchvision", "diffusers", "transformers", "tokenizers", "ftfy")

# Decoded media that wait for the encoder may take so much.
_WAITING_BYTES = 2 * 2**30
_MOST_THREADS = 8

# What it means that a part of a key is another one than last time.
_REASONS = {
    "file": "whose file changed",
    "caption": "whose caption changed",
    "pixels": "whose size, frames or part changed",
    "encoder": "for another encoder or task",
    "code": "for another version of the code or the libraries",
    "device": "for another kind of device, or with other kernels",
}


def count_caption_tokens(items, further_captions, count_tokens):
    """Return how many tokens each different caption has, and say which are longer than the text encoder takes.

    That stands in the records then, too.

    Args:
        items (`list[Item]`): Of those that are used.
        further_captions (`list[str]`): That which stands for dropped ones, and prompts of previews.
        count_tokens (`Callable[[str], tuple[int, int]]`): Returns the tokens of a caption and how many are kept.

    Returns:
        `dict[str, int]`: How many are kept of each.
    """
    captions = dict.fromkeys([*(item.row.caption for item in items), *further_captions])
    counts = {caption: count_tokens(caption) for caption in captions}
    cut = [
        f"{caption[:60]!r}...: {counts[caption][0]} tokens, {counts[caption][1]} kept"
        for caption in dict.fromkeys(further_captions)
        if counts[caption][0] > counts[caption][1]
    ]
    for item in items:
        num_tokens, kept = counts[item.row.caption]
        if num_tokens > kept:
            cut.append(f"{item.row.name}: {num_tokens} tokens, {kept} kept: {item.row.caption[:60]!r}...")
            change = f"caption cut from {num_tokens} to {kept} tokens"
            item.record["reason"] = "; ".join(filter(None, [item.record["reason"], change]))
    if cut:
        logger.warning("%d captions are cut, as the stock pipeline would cut them:\n%s", len(cut), first_five(cut))
    return {caption: kept for caption, (_, kept) in counts.items()}


def weights_identity(cache, pretrained_model_name_or_path, subfolders, *, revision=None, variant=None, dry_run=False):
    """Return the digest of the parts of a pipeline: of their files, or for one from the hub of its commit.

    Args:
        cache (`Cache`): Remembers digests of files.
        pretrained_model_name_or_path (`str`)
        subfolders (`tuple[str, ...]`): Of the parts.
        revision, variant (`str`, *optional*): As `from_pretrained` takes them.
        dry_run (`bool`): With nothing in the cache to compare with, tens of gigabytes are not read only for that.

    Raises:
        OSError: The pipeline is not on this machine.
    """
    if os.path.isdir(pretrained_model_name_or_path):
        if dry_run and not cache.holds_entries:
            return "not looked at"
        root = pathlib.Path(pretrained_model_name_or_path)
        files = sorted(path for folder in subfolders for path in (root / folder).rglob("*") if path.is_file())
        with concurrent.futures.ThreadPoolExecutor(_MOST_THREADS) as pool:
            digests = list(pool.map(cache.digest, files))
        names = [str(path.relative_to(root)) for path in files]
        return digest_of([list(zip(names, digests, strict=True)), variant])
    # Its configs were read already, so that its commit is known here.
    index = huggingface_hub.try_to_load_from_cache(
        pretrained_model_name_or_path, "model_index.json", revision=revision
    )
    if not isinstance(index, str):
        raise OSError("its model_index.json is not among the files that were fetched")
    commit = pathlib.Path(index).parent.name
    return digest_of([commit, list(subfolders), variant])


@dataclasses.dataclass
class Encodings:
    """What the cache is to hold of one kind, and what of it is missing.

    Args:
        kind (`str`): `"captions"` or `"media"`.
        paths (`dict[str, pathlib.Path]` or `list[pathlib.Path]`): For each caption, or each item, its entry.
        missing (`dict[pathlib.Path, object]`):
            Entry -> what it is made of, a caption or an `Item`; the same on all processes.
        cache (`Cache`, *optional*), made_of (`list[tuple[str, str]]`):
            Where to note of what the missing ones were made, by item, when they are there.
    """

    kind: str
    paths: object
    missing: dict
    cache: object = None
    made_of: list = dataclasses.field(default_factory=list)


def plan_encodings(cache, accelerator, items, *, further_captions, text_encoder, media_encoder, pipeline_file):
    """Look up what the encoders make of a dataset, and say what is missing and why.

    Args:
        cache (`Cache`)
        accelerator (`Accelerator`)
        items (`list[Item]`): Of those that are used.
        further_captions (`list[str]`): That which stands for dropped ones, and prompts of previews.
        text_encoder, media_encoder (`str`): From `weights_identity`, with what else a result depends on.
        pipeline_file (`str`): Of the code that encodes, with its template.

    Returns:
        `tuple[Encodings, Encodings]`: Of captions, equal ones in one entry; and of media, with the largest of those
        that are missing first.
    """
    code = code_identity((pipeline_file,), _ENCODER_PACKAGES)
    # A CPU has no other kernels for it.
    deterministic = accelerator.device.type != "cpu" and torch.are_deterministic_algorithms_enabled()
    device = [accelerator.device.type, deterministic]
    common = {"code": code, "encoder": text_encoder, "device": device}
    captions = [(item_name(item.row), item.row.caption) for item in items]
    captions += [(f"prompt {caption[:40]!r}", caption) for caption in further_captions]
    wanted = [(name, {"caption": digest_of(caption)}, caption) for name, caption in captions]
    of_captions = _plan(cache, accelerator, "captions", common, wanted)
    of_captions.paths = dict(zip((caption for _, caption in captions), of_captions.paths, strict=True))

    common |= {"code": code + decoder_identity(), "encoder": media_encoder}
    wanted = []
    for item in items:
        used = item.record["used"]
        pixels = digest_of([used["size"], used.get("source_frames")])
        # Which decoder reads a file depends on its suffix.
        file = item.digest + pathlib.Path(item.row.id).suffix.lower()
        wanted.append((item_name(item.row), {"file": file, "pixels": pixels}, item))
    of_media = _plan(cache, accelerator, "media", common, wanted)
    of_media.missing = dict(sorted(of_media.missing.items(), key=lambda entry: -_pixel_bytes(entry[1])))
    return of_captions, of_media


def item_name(row):
    """Return what tells a row apart from those of other datasets."""
    (target,) = row.media["target"]
    return os.path.abspath(target) if isinstance(target, os.PathLike) else row.id


def _pixel_bytes(item):
    used = item.record["used"]
    return 12 * used["size"][0] * used["size"][1] * used["frames"]


def _short(parts):
    """Return the parts of a key so that they can be compared, in few bytes: there may be many items."""
    return [f"{name}={digest_of(value)[:8]}" for name, value in parts.items()]


def _plan(cache, accelerator, kind, common, wanted):
    """Return the `Encodings` of some items, and say what is missing and why.

    Args:
        cache (`Cache`), accelerator (`Accelerator`), kind (`str`)
        common (`dict`): Parts of the keys that all have.
        wanted (`list[tuple]`): Of each its name, the further parts of its key, and what it is made of.
    """
    paths = [cache.path(kind, common | own) for _, own, _ in wanted]
    short_common = _short(common)
    notes = [(f"{kind} {name}", short_common + _short(own)) for name, own, _ in wanted]
    # What one process does not see is missing: machines may have folders of their own.
    seen = gather_from_all(accelerator, {str(path): is_complete(path) for path in dict.fromkeys(paths)})
    if any(other.keys() != seen[0].keys() for other in seen):
        raise RefusedError("The processes have different encoders or different code; make all machines alike.")
    there = {path: all(other[str(path)] for other in seen) for path in dict.fromkeys(paths)}
    missing, reasons = {}, collections.defaultdict(list)
    for path, (name, _, made_of), (noted_as, parts) in zip(paths, wanted, notes, strict=True):
        if there[path] or path in missing:
            continue
        missing[path] = made_of
        last = cache.last_parts(noted_as)
        differing = [] if last is None else [part.split("=")[0] for part in parts if part not in last.split()]
        known = " and ".join(_REASONS[part] for part in differing) or "that are no longer in the cache"
        reasons["that are new" if last is None else known].append(os.path.basename(name))
    num_entries = len(there)
    logger.info("cache: %d of %d %s are encoded already", num_entries - len(missing), num_entries, kind)
    for reason, names in reasons.items():
        logger.info("cache: %d %s %s are to be encoded:\n%s", len(names), kind, reason, first_five(names))
    encodings = Encodings(kind, paths, missing, cache)
    for path, (noted_as, parts) in zip(paths, notes, strict=True):
        if path in missing:
            encodings.made_of.append((noted_as, " ".join(parts)))
        elif accelerator.is_main_process:
            cache.note_parts(noted_as, " ".join(parts))
    return encodings


def check_room(cache, num_bytes):
    """Make the cache folder, and check that its disk has room for what will be written.

    Args:
        cache (`Cache`)
        num_bytes (`int`): Of it.

    Raises:
        RefusedError: It has not, or cannot be written.
    """
    if not num_bytes:
        return
    cache.make_folder()
    cache.remove_leftovers()
    free = shutil.disk_usage(cache.folder).free
    if num_bytes > free:
        raise RefusedError(
            f"--cache_dir {cache.folder}: {num_bytes / 2**30:.2f} GiB are to be written there and "
            f"{free / 2**30:.2f} GiB are free; give a folder on another disk."
        )


def _as_it_is(made_of):
    return made_of


def encode_missing(encodings, accelerator, log, *, load, encode, read=_as_it_is, points=()):
    """Load an encoder if anything is missing, encode it, each process a part, one entry at a time, and let it go.

    One at a time, because the bits of a result would depend on what else is in the batch: then an entry that is made
    again would differ from one that was made in a full run. Media are decoded in threads, and written in them.

    Args:
        encodings (`Encodings`)
        accelerator (`Accelerator`)
        log (`MemoryLog`)
        load (`Callable[[], object]`): Returns the encoder.
        encode (`Callable`):
            From the encoder and what `read` returns to the tensors of an entry, or to one tensor, `prompt_embeds`.
        read (`Callable`): From what an entry is made of to the input of `encode`, on the CPU.
        points (`tuple[str, ...]`): Of the log: when the encoder is loaded, and when it is done.

    Raises:
        RefusedError: An item cannot be read, or a result is not finite; on all processes.
    """
    if not encodings.missing:
        return
    encoder = load()
    for point in points[:1]:
        log.point(point)
    share = list(encodings.missing.items())[accelerator.process_index :: accelerator.num_processes]
    problem = None
    try:
        _encode_share(share, encodings.kind, functools.partial(encode, encoder), read, accelerator)
    except (RefusedError, OSError) as error:
        problem = str(error)
    problems = list(filter(None, gather_from_all(accelerator, problem)))
    if problems:
        raise RefusedError("; ".join(problems))
    absent = [path for path in encodings.missing if not path.exists()]
    if any(gather_from_all(accelerator, bool(absent))):
        example = (absent or [*encodings.missing])[0]
        raise RefusedError(
            f"--cache_dir: what one process wrote another does not see (such as {example}); "
            "give a folder that all machines share."
        )
    if accelerator.is_main_process:
        for note in encodings.made_of:
            encodings.cache.note_parts(*note)
    for point in points[1:]:
        log.point(point)
    del encoder
    free_memory()


def _encode_share(share, kind, encode, read, accelerator):
    position = accelerator.process_index
    description = kind if accelerator.num_processes == 1 else f"{kind} (process {position})"
    largest = max((_pixel_bytes(made_of) for _, made_of in share), default=1) if kind == "media" else 1
    num_ahead = max(2, min(2 * _MOST_THREADS, _WAITING_BYTES // largest))
    num_threads = min(num_ahead, _MOST_THREADS)
    inputs = map_ahead(read, (made_of for _, made_of in share), num_threads=num_threads, num_ahead=num_ahead)
    # The progress of every process is shown, with the time that is left: none is waited for without a sign of life.
    with (
        contextlib.closing(inputs),
        concurrent.futures.ThreadPoolExecutor(num_threads) as pool,
        tqdm(total=len(share), desc=description, position=position, disable=not share) as bar,
    ):
        writing = collections.deque()
        for (path, made_of), read_input in zip(share, inputs, strict=True):
            tensors = encode(read_input)
            tensors = tensors if isinstance(tensors, dict) else {"prompt_embeds": tensors}
            tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
            for name, tensor in tensors.items():
                if not torch.isfinite(tensor).all():
                    what = made_of.row.name if kind == "media" else f"the caption {made_of[:60]!r}"
                    raise RefusedError(f"{what}: its {name} are not finite numbers; remove it from the dataset.")
            writing.append(pool.submit(write_entry, path, tensors))
            if len(writing) > num_ahead:
                writing.popleft().result()
            bar.update()
        for future in writing:
            future.result()


def read_unchanged(cache, read):
    """Return a function that reads an `Item`, and makes sure that it is still what was looked at.

    Args:
        cache (`Cache`)
        read (`Callable[[Row, dict], torch.Tensor]`)
    """

    def read_item(item):
        pixels = read(item.row, item.record)
        if cache.digest(item.row.content) != item.digest:
            raise RefusedError(f"{item.row.name} changed while it was read; start the run again.")
        return pixels

    return read_item


def read_sample(caption_path, media_path):
    """Return the tensors of a sample: the embedding of its caption, and what its picture or clip was encoded to."""
    return read_entry(caption_path) | read_entry(media_path)


def encoded_dataset(args, items, embeds, latents, laws, *, dropped_caption):
    """Return the `TrainingDataset` over what the cache holds of a dataset.

    Args:
        args (`argparse.Namespace`)
        items (`list[Item]`): Those that are trained.
        embeds, latents (`Encodings`): From `plan_encodings`, of these items first, with nothing missing any more.
        laws (`list[SigmaLaw]`): For each item.
        dropped_caption (`str`): Stands for captions that are dropped.
    """
    drops_captions = args.caption_dropout > 0
    return TrainingDataset(
        [item.row.id for item in items],
        encoded_entries(items, embeds, latents.paths[: len(items)]),
        read_sample,
        laws,
        seed=args.seed,
        caption_dropout=args.caption_dropout,
        dropped_prompt_embeds=read_entry(embeds.paths[dropped_caption])["prompt_embeds"] if drops_captions else None,
    )


def encoded_entries(items, embeds, paths):
    """Return the entries of items whose media are in the entries `paths`, as `read_sample` takes them."""
    return [(embeds.paths[item.row.caption], path) for item, path in zip(items, paths, strict=True)]
