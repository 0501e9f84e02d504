"""The command line and config files: what is accepted, what is refused, and with which words."""

import json
import re

import pytest

from runtime.errors import RefusedError
from training.arguments import check_length, log_little_effect, parse_args
from training.flags import ROWS, STRUCTURE


VALUES = {
    "divisor": 16,
    "height": 1024,
    "width": 768,
    "lora_target_modules": "to_q,to_k",
    "timestep_sampling": "logit_normal",
    "sigma_shift": "the model's own",
    "dropped_caption": "an empty caption",
    "negative_prompt": "bad",
    "described_negative_prompt": "bad",
    "guidance_scale": 4.0,
    "num_inference_steps": 50,
}
REQUIRED = ["--pretrained_model_name_or_path", "model", "--dataset_path", "data", "--output_dir", "out"]
VIDEO_FLAGS = {"num_frames", "fps", "clip_part", "task", "expert", "validation_image"}
NUMBERS = "lora_rank lora_alpha train_batch_size dataset_repeat max_train_steps num_train_epochs learning_rate".split()


def parse(*argv):
    return parse_args([*REQUIRED, *argv], description="", values=VALUES)


def refused(*argv):
    with pytest.raises(RefusedError) as error:
        parse(*argv)
    return str(error.value)


def test_defaults():
    args = parse()
    assert (args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_dtype) == (32, 32.0, 0.0, "bf16")
    assert (args.learning_rate, args.weight_decay, args.max_grad_norm) == (1e-4, 0.01, 1.0)
    assert (args.height, args.width, args.max_pixels) == (1024, 768, None)
    assert (args.optimizer, args.lr_scheduler, args.lr_warmup_steps) == ("adamw", "constant", 0)
    assert (args.timestep_sampling, args.sigma_shift, args.loss_weighting) == ("logit_normal", None, "none")
    assert (args.mixed_precision, args.training_mode, args.caption_dropout) == ("bf16", "lora", 0.0)
    assert (args.num_train_epochs, args.max_train_steps, args.logging_steps) == (1, None, 10)
    assert args.lora_target_modules == ["to_q", "to_k"] and args.optimizer_args == {}


@pytest.mark.parametrize(
    "flags, learning_rate, weight_decay",
    [
        ([], 1e-4, 0.01),
        (["--training_mode", "full"], 1e-5, 0.01),
        (["--optimizer", "prodigy"], 1.0, 0.01),
        (["--optimizer", "torch.optim.SGD"], 1e-4, None),
        (["--optimizer", "torch.optim.SGD", "--weight_decay", "0"], 1e-4, 0.0),
        (["--learning_rate", "3", "--training_mode", "full"], 3.0, 0.01),
    ],
)
def test_defaults_that_depend_on_other_flags(flags, learning_rate, weight_decay):
    args = parse(*flags)
    assert (args.learning_rate, args.weight_decay) == (learning_rate, weight_decay)


def test_alpha_follows_the_rank():
    assert parse("--lora_rank", "8").lora_alpha == 8.0
    assert parse("--lora_rank", "8", "--lora_alpha", "4").lora_alpha == 4.0


def test_zero_is_a_value():
    args = parse("--seed", "0", "--weight_decay", "0", "--max_grad_norm", "0", "--lora_dropout", "0")
    assert (args.seed, args.weight_decay, args.max_grad_norm, args.lora_dropout) == (0, 0.0, 0.0, 0.0)
    assert parse().seed != 0


def test_unknown_flag_names_the_nearest_before_missing_ones():
    with pytest.raises(RefusedError, match="--lora_rnak; the nearest is --lora_rank"):
        parse_args(["--lora_rnak", "4"], description="", values=VALUES)


@pytest.mark.parametrize(
    "elsewhere, ours",
    [
        ("network_dim", ["lora_rank"]),
        ("rank", ["lora_rank"]),
        ("network_alpha", ["lora_alpha"]),
        ("lr", ["learning_rate"]),
        ("resolution", ["height", "width", "max_pixels"]),
        ("save_every_n_steps", ["checkpointing_steps"]),
        ("blocks_to_swap", ["use_gradient_checkpointing_offload", "memory_budget"]),
        ("num_epochs", ["num_train_epochs"]),
        ("max_train_epochs", ["num_train_epochs"]),
        ("dataset_base_path", ["dataset_path"]),
        ("train_data_dir", ["dataset_path"]),
        ("gradient-checkpointing", ["use_gradient_checkpointing"]),
        ("lora_base_model", ["training_mode"]),
        ("trainable_models", ["training_mode"]),
        ("remove_prefix_in_ckpt", ["training_mode"]),
    ],
)
def test_flags_of_other_trainers_are_answered_by_meaning(elsewhere, ours, config):
    """On the command line before anything is missed, and in a file."""
    with pytest.raises(RefusedError) as error:
        parse_args([f"--{elsewhere}", "4"], description="", values=VALUES)
    assert str(error.value).startswith(f"Unknown flag --{elsewhere}; here it is --{ours[0]} (")
    assert re.findall(r"--(\w+) \(", str(error.value)) == ours
    assert f"unknown key '{elsewhere}'; here it is {ours[0]} (" in refused(*config(f"{elsewhere}: 4"))


