"""A run from its flags to its result, in the order in which it happens."""

import dataclasses
import itertools
import pathlib
from functools import partial

from diffusers.training_utils import free_memory

from blockwise.stock import install_plan
from dataset.batches import BatchPlan, Sample, TrainingDataset, plan_batches
from dataset.buckets import Sizing
from dataset.cache import Cache
from dataset.encoding import Encoding, EncodingPlan, check_room, count_caption_tokens, encode_missing
from dataset.images import inspect_rows, read_image
from dataset.metadata import IMAGE_SUFFIXES, VIDEO_SUFFIXES, describe_rows, read_datasets
from dataset.report import draw_contact_sheet
from runtime.errors import RefusedError, refuse_unreadable_model
from runtime.processes import agreed, on_main_process
from training.arguments import check_length, resolve_for_model
from training.checkpoints import check_same_weights, describe_checkpoint, find_checkpoint
from training.export import LORA_FILE, check_result, load_result, save_result
from training.flow_matching import sigma_law
from training.forecast import Launch, RunForecast, plan_memory
from training.hub import open_repository, push
from training.launch import start_accelerator
from training.loop import Training, train
from training.lora_init import check_base_of_lora, read_initial_lora, start_from
from training.module import DiffusionTrainingModule, find_lora_targets, make_trainable
from training.optimizers import find_optimizer
from training.paths import check_paths
from training.record import RunRecord
from training.run_folder import claim_output_dir
from training.trackers import check_trackers, start_trackers
from training.validation import Sampler, Validation, hold_out, preview_prompts, preview_settings, preview_size


def run(family_class, args, log):
    """Do what a command line asks for. All that can be refused is refused before a model is loaded.

    Args:
        family_class (`type`): A `pipelines.family.Family`.
        args (`argparse.Namespace`): From `parse_args`.
        log (`MemoryLog`)

    Returns:
        `RunForecast` of a --dry_run, else None.
    """
    check_trackers(args)
    accelerator = start_accelerator(args)
    with claim_output_dir(args, accelerator):
        log.begin(accelerator.device)
        family = read_family(family_class, args)
        weights = Weights(family, args)
        optimizer = find_optimizer(args, accelerator.device)
        resumed = agreed(
            accelerator, partial(find_checkpoint, args, accelerator), describe_checkpoint, patience_seconds=10
        )
        weights.choose()
        data = plan_data(family, args, accelerator, resumed[1], weights.digests)
        forecast = forecast_run(family, args, accelerator, weights, optimizer, data)
        plan = plan_memory(args, forecast)
        weights.check(data.batches, resumed[1])
        record = RunRecord(accelerator, args, log, plan, forecast, data, family.num_tokens)
        if family.never_trained:
            accelerator.print(f"never trained, since they get no gradient: {', '.join(family.never_trained)}")
        check_room(data.cache, forecast.cache_bytes)
        if args.dry_run:
            path, read = pathlib.Path(args.output_dir) / "contact_sheet.png", media_of(family)[1]
            on_main_process(accelerator, lambda: draw_contact_sheet(path, data.items, read))
            return forecast

        repo_id = open_repository(accelerator, args)
        start_trackers(accelerator, args, first_step=resumed[1]["step"] + 1)
        encode_data(family, args, accelerator, log, data)
        stages = Stages(family, args, log, weights, data, optimizer, forecast, plan, resumed, accelerator.trackers)
        for stage in family.stages:
            if not is_finished(stage, resumed[1], data.batches):
                stages.train(stage)
                free_memory()
        record.finish()
        push(accelerator, args, repo_id, family.stages)
        accelerator.end_training()
    return None


# ---------------------------------------------------------------- the model


def read_family(family_class, args):
    """Return the `Family` of a run, from the configs of its pipeline, with all that the flags choose of it."""
    check_paths(args)
    with refuse_unreadable_model(args):
        family = family_class.from_args(args)
    if family.values is not None:
        resolve_for_model(args, family.values)
    family.resolve(args)
    lengths = [args.num_frames] if family.is_video else []
    if args.bucket_config is not None:
        lengths = map(int, itertools.chain(*args.bucket_config.values()))
    for num_frames in lengths:
        if num_frames < family.min_frames:
            where = "--num_frames is" if args.bucket_config is None else "bucket_config has"
            raise RefusedError(f"{where} {num_frames}; with a frame given at least {family.min_frames} are needed.")
    return family


