"""Samples of several files and several text tensors: a made-up family of references, pooled embeddings and masks."""

import functools
import gc
import json
import types

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from dataset.batches import TrainingDataset, load_batches, plan_batches
from dataset.buckets import Sizing, bucket_key, describe_buckets
from dataset.cache import Cache
from dataset.encoding import Encoding, EncodingPlan, encode_missing
from dataset.images import inspect_rows, read_image
from dataset.metadata import describe_rows, read_rows
from pipelines.family import Family
from runtime.errors import RefusedError
from training.flow_matching import SigmaLaw
from training.run import plan_sample


ONE_PROCESS = types.SimpleNamespace(process_index=0, num_processes=1, is_main_process=True, device=torch.device("cpu"))
ROLES = {"references": True, "mask": False}


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage():
    """Nor are they searched for it each time that an encoder is freed."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three targets with one, two and three references, one of them with a mask."""
    monkeypatch.setattr("dataset.cache.to_disk", lambda path: None)  # no power is lost here
    for n in range(3):
        for name, size in (("target", (64, 48)), ("one", (40, 40)), ("two", (48, 32))):
            Image.new("RGB", size, (20 * n, 80, 10)).save(tmp_path / f"{name}{n}.png")
    return tmp_path


def write_table(folder, *rows):
    """Write metadata.jsonl: of each row the number of its target, its references, and further columns."""
    lines = [
        {"image": f"target{n}.png", "prompt": f"caption {n}", "edit_image": references} | further
        for n, references, further in rows
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))


def names(row):
    return {role: [path.name for path in files] for role, files in row.media.items()}


def test_rows_have_files_by_role(folder, caplog):
    caplog.set_level("INFO")
    write_table(
        folder, (0, "one0.png", {}), (1, ["one1.png", "two1.png"], {"mask": "two0.png", "layers": ["one0.png"]})
    )
    rows = read_rows(folder, roles=ROLES)
    assert [names(row) for row in rows] == [
        {"target": ["target0.png"], "references": ["one0.png"]},
        {"target": ["target1.png"], "references": ["one1.png", "two1.png"], "mask": ["two0.png"]},
    ]
    assert [row.problem for row in rows] == [None, None]
    assert rows[1].contents("references") == [folder / "one1.png", folder / "two1.png"]
    assert rows[0].contents("mask") == [] and rows[0].content == folder / "target0.png"
    assert "columns not used: 'layers'" in caplog.text
    assert "3 files have no row" in caplog.text, "the references have"
    assert [names(row) for row in read_rows(folder)] == [{"target": ["target0.png"]}, {"target": ["target1.png"]}]


def test_a_table_of_texts_has_lists_in_json(folder):
    table = 'file_name,text,reference_images\ntarget0.png,a,one0.png\ntarget1.png,b,"[""one1.png"", ""two1.png""]"\n'
    (folder / "metadata.csv").write_text(table)
    rows = read_rows(folder, roles=ROLES)
    assert [names(row)["references"] for row in rows] == [["one0.png"], ["one1.png", "two1.png"]]


def test_a_file_of_a_role_that_is_missing_is_named(folder):
    write_table(folder, (0, "none.png", {}), (1, [], {}), (2, ["one2.png", 3], {"mask": ""}))
    problems = [row.problem for row in read_rows(folder, roles=ROLES)]
    assert problems == ["'none.png' names no file in the dataset", "no references", "edit_image is 3, not a path"]


def test_a_dataset_without_the_column_is_refused(folder):
    (folder / "metadata.csv").write_text("file_name,text\ntarget0.png,a\n")
    with pytest.raises(
        RefusedError,
        match="has no references columns .edit_image, reference_images.: this model",
    ):
        read_rows(folder, roles=ROLES)
    (folder / "metadata.csv").write_text("file_name,text,edit_image,reference_images\ntarget0.png,a,b,c\n")
    with pytest.raises(RefusedError, match="several references columns .edit_image, reference_images."):
        read_rows(folder, roles=ROLES)
    (folder / "metadata.csv").unlink()
    (folder / "target0.txt").write_text("a")
    with pytest.raises(RefusedError, match="has no metadata file, and this model needs one, with references"):
        read_rows(folder, roles=ROLES)