def test_no_abbreviations():
    assert "--lora_rank" in refused("--lora_ran", "4")


def test_missing_flags_are_all_named():
    with pytest.raises(RefusedError, match="--pretrained_model_name_or_path, --output_dir"):
        parse_args(["--dataset_path", "x"], description="", values=VALUES)


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "zero", ""])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_out_of_range(name, value):
    message = refused(f"--{name}={value}")
    assert f"--{name}" in message and "allowed is" in message


@pytest.mark.parametrize(
    "flags, names",
    [
        (["--training_mode", "full", "--lora_rank", "4"], ["--lora_rank has no effect without --training_mode lora"]),
        (["--training_mode", "full", "--lora_dtype", "fp32"], ["--lora_dtype"]),
        (["--max_train_steps", "4", "--num_train_epochs", "1"], ["--max_train_steps", "--num_train_epochs"]),
        (["--max_pixels", "4096", "--height", "64", "--width", "64"], ["--max_pixels", "--height"]),
        (["--height", "64"], ["--height", "--width"]),
        (["--height", "72", "--width", "64"], ["--height is 72", "64 or 80"]),
        (["--max_pixels", "10"], ["--max_pixels", "256"]),
        (["--aspect_buckets", "5"], ["--aspect_buckets has no effect", "--max_pixels"]),
        (["--aspect_buckets", "0", "--height", "64", "--width", "64"], ["--aspect_buckets has no effect"]),
        (["--max_pixels", "4096", "--aspect_buckets", "-1"], ["--aspect_buckets is '-1'"]),
        (["--lr_warmup_steps", "4"], ["--lr_warmup_steps", "constant_with_warmup"]),
        (["--lr_scheduler", "constant_with_warmup"], ["constant_with_warmup needs --lr_warmup_steps"]),
        (
            ["--lr_scheduler", "cosine_with_restarts"],
            ["Required and not given: --lr_num_cycles (by --lr_scheduler cosine_with_restarts)."],
        ),
        (
            ["--lr_scheduler", "cosine_with_restarts", "--lr_num_cycles", "1"],
            ["--lr_num_cycles is '1'", "at least 2"],
        ),
        (
            ["--lr_scheduler", "cosine", "--lr_num_cycles", "2"],
            ["--lr_num_cycles has no effect without --lr_scheduler cosine_with_restarts"],
        ),
        (["--lr_scheduler", "polynomial"], ["--lr_power (by --lr_scheduler polynomial)."]),
        (["--lr_scheduler", "polynomial", "--lr_power", "1.0"], ["--lr_power is '1.0'", "above 0 other than 1"]),
        (
            ["--lr_scheduler", "linear", "--lr_power", "2"],
            ["--lr_power has no effect without --lr_scheduler polynomial"],
        ),
        (["--lr_power", "0", "--lr_scheduler", "polynomial"], ["--lr_power is '0'"]),
        (["--checkpoints_total_limit", "2"], ["--checkpoints_total_limit", "--checkpointing_steps"]),
        (["--min_sigma", "0.5", "--max_sigma", "0.5"], ["--min_sigma 0.5", "--max_sigma 0.5"]),
        (["--training_mode", "half"], ["--training_mode", "lora, full"]),
        (["--optimizer", "adamm"], ["--optimizer", "adamw_8bit"]),
        (["--optimizer_args", "momentum"], ["--optimizer_args", "key=value"]),
        (["--lora_target_modules", "to_q,,to_k"], ["--lora_target_modules"]),
        (["--lora_dropout", "1"], ["--lora_dropout"]),
        (["--use_gradient_checkpointing", "False"], ["--use_gradient_checkpointing is a switch", "'False'"]),
        (["--ema=false"], ["--ema is a switch and takes no value such as 'false'; without it, it is off"]),
        (["-lr", "1"], ["Unknown flag -lr; here it is --learning_rate"]),
        (["-height", "64"], ["Unknown flag -height; the nearest is --height"]),
        (["--lora_rank"], ["--lora_rank"]),
        (["stray"], ["stray"]),
    ],
)
def test_refused(flags, names):
    message = refused(*flags)
    assert all(name in message for name in names), message


