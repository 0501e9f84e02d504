"""Weights whose tensors all have a place, are whole and are cast: known from headers, for every part of a pipeline."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    Qwen2_5_VLForConditionalGeneration,
    UMT5EncoderModel,
)

from pipelines import loading, qwen_image, wan_video
from pipelines.weights import digest_tensors, read_tensors, weights_identity
from runtime.files import refuse_pointer


PARTS = {
    ("qwen_image", "transformer"): "diffusion_pytorch_model.safetensors",
    ("qwen_image", "text_encoder"): "model.safetensors",
    ("qwen_image", "vae"): "diffusion_pytorch_model.safetensors",
    ("wan_t2v_a14b", "transformer"): "diffusion_pytorch_model.safetensors",
    ("wan_t2v_a14b", "transformer_2"): "diffusion_pytorch_model.safetensors",
    ("wan_t2v_a14b", "text_encoder"): "model.safetensors",
    ("wan_t2v_a14b", "vae"): "diffusion_pytorch_model.safetensors",
    ("wan_flf2v", "image_encoder"): "model.safetensors",
}
READS = {
    "qwen_image": ("transformer", "text_encoder", "vae"),
    "wan_t2v_a14b": ("transformer", "transformer_2", "text_encoder", "vae", "image_encoder"),
    "wan_flf2v": ("transformer", "text_encoder", "vae", "image_encoder"),
}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 4967215360\n".format("0" * 64)


def pipeline_of(family):
    return qwen_image.QwenImage if family == "qwen_image" else wan_video.WanVideo


def check(family, model, **kwargs):
    """What both scripts do before anything else is read."""
    pipeline = pipeline_of(family)
    loading.check_pipeline(pipeline.pipelines, pipeline.parts, str(model))
    return loading.check_weights(pipeline.parts, str(model), READS[family], **kwargs)


@pytest.fixture
def copy_of(tiny_model, tmp_path):
    def copy(family):
        return shutil.copytree(tiny_model(family), tmp_path / family)

    return copy


def with_a_further_block(tensors):
    """The tensors of one more block (or layer) than the config says."""
    block = r"((?:blocks|layers|block|up_blocks)\.)1\."
    more = {re.sub(block, r"\g<1>7.", name): tensor.clone() for name, tensor in tensors.items()}
    assert len(more.keys() - tensors.keys()) > 1
    return tensors | more


def without_one(tensors):
    del tensors[max(tensors)]
    return tensors


def of_another_shape(tensors):
    name = max(tensors)
    return tensors | {name: torch.zeros(3, *tensors[name].shape)}


def of_dtype(dtype):
    def change(tensors):
        name = next(name for name, tensor in tensors.items() if tensor.ndim == 2 or tensor.ndim == 5)
        return tensors | {name: (tensors[name] * 100).to(dtype)}

    return change


def with_scales(tensors):
    """As scaled fp8 is published: smaller numbers, and for each what to multiply it with."""
    name = max(name for name in tensors if name.endswith("weight"))
    scales = {name.replace("weight", "scale_weight"): torch.ones(1)}
    return tensors | {name: tensors[name].to(torch.float8_e4m3fn)} | scales


DAMAGES = {
    "more": (with_a_further_block, r"tensors that have no place in this .*, such as .*\.7\."),
    "fewer": (without_one, r"lacks [12] .*tensors"),
    "shape": (of_another_shape, r"has the shape \(3, .*and the model has"),
    "int8": (of_dtype(torch.int8), "is int8; weights are read as float64, float32"),
    "uint8": (of_dtype(torch.uint8), "is uint8"),
    "int64": (of_dtype(torch.int64), "is int64"),
    "scaled": (with_scales, "1 tensors that have no place .*scale_weight"),
}


@pytest.mark.parametrize("family, part", PARTS)
def test_tensors_without_a_place_are_refused(family, part, copy_of):
    model = copy_of(family)
    file = model / part / PARTS[family, part]
    tensors = load_file(file)
    for change, said in DAMAGES.values():
        save_file(change(dict(tensors)), file)
        with pytest.raises(ValueError, match=f"{part}.* {said}"):
            loading.check_weights(pipeline_of(family).parts, str(model), (part,))


@pytest.mark.parametrize("family, part", PARTS)
def test_files_that_are_not_whole_are_refused(family, part, copy_of):
    model = copy_of(family)
    file = model / part / PARTS[family, part]
    whole = file.read_bytes()
    for content, said in (
        (whole[:-8], "is cut short"),
        (whole[:5], "is cut short"),
        (POINTER.encode(), "git lfs pull"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"{part}.*{said}"):
            loading.check_weights(pipeline_of(family).parts, str(model), (part,))
    file.unlink()
    hub = {"revision": None, "variant": None}
    checked = check(family, model)
    assert part not in checked
    with pytest.raises(OSError, match=f"no file of weights in .*{part}"):
        loading.fetch_weights(pipeline_of(family).parts, str(model), READS[family], checked, **hub)
    file.write_bytes(whole)
    checked = check(family, model)
    assert part in checked and checked == loading.fetch_weights(
        pipeline_of(family).parts, str(model), READS[family], checked, **hub
    )


@pytest.mark.parametrize("family", READS)
def test_every_small_file_is_looked_at(family, copy_of):
    model = copy_of(family)
    files = [path for path in model.rglob("*.json") if path.parent != model or path.name == "model_index.json"]
    assert {path.parent.name for path in files} > {"tokenizer", "scheduler", "text_encoder"}
    for file in files:
        whole = file.read_text()
        for content, said in (
            (POINTER, "is a Git LFS pointer"),
            (whole[: len(whole) // 2], "is cut short or not JSON"),
            (f"[{whole}]", "is not a JSON object"),
        ):
            file.write_text(content)
            with pytest.raises(ValueError, match=re.escape(str(file)) + f" {said}"):
                check(family, model)
        file.write_text(whole)
    check(family, model)


@pytest.mark.parametrize("family", READS)
def test_files_that_make_no_sense_are_refused(family, copy_of):
    """They are whole, and JSON; what their libraries raise has no class in common."""
    model, pipeline = copy_of(family), pipeline_of(family)
    nonsense = {
        "tokenizer/tokenizer.json": {},
        "tokenizer/tokenizer_config.json": {"model": {}, "unk_token": {}},
        "transformer/config.json": {"patch_size": None},
        "vae/config.json": {"dim_mult": 1},
        "text_encoder/config.json": {"num_layers": "a", "text_config": {"num_hidden_layers": "a"}},
    }
    for name, content in nonsense.items():
        whole = (model / name).read_text()
        changed = json.loads(whole) | content if content and "tokenizer" not in name else content
        (model / name).write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=rf"its .*{name.split('/')[0]}.* cannot be understood \((\w+): "):
            check(family, model)
            pipeline(str(model))
        (model / name).write_text(whole)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.slow), torch.float8_e4m3fn])
@pytest.mark.parametrize("family, part", PARTS)
def test_dtypes_that_are_accepted_are_cast(family, part, dtype, copy_of):
    """Independent reference: torch's own cast of every tensor."""
    model = copy_of(family)
    file = model / part / PARTS[family, part]
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    loading.check_weights(pipeline_of(family).parts, str(model), (part,))
    loaded = pipeline_of(family).parts[part][0].from_pretrained(model, subfolder=part, dtype=torch.float32)
    state_dict = loaded.state_dict()
    placed = tensors.keys() & state_dict.keys()
    assert len(placed) > len(tensors) / 2 or part == "text_encoder"
    for name in placed:
        assert torch.equal(state_dict[name], tensors[name].float()), name


