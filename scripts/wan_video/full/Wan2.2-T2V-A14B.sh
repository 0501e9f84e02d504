#!/usr/bin/env bash
# Goal: all weights of an expert of Wan2.2-T2V-A14B trained further, on a data set of thousands of clips with captions.
# Usage: bash scripts/wan_video/full/Wan2.2-T2V-A14B.sh [further flags, which win over those below]
#   EXPERT        high_noise or low_noise, default high_noise; run it twice, once for each
#   DATASET_PATH  folder with clips and captions, default data/my_clips
#   OUTPUT_DIR    default outputs/Wan2.2-T2V-A14B-full-$EXPERT
#   (relative to the root of the repository; go on after a stop with --resume_from_checkpoint latest)
#
# Clips: the first 81 frames of each at 16 fps, 5 seconds. --clip_part middle or random takes others, --num_frames and
# --fps set other lengths and rates. Of shorter ones 4n + 1 frames are used; a picture is a clip of one.
# Expert: the one that is trained is loaded alone. The result lies below OUTPUT_DIR in transformer (high_noise) or
# transformer_2 (low_noise), which are the two names in the pipeline's folder.
#
# Hardware: one GPU, by the prediction with 192 GB. Everything lies on one device today: ZeRO is refused for full
# training, and multi_gpu.yaml puts the same memory on each GPU. With 80 or 141 GB train a LoRA.
# Disk: 29 GB for the result, 86 GB for each checkpoint, of which two lie side by side while one replaces the other.
#
# Memory: 14.29e9 parameters, bytes for each of them:
#                                      adamw    adamw_8bit   adafactor
#   weights, bf16                        2          2            2
#   masters, fp32                        4          4            4
#   their gradients, fp32, at the step   4          4            4
#   optimizer state                      8          2.03         0.01 or less
#   at the optimizer step               18         12.03        10
#                                      240 GiB    160 GiB      133 GiB
# adamw is torch's fused one on a GPU, which needs nothing beside its state.
# In the backward pass the gradients are bf16, 2 bytes. Peak of a step, adamw_8bit, one clip of 81 frames:
#                                           832x480    1280x720
#   no checkpointing flag                 491.0 GiB   992.5 GiB
#   --use_gradient_checkpointing          160.1 GiB   162.8 GiB
#   --use_gradient_checkpointing_offload  160.1 GiB   160.3 GiB, and 12.2 or 28.1 GiB parked in host memory
# That is in the backward pass or, if it takes more, at the optimizer step. At batch 1 parking saves little or nothing:
# as the inputs go the gradients come. Predicted with fake tensors, NOT measured on a GPU. (benchmarks/forecasts.py)
# The CUDA context and fragmentation come on top.
set -euo pipefail
cd "$(dirname "$0")/../../.."
if [ -d .venv/bin ]; then
  PATH="$PWD/.venv/bin:$PATH"
fi
EXPERT="${EXPERT:-high_noise}"

# Size: 832x480, the default of the flags. For each clip in its own shape: --max_pixels 399360 instead of the two.
# For 1280x720 put --height 720 --width 1280 --use_gradient_checkpointing_offload behind the command.
# Batch: 1, as in the figures. Accumulation adds gradients up in fp32: 4 bytes per parameter in the backward pass.
# Optimizer: adamw_8bit, for which 1e-5 is the usual full rate. Adafactor, without a first moment, takes less.
# Caption dropout: stock sampling guides each video away from an empty caption, which so has to stay trained.
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
  --train_batch_size 1
  --caption_dropout 0.1
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
accelerate launch --config_file accelerate_configs/single_gpu.yaml train_wan_video.py "${ARGS[@]}" "$@"
