"""Fine-tune Wan-Video, LoRA or full: text, image, or first and last frame to video.

On one device, on several, and on a CPU:
    python train_wan_video.py --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --dataset_path DIR ...
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_wan_video.py ...
    accelerate launch --config_file accelerate_configs/cpu.yaml train_wan_video.py ...
Runnable settings for each model: scripts/wan_video/.
"""

import gc
import logging
import os
import sys

from runtime.errors import end_with_launcher, exit_codes, interrupt_quietly
from training.arguments import check_length, parse_args, resolve_for_model


# What the help text says; the values themselves depend on the model and stand in its `WanVariant`.
FAMILY = {
    "flags": ("num_frames", "fps", "clip_part", "task", "expert", "validation_image"),
    "divisor": "16 (TI2V-5B: 32)",
    "height": "480 (TI2V-5B: 704)",
    "width": "832 (TI2V-5B: 1280)",
    "num_frames": "81 (TI2V-5B: 121)",
    "fps": "16 (TI2V-5B: 24)",
    "lora_target_modules": "to_q,to_k,to_v,to_out.0,ffn.net.0.proj,ffn.net.2, add_k_proj,add_v_proj where present",
    "tasks": "TI2V-5B",
    "experts": "Wan2.2 A14B",
    "timestep_sampling": "uniform",
    "sigma_shift": "5, but 3 for Wan2.1 T2V and I2V up to 832x480 pixels",
    "dropped_caption": "an empty caption",
    "described_negative_prompt": "the one that the model's authors use, in Chinese",
    "guidance_scale": "5.0 (A14B: 4.0 and, for low noise, 3.0; from image to video 3.5)",
    "num_inference_steps": "50 (A14B: 40)",
}

# bitsandbytes, if it is installed, warns at import of CPU kernels that nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# transformers warns at import that without torchvision it resizes pictures for CLIP by Pillow, as it is to.
logging.getLogger("transformers.utils.import_utils").setLevel(logging.ERROR)

if __name__ == "__main__":
    # Before torch is imported, so that a typo is answered at once.
    with exit_codes():
        end_with_launcher()
        args = parse_args(sys.argv[1:], description=__doc__, values=FAMILY, resolve=False)
    interrupt_quietly()
    if "." not in args.optimizer:  # bitsandbytes would load torch's compiler, which only a class of one's own may use
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    gc.disable()  # the imports to come make many objects, and no garbage worth the search

import dataclasses
import itertools
import pathlib
from functools import partial

import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from diffusers.training_utils import free_memory

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
from dataset.metadata import IMAGE_SUFFIXES, VIDEO_SUFFIXES, describe_rows, read_datasets
from dataset.report import draw_contact_sheet
from dataset.videos import inspect_clips, read_clip
from pipelines import wan_video as pipeline
from pipelines.weights import digest_tensors, read_tensors
from runtime.errors import RefusedError, refuse_unreadable_model
from runtime.processes import agreed, wait_for_all
from training.checkpoints import check_same_weights, describe_checkpoint, find_checkpoint
from training.export import LORA_FILE, check_result, load_result, save_result
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
from training.validation import (
    Validation,
    hold_out,
    preview_prompts,
    preview_settings,
    preview_size,
    read_preview_images,
)


DROPPED_CAPTION = ""