@pytest.mark.parametrize("family, part", PARTS)
def test_files_are_found_as_loaders_find_them(family, part, copy_of):
    """Shards with an index, variants, .bin; digests tell the weights, not the files."""
    model = copy_of(family)
    file, model_class = model / part / PARTS[family, part], pipeline_of(family).parts[part][0]

    def check_one(**kwargs):
        return loading.check_weights(pipeline_of(family).parts, str(model), (part,), **kwargs)[part]

    before = check_one()
    tensors = load_file(file)
    file.unlink()
    stem = file.name.removesuffix(".safetensors")
    names = sorted(tensors)
    shards = {f"{stem}-0000{k + 1}-of-00002.safetensors": names[k::2] for k in range(2)}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, file.with_name(shard))
    index = file.with_name(file.name + ".index.json")
    index.write_text(
        json.dumps({"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}})
    )
    assert check_one() == before
    model_class.from_pretrained(model, subfolder=part)
    last = file.with_name(max(shards))
    held_back = last.read_bytes()
    last.unlink()
    with pytest.raises(ValueError, match=f"{last.name} is missing"):
        check_one()
    save_file({name: tensors[name] for name in names}, last)
    with pytest.raises(ValueError, match="both hold"):
        check_one()
    last.write_bytes(held_back)
    index.write_text('{"weight_map"')
    with pytest.raises(ValueError, match="not an index of weights"):
        check_one()
    for path in (index, *map(file.with_name, shards)):
        path.unlink()

    torch.save(tensors, file.with_name({"model": "pytorch_model"}.get(stem, stem) + ".bin"))
    assert check_one() == before
    torch.save(
        with_a_further_block(dict(tensors)), file.with_name({"model": "pytorch_model"}.get(stem, stem) + ".bin")
    )
    with pytest.raises(ValueError, match="no place"):
        check_one()
    save_file(tensors, file.with_name(f"{stem}.fp16.safetensors"))
    assert check_one(variant="fp16") == before
    save_file(tensors, file)
    file.with_name(f"{stem}.fp16.safetensors").unlink()
    if part.startswith("transformer"):
        with pytest.raises(OSError, match="no file of weights"):
            check_one(variant="fp16", required=True)
    else:
        assert check_one(variant="fp16") == before


def test_names_that_transformers_renames_have_a_place(tiny_model, tmp_path):
    """Published encoders: old and new names, tied tensors once and twice, positions that are no longer needed."""
    cases = [("qwen_image", "text_encoder", Qwen2_5_VLForConditionalGeneration)]
    cases += [("wan_flf2v", "text_encoder", UMT5EncoderModel), ("wan_flf2v", "image_encoder", CLIPVisionModel)]
    for family, part, model_class in cases:
        model = shutil.copytree(tiny_model(family), tmp_path / family / part)
        file = model / part / "model.safetensors"
        as_saved = load_file(file)
        as_named = model_class.from_pretrained(model, subfolder=part).state_dict()
        others = [{name: tensor.clone() for name, tensor in as_named.items()}]
        if model_class is UMT5EncoderModel:
            assert "shared.weight" in as_saved
            others.append(as_saved | {"encoder.embed_tokens.weight": as_saved["shared.weight"].clone()})
        if model_class is CLIPVisionModel:
            prefixed = {f"vision_model.{name}": tensor for name, tensor in as_saved.items()}
            others += [prefixed, prefixed | {"vision_model.embeddings.position_ids": torch.arange(257)[None]}]
        for tensors in others:
            save_file(tensors, file)
            loading.check_weights(pipeline_of(family).parts, str(model), (part,))
            again = model_class.from_pretrained(model, subfolder=part).state_dict()
            assert all(torch.equal(again[name], tensor) for name, tensor in as_named.items())


def test_the_image_encoder_that_is_published(copy_of):
    """It has a projection, which no video is made with; whichever name it goes by, the embeddings are the same."""
    model = copy_of("wan_flf2v")
    index = json.loads((model / "model_index.json").read_text())

    def encode(name):
        (model / "model_index.json").write_text(json.dumps(index | {"image_encoder": ["transformers", name]}))
        assert "image_encoder" in check("wan_flf2v", model)
        encoder = wan_video.WanVideo(str(model)).load_media_encoder("cpu")
        clip = torch.linspace(-1, 1, 3 * 5 * 32 * 32).reshape(3, 5, 32, 32)
        return wan_video.encode_clip(encoder, clip, task="flf2v")["image_embeds"]

    before = encode("CLIPVisionModel")
    without = CLIPVisionModel.from_pretrained(model, subfolder="image_encoder")
    encoder = CLIPVisionModelWithProjection(without.config)
    encoder.vision_model.load_state_dict(without.state_dict())
    encoder.save_pretrained(model / "image_encoder")
    assert "visual_projection.weight" in load_file(model / "image_encoder" / "model.safetensors")
    assert torch.equal(encode("CLIPVisionModelWithProjection"), before)
    assert torch.equal(encode("CLIPVisionModel"), before)


@pytest.mark.parametrize("family", ["qwen_image", "wan_t2v"])
def test_a_single_file_or_folder_beside_the_pipeline(family, tiny_model, tmp_path):
    model, pipeline = str(tiny_model(family)), pipeline_of(family)

    def check_path(path, **kwargs):
        digests = loading.check_weights(pipeline.parts, model, ("transformer",), transformer_path=str(path), **kwargs)
        return digests["transformer"]

    tensors = load_file(tiny_model(family) / "transformer" / "diffusion_pytorch_model.safetensors")
    folder = shutil.copytree(tiny_model(family) / "transformer", tmp_path / "folder")
    save_file(tensors, tmp_path / "one.safetensors")
    assert check_path(tmp_path / "one.safetensors") == check_path(folder)
    for change, said in DAMAGES.values():
        save_file(change(dict(tensors)), tmp_path / "bad.safetensors")
        shutil.copy(tmp_path / "bad.safetensors", folder / "diffusion_pytorch_model.safetensors")
        for path in (tmp_path / "bad.safetensors", folder):
            with pytest.raises(ValueError, match=f"{path}.* {said}"):
                check_path(path)
    twice = "model.diffusion_model." + max(tensors)
    save_file(tensors | {twice: tensors[max(tensors)].clone()}, tmp_path / "twice.safetensors")
    with pytest.raises(ValueError, match="no place"):
        check_path(tmp_path / "twice.safetensors")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path, said in (("model.gguf", "neither a folder nor a file"), ("none", "there is no folder")):
        with pytest.raises((OSError, ValueError), match=said):
            pipeline(model, transformer_path=str(tmp_path / path))


def test_quantised_parts_are_refused(copy_of):
    for part in READS["qwen_image"]:
        model = copy_of("qwen_image")
        config = json.loads((model / part / "config.json").read_text())
        (model / part / "config.json").write_text(
            json.dumps(config | {"quantization_config": {"quant_method": "bnb"}})
        )
        with pytest.raises(ValueError, match=rf"its {part} is quantised \(bnb\)"):
            check("qwen_image", model)
        shutil.rmtree(model)


# ---------------------------------------------------------------- which model


@pytest.mark.parametrize(
    "family, name, allowed",
    [
        ("qwen_image", "QwenImageEditPlusPipeline", "allowed is QwenImagePipeline"),
        ("qwen_image", "QwenImageLayeredPipeline", "allowed is QwenImagePipeline"),
        ("qwen_image", "WanPipeline", "allowed is QwenImagePipeline"),
        ("wan_flf2v", "WanVACEPipeline", "allowed are WanPipeline and WanImageToVideoPipeline"),
        ("wan_flf2v", None, "allowed are WanPipeline and WanImageToVideoPipeline"),
    ],
)
def test_other_pipelines_are_refused(family, name, allowed, copy_of):
    model = copy_of(family)
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps(index | {"_class_name": name}))
    with pytest.raises(ValueError, match=f"it is a {name}; {allowed}"):
        check(family, model)
    (model / "model_index.json").unlink()
    with pytest.raises(OSError, match="has no model_index.json"):
        check(family, model)


@pytest.mark.parametrize("family, part", PARTS)
def test_other_parts_are_refused(family, part, copy_of):
    """What model_index.json says of each, and what its config says of itself; nothing is asked of weights."""
    model = copy_of(family)
    index_file, config_file = model / "model_index.json", model / part / "config.json"
    index, config = json.loads(index_file.read_text()), json.loads(config_file.read_text())
    index_file.write_text(json.dumps(index | {part: ["diffusers", "Another"]}))
    with pytest.raises(ValueError, match=f"its {part} is a Another; allowed (is|are CLIP)"):
        check(family, model)
    index_file.write_text(json.dumps({key: value for key, value in index.items() if key != part}))
    if part in ("transformer_2", "image_encoder"):
        loading.check_pipeline(wan_video.WanVideo.pipelines, wan_video.WanVideo.parts, str(model))
    else:
        with pytest.raises(ValueError, match=f"its {part} is a None; allowed is"):
            check(family, model)
    index_file.write_text(json.dumps(index))
    other = {"model_type": "qwen2"} if "model_type" in config else {"_class_name": "FluxTransformer2DModel"}
    config_file.write_text(json.dumps(config | other))
    with pytest.raises(ValueError, match=f"its {part} is a (qwen2|Flux.*); allowed is"):
        check(family, model)


def test_experts_of_different_sizes_are_refused(copy_of):
    model = copy_of("wan_t2v_a14b")
    config = json.loads((model / "transformer_2" / "config.json").read_text())
    (model / "transformer_2" / "config.json").write_text(json.dumps(config | {"num_layers": 1}))
    with pytest.raises(ValueError, match="its transformer_2 has num_layers 1, and its transformer 2"):
        check("wan_t2v_a14b", model)


# ---------------------------------------------------------------- by content


def test_digests_are_of_the_weights(tmp_path):
    torch.manual_seed(0)
    tensors = {"a": torch.randn(300, 70), "b": torch.randn(5), "c": torch.tensor(2.0)}
    digest = digest_tensors(tensors.values())
    save_file({f"x.{name}": tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "x.safetensors")
    assert digest_tensors(read_tensors(tmp_path / "x.safetensors").values()) == digest
    for name, tensor in tensors.items():
        assert digest_tensors((tensors | {name: tensor * 1.01}).values()) != digest
        assert digest_tensors((tensors | {name: tensor[None]}).values()) != digest


def test_a_pointer_is_told_from_a_text(tmp_path):
    (tmp_path / "a").write_text("version 1")
    refuse_pointer(tmp_path / "a")
    (tmp_path / "a").write_text(POINTER)
    with pytest.raises(ValueError, match="Git LFS pointer .* `git lfs pull`"):
        refuse_pointer(tmp_path / "a")


def test_a_pipeline_on_the_hub(tiny_qwen_image, tmp_path, monkeypatch):
    """Weights that are not fetched yet are passed over, then fetched and checked, with the digests of a folder."""
    repo, commit = tmp_path / "hub" / "models--owner--tiny", "0123456789abcdef0123456789abcdef01234567"
    snapshot = shutil.copytree(tiny_qwen_image, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    weights = snapshot / "vae" / "diffusion_pytorch_model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    hub, reads = {"revision": None, "variant": None}, READS["qwen_image"]
    loading.check_pipeline(qwen_image.QwenImage.pipelines, qwen_image.QwenImage.parts, "owner/tiny", **hub)
    some = loading.check_weights(qwen_image.QwenImage.parts, "owner/tiny", reads, **hub)
    assert some.keys() == {"transformer", "text_encoder"}
    fetched = []

    def download(name, **kwargs):
        fetched.append((name, kwargs))
        weights.write_bytes(content)
        return str(snapshot)

    monkeypatch.setattr(loading.DiffusionPipeline, "download", download)
    digests = loading.fetch_weights(
        qwen_image.QwenImage.parts,
        "owner/tiny",
        reads,
        some,
        transformer_path=str(tiny_qwen_image / "transformer"),
        **hub,
    )
    assert fetched == [("owner/tiny", {"transformer": None} | hub)]
    assert digests == check("qwen_image", tiny_qwen_image)
    assert (
        loading.fetch_weights(qwen_image.QwenImage.parts, "owner/tiny", reads, digests, **hub) == digests
        and len(fetched) == 1
    )
    content = content[:-1]
    with pytest.raises(ValueError, match="cut short"):
        loading.fetch_weights(qwen_image.QwenImage.parts, "owner/tiny", reads, some, **hub)


def test_encoders_are_told_by_their_weights_and_files(tiny_qwen_image, tmp_path):
    def identity(model, parts=("vae", "tokenizer"), **kwargs):
        return weights_identity(str(model), parts, check("qwen_image", model), **kwargs)

    model = shutil.copytree(tiny_qwen_image, tmp_path / "elsewhere")
    plain = identity(tiny_qwen_image)
    assert identity(model) == plain == json.loads(json.dumps(plain)), "a copy elsewhere is the same encoder"
    assert identity(model, ("vae",)) != plain != identity(model, variant="fp16")
    for part, is_other in (("transformer", False), ("vae", True)):
        path = model / part / "diffusion_pytorch_model.safetensors"
        save_file({name: tensor * 1.01 for name, tensor in load_file(path).items()}, path)
        assert (identity(model) != plain) == is_other, part
    shutil.copytree(tiny_qwen_image / "vae", model / "vae", dirs_exist_ok=True)
    assert identity(model) == plain
    with open(model / "tokenizer" / "tokenizer_config.json", "a") as file:
        file.write(" ")
    assert identity(model) != plain


def test_a_pipeline_from_the_hub_is_told_by_its_commit(tiny_qwen_image, tmp_path, monkeypatch):
    repo, commit = tmp_path / "hub" / "models--owner--tiny", "0123456789abcdef0123456789abcdef01234567"
    for name in (commit, commit[::-1]):
        (repo / "snapshots" / name).mkdir(parents=True)
        shutil.copy(tiny_qwen_image / "model_index.json", repo / "snapshots" / name)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    before = weights_identity("owner/tiny", ("vae",), {})
    assert before == weights_identity("owner/tiny", ("vae",), {"vae": "fetched meanwhile"})
    assert before != weights_identity("owner/tiny", ("text_encoder",), {})
    (repo / "refs" / "main").write_text(commit[::-1])
    assert before != weights_identity("owner/tiny", ("vae",), {})
    with pytest.raises(OSError, match=r"model_index\.json is not among"):
        weights_identity("owner/none", ("vae",), {})