def is_finished(stage, resumed, batches):
    """Return whether a stage was trained before the checkpoint that this run resumes from."""
    return resumed["step"] > (stage.number + 1) * batches.last_step


class Weights:
    """Which weights a run reads, which of them it trains, and what those start from.

    Args:
        family (`Family`), args (`argparse.Namespace`)

    Attributes:
        names (`list[str]`): Layers that get an adapter, or in full training modules that are not trained.
        initial (`dict[Stage, dict]`): See `read_initial_lora`.
        digests (`dict[str, str]`): Part of the pipeline -> digest of its weights.
    """

    def __init__(self, family, args):
        self.family, self.args = family, args
        self.reads = family.parts_read(previews=bool(args.validation_prompt))
        with refuse_unreadable_model(args):
            self.digests = family.check_weights(self.reads)

    def choose(self):
        """Find out what is trained, and read what it starts from."""
        family, args = self.family, self.args
        self.names, self.initial = family.never_trained, {}
        if args.training_mode == "lora":
            self.names = find_lora_targets(
                family.skeleton, args.lora_target_modules, never_trained=family.never_trained
            )
            try:
                family.check_lora_targets(self.names)
            except ValueError as error:
                raise RefusedError(f"--lora_target_modules {error}.") from None
            self.initial = {stage: read_initial_lora(args, family, stage, self.names) for stage in family.stages}

    def check(self, batches, resumed):
        """Bring all weights to this machine, and check that they are those of the checkpoint and the initial LoRA."""
        family, args = self.family, self.args
        if not args.dry_run:
            with refuse_unreadable_model(args):
                self.digests = family.fetch_weights(self.reads, self.digests)
        digests, trained = dict(self.digests), [stage.subfolder for stage in family.stages]
        for stage in family.stages if args.training_mode == "lora" else ():
            check_base_of_lora(args, stage, digests.get(stage.subfolder))
            if len(family.stages) > 1:  # the second one starts from it later, maybe after a resume
                tensors = itertools.chain(*self.initial[stage].values())
                digests[f"LoRA to start {stage.name} from"] = family.digest_tensors(tensors)
            if is_finished(stage, resumed, batches):
                path = pathlib.Path(args.output_dir) / stage.name / LORA_FILE
                digests[f"{stage.name}/{LORA_FILE}"] = family.digest_tensors(family.read_tensors(path).values())
        for stage in family.stages:  # of previews alone
            if stage.other not in trained:
                digests.pop(stage.other, None)
        check_same_weights(args, resumed, batches, digests)


# ---------------------------------------------------------------- the data


@dataclasses.dataclass
class Data:
    """What a run trains on, in which order, and what of it is to be encoded.

    Args:
        cache (`Cache`)
        inspected (`list[Item]`): Of every row.
        items, held_out (`list[Item]`): Those that are trained, and those that validation measures.
        preview_settings (`dict`): For `Family.sample`.
        laws (`dict[Stage, list[SigmaLaw]]`): Of each item that is trained.
        batches (`BatchPlan`)
        caption_tokens (`dict[str, int]`): Caption -> tokens that are kept of it.
        encodings (`EncodingPlan`)
    """

    cache: Cache
    inspected: list
    items: list
    held_out: list
    preview_settings: dict
    laws: dict
    batches: BatchPlan
    caption_tokens: dict
    encodings: EncodingPlan


def media_of(family):
    """Return the function that inspects rows of a dataset, and the one that reads the pixels of an item."""
    if not family.is_video:
        return inspect_rows, read_image
    from dataset.videos import inspect_clips, read_clip  # here: its libraries are slow to import

    return inspect_clips, read_clip


def inspect(family, args, accelerator, cache):
    """Read the dataset and inspect every item of it; nothing is encoded yet."""
    how = {"on_bad_sample": args.on_bad_sample, "cache": cache, "accelerator": accelerator}
    files = {"roles": family.roles}
    how |= {"use_file": family.use_file}
    if family.is_video:
        files |= {"media_suffixes": (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES), "frame_folders": True}
        how |= {"fps": args.fps, "clip_part": args.clip_part, "min_frames": family.min_frames}
    rows = agreed(accelerator, partial(read_datasets, args, **files), describe_rows)
    return media_of(family)[0](rows, Sizing.from_args(args, family.divisor), **how)


