"""The LoRA file: layout, strength, bytes; and that a bad one is noticed."""

import csv
import json
import logging
import pathlib
import types

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipelines.qwen_image import model_fn_qwen_image
from runtime.errors import FailedError
from training import export
from training.export import LORA_FILE, check_lora, save_lora, save_safetensors, split_scale
from training.module import add_lora, find_lora_targets, lora_layers


EXPORT = {"export_name": "transformer.{}".format, "info": {"base_model": "tiny", "b": "2"}}
ALONE = types.SimpleNamespace(num_processes=1, is_main_process=True)


def tiny_transformer(dtype=torch.float32):
    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        patch_size=2, in_channels=64, out_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=32, axes_dims_rope=(8, 4, 4),
    ).to(dtype)  # fmt: skip


def trained(names=("to_q", "to_v", "img_mlp.net.2", "img_in"), rank=4, alpha=4.0, dtype=torch.float32):
    transformer = tiny_transformer(dtype)
    targets = find_lora_targets(transformer, list(names), never_trained=[])
    args = types.SimpleNamespace(lora_rank=rank, lora_alpha=alpha, lora_dropout=0.0, seed=0)
    add_lora(transformer, targets, args)
    for layer in lora_layers(transformer).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.2)
    return transformer.eval()


def predict(transformer):
    dtype = transformer.proj_out.weight.dtype
    generator = torch.Generator().manual_seed(2)
    return model_fn_qwen_image(
        transformer,
        hidden_states=torch.randn(1, 16, 64, generator=generator).to(dtype),
        timestep=torch.tensor([600.0]),
        encoder_hidden_states=torch.randn(1, 5, 32, generator=generator).to(dtype),
        encoder_hidden_states_mask=None,
        img_shapes=[[(1, 4, 4)]],
    )


def stock_pipeline(transformer):
    return QwenImagePipeline(scheduler=None, vae=None, text_encoder=None, tokenizer=None, transformer=transformer)


def check(transformer, path, dtype=torch.float32):
    return check_lora(stock_pipeline(transformer), path, lambda: predict(transformer), dtype=dtype)


