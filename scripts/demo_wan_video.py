"""Train a LoRA on three clips, load it back into the stock pipeline and show what changed. For scripts/demo.sh.

    python -m scripts.demo_wan_video [--output_dir DIR]

The clips are slow pans and zooms over photographs. The model is a tiny one with random weights, so nothing is
downloaded and a CPU is enough. Its VAE has never seen an image and decodes everything to noise; what the latents hold
is therefore shown through a linear map from latents to pixels, fitted on the clips (`fit_view`).

Shapes: B clips, N frames of pixels (13), F latent frames (1 + (N - 1) / 4), C latent channels (16), H W latent height
and width (pixels / 8).
"""

# ruff: noqa: E402
import json
import logging
from functools import partial


# Before the imports, since some of them already warn about optional packages that nothing here needs.
logging.disable(logging.WARNING)

import av
import torch
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from PIL import Image
from skimage import data

from dataset.metadata import VIDEO_SUFFIXES, read_rows
from dataset.videos import read_clip
from pipelines import wan_video as family
from scripts import demo


# Of the window that moves over each photograph, in the first and in the last frame: left, top and side in pixels.
WINDOWS = {
    "astronaut": ((50, 0, 320), (110, 0, 256)),
    "chelsea": ((45, 15, 270), (158, 15, 270)),
    "coffee": ((60, 0, 396), (150, 80, 300)),
}
CAPTIONS = {name: demo.CAPTIONS[name] for name in WINDOWS}

SIZE = 64  # pixels
NUM_FRAMES = 13
FPS = 16
# Twice the width of the Qwen demo: a convolution, which no LoRA adapts, embeds the 64 numbers of each noisy token, and
# at half the width too little of them gets through.
MODEL_FLAGS = ["--num_layers", "2", "--num_attention_heads", "8", "--attention_head_dim", "32"]
# Every linear layer, also those that a LoRA usually leaves alone: nothing of a random base is worth keeping.
# fmt: off
TARGETS = [
    "to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2", "time_embedder.linear_1",
    "time_embedder.linear_2", "time_proj", "text_embedder.linear_1", "text_embedder.linear_2", "proj_out",
]
# fmt: on
TRAINING = demo.TRAINING | {
    "height": SIZE,
    "width": SIZE,
    "num_frames": NUM_FRAMES,
    "train_batch_size": len(CAPTIONS),
    "lora_target_modules": TARGETS,
    "max_train_steps": 700,
}