STEPS = ["--max_train_steps", "4"]
WARMUP = ["--lr_scheduler", "constant_with_warmup", "--lr_warmup_steps"]
RESTARTS = ["--lr_scheduler", "cosine_with_restarts", "--lr_num_cycles"]


@pytest.mark.parametrize(
    "flags, said",
    [
        ([*WARMUP, "100"], "--lr_warmup_steps 100 in a run of 4 optimizer steps; allowed are 0 to 3"),
        ([*WARMUP, "4"], "allowed are 0 to 3"),
        ([*RESTARTS, "4"], "--lr_num_cycles 4 in the 4 steps after the warm-up"),
        ([*RESTARTS, "2", "--lr_warmup_steps", "2"], "--lr_num_cycles 2 in the 2 steps after the warm-up"),
    ],
)
def test_numbers_that_the_length_of_the_run_makes_void(flags, said):
    """As soon as the length is known: by a flag at once, by epochs when the dataset was read."""
    assert said in refused(*STEPS, *flags)
    with pytest.raises(RefusedError) as error:
        check_length(parse(*flags), 4)
    assert said in str(error.value)
    check_length(parse(*flags), 101)


@pytest.mark.parametrize(
    "flags, said",
    [
        (
            ["--lr_scheduler", "cosine", "--lr_warmup_steps", "3"],
            "cosine in a run of 4 optimizer steps: the rate hardly",
        ),
        ([*RESTARTS, "3"], "cosine_with_restarts in a run of 4 optimizer steps: the rate hardly"),
        (["--ema"], "--ema_decay 0.999 in a run of 4 optimizer steps: the decay only rises to 0.3077"),
        (["--ema", "--ema_decay", "0"], "--ema_decay 0: the average is always the weights of the last step"),
        (["--max_skipped_steps", "4"], "--max_skipped_steps 4 in a run of 4 optimizer steps: all may be"),
        (["--caption_dropout", "0.1"], "--caption_dropout 0.1: 0.8 of 8 samples"),
        (
            ["--checkpointing_steps", "9"],
            "--checkpointing_steps 9 in a run of 8 optimizer steps: nothing is due before",
        ),
        (["--validation_split", "0.1", "--validation_steps", "9"], "--validation_steps 9 in a run of 8 optimizer"),
        (["--logging_steps", "9"], "--logging_steps 9 in a run of 8 optimizer steps: nothing is due"),
        (["--ema", "--ema_decay", "0.3", "--checkpointing_steps", "8", "--caption_dropout", "0.2"], None),
        (["--validation_split", "0.1", "--validation_steps", "8", "--max_skipped_steps", "3", *WARMUP, "3"], None),
        ([*RESTARTS, "2"], None),
        ([], None),  # a default of 10 logging steps is nothing that anyone asked for
    ],
)
def test_numbers_that_mean_little_in_so_short_a_run_are_logged(flags, said, caplog):
    """Here 8 samples in two stages of 4 steps each."""
    log_little_effect(parse(*flags), 4, num_stages=2, num_samples=8)
    assert len(caplog.messages) == (said is not None), caplog.messages
    assert said is None or said in caplog.text


def test_optimizer_args():
    args = parse("--optimizer_args", "betas=(0.8, 0.9)", "eps=1e-6", "mode=fast")
    assert args.optimizer_args == {"betas": (0.8, 0.9), "eps": 1e-6, "mode": "fast"}


# ---------------------------------------------------------------- config files


@pytest.fixture
def config(tmp_path):
    def write(text, name="config.yaml"):
        (tmp_path / name).write_text(text)
        return ["--config", str(tmp_path / name)]

    return write


def test_config_values_mean_what_they_mean_as_flags(config):
    args = parse(
        *config(
            "learning_rate: 1e-5\nmixed_precision: no\nseed: 0\nuse_gradient_checkpointing: true\nlora_rank: '8'\n"
            "lora_target_modules: [to_q, to_v]\noptimizer_args: {eps: 1e-6}\nrevision: null\nvariant: 007\n"
        )
    )
    assert (args.learning_rate, args.mixed_precision, args.seed, args.lora_rank) == (1e-5, "no", 0, 8)
    assert args.use_gradient_checkpointing is True and args.lora_target_modules == ["to_q", "to_v"]
    assert args.optimizer_args == {"eps": 1e-6} and args.revision is None and args.variant == "007"


def test_later_files_win_and_flags_win_over_all(config):
    first, second = config("lora_rank: 4\nseed: 1\n", "a.yaml"), config("lora_rank: 8\n", "b.yaml")
    assert (parse(*first, *second).lora_rank, parse(*first, *second).seed) == (8, 1)
    assert parse(*first, *second, "--lora_rank", "16").lora_rank == 16