class WanVideoTrainingModule(DiffusionTrainingModule):
    """Wan-Video from text, image, or first and last frame to video.

    Args:
        transformer (`WanTransformer3DModel`)
        first_frame_is_clean (`bool`): TI2V-5B from image to video: its condition is the first latent frame itself.
        use_gradient_checkpointing, use_gradient_checkpointing_offload (`bool` or one per block)
        loss_weighting (`str`): See `flow_losses`.
    """

    def __init__(
        self,
        transformer,
        *,
        first_frame_is_clean=False,
        use_gradient_checkpointing=False,
        use_gradient_checkpointing_offload=False,
        loss_weighting="none",
    ):
        super().__init__(transformer, loss_weighting=loss_weighting)
        self.first_frame_is_clean = first_frame_is_clean
        self.use_gradient_checkpointing = use_gradient_checkpointing
        self.use_gradient_checkpointing_offload = use_gradient_checkpointing_offload
        self.dtype = transformer.patch_embedding.weight.dtype

    def predict(self, noisy_latents, timestep, batch):
        """Predict the flow of `noisy_latents` (B, C, F, H, W)."""
        hidden_states, image_embeds = noisy_latents, batch.get("image_embeds")
        if self.first_frame_is_clean:
            hidden_states, timestep = pipeline.clean_first_frame(noisy_latents, batch["latents"], timestep)
        elif "condition" in batch:
            hidden_states = torch.cat([noisy_latents, batch["condition"]], dim=1)  # (B, C + 4 + C, F, H, W)
        if image_embeds is not None:
            image_embeds = image_embeds.flatten(0, 1).to(self.dtype)  # (B * images, I, width of the image encoder)
        return pipeline.model_fn_wan_video(
            self.transformer,
            hidden_states=hidden_states.to(self.dtype),
            timestep=timestep,
            encoder_hidden_states=batch["prompt_embeds"].to(self.dtype),  # (B, L, J)
            encoder_hidden_states_image=image_embeds,
            use_gradient_checkpointing=self.use_gradient_checkpointing,
            use_gradient_checkpointing_offload=self.use_gradient_checkpointing_offload,
        )

    def trained_part(self, flow):
        """Leave the first latent frame of `flow` (B, C, F, H, W) out where it is clean."""
        return flow[:, :, 1:] if self.first_frame_is_clean else flow