def plan_data(family, args, accelerator, resumed, digests):
    """Return the `Data` of a run on weights with these digests."""
    cache = Cache(args.cache_dir, accelerator.process_index)
    inspected = inspect(family, args, accelerator, cache)
    items, held_out = hold_out(args, [item for item in inspected if item.record["decision"] == "used"])
    settings = preview_settings(args, items)
    sizes = [item.record["used"]["size"] for item in items]
    laws = {
        stage: [sigma_law(args, family.sigma_shift(height, width), stage.sigma_range) for width, height in sizes]
        for stage in family.stages
    }
    num_stages = len(family.stages)
    batches = plan_batches(
        args,
        items,
        accelerator.num_processes,
        num_tokens=family.num_tokens,
        resumed=resumed,
        model=family.identity,
        num_stages=num_stages,
    )
    check_length(args, batches.last_step, num_stages=num_stages, num_samples=batches.num_samples)
    for stage in family.stages:
        if is_finished(stage, resumed, batches) and not pathlib.Path(args.output_dir, stage.name, LORA_FILE).is_file():
            raise RefusedError(
                f"--resume_from_checkpoint: the checkpoint is of a later expert, and {args.output_dir} does not have "
                f"the LoRA of {stage.name}; resume in the --output_dir of that run."
            )
    further_captions = [family.dropped_caption] * (args.caption_dropout > 0) + preview_prompts(args)
    caption_tokens = count_caption_tokens([*items, *held_out], further_captions, family.count_prompt_tokens)
    with refuse_unreadable_model(args):
        identities = family.encoder_identities(digests)
    wanted = [encoding for item in [*items, *held_out] for encoding in encodings_of(family, item)]
    if args.caption_dropout > 0:
        wanted += [encoding for item in items for encoding in encodings_of(family, item, family.dropped_caption)]
    wanted += [Encoding("captions", (prompt,)) for prompt in preview_prompts(args)]
    encodings = EncodingPlan(cache, accelerator, identities, wanted)
    return Data(cache, inspected, items, held_out, settings, laws, batches, caption_tokens, encodings)


def encodings_of(family, item, caption=None):
    """Return each `Encoding` of an item, with another caption if one is given."""
    given = family.encodings(item, item.row.caption if caption is None else caption)
    return [Encoding(kind, texts, item, roles) for kind, texts, roles in given]


def encoded_dataset(family, args, encodings, items, laws):
    """Return the `TrainingDataset` of items whose encodings are all in the cache, with a `SigmaLaw` for each."""
    samples = []
    for item, law in zip(items, laws, strict=True):
        entries, dropped = encodings.paths(encodings_of(family, item)), ()
        if args.caption_dropout > 0:
            dropped = encodings.paths(encodings_of(family, item, family.dropped_caption))
        samples.append(Sample(item.row.id, entries, dropped, law))
    return TrainingDataset(samples, padded=family.padded, caption_dropout=args.caption_dropout, seed=args.seed)


def encode_data(family, args, accelerator, log, data):
    """Run the encoders on what the cache lacks. Each is loaded once, if at all, and released."""
    or_refuse = refuse_unreadable_model(args)
    read = media_of(family)[1]
    encode_missing(
        data.encodings,
        "captions",
        log,
        load=or_refuse(partial(family.load_prompt_encoder, accelerator.device)),
        encode=family.encode_prompt,
        read=read,
        points=("text encoder",),
    )
    encode_missing(
        data.encodings,
        "media",
        log,
        load=or_refuse(partial(family.load_media_encoder, accelerator.device)),
        encode=family.encode_media,
        read=read,
        points=("VAE", "caching done"),
    )
    log.point("encoders gone")


# ---------------------------------------------------------------- what it will need


def forecast_run(family, args, accelerator, weights, optimizer, data):
    """Return the `RunForecast`."""
    tokens = {caption: family.embedded_tokens(kept) for caption, kept in data.caption_tokens.items()}
    return RunForecast(
        args,
        Launch.of(args, accelerator),
        family,
        names=weights.names,
        optimizer=optimizer,
        records=[item.record for item in data.items],
        samples_by_size=data.batches.samples_by_size,
        caption_tokens=tokens,
        to_encode={"text encoder": data.encodings.missing["captions"], "VAE": data.encodings.missing["media"]},
        held_out=[item.record for item in data.held_out],
        previews=preview_size(args, data.items) if args.validation_prompt else None,
        preview_transformers=1 + (family.stages[0].other is not None),
    )


