"""Fine-tune Qwen-Image, LoRA or full.

On one device, on several, and on a CPU:
    python train_qwen_image.py --pretrained_model_name_or_path Qwen/Qwen-Image --dataset_path DIR --output_dir DIR
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_qwen_image.py ...
    accelerate launch --config_file accelerate_configs/cpu.yaml train_qwen_image.py ...
Runnable settings for each model: scripts/qwen_image/.
"""

import logging
import sys

from training.arguments import parse_args
from training.errors import exit_codes


FAMILY = {
    "divisor": 16,
    "height": 1024,
    "width": 1024,
    "lora_target_modules": (
        "to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,"
        "img_mlp.net.0.proj,img_mlp.net.2,txt_mlp.net.0.proj,txt_mlp.net.2"
    ),
    "timestep_sampling": "logit_normal",
    "sigma_shift": "the model's own for the size of each picture (2.00 at 1024x1024)",
    "dropped_caption": 'the caption " "',
}

# bitsandbytes, if it is installed, warns at import of CPU kernels that nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

if __name__ == "__main__":
    # Before torch is imported, so that a typo is answered at once.
    with exit_codes():
        args = parse_args(sys.argv[1:], description=__doc__, values=FAMILY)

import pathlib
from functools import partial

import torch
from diffusers import QwenImagePipeline
from diffusers.training_utils import free_memory

from memory.log import MemoryLog, OutOfMemory
from pipelines import qwen_image as pipeline
from training.checkpoints import find_checkpoint
from training.data.batches import TrainingDataset, plan_batches
from training.data.encoding import count_caption_tokens, encode_captions, encode_media
from training.data.images import inspect_rows, read_picture
from training.data.metadata import read_rows
from training.errors import refuse_unreadable_model
from training.export import export
from training.flow_matching import sigma_law
from training.forecast import Launch, RunForecast, plan_memory
from training.launch import make_output_dir, start_accelerator
from training.loop import train
from training.lora_init import read_initial_lora, start_from
from training.module import DiffusionTrainingModule, find_lora_targets, make_trainable, parameters_to_train
from training.optimizers import find_optimizer
from training.reporting import RunRecord


DROPPED_CAPTION = " "


