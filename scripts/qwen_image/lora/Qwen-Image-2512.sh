#!/usr/bin/env bash
# Goal: a LoRA of Qwen-Image-2512 for one subject or style, from some tens of pictures with captions.
# Usage: bash scripts/qwen_image/lora/Qwen-Image-2512.sh [further flags, which win over those below]
#   DATASET_PATH  folder with pictures and captions, default data/my_pictures
#   OUTPUT_DIR    default outputs/Qwen-Image-2512-lora
#   (relative to the root of the repository; go on after a stop with --resume_from_checkpoint latest)
#
# Hardware: one GPU, by the prediction with 48 GB; 80 GB if nothing is recomputed. For several GPUs name multi_gpu.yaml
# below: more samples per step, just as much memory on each. The result takes 0.42 GB of disk, a checkpoint 2.5 GB.
#
# Memory at 1024x1024, batch 1, these targets, a short caption; weights (38.1 GiB), fp32 adapters, their gradients and
# AdamW included:
#   no checkpointing flag                  72.2 GiB
#   --use_gradient_checkpointing           42.5 GiB
#   --use_gradient_checkpointing_offload   41.9 GiB, and 1.4 GiB parked in host memory
# Predicted with fake tensors, NOT measured on a GPU. (benchmarks/forecasts.py) The CUDA context and fragmentation come
# on top.
set -euo pipefail
cd "$(dirname "$0")/../../.."
if [ -d .venv/bin ]; then
  PATH="$PWD/.venv/bin:$PATH"
fi

# Size: 1024x1024, the default of the flags, which the figures above are for. The model's native 1328x1328 has 1.7
# times the tokens. For each picture in its own shape put --max_pixels 1048576 in place of height and width.
ARGS=(
  --pretrained_model_name_or_path Qwen/Qwen-Image-2512
  --dataset_path "${DATASET_PATH:-data/my_pictures}"
  --output_dir "${OUTPUT_DIR:-outputs/Qwen-Image-2512-lora}"
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
accelerate launch --config_file accelerate_configs/single_gpu.yaml train_qwen_image.py "${ARGS[@]}" "$@"