def test_references_inside_a_hugging_face_dataset(folder):
    content = {
        "image": [str(folder / f"target{n}.png") for n in range(3)],
        "text": ["a", "b", "c"],
        "edit_image": [[str(folder / f"{name}{n}.png") for name in ("one", "two")[:n]] for n in range(3)],
        "mask": [None, str(folder / "two0.png"), None],
    }
    images = datasets.Image()
    features = {"image": images, "text": datasets.Value("string"), "edit_image": datasets.List(images), "mask": images}
    made = datasets.Dataset.from_dict(content, features=datasets.Features(features))
    made.save_to_disk(folder / "saved")
    (folder / "saved" / "x").mkdir()
    rows = read_rows(folder / "saved", roles=ROLES)
    assert [row.problem for row in rows] == ["no references", None, None]
    assert [len(row.contents("references")) for row in rows] == [0, 1, 2]
    assert [len(row.contents("mask")) for row in rows] == [0, 1, 0]
    contents = [[*row.contents("references"), *row.contents("mask")] for row in rows]
    expected = [[], ["one1", "two0"], ["one2", "two2"]]
    for of_row, of_names in zip(contents, expected, strict=True):
        for data, name in zip(of_row, of_names, strict=True):
            (folder / "read.png").write_bytes(data)
            assert np.array_equal(Image.open(folder / "read.png"), Image.open(folder / f"{name}.png"))


def test_processes_compare_all_files_of_a_row(folder, tmp_path_factory):
    def described(*references):
        write_table(folder, (0, list(references), {}))
        return describe_rows(read_rows(folder, roles=ROLES))

    assert described("one0.png") == described("one0.png") != described("one0.png", "two0.png")
    assert described("one0.png") != described("two0.png")
    rows = read_rows(folder, roles=ROLES)
    elsewhere = tmp_path_factory.mktemp("mount") / "data"
    folder.rename(elsewhere)
    assert describe_rows(read_rows(elsewhere, roles=ROLES)) == describe_rows(rows), "another mount point is alike"
    elsewhere.rename(folder)


# ---------------------------------------------------------------- from files to batches


class MadeUp(Family):
    """Its text encoder also sees the references; its media encoder has the target and the references in one entry."""

    padded = ("prompt_embeds", "text_ids")
    roles = ROLES

    def __init__(self):
        pass

    def encodings(self, item, caption):
        yield "captions", (caption,), ("references",)
        yield "media", (), ("target", "references")
        if "mask" in item.row.media:
            yield "media", (), ("mask",)

    @staticmethod
    def use_file(role, measured, used):
        """References keep their own size, a mask has that of the target."""
        return {"size": used["size"] if role == "mask" else list(measured["size"]), "frames": 1}

    @staticmethod
    def encode_prompt(encoder, caption, references):
        assert encoder == "text"
        number = float(len(caption) + 100 * len(references))
        return {
            "prompt_embeds": torch.full((len(caption), 4), number),
            "pooled_prompt_embeds": torch.full((6,), number),
            "text_ids": torch.full((len(caption), 3), len(caption)),
        }

    @staticmethod
    def encode_media(encoder, target, references=None):
        assert encoder == "media"
        if isinstance(target, list):
            return {"mask": target[0][:1]}
        return {"latents": target} | {f"reference_{n}": pixels for n, pixels in enumerate(references)}


FAMILY = MadeUp()


