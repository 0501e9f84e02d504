#!/usr/bin/env bash
# Goal: a LoRA for each expert of Wan2.2-I2V-A14B for one motion or effect, from some tens of clips with captions.
# Usage: bash scripts/wan_video/lora/Wan2.2-I2V-A14B.sh [further flags, which win over those below]
#   DATASET_PATH  folder with clips and captions, default data/my_clips
#   OUTPUT_DIR    default outputs/Wan2.2-I2V-A14B-lora
#   (relative to the root of the repository; go on after a stop with --resume_from_checkpoint latest)
#
# Clips: the first 81 frames of each at 16 fps, 5 seconds. --clip_part middle or random takes others, --num_frames and
# --fps set other lengths and rates. Of shorter ones 4n + 1 frames are used, if that is 5 or more: pictures are left
# out. The condition is the first frame.
# Experts: both, one after the other, each for --max_train_steps; only one is in memory. Their LoRAs lie in high_noise
# and low_noise below OUTPUT_DIR.
#
# Hardware: one GPU, by the prediction with 80 GB (at 1280x720 with the offload flag) or 48 GB (at 832x480 with it).
# For several GPUs name multi_gpu.yaml below: more samples per step, just as much memory on each. Each result takes
# 0.31 GB of disk, a checkpoint 1.8 GB.
#
# Memory at 81 frames, batch 1, these targets; with weights (26.7 GiB), adapters, gradients and AdamW:
#                                           832x480    1280x720
#   no checkpointing flag                 325.3 GiB   712.5 GiB
#   --use_gradient_checkpointing           51.1 GiB    80.8 GiB
#   --use_gradient_checkpointing_offload   39.8 GiB    54.0 GiB, and 12.2 or 28.1 GiB parked in host memory
# Predicted with fake tensors, NOT measured on a GPU. (benchmarks/forecasts.py) The CUDA context and fragmentation come
# on top.
set -euo pipefail
cd "$(dirname "$0")/../../.."
if [ -d .venv/bin ]; then
  PATH="$PWD/.venv/bin:$PATH"
fi

# Size: 832x480, the default of the flags. For each clip in its own shape: --max_pixels 399360 instead of the two.
# For 1280x720 put --height 720 --width 1280 --use_gradient_checkpointing_offload behind the command.
ARGS=(
  --pretrained_model_name_or_path Wan-AI/Wan2.2-I2V-A14B-Diffusers
  --dataset_path "${DATASET_PATH:-data/my_clips}"
  --output_dir "${OUTPUT_DIR:-outputs/Wan2.2-I2V-A14B-lora}"
  --training_mode lora
  --expert both
  --lora_rank 32
  --height 480
  --width 832
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
  # --validation_image first.png \
)
accelerate launch --config_file accelerate_configs/single_gpu.yaml train_wan_video.py "${ARGS[@]}" "$@"
