"""Encoding what is missing: once, by all processes together, however long one of them takes."""

import pathlib
import textwrap
import time
import types

import pytest
import torch

from dataset.cache import Cache, is_complete, read_entry
from dataset.encoding import Encoding, EncodingPlan, encode_missing
from dataset.inspection import Item
from dataset.metadata import Row
from runtime.errors import RefusedError


ONE_PROCESS = types.SimpleNamespace(process_index=0, num_processes=1, is_main_process=True, device=torch.device("cpu"))


class UnchangedFiles(Cache):
    """A cache in which nothing is read for digests: files are named by numbers that stand for their content."""

    def digest(self, content):
        return str(content)


def media(tmp_path, num_items):
    """The plan of items whose file n has the digest n, with its entries in their order."""
    items = [
        Item(
            Row(str(n), "a", {"target": (n,)}, str(n)),
            {"id": str(n), "used": {"size": [16, 16], "frames": 1}},
            {"target": (str(n),)},
        )
        for n in range(num_items)
    ]
    wanted = [Encoding("media", item=item, roles=("target",)) for item in items]
    plan = EncodingPlan(UnchangedFiles(tmp_path), ONE_PROCESS, {"media": None})
    paths = plan.paths(wanted)
    plan.find_missing()
    return plan, paths


def run(plan, encode, read):
    """Encode in this process, with an encoder that is loaded once."""
    loaded = []
    encode_missing(
        plan,
        "media",
        None,
        load=lambda: loaded.append(None) or "encoder",
        encode=lambda encoder, pixels: encode(pixels) if encoder == "encoder" else None,
        read=read,
    )
    assert len(loaded) == 1


def read(row, record):
    return torch.full((3,), float(row.id))


def test_entries_are_made_of_their_own_item(tmp_path):
    plan, paths = media(tmp_path, 40)
    run(plan, lambda pixels: {"latents": pixels * 2}, read)
    for n, path in enumerate(paths):
        assert torch.equal(read_entry(path)["latents"], torch.full((3,), 2.0 * n))
    assert media(tmp_path, 40)[0].missing == {"media": {}}


def test_decoding_goes_on_while_the_encoder_works(tmp_path):
    begun = []

    def note_and_read(row, record):
        begun.append(row)
        return read(row, record)

    def encode(pixels):
        number = int(pixels[0])
        limit = time.monotonic() + 20
        while len(begun) < min(number + 2, 20):
            assert time.monotonic() < limit, "nothing is read meanwhile"
            time.sleep(0.001)
        return {"latents": pixels}

    run(media(tmp_path, 20)[0], encode, note_and_read)


@pytest.mark.parametrize("problem", ["a file that cannot be read", "a file that changes", "nan", "disk"])
def test_problems_are_refused_by_name_and_leave_nothing_half_done(tmp_path, problem, monkeypatch):
    def read_or_fail(row, record):
        if row.id == "3" and problem == "a file that cannot be read":
            raise RefusedError("3 cannot be used: it is gone.")
        if row.id == "3" and problem == "a file that changes":
            monkeypatch.setattr(UnchangedFiles, "digest", lambda cache, content: f"{content} now")
        return read(row, record) * (torch.nan if row.id == "3" and problem == "nan" else 1)

    if problem == "disk":
        monkeypatch.setattr("dataset.cache.os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space")))
    plan, paths = media(tmp_path, 6)
    said = {
        "nan": "3: its latents are not finite numbers",
        "disk": "No space",
        "a file that changes": "changed while it was read; start the run again",
    }.get(problem, "3 cannot be used")
    with pytest.raises(RefusedError, match=said):
        run(plan, lambda pixels: {"latents": pixels}, read_or_fail)
    assert not is_complete(paths[3]) and not list(tmp_path.glob("*/*/*.tmp"))


def test_a_full_cache_may_be_read_only(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise PermissionError(13, "Permission denied")

    cache = Cache(tmp_path / "cache")
    monkeypatch.setattr(pathlib.Path, "mkdir", fail)
    assert cache.measured("key", lambda: 1) == 1 == cache.measured("key", lambda: 2)
    cache.make_room(0)
    with pytest.raises(RefusedError, match="--cache_dir .* cannot be written: Permission denied"):
        cache.make_room(1)


def test_processes_wait_longer_than_collectives_may_take(on_two_processes, tmp_path):
    """With a limit of 2 s for collectives one process encodes for 3 s."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import datetime, sys, time
            sys.path.insert(0, sys.argv[1])
            import torch
            from accelerate import Accelerator, InitProcessGroupKwargs
            from dataset.cache import Cache, is_complete
            from dataset.encoding import Encoding, EncodingPlan, encode_missing
            from runtime.errors import RefusedError
            from runtime.processes import gather_from_all

            limit = InitProcessGroupKwargs(backend="gloo", timeout=datetime.timedelta(seconds=2))
            accelerator = Accelerator(kwargs_handlers=[limit])
            gather_from_all(accelerator, None)
            cache = Cache(sys.argv[2], accelerator.process_index)
            wanted = [Encoding("captions", (str(n),)) for n in range(8)]
            plan = EncodingPlan(cache, accelerator, {"captions": None})
            plan.paths(wanted)
            plan.find_missing()

            def encode(encoder, caption):
                time.sleep(0.75 if int(caption) % 2 == 0 else 0)
                return {"prompt_embeds": torch.full((2, 3), float(caption))}

            encode_missing(plan, "captions", None, load=lambda: None, encode=encode)
            assert all(map(is_complete, plan.missing["captions"]))

            def fail(encoder, caption):
                return {"prompt_embeds": torch.full((2, 3), float("nan" if int(caption) == 3 else 1))}

            try:
                encode_missing(plan, "captions", None, load=lambda: None, encode=fail)
            except RefusedError as error:
                print(f"refused on {accelerator.process_index} {error}\\n", end="", flush=True)
            accelerator.end_training()
            """
        )
    )
    done = on_two_processes(script, pathlib.Path(__file__).parents[2], tmp_path / "cache")
    for process in range(2):
        assert f"refused on {process} the caption '3': its prompt_embeds are not finite" in done.stdout
    assert len(list((tmp_path / "cache" / "captions").glob("*/*.safetensors"))) == 8
