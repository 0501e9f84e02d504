#!/usr/bin/env bash
# Goal: all weights of Qwen-Image, on thousands of captioned images.
# Usage: DATASET_PATH=FOLDER bash scripts/qwen_image/full/Qwen-Image.sh [flags that win over these]
# Memory: 428.6 GiB with neither flag, 228.1 checkpointing, 228.1 offload: 288 GB as below. Forecast, docs/memory.md.
source "$(dirname "$0")/../../launch.sh"  # goes to the root of the repository, sets LAUNCH

ARGS=(
  --pretrained_model_name_or_path Qwen/Qwen-Image
  --dataset_path "${DATASET_PATH:-data/my_images}"
  --output_dir "${OUTPUT_DIR:-outputs/Qwen-Image-full}"
  --training_mode full
  --height 1328
  --width 1328
  --train_batch_size 4  # at once: accumulation would add 4 bytes per parameter
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
exec $LAUNCH train_qwen_image.py "${ARGS[@]}" "$@"
