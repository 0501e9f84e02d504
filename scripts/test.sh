#!/usr/bin/env bash
# Sets up .venv and runs the checks and the tests.
# Usage: bash scripts/test.sh [--slow] [pytest arguments]. --slow adds the tests marked slow.
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup.sh
MARKERS="not slow"
if [ "${1:-}" = "--slow" ]; then
  MARKERS="slow or not slow"
  shift
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# One thread: tiny models gain nothing from more, and threads that wait for each other lose a lot on a busy machine.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
# Two processes: each begins with a half of the tests, in their order, and who is done first takes some of the other's.
exec .venv/bin/python -m pytest -q -n 2 --dist worksteal -m "$MARKERS" "$@"
