"""What continuous integration proves: nothing missing passes unseen, and every Python has its turn."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from quick import QUICK, TESTS, is_quick
from sampling import chosen, chosen_cases

ROOT = Path(__file__).resolve().parents[1]
NAMES = [f"tests/test_a.py::test_b[{number}]" for number in range(2000)]


@pytest.fixture
def nothing_there(monkeypatch):
    monkeypatch.setitem(needs.NEEDS, "browser", lambda: "no program chromium on PATH")


@pytest.mark.parametrize("asked", ["browser", "all", "parity, browser"])
def test_what_is_asked_for_and_missing_fails(nothing_there, monkeypatch, asked):
    monkeypatch.setenv("PPLDM_REQUIRE", asked)
    # Both are caught, since a skip inside a test would skip it.
    with pytest.raises((pytest.fail.Exception, pytest.skip.Exception)) as raised:
        needs.need("browser")
    assert raised.type is pytest.fail.Exception
    assert "asks for browser, and no program chromium" in str(raised.value)


@pytest.mark.parametrize("asked", ["", "parity"])
def test_what_is_not_asked_for_is_skipped(nothing_there, monkeypatch, asked):
    monkeypatch.setenv("PPLDM_REQUIRE", asked)
    with pytest.raises(pytest.skip.Exception, match="needs browser: no program chromium"):
        needs.need("browser")


def test_what_is_there_runs_and_what_is_not_known_is_an_error(monkeypatch):
    monkeypatch.setenv("PPLDM_REQUIRE", "all")
    monkeypatch.setitem(needs.NEEDS, "browser", lambda: None)
    needs.need("browser")
    monkeypatch.setenv("PPLDM_REQUIRE", "brwoser")
    with pytest.raises(pytest.UsageError, match="names brwoser; known: all, parity"):
        needs.required()


def test_modules_and_programs_that_are_missing_are_named():
    assert needs._modules("json", "no_such_module")().startswith("no_such_module cannot be imported")
    assert needs._modules("json")() is None and needs._programs("bash")() is None
    assert needs._programs("no-such-program")() == "no program no-such-program on PATH"


def test_a_test_with_a_need_fails_where_it_is_required(tmp_path):
    for name in ("conftest.py", "helpers/needs.py", "helpers/quick.py", "helpers/sampling.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / name, tmp_path / name)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\npythonpath = ["helpers"]\nmarkers = ["needs"]\n'
    )
    (tmp_path / "test_it.py").write_text(
        "import needs, pytest\nneeds.NEEDS['pigz'] = lambda: 'none'\n"
        "@pytest.mark.needs('pigz')\ndef test_it(): pass\ndef test_other(): pass\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PPLDM_REQUIRE": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    for asked, status, words in [("", 0, "1 passed, 1 skipped"), ("pigz", 1, "PPLDM_REQUIRE asks for pigz, and none")]:
        done = subprocess.run(command, cwd=tmp_path, env={**environment, "PPLDM_REQUIRE": asked},
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == status and words in done.stdout, done.stdout


@pytest.mark.parametrize("share", [0.0, 0.05, 0.25, 0.9, 1.0])
def test_a_sample_is_the_share_that_was_asked_for_and_grows_with_it(share):
    taken = {name for name in NAMES if chosen(name, share, 7)}
    assert abs(len(taken) / len(NAMES) - share) < 0.03
    assert taken <= {name for name in NAMES if chosen(name, min(1.0, share + 0.1), 7)}


@pytest.mark.parametrize("share, expected", [(0.0, 0), (0.1, 1), (0.5, 4), (0.51, 5), (1.0, 8)])
def test_of_each_test_a_share_of_its_cases_is_played(share, expected):
    names = [f"tests/test_a.py::test_{name}[{number}]" for name in "bc" for number in range(8)] + ["tests/test_a.py::d"]
    for seed in range(5):
        taken = chosen_cases(names, share, seed)
        assert [sum(f"test_{name}[" in one for one in taken) for name in "bc"] == [expected, expected]
        assert ("tests/test_a.py::d" in taken) == (share > 0)
    assert chosen_cases(names, 0.5, 1) != chosen_cases(names, 0.5, 2)


def test_what_is_quick_is_there():
    assert all((TESTS / one).exists() for one in QUICK)
    assert is_quick(TESTS / "cli/test_cli.py") and not is_quick(TESTS / "training/test_loops.py")


def test_seeds_choose_independently():
    first, second = ({name for name in NAMES if chosen(name, 0.5, seed)} for seed in (1, 2))
    assert abs(len(first & second) / len(NAMES) - 0.25) < 0.05


def bash(program, *, path=None, **variables):
    """Run bash lines after lib.sh and proof.sh; status, stdout, stderr."""
    text = f"set -euo pipefail; cd {ROOT}; source run_scripts/lib.sh; source run_scripts/proof.sh; {program}"
    environment = {**os.environ, **variables} | ({"PATH": str(path)} if path else {})
    done = subprocess.run([shutil.which("bash"), "-c", text], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def bare_path(tmp_path):
    """A PATH without any Python, and no pyenv."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "dirname", "grep", "cat"):
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


def add_python(path, version):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\necho {version}\n")
    path.chmod(0o755)


