"""Adapters that start from a LoRA file: in every layout the same weights, or a refusal that names what is wrong."""

import json
import types

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel, WanPipeline, WanTransformer3DModel
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from pipelines.wan_video import lora_export_name
from runtime.errors import RefusedError
from training.export import save_lora
from training.lora_init import check_base_of_lora, read_initial_lora, start_from
from training.module import add_lora, find_lora_targets, lora_layers


NAMES = {"wan": ["to_q", "to_v", "ffn.net.2"], "qwen": ["to_q", "to_v", "img_mlp.net.2"]}
STOCK = {"wan": WanPipeline, "qwen": QwenImagePipeline}
EXPORT_NAME = {"wan": lora_export_name, "qwen": "transformer.{}".format}


def tiny_transformer(family, heads=2):
    torch.manual_seed(0)
    if family == "wan":
        return WanTransformer3DModel(
            num_attention_heads=heads, attention_head_dim=12, text_dim=16, freq_dim=32, ffn_dim=48, num_layers=2,
            rope_max_seq_len=32,
        )  # fmt: skip
    return QwenImageTransformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=heads,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
    )


def arguments(path, family, rank=4, alpha=6.0):
    return types.SimpleNamespace(
        lora_init_path=str(path), lora_rank=rank, lora_alpha=alpha, lora_dropout=0.0, seed=1,
        lora_target_modules=NAMES[family],
    )  # fmt: skip


def started(path, family, names=None, **kwargs):
    """A transformer whose adapters start from `path`, as the scripts do it."""
    expert, heads = kwargs.pop("expert", None), kwargs.pop("heads", 2)
    args = arguments(path, family, **kwargs)
    transformer = tiny_transformer(family, heads)
    targets = find_lora_targets(transformer, names or NAMES[family], never_trained=[])
    model = types.SimpleNamespace(pipeline_class=STOCK[family], skeleton=transformer)
    initial = read_initial_lora(args, model, types.SimpleNamespace(name=expert), targets)
    add_lora(transformer, targets, args)
    print(start_from(transformer, initial))
    return transformer


@pytest.fixture
def trained(tmp_path):
    """Function: a transformer with random adapters of strength 1.5, and the file of it that the run would export."""

    def make(family, **info):
        transformer = tiny_transformer(family)
        add_lora(transformer, find_lora_targets(transformer, NAMES[family], never_trained=[]), arguments("", family))
        for layer in lora_layers(transformer).values():
            torch.nn.init.normal_(layer.lora_B["default"].weight)
        alone = types.SimpleNamespace(num_processes=1, is_main_process=True)
        export = {"export_name": EXPORT_NAME[family], "info": info}
        return transformer, save_lora(alone, transformer, tmp_path, dtype=torch.float32, **export)

    return make


def as_diffusers(transformer, path):
    """As diffusers' own example writes it: unscaled, alpha in the header."""
    tensors = {f"transformer.{k}": v.contiguous() for k, v in get_peft_model_state_dict(transformer).items()}
    fields = {"transformer.r": 4, "transformer.lora_alpha": 6.0, "transformer.alpha_pattern": {}}
    save_file(tensors, path, {"lora_adapter_metadata": json.dumps(fields)})


def with_alpha_keys(transformer, path):
    """Original names, `.alpha` next to each pair."""
    tensors = {}
    for name, layer in lora_layers(transformer).items():
        module = EXPORT_NAME["wan"](name)
        tensors[f"{module}.lora_A.weight"] = layer.lora_A["default"].weight.detach().clone()
        tensors[f"{module}.lora_B.weight"] = layer.lora_B["default"].weight.detach().clone()
        tensors[f"{module}.alpha"] = torch.tensor(6.0)
    save_file(tensors, path)


def assert_same_changes(transformer, expected):
    ours, theirs = lora_layers(transformer), lora_layers(expected)
    assert ours.keys() == theirs.keys()
    for name, layer in theirs.items():
        torch.testing.assert_close(ours[name].get_delta_weight("default"), layer.get_delta_weight("default"))


