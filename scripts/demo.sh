#!/usr/bin/env bash
# Shows on this machine, in minutes and without a download, what a training run does; leaves it all in outputs/demo/.
# Usage: bash scripts/demo.sh [FAMILY [--output_dir DIR]]. FAMILY: qwen_image (default) or wan_video.
set -euo pipefail
cd "$(dirname "$0")/.."

# Before the installation, so that a typo is answered at once.
FAMILY=${1-qwen_image}
case "$FAMILY" in
  qwen_image | wan_video) ;;
  *)
    echo "error: there is no demo for '$FAMILY'; allowed are qwen_image and wan_video." >&2
    exit 2
    ;;
esac

bash scripts/setup.sh
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# The tensors are small: more threads would mostly wait for each other, for minutes on a machine that is shared.
export OMP_NUM_THREADS=1
exec .venv/bin/python -m "scripts.demo_$FAMILY" "${@:2}"
