# shellcheck shell=bash
# What .ci/run and `test.sh --all` do: every law, or every test, with nothing skipped, on every Python that ppldm
# supports. Sourced after lib.sh.

PYTHON_VERSIONS=(3.10 3.11 3.12 3.13)
ENDS=(3.10 3.13) # the oldest and the newest
MINUTES=${MINUTES:-7} # on each of the workers that play, for laws and further cases
BAR='!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!'
PYTORCH_INDEX=https://download.pytorch.org/whl/cpu

# pytest on all cores, with 3 GiB of memory for each worker. A quarter of the tests' time is spent in waiting for
# processes that they started, so there are three workers for two cores. They share out whole files, those that take
# longest first (tests/helpers/sampling.py).
play() (
    cores=$(nproc)
    workers=$((cores + cores / 2))
    fit=$(awk '/^MemAvailable/ { print int($2 / 3 / 1024 / 1024) }' /proc/meminfo)
    ((workers <= fit)) || workers=$((fit > 1 ? fit : 1))
    # The tests of these scripts choose their own Python. What is compiled once is not compiled again by each process.
    unset PYTHON PYTHONDONTWRITEBYTECODE
    exec "$VENV/bin/python" -m pytest --dist loadfile --no-loadscope-reorder -n "$workers" "$@"
)

# prove quick|full: the tests on one Python (make_venv's), and on ENDS the quick ones (quick), or on all versions all
# (full). quick: every law once, and as many of its cases as fit in MINUTES, others for each commit. full: all, and what
# each took is written down. Everything runs, whatever fails; the exit status tells.
prove() {
    local own version python status started=$SECONDS failed=() missing=() which=() others=() versions=("${PYTHON_VERSIONS[@]}")
    make_venv
    install_programs
    install_references "$VENV" || failed+=("installing PyTorch and wandb")
    own=$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    # Dear grids are sampled by the seed, or played whole.
    export PPLDM_SEED
    PPLDM_SEED=$(sample_seed)
    if [[ $1 == quick ]]; then
        which=(--minutes "$MINUTES" --seed "$PPLDM_SEED")
        others=(-m quick)
        versions=("${ENDS[@]}")
    else
        export PPLDM_ALL=1
        which=(--record)
    fi
    say "lint and types"
    check_style || failed+=("lint and types (make lint types)")
    say "Python $own: nothing may be skipped for what is missing (${which[*]})"
    PPLDM_REQUIRE=all play "${which[@]}" || failed+=("the tests on Python $own")
    say "Python $own: done after $(((SECONDS - started) / 60)) minutes"
    for version in "${versions[@]}"; do
        [[ $version != "$own" ]] || continue
        status=0
        python=$(obtain_python "$version") || status=$?
        if ((status)); then
            missing+=("$version")
            # In CI the versions are part of the proof, unless nothing on the machine could bring them.
            ((status == 2)) || [[ ${CI:-} != true ]] || failed+=("obtaining Python $version")
            continue
        fi
        say "Python $version: $([[ $1 == full ]] && echo "every test" || echo "the quick tests")"
        prove_on "$python" "$version" "$1" "${others[@]}" || failed+=("the tests on Python $version")
        say "Python $version: done after $(((SECONDS - started) / 60)) minutes"
    done
    ((${#missing[@]} == 0)) || warn_loudly "NOT TESTED, since this machine has no such Python: ${missing[*]}"
    ((${#failed[@]} == 0)) || die "failed:$(printf ' %s;' "${failed[@]}")"
}

# ruff and mypy, as `make lint types` runs them.
check_style() (
    cd "$ROOT"
    "$VENV/bin/python" -m ruff check . && "$VENV/bin/python" -m ruff format --check . && "$VENV/bin/python" -m mypy
)

# prove_on PYTHON VERSION quick|full PYTEST_ARGUMENTS...
prove_on() (
    PYTHON=$1
    VENV=$ROOT/.venv-$2
    make_venv
    PPLDM_REQUIRE=s3,browser,java,gzip,pigz,bgzip,openssl,zsh,fish
    if [[ $3 == full ]]; then
        install_references "$VENV" || exit 1
        PPLDM_REQUIRE=all
    fi
    export PPLDM_REQUIRE
    play "${@:4}"
)

# Another sample for every commit, the same for the same commit.
sample_seed() {
    echo $((16#$(git -C "$ROOT" rev-parse --short=7 HEAD 2>/dev/null || echo 0)))
}

# Print the path of Python $1: on PATH, of pyenv, of Debian's packages or of uv. Status 2 where nothing could bring it,
# 1 where what should have brought it failed.
obtain_python() {
    local candidate tried=2
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        if is_python "$candidate" "$1"; then
            command -v "$candidate"
            return
        fi
    done
    if may_install && apt-cache policy "python$1" 2>/dev/null | grep -q 'Candidate: [0-9]'; then
        install_packages_of_debian "python$1" "python$1-venv" && command -v "python$1" && return
        tried=1
    fi
    if command -v uv >/dev/null; then
        uv python install --quiet "$1" >&2 && uv python find "$1" && return
        tried=1
    fi
    return "$tried"
}

is_python() {
    [[ $("$1" -c 'import ensurepip, sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == "$2" ]]
}

# The programs that some tests need, as packages of Debian and Ubuntu.
install_programs() {
    local program missing=()
    local -A packages=([chromium]=chromium [chromedriver]=chromium-driver [pigz]=pigz [bgzip]=tabix
        [java]=openjdk-17-jre-headless [openssl]=openssl [g++]=g++
        [zsh]=zsh [fish]=fish)
    for program in "${!packages[@]}"; do
        command -v "$program" >/dev/null || missing+=("${packages[$program]}")
    done
    if ((${#missing[@]} == 0)); then
        return
    elif may_install; then
        say "installing ${missing[*]}"
        install_packages_of_debian "${missing[@]}" || warn_loudly "apt-get could not install ${missing[*]}: tests fail"
    else
        warn_loudly "installing ${missing[*]} takes apt-get and root (or sudo without a password): tests fail"
    fi
}

may_install() {
    command -v apt-get >/dev/null && { ((EUID == 0)) || sudo -n true 2>/dev/null; }
}

install_packages_of_debian() {
    local as_root=()
    ((EUID == 0)) || as_root=(sudo -n)
    {
        "${as_root[@]}" apt-get update -qq || true # packages of the last update may do
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
    } </dev/null >&2
}

# What tests compare with, into the environment $1: PyTorch's CPU build (from what pip knows, else from PyTorch's own
# index) and wandb.
install_references() {
    local pip=("$1/bin/python" -m pip install --quiet --no-input --no-deps)
    "${pip[@]}" --requirement "$ROOT/requirements/wandb.txt" --requirement "$ROOT/requirements/comet.txt" || return 1
    "${pip[@]}" --requirement "$ROOT/requirements/engine.txt" || return 1
    "${pip[@]}" --requirement "$ROOT/requirements/parity.txt" 2>/dev/null ||
        "${pip[@]}" --extra-index-url "$PYTORCH_INDEX" --requirement "$ROOT/requirements/parity.txt"
}

warn_loudly() {
    printf '\n%s\n!! %s\n%s\n\n' "$BAR" "$*" "$BAR" >&2
}