@pytest.mark.parametrize("alpha", [4.0, 6.0, 1.0])
@pytest.mark.parametrize("family", ["wan", "qwen"])
def test_own_file(family, alpha, trained, tmp_path, capsys):
    """At whatever strength the new run has, it starts as the old one ended."""
    expected, path = trained(family)
    for place in (path, tmp_path):
        assert_same_changes(started(place, family, alpha=alpha), expected)
    said = capsys.readouterr().out.rpartition("not restored are ")[2]
    assert all(part in said for part in ("optimizer's state", "schedule", "step", "order of the data"))


@pytest.mark.parametrize("family, write", [("wan", as_diffusers), ("qwen", as_diffusers), ("wan", with_alpha_keys)])
def test_layouts_of_others(family, write, trained, tmp_path):
    expected, _ = trained(family)
    write(expected, tmp_path / "other.safetensors")
    assert_same_changes(started(tmp_path / "other.safetensors", family), expected)


@pytest.mark.parametrize(
    "fields, factor",
    [
        ({}, 1.0),
        ({"lora_alpha": 8}, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"lora_alpha": 4, "alpha_pattern": {"attn1.to_q": 2}}, 0.5),
    ],
)
def test_strength_in_the_header(fields, factor, trained, tmp_path):
    """As PEFT applies it: alpha over the rank (4) or its root, by layer where there is a pattern."""
    expected, path = trained("wan")
    header = {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in fields.items()})}
    save_file(load_file(path), tmp_path / "other.safetensors", header)
    ours = lora_layers(started(tmp_path / "other.safetensors", "wan"))["blocks.1.attn1.to_q"]
    theirs = lora_layers(expected)["blocks.1.attn1.to_q"]
    torch.testing.assert_close(ours.get_delta_weight("default"), factor * theirs.get_delta_weight("default"))


def test_layers_that_the_file_lacks_start_as_without_it(trained, capsys):
    expected, path = trained("wan")
    transformer = started(path, "wan", names=[*NAMES["wan"], "to_k"])
    added = {name for name in lora_layers(transformer) if name.endswith("to_k")}
    assert len(added) == 4
    assert not any(lora_layers(transformer)[name].lora_B["default"].weight.any() for name in added)
    assert "10 of 14 adapters" in capsys.readouterr().out


def refused(path, family="wan", **kwargs):
    with pytest.raises(RefusedError) as error:
        started(path, family, **kwargs)
    assert str(error.value).startswith("--lora_init_path")
    return str(error.value)


def test_other_expert_is_refused(trained, tmp_path):
    expected, path = trained("wan", expert="high_noise")
    assert "of the expert high_noise, and this run trains low_noise" in refused(path, expert="low_noise")
    assert_same_changes(started(path, "wan", expert="high_noise"), expected)
    # A folder of both: each takes its own.
    (tmp_path / "run" / "high_noise").mkdir(parents=True)
    path.rename(tmp_path / "run" / "high_noise" / path.name)
    assert_same_changes(started(tmp_path / "run", "wan", expert="high_noise"), expected)
    assert "low_noise" in refused(tmp_path / "run", expert="low_noise")


def test_what_does_not_fit_is_refused(trained, tmp_path):
    expected, path = trained("wan")
    shapes = "the shapes (4, 24) and (24, 4); with this model and --lora_rank "
    assert shapes + "8 they are (8, 24) and (24, 8)" in refused(path, rank=8)
    assert shapes + "4 they are (4, 36) and (36, 4)" in refused(path, heads=3)
    assert "8 of 20 tensors have no place" in refused(path, names=["to_q", "ffn.net.2"])
    assert "cannot be read" in refused(tmp_path / "nowhere.safetensors")
    (tmp_path / "text.safetensors").write_text("text")
    assert "cannot be read" in refused(tmp_path / "text.safetensors")


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("diffusion_model."),
        lambda name: "base_model.model." + name,
        lambda name: name.replace("self_attn", "other_attn"),
        lambda name: name.replace("lora_A.weight", "dora_scale"),
    ],
)
def test_unknown_names_are_refused(rename, trained, tmp_path):
    _, path = trained("wan")
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, tmp_path / "other.safetensors")
    message = refused(tmp_path / "other.safetensors")
    assert "have no place" in message or "in no layout" in message


