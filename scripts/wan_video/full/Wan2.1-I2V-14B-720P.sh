#!/usr/bin/env bash
# Goal: all weights of Wan2.1-I2V-14B-720P, on thousands of captioned clips.
# Usage: DATASET_PATH=FOLDER bash scripts/wan_video/full/Wan2.1-I2V-14B-720P.sh [flags that win over these]
# Memory: 1066.8 GiB with neither flag, 183.7 checkpointing, 183.7 offload: 288 GB as below. Forecast, docs/memory.md.
source "$(dirname "$0")/../../launch.sh"  # goes to the root of the repository, sets LAUNCH

ARGS=(
  --pretrained_model_name_or_path Wan-AI/Wan2.1-I2V-14B-720P-Diffusers
  --dataset_path "${DATASET_PATH:-data/my_clips}"
  --output_dir "${OUTPUT_DIR:-outputs/Wan2.1-I2V-14B-720P-full}"
  --training_mode full
  --height 720
  --width 1280
  --num_frames 81
  --fps 16
  --train_batch_size 1  # accumulation would add 4 bytes per parameter
  --caption_dropout 0.1  # guidance needs the empty caption, which has to stay trained
  --optimizer adamw_8bit
  --learning_rate 1e-5
  --lr_scheduler constant_with_warmup
  --lr_warmup_steps 100
  --max_train_steps 5000
  --use_gradient_checkpointing \
  --use_gradient_checkpointing_offload \
  --checkpointing_steps 1000
  --checkpoints_total_limit 1
  # --validation_prompt "like a caption" --validation_steps 250 --validation_split 0.05 \
  # --validation_image first.png \
)
exec $LAUNCH train_wan_video.py "${ARGS[@]}" "$@"
