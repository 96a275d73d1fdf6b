#!/usr/bin/env bash
[ -n "$BASH_VERSION" ] || exec bash "$0" "$@"
# Train on machines that ssh reaches, without a scheduler:
#
#     bash run_scripts/ssh/train.sh gpu1 gpu2 -- --config /data/recipe.yaml --max_restarts 10
#
# What follows -- goes to `ppldm train` on each. Log in without a password first (ssh-copy-id). On all machines, ppldm must be
# installed and recipe, parts and output folder be there at the same paths, the latter on storage that they share. Ctrl-C
# stops all of them after a checkpoint; the same command goes on from it.
#
#   PPLDM    the command on each machine (ppldm)
#   PORT     where they meet on the first one (29500); it must be free, and open between them
#   MASTER   the first one's address for the others, where it is not the name that ssh uses
set -uo pipefail

hosts=()
while (($#)) && [[ $1 != -- ]]; do
    hosts+=("$1")
    shift
done
if ((${#hosts[@]} == 0)) || [[ ${1:-} != -- ]]; then
    echo "usage: bash run_scripts/ssh/train.sh HOST... -- FLAGS OF ppldm train" >&2
    exit 2
fi
shift

master=${MASTER:-${hosts[0]#*@}}
pipes=$(mktemp -d)
processes=() inputs=()
for number in "${!hosts[@]}"; do
    words=("${PPLDM:-ppldm}" train "$@" --nnodes "${#hosts[@]}")
    if ((${#hosts[@]} > 1)); then words+=(--master "$master:${PORT:-29500}" --node_rank "$number"); fi
    mkfifo "$pipes/$number"
    # On a terminal of its own (-tt), where a Ctrl-C can be typed, and whose end is the end of what runs there.
    ssh -tt -o BatchMode=yes "${hosts[$number]}" "exec ${words[*]@Q}" <"$pipes/$number" &
    processes+=($!)
    exec {input}>"$pipes/$number"
    inputs+=("$input")
done
rm -r "$pipes"
type_interrupt() {
    local input
    for input in "${inputs[@]}"; do printf '\003' >&"$input"; done
}
trap type_interrupt INT TERM

status=0
for number in "${!hosts[@]}"; do
    wait "${processes[$number]}"
    of_host=$?
    while kill -0 "${processes[$number]}" 2>/dev/null; do # the wait was interrupted by a signal
        wait "${processes[$number]}"
        of_host=$?
    done
    if ((of_host)); then
        echo "${hosts[$number]} ended with exit status $of_host" >&2
        status=$of_host
    fi
done
exit "$status"