# ---------------------------------------------------------------- training and its results


@dataclasses.dataclass
class Stages:
    """Trains the transformers of a run, one after the other.

    Args:
        family (`Family`), args (`argparse.Namespace`), log (`MemoryLog`), weights (`Weights`), data (`Data`)
        optimizer (`tuple`): From `find_optimizer`.
        forecast (`RunForecast`), plan (`MemoryPlan`)
        resumed (`tuple`): From `find_checkpoint`.
        trackers (`list`): Of `start_trackers`, for the accelerator of each stage.
    """

    family: object
    args: object
    log: object
    weights: Weights
    data: Data
    optimizer: tuple
    forecast: RunForecast
    plan: object
    resumed: tuple
    trackers: list

    def train(self, stage):
        """Train the transformer of a `Stage`, write its result, and check it."""
        args, data, log = self.args, self.data, self.log
        accelerator = start_accelerator(args)  # one for each, since it keeps what it has prepared
        accelerator.trackers = self.trackers
        checkpoint, state = self.resumed
        resumed_steps = max(state["step"] - stage.number * data.batches.last_step, 0)
        with refuse_unreadable_model(args):
            sampler = self._sampler(stage) if args.validation_prompt else None
            transformer = self.family.load_transformer(stage.subfolder)
        log.point("transformer loaded")
        make_trainable(transformer, args, self.weights.names)
        install_plan(transformer, self.plan)
        module = DiffusionTrainingModule(self.family, transformer, loss_weighting=args.loss_weighting)
        if args.training_mode == "lora":
            if self.weights.initial[stage] and not resumed_steps:
                accelerator.print(start_from(transformer, self.weights.initial[stage]))
            log.point("adapters")
        held_out = encoded_dataset(self.family, args, data.encodings, data.held_out, [None] * len(data.held_out))
        training = Training(
            accelerator,
            args,
            stage,
            module,
            encoded_dataset(self.family, args, data.encodings, data.items, data.laws[stage]),
            data.batches,
            log,
            self.optimizer,
            resumed_steps=resumed_steps,
            checkpoint=checkpoint if resumed_steps else None,
            validation=Validation(accelerator, args, module, stage, held_out, sampler),
        )
        train(training)
        log.point("saving")
        self._write_result(training)

    def _write_result(self, training):
        accelerator, stage, module = training.accelerator, training.stage, training.module
        path = save_result(accelerator, self.args, module, stage, self.weights.digests[stage.subfolder])
        if not stage.is_last:  # what the next one is trained with
            read = self.family.read_tensors
            self.data.batches.identity["weights"][f"{stage.name}/{LORA_FILE}"] = on_main_process(
                accelerator, lambda: self.family.digest_tensors(read(path).values())
            )
        if training.validation.is_wanted:
            self.log.point("previews")
            training.validation.run(training.steps_before + self.data.batches.last_step)
            self.log.point("saving")
        check_result(accelerator, self.args, module, stage, training.dataset, path)

    def _sampler(self, stage):
        """Return the `Sampler` for the transformer of a `Stage`."""
        family, args, data = self.family, self.args, self.data
        settings = data.preview_settings | family.guidance(args.guidance_scale)
        return Sampler(
            family.load_preview_pipeline(),
            partial(family.sample, **settings),
            {text: data.encodings.path(Encoding("captions", (text,))) for text in preview_prompts(args)},
            load_other=partial(self._load_other, stage) if stage.other is not None else None,
            takes_turns=self.forecast.previews_take_turns(self.plan),
            fps=args.fps if family.is_video else None,
        )

    def _load_other(self, stage, pipeline):
        """Give a preview pipeline the transformer that samples together with that of `stage`."""
        family = self.family
        pipeline.register_modules(**{stage.other: family.load_transformer(stage.other)})
        for before in family.stages[: stage.number]:  # trained by this run
            if before.subfolder == stage.other:
                load_result(pipeline, self.args.output_dir, before)
