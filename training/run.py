"""A run from its flags to its result, in the order in which it happens."""

import itertools
import pathlib
from functools import partial

from diffusers.training_utils import free_memory

from blockwise.stock import install_plan
from dataset.batches import Sample, TrainingDataset, plan_batches
from dataset.buckets import Sizing
from dataset.cache import Cache, read_entry
from dataset.encoding import Encoding, EncodingPlan, count_caption_tokens, encode_missing
from dataset.images import inspect_rows, read_image
from dataset.metadata import IMAGE_SUFFIXES, VIDEO_SUFFIXES, describe_rows, read_datasets
from dataset.report import draw_contact_sheet
from runtime.errors import RefusedError, refuse_unreadable_model
from runtime.processes import agreed, on_main_process
from training import arguments, checkpoints, export, hub, lora_init, optimizers, paths, trackers, validation
from training.flow_matching import sigma_law
from training.forecast import Launch, RunForecast, plan_memory
from training.launch import start_accelerator
from training.loop import Training, train
from training.module import DiffusionTrainingModule, find_lora_targets, make_trainable
from training.record import RunRecord
from training.run_folder import claim_output_dir


def run(family_class, args, log):
    """Do what a command line asks for. All that can be refused is refused before a model is loaded.

    Args:
        family_class (`type`): A `pipelines.family.Family`.
        args (`argparse.Namespace`): From `parse_args`.
        log (`MemoryLog`)

    Returns:
        `RunForecast` of a --dry_run, else None.
    """
    trackers.check_trackers(args)
    accelerator = start_accelerator(args)
    with claim_output_dir(args, accelerator):
        log.begin(accelerator.device)
        family = read_family(family_class, args)
        this = Run(family, args, accelerator, log)
        this.choose_weights()
        this.plan_data()
        this.plan_memory()
        this.check_weights()
        record = RunRecord(this)
        if family.never_trained:
            accelerator.print(f"never trained, since they get no gradient: {', '.join(family.never_trained)}")
        this.cache.make_room(this.forecast.cache_bytes)
        if args.dry_run:
            path = pathlib.Path(args.output_dir) / "contact_sheet.png"
            on_main_process(accelerator, lambda: draw_contact_sheet(path, this.items, media_of(family)[1]))
            return this.forecast

        repo_id = hub.open_repository(accelerator, args)
        trackers.start_trackers(accelerator, args, first_step=this.resumed["step"] + 1)
        this.encode()
        for stage in family.stages:
            if not this.is_finished(stage):
                this.train(stage)
                free_memory()
        record.finish()
        hub.push(accelerator, args, repo_id, family.stages)
        accelerator.end_training()
    return None


def read_family(family_class, args):
    """Return the `Family` of a run, from the configs of its pipeline, with all that the flags choose of it."""
    paths.check_paths(args)
    with refuse_unreadable_model(args):
        family = family_class.from_args(args)
    if family.values is not None:
        arguments.resolve_for_model(args, family.values)
    family.resolve(args)
    of_buckets = itertools.chain(*(args.bucket_config or {}).values())
    num_frames = min(map(int, of_buckets), default=getattr(args, "num_frames", 1))
    if num_frames < family.min_frames:
        where = "--num_frames is" if args.bucket_config is None else "bucket_config has"
        raise RefusedError(f"{where} {num_frames}; with a frame given at least {family.min_frames} are needed.")
    return family


