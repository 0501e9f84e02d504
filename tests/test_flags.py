"""Every flag is covered by a test that shows its effect, or its refusal: a new flag without one fails here."""

import ast
import functools
import pathlib
import re

import pytest

from training.arguments import FLAGS


TESTS = pathlib.Path(__file__).parent

# Flag -> file and function. There may be more tests of it; this is the one to look at first.
COVERED_BY = {
    "pretrained_model_name_or_path": "test_train_qwen_image.py::test_variant",
    "revision": "test_train_qwen_image.py::test_revision",
    "variant": "test_train_qwen_image.py::test_variant",
    "transformer_path": "test_train_qwen_image.py::test_full_result_can_be_trained_on",
    "training_mode": "test_train_qwen_image.py::test_full_result_can_be_trained_on",
    "seed": "test_train_wan_video.py::test_flags_reach_the_clips",
    "deterministic": "test_train_qwen_image.py::test_deterministic",
    "lora_rank": "test_train_qwen_image.py::test_files_of_a_lora_run",
    "lora_alpha": "test_train_qwen_image.py::test_strength_rate_dropout_and_dtype",
    "lora_dropout": "test_train_qwen_image.py::test_strength_rate_dropout_and_dtype",
    "lora_target_modules": "test_train_wan_video.py::test_image_keys_need_not_be_adapted",
    "lora_init_path": "test_train_wan_video.py::test_a_run_starts_from_the_lora_of_its_expert",
    "lora_dtype": "test_train_qwen_image.py::test_strength_rate_dropout_and_dtype",
    "dataset_path": "test_train_qwen_image.py::test_refused_before_models_load",
    "dataset_metadata": "training/data/test_metadata.py::test_given_metadata_must_exist_and_be_a_table",
    "media_column": "training/data/test_metadata.py::test_flags_decide_between_columns_and_the_rest_is_listed",
    "caption_column": "training/data/test_metadata.py::test_flags_decide_between_columns_and_the_rest_is_listed",
    "height": "test_train_wan_video.py::test_refused_before_models_load",
    "width": "test_train_wan_video.py::test_refused_before_models_load",
    "aspect_buckets": "training/data/test_buckets.py::test_ordinary_photographs_share_shapes",
    "max_pixels": "training/data/test_images.py::test_sizes_under_a_cap",
    "num_frames": "test_train_wan_video.py::test_frame_counts",
    "fps": "test_train_wan_video.py::test_flags_reach_the_clips",
    "clip_part": "test_train_wan_video.py::test_flags_reach_the_clips",
    "task": "test_train_wan_video.py::test_refused_before_models_load",
    "train_batch_size": "training/test_loop.py::test_update_is_that_of_the_mean_over_the_global_batch",
    "dataset_repeat": "test_data.py::test_several_datasets_with_repeats",
    "dataloader_num_workers": "test_data.py::test_loaders_change_nothing_but_the_time",
    "caption_dropout": "training/data/test_batches.py::test_dropped_captions_change_nothing_else",
    "on_bad_sample": "test_data.py::test_skip_trains_on_the_rest",
    "allow_missing_captions": "training/data/test_metadata.py::test_missing_and_empty_captions_are_counted",
    "cache_dir": "test_data.py::test_what_changes_is_encoded_anew_and_said",
    "use_gradient_checkpointing": "training/test_forecast.py::test_memory_of_the_modes_is_ordered",
    "use_gradient_checkpointing_offload": "test_train_qwen_image.py::"
    "test_same_bytes_when_the_inputs_are_really_parked",
    "checkpoint_blocks": "test_train_qwen_image.py::test_same_bytes_again_and_in_every_memory_mode",
    "offload_buffer_size": "test_train_wan_video.py::test_a_full_buffer_changes_nothing",
    "memory_budget": "training/test_forecast.py::test_a_budget_makes_the_plan",
    "dry_run": "test_data.py::test_a_dry_run_does_not_count_as_encoding",
    "max_train_steps": "test_train_qwen_image.py::test_checkpoints_total_limit",
    "num_train_epochs": "training/test_loop.py::test_epochs_become_optimizer_steps",
    "gradient_accumulation_steps": "training/test_loop.py::test_update_is_that_of_the_mean_over_the_global_batch",
    "learning_rate": "test_train_qwen_image.py::test_strength_rate_dropout_and_dtype",
    "lr_scheduler": "test_train_qwen_image.py::test_two_processes_train_on_for_several_steps",
    "lr_warmup_steps": "training/test_arguments.py::test_a_run_again_from_its_run_json",
    "optimizer": "training/test_module.py::test_learning_rate_reaches_every_optimizer",
    "optimizer_args": "training/test_arguments.py::test_kinds_of_optimizer_args",
    "weight_decay": "training/test_module.py::test_learning_rate_reaches_every_optimizer",
    "max_grad_norm": "training/test_loop.py::test_clipping",
    "mixed_precision": "test_train_wan_video.py::test_in_bf16_the_transformer_gets_what_the_stock_pipeline_gives_it",
    "timestep_sampling": "test_train_qwen_image.py::test_sigmas_follow_the_flags",
    "sigma_shift": "test_train_wan_video.py::test_each_expert_is_trained_on_its_own_side",
    "expert": "test_train_wan_video.py::test_both_experts_in_one_run_equal_two_runs",
    "min_sigma": "test_train_qwen_image.py::test_sigmas_follow_the_flags",
    "max_sigma": "test_train_qwen_image.py::test_sigmas_follow_the_flags",
    "loss_weighting": "test_train_qwen_image.py::test_loss_weighting",
    "ema": "test_validation.py::test_averaged_weights_are_previewed",
    "ema_decay": "test_validation.py::test_last_preview_is_what_the_stock_pipeline_samples",
    "offload_ema": "test_validation.py::test_training_is_the_same_with_and_without",
    "max_skipped_steps": "training/test_loop.py::test_a_step_whose_loss_is_not_finite_is_left_out",
    "output_dir": "test_train_qwen_image.py::test_folder_that_cannot_be_written_is_refused",
    "checkpointing_steps": "test_train_qwen_image.py::test_checkpoints_total_limit",
    "checkpoints_total_limit": "test_train_qwen_image.py::test_checkpoints_total_limit",
    "resume_from_checkpoint": "test_train_qwen_image.py::test_resume_gives_the_same_bytes",
    "push_to_hub": "training/test_hub.py::test_nothing_is_uploaded_without_the_flag",
    "hub_model_id": "training/test_hub.py::test_repository_is_opened",
    "report_to": "test_train_qwen_image.py::test_report_to",
    "logging_steps": "training/test_loop.py::test_logging_steps",
    "validation_prompt": "test_validation.py::test_files_of_previews",
    "validation_image": "test_validation.py::test_last_preview_is_what_the_stock_pipeline_samples",
    "validation_steps": "test_validation.py::test_files_of_previews",
    "validation_split": "test_validation.py::test_what_is_held_out_is_not_trained",
    "negative_prompt": "test_validation.py::test_settings_of_previews",
    "guidance_scale": "test_validation.py::test_settings_of_previews",
    "num_inference_steps": "test_validation.py::test_settings_of_previews",
    "validation_seed": "test_validation.py::test_validation_seed_changes_the_loss_only",
    "config": "training/test_arguments.py::test_a_run_again_from_its_run_json",
}


@functools.cache
def definitions(file):
    """Return the functions and the constants of a file, by name, as their source."""
    text = (TESTS / file).read_text(encoding="utf-8")
    lines = text.splitlines()
    functions, constants = {}, {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            start = min(part.lineno for part in (node, *node.decorator_list))
            functions[node.name] = "\n".join(lines[start - 1 : node.end_lineno])
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (target.id for target in targets if isinstance(target, ast.Name)):
                constants[name] = f"{constants.get(name, '')}\n{ast.get_source_segment(text, node)}"
    return functions, constants


def test_every_flag_is_in_the_table_and_nothing_else():
    assert set(COVERED_BY) == {name for flags in FLAGS.values() for name, *_ in flags}


@pytest.mark.parametrize("flag", COVERED_BY)
def test_the_test_exists_and_names_the_flag(flag):
    file, _, name = COVERED_BY[flag].partition("::")
    functions, constants = definitions(file)
    assert name.startswith("test_") and name in functions, COVERED_BY[flag]
    used = [constants[word] for word in set(re.findall(r"\w+", functions[name])) if word in constants]
    words = re.findall(r"\w+", "\n".join([functions[name], *used]))
    assert flag in words, f"{COVERED_BY[flag]} does not name --{flag}"
