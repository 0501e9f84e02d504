# Sourced by every recipe: goes to the root of the repository, prefers the programs in .venv, and sets LAUNCH, the
# command that starts the training script. Set it yourself for
#   the exact exit codes of the training script    LAUNCH=python bash RECIPE
#   several GPUs     LAUNCH="accelerate launch --config_file accelerate_configs/multi_gpu.yaml" bash RECIPE
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -d .venv/bin ]; then
  PATH="$PWD/.venv/bin:$PATH"
fi
LAUNCH=${LAUNCH:-accelerate launch --quiet --config_file accelerate_configs/single_gpu.yaml}
