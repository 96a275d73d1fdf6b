#!/usr/bin/env bash
[ -n "$BASH_VERSION" ] || exec bash "$0" "$@"
# Make requirements/lock.txt and lock-gpu.txt again, after a change of setup.py's requirements:  bash run_scripts/lock.sh [--upgrade]
#
# The lock holds one exact version of every package of core, cpu, demo and test, for Linux and Python 3.10 to 3.13
# (`;` markers where the versions differ). What is already locked stays unless it no longer fits or --upgrade asks.
# lock-gpu.txt is the same without Paddle: of GPUs and other devices each has its own, which only Paddle's own package
# index has (ppldm/utils/machine/setup_plan.py). The libraries that it brings, such as CUDA's, it states exactly itself.
set -euo pipefail
# shellcheck source=run_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"$(find_python)" -m venv "$tools"
"$tools/bin/pip" install --quiet --requirement "$ROOT/requirements/uv.txt"
cd "$ROOT"
header='# Exact versions of core, cpu, demo and test. Made by run_scripts/lock.sh; do not edit.'
"$tools/bin/uv" pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate "$@" \
    --extra cpu --extra demo --extra test --override requirements/overrides.txt \
    --output-file requirements/lock.txt setup.py requirements/lock.in >/dev/null
printf '%s\n' "$header" | cat - requirements/lock.txt >"$tools/lock.txt"
cp "$tools/lock.txt" requirements/lock.txt
{
    echo '# lock.txt without Paddle, for GPUs and other devices: setup.sh takes theirs from its own package index.'
    grep -v -e '^#' -e '^paddlepaddle==' requirements/lock.txt
} >requirements/lock-gpu.txt
say "$(grep -c '^[a-z]' requirements/lock.txt) lines in requirements/lock.txt"
