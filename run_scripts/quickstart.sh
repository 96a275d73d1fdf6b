#!/usr/bin/env bash
[ -n "$BASH_VERSION" ] || exec bash "$0" "$@"
# From nothing to pictures: the environment, then `ppldm quickstart` in it, whose flags these are.
set -euo pipefail
# shellcheck source=run_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
run_module ppldm.demo.quickstart --out "$ROOT/quickstart" "$@"
