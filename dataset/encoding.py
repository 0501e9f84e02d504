"""What encoders make of a dataset: which entries of the cache its samples are read from, and how those are made, once.

A model family states which entries each item has, from which of its files and texts (`Encoding`).
"""

import contextlib
import dataclasses
import functools
import logging

import torch
from diffusers.training_utils import free_memory
from tqdm.auto import tqdm

from dataset.batches import map_ahead
from dataset.cache import digest_of, installed_versions, is_complete, write_entry
from dataset.inspection import DECODING, Item, suffix
from dataset.metadata import first_five
from runtime.errors import RefusedError
from runtime.processes import gather_from_all, together


logger = logging.getLogger(__name__)

# With torchvision transformers resizes the images of an image encoder by other code than without.
_ENCODER_PACKAGES = ("torch", "torchvision", "diffusers", "transformers", "tokenizers", "ftfy")

# Decoded media that wait for the encoder may take so much.
_WAITING_BYTES = 2 * 2**30
_MOST_THREADS = 8


@dataclasses.dataclass(frozen=True)
class Encoding:
    """One entry of the cache: what an encoder makes of texts and of files of an item.

    Args:
        kind (`str`): Of the encoder: `"captions"` or `"media"`, as the folders of the cache are called.
        texts (`tuple[str, ...]`)
        item (`Item`, *optional*), roles (`tuple[str, ...]`): Whose files, and which of them.
    """

    kind: str
    texts: tuple[str, ...] = ()
    item: Item | None = None
    roles: tuple[str, ...] = ()

    @property
    def files(self):
        """The files of each role, as `Item.files` returns them."""
        return [self.item.files(role) for role in self.roles]

    @property
    def key(self):
        """What of the dataset its tensors depend on; values that JSON takes."""
        read = ("size", "source_frames")
        files = [
            [[digest, suffix(*row.media["target"]), [used.get(name) for name in read]] for row, digest, used in files]
            for files in self.files
        ]
        return [self.texts, files, DECODING if files else None]

    @property
    def name(self):
        """How messages call it."""
        return self.item.row.name if self.roles else f"the caption {self.texts[0][:60]!r}"

    @property
    def pixel_bytes(self):
        """Bytes of its files as they are decoded, in fp32."""
        return sum(
            12 * used["size"][0] * used["size"][1] * used["frames"] for files in self.files for *_, used in files
        )


class EncodingPlan:
    """Where each `Encoding` of a run is in the cache, and which are missing.

    Args:
        cache (`Cache`)
        accelerator (`Accelerator`)
        identities (`dict[str, object]`):
            From the kind of an encoder to what its results depend on in addition to what it reads: its weights, and
            the version that the family states. Values that JSON takes.

    Attributes:
        missing (`dict[str, dict[pathlib.Path, Encoding]]`):
            For each kind what is not in the cache of every process, those of the most pixels first, once all samples
            are planned and `find_missing` was called.
    """

    def __init__(self, cache, accelerator, identities):
        self.cache, self.accelerator, self.wanted, self.missing = cache, accelerator, {}, {}
        # A CPU has no other kernels for it.
        deterministic = accelerator.device.type != "cpu" and torch.are_deterministic_algorithms_enabled()
        common = installed_versions(_ENCODER_PACKAGES), accelerator.device.type, deterministic
        self._common = {kind: digest_of([identity, common]) for kind, identity in identities.items()}

    def paths(self, encodings):
        """Plan the entries of a sample, equal ones once; return where they will be, as `read_sample` takes them."""
        found = {
            self.cache.path(encoding.kind, [self._common[encoding.kind], encoding.key]): encoding
            for encoding in encodings
        }
        self.wanted |= found
        return tuple(found)

    def find_missing(self):
        """Find out what is to be encoded.

        Raises:
            RefusedError: The processes have different encoders.
        """
        # What one process does not see is missing: machines may have folders of their own.
        seen = gather_from_all(self.accelerator, {str(path): is_complete(path) for path in self.wanted})
        if any(other.keys() != seen[0].keys() for other in seen):
            raise RefusedError("The processes have different encoders or different code; make all machines alike.")
        absent = [path for path in self.wanted if not all(other[str(path)] for other in seen)]
        absent.sort(key=lambda path: -self.wanted[path].pixel_bytes)
        for kind in self._common:
            wanted = [path for path, encoding in self.wanted.items() if encoding.kind == kind]
            self.missing[kind] = {path: self.wanted[path] for path in absent if self.wanted[path].kind == kind}
            num_missing = len(self.missing[kind])
            logger.info("cache: %d of %d %s are encoded already", len(wanted) - num_missing, len(wanted), kind)


