#!/usr/bin/env bash
[ -n "$BASH_VERSION" ] || exec bash "$0" "$@"
# Train with the hand-written loop on many devices, one process each.
# Settings: environment variables of launch.sh (BATCH_SIZE=2 bash run_scripts/run_multi_no_trainer.sh); flags after the name win.
set -euo pipefail
source "$(dirname "$0")/launch.sh"
distributed_launch "${no_trainer_command[@]}" "$@"
