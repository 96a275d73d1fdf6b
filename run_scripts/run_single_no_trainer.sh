#!/usr/bin/env bash
[ -n "$BASH_VERSION" ] || exec bash "$0" "$@"
# Train with the hand-written loop on one device.
# Settings: environment variables of launch.sh (BATCH_SIZE=2 bash run_scripts/run_single_no_trainer.sh); flags after the name win.
set -euo pipefail
source "$(dirname "$0")/launch.sh"
exec "$PYTHON" -u "${no_trainer_command[@]}" "$@"