@pytest.mark.parametrize("text", ["False", "false", "no", "0", "'False'", "off"])
def test_false_in_yaml(config, text):
    assert parse(*config(f"use_gradient_checkpointing: {text}\n")).use_gradient_checkpointing is False


@pytest.mark.parametrize(
    "text, names",
    [
        ("lora_rnak: 4", ["config.yaml", "lora_rnak", "lora_rank"]),
        ("learning_rate: nan", ["config.yaml", "learning_rate", "nan"]),
        ("learning_rate: -1", ["config.yaml", "learning_rate"]),
        ("learning_rate: [1, 2]", ["config.yaml", "learning_rate is ['1', '2']", "a finite number"]),
        ("use_gradient_checkpointing: maybe", ["config.yaml", "use_gradient_checkpointing", "maybe", "true or false"]),
        ("- a", ["config.yaml"]),
        ("a: [", ["config.yaml"]),
        ("config: other.yaml", ["config.yaml"]),
        ("training_mode: full\nlora_rank: 4", ["--lora_rank"]),
    ],
)
def test_refused_in_config(config, text, names):
    message = refused(*config(text))
    assert all(name in message for name in names), message


@pytest.mark.parametrize("value", ["0", "0,0", "-1", "1.5", "a", "1,", ""])
def test_bad_numbers_of_blocks(value):
    assert "--checkpoint_blocks" in refused("--use_gradient_checkpointing", f"--checkpoint_blocks={value}")


def test_numbers_of_blocks(config):
    assert parse("--use_gradient_checkpointing", "--checkpoint_blocks", "8,100").checkpoint_blocks == [8, 100]
    text = "use_gradient_checkpointing_offload: true\ncheckpoint_blocks: [0, 4]\n"
    assert parse(*config(text)).checkpoint_blocks == [0, 4]
    assert "no effect without --use_gradient_checkpointing" in refused("--checkpoint_blocks", "4")


@pytest.mark.parametrize(
    "text, num_bytes",
    [("24GiB", 24 * 2**30), ("512MB", 512_000_000), ("1.5 KiB", 1536), ("0GB", 0), ("1TiB", 2**40), ("2KB", 2000)],
)
def test_memory_sizes(text, num_bytes):
    assert (
        parse("--use_gradient_checkpointing_offload", "--offload_buffer_size", text).offload_buffer_size == num_bytes
    )


@pytest.mark.parametrize("text", ["24", "1e9", "-1GB", "GB", "24G", "24gb", "nanGB", "x MB", ""])
def test_bad_memory_sizes(text):
    message = refused("--use_gradient_checkpointing_offload", f"--offload_buffer_size={text}")
    assert "--offload_buffer_size" in message and "such as 24GiB" in message


def test_memory_size_without_parking():
    assert "no effect without --use_gradient_checkpointing_offload" in refused("--offload_buffer_size", "1GB")


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "seed: 1\nlora_rank: 4\n\nseed: 2",
            "the key 'seed' is given twice in \"FILE\", line 4, column 1.",
        ),
        (
            "seed: 1\n# more\nlora_rank:\t4\n\tx: 3",
            'that cannot start any token in "FILE", line 3, column 11.',
        ),
        ("seed: 1\n lora_rank: 4", 'mapping values are not allowed here in "FILE", line 2, column 11.'),
        (
            "a: b\nseed: [1, 2\nx: 3",
            'while parsing a flow sequence in "FILE", line 2, column 7 expected',
        ),
        (
            "a: b\nseed: 'x\ny: 3\n",
            'while scanning a quoted scalar in "FILE", line 2, column 7 found unexpected end',
        ),
        (
            "seed: 1\nvariant: a\x07b",
            'special characters are not allowed in "FILE", position 18.',
        ),
        (
            "seed: 1\n---\nseed: 2",
            'expected a single document in the stream in "FILE", line 1',
        ),
        ("seed: 1\n\nlora_rnak: 4", "FILE: unknown key 'lora_rnak'"),
        ("seed: 1\nlora_rank: x", "FILE: --lora_rank is 'x'"),
        ("seed: 1\nema: maybe", "FILE: --ema is 'maybe'"),
        (
            "datasets:\n- dataset_path: a\n- dataset_path: b\n  dataset_pat: c",
            "FILE: dataset 2: unknown",
        ),
        ("datasets:\n- dataset_path: a\n- {dataset_repeat: 2}", "FILE: dataset 2 has no dataset_path"),
        (
            "bucket_config:\n  64px: {1: [1, 1]}\n  65: {1: [1, 1]}",
            "FILE: bucket_config: 65 has {'1': ['1', '1']}; allowed are sizes",
        ),
        ("bucket_config:\n  64px:\n    1: [1, 1]\n    2: [1, 1]", "FILE: bucket_config: 64px has"),
    ],
)
def test_the_place_of_what_is_wrong_in_a_config_file(config, text, said):
    flags = config(text)
    message = refused(*flags).replace(flags[1], "FILE")
    assert said in message and "\n" not in message, message


