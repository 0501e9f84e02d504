"""Train a LoRA on five photographs, load it back into the stock pipeline and show what changed. For scripts/demo.sh.

    python -m scripts.demo_qwen_image [--output_dir DIR]

The model is a tiny one with random weights, so nothing is downloaded and a CPU is enough. Its VAE has never seen an
image and decodes everything to noise; what the latents hold is therefore shown through a linear map from latents to
pixels, fitted on the photographs (`fit_view`).

Shapes: B images, C latent channels (16), H W latent height and width (pixels / 8).
"""

# ruff: noqa: E402
import logging
from functools import partial


# Before the imports, since some of them already warn about optional packages that nothing here needs.
logging.disable(logging.WARNING)

import torch
from PIL import Image
from skimage import data

from dataset.images import cover_and_crop, open_image, to_tensor
from pipelines import qwen_image as family
from scripts import demo
from scripts.demo import CAPTIONS


SIZE = 96  # pixels
MODEL_FLAGS = ["--num_layers", "2", "--num_attention_heads", "4", "--attention_head_dim", "32"]
# Every linear layer, also those that a LoRA usually leaves alone: nothing of a random base is worth keeping.
# fmt: off
TARGETS = [
    "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2", "img_mod.1", "txt_mod.1",
    "img_in", "txt_in", "timestep_embedder.linear_1", "timestep_embedder.linear_2", "norm_out.linear", "proj_out",
]
# fmt: on
TRAINING = demo.TRAINING | {
    "height": SIZE,
    "width": SIZE,
    "train_batch_size": len(CAPTIONS),
    "lora_target_modules": TARGETS,
    "max_train_steps": 800,
    "use_gradient_checkpointing": True,
}


def write_photographs(folder):
    """Write each photograph of `CAPTIONS` with its caption, as a dataset on disk."""
    folder.mkdir(parents=True)
    for name, caption in CAPTIONS.items():
        Image.fromarray(getattr(data, name)()).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(caption + "\n")


def read_photographs(folder, vae):
    """Return the photographs as they were trained on.

    Returns:
        `tuple` of pixels (B, 3, 8 * H, 8 * W) in [-1, 1] and latents (B, C, H, W), on the device of `vae`.
    """
    images = [cover_and_crop(open_image(folder / f"{name}.png"), SIZE, SIZE) for name in CAPTIONS]
    pixel_values = torch.stack([to_tensor(image) for image in images]).to(vae.device)
    return pixel_values, torch.stack([family.encode_image(vae, image)["latents"] for image in pixel_values])


def predict(transformer, prompt_embeds, prompt_embeds_mask, noisy_latents, sigmas):
    """Return the flow (B, C, H, W) that the stock transformer predicts for noisy latents at `sigmas` (B,)."""
    height, width = noisy_latents.shape[-2:]
    tokens = transformer(
        hidden_states=family.pack_latents(noisy_latents),
        timestep=sigmas,
        encoder_hidden_states=prompt_embeds,
        encoder_hidden_states_mask=prompt_embeds_mask,
        img_shapes=[[(1, height // 2, width // 2)]] * len(noisy_latents),
        return_dict=False,
    )[0]
    return family.unpack_latents(tokens, height, width)


def sample(pipeline):
    """Sample one image for each caption with the stock pipeline and return the latents (B, C, H, W)."""
    tokens = pipeline(
        list(CAPTIONS.values()),
        height=SIZE,
        width=SIZE,
        num_inference_steps=20,
        true_cfg_scale=1.0,
        generator=torch.Generator().manual_seed(1),
        output_type="latent",
    ).images
    return family.unpack_latents(tokens, SIZE // 8, SIZE // 8)


def main():
    """Run all stages."""
    output_dir = demo.find_output_dir(__doc__)
    print("[1/4] photographs and a tiny random model")
    photos = output_dir / "photos"
    write_photographs(photos)
    model_dir = demo.make_model(output_dir, "qwen_image", MODEL_FLAGS)
    run_dir = demo.train(
        output_dir, "train_qwen_image.py", model_dir=model_dir, dataset_path=photos, settings=TRAINING
    )

    pipeline = demo.load_pipeline(model_dir)
    pixel_values, latents = read_photographs(photos, pipeline.vae)
    with torch.no_grad():
        prompt_embeds, prompt_embeds_mask = pipeline.encode_prompt(list(CAPTIONS.values()))  # (B, L, J), (B, L)
    base_samples = sample(pipeline)
    loss = partial(
        demo.fixed_noise_loss, partial(predict, pipeline.transformer, prompt_embeds, prompt_embeds_mask), latents
    )
    fixed = demo.report_loss(output_dir, pipeline, run_dir, loss, f"{len(CAPTIONS)} photographs")

    print("[4/4] samples of that pipeline, from noise that training never saw; distances of latents")
    samples = sample(pipeline)
    table = demo.report_distances(list(CAPTIONS), base_samples, samples, latents, "photograph")
    pixel_values, latents, base_samples, samples = (
        tensor.unsqueeze(2) for tensor in (pixel_values, latents, base_samples, samples)
    )  # clips of one frame
    view = demo.fit_view(latents, pixel_values)
    rows = {
        "the photographs": pixel_values,
        "their latents, made visible by a linear map": view(latents),
        "sampled without the LoRA, through the same map": view(base_samples),
        "sampled with the LoRA, through the same map": view(samples),
    }
    demo.draw_sheet(list(CAPTIONS.values()), rows).save(output_dir / "samples.png")

    results = {"loss_on_fixed_noise": fixed} | table
    demo.finish(output_dir, run_dir, results, "loss.png, samples.png")


if __name__ == "__main__":
    main()