class Run:
    """The parts of a run, as methods in the order in which `run` calls them. Each sets what later ones need.

    Args:
        family (`Family`), args (`argparse.Namespace`), accelerator (`Accelerator`), log (`MemoryLog`)

    Attributes:
        digests (`dict[str, str]`): Part of the pipeline -> digest of its weights.
        optimizer (`tuple`): From `find_optimizer`.
        checkpoint (`pathlib.Path`, or None), resumed (`dict`): From `find_checkpoint`.
        names (`list[str]`): Layers that get an adapter, or in full training modules that are not trained.
        initial (`dict[Stage, dict]`): What each LoRA starts from, see `read_initial_lora`.
        cache (`Cache`)
        inspected (`list[Item]`): Of every row.
        items, held_out (`list[Item]`): Those that are trained, and those that validation measures.
        preview_settings (`dict`): For `Family.sample`.
        laws (`dict[Stage, list[SigmaLaw]]`): Of each item that is trained.
        batches (`BatchPlan`)
        caption_tokens (`dict[str, int]`): Caption -> tokens that are kept of it.
        encodings (`EncodingPlan`)
        samples, held_out_samples (`list[Sample]`): Where the cache has what is encoded of those items.
        prompt_entries (`dict[str, pathlib.Path]`): And of the texts of previews.
        forecast (`RunForecast`), plan (`MemoryPlan`)
    """

    def __init__(self, family, args, accelerator, log):
        self.family, self.args, self.accelerator, self.log = family, args, accelerator, log
        self.reads = family.parts_read(previews=bool(args.validation_prompt))
        with refuse_unreadable_model(args):
            self.digests = family.check_weights(self.reads)
        self.optimizer = optimizers.find_optimizer(args, accelerator.device)
        find = partial(checkpoints.find_checkpoint, args, accelerator)
        found = agreed(accelerator, find, lambda found: {"the checkpoint to resume from": found}, patience_seconds=10)
        self.checkpoint, self.resumed = found

    def is_finished(self, stage):
        """Return whether a stage was trained before the checkpoint that this run resumes from."""
        return self.resumed["step"] > (stage.number + 1) * self.batches.last_step

    def choose_weights(self):
        """Find out what is trained, and read what it starts from."""
        family, args, never_trained = self.family, self.args, self.family.never_trained
        self.names, self.initial = never_trained, {}
        if args.training_mode == "lora":
            names = find_lora_targets(family.skeleton, args.lora_target_modules, never_trained=never_trained)
            family.check_lora_targets(names)
            read = lora_init.read_initial_lora
            self.names, self.initial = names, {stage: read(args, family, stage, names) for stage in family.stages}

    def plan_data(self):
        """Read the dataset; plan what is trained of it, in which order, and what of it is to be encoded."""
        family, args, accelerator = self.family, self.args, self.accelerator
        self.cache = Cache(args.cache_dir, accelerator.process_index)
        self.inspected = self._inspect()
        used = [item for item in self.inspected if item.record["decision"] == "used"]
        items, held_out = self.items, self.held_out = validation.hold_out(args, used)
        self.preview_settings = validation.preview_settings(args, items)
        sizes = [item.record["used"]["size"] for item in items]
        self.laws = {
            stage: [sigma_law(args, family.sigma_shift(height, width), stage.sigma_range) for width, height in sizes]
            for stage in family.stages
        }
        of_model = {"num_tokens": family.num_tokens, "model": family.identity, "num_stages": len(family.stages)}
        batches = plan_batches(args, items, accelerator.num_processes, resumed=self.resumed, **of_model)
        arguments.check_length(args, batches.last_step)
        num_stages, num_samples = len(family.stages), batches.num_samples
        arguments.log_little_effect(args, batches.last_step, num_stages=num_stages, num_samples=num_samples)
        self.batches = batches
        for stage in filter(self.is_finished, family.stages):
            if not pathlib.Path(args.output_dir, stage.name, export.LORA_FILE).is_file():
                where = f"the checkpoint is of a later expert, and {args.output_dir} has no LoRA of {stage.name}"
                raise RefusedError(f"--resume_from_checkpoint: {where}; resume in the --output_dir of that run.")
        dropped = [family.dropped_caption] * (args.caption_dropout > 0)
        prompts, count = validation.preview_prompts(args), family.count_prompt_tokens
        self.caption_tokens = count_caption_tokens([*items, *held_out], dropped + prompts, count)
        with refuse_unreadable_model(args):
            identities = family.encoder_identities(self.digests)
        encodings = self.encodings = EncodingPlan(self.cache, accelerator, identities)
        self.samples = [plan_sample(family, encodings, item, *dropped) for item in items]
        self.held_out_samples = [plan_sample(family, encodings, item) for item in held_out]
        self.prompt_entries = {prompt: encodings.paths([Encoding("captions", (prompt,))])[0] for prompt in prompts}
        encodings.find_missing()

    def _inspect(self):
        """Read the dataset and inspect every item of it; nothing is encoded yet."""
        family, args, accelerator = self.family, self.args, self.accelerator
        files, sizing = {"roles": family.roles}, Sizing.from_args(args, family.divisor)
        options = {"cache": self.cache, "accelerator": accelerator, "use_file": family.use_file}
        if family.is_video:
            files["media_suffixes"] = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)
            options |= {"fps": args.fps, "clip_part": args.clip_part, "min_frames": family.min_frames}
        rows = agreed(accelerator, partial(read_datasets, args, **files), describe_rows)
        return media_of(family)[0](rows, sizing, on_bad_sample=args.on_bad_sample, **options)

    def plan_memory(self):
        """Forecast what the run will need, and choose how each block is computed."""
        family, args, missing = self.family, self.args, self.encodings.missing
        tokens = {caption: family.embedded_tokens(kept) for caption, kept in self.caption_tokens.items()}
        records, held_out = ([item.record for item in items] for items in (self.items, self.held_out))
        to_encode = {"text encoder": missing["captions"], "VAE": missing["media"]}
        self.forecast = RunForecast(
            *(args, Launch.of(args, self.accelerator), family, self.names, self.optimizer),
            *(records, self.batches.samples_by_size, tokens, to_encode, held_out),
            previews=self.preview_settings if args.validation_prompt else None,
        )
        self.plan = plan_memory(args, self.forecast)

    def check_weights(self):
        """Bring all weights to this machine, and check that they are those of the checkpoint and the initial LoRA."""
        family, args = self.family, self.args
        if not args.dry_run:
            # The refusal of an unreadable model is inside: a difference between processes is none.
            fetch = refuse_unreadable_model(args)(partial(family.fetch_weights, self.reads, self.digests))
            self.digests = agreed(self.accelerator, fetch, dict)
        of_training = family.parts_read(previews=False)
        digests = {part: digest for part, digest in self.digests.items() if part in of_training}
        initial = {
            f"LoRA to start {stage.name} from": family.digest_tensors(itertools.chain(*tensors.values()))
            for stage, tensors in self.initial.items()
        }
        agreed(self.accelerator, lambda: {"what is at --lora_init_path": initial}, dict)
        if len(family.stages) > 1:  # the second one starts from it later, maybe after a resume
            digests |= initial
        for stage in family.stages if args.training_mode == "lora" else ():
            lora_init.check_base_of_lora(args, stage, digests.get(stage.subfolder))
            if self.is_finished(stage):
                digests |= self._digest_of_lora(stage)
        checkpoints.check_same_weights(args, self.resumed, self.batches, digests)

    def _digest_of_lora(self, stage):
        file = pathlib.Path(stage.name, export.LORA_FILE)
        tensors = self.family.read_tensors(pathlib.Path(self.args.output_dir, file)).values()
        return {str(file): self.family.digest_tensors(tensors)}

    def encode(self):
        """Run the encoders on what the cache lacks. Each is loaded once, if at all, and released."""
        family, or_refuse = self.family, refuse_unreadable_model(self.args)
        captions = family.load_prompt_encoder, family.encode_prompt, ("text encoder",)
        media = family.load_media_encoder, family.encode_media, ("VAE", "caching done")
        _, read = media_of(family)
        for kind, (load, encode, points) in {"captions": captions, "media": media}.items():
            load = or_refuse(partial(load, self.accelerator.device))
            encode_missing(self.encodings, kind, self.log, load=load, encode=encode, read=read, points=points)
        self.log.point("encoders gone")

    def train(self, stage):
        """Train the transformer of a `Stage`, write its result, and check it."""
        family, args, log = self.family, self.args, self.log
        accelerator = start_accelerator(args)  # one for each, since it keeps what it has prepared
        accelerator.trackers = self.accelerator.trackers
        resumed_steps = max(self.resumed["step"] - stage.number * self.batches.last_step, 0)
        with refuse_unreadable_model(args):
            sampler = self._sampler() if args.validation_prompt else None
            transformer = family.load_transformer(stage.subfolder)
        log.point("transformer loaded")
        make_trainable(transformer, args, self.names)
        install_plan(transformer, self.plan)
        module = DiffusionTrainingModule(family, transformer, loss_weighting=args.loss_weighting)
        if args.training_mode == "lora":
            if self.initial[stage] and not resumed_steps:
                accelerator.print(lora_init.start_from(transformer, self.initial[stage]))
            log.point("adapters")
        held_out = TrainingDataset(self.held_out_samples, padded=family.padded)
        samples = [sample._replace(law=law) for sample, law in zip(self.samples, self.laws[stage], strict=True)]
        drawn = {"caption_dropout": args.caption_dropout, "seed": args.seed}
        dataset = TrainingDataset(samples, padded=family.padded, **drawn)
        training = Training(accelerator, args, stage, module, dataset, self.batches, log, self.optimizer)
        if resumed_steps:
            training.resumed_steps, training.checkpoint = resumed_steps, self.checkpoint
        if self.held_out or args.validation_prompt:
            training.validation = validation.Validation(accelerator, args, module, stage, held_out, sampler)
        train(training)
        log.point("saving")
        path = export.save_result(accelerator, args, module, stage, self.digests[stage.subfolder])
        if not stage.is_last:  # what the next one is trained with
            self.batches.identity["weights"] |= on_main_process(accelerator, lambda: self._digest_of_lora(stage))
        if training.validation is not None:
            log.point("previews")
            training.validation.run(training.steps_before + self.batches.last_step)
            log.point("saving")
        export.check_result(accelerator, args, module, stage, dataset, path)

    def _sampler(self):
        pipeline, takes_turns = self.family.load_preview_pipeline(), self.forecast.previews_take_turns(self.plan)
        settings = self.preview_settings | self.family.guidance(self.args.guidance_scale)
        texts = {text: read_entry(path) for text, path in self.prompt_entries.items()}
        return validation.Sampler(pipeline, settings, texts, takes_turns)


# ---------------------------------------------------------------- items and their encodings


def media_of(family):
    """Return the function that inspects rows of a dataset, and the one that reads the pixels of an item."""
    if not family.is_video:
        return inspect_rows, read_image
    from dataset.videos import inspect_clips, read_clip  # here: its libraries are slow to import

    return inspect_clips, read_clip


def plan_sample(family, encodings, item, *dropped_caption):
    """Plan what is encoded of an item, in an `EncodingPlan`; return its `Sample`, also for its dropped caption."""
    entries = [
        encodings.paths(Encoding(kind, texts, item, roles) for kind, texts, roles in family.encodings(item, caption))
        for caption in (item.row.caption, *dropped_caption)
    ]
    return Sample(item.row.id, *entries)
