#!/usr/bin/env bash
# Goal: all weights of an expert of Wan2.2-T2V-A14B, on thousands of captioned clips.
# Usage: DATASET_PATH=FOLDER bash scripts/wan_video/full/Wan2.2-T2V-A14B.sh [flags that win over these]
# Run it twice, once for each expert: EXPERT=high_noise (the default), EXPERT=low_noise.
# Memory: 491.0 GiB with neither flag, 160.1 checkpointing, 160.1 offload: 192 GB as below. Forecast, docs/memory.md.
source "$(dirname "$0")/../../launch.sh"  # goes to the root of the repository, sets LAUNCH
EXPERT=${EXPERT:-high_noise}

ARGS=(
  --pretrained_model_name_or_path Wan-AI/Wan2.2-T2V-A14B-Diffusers
  --dataset_path "${DATASET_PATH:-data/my_clips}"
  --output_dir "${OUTPUT_DIR:-outputs/Wan2.2-T2V-A14B-full-$EXPERT}"
  --training_mode full
  --expert "$EXPERT"
  --height 480
  --width 832
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
  # --use_gradient_checkpointing_offload \
  --checkpointing_steps 1000
  --checkpoints_total_limit 1
  # --validation_prompt "like a caption" --validation_steps 250 --validation_split 0.05 \
)
exec $LAUNCH train_wan_video.py "${ARGS[@]}" "$@"
