"""Forecasts of whole commands against the bytes that their tensors have alive: benchmarks/estimate_accuracy.py."""

import json

import pytest

from benchmarks import estimate_accuracy as benchmark
from blockwise import offload


QUICK = ["t2v lora bf16 park"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("accuracy")


@pytest.fixture(scope="module")
def data(folder):
    return benchmark.make_data(folder)


@pytest.fixture(autouse=True)
def park_small_tensors(monkeypatch):
    monkeypatch.setattr(offload, "MIN_PARKED_BYTES", 4096)
    yield
    offload.set_limit(None)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in benchmark.RUNS]
)
def test_forecast_of_a_command(name, folder, data, tiny_model):
    """Within one percent, where three are asked for; what is parked to the byte; the same keys on both sides."""
    family = benchmark.RUNS[name][0]
    if not (folder.parent / family).exists():
        (folder.parent / family).symlink_to(tiny_model(family))
    content = benchmark.run(name, folder / str(list(benchmark.RUNS).index(name)), *data)
    error, categories = benchmark.errors(content)
    assert abs(error) < 0.01
    forecast, measured = content["forecast"], content["measured"]
    assert forecast["parked_bytes"] == measured["parked_bytes"] and (measured["parked_bytes"] > 0) == ("park" in name)
    assert set(measured["by_category"]) == set(forecast["by_category"])
    assert sum(measured["by_category"].values()) == measured["training_peak_bytes"]
    for category in ("weights", "adapters", "batch"):
        assert forecast["by_category"][category] == pytest.approx(measured["by_category"][category], abs=64)
    output_dir = folder / str(list(benchmark.RUNS).index(name))
    assert (output_dir / "memory.png").stat().st_size > 10_000
    assert json.loads((output_dir / "run.json").read_text())["memory_points"][-1]["name"] == "final"


def test_enough_different_runs():
    """Of every kind that a forecast has to tell apart at least two."""
    flags = [" ".join(flags) for *_, flags in benchmark.RUNS.values()]
    families = {family for family, *_ in benchmark.RUNS.values()}
    assert len(flags) >= 12 and families == {"qwen_image", "wan_t2v", "wan_i2v", "wan_ti2v", "wan_i2v_a14b"}
    for kind in ("full", "bf16", "gradient_checkpointing", "offload", "batch_size", "accumulation"):
        assert 2 <= sum(kind in text for text in flags) < len(flags)
    assert len({text.partition("--optimizer ")[2] for text in flags}) >= 3
