#!/usr/bin/env bash
[ -n "$BASH_VERSION" ] || exec bash "$0" "$@"
# Make the environment where it is missing and run the tests.
set -euo pipefail
# shellcheck source=run_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<'END'
usage: bash run_scripts/test.sh [pytest's arguments]
       bash run_scripts/test.sh --all

Makes .venv where it is missing (run_scripts/setup.sh) and runs the tests. Without arguments: every law of ppldm at
least once, and some further cases (10 to 20 minutes on two free cores), others for each commit.

  bash run_scripts/test.sh -m quick               the quick ones: about a minute
  bash run_scripts/test.sh tests/data -k order    what pytest's own arguments choose, with all cases
  bash run_scripts/test.sh -n 2                   everything that this machine can play, by two processes
  bash run_scripts/test.sh --all                  everything, and nothing skipped: with PyTorch, wandb and the programs
                                                  that some tests need (installed first), on Python 3.10 to 3.13:
                                                  hours
  bash run_scripts/test.sh --help                 this text (.venv/bin/python -m pytest --help: pytest's)

environment: PYTHON (the interpreter, 3.10 to 3.13), PPLDM_VENV (the virtual environment, .venv without it)
END
}

for argument in "$@"; do
    if [[ $argument == -h || $argument == --help ]]; then
        usage
        exit
    fi
done

cd "$ROOT"
# shellcheck source=run_scripts/proof.sh
source run_scripts/proof.sh
if [[ $* == --all ]]; then
    prove full
    exit
fi
make_venv
if (($# == 0)); then
    PPLDM_SEED=$(sample_seed)
    export PPLDM_SEED
    say "every law, and further cases that this commit draws (--minutes $MINUTES --seed $PPLDM_SEED)"
    play --minutes "$MINUTES" --seed "$PPLDM_SEED"
else
    unset PYTHON # as play does
    exec "$VENV/bin/python" -m pytest "$@"
fi
