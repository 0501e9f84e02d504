#!/usr/bin/env bash
# Goal: a LoRA of Wan2.2-TI2V-5B for one motion or effect, from some tens of captioned clips.
# Usage: DATASET_PATH=FOLDER bash scripts/wan_video/lora/Wan2.2-TI2V-5B.sh [flags that win over these]
# Memory: 216.7 GiB with neither flag, 24.3 checkpointing, 20.2 offload: 32 GB as below. Forecast, docs/memory.md.
source "$(dirname "$0")/../../launch.sh"  # goes to the root of the repository, sets LAUNCH

ARGS=(
  --pretrained_model_name_or_path Wan-AI/Wan2.2-TI2V-5B-Diffusers
  --dataset_path "${DATASET_PATH:-data/my_clips}"
  --output_dir "${OUTPUT_DIR:-outputs/Wan2.2-TI2V-5B-lora}"
  --training_mode lora
  --task i2v  # --task t2v trains from text alone: images too, in less memory
  --lora_rank 32
  --height 704
  --width 1280
  --num_frames 121
  --fps 24
  --train_batch_size 1
  --learning_rate 1e-4
  --max_train_steps 2000
  --use_gradient_checkpointing \
  # --use_gradient_checkpointing_offload \
  --checkpointing_steps 500
  --checkpoints_total_limit 2
  # --validation_prompt "like a caption" --validation_steps 250 --validation_split 0.05 \
  # --validation_image first.png \
)
exec $LAUNCH train_wan_video.py "${ARGS[@]}" "$@"
