"""The code of docs/library.md, run as it stands there but for the size of the model."""

import pathlib
import re

import pytest
import torch
from diffusers import FluxTransformer2DModel

import blockwise
from blockwise import offload
from blockwise.plan import MemoryPlan
from blockwise.tracking import LiveBytes


ROOT = pathlib.Path(__file__).parents[1]
LOOP, PLAN, SCRIPT = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), flags=re.S)
TINY = {"in_channels": 16, "num_layers": 4, "num_single_layers": 5, "joint_attention_dim": 64, "guidance_embeds": True}
TINY |= {
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "pooled_projection_dim": 24,
    "axes_dims_rope": (8, 12, 12),
}


def test_the_dispatcher_in_a_loop(capsys):
    offload.reset_counters()
    exec(LOOP, {})
    assert int(capsys.readouterr().out) == 4 * 4 * 1024 * 1024


def test_a_plan_in_place_of_diffusers_own_checkpointing():
    transformer = FluxTransformer2DModel(**TINY)
    exec(PLAN, {"transformer": transformer})
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    assert {block.memory_mode.activations for block in blocks} == {"park"} and transformer.gradient_checkpointing


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """Function from a budget to what the script has defined at its end."""
    monkeypatch.setattr(offload, "MIN_PARKED_BYTES", 4096)
    torch.manual_seed(0)
    FluxTransformer2DModel(**TINY).save_pretrained(tmp_path / "transformer")

    def run(budget):
        values = {"MODEL, DEVICE, STEPS": (str(tmp_path), "cpu", 2), "BUDGET": budget}
        script = SCRIPT
        for names, value in (values | {"HEIGHT, WIDTH, TEXT": (16, 24, 32)}).items():
            script, count = re.subn(rf"^{names} = .*$", f"{names} = {value!r}", script, flags=re.M)
            assert count == 1
        exec(script, names := {})
        return names

    return run


def test_the_script(run_script, capsys, monkeypatch):
    """It trains, with the plan that a budget allows; the forecast is what a step takes."""
    names = run_script(2**40)
    profile, held_bytes, kept = (names[name] for name in ("profile", "held_bytes", "plan"))
    recomputed = MemoryPlan.uniform(names["lists"], "recompute")
    assert kept == MemoryPlan.uniform(names["lists"], "keep")
    budget = held_bytes + (profile.peak(kept).num_bytes + profile.peak(recomputed).num_bytes) // 2
    monkeypatch.setattr(blockwise, "StepProfile", lambda *args, **kwargs: profile)  # of the same step
    names = run_script(budget)
    plan, transformer = names["plan"], names["transformer"]
    assert plan not in (kept, recomputed) and "blocks checkpointed" in capsys.readouterr().out
    assert profile.peak(plan).num_bytes + held_bytes <= budget
    trained = [parameter for name, parameter in transformer.named_parameters() if "lora_B" in name]
    assert trained and all(parameter.any() for parameter in trained)
    with LiveBytes() as live:
        names["loss_of"](transformer, **names["make_batch"](transformer.config, "cpu")).backward()
    assert profile.peak(plan).num_bytes == pytest.approx(live.peak_bytes, rel=0.03)
