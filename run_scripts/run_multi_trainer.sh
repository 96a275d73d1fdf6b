#!/usr/bin/env bash
[ -n "$BASH_VERSION" ] || exec bash "$0" "$@"
# Train under PaddleNLP's Trainer on many devices, one process each.
# Settings: environment variables of launch.sh (BATCH_SIZE=2 bash run_scripts/run_multi_trainer.sh); flags after the name win.
set -euo pipefail
source "$(dirname "$0")/launch.sh"
distributed_launch "${trainer_command[@]}" "$@"
