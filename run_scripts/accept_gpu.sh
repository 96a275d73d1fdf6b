#!/usr/bin/env bash
[ -n "$BASH_VERSION" ] || exec bash "$0" "$@"
# Does everything that needs a GPU, or another device, work on this one?  bash run_scripts/accept_gpu.sh [--help]
set -euo pipefail
# shellcheck source=run_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

for argument in "$@"; do
    # What needs no environment does not make one.
    if [[ $argument == -h || $argument == --help || $argument == --dry-run ]]; then
        python=$(find_python)
        PPLDM_PYTHON=$VENV/bin/python exec "$python" "$ROOT/run_scripts/accept_gpu.py" "$@"
    fi
done
make_venv
run_stoppable "$VENV/bin/python" "$ROOT/run_scripts/accept_gpu.py" "$@"
