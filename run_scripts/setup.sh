#!/usr/bin/env bash
[ -n "$BASH_VERSION" ] || exec bash "$0" "$@"
# Make the environment for this machine's device, and show the commands that do it.
set -euo pipefail
# shellcheck source=run_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<'END'
usage: bash run_scripts/setup.sh [--device KIND] [--cuda VERSION] [--dry-run] [--help]

Makes .venv with the exact versions of requirements/lock.txt and with the Paddle that this machine's device needs: the
CPU build, or, where nvidia-smi shows a GPU, or the driver of another device is found, the one for that device from
Paddle's own package index. Each command is shown before it runs. quickstart.sh and test.sh do the same where nothing is
installed, and keep what was chosen here.

  --device D  cpu, gpu, dcu, xpu, npu, mlu, gcu or metax_gpu (what the drivers show without it). All but the first two
              need Python 3.10
  --cuda V    the CUDA of the GPU build: 11.8, 12.6, 12.9 or 13.0 (what driver and cards allow without it). CUDA itself
              need not be installed: the build brings it
  --dry-run   print the commands and run none
  --help      this text

environment: PYTHON (the interpreter, 3.10 to 3.13), PPLDM_VENV (the virtual environment, .venv without it)
END
}

choice=()
dry_run=no
while (($#)); do
    case $1 in
        --device | --cuda)
            (($# >= 2)) || die "$1 needs a value (--help explains the flags)"
            choice+=("$1" "$2")
            shift
            ;;
        --device=* | --cuda=*) choice+=("${1%%=*}" "${1#*=}") ;;
        --dry-run) dry_run=yes ;;
        -h | --help)
            usage
            exit
            ;;
        *) die "unknown flag $1; known: --device D, --cuda V, --dry-run, --help" ;;
    esac
    shift
done

# The machine may have another device than when the environment was made: look again.
((${#choice[@]})) || choice=(--look)
if [[ $dry_run == yes ]]; then
    show_environment_commands "${choice[@]}"
else
    make_venv "${choice[@]}"
    say "next: source $VENV/bin/activate, or bash run_scripts/quickstart.sh; ppldm env shows what is there"
fi