def prepare(folder, identities=None, encode=True):
    """Inspect, plan and encode a folder; return its items, their samples, the plan, and how much was missing."""
    cache = Cache(folder / "cache")
    rows = read_rows(folder, roles=FAMILY.roles)
    sizing = Sizing(None, None, 64 * 64, 16)
    items = inspect_rows(rows, sizing, cache=cache, use_file=FAMILY.use_file)
    plan = EncodingPlan(cache, ONE_PROCESS, identities or {"captions": 1, "media": 1})
    samples = [plan_sample(FAMILY, plan, item, "") for item in items]
    plan.find_missing()
    num_missing = {kind: len(missing) for kind, missing in plan.missing.items()}
    if encode:
        encode_missing(plan, "captions", None, load=lambda: "text", encode=FAMILY.encode_prompt, read=read_image)
        encode_missing(plan, "media", None, load=lambda: "media", encode=FAMILY.encode_media, read=read_image)
    return items, samples, plan, num_missing


def dataset_of(samples, caption_dropout=0.0):
    samples = [sample._replace(law=SigmaLaw("uniform", 1.0)) for sample in samples]
    return TrainingDataset(samples, padded=FAMILY.padded, caption_dropout=caption_dropout)


def test_batches_of_samples_with_references(folder):
    """Of six items two meet: those of equal numbers and sizes of references, whatever the length of their captions."""
    for n in range(3):
        Image.new("RGB", (64, 48), (n, 0, 0)).save(folder / f"target{n + 3}.png")
    table = [(0, "one0.png", {}), (1, ["one1.png", "two1.png"], {}), (2, ["two2.png", "one2.png"], {})]
    table += [(3, "two2.png", {}), (4, ["one2.png", "two2.png"], {"prompt": "long " * 9}), (5, ["one2.png"] * 3, {})]
    write_table(folder, *table)
    items, samples, *_ = prepare(folder)
    shapes = [bucket_key(item.record, 2)[0] for item in items]
    assert len(set(shapes)) == 5 and shapes[1] == shapes[4]
    args = types.SimpleNamespace(
        train_batch_size=2, gradient_accumulation_steps=1, seed=0, max_train_steps=None, num_train_epochs=1
    )
    batches = plan_batches(args, items, 1, num_tokens=lambda *size: 1, resumed={"step": 0}, model={})
    assert batches.last_step == 5
    dataset = dataset_of(samples)
    loaded = list(load_batches(dataset, batches, process_index=0, steps=range(1, 6), num_workers=2))
    assert sorted(len(batch["latents"]) for batch in loaded) == [1, 1, 1, 1, 2]
    (pair,) = [batch for batch in loaded if len(batch["latents"]) == 2]
    assert pair["reference_0"].shape == (2, 3, 40, 40) and pair["reference_1"].shape == (2, 3, 32, 48)
    captions = sorted(items[n].row.caption for n in (1, 4))
    length = max(map(len, captions))
    assert pair["prompt_embeds"].shape == (2, length, 4) and pair["pooled_prompt_embeds"].shape == (2, 6)
    assert sorted(pair["prompt_embeds_mask"].sum(1).tolist()) == sorted(map(len, captions))
    assert torch.equal(pair["text_ids_mask"], pair["prompt_embeds_mask"])
    table = describe_buckets([item.record for item in items], [1] * 6, train_batch_size=2, tokens_per_sample=max)
    assert "64 x 48 x 1 + 2 references" in "\n".join(table)


def test_the_largest_target_is_batched_apart(folder):
    Image.new("RGB", (96, 96)).save(folder / "target1.png")
    write_table(folder, (0, "one0.png", {}), (1, "one0.png", {}), (2, "one0.png", {}))
    items, *_ = prepare(folder, encode=False)
    shapes = [bucket_key(item.record, 2)[0] for item in items]
    assert shapes[0] == shapes[2] != shapes[1] and shapes[0].files == shapes[1].files