def write_clip(path, images):
    """Encode images (`PIL.Image.Image`, sides even) as an mp4 file with its colours tagged, BT.709."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"crf": "16"})
        stream.width, stream.height = images[0].size
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
        context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
        for image in images:
            # Converted here, since left to itself it takes BT.601 whatever the tags say.
            frame = av.VideoFrame.from_image(image).reformat(
                format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def write_clips(folder):
    """Write a clip of each photograph of `WINDOWS` with its caption, as a dataset on disk."""
    folder.mkdir(parents=True)
    for name, (first, last) in WINDOWS.items():
        photograph = Image.fromarray(getattr(data, name)())
        images = []
        for share in torch.linspace(0, 1, NUM_FRAMES).tolist():
            left, top, side = (start + share * (end - start) for start, end in zip(first, last, strict=True))
            box = (left, top, left + side, top + side)
            images.append(photograph.resize((2 * SIZE, 2 * SIZE), Image.Resampling.LANCZOS, box))
        write_clip(folder / f"{name}.mp4", images)
        (folder / f"{name}.txt").write_text(CAPTIONS[name] + "\n")


def read_clips(folder, run_dir, pipeline):
    """Return the clips as they were trained on.

    Returns:
        `tuple` of pixels (B, 3, N, 8 * H, 8 * W) in [-1, 1] and latents (B, C, F, H, W), on the device of `pipeline`.
    """
    rows = read_rows(folder, media_suffixes=VIDEO_SUFFIXES)
    records = [json.loads(line) for line in (run_dir / "dataset.jsonl").read_text().splitlines()]
    clips = [read_clip(row, record) for row, record in zip(rows, records, strict=True)]
    pixel_values = torch.stack(clips).to(pipeline.device)
    latents = [family.encode_clip(pipeline, clip, task="t2v")["latents"] for clip in pixel_values]
    return pixel_values, torch.stack(latents)


def predict(transformer, prompt_embeds, noisy_latents, sigmas):
    """Return the flow (B, C, F, H, W) that the stock transformer predicts for noisy latents at `sigmas` (B,)."""
    return transformer(
        hidden_states=noisy_latents, timestep=sigmas * 1000, encoder_hidden_states=prompt_embeds, return_dict=False
    )[0]


def sample(pipeline):
    """Sample one clip for each caption with the stock pipeline and return the latents (B, C, F, H, W)."""
    return pipeline(
        list(CAPTIONS.values()),
        height=SIZE,
        width=SIZE,
        num_frames=NUM_FRAMES,
        num_inference_steps=20,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(1),
        output_type="latent",
    ).frames


def save_samples(output_dir, rows):
    """Save clips as a sheet with some frames of each, samples.png, and as they play, samples.mp4.

    Args:
        rows (`dict[str, torch.Tensor]`): Label -> clips (B, 3, N, height, width) in [-1, 1].
    """
    shown = range(0, NUM_FRAMES, 4)
    captions = [f"{caption}, frames {', '.join(map(str, shown))}" for caption in CAPTIONS.values()]
    sheet = demo.draw_sheet(captions, {label: clips[:, :, shown] for label, clips in rows.items()})
    sheet.save(output_dir / "samples.png")

    sheets = [
        demo.draw_sheet(list(CAPTIONS.values()), {label: clips[:, :, [k]] for label, clips in rows.items()}, scale=3)
        for k in range(NUM_FRAMES)
    ]
    there_and_back = sheets + sheets[-2:0:-1]
    write_clip(output_dir / "samples.mp4", 3 * there_and_back)


def main():
    """Run all stages."""
    output_dir = demo.find_output_dir(__doc__)
    print("[1/4] clips and a tiny random model")
    clips_dir = output_dir / "clips"
    write_clips(clips_dir)
    model_dir = demo.make_model(output_dir, "wan_t2v", MODEL_FLAGS)
    run_dir = demo.train(
        output_dir, "train_wan_video.py", model_dir=model_dir, dataset_path=clips_dir, settings=TRAINING
    )

    pipeline = demo.load_pipeline(model_dir)
    pixel_values, latents = read_clips(clips_dir, run_dir, pipeline)
    with torch.no_grad():
        prompt_embeds, _ = pipeline.encode_prompt(
            list(CAPTIONS.values()), do_classifier_free_guidance=False, max_sequence_length=family.MAX_SEQUENCE_LENGTH
        )  # (B, L, J)
    base_samples = sample(pipeline)
    loss = partial(demo.fixed_noise_loss, partial(predict, pipeline.transformer, prompt_embeds), latents)
    fixed = demo.report_loss(output_dir, pipeline, run_dir, loss, f"{len(CAPTIONS)} clips")

    print("[4/4] samples of that pipeline, from noise that training never saw; distances of latents")
    samples = sample(pipeline)
    table = demo.report_distances(list(CAPTIONS), base_samples, samples, latents, "clip")
    view = demo.fit_view(latents, pixel_values)
    rows = {
        "the clips": pixel_values,
        "their latents, made visible by a linear map": view(latents),
        "sampled without the LoRA, through the same map": view(base_samples),
        "sampled with the LoRA, through the same map": view(samples),
    }
    save_samples(output_dir, rows)

    results = {"loss_on_fixed_noise": fixed} | table
    demo.finish(output_dir, run_dir, results, "loss.png, samples.png, samples.mp4")


if __name__ == "__main__":
    main()