@pytest.mark.parametrize("alpha", [4.0, 1.0, 6.0, 16.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stock_diffusers_loads_the_trained_strength(alpha, dtype, tmp_path, caplog):
    transformer = trained(alpha=alpha)
    with torch.no_grad():
        expected = predict(transformer)
    path = save_lora(ALONE, transformer, tmp_path, dtype=dtype, **EXPORT)
    fresh = tiny_transformer().eval()
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        base = predict(fresh)
        stock_pipeline(fresh).load_lora_weights(tmp_path)
        output = predict(fresh)
    assert len(lora_layers(fresh)) == len(lora_layers(transformer))
    error = (output - expected).norm() / (expected - base).norm()
    assert error < (1e-5 if dtype == torch.float32 else 2e-2)
    assert not [record for record in caplog.records if "lora" in record.getMessage().lower()]
    assert check(transformer, path, dtype)[0] == len(lora_layers(fresh))


@pytest.mark.parametrize("alpha", [1.0, 6.0])
def test_comfyui_strength_is_b_times_a(alpha, tmp_path):
    """ComfyUI reads no alpha without `.alpha` keys: what it adds is B @ A of the file (facts, 2.3)."""
    transformer = trained(alpha=alpha)
    tensors = load_file(save_lora(ALONE, transformer, tmp_path, dtype=torch.float32, **EXPORT))
    for name, layer in lora_layers(transformer).items():
        added = tensors[f"transformer.{name}.lora_B.weight"] @ tensors[f"transformer.{name}.lora_A.weight"]
        torch.testing.assert_close(added, layer.get_delta_weight("default").detach())
    assert not [name for name in tensors if "alpha" in name or "default" in name]


def test_names_and_shapes_are_those_of_the_golden_list():
    """Every Linear of the real Qwen-Image, by name and shape, as ComfyUI and diffusers know it."""
    golden_file = pathlib.Path(__file__).parent / "golden_keys_qwen_image.tsv"
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel()
    ours = {
        EXPORT["export_name"](name): (module.out_features, module.in_features)
        for name, module in transformer.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    golden = {}
    for row in csv.DictReader(golden_file.open(), delimiter="\t"):
        for index in range(60) if "{i}" in row["exported_module"] else [0]:
            golden[row["exported_module"].replace("{i}", str(index))] = int(row["out"]), int(row["in"])
    assert len(golden) == 846 and ours == golden


def test_header(tmp_path):
    transformer = trained(alpha=6.0)
    path = save_lora(ALONE, transformer, tmp_path, dtype=torch.bfloat16, **EXPORT)
    assert path.name == LORA_FILE
    with safe_open(path, "pt") as file:
        header = file.metadata()
    assert header.pop("base_model") == "tiny" and header.pop("b") == "2" and header.pop("format") == "pt"
    fields = json.loads(header.pop("lora_adapter_metadata"))
    assert header == {}
    assert fields == {
        "transformer.r": 4,
        "transformer.lora_alpha": 4,
        "transformer.rank_pattern": {},
        "transformer.alpha_pattern": {},
        "transformer.target_modules": sorted(lora_layers(transformer)),
    }


def test_bytes_depend_on_the_content_only(tmp_path):
    tensors = {"b": torch.randn(3, 4), "a": torch.randn(5).bfloat16()}
    metadata = {f"key{i}": str(i) for i in range(20)} | {"format": "pt", "ü": "«»"}
    for n in range(5):
        save_safetensors(tensors, tmp_path / f"{n}", metadata)
    assert len({(tmp_path / f"{n}").read_bytes() for n in range(5)}) == 1
    assert not list(tmp_path.glob("*.tmp"))
    loaded = load_file(tmp_path / "0")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "0", "pt") as file:
        assert file.metadata() == metadata


@pytest.mark.parametrize("scale", [1.0, 0.25, 8.0, 1.5, 0.1, 1 / 3, 128.0])
def test_scale_is_split_evenly(scale):
    first, second = split_scale(scale)
    assert first * second == pytest.approx(scale, rel=1e-12)
    assert 0.24 < first / second < 4.1
    if scale in (1.0, 0.25, 8.0, 128.0):
        tensor = torch.randn(100).bfloat16()
        assert torch.equal(tensor * first / first, tensor) and first * second == scale


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_small_ranks_pass_the_check(rank, seed, tmp_path):
    """Rounding to bf16 must not look like another strength, in whichever direction the factors point."""
    torch.manual_seed(seed)
    transformer = trained(rank=rank, alpha=1.5)
    for layer in lora_layers(transformer).values():
        torch.nn.init.normal_(layer.lora_A["default"].weight)
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.01)
    check(transformer, save_lora(ALONE, transformer, tmp_path, dtype=torch.bfloat16, **EXPORT), torch.bfloat16)


# ---------------------------------------------------------------- a transformer folder


@pytest.mark.parametrize("shard_size", ["10GB", "40KB"])
def test_a_transformer_is_saved_as_diffusers_saves_it(shard_size, tmp_path, monkeypatch):
    """The same bytes, in one file or in several."""
    transformer = tiny_transformer(torch.bfloat16)
    save = export.save_torch_state_dict
    monkeypatch.setattr(
        export, "save_torch_state_dict", lambda *args, **kwargs: save(*args, **kwargs | {"max_shard_size": shard_size})
    )
    ours = export.save_transformer(ALONE, transformer, tmp_path / "ours")
    transformer.save_pretrained(tmp_path / "theirs", max_shard_size=shard_size)
    files = {file.name: file.read_bytes() for file in (tmp_path / "theirs").iterdir()}
    if shard_size != "10GB":
        assert len(files) > 3
        index = "diffusion_pytorch_model.safetensors.index.json"
        assert json.loads(files.pop(index)) == json.loads((ours / index).read_bytes())
    assert all((ours / name).read_bytes() == content for name, content in files.items())
    assert not list(tmp_path.glob("*.tmp"))


def test_every_process_saves_and_one_writes(on_two_ranks, tmp_path):
    """Each gets the path, or the error of the one that writes."""

    def work(rank):
        accelerator = types.SimpleNamespace(num_processes=2, process_index=rank, is_main_process=rank == 0)
        path = save_lora(accelerator, trained(), tmp_path / "lora", dtype=torch.float32, **EXPORT)
        export.save_transformer(accelerator, tiny_transformer(), tmp_path / "transformer")
        with pytest.raises(FailedError, match="transformer cannot be written"):
            export.save_transformer(accelerator, tiny_transformer(), tmp_path / "nowhere" / "transformer")
        return path

    assert on_two_ranks(work) == [tmp_path / "lora" / LORA_FILE] * 2
    path = save_lora(ALONE, trained(), tmp_path, dtype=torch.float32, **EXPORT)
    assert path.read_bytes() == (tmp_path / "lora" / LORA_FILE).read_bytes()
    assert not list(tmp_path.rglob("*.tmp"))


# ---------------------------------------------------------------- what the check notices


def rewrite(path, change):
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    metadata = change(tensors, metadata) or metadata
    save_file(tensors, path, metadata)


def lose_a_layer(tensors, metadata):
    for name in [name for name in tensors if "transformer_blocks.1.attn.to_q" in name]:
        del tensors[name]


def double_the_strength(tensors, metadata):
    for name in tensors:
        if "lora_B" in name:
            tensors[name] *= 2


def other_alpha_in_the_header(tensors, metadata):
    fields = json.loads(metadata["lora_adapter_metadata"]) | {"transformer.lora_alpha": 8}
    return metadata | {"lora_adapter_metadata": json.dumps(fields)}


def unprefixed_names(tensors, metadata):
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)


