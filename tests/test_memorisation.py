"""The proof that training and stock inference mean the same thing.

A tiny transformer learns a few captioned images or clips by heart; then the stock pipeline, given each caption (or
first frame) and noise, must sample latents that lie nearest to that one's own. It fails when sign, sigma, shift,
normalisation, packing, template, condition or export disagree with inference anywhere.
"""

import shutil

import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    QwenImageTransformer2DModel,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image

from dataset.images import cover_and_crop, open_image, to_tensor
from dataset.metadata import Row
from dataset.videos import read_clip
from pipelines.qwen_image import encode_image, unpack_latents
from pipelines.wan_video import WanVideo, encode_clip


def train(script, program, family, dataset, tmp_path, *flags):
    """Train all weights of a small model of `family`; return the folders of model and result."""
    model, output_dir = tmp_path / "model", tmp_path / "out"
    script(
        *("scripts/make_tiny_model.py", "--family", family, "--output", model),
        *("--num_layers", "4", "--num_attention_heads", "4", "--attention_head_dim", "32"),
    )
    script(
        *(program, "--pretrained_model_name_or_path", model, "--dataset_path", dataset, "--output_dir", output_dir),
        *("--height", "64", "--width", "64", "--training_mode", "full", "--mixed_precision", "no"),
        *("--learning_rate", "2e-3", "--lr_scheduler", "cosine", "--lr_warmup_steps", "100"),
        *("--logging_steps", "50", *flags),
    )
    return model, output_dir


def check(samples, targets):
    """Assert that each sample lies near its own target, and nearest to it. Both (B, ...)."""
    distances = torch.cdist(samples.flatten(1), targets.flatten(1)) / targets.flatten(1).norm(dim=1)
    print(distances)
    assert distances.argmin(1).tolist() == list(range(len(targets))), distances
    assert distances.diag().max() < 0.3, distances


@pytest.mark.slow
def test_stock_pipeline_samples_the_photograph_of_each_caption(script, photos, tmp_path):
    flags = ["--train_batch_size", "10", "--max_train_steps", "800"]
    model, output_dir = train(script, "train_qwen_image.py", "qwen_image", photos, tmp_path, *flags)
    transformer = QwenImageTransformer2DModel.from_pretrained(output_dir / "transformer")
    pipeline = DiffusionPipeline.from_pretrained(model, transformer=transformer)
    pipeline.set_progress_bar_config(disable=True)

    images = sorted(photos.glob("*.png"))
    pixels = [to_tensor(cover_and_crop(open_image(path), 64, 64)) for path in images]
    targets = torch.stack([encode_image(pipeline.vae, image)["latents"] for image in pixels])
    captions = [path.with_suffix(".txt").read_text() for path in images]
    tokens = [
        pipeline(
            caption,
            height=64,
            width=64,
            num_inference_steps=30,
            output_type="latent",
            generator=torch.Generator().manual_seed(index),
        ).images
        for index, caption in enumerate(captions)
    ]
    check(unpack_latents(torch.cat(tokens), 8, 8), targets)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, task, pipeline_class", [("wan_t2v", "t2v", WanPipeline), ("wan_i2v", "i2v", WanImageToVideoPipeline)]
)
def test_stock_pipeline_samples_the_clip(family, task, pipeline_class, script, clips, tmp_path):
    """Of each caption; from an image of each first frame, under one caption for all, so that only the image tells."""
    dataset = tmp_path / "data"
    shutil.copytree(clips, dataset)
    if task == "i2v":
        for path in dataset.glob("*.txt"):
            path.write_text("something moves")
    flags = ["--num_frames", "9", "--train_batch_size", "9", "--max_train_steps", "800"]
    model, output_dir = train(script, "train_wan_video.py", family, dataset, tmp_path, *flags)
    transformer = WanTransformer3DModel.from_pretrained(output_dir / "transformer")
    # By its class: DiffusionPipeline would not look at the transformer, which is an optional part of these two.
    pipeline = pipeline_class.from_pretrained(model, transformer=transformer)
    pipeline.set_progress_bar_config(disable=True)

    encoder, samples, targets = WanVideo(model).load_media_encoder("cpu"), [], []
    for index, path in enumerate(sorted(dataset.glob("*.mp4"))):
        caption = path.with_suffix(".txt").read_text()
        used = {"size": [64, 64], "frames": 9, "source_frames": list(range(9))}
        clip = read_clip(Row(path.name, caption, {"target": (path,)}, path.name), {"used": used})
        targets.append(encode_clip(encoder, clip, task="t2v")["latents"])
        first = Image.fromarray(((clip[:, 0] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())
        sample = pipeline(
            prompt=caption,
            **({"image": first} if task == "i2v" else {}),
            **{"height": 64, "width": 64, "num_frames": 9},
            num_inference_steps=30,
            guidance_scale=1.0,
            output_type="latent",
            generator=torch.Generator().manual_seed(index),
        ).frames
        samples.append(sample[0])
    check(torch.stack(samples), torch.stack(targets))