@pytest.mark.parametrize(
    "name",
    [
        *("blocks.0.norm3.diff", "blocks.0.norm3.diff_b", "blocks.0.self_attn.q.diff_b", "time_projection.1.diff_b"),
        *("patch_embedding.diff", "head.head.alpha", "blocks.0.cross_attn.o.alpha"),
    ],
)
def test_tensors_that_diffusers_would_drop_are_refused(name, trained, tmp_path):
    """Of a Wan file in its authors' names, some without a word; of a Qwen file a strength of nothing."""
    for family, prefix in (("wan", "diffusion_model."), ("qwen", "lora_unet_")):
        _, path = trained(family)
        tensors = load_file(path)
        if family == "qwen":
            halves = {"lora_A": "lora_down", "lora_B": "lora_up"}
            for key in list(tensors):
                module, half = key.removeprefix("transformer.").split(".lora_")
                key_now = f"{prefix}{module.replace('.', '_')}.{halves['lora_' + half[0]]}.weight"
                tensors[key_now] = tensors.pop(key)
            save_file(tensors, tmp_path / "other.safetensors")
            started(tmp_path / "other.safetensors", family)
        save_file(tensors | {prefix + name: torch.tensor(1.0)}, tmp_path / "other.safetensors")
        assert f"tensors have no place in the adapters of this run, such as {prefix}{name}" in refused(
            tmp_path / "other.safetensors", family
        )


@pytest.mark.parametrize("header", ["no json", "[1]"])
def test_a_header_that_is_no_json_object_is_refused(header, trained, tmp_path):
    _, path = trained("wan")
    save_file(load_file(path), path, {"lora_adapter_metadata": header})
    assert "cannot be read" in refused(path)


@pytest.mark.parametrize("change, said", [
    (lambda tensor: tensor * float("nan"), "does not consist of"), (lambda tensor: tensor[None], "the shapes (1,")
])  # fmt: skip
def test_bad_tensors_are_refused(change, said, trained):
    _, path = trained("wan")
    tensors = load_file(path)
    name = next(name for name in tensors if "lora_A" in name)
    save_file(tensors | {name: change(tensors[name])}, path)
    layer = "blocks.0.attn2.to_q" if "shapes" in said else name
    assert said in refused(path) and layer in refused(path)


def test_half_a_pair_is_refused(trained, tmp_path):
    _, path = trained("qwen")
    tensors = load_file(path)
    del tensors[next(name for name in tensors if "lora_B" in name)]
    save_file(tensors, path)
    assert "1 of 11 tensors have no place" in refused(path, "qwen")


def test_the_base_that_a_file_names_is_that_of_the_run(trained):
    args = arguments(trained("qwen", base_weights="a" * 64, base_model="Qwen/Qwen-Image")[1], "qwen")
    args.transformer_path, args.pretrained_model_name_or_path = None, "somewhere"
    alone = types.SimpleNamespace(name=None)
    check_base_of_lora(args, alone, "a" * 64)
    check_base_of_lora(args, alone, None)
    with pytest.raises(
        RefusedError,
        match=r"trained on other weights \(of Qwen/Qwen-Image\) than somewhere has.*remove base_weights from",
    ):
        check_base_of_lora(args, alone, "b" * 64)
    trained("qwen")  # of a version that did not say, or a copy without it
    check_base_of_lora(args, alone, "b" * 64)


def test_quantised_files_and_pointers_are_refused(trained, tmp_path):
    _, path = trained("qwen")
    tensors = load_file(path)
    name = max(tensors)
    save_file(tensors | {name: torch.ones(tensors[name].shape, dtype=torch.int8)}, path)
    with pytest.raises(RefusedError, match=rf"{name} \(torch.int8\) does not consist of"):
        started(path, "qwen")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(RefusedError, match="Git LFS pointer .* `git lfs pull`"):
        started(path, "qwen")
