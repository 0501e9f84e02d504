"""The cache: everything is found by content, whole or not at all."""

import multiprocessing
import os
import time

import pytest
import torch

from dataset import cache as cache_module
from dataset.cache import Cache, is_complete, read_entry, write_entry
from runtime.errors import RefusedError


def settle(path):
    """Make a file look as if it had been there for a while."""
    then = time.time() - 100
    os.utime(path, (then, then))


@pytest.fixture
def old_files(monkeypatch):
    """Files count as settled at once: their change times cannot be set."""
    monkeypatch.setattr(cache_module, "_SETTLED_NANOSECONDS", 0)


def counted_reads(monkeypatch):
    calls, digest = [], cache_module.hashlib.file_digest
    monkeypatch.setattr(
        cache_module.hashlib, "file_digest", lambda file, name: calls.append(file.name) or digest(file, name)
    )
    return calls


def test_an_unchanged_file_is_not_read_again(tmp_path, monkeypatch, old_files):
    file = tmp_path / "a.png"
    file.write_bytes(b"one")
    reads = counted_reads(monkeypatch)
    first = Cache(tmp_path / "cache").digest(file)
    assert Cache(tmp_path / "cache").digest(file) == first == Cache(tmp_path / "other").digest(file)
    assert len(reads) == 2, "once for each cache"


def test_a_changed_file_of_equal_size_and_time_is_read_again(tmp_path, old_files):
    file = tmp_path / "a.png"
    file.write_bytes(b"one")
    settle(file)
    before = Cache(tmp_path / "cache").digest(file)
    status = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert Cache(tmp_path / "cache").digest(file) != before


def test_a_file_that_was_just_written_is_not_trusted(tmp_path, monkeypatch):
    file = tmp_path / "a.png"
    file.write_bytes(b"one")
    reads = counted_reads(monkeypatch)
    cache = Cache(tmp_path / "cache")
    assert cache.digest(file) == cache.digest(file) and len(reads) == 2


def test_digests_of_bytes_and_folders(tmp_path):
    cache = Cache(tmp_path / "cache")
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "1.png").write_bytes(b"one")
    assert cache.digest(tmp_path / "frames" / "1.png") == cache.digest(b"one")
    digests = [cache.digest(tmp_path / "frames")]
    (tmp_path / "frames" / "2.png").write_bytes(b"two")
    digests.append(cache.digest(tmp_path / "frames"))
    (tmp_path / "frames" / "2.png").rename(tmp_path / "frames" / "0.png")
    digests.append(cache.digest(tmp_path / "frames"))
    (tmp_path / "frames" / "notes.txt").write_bytes(b"no frame")
    assert len(set(digests)) == 3 and cache.digest(tmp_path / "frames") == digests[-1]


def test_what_was_measured_is_remembered_also_by_other_processes(tmp_path):
    value = {"times": [0.1, 1 / 3], "size": [3, 4]}
    assert Cache(tmp_path, process_index=1).measured("key", lambda: value) == value
    assert Cache(tmp_path).measured("key", lambda: pytest.fail("it is known")) == value


def test_an_index_that_a_kill_cut_off_loses_one_line(tmp_path):
    cache = Cache(tmp_path)
    for name in "abc":
        cache.measured(name, lambda: 1)
    index = tmp_path / "index-0.jsonl"
    index.write_bytes(index.read_bytes()[:-8])
    again = Cache(tmp_path)
    again.measured("d", lambda: 2)
    known = Cache(tmp_path)
    assert [known.measured(name, lambda: "new") for name in "abcd"] == [1, 1, "new", 2]


def test_entries_come_back_bit_for_bit(tmp_path):
    path = Cache(tmp_path).path("media", {"file": "x"})
    tensors = {"latents": torch.randn(3, 4, 5), "prompt_embeds": torch.randn(2, 3).bfloat16().T}
    write_entry(path, tensors)
    assert is_complete(path)
    for name, tensor in read_entry(path).items():
        assert torch.equal(tensor, tensors[name]) and tensor.dtype == tensors[name].dtype
    assert path.parent.parent.parent == tmp_path and path.suffix == ".safetensors"
    content = path.read_bytes()
    for header in (b"[]", b"{}", b'{"a": 1}', b'{"a": {"data_offsets": []}}'):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        assert not is_complete(path), header
    for damaged in (b"", content[:4], content[:-1], content + b"x", b"\xff" * 8 + content[8:], content[:8] + b"{"):
        path.write_bytes(damaged)
        assert not is_complete(path), damaged[:20]
    assert not is_complete(path.with_name("none"))


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    path = Cache(tmp_path).path("media", {"file": "x"})
    monkeypatch.setattr(cache_module.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        write_entry(path, {"latents": torch.zeros(1)})
    assert list(path.parent.iterdir()) == []


def test_leftovers_of_killed_runs_are_removed_when_they_are_old(tmp_path):
    cache = Cache(tmp_path)
    entry = cache.path("media", {"file": "x"})
    write_entry(entry, {"latents": torch.zeros(1)})
    old, new = entry.with_suffix(".1-1.tmp"), entry.with_suffix(".2-2.tmp")
    old.write_bytes(b"x"), new.write_bytes(b"x")
    os.utime(old, (time.time() - 7200,) * 2)
    cache.make_room(1)
    assert sorted(entry.parent.iterdir()) == sorted([entry, new])


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RefusedError, match="--cache_dir .*file/cache cannot be written: Not a directory"):
        Cache(tmp_path / "file" / "cache").make_room(1)


def test_an_index_of_another_version_or_kind(tmp_path):
    (tmp_path / "index-0.jsonl").write_text('["item", "a", {"x": 1}]\n["new", "a", 1]\n5\n["measured", "b", 2]\n')
    cache = Cache(tmp_path)
    assert cache.measured("b", lambda: 3) == 2
    (tmp_path / "index-1.jsonl").mkdir()
    with pytest.raises(RefusedError, match=r"--cache_dir .*: index-1\.jsonl cannot be read"):
        Cache(tmp_path)


def test_a_killed_writer_leaves_whole_entries(tmp_path):
    """Kill -9 in the middle of writing: what is there is complete, what is not is not taken for it."""
    cache, latents = Cache(tmp_path), torch.ones(10**6)

    def write():
        for n in range(10**6):
            write_entry(cache.path("media", {"n": n}), {"latents": latents})

    writer = multiprocessing.get_context("fork").Process(target=write)
    writer.start()
    while not list(tmp_path.glob("media/*/*.safetensors")):
        time.sleep(0.01)
    time.sleep(0.1)
    writer.kill()
    writer.join()
    entries = list(tmp_path.glob("media/*/*.safetensors"))
    assert entries and all(map(is_complete, entries))
    assert len(list(tmp_path.glob("media/*/*.tmp"))) <= 1