def test_a_byte_order_mark_is_no_key(config):
    assert parse(*config("\ufefflora_rank: 4\n")).lora_rank == 4


def test_a_byte_that_is_no_text(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"seed: 1\nvariant: caf\xe9\n")
    message = refused("--config", str(tmp_path / "config.yaml"))
    assert 'unacceptable character #x00e9: invalid continuation byte in "' in message and "position 20" in message


WITHOUT_DATASET = [*REQUIRED[:2], *REQUIRED[4:]]


def parse_structured(config, text, argv=WITHOUT_DATASET, **values):
    return parse_args([*argv, *config(text)], description="", values=VALUES | values)


def test_several_datasets(config):
    args = parse_structured(
        config, "datasets: [{dataset_path: a, dataset_repeat: 3}, {dataset_path: b, media_column: x}]"
    )
    plain = {"dataset_metadata": None, "media_column": None, "caption_column": None, "dataset_repeat": 1}
    assert args.datasets == [
        plain | {"dataset_path": "a", "dataset_repeat": 3},
        plain | {"dataset_path": "b", "media_column": "x"},
    ]
    assert args.dataset_path is None and args.dataset_repeat is None
    assert parse().datasets is None and parse().dataset_repeat == 1


def test_bucket_config(config):
    text = "bucket_config:\n  480p: {1: [1.0, 8]}\n  256px: {1: [0.5, 16]}\n  64x32: {1: [1, 2]}"
    args = parse_structured(config, text, REQUIRED)
    assert args.bucket_config == {"480p": {"1": [1.0, 8]}, "256px": {"1": [0.5, 16]}, "64x32": {"1": [1.0, 2]}}
    for name in ("height", "width", "max_pixels", "train_batch_size"):
        assert getattr(args, name) is None
    # As run.json has it, given back.
    again = json.dumps({"bucket_config": args.bucket_config, "datasets": None, "height": None})
    assert parse_structured(config, again, REQUIRED).bucket_config == args.bucket_config


@pytest.mark.parametrize(
    "text, said",
    [
        ("datasets: a", "datasets must be a list of settings with a dataset_path each"),
        ("datasets: []", "datasets must be a list"),
        ("datasets: [{dataset_repeat: 2}]", "dataset 1 has no dataset_path"),
        (
            "datasets: [{dataset_path: a}, {dataset_pat: b}]",
            "dataset 2: unknown key 'dataset_pat'; the nearest is dataset_path",
        ),
        ("datasets: [{dataset_path: a, dataset_repeat: 0}]", "dataset 1: --dataset_repeat is '0'; allowed is a whole"),
        (
            "datasets: [{dataset_path: a}]\ndataset_repeat: 2",
            "Give --dataset_repeat, or datasets, not both",
        ),
        (
            "bucket_config: {512px: {1: [1.0, 8]}}\nmax_pixels: 999",
            "Give --max_pixels, or bucket_config, not both",
        ),
        ("bucket_config: {512px: {1: [1.0, 8]}}\ntrain_batch_size: 1", "Give --train_batch_size, or bucket_config"),
        ("bucket_config: 5", "bucket_config must map sizes to frames"),
        ("bucket_config: {512px: 5}", "512px has '5'"),
        ("bucket_config: {512: {1: [1.0, 8]}}", "bucket_config: 512 has .*; allowed are sizes"),
        ("bucket_config: {axb: {1: [1.0, 8]}}", "bucket_config: axb has"),
        ("bucket_config: {512px: {2: [1.0, 8]}}", "512px has .*allowed are sizes .*, frames 4n"),
        ("bucket_config: {512px: {1: [0.0, 8]}}", "share above 0 to 1"),
        ("bucket_config: {512px: {1: [1.5, 8]}}", "share above 0 to 1"),
        ("bucket_config: {512px: {1: [1.0, 0]}}", "batch size of at least 1"),
        ("bucket_config: {512px: {1: 8}}", "512px has {'1': '8'}"),
        ("bucket_config: {512px: {5: [1.0, 8]}}", "512px has 5 frames; allowed for images is 1"),
        ("bucket_config: {100x64: {1: [1.0, 8]}}", "a side of 100x64 is 100; allowed are multiples of 16, such as 96"),
        ("bucket_config: {8px: {1: [1.0, 8]}}", "bucket_config: 8px is 64; allowed is at least 256"),
        ("bucket_config: {512px: {1: [1.0, 8], 01: [1.0, 4]}}", "512px has .*01"),
        ("bucket_config:\n  512px: {1: [1.0, 8]}\n  512px: {1: [1.0, 4]}", "the key '512px' is given twice"),
        ("lora_rank: 4\nlora_rank: 8", "the key 'lora_rank' is given twice"),
        ("bucket_confg: {}", "unknown key 'bucket_confg'; the nearest is bucket_config"),
    ],
)
def test_structured_settings_are_refused_by_place(config, text, said):
    argv = WITHOUT_DATASET if "datasets" in text else REQUIRED
    with pytest.raises(RefusedError, match=said):
        parse_structured(config, text, argv)


