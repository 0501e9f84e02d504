"""What runs keep of a dataset between them: digests of its files, what was measured of them, and what encoders made.

    CACHE_DIR/index-R.jsonl                 lines that process R of any run added; the last of a key holds
    CACHE_DIR/captions/ab/KEY.safetensors   what the text encoder made of one caption
    CACHE_DIR/media/ab/KEY.safetensors      latents and conditions of one image or clip

Everything is found by content: the key of an entry is the digest of all that its tensors depend on. So an entry is
never stale, and two runs, or two datasets with a file in common, can share it. An entry is written under another name
first, and renamed: it is complete or absent.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import threading
import time

import safetensors
import safetensors.torch

from dataset.metadata import frame_names
from runtime.errors import RefusedError
from runtime.files import to_disk


# Of files that changed more recently than this the times do not tell whether they change again.
_SETTLED_NANOSECONDS = 2 * 10**9


def digest_of(value):
    """Return the digest of a value that JSON takes, equal for equal values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def installed_versions(packages):
    """Return {package: version}, None for one that is not installed."""
    versions = dict.fromkeys(packages)
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


class Cache:
    """A cache folder, as one process sees it.

    Args:
        folder (`str`): Made when there is something to write.
        process_index (`int`): Each process adds to an index of its own.

    Raises:
        RefusedError: An index cannot be read.
    """

    def __init__(self, folder, process_index=0):
        self.folder = pathlib.Path(folder)
        self._known, self._lock = {}, threading.Lock()
        self._own_index, self._index = self.folder / f"index-{process_index}.jsonl", None
        for path in sorted(self.folder.glob("index-*.jsonl")):
            self._read_index(path)

    def _read_index(self, path):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise RefusedError(f"--cache_dir {self.folder}: {path.name} cannot be read: {error.strerror}.") from error
        for line in text.split("\n"):
            try:
                kind, key, value = json.loads(line)
                self._known[kind, key] = value
            except (ValueError, TypeError):
                continue  # cut off by a kill, or of another version

    def _add(self, kind, key, value):
        line = json.dumps([kind, key, value]) + "\n"
        self._known[kind, key] = json.loads(line)[-1]
        with self._lock:
            try:
                if self._index is None:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    # Line by line, so that a killed run loses nothing.
                    self._index = self._own_index.open("a", buffering=1, encoding="utf-8")
                    self._index.write("\n")  # after a line that it may have left unfinished
                self._index.write(line)
            except OSError:
                # A cache that is full of entries and cannot be written serves as well; then this is found out again.
                # Where entries are to be written too, `make_room` refuses.
                self._index = open(os.devnull, "w")

    def make_room(self, num_bytes):
        """Make the folder, and check that it has room for what will be written.

        Args:
            num_bytes (`int`): Of that; with 0 nothing is done.

        Raises:
            RefusedError: The folder cannot be written, or its disk has no room.
        """
        if not num_bytes:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._own_index.touch()
        except OSError as error:
            raise RefusedError(f"--cache_dir {self.folder} cannot be written: {error.strerror}.") from None
        # What killed runs left unfinished; what runs write at this moment is younger.
        for path in self.folder.glob("*/*/*.tmp"):
            # Other processes do the same.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > 3600:
                    path.unlink()
        free = shutil.disk_usage(self.folder).free
        if num_bytes > free:
            sizes = f"{num_bytes / 2**30:.2f} GiB are to be written there and {free / 2**30:.2f} GiB are free"
            raise RefusedError(f"--cache_dir {self.folder}: {sizes}; give a folder on another disk.")

    # ---- media

    def digest(self, content):
        """Return the digest of a file's bytes, of those of a folder's images, or of bytes.

        A file is read only if its size, times or place on the disk differ from when it was read last.
        """
        if isinstance(content, bytes):
            return hashlib.sha256(content).hexdigest()
        if os.path.isdir(content):
            names = sorted(frame_names(content))
            return digest_of([[name, self.digest(os.path.join(content, name))] for name in names])
        key, status = os.path.abspath(content), os.stat(content)
        state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        known_state, digest = self._known.get(("file", key), (None, None))
        if known_state == state:
            return digest
        with open(content, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NANOSECONDS:
            self._add("file", key, [state, digest])
        return digest

    def measured(self, key, measure):
        """Return what `measure` returns, a value that JSON takes, and remember it under `key`."""
        if ("measured", key) not in self._known:
            self._add("measured", key, measure())
        return self._known["measured", key]

    # ---- entries

    def path(self, kind, parts):
        """Return where the entry of a kind (`"captions"`, `"media"`) is whose key has these parts."""
        key = digest_of(parts)
        return self.folder / kind / key[:2] / f"{key}.safetensors"


def is_complete(path):
    """Tell whether an entry is there, with as many bytes as its header states."""
    try:
        with safetensors.safe_open(path, "pt") as entry:
            return bool(entry.keys())
    except (OSError, safetensors.SafetensorError):
        return False


def write_entry(path, tensors):
    """Write an entry whole.

    Args:
        path (`pathlib.Path`): From `Cache.path`.
        tensors (`dict[str, torch.Tensor]`): On the CPU.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        to_disk(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_entry(path):
    """Return the tensors of an entry."""
    return safetensors.torch.load_file(path)
