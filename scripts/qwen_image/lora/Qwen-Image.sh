#!/usr/bin/env bash
# Goal: a LoRA of Qwen-Image for one subject or style, from some tens of captioned images.
# Usage: DATASET_PATH=FOLDER bash scripts/qwen_image/lora/Qwen-Image.sh [flags that win over these]
# Memory: 72.2 GiB with neither flag, 42.5 checkpointing, 41.9 offload: 48 GB as below. Forecast, docs/memory.md.
source "$(dirname "$0")/../../launch.sh"  # goes to the root of the repository, sets LAUNCH

ARGS=(
  --pretrained_model_name_or_path Qwen/Qwen-Image
  --dataset_path "${DATASET_PATH:-data/my_images}"
  --output_dir "${OUTPUT_DIR:-outputs/Qwen-Image-lora}"
  --training_mode lora
  --lora_rank 32
  --height 1024
  --width 1024
  --train_batch_size 1
  --learning_rate 1e-4
  --max_train_steps 2000
  --use_gradient_checkpointing \
  # --use_gradient_checkpointing_offload \
  --checkpointing_steps 500
  --checkpoints_total_limit 2
  # --validation_prompt "like a caption" --validation_steps 250 --validation_split 0.05 \
)
exec $LAUNCH train_qwen_image.py "${ARGS[@]}" "$@"