def test_datasets_and_a_dataset_path_contradict_each_other(config):
    with pytest.raises(RefusedError, match="Give --dataset_path, or datasets, not both"):
        parse_structured(config, "datasets: [{dataset_path: a}]\ndataset_path: b")
    args = parse_structured(config, "datasets: [{dataset_path: a}]", REQUIRED)
    assert args.datasets is None and args.dataset_path == "data", "flags win over all"
    with pytest.raises(RefusedError, match="unknown flag --datasets|Unknown flag --datasets"):
        parse("--datasets", "x")


def test_the_cache_is_in_the_output_folder(config):
    assert parse().cache_dir == "out/cache" and parse("--cache_dir", "elsewhere").cache_dir == "elsewhere"


def test_missing_config_file():
    assert "--config nowhere.yaml cannot be read: No such file" in refused("--config", "nowhere.yaml")


# ---------------------------------------------------------------- the program


def test_every_flag_says_its_default_and_is_in_help(script):
    names = [name for name, flag in ROWS.items() if flag.kind is not STRUCTURE]
    for program, absent in (("train_qwen_image.py", VIDEO_FLAGS), ("train_wan_video.py", set())):
        text = script(program, "--help").stdout
        assert {name for name in names if f"--{name} " in text or f"--{name}\n" in text} == set(names) - absent
        described = re.split(r"\n  --(?=\w)", text.split("\nmodel:\n")[1])
        for one in described:
            assert re.search(r"Required|Default:", one), one


