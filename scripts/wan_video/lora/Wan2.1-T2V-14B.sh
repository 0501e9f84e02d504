#!/usr/bin/env bash
# Goal: a LoRA of Wan2.1-T2V-14B for one subject, style or motion, from some tens of captioned clips.
# Usage: DATASET_PATH=FOLDER bash scripts/wan_video/lora/Wan2.1-T2V-14B.sh [flags that win over these]
# Memory: 325.3 GiB with neither flag, 51.1 checkpointing, 39.8 offload: 80 GB as below. Forecast, docs/memory.md.
source "$(dirname "$0")/../../launch.sh"  # goes to the root of the repository, sets LAUNCH

ARGS=(
  --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-14B-Diffusers
  --dataset_path "${DATASET_PATH:-data/my_clips}"
  --output_dir "${OUTPUT_DIR:-outputs/Wan2.1-T2V-14B-lora}"
  --training_mode lora
  --lora_rank 32
  --height 480
  --width 832  # 1280x720 needs the offload flag
  --num_frames 81
  --fps 16
  --train_batch_size 1
  --learning_rate 1e-4
  --max_train_steps 2000
  --use_gradient_checkpointing \
  # --use_gradient_checkpointing_offload \
  --checkpointing_steps 500
  --checkpoints_total_limit 2
  # --validation_prompt "like a caption" --validation_steps 250 --validation_split 0.05 \
)
exec $LAUNCH train_wan_video.py "${ARGS[@]}" "$@"
