#!/usr/bin/env bash
# Sets up .venv in the root of the repository with everything that training, the demo and the tests need: all extras.
# Usage: bash scripts/setup.sh. Runs again only when pyproject.toml has changed. A torch that is there already stays.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
STAMP=.venv/.installed-$(cksum pyproject.toml scripts/setup.sh | cksum | cut -d' ' -f1)
if [ -f "$STAMP" ]; then
  exit 0
fi

if [ ! -x .venv/bin/python ]; then
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$PYTHON" --version) is too old, Python 3.11 or newer is needed; name one with PYTHON=..." >&2
    exit 2
  }
  "$PYTHON" -m venv .venv
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Writes what is to be installed, and as a constraint the torch that is: one of its own, or of the system's packages.
.venv/bin/python - <<'EOF'
import importlib.metadata
import pathlib
import sys
import tomllib

from pip._vendor.packaging.requirements import Requirement

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
requirements = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
torch = next(r for r in map(Requirement, requirements) if r.name == "torch")
version = "2.13.0"  # where there is none; at an exact version, so that no other package brings another build
try:
    version = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    pass
if not torch.specifier.contains(version, prereleases=True):
    print(f"error: .venv has torch {version}, and {torch} is needed; install that, or remove .venv.", file=sys.stderr)
    sys.exit(2)
pathlib.Path(".venv/requirements.txt").write_text("\n".join(requirements) + "\n")
pathlib.Path(".venv/torch.txt").write_text(f"torch=={version}\n")
EOF
echo "installing into .venv (once; torch is large)"
.venv/bin/python -m pip install -q -r .venv/torch.txt
.venv/bin/python -m pip install -q -r .venv/requirements.txt -c .venv/torch.txt
rm -f .venv/.installed-*
touch "$STAMP"
