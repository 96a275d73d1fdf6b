#!/usr/bin/env bash
# Make the environment where it is missing and run the tests:  bash run_scripts/test.sh [pytest's arguments]
set -euo pipefail
# shellcheck source=run_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

make_venv
cd "$ROOT"
exec "$VENV/bin/python" -m pytest "$@"
