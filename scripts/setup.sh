#!/usr/bin/env bash
# Sets up .venv in the root of the repository with everything that training, the demo and the tests need.
# Usage: bash scripts/setup.sh. Runs again only when pyproject.toml has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
STAMP=.venv/.installed-$(cksum pyproject.toml scripts/setup.sh | cksum | cut -d' ' -f1)
if [ -f "$STAMP" ]; then
  exit 0
fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "error: $("$PYTHON" --version) is too old, Python 3.10 or newer is needed; name one with PYTHON=..." >&2
  exit 2
}
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
export PIP_DISABLE_PIP_VERSION_CHECK=1
echo "installing into .venv (once; torch is large)"
# torch first and at the exact version, so that no other package brings another build of it.
.venv/bin/python -m pip install -q "torch==2.13.0"
.venv/bin/python - > .venv/requirements.txt <<'EOF'
import sys
try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
requirements = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
sys.stdout.write("\n".join(requirements) + "\n")
EOF
.venv/bin/python -m pip install -q -r .venv/requirements.txt
rm -f .venv/.installed-*
touch "$STAMP"