def test_a_python_is_found_on_path_and_with_pyenv_and_only_if_it_is_the_one(bare_path, tmp_path):
    find = {"path": bare_path, "PYENV_ROOT": str(tmp_path / "pyenv")}
    assert bash("may_install() { false; }; obtain_python 3.10", **find)[0] == 2
    add_python(bare_path / "python3.10", "3.9")  # as pyenv's stand-ins for what is not there
    assert bash("may_install() { false; }; obtain_python 3.10", **find)[0] == 2
    add_python(tmp_path / "pyenv/versions/3.10.13/bin/python", "3.10")
    status, stdout, _ = bash("obtain_python 3.10", **find)
    assert (status, stdout) == (0, f"{tmp_path}/pyenv/versions/3.10.13/bin/python\n")
    add_python(bare_path / "python3.10", "3.10")
    assert bash("obtain_python 3.10", **find)[1] == f"{bare_path}/python3.10\n"


def test_a_python_that_should_have_come_and_did_not_is_told_from_one_that_cannot(bare_path, tmp_path):
    policy = "may_install() { true; }; apt-cache() { echo 'Candidate: 3.10.2'; };"
    find = {"path": bare_path, "PYENV_ROOT": str(tmp_path)}
    assert bash(f"{policy} install_packages_of_debian() {{ false; }}; obtain_python 3.10", **find)[0] == 1
    installs = f"install_packages_of_debian() {{ {shutil.which('ln')} -s {bare_path}/other {bare_path}/python3.10; }};"
    add_python(bare_path / "other", "3.10")
    assert bash(f"{policy} {installs} obtain_python 3.10", **find)[:2] == (0, f"{bare_path}/python3.10\n")


STAND_INS = """
make_venv() {
    mkdir -p "$VENV/bin"
    printf '#!/bin/bash\\nif [[ $1 == -c ]]; then echo 3.11; exit; fi
        echo "$0 REQUIRE=$PPLDM_REQUIRE $*" >>%s/calls; [[ "$0 $*" != *"$FAIL"* ]]' >"$VENV/bin/python"
    chmod +x "$VENV/bin/python"
}
install_programs() { :; }
install_references() { echo "references $1" >>%s/calls; }
obtain_python() { [[ $1 != "$ABSENT" ]] || return "$HOW"; echo "/usr/bin/python$1"; }
"""


def prove(tmp_path, mode, fail="nothing", absent="none", how="2", **variables):
    stand_ins = STAND_INS % (tmp_path, tmp_path)
    status, _, stderr = bash(
        f"{stand_ins} ROOT={tmp_path}; VENV=$ROOT/.venv; prove {mode}",
        FAIL=fail, ABSENT=absent, HOW=how, **variables,
    )  # fmt: skip
    # The slow tests run beside the others: where their line stands is chance.
    calls = [call for call in (tmp_path / "calls").read_text().splitlines() if not re.search("-m (ruff|mypy)", call)]
    return status, sorted(calls, key=lambda call: "-rs -m slow" in call), stderr


def test_ci_runs_all_on_one_python_and_a_sample_on_the_others(tmp_path):
    status, calls, stderr = prove(tmp_path, "quick", CI="true")
    assert status == 0, stderr
    assert calls[0] == f"references {tmp_path}/.venv"
    assert calls[1] == f"{tmp_path}/.venv/bin/python REQUIRE=all -m pytest -rs -m not slow"
    cases = f"{tmp_path}/.venv/bin/python REQUIRE=all -m pytest -rs -m slow --sample-cases 0.3 --sample-seed "
    assert calls[-1].startswith(cases)
    for call, version in zip(calls[2:-1], ("3.10", "3.12"), strict=True):
        assert f"/.venv-{version}/bin/python REQUIRE=s3,browser," in call and "--sample 0.25 --sample-seed" in call
        assert "-m not slow" in call


def test_all_runs_all_everywhere(tmp_path):
    status, calls, _ = prove(tmp_path, "full")
    runs = [call for call in calls if "-m pytest" in call]
    assert status == 0 and len(runs) == 4 and len(calls) == 7
    assert all("REQUIRE=all" in run and "--sample" not in run for run in runs)
    assert [run.partition("-m pytest")[2] for run in runs] == [" -rs -m not slow", "", "", " -rs -m slow"]


@pytest.mark.parametrize("fail", ["-rs -m slow", "-rs -m not slow", ".venv-3.10/", ".venv-3.12/"])
def test_one_failure_fails_it_and_the_rest_still_runs(tmp_path, fail):
    status, calls, stderr = prove(tmp_path, "quick", fail=fail)
    assert status == 1 and sum("-m pytest" in call for call in calls) == 4
    assert re.search(r"^error: failed: the (quick |slow )?tests on Python 3\.1\d;$", stderr.splitlines()[-1])


@pytest.mark.parametrize("fail", ["-m ruff check .", "-m ruff format --check .", "-m mypy"])
def test_style_and_types_are_part_of_it(tmp_path, fail):
    status, calls, stderr = prove(tmp_path, "quick", fail=fail)
    assert status == 1 and sum("-m pytest" in call for call in calls) == 4
    assert stderr.splitlines()[-1] == "error: failed: lint and types (make lint types);"


@pytest.mark.parametrize(("ci", "how", "status"), [("true", "1", 1), ("true", "2", 0), ("", "1", 0), ("", "2", 0)])
def test_a_missing_python_is_said_and_fails_ci_where_it_could_be_had(tmp_path, ci, how, status):
    found, calls, stderr = prove(tmp_path, "quick", absent="3.12", how=how, CI=ci)
    assert found == status and sum("-m pytest" in call for call in calls) == 3
    assert "NOT TESTED, since this machine has no such Python: 3.12" in stderr