def count_caption_tokens(items, further_captions, count_tokens):
    """Return how many tokens of each different caption are kept, and log which are longer than the text encoder takes.

    The records say so, too.

    Args:
        items (`list[Item]`): Of those that are used.
        further_captions (`list[str]`): The one that replaces dropped ones, and prompts of previews.
        count_tokens (`Callable[[str], tuple[int, int]]`): Returns the tokens of a caption and how many are kept.

    Returns:
        `dict[str, int]`: How many are kept of each.
    """
    texts = [(item.row.name, item.row.caption, item.record) for item in items]
    texts += [("prompt of a preview", caption, {"reason": None}) for caption in dict.fromkeys(further_captions)]
    counts = {caption: count_tokens(caption) for caption in dict.fromkeys(caption for _, caption, _ in texts)}
    cut = []
    for name, caption, record in texts:
        num_tokens, kept = counts[caption]
        if num_tokens > kept:
            cut.append(f"{name}: {num_tokens} tokens, {kept} kept: {caption[:60]!r}...")
            change = f"caption cut from {num_tokens} to {kept} tokens"
            record["reason"] = "; ".join(filter(None, [record["reason"], change]))
    if cut:
        logger.warning("%d captions are cut, as the stock pipeline would cut them:\n%s", len(cut), first_five(cut))
    return {caption: kept for caption, (_, kept) in counts.items()}


def encode_missing(plan, kind, log, *, load, encode, read=None, points=()):
    """Load an encoder if anything of its kind is missing, encode that, each process a part, and release it.

    One entry at a time, because the bits of a result would depend on what else is in the batch: then an entry that is
    made again would differ from one that was made in a full run. Media are decoded in threads, and written in them.

    Args:
        plan (`EncodingPlan`), kind (`str`)
        log (`MemoryLog`)
        load (`Callable[[], object]`): Returns the encoder.
        encode (`Callable[..., dict[str, torch.Tensor]]`):
            From the encoder, the texts, and for each role the pixels (a list for other roles than the target) to the
            tensors of the entry.
        read (`Callable[[Row, dict], torch.Tensor]`): From the row of a file and its record to its pixels.
        points (`tuple[str, ...]`): Of the log: when the encoder is loaded, and when it is done.

    Raises:
        RefusedError: An item cannot be read, or a result is not finite; on all processes.
    """
    missing, accelerator = plan.missing[kind], plan.accelerator
    if not missing:
        return
    encoder = load()
    for point in points[:1]:
        log.point(point)
    share = list(missing.items())[accelerator.process_index :: accelerator.num_processes]
    position = accelerator.process_index
    description = kind if accelerator.num_processes == 1 else f"{kind} (process {position})"

    def look_for_all():
        for path in missing:
            if not path.exists():
                seen = f"what one process wrote another does not see (such as {path})"
                raise RefusedError(f"--cache_dir: {seen}; give a folder that all machines share.")

    # The progress of every process is shown, with the time that is left: none is waited for without a sign of life.
    with tqdm(total=len(share), desc=description, position=position, disable=not share) as bar:
        how = functools.partial(encode, encoder), functools.partial(_read, plan, read)
        together(accelerator, functools.partial(_encode_share, share, *how, bar))
    together(accelerator, look_for_all)
    for point in points[1:]:
        log.point(point)
    del encoder, how
    free_memory()


def _read(plan, read, encoding):
    """Return the inputs of an encoder, and make sure that files are still what was inspected."""
    inputs = [*encoding.texts]
    for role, files in zip(encoding.roles, encoding.files, strict=True):
        pixels = []
        for row, digest, used in files:
            pixels.append(read(row, encoding.item.record | {"used": used}))
            if plan.cache.digest(row.content) != digest:
                raise RefusedError(f"{row.name} changed while it was read; start the run again.")
        inputs.append(pixels[0] if role == "target" else pixels)
    return inputs


def _encode_share(share, encode, read, bar):
    largest = max((encoding.pixel_bytes for _, encoding in share), default=0)
    num_ahead = max(2, min(2 * _MOST_THREADS, _WAITING_BYTES // max(largest, 1)))
    how = {"num_threads": min(num_ahead, _MOST_THREADS), "num_ahead": num_ahead}
    inputs = map_ahead(read, [encoding for _, encoding in share], **how)

    def results():
        for (path, encoding), of_entry in zip(share, inputs, strict=True):
            tensors = {name: tensor.cpu() for name, tensor in encode(*of_entry).items()}
            for name, tensor in tensors.items():
                if not torch.isfinite(tensor).all():
                    problem = f"its {name} are not finite numbers; remove it from the dataset"
                    raise RefusedError(f"{encoding.name}: {problem}.")
            yield path, tensors

    written = map_ahead(lambda result: write_entry(*result), results(), **how)
    try:
        with contextlib.closing(inputs), contextlib.closing(written):
            for _ in written:
                bar.update()
    except OSError as error:
        raise RefusedError(f"an item cannot be read, or --cache_dir cannot be written: {error}.") from error