def test_exit_code_and_first_sentence(script, tmp_path):
    done = script("train_qwen_image.py", "--lora_rank", "0", check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: --lora_rank is '0'; allowed is")
    assert "torch" not in done.stderr and "Traceback" not in done.stderr


# ---------------------------------------------------------------- run.json as a config


def resolved(folder):
    return json.loads((folder / "run.json").read_text())["arguments"]


def result(folder, name="pytorch_lora_weights.safetensors"):
    return (folder / name).read_bytes()


MANY = ["--mixed_precision", "no", "--lora_rank", "3", "--lora_alpha", "5", "--lora_dropout", "0.25", "--seed", "7"]
MANY += ["--lora_target_modules", "to_q,to_out.0", "--lora_dtype", "fp32", "--max_pixels", "5000", "--max_train_steps"]
MANY += ["2", "--caption_dropout", "0.5", "--gradient_accumulation_steps", "2", "--learning_rate", "3e-3"]
MANY += ["--lr_scheduler", "cosine", "--lr_warmup_steps", "1", "--optimizer_args", "betas=(0.8, 0.9)", "amsgrad=True"]
MANY += ["--weight_decay", "0", "--max_grad_norm", "0.5", "--timestep_sampling", "uniform", "--sigma_shift", "2"]
MANY += ["--min_sigma", "0.1", "--max_sigma", "0.9", "--loss_weighting", "cosmap", "--ema", "--ema_decay", "0.5"]
MANY += [
    "--offload_ema",
    "--validation_prompt",
    "no",
    "--validation_prompt",
    'a "cat": #1\nand\ta dog \\ 猫 \U0001f431',
]
MANY += ["--negative_prompt", "", "--num_inference_steps", "2", "--validation_seed", "0", "--validation_split", "0.3"]
MANY += ["--max_skipped_steps", "1", "--deterministic", "--dataset_repeat", "2", "--dataloader_num_workers", "0"]
SMALL = ["--height", "64", "--width", "64", "--max_train_steps", "1", "--learning_rate", "1e-2"]
PARKING = ["--use_gradient_checkpointing_offload", "--offload_buffer_size", "1GiB", "--checkpoint_blocks", "1"]


@pytest.fixture
def restored():
    """What --deterministic sets holds for the process."""
    yield
    import torch

    torch.use_deterministic_algorithms(False)


VIDEO = {"flags": VIDEO_FLAGS, "num_frames": 81, "fps": 16.0, "tasks": ("t2v",)}
VIDEO |= {"experts": ("high_noise", "low_noise")}


@pytest.mark.parametrize(
    "flags, text",
    [
        ([*MANY, *PARKING], ""),
        ([*MANY, "--memory_budget", "1.5GiB"], ""),
        (["--memory_budget", "auto", "--training_mode", "full", "--report_to", "wandb,trackio"], ""),
        (["--expert", "both", "--num_frames", "5", "--fps", "8"], ""),
        (["--expert", "both"], "datasets: [{dataset_path: a}]\nbucket_config: {480p: {1: [0.5, 8], 81: [1, 1]}}"),
    ],
)
def test_a_run_again_from_its_run_json(flags, text, config):
    """The record holds all that was said: numbers, lists, sizes, empty texts, texts that look like something else."""
    argv = [*(WITHOUT_DATASET if text else REQUIRED), *flags, "--dry_run", "--resume_from_checkpoint", "latest"]
    values = VALUES | (VIDEO if "--expert" in flags else {})
    first = vars(parse_args([*argv, *config(text)], description="", values=values))
    again = config(json.dumps({"arguments": first, "versions": {}}), "run.json")
    expected = first | {"config": again[1:], "dry_run": False, "resume_from_checkpoint": None}
    assert vars(parse_args(again, description="", values=values)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, flags, name",
    [
        ("qwen_image", [*MANY, *PARKING], "pytorch_lora_weights.safetensors"),
        ("qwen_image", [*SMALL, "--training_mode", "full"], "transformer/diffusion_pytorch_model.safetensors"),
        (
            "wan_t2v_a14b",
            [*SMALL, "--expert", "both", "--num_frames", "5", "--fps", "8"],
            "low_noise/pytorch_lora_weights.safetensors",
        ),
    ],
)
def test_the_same_bytes_again_from_run_json(family, flags, name, train, tmp_path, restored):
    first = train(family, *flags)
    again = train(family, only=["--config", first / "run.json"], output_dir=tmp_path / "again")
    assert result(again, name) == result(first, name)
    assert {key for key, value in resolved(again).items() if value != resolved(first)[key]} == {"output_dir", "config"}


@pytest.mark.slow
def test_a_resumed_run_again_from_its_run_json(train, tmp_path):
    """From its first step: the checkpoint is not part of what was asked for."""
    flags = ["--height", "64", "--width", "64", "--lora_rank", "2", "--lora_dropout", "0.5", "--max_train_steps", "2"]
    flags += ["--checkpointing_steps", "1", "--learning_rate", "1e-2"]
    folder = train("qwen_image", *flags)
    expected = result(folder)
    checkpoint = folder / "checkpoint-1"
    train("qwen_image", *flags, "--resume_from_checkpoint", checkpoint, output_dir=folder)
    assert resolved(folder)["resume_from_checkpoint"] == str(checkpoint)
    again = train("qwen_image", only=["--config", folder / "run.json"], output_dir=tmp_path / "again")
    assert result(again) == result(folder) == expected
    assert resolved(again)["resume_from_checkpoint"] is None
    assert len((again / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_record_is_told_by_what_it_holds(config):
    """Sizes in bytes have no unit there, only there; what a record says of its own config files does not count."""
    record = {
        "arguments": {"lora_rank": 4, "config": ["a.yaml"], "report_to": [], "memory_budget": 1024},
        "versions": {},
    }
    flags = config(json.dumps(record), "run.json")
    args = parse(*flags)
    assert (args.lora_rank, args.memory_budget, args.report_to, args.config) == (4, 1024, [], flags[1:])
    assert "memory_budget" in refused(*config("memory_budget: 1024"))
    by_hand = record | {"arguments": {"memory_budget": True, "optimizer_args": ["eps=1e-6", 3]}}
    assert "--memory_budget is 'True'; allowed is auto, or a size" in refused(*config(json.dumps(by_hand), "run.json"))
    record["arguments"]["lora_rnak"] = 4
    assert "unknown key 'lora_rnak'; the nearest is lora_rank" in refused(*config(json.dumps(record), "run.json"))
    assert "unknown key 'arguments'" in refused(*config("arguments: {lora_rank: 4}"))


def test_null_is_absent_and_empty_text_is_text(config):
    prompt = "validation_prompt: [a cat]\n"
    for text in ("null", "~", ""):
        assert parse(*config(f"{prompt}negative_prompt: {text}\n")).negative_prompt == VALUES["negative_prompt"]
    for text in ("''", '""'):
        assert parse(*config(f"{prompt}negative_prompt: {text}\n")).negative_prompt == ""
    for text in ("'null'", '"~"', "none", "no"):
        assert parse(*config(f"{prompt}negative_prompt: {text}\n")).negative_prompt == text.strip("'\"")


def test_null_in_a_later_file_takes_back(config):
    first = config("revision: a\nlora_rank: 4\nreport_to: tensorboard\nvalidation_prompt: [a, b]\n", "a.yaml")
    later = config("revision: null\nlora_rank: ~\nreport_to: []\nvalidation_prompt: []\n", "b.yaml")
    args = parse(*first, *later)
    assert (args.revision, args.lora_rank, args.report_to, args.validation_prompt) == (None, 32, [], None)
    args = parse(*later, *first)
    assert (args.revision, args.lora_rank, args.report_to) == ("a", 4, ["tensorboard"])
    assert args.validation_prompt == ["a", "b"]
    assert "--negative_prompt has no effect" in refused(*first, *later, "--negative_prompt", "x")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("optimizer_args: {amsgrad: true, betas: [0.8, 0.9], eps: 1e-6, mode: fast}", True),
        ("optimizer_args: ['amsgrad=True', 'betas=(0.8, 0.9)', 'eps=1e-6', 'mode=fast']", True),
        ("optimizer_args: {amsgrad: false, betas: [0.8, 0.9], eps: 1e-6, mode: fast}", False),
    ],
)
def test_kinds_of_optimizer_args(config, text, expected):
    expected = {"amsgrad": expected, "betas": (0.8, 0.9), "eps": 1e-6, "mode": "fast"}
    assert parse(*config(text)).optimizer_args == expected
    flags = [f"{key}={value}" for key, value in expected.items()]
    assert parse("--optimizer_args", *flags).optimizer_args == expected
    assert parse("--optimizer_args", "amsgrad=false").optimizer_args == {"amsgrad": False}


@pytest.mark.parametrize(
    "text, names",
    [
        ("tensorboard", ["tensorboard"]),
        ("tensorboard,wandb", ["tensorboard", "wandb"]),
        ("[wandb, trackio, wandb]", ["wandb", "trackio"]),
        ("none", []),
        ("[]", []),
        ("null", []),
    ],
)
def test_report_to(config, text, names):
    assert parse(*config(f"report_to: {text}")).report_to == names
    if not text.startswith(("[", "null")):
        assert parse("--report_to", text).report_to == names
    assert parse().report_to == [] and parse(*config(f"report_to: {text}"), "--report_to", "none").report_to == []


@pytest.mark.parametrize("text", ["mlflow", "tensorboard,", "none,wandb", ""])
def test_unknown_trackers(config, text):
    assert "allowed is tensorboard, wandb, trackio" in refused(f"--report_to={text}")
    assert "allowed is tensorboard, wandb, trackio" in refused(*config(f"report_to: '{text}'"))


@pytest.mark.parametrize(
    "first, flags, expected",
    [
        ("max_train_steps: 5", ["--num_train_epochs", "3"], {"max_train_steps": None, "num_train_epochs": 3}),
        ("height: 64\nwidth: 64", ["--max_pixels", "4096"], {"height": None, "width": None, "max_pixels": 4096}),
        ("max_pixels: 4096", ["--height", "64", "--width", "64"], {"height": 64, "max_pixels": None}),
        (
            "use_gradient_checkpointing: true",
            ["--memory_budget", "1GiB"],
            {"use_gradient_checkpointing": False, "memory_budget": 2**30},
        ),
    ],
)
def test_what_comes_later_wins_over_what_cannot_stand_beside_it(first, flags, expected, config):
    args = vars(parse(*config(first), *flags))
    assert {name: args[name] for name in expected} == expected
    with pytest.raises(RefusedError):
        parse(*config(first + "\n" + "\n".join(f"{k[2:]}: {v}" for k, v in zip(flags[::2], flags[1::2], strict=True))))


def test_a_run_json_is_read_as_json(tmp_path):
    """YAML would refuse a delete character, and make a blank of a next line."""
    written = vars(parse("--validation_prompt", "a\x7fb\x85c\u2028d", "--optimizer_args", "betas=(0.8,0.9)"))
    written["optimizer_args"] |= {"name": "fast", "amsgrad": False}
    (tmp_path / "run.json").write_text(json.dumps({"arguments": written, "versions": {}}, ensure_ascii=False))
    args = parse("--config", str(tmp_path / "run.json"))
    assert args.validation_prompt == ["a\x7fb\x85c\u2028d"]
    assert args.optimizer_args == {"betas": (0.8, 0.9), "name": "fast", "amsgrad": False}


def test_zero_is_a_decay_too():
    assert "--ema_decay has no effect without --ema" in refused("--ema_decay", "0")
    assert parse("--ema", "--ema_decay", "0").ema_decay == 0
