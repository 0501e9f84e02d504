#!/usr/bin/env bash
# Goal: a LoRA of Wan2.2-TI2V-5B for one motion or effect, from some tens of clips with captions.
# Usage: bash scripts/wan_video/lora/Wan2.2-TI2V-5B.sh [further flags, which win over those below]
#   DATASET_PATH  folder with clips and captions, default data/my_clips
#   OUTPUT_DIR    default outputs/Wan2.2-TI2V-5B-lora
#   (relative to the root of the repository; go on after a stop with --resume_from_checkpoint latest)
#
# Clips: the first 121 frames of each at 24 fps, 5 seconds. --clip_part middle or random takes others, --num_frames and
# --fps set other lengths and rates. Of shorter ones 4n + 1 frames are used, if that is 5 or more: pictures are left
# out. The condition is the first frame.
# Task: from image to video. --task t2v behind the command trains from text alone: with pictures too, in less memory.
#
# Hardware: one GPU, by the prediction with 32 GB; with the offload flag 24 GB. For several GPUs name multi_gpu.yaml
# below: more samples per step, just as much memory on each. The result takes 0.16 GB of disk, a checkpoint 1.0 GB.
#
# Memory at 1280x704, 121 frames, batch 1, these targets; with weights (9.3 GiB), adapters, gradients and AdamW:
#   no checkpointing flag                 216.7 GiB
#   --use_gradient_checkpointing           24.3 GiB
#   --use_gradient_checkpointing_offload   20.2 GiB, and 4.5 GiB parked in host memory
# Predicted with fake tensors, NOT measured on a GPU. (benchmarks/forecasts.py) The CUDA context and fragmentation come
# on top.
set -euo pipefail
cd "$(dirname "$0")/../../.."
if [ -d .venv/bin ]; then
  PATH="$PWD/.venv/bin:$PATH"
fi

# Size: 1280x704, the default of the flags. For each clip in its own shape: --max_pixels 901120 instead of the two.
ARGS=(
  --pretrained_model_name_or_path Wan-AI/Wan2.2-TI2V-5B-Diffusers
  --dataset_path "${DATASET_PATH:-data/my_clips}"
  --output_dir "${OUTPUT_DIR:-outputs/Wan2.2-TI2V-5B-lora}"
  --training_mode lora
  --task i2v
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
accelerate launch --config_file accelerate_configs/single_gpu.yaml train_wan_video.py "${ARGS[@]}" "$@"