def other_expert(variant, expert):
    """Return the expert that samples beside this one, None for an only transformer."""
    return next((name for name in variant.experts if name != expert), None)


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
        variant = pipeline.find_variant(model, **hub)
        skeleton = pipeline.load_transformer_skeleton(
            model, dtype=dtype, transformer_path=args.transformer_path, **hub
        )
        tokenizer = pipeline.load_tokenizer(model, **hub)
    values = {"experts": variant.experts, "lora_target_modules": ",".join(pipeline.default_lora_targets(skeleton))}
    values |= {"negative_prompt": pipeline.NEGATIVE_PROMPT, "guidance_scale": variant.guidance_scale}
    values["num_inference_steps"] = variant.num_inference_steps
    resolve_for_model(args, dataclasses.asdict(variant) | values)
    task = args.task or variant.tasks[0]
    min_frames = pipeline.min_frames(task)
    lengths = (
        [args.num_frames] if args.bucket_config is None else map(int, itertools.chain(*args.bucket_config.values()))
    )
    for num_frames in lengths:
        if num_frames < min_frames:
            where = "--num_frames is" if args.bucket_config is None else "bucket_config has"
            raise RefusedError(f"{where} {num_frames}; with a frame given ({task}) at least {min_frames} are needed.")
    experts = variant.experts if args.expert == "both" else (args.expert,)
    places = {expert: pipeline.transformer_subfolder(expert) for expert in experts}
    trained = list(places.values())
    shown = [other_expert(variant, expert) for expert in experts if args.validation_prompt]
    others = [place for place in map(pipeline.transformer_subfolder, filter(None, shown)) if place not in trained]
    parts = [*trained, *others, "text_encoder", "vae", "image_encoder"]
    with refuse_unreadable_model(args):
        weights = pipeline.check_weights(model, parts, transformer_path=args.transformer_path, **hub)
    optimizer = find_optimizer(args, accelerator.device)
    checkpoint, resumed = agreed(
        accelerator, partial(find_checkpoint, args, accelerator), describe_checkpoint, patience_seconds=10
    )
    never_trained = pipeline.never_trained_modules(skeleton)
    if args.training_mode == "lora":
        targets = find_lora_targets(skeleton, args.lora_target_modules, never_trained=never_trained)
        if not any(name.startswith("blocks.") for name in targets):
            raise RefusedError("--lora_target_modules names no layer in a block; diffusers loads no such Wan LoRA.")
        read = partial(read_initial_lora, args, WanPipeline.lora_state_dict, skeleton, targets)
        initial = {expert: read(expert=expert) for expert in experts}
    cache = Cache(args.cache_dir, accelerator.process_index)
    inspected = inspect_clips(
        agreed(
            accelerator,
            partial(read_datasets, args, media_suffixes=(*VIDEO_SUFFIXES, *IMAGE_SUFFIXES), frame_folders=True),
            describe_rows,
        ),
        Sizing.from_args(args, variant.divisor),
        fps=args.fps,
        clip_part=args.clip_part,
        min_frames=min_frames,
        on_bad_sample=args.on_bad_sample,
        cache=cache,
        accelerator=accelerator,
    )
    items, held_out = hold_out(args, [item for item in inspected if item.record["decision"] == "used"])
    preview_images = read_preview_images(args, *preview_size(args, items)[:2])
    sizes = [item.record["used"]["size"] for item in items]
    laws = {
        expert: [
            sigma_law(args, variant.sigma_shift(height, width, task), variant.sigma_range(expert))
            for width, height in sizes
        ]
        for expert in experts
    }
    batches = plan_batches(
        args,
        items,
        accelerator.num_processes,
        num_tokens=variant.num_tokens,
        resumed=resumed,
        model=pipeline.describe(skeleton) | dataclasses.asdict(variant),
        num_stages=len(experts),
    )
    check_length(args, batches.last_step, num_stages=len(experts), num_samples=batches.num_samples)
    finished = experts[: max(resumed["step"] - 1, 0) // batches.last_step]
    for expert in finished:
        if not (output_dir / expert / LORA_FILE).is_file():
            raise RefusedError(
                f"--resume_from_checkpoint: the checkpoint is of a later expert, and {output_dir} does not have the "
                f"LoRA of {expert}; resume in the --output_dir of that run."
            )
    further_captions = [DROPPED_CAPTION] * (args.caption_dropout > 0) + preview_prompts(args)
    count_tokens = partial(pipeline.count_prompt_tokens, tokenizer)
    caption_tokens = count_caption_tokens([*items, *held_out], further_captions, count_tokens)
    with refuse_unreadable_model(args):
        identity = partial(weights_identity, cache, model, dry_run=args.dry_run, **hub)
        text_encoder = identity(("text_encoder", "tokenizer"))
        media_encoder = identity(("vae", "image_encoder", "image_processor"))
    embeds, latents = plan_encodings(
        cache,
        accelerator,
        [*items, *held_out],
        further_captions=further_captions,
        text_encoder=text_encoder,
        media_encoder=f"{media_encoder} {task} {variant.expand_timesteps}",
        pipeline_file=pipeline.__file__,
    )

    def make_module(args, transformer, names, **memory_arguments):
        make_trainable(transformer, args, names)
        return WanVideoTrainingModule(
            transformer,
            first_frame_is_clean=variant.expand_timesteps and task == "i2v",
            loss_weighting=args.loss_weighting,
            **memory_arguments,
        )

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
        encoders=partial(pipeline.encoder_skeletons, model, task=task, **hub),
        records=[item.record for item in items],
        samples_by_size=batches.samples_by_size,
        caption_tokens=dict.fromkeys(caption_tokens, pipeline.MAX_SEQUENCE_LENGTH),  # padded
        to_encode={"text encoder": embeds.missing, "VAE": latents.missing},
        held_out=[item.record for item in held_out],
        previews=preview_size(args, items) if args.validation_prompt else None,
        preview_transformers=max(1, len(variant.experts)),
    )
    plan = plan_memory(args, forecast)
    if not args.dry_run:
        with refuse_unreadable_model(args):
            weights = pipeline.fetch_weights(model, parts, weights, transformer_path=args.transformer_path, **hub)
    if args.training_mode == "lora":
        for expert in experts:
            check_base_of_lora(args, weights.get(places[expert]), expert=expert)
            if args.expert == "both":  # the second one starts from it later, maybe after a resume
                weights[f"LoRA to start {expert} from"] = digest_tensors(itertools.chain(*initial[expert].values()))
        for expert in finished:
            weights[f"{expert}/{LORA_FILE}"] = digest_tensors(read_tensors(output_dir / expert / LORA_FILE).values())
    check_same_weights(
        args, resumed, batches, {part: digest for part, digest in weights.items() if part not in others}
    )
    run = RunRecord(accelerator, args, log, plan, forecast, inspected, batches, num_tokens=variant.num_tokens)
    check_room(cache, forecast.cache_bytes)
    if args.dry_run:
        if accelerator.is_main_process:
            draw_contact_sheet(output_dir / "contact_sheet.png", items, read_clip)
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
        load=or_refuse(partial(pipeline.load_clip_encoder, model, device=accelerator.device, **hub)),
        encode=partial(pipeline.encode_clip, task=task),
        read=read_unchanged(cache, read_clip),
        points=("VAE", "caching done"),
    )
    log.point("encoders gone")

    def load_other_expert(expert, steps_before, stock):
        place = pipeline.transformer_subfolder(expert)
        stock.register_modules(**{place: pipeline.load_transformer(model, dtype=dtype, subfolder=place, **hub)})
        if expert in experts[: steps_before // batches.last_step]:  # trained by this run
            load_result(stock, output_dir / expert, place)

    def train_expert(expert, steps_before):
        # A function, so that nothing of one expert is left when the next is loaded.
        resumed_steps = max(resumed["step"] - steps_before, 0)
        dataset = encoded_dataset(args, items, embeds, latents, laws[expert], dropped_caption=DROPPED_CAPTION)

        # ---- the transformer
        with refuse_unreadable_model(args):
            stock_preview = None
            if args.validation_prompt:
                stock_preview = pipeline.load_preview_pipeline(model, task=task, **hub)
            transformer = pipeline.load_transformer(
                model, dtype=dtype, transformer_path=args.transformer_path, subfolder=places[expert], **hub
            )
        log.point("transformer loaded")
        module = make_module(args, transformer, names, **plan.arguments("blocks"))
        if args.training_mode == "lora":
            if initial[expert] and not resumed_steps:
                accelerator.print(start_from(transformer, initial[expert]))
            log.point("adapters")

        # ---- training and its results
        other = other_expert(variant, expert)
        settings = preview_settings(args, items, preview_images) | variant.guidance(args.guidance_scale)
        validation = Validation(
            accelerator,
            args,
            module,
            embeds,
            latents,
            held_out,
            pipeline=stock_preview,
            sample=partial(pipeline.sample, **settings),
            takes_turns=forecast.previews_take_turns(plan.modes),
            sigma_range=variant.sigma_range(expert),
            place=places[expert],
            load_other=partial(load_other_expert, other, steps_before) if other is not None else None,
            fps=args.fps,
        )
        train(
            start_accelerator(args),  # one for each, since it holds on to what it has prepared
            module,
            dataset,
            batches,
            args,
            log=log,
            optimizer=optimizer,
            steps=range(resumed_steps + 1, batches.last_step + 1),
            checkpoint=checkpoint if resumed_steps else None,
            validation=validation,
            trackers=trackers,
            expert=expert,
            steps_before=steps_before,
            is_followed=expert != experts[-1],
        )
        log.point("saving")
        if accelerator.is_main_process:
            path = save_result(
                args,
                module,
                prefix="transformer",
                export_name=pipeline.lora_export_name,
                expert=expert,
                places=places,
                further_info={
                    "base_weights": weights[places[expert]],
                    "sigma_range": "{} to {}".format(*variant.sigma_range(expert)),
                },
            )
            if expert != experts[-1]:  # what the next one is trained beside
                batches.identity["weights"][f"{expert}/{LORA_FILE}"] = digest_tensors(read_tensors(path).values())
        if validation.is_wanted:
            log.point("previews")
            validation.run(steps_before + batches.last_step, trackers)
            log.point("saving")
        if accelerator.is_main_process:
            stock_class = WanPipeline if task == "t2v" else WanImageToVideoPipeline
            parts = {"transformer": transformer, "transformer_2": transformer}  # it is checked in its own place
            stock = stock_class(scheduler=None, vae=None, text_encoder=None, tokenizer=None, **parts)
            images = {"t2v": (), "i2v": ("image",), "flf2v": ("image", "last_image")}[task]
            check_result(args, stock, module, dataset, path, expert=expert, places=places, images=images)
        wait_for_all(accelerator)

    for stage, expert in enumerate(experts):
        if expert not in finished:
            train_expert(expert, stage * batches.last_step)
            free_memory()
    if accelerator.is_main_process:
        run.finish()
    trackers.finish()
    accelerator.end_training()
    push(args, repo_id, places)


if __name__ == "__main__":
    gc.freeze()  # what they made stays, and need not be looked at again
    gc.enable()
    with exit_codes(OutOfMemory), MemoryLog() as log:
        main(args, log)