def test_a_dropped_caption_changes_all_tensors_of_the_text_and_none_of_the_media(folder):
    write_table(folder, (0, ["one0.png", "two0.png"], {"mask": "two1.png"}))
    _, samples, *_ = prepare(folder)
    dataset, plain = dataset_of(samples, caption_dropout=0.5), dataset_of(samples)
    dropped = 0
    for step in range(1, 30):
        ours, other = dataset[step, 0, 0], plain[step, 0, 0]
        assert ours.keys() == other.keys() and ours["mask"].shape == (1, 48, 64)
        differing = {name for name in ours if not torch.equal(ours[name], other[name])}
        assert differing in (set(), {"prompt_embeds", "pooled_prompt_embeds", "text_ids"})
        dropped += bool(differing)
        if differing:
            assert ours["pooled_prompt_embeds"].unique() == 200, "the dropped caption, with the same references"
    assert 5 < dropped < 25


def test_an_entry_is_made_again_when_what_it_reads_changes_and_no_other(folder):
    rows = [(0, ["one0.png"], {"mask": "two1.png"}), (1, ["one1.png", "two1.png"], {}), (2, ["one0.png"], {})]
    write_table(folder, *rows)

    def missing(*rows, **kwargs):
        if rows:
            write_table(folder, *rows)
        return prepare(folder, **kwargs)[3]

    # Of each item its caption and the dropped one; with the same references those are one.
    assert missing() == {"captions": 5, "media": 4}
    assert missing() == {"captions": 0, "media": 0}
    Image.new("RGB", (64, 32), "red").save(folder / "two1.png")
    assert missing() == {"captions": 2, "media": 2}, "a reference of one, the mask of another"
    Image.new("RGB", (64, 48), "red").save(folder / "target0.png")
    assert missing() == {"captions": 0, "media": 1}
    rows[2] = (2, ["one0.png", "one0.png"], {})
    assert missing(*rows) == {"captions": 2, "media": 1}
    rows[1] = (1, ["two1.png", "one1.png"], {})
    assert missing(*rows) == {"captions": 2, "media": 1}, "their order counts"
    rows[0] = (0, ["one0.png"], {"mask": "two1.png", "prompt": "another"})
    assert missing(*rows) == {"captions": 1, "media": 0}
    assert missing(identities={"captions": 1, "media": 2}) == {"captions": 0, "media": 4}, "another version"


def test_versions_of_packages_and_of_decoding_count(folder, monkeypatch):
    write_table(folder, (0, ["one0.png"], {}))
    item = prepare(folder)[0][0]
    text, media = Encoding("captions", ("a",)), Encoding("media", (), item, ("target",))

    def paths():
        return EncodingPlan(Cache(folder / "cache"), ONE_PROCESS, {"captions": 1, "media": 1}).paths([text, media])

    before = paths()
    assert paths() == before
    monkeypatch.setattr("dataset.encoding.DECODING", {"version": 2})
    assert paths()[0] == before[0] and paths()[1] != before[1]
    monkeypatch.undo()
    # With torchvision, say, transformers resizes images by other code than without it.
    monkeypatch.setattr("dataset.encoding.installed_versions", lambda packages: dict.fromkeys(packages, "1.0"))
    assert paths()[0] != before[0] and paths()[1] != before[1]


def test_a_further_file_that_cannot_be_read_is_named(folder):
    (folder / "two1.png").write_bytes(b"no image")
    write_table(folder, (0, ["one1.png", "two1.png"], {}))
    with pytest.raises(RefusedError, match=r"target0.png \(metadata.jsonl line 1\): file 2 of its references is not"):
        prepare(folder)


def test_a_reference_that_changes_while_it_is_read_is_refused(folder):
    write_table(folder, (0, ["one0.png"], {}))
    _, _, plan, _ = prepare(folder, encode=False)

    def read_and_change(row, record):
        pixels = read_image(row, record)
        Image.new("RGB", (40, 40), "red").save(folder / "one0.png")
        return pixels

    encode = functools.partial(
        encode_missing, plan, "captions", None, load=lambda: "text", encode=FAMILY.encode_prompt
    )
    with pytest.raises(RefusedError, match="changed while it was read"):
        encode(read=read_and_change)
