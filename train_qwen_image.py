"""Fine-tune Qwen-Image, LoRA or full.

On one device, on several, and on a CPU:
    python train_qwen_image.py --pretrained_model_name_or_path Qwen/Qwen-Image --dataset_path DIR --output_dir DIR
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_qwen_image.py ...
    accelerate launch --config_file accelerate_configs/cpu.yaml train_qwen_image.py ...
Runnable settings for each model: scripts/qwen_image/.
"""

import gc
import logging
import os
import sys

from runtime.errors import end_with_launcher, exit_codes, interrupt_quietly
from training.arguments import check_length, parse_args


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
    "negative_prompt": " ",
    "described_negative_prompt": 'a blank, " "',
    "guidance_scale": 4.0,
    "num_inference_steps": 50,
}

# bitsandbytes, if it is installed, warns at import of CPU kernels that nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

if __name__ == "__main__":
    # Before torch is imported, so that a typo is answered at once.
    with exit_codes():
        end_with_launcher()
        args = parse_args(sys.argv[1:], description=__doc__, values=FAMILY)
    interrupt_quietly()
    if "." not in args.optimizer:  # bitsandbytes would load torch's compiler, which only a class of one's own may use
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    gc.disable()  # the imports to come make many objects, and no garbage worth the search

import pathlib
from functools import partial

import torch
from diffusers import QwenImagePipeline

from blockwise.log import MemoryLog, OutOfMemory
from dataset.batches import plan_batches
from dataset.buckets import Sizing
from dataset.cache import Cache
from dataset.encoding import (
    check_room,
    count_caption_tokens,
    encode_missing,
    encoded_dataset,
    plan_encodings,
    read_unchanged,
    weights_identity,
)
from dataset.images import inspect_rows, read_picture
from dataset.metadata import describe_rows, read_datasets
from dataset.report import draw_contact_sheet
from pipelines import qwen_image as pipeline
from runtime.errors import refuse_unreadable_model
from runtime.processes import agreed, wait_for_all
from training.checkpoints import check_same_weights, describe_checkpoint, find_checkpoint
from training.export import check_result, save_result
from training.flow_matching import sigma_law
from training.forecast import Launch, RunForecast, plan_memory
from training.hub import open_repository, push
from training.launch import start_accelerator
from training.loop import train
from training.lora_init import check_base_of_lora, read_initial_lora, start_from
from training.module import DiffusionTrainingModule, find_lora_targets, make_trainable, parameters_to_train
from training.optimizers import find_optimizer
from training.paths import check_paths
from training.reporting import RunRecord
from training.run_folder import claim_output_dir
from training.trackers import Trackers, check_trackers
from training.validation import Validation, hold_out, preview_prompts, preview_settings, preview_size


DROPPED_CAPTION = " "