@pytest.mark.parametrize(
    "change, said",
    [
        (lose_a_layer, "differing are transformer_blocks.1.attn.to_q"),
        (double_the_strength, "another strength"),
        (other_alpha_in_the_header, "another strength"),
        (unprefixed_names, "0 of "),
    ],
)
def test_bad_files_are_noticed(change, said, tmp_path):
    transformer = trained()
    path = save_lora(ALONE, transformer, tmp_path, dtype=torch.float32, **EXPORT)
    rewrite(path, change)
    with pytest.raises(FailedError, match=said):
        check(transformer, path)


def test_lora_that_changes_nothing(tmp_path):
    transformer = trained()
    for layer in lora_layers(transformer).values():
        torch.nn.init.zeros_(layer.lora_B["default"].weight)
    path = save_lora(ALONE, transformer, tmp_path, dtype=torch.float32, **EXPORT)
    with pytest.raises(FailedError, match="changes nothing"):
        check(transformer, path)


def test_non_finite_tensors_are_not_saved(tmp_path):
    transformer = trained()
    next(iter(lora_layers(transformer).values())).lora_B["default"].weight.data[0, 0] = float("nan")
    with pytest.raises(FailedError, match="not finite"):
        save_lora(ALONE, transformer, tmp_path, dtype=torch.float32, **EXPORT)
    assert not list(tmp_path.iterdir())


def test_values_that_a_cast_flushes_are_logged(tmp_path, caplog):
    transformer = trained()
    save_lora(ALONE, transformer, tmp_path, dtype=torch.bfloat16, **EXPORT)
    assert "--lora_dtype" not in caplog.text
    for layer in lora_layers(transformer).values():
        layer.lora_B["default"].weight.data.mul_(1e-42)
    save_lora(ALONE, transformer, tmp_path, dtype=torch.float32, **EXPORT)
    assert "--lora_dtype" not in caplog.text
    save_lora(ALONE, transformer, tmp_path, dtype=torch.bfloat16, **EXPORT)
    assert "% of the trained values become zero in torch.bfloat16; use fp32" in caplog.text
