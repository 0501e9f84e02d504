"""The proof that training and stock inference mean the same thing.

A tiny transformer learns five captioned photographs by heart; then the stock pipeline, given each caption and noise,
must sample latents that lie nearest to that caption's photograph. It fails when sign, sigma, shift, normalisation,
packing, template or export disagree with inference anywhere.
"""

import pytest
import torch
from diffusers import DiffusionPipeline, QwenImageTransformer2DModel

from pipelines.qwen_image import encode_image, unpack_latents
from training.data.images import cover_and_crop, open_image, to_tensor


@pytest.mark.slow
def test_stock_pipeline_samples_the_photograph_of_each_caption(script, photos, tmp_path):
    model, output_dir = tmp_path / "model", tmp_path / "out"
    script(
        *("scripts/make_tiny_model.py", "--family", "qwen_image", "--output", model),
        *("--num_layers", "4", "--num_attention_heads", "4", "--attention_head_dim", "32"),
    )
    script(
        "train_qwen_image.py",
        *("--pretrained_model_name_or_path", model, "--dataset_path", photos, "--output_dir", output_dir),
        *("--height", "64", "--width", "64", "--training_mode", "full", "--mixed_precision", "no"),
        *("--train_batch_size", "10", "--max_train_steps", "800", "--logging_steps", "50"),
        *("--learning_rate", "2e-3", "--lr_scheduler", "cosine", "--lr_warmup_steps", "100"),
    )
    transformer = QwenImageTransformer2DModel.from_pretrained(output_dir / "transformer")
    pipeline = DiffusionPipeline.from_pretrained(model, transformer=transformer)
    pipeline.set_progress_bar_config(disable=True)

    pictures = sorted(photos.glob("*.png"))
    pixels = [to_tensor(cover_and_crop(open_image(path), 64, 64)) for path in pictures]
    targets = torch.stack([encode_image(pipeline.vae, picture)["latents"] for picture in pixels])
    captions = [path.with_suffix(".txt").read_text() for path in pictures]
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
    samples = unpack_latents(torch.cat(tokens), 8, 8)
    distances = torch.cdist(samples.flatten(1), targets.flatten(1)) / targets.flatten(1).norm(dim=1)
    print(distances)
    assert distances.argmin(1).tolist() == list(range(5)), distances
    assert distances.diag().max() < 0.3, distances