class QwenImageTrainingModule(DiffusionTrainingModule):
    """Qwen-Image from text to image.

    Args:
        transformer (`QwenImageTransformer2DModel`)
        use_gradient_checkpointing, use_gradient_checkpointing_offload (`bool` or one per block)
        loss_weighting (`str`): See `flow_losses`.
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
    check_trackers(args)
    accelerator = start_accelerator(args)
    with claim_output_dir(args, accelerator):
        return fine_tune(args, accelerator, log)


def fine_tune(args, accelerator, log):
    log.begin(accelerator.device)
    model = args.pretrained_model_name_or_path
    hub = {"revision": args.revision, "variant": args.variant}
    dtype = torch.bfloat16 if args.mixed_precision == "bf16" else torch.float32
    output_dir = pathlib.Path(args.output_dir)

    # ---- all that can be refused, before a model is loaded
    check_paths(args)
    with refuse_unreadable_model(args):
        pipeline.check_pipeline(model, **hub)
        skeleton = pipeline.load_transformer_skeleton(
            model, dtype=dtype, transformer_path=args.transformer_path, **hub
        )
        scheduler = pipeline.load_scheduler(model, **hub)
        tokenizer = pipeline.load_tokenizer(model, **hub)
        parts = ("transformer", "text_encoder", "vae")
        weights = pipeline.check_weights(model, parts, transformer_path=args.transformer_path, **hub)
    optimizer = find_optimizer(args, accelerator.device)
    checkpoint, resumed = agreed(
        accelerator, partial(find_checkpoint, args, accelerator), describe_checkpoint, patience_seconds=10
    )
    never_trained = pipeline.never_trained_modules(skeleton)
    if args.training_mode == "lora":
        targets = find_lora_targets(skeleton, args.lora_target_modules, never_trained=never_trained)
        initial = read_initial_lora(args, QwenImagePipeline.lora_state_dict, skeleton, targets)
    cache = Cache(args.cache_dir, accelerator.process_index)
    inspected = inspect_rows(
        agreed(accelerator, partial(read_datasets, args), describe_rows),
        Sizing.from_args(args, pipeline.SIZE_DIVISOR),
        on_bad_sample=args.on_bad_sample,
        cache=cache,
        accelerator=accelerator,
    )
    items, held_out = hold_out(args, [item for item in inspected if item.record["decision"] == "used"])
    sizes = [item.record["used"]["size"] for item in items]
    laws = [sigma_law(args, pipeline.sigma_shift(scheduler, height, width)) for width, height in sizes]
    batches = plan_batches(
        args,
        items,
        accelerator.num_processes,
        num_tokens=pipeline.num_tokens,
        resumed=resumed,
        model=pipeline.describe(skeleton),
    )
    check_length(args, batches.last_step, num_samples=batches.num_samples)
    further_captions = [DROPPED_CAPTION] * (args.caption_dropout > 0) + preview_prompts(args)
    count_tokens = partial(pipeline.count_prompt_tokens, tokenizer)
    caption_tokens = count_caption_tokens([*items, *held_out], further_captions, count_tokens)
    with refuse_unreadable_model(args):
        identity = partial(weights_identity, cache, model, dry_run=args.dry_run, **hub)
        text_encoder, media_encoder = identity(("text_encoder", "tokenizer")), identity(("vae",))
    embeds, latents = plan_encodings(
        cache,
        accelerator,
        [*items, *held_out],
        further_captions=further_captions,
        text_encoder=text_encoder,
        media_encoder=media_encoder,
        pipeline_file=pipeline.__file__,
    )

    def make_module(args, transformer, names, **memory_arguments):
        make_trainable(transformer, args, names)
        return QwenImageTrainingModule(transformer, loss_weighting=args.loss_weighting, **memory_arguments)

    names = targets if args.training_mode == "lora" else never_trained
    forecast = RunForecast(
        args,
        Launch.of(args, accelerator),
        skeleton=skeleton,
        block_lists=pipeline.block_lists(skeleton),
        shrink=partial(pipeline.shrink, skeleton, dtype=dtype),
        make_module=make_module,
        names=names,
        parameters=parameters_to_train(skeleton, args, names),
        optimizer=optimizer,
        encoders=partial(pipeline.encoder_skeletons, model, num_tokens=max(caption_tokens.values()), **hub),
        records=[item.record for item in items],
        samples_by_size=batches.samples_by_size,
        caption_tokens=caption_tokens,
        to_encode={"text encoder": embeds.missing, "VAE": latents.missing},
        held_out=[item.record for item in held_out],
        previews=preview_size(args, items) if args.validation_prompt else None,
    )
    plan = plan_memory(args, forecast)
    if not args.dry_run:
        with refuse_unreadable_model(args):
            weights = pipeline.fetch_weights(model, parts, weights, transformer_path=args.transformer_path, **hub)
    if args.training_mode == "lora":
        check_base_of_lora(args, weights.get("transformer"))
    check_same_weights(args, resumed, batches, weights)
    run = RunRecord(accelerator, args, log, plan, forecast, inspected, batches, num_tokens=pipeline.num_tokens)
    if never_trained:
        accelerator.print(f"never trained, since they get no gradient: {', '.join(never_trained)}")
    check_room(cache, forecast.cache_bytes)
    if args.dry_run:
        if accelerator.is_main_process:
            draw_contact_sheet(output_dir / "contact_sheet.png", items, read_picture)
        return forecast

    repo_id = open_repository(args) if accelerator.is_main_process else None
    trackers = Trackers(accelerator, args, first_step=resumed["step"] + 1)

    # ---- the encoders, each used once and let go, if anything is to be encoded
    or_refuse = refuse_unreadable_model(args)
    encode_missing(
        embeds,
        accelerator,
        log,
        load=or_refuse(partial(pipeline.load_prompt_encoder, model, device=accelerator.device, **hub)),
        encode=pipeline.encode_prompt,
        points=("text encoder",),
    )
    encode_missing(
        latents,
        accelerator,
        log,
        load=or_refuse(partial(pipeline.load_vae, model, device=accelerator.device, **hub)),
        encode=pipeline.encode_image,
        read=read_unchanged(cache, read_picture),
        points=("VAE", "caching done"),
    )
    log.point("encoders gone")
    dataset = encoded_dataset(args, items, embeds, latents, laws, dropped_caption=DROPPED_CAPTION)

    # ---- the transformer
    with refuse_unreadable_model(args):
        stock_preview = pipeline.load_preview_pipeline(model, **hub) if args.validation_prompt else None
        transformer = pipeline.load_transformer(model, dtype=dtype, transformer_path=args.transformer_path, **hub)
    log.point("transformer loaded")
    module = make_module(args, transformer, names, **plan.arguments("transformer_blocks"))
    if args.training_mode == "lora":
        if initial and checkpoint is None:
            accelerator.print(start_from(transformer, initial))
        log.point("adapters")

    # ---- training and its results
    validation = Validation(
        accelerator,
        args,
        module,
        embeds,
        latents,
        held_out,
        pipeline=stock_preview,
        sample=partial(pipeline.sample, **preview_settings(args, items)),
        takes_turns=forecast.previews_take_turns(plan.modes),
    )
    train(
        accelerator,
        module,
        dataset,
        batches,
        args,
        log=log,
        optimizer=optimizer,
        steps=range(resumed["step"] + 1, batches.last_step + 1),
        checkpoint=checkpoint,
        validation=validation,
        trackers=trackers,
    )
    log.point("saving")
    if accelerator.is_main_process:
        path = save_result(
            args,
            module,
            prefix="transformer",
            export_name="transformer.{}".format,
            further_info={"base_weights": weights["transformer"]},
        )
    if validation.is_wanted:
        log.point("previews")
        validation.run(batches.last_step, trackers)
        log.point("saving")
    if accelerator.is_main_process:
        stock = QwenImagePipeline(scheduler=None, vae=None, text_encoder=None, tokenizer=None, transformer=transformer)
        check_result(args, stock, module, dataset, path)
        run.finish()
    wait_for_all(accelerator)
    trackers.finish()
    accelerator.end_training()
    push(args, repo_id)


if __name__ == "__main__":
    gc.freeze()  # what they made stays, and need not be looked at again
    gc.enable()
    with exit_codes(OutOfMemory), MemoryLog() as log:
        main(args, log)
