# shellcheck shell=bash
# What the scripts of this folder share: find a Python, make the virtual environment, stop cleanly. Sourced, not run.
#
#   PYTHON      the interpreter to use (3.10 to 3.13); without it the first fitting one on PATH
#   PPLDM_VENV  where the virtual environment goes; .venv in the repository without it
#
# Which commands make the environment, and which build of Paddle a machine needs, says ppldm/utils/machine/setup_plan.py.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${PPLDM_VENV:-$ROOT/.venv}
LOCK=$ROOT/requirements/lock.txt
DEVICE=   # cpu, npu and the like, or the name of Paddle's build for GPUs (cu126); decide_device sets it

# Another environment's packages must not get into ours.
unset PYTHONPATH PYTHONHOME
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1
# Of one file. On a busy machine uv's own minute passes, and it would leave all that it has installed.
export UV_COMPILE_BYTECODE_TIMEOUT=${UV_COMPILE_BYTECODE_TIMEOUT:-3600}

say() { printf '==> %s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Run a command in a process group of its own, so that Ctrl-C (or SIGTERM, SIGHUP) stops it and all its children first,
# then this script, whether the signal came from the terminal or was sent to the script alone.
run_stoppable() {
    local status=0
    set -m
    "$@" &
    local child=$!
    set +m
    # shellcheck disable=SC2064 # the child of now, not of the time of the signal
    trap "stop_child $child" INT TERM HUP
    wait "$child" || status=$?
    trap - INT TERM HUP
    return "$status"
}

# The stage may take a while to save its state; a second Ctrl-C does not wait for it.
stop_child() {
    # shellcheck disable=SC2064 # as above
    trap "kill -KILL -- -$1" INT TERM HUP
    # Not SIGINT: a process that a script started in the background ignores that one.
    kill -TERM -- "-$1" 2>/dev/null || true
    while kill -0 "$1" 2>/dev/null; do wait "$1" 2>/dev/null || true; done
    kill -KILL -- "-$1" 2>/dev/null || true # children that outlived it
    printf '\nstopped; the same command again goes on from what is finished\n' >&2
    exit 130
}

# Succeed if $1 is a Python that paddle has a build for, and that can make virtual environments.
is_supported_python() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

# Print the path of the Python to use, or explain what is missing.
find_python() {
    local candidate found=
    if [[ -n ${PYTHON:-} ]]; then
        is_supported_python "$PYTHON" ||
            die "PYTHON=$PYTHON is not a Python 3.10 to 3.13; name one, or unset PYTHON to search PATH"
        found=$PYTHON
    else
        for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
            if is_supported_python "$candidate"; then
                found=$candidate
                break
            fi
        done
    fi
    [[ -n $found ]] || die "no Python 3.10 to 3.13 on PATH; install one (Debian 12, Ubuntu 22.04" \
        "and 24.04: sudo apt install python3 python3-venv) or name one: PYTHON=/path/to/python3.11 bash $0"
    if ! "$found" -c 'import ensurepip, venv; ensurepip.version()' 2>/dev/null; then
        local version
        version=$("$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        die "$found cannot make virtual environments; on Debian and Ubuntu: sudo apt install python$version-venv"
    fi
    "$found" -c 'import sys; print(sys.executable)'
}

# An environment that exists keeps its Python: say so where PYTHON asks for another one.
check_asked_python() {
    local asked has
    [[ -n ${PYTHON:-} && -x $VENV/bin/python ]] || return 0
    asked=$(find_python)
    asked=$(name_python "$asked")
    has=$(name_python "$VENV/bin/python" 2>/dev/null) || return 0 # broken; it is made anew
    [[ $asked == "$has" ]] || die "$VENV was made with Python $has, and PYTHON=$PYTHON is Python $asked;" \
        "unset PYTHON, remove that folder, or name another place: PPLDM_VENV=/path/to/venv bash $0"
}

# Version and installation of an interpreter; those of the one that made it for a virtual environment's.
name_python() {
    "$1" -c 'import os, platform, sys; print(platform.python_version(), "in", os.path.realpath(sys.base_prefix))'
}

# Set DEVICE: by the flags of setup.sh ("$@": --device, --cuda), else what is set already, else what the environment was
# made for, else what the machine has.
decide_device() {
    local python
    if (($# == 0)) && [[ -n $DEVICE ]]; then return; fi
    if (($# == 0)) && [[ -f $VENV/ppldm.device ]]; then
        DEVICE=$(<"$VENV/ppldm.device")
        return
    fi
    python=$(find_python)
    DEVICE=$(run_plan "$python" device "$@")
}

# ppldm/utils/machine/setup_plan.py, which needs no package.
run_plan() {
    (cd "$ROOT" && "$1" -m ppldm.utils.machine.setup_plan "${@:2}")
}

# The commands that are still to be run, one a line: environment_commands [--pip].
environment_commands() {
    local python has_venv=()
    python=$(find_python)
    if has_sound_venv; then has_venv=(--has-venv); fi
    run_plan "$python" commands "$DEVICE" --python "$python" --venv "$VENV" "${has_venv[@]}" \
        --installed "$(cat "$VENV/ppldm.device" 2>/dev/null || echo cpu)" "$@"
}

has_sound_venv() {
    { [[ -f $VENV/pyvenv.cfg ]] && is_supported_python "$VENV/bin/python" && "$VENV/bin/python" -m pip --version; } \
        >/dev/null 2>&1
}

is_ready() {
    [[ -x $VENV/bin/python && -f $VENV/ppldm.stamp && $(<"$VENV/ppldm.stamp") == "$(environment_stamp)" ]]
}

# What the environment was made from: when this changes, it is installed again.
environment_stamp() {
    {
        echo "$ROOT" "$VENV" "$DEVICE"
        "$VENV/bin/python" --version
        cat "$LOCK" "${LOCK%.txt}-gpu.txt" "$ROOT/setup.py"
    } | sha256sum
}

# A slim machine has no libgomp.so.1, which paddle needs (Debian: libgomp1). scikit-learn carries one: what the scripts
# start finds it by LD_LIBRARY_PATH, so that no root is needed.
provide_libgomp() {
    "$VENV/bin/python" -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null && return
    local carried=("$VENV"/lib/python3.*/site-packages/scikit_learn.libs/libgomp*.so*)
    [[ -f ${carried[0]} ]] || die "paddle needs libgomp.so.1, which this machine lacks: sudo apt install libgomp1"
    mkdir -p "$VENV/lib/native"
    ln -sf "${carried[0]}" "$VENV/lib/native/libgomp.so.1"
    export LD_LIBRARY_PATH=$VENV/lib/native${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}

# Make the virtual environment, or finish an interrupted one: make_venv [flags of setup.sh]. Where nothing is missing,
# it takes no time.
make_venv() {
    local commands line started=$SECONDS
    check_asked_python
    decide_device "$@"
    if is_ready; then
        provide_libgomp
        return
    fi
    commands=$(environment_commands)
    check_disk_space
    if ! has_sound_venv; then
        line=${commands%%$'\n'*}
        commands=${commands#*$'\n'}
        printf '    %s\n' "$line" >&2
        run_stoppable bash -c "$line" || die "cannot make $VENV; see above"
    fi
    rm -f "$VENV/ppldm.stamp"
    : >"$VENV/install.log"
    remove_half_installed
    say "installing $(describe_size): 1 to 10 minutes (log: $VENV/install.log)"
    run_stoppable install_packages "$commands" || go_on_with_pip "$commands" ||
        die "the installation failed (log: $VENV/install.log). Without a way to PyPI, name a mirror with" \
            "PIP_INDEX_URL; then run the same command again: it goes on from here"
    echo "$DEVICE" >"$VENV/ppldm.device"
    environment_stamp >"$VENV/ppldm.stamp.tmp"
    mv "$VENV/ppldm.stamp.tmp" "$VENV/ppldm.stamp"
    provide_libgomp
    say "the environment is ready after $((SECONDS - started)) s"
}

# Where uv failed in the commands $1, pip may have a way: the same by pip.
go_on_with_pip() {
    [[ $1 == *" pip install --python "* ]] || return 1
    say "uv failed (log: $VENV/install.log): going on with pip"
    remove_half_installed
    run_stoppable install_packages "$(environment_commands --pip)"
}

# What was killed while it was unpacked looks like an installed package. The file INSTALLER comes last.
remove_half_installed() {
    local folder
    for folder in "$VENV"/lib/python3.*/site-packages/*.dist-info; do
        [[ -f $folder/INSTALLER ]] || rm -rf "$folder"
    done
}

# Print what make_venv would run: show_environment_commands [flags of setup.sh].
show_environment_commands() {
    check_asked_python
    decide_device "$@"
    printf '# the environment, for %s\n' "$DEVICE"
    if is_ready; then echo "# nothing to do: $VENV is ready"; else environment_commands | hide_passwords; fi
}

# Of the addresses of package indexes.
hide_passwords() { sed -uE 's#://[^/@[:space:]]*@#://****@#g'; }

num_packages() { grep -oE '^[a-z0-9._-]+' "$LOCK" | sort -u | wc -l; }

describe_size() {
    if [[ $DEVICE == cpu ]]; then
        echo "about $(num_packages) packages, 0.9 GB to fetch, 4.5 GB on disk with the cache of uv"
    else
        echo "about $(num_packages) packages and Paddle for $DEVICE, up to several GB to fetch, about 8 GB on disk"
    fi
}

# Free disk space for the environment, and for the files that are unpacked on the way.
check_disk_space() {
    local parent free_kib need_gib=5
    [[ $DEVICE == cpu ]] || need_gib=14
    parent=$(dirname "$VENV")
    mkdir -p "$parent"
    free_kib=$(df -Pk "$parent" | awk 'NR == 2 { print $4 }')
    ((free_kib >= need_gib * 1024 * 1024)) ||
        die "$parent has $((free_kib / 1024 / 1024)) GiB free, the environment needs $need_gib; free some," \
            "or name another place: PPLDM_VENV=/path/to/venv bash $0"
}

# Run the commands, one a line, each shown before it runs.
install_packages() {
    local line
    while IFS= read -r line; do
        hide_passwords <<<"+ $line"
        case $line in
            "export "*) eval "$line" ;;
            *) bash -c "$line" </dev/null || exit 1 ;;
        esac
    done <<<"$1" 2>&1 | tee -a "$VENV/install.log" | show_progress "$(num_packages)"
}

# Turn the many lines of pip and uv into one that counts (on a terminal), or into few. Not by awk: Debian's reads ahead,
# and would tell of a step only when the next one has begun.
show_progress() {
    local line name size number=0 total=$1 clear='' end=$'\n' announced=0 fetched=0 told=0
    local -A sizes=()
    [[ ! -t 2 ]] || clear=$'\r\033[K' end=''
    while IFS= read -r line; do
        case $line in
            # Of pip.
            Collecting* | "Requirement already satisfied"*)
                ((number < total)) || continue
                number=$((number + 1))
                if [[ $clear ]] || ((number % 25 == 0)); then
                    printf '%s' "$clear    $number of about $total packages fetched$end"
                fi
                ;;
            "Building wheels"*) printf '%s' "$clear    building the packages that have no wheel$end" ;;
            "Installing collected packages"*)
                line=${line//[^,]/}
                printf '%s' "$clear    unpacking $((${#line} + 1)) package${line:+s}"
                # Pip, into a pipe, says nothing while it unpacks.
                ((${#line} < 20)) || printf '%s' ": 1 to 2 minutes, 15 where the machine is busy; no other line until then"
                printf '%s' "$end"
                ;;
            # Of uv, which tells of packages from 1 MiB.
            "Downloading "*" ("*MiB")")
                read -r _ name size <<<"$line"
                size=${size#(} size=${size%%.*}
                sizes[$name]=$size
                announced=$((announced + size))
                ;;
            " Downloaded "*)
                fetched=$((fetched + ${sizes[${line# Downloaded }]:-0}))
                if [[ $clear ]] || ((fetched - told >= 50)) || ((fetched == announced)); then
                    told=$fetched
                    line="$fetched of $announced MiB of large wheels fetched"
                    # Nothing is told from the last one on until all are unpacked.
                    ((fetched < announced)) || line+="; building and unpacking: up to 2 minutes, 10 where the machine is busy"
                    printf '%s' "$clear    $line$end"
                fi
                ;;
            "   Building "*" @ file:"*) ;; # ppldm
            "   Building "*) printf '%s' "$clear    fetching the source of ${line#   Building } and building it$end" ;;
            "Resolved "*)
                line=${line#Resolved }
                ((${line%% *} < 20)) || printf '%s' "$clear    fetching what uv's cache lacks of ${line%% in *}$end"
                ;;
            Prepared*) printf '%s\n' "$clear    ${line/Prepared/fetched and unpacked}" ;;
            Installed*)
                printf '%s\n' "$clear    ${line/Installed/installed}"
                [[ $line != *" "??*" packages"* ]] || printf '%s' "$clear    compiling them: up to a minute, 10 where the machine is busy$end"
                ;;
            "Bytecode compiled"*) printf '%s\n' "$clear    ${line/Bytecode c/c}" ;;
            # Of both.
            "+ "*) printf '%s\n' "$clear    ${line#+ }" ;;
            ERROR* | error* | "  cause: "*) printf '%s\n' "$clear    $line" ;;
        esac
    done >&2
    printf '%s' "$clear" >&2
}

# run_module MODULE FLAGS...: make the environment and run a module of ppldm in it. Its flags are checked before anything
# is installed; --help and --dry-run install nothing. For this the module needs Python alone.
run_module() {
    local module=$1 python words
    shift
    words=" $* "
    python=$VENV/bin/python
    has_sound_venv || python=$(find_python)
    if [[ $words == *" --help "* || $words == *" -h "* ]]; then
        PYTHONPATH=$ROOT exec "$python" -m "$module" "$@"
    fi
    PYTHONPATH=$ROOT "$python" -m "$module" "$@" --dry-run >/dev/null
    decide_device
    if [[ $words == *" --dry-run "* ]]; then
        show_environment_commands
        PYTHONPATH=$ROOT exec "$python" -m "$module" "$@"
    fi
    make_venv
    exec "$VENV/bin/python" -m "$module" "$@"
}
