#!/usr/bin/env bash
# Make the environment where it is missing and run the tests.
set -euo pipefail
# shellcheck source=run_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<'END'
usage: bash run_scripts/test.sh [pytest's arguments]
       bash run_scripts/test.sh --all

Makes .venv where it is missing (run_scripts/setup.sh) and runs the tests: all of them, or what the arguments choose.

  bash run_scripts/test.sh -m quick               the quick ones: under two minutes on two cores
  bash run_scripts/test.sh -m "not slow"          without those that start programs or train
  bash run_scripts/test.sh tests/data -k order    what pytest's own arguments choose
  bash run_scripts/test.sh --all                  everything, and nothing skipped: with PyTorch, wandb and the programs
                                                  that some tests need (installed first), on Python 3.10, 3.11 and 3.12
  bash run_scripts/test.sh --help                 this text (.venv/bin/python -m pytest --help: pytest's)

environment: PYTHON (the interpreter, 3.10 to 3.12), PPLDM_VENV (the virtual environment, .venv without it)
END
}

for argument in "$@"; do
    if [[ $argument == -h || $argument == --help ]]; then
        usage
        exit
    fi
done

cd "$ROOT"
if [[ $* == --all ]]; then
    # shellcheck source=run_scripts/proof.sh
    source run_scripts/proof.sh
    prove full
    exit
fi
make_venv
unset PYTHON # the tests of these scripts choose their own
exec "$VENV/bin/python" -m pytest "$@"