class QwenImageTrainingModule(DiffusionTrainingModule):
    """Qwen-Image from text to image.

    Args:
        transformer (`QwenImageTransformer2DModel`)
        use_gradient_checkpointing, use_gradient_checkpointing_offload (`bool` or one per block)
        loss_weighting (`str`): See `flow_loss`.
    """

    def __init__(
        self,
        transformer,
        *,
        use_gradient_checkpointing=False,
        use_gradient_checkpointing_offload=False,
        loss_weighting="none",
    ):
        super().__init__(transformer, loss_weighting=loss_weighting)
        self.use_gradient_checkpointing = use_gradient_checkpointing
        self.use_gradient_checkpointing_offload = use_gradient_checkpointing_offload
        self.dtype = transformer.img_in.weight.dtype

    def predict(self, noisy_latents, timestep, batch):
        """Predict the flow of `noisy_latents` (B, C, H, W)."""
        batch_size, _, height, width = noisy_latents.shape
        tokens = pipeline.model_fn_qwen_image(
            self.transformer,
            hidden_states=pipeline.pack_latents(noisy_latents).to(self.dtype),  # (B, T, 64)
            timestep=timestep,
            encoder_hidden_states=batch["prompt_embeds"].to(self.dtype),  # (B, L, J)
            encoder_hidden_states_mask=batch["prompt_embeds_mask"],
            img_shapes=[[(1, height // 2, width // 2)]] * batch_size,
            use_gradient_checkpointing=self.use_gradient_checkpointing,
            use_gradient_checkpointing_offload=self.use_gradient_checkpointing_offload,
        )
        return pipeline.unpack_latents(tokens, height, width)  # (B, C, H, W)


def main(args, log):
    accelerator = start_accelerator(args)
    log.begin(accelerator.device)
    model = args.pretrained_model_name_or_path
    hub = {"revision": args.revision, "variant": args.variant}
    dtype = torch.bfloat16 if args.mixed_precision == "bf16" else torch.float32
    output_dir = pathlib.Path(args.output_dir)

    # ---- all that can be refused, before a model is loaded
    with refuse_unreadable_model(args):
        skeleton = pipeline.load_transformer_skeleton(
            model, dtype=dtype, transformer_path=args.transformer_path, **hub
        )
        scheduler = pipeline.load_scheduler(model, **hub)
        tokenizer = pipeline.load_tokenizer(model, **hub)
    optimizer_class, optimizer_arguments = find_optimizer(args)
    checkpoint, resumed = find_checkpoint(args)
    never_trained = pipeline.never_trained_modules(skeleton)
    if args.training_mode == "lora":
        targets = find_lora_targets(skeleton, args.lora_target_modules, never_trained=never_trained)
        initial = read_initial_lora(args, QwenImagePipeline.lora_state_dict, skeleton, targets)
    rows = read_rows(
        args.dataset_path,
        dataset_metadata=args.dataset_metadata,
        media_column=args.media_column,
        caption_column=args.caption_column,
        allow_missing_captions=args.allow_missing_captions,
    )
    records = inspect_rows(
        rows, height=args.height, width=args.width, max_pixels=args.max_pixels, divisor=pipeline.SIZE_DIVISOR
    )
    items = [(row, record) for row, record in zip(rows, records, strict=True) if record["decision"] == "used"]
    sizes = [record["used"]["size"] for _, record in items]
    laws = [sigma_law(args, pipeline.sigma_shift(scheduler, height, width)) for width, height in sizes]
    batches, last_step = plan_batches(
        args,
        [record for _, record in items],
        accelerator.num_processes,
        resumed=resumed,
        model=pipeline.describe(skeleton),
    )
    captions = [row.caption for row, _ in items] + [DROPPED_CAPTION] * (args.caption_dropout > 0)
    num_tokens = count_caption_tokens(captions, partial(pipeline.count_prompt_tokens, tokenizer))

    def make_module(args, transformer, names, **memory_arguments):
        make_trainable(transformer, args, names)
        return QwenImageTrainingModule(transformer, loss_weighting=args.loss_weighting, **memory_arguments)

    names = targets if args.training_mode == "lora" else never_trained
    parameters = parameters_to_train(skeleton, args, names)
    forecast = RunForecast(
        args,
        Launch.of(args, accelerator),
        skeleton=skeleton,
        block_lists=pipeline.block_lists(skeleton),
        shrink=partial(pipeline.shrink, skeleton, dtype=dtype),
        make_module=make_module,
        names=names,
        parameters=parameters,
        optimizer=(optimizer_class, optimizer_arguments),
        encoders=partial(pipeline.encoder_skeletons, model, num_tokens=max(num_tokens), **hub),
        records=[record for _, record in items],
        captions_differ=len(set(num_tokens)) > 1,
    )
    plan = plan_memory(args, forecast)
    if not args.dry_run:
        with refuse_unreadable_model(args):
            pipeline.check_weights(skeleton, model, transformer_path=args.transformer_path)
    make_output_dir(output_dir)
    accelerator.print(batches.describe(last_step))
    run = RunRecord(accelerator, args, log, plan=plan, parameters=parameters, forecast=forecast, records=records)
    if never_trained:
        accelerator.print(f"never trained, since they get no gradient: {', '.join(never_trained)}")
    if args.dry_run:
        return forecast

    # ---- the encoders, each used once and let go
    with refuse_unreadable_model(args):
        prompt_encoder = pipeline.load_prompt_encoder(model, device=accelerator.device, **hub)
        vae = pipeline.load_vae(model, device="cpu", **hub)
    log.point("text encoder")
    embeds = encode_captions(captions, partial(pipeline.encode_prompt, prompt_encoder), accelerator)
    del prompt_encoder
    free_memory()
    vae.to(accelerator.device)
    log.point("VAE")
    encoded = encode_media(items, read_picture, partial(pipeline.encode_image, vae), accelerator)
    log.point("caching done")
    del vae
    free_memory()
    log.point("encoders gone")
    samples = [
        {"id": row.id, "prompt_embeds": embeds[row.caption], **tensors}
        for (row, _), tensors in zip(items, encoded, strict=True)
    ]
    dataset = TrainingDataset(
        samples,
        laws,
        seed=args.seed,
        caption_dropout=args.caption_dropout,
        dropped_prompt_embeds=embeds.get(DROPPED_CAPTION),
    )

    # ---- the transformer
    with refuse_unreadable_model(args):
        transformer = pipeline.load_transformer(model, dtype=dtype, transformer_path=args.transformer_path, **hub)
    log.point("transformer loaded")
    module = make_module(args, transformer, names, **plan.arguments("transformer_blocks"))
    if args.training_mode == "lora":
        if initial and checkpoint is None:
            accelerator.print(start_from(transformer, initial))
        log.point("adapters")

    # ---- training and its results
    train(
        accelerator,
        module,
        dataset,
        batches,
        args,
        log=log,
        optimizer_class=optimizer_class,
        optimizer_arguments=optimizer_arguments,
        steps=range(resumed["step"] + 1, last_step + 1),
        checkpoint=checkpoint,
    )
    log.point("saving")
    if accelerator.is_main_process:
        stock = QwenImagePipeline(scheduler=None, vae=None, text_encoder=None, tokenizer=None, transformer=transformer)
        export(args, stock, module, dataset, prefix="transformer", export_name="transformer.{}".format)
        run.finish()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    with exit_codes(OutOfMemory), MemoryLog() as log:
        main(args, log)
