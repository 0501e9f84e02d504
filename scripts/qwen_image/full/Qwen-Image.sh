#!/usr/bin/env bash
# Goal: all weights of Qwen-Image trained further, on a data set of thousands of pictures with captions.
# Usage: bash scripts/qwen_image/full/Qwen-Image.sh [further flags, which win over those below]
#   DATASET_PATH  folder with pictures and captions, default data/my_pictures
#   OUTPUT_DIR    default outputs/Qwen-Image-full
#   (relative to the root of the repository; go on after a stop with --resume_from_checkpoint latest)
#
# Hardware: one GPU with 288 GB (268 GiB). Everything lies on one device today: ZeRO is refused for full training, and
# multi_gpu.yaml puts the same memory on each GPU. GPUs of 80, 141 or 192 GB cannot run this; train a LoRA there.
# Disk: 41 GB for the result, 123 GB for each checkpoint, of which two lie side by side while one replaces the other.
#
# Memory: 20.43e9 parameters, bytes for each of them:
#                                      adamw    adamw_8bit   adafactor
#   weights, bf16                        2          2            2
#   masters, fp32                        4          4            4
#   their gradients, fp32, at the step   4          4            4
#   optimizer state                      8          2.03         0.01 or less
#   at the optimizer step               18         12.03        10
#                                      342 GiB    229 GiB      190 GiB
# That is the peak; adamw is torch's fused one on a GPU, which needs nothing beside its state.
# In the backward pass the gradients are bf16, 2 bytes. Peak of a step, adamw_8bit, 4 pictures of 1328x1328; the last
# block's text stream, which gets no gradient, is not counted:
#   no checkpointing flag                 428.6 GiB
#   --use_gradient_checkpointing          228.1 GiB
#   --use_gradient_checkpointing_offload  228.1 GiB, and 9.3 GiB parked in host memory
# Predicted with fake tensors, NOT measured on a GPU. (benchmarks/forecasts.py) The CUDA context and fragmentation come
# on top.
set -euo pipefail
cd "$(dirname "$0")/../../.."
if [ -d .venv/bin ]; then
  PATH="$PWD/.venv/bin:$PATH"
fi

# Size: the model's native 1328x1328, since a smaller one saves time only: the peak is at the optimizer step.
# Batch: 4 at once rather than by accumulation, which adds gradients up in fp32: 4 bytes more in the backward pass.
# Optimizer: adamw_8bit, for which 1e-5 is the usual full rate. Adafactor, without a first moment, fits 256 GB.
# Caption dropout: stock sampling guides each picture away from the caption " ", which so has to stay trained.
ARGS=(
  --pretrained_model_name_or_path Qwen/Qwen-Image
  --dataset_path "${DATASET_PATH:-data/my_pictures}"
  --output_dir "${OUTPUT_DIR:-outputs/Qwen-Image-full}"
  --training_mode full
  --height 1328
  --width 1328
  --train_batch_size 4
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
accelerate launch --config_file accelerate_configs/single_gpu.yaml train_qwen_image.py "${ARGS[@]}" "$@"
