"""The curves of metrics.png; the grids and clips of previews are tested with the runs that make them."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from training.drawing import draw_metrics


def make_lines(losses, **kwargs):
    return [
        {
            "step": step,
            "epoch": 1,
            "loss": loss,
            "lr": 1e-4,
            "grad_norm": 1.0,
            "seconds": 0.1,
            "device_peak_bytes": None,
            "host_rss_bytes": 2**30,
            "offloaded_bytes": 0,
        }
        | kwargs
        for step, loss in enumerate(losses, 1)
    ]


@pytest.fixture(autouse=True)
def few_pixels(monkeypatch):
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: save(self, path, dpi=40))


def draw(tmp_path, lines, **kwargs):
    draw_metrics(tmp_path / "metrics.png", lines, **kwargs)
    with Image.open(tmp_path / "metrics.png") as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).copy()


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [line | {"loss": line["loss"] + 0.1 * (line["step"] == 5)} for line in lines],
        lambda lines: [line | {"lr": 1e-4 / line["step"]} for line in lines],
        lambda lines: [line | {"host_rss_bytes": 2**30 * line["step"]} for line in lines],
        lambda lines: [line | {"device_peak_bytes": 2**31} for line in lines],
        lambda lines: [line | {"expert": "high_noise" if line["step"] < 20 else "low_noise"} for line in lines],
    ],
    ids=["loss", "lr", "host", "device", "expert"],
)
def test_curves_show(change, tmp_path):
    lines = make_lines([1 / step for step in range(1, 61)])
    assert (draw(tmp_path, change(lines)) != draw(tmp_path, lines)).any()


def test_curves_show_validation(tmp_path):
    lines = make_lines([0.5, 0.4])
    assert (draw(tmp_path, lines, validation=[(1, 0.45)]) != draw(tmp_path, lines)).any()


def test_curves_leave_out_what_is_not_finite(tmp_path):
    losses = [1 / step for step in range(1, 61)]
    missing, odd = ([*losses[:30], value, *losses[31:]] for value in (None, float("nan")))
    assert (draw(tmp_path, make_lines(missing)) == draw(tmp_path, make_lines(odd))).all()


@pytest.mark.parametrize("losses", [[0.5], [None], [None, 0.5, float("nan"), 0.4]], ids=str)
@pytest.mark.filterwarnings("error")
def test_curves_of_few_or_missing_losses(losses, tmp_path):
    image = draw(tmp_path, make_lines(losses))
    if len(losses) == 1:
        other = [0.7] if losses == [None] else [None]
        assert (draw(tmp_path, make_lines(other)) != image).any()
