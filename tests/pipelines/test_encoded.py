"""What is encoded and decoded stays what it was, or its version is raised: cached entries are told by versions.

`encoded.json` holds a few values of each result by version. After a change that is meant, raise the version that a
failure names, and add the values that it prints under that version; those of older versions stay.
"""

import json
import pathlib
import types

import av
import numpy as np
import pytest
import torch
from PIL import Image

from dataset.images import read_image
from dataset.inspection import DECODING
from dataset.metadata import Row
from dataset.videos import read_clip
from pipelines.qwen_image import QwenImage
from pipelines.wan_video import WanVideo


RECORDED = pathlib.Path(__file__).with_name("encoded.json")
FAMILIES = {"qwen_image": QwenImage, "wan_i2v": WanVideo, "wan_ti2v": WanVideo}


def gradient(*size):
    """Return pixels (3, *size) in [-1, 1] that differ in every direction."""
    axes = torch.meshgrid(*(torch.linspace(0, 1, length) for length in size), indexing="ij")
    return torch.stack([torch.sin(sum((3 + n + k) * axis for k, axis in enumerate(axes))) for n in range(3)])


def described(tensor):
    """Return the shape of a tensor and twelve of its values that are not zero, as padding is."""
    values = tensor.float().flatten()
    values = values[values != 0]
    return {"shape": list(tensor.shape), "values": [round(float(v), 4) for v in values[:: max(1, len(values) // 12)]]}


def check(name, version, versions_in, tensors):
    """Compare tensors with those that are recorded of a version."""
    found = {key: described(tensor) for key, tensor in tensors.items()}
    recorded = json.loads(RECORDED.read_text())[name].get(str(version))
    assert recorded is not None, f"add to encoded.json: {name}, {version}: {json.dumps(found)}"
    advice = (
        f"results differ from those of version {version}: raise it in {versions_in}; now they are {json.dumps(found)}"
    )
    assert {key: value["shape"] for key, value in recorded.items()} == {
        key: value["shape"] for key, value in found.items()
    }, advice
    for key, value in found.items():
        expected = np.array(recorded[key]["values"])
        # Kernels of other processors round otherwise, most of all in bf16.
        assert np.allclose(value["values"], expected, rtol=0, atol=0.02 * np.abs(expected).max()), f"{key}: {advice}"


@pytest.mark.parametrize("name", FAMILIES)
def test_encoders_give_what_their_version_gave(name, tiny_model):
    family = FAMILIES[name](tiny_model(name))
    if name == "wan_ti2v":
        family.resolve(types.SimpleNamespace(task="i2v", expert=None))
    tensors = dict(family.encode_prompt(family.load_prompt_encoder("cpu"), "A cat, in the  rain &amp; at night"))
    pixels = gradient(5, 64, 96) if family.is_video else gradient(64, 96)
    tensors |= family.encode_media(family.load_media_encoder("cpu"), pixels)
    check(name, family.encoding_version, f"{type(family).__name__}.encoding_version", tensors)


def test_decoders_give_what_their_version_gave(tmp_path):
    """An image with transparency, and a clip without loss in the colours of a camera, both cropped and resized."""
    levels = ((gradient(90, 70).permute(1, 2, 0) + 1) * 127.5).byte().numpy()
    image = Image.fromarray(levels)
    image.putalpha(Image.fromarray(levels[:, :, 1]))
    image.save(tmp_path / "a.png")
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=8, width=96, height=80, pix_fmt="yuv420p")
        for pixels in ((gradient(4, 80, 96) + 1) * 100).byte().permute(1, 2, 3, 0).numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")))
        container.mux(stream.encode())
    used = {"size": [48, 32], "frames": 3, "source_frames": [0, 1, 3]}
    tensors = {}
    for name, read in (("a.png", read_image), ("a.mkv", read_clip)):
        tensors[name] = read(Row(name, "", {"target": (tmp_path / name,)}, name), {"used": used})
    check("decoding", DECODING["version"], "dataset.inspection.DECODING", tensors)
