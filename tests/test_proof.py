"""What continuous integration proves: nothing missing passes unseen, and every Python has its turn."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import needs
import progress
import pytest
from durations import Durations, Recorder, law_of, missing_laws
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import QUICK, TESTS, is_quick
from sampling import AT_LEAST_S, _draw, choose, wait_their_turn

ROOT = Path(__file__).resolve().parents[1]
HELPERS = ("needs", "quick", "sampling", "durations", "progress", "warm_programs", "warm_start", "warm_server")
LAWS = st.dictionaries(
    st.integers(0, 30), st.lists(st.floats(0.11, 30), min_size=1, max_size=12), min_size=1, max_size=20
)


def test_nothing_of_the_place_or_of_how_pythons_here_write_is_there_for_a_test():
    assert ROOT not in [Path.cwd(), *Path.cwd().parents] and "PYTHONUNBUFFERED" not in os.environ


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


@pytest.fixture
def small_suite(tmp_path):
    """A folder with this suite's helpers, and a function that plays the tests of a text there: status and output."""
    for name in ("conftest.py", "durations.json", *(f"helpers/{one}.py" for one in HELPERS)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / name, tmp_path / name)
    markers = "markers = ['needs', 'slow', 'night', 'quick', 'turn']"
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\npythonpath = ['helpers']\n{markers}\n")

    def play(tests: str, *arguments, **environment):
        (tmp_path / "test_it.py").write_text(tests)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "test_it.py"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout

    return play


@pytest.mark.slow
def test_a_test_with_a_need_fails_where_it_is_required(small_suite):
    tests = (
        "import needs, pytest\nneeds.NEEDS['pigz'] = lambda: 'none'\n"
        "@pytest.mark.needs('pigz')\ndef test_it(): pass\ndef test_other(): pass\n"
    )
    for asked, expected, words in [
        ("", 0, ("1 passed, 1 skipped", "left to --all: 1 that need pigz\n")),
        ("pigz", 1, ("PPLDM_REQUIRE asks for pigz, and none",)),
    ]:
        status, output = small_suite(tests, PPLDM_REQUIRE=asked)
        assert status == expected and all(one in output for one in words), output


def test_what_is_needed_is_told_together():
    left_out = Counter(
        {"that need wandb": 1, "of laws that take turns": 1_200, "that need PyTorch": 4, "skipped: x": 2}
    )
    assert progress._listed(left_out) == "1,200 of laws that take turns; 5 that need PyTorch, wandb; 2 skipped: x"


GRID = """
import pytest, time
@pytest.mark.slow
@pytest.mark.parametrize("case", range(9))
def test_grid(case): time.sleep(0.15)
@pytest.mark.night("time at scale")
def test_scale(): pass
def test_other(): print("caf\\udce9")
def test_fails(): assert {holds}, "caf\\udce9"
"""


@pytest.mark.slow
def test_what_was_played_is_said_measured_and_what_was_left_is_counted(small_suite, tmp_path):
    two = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    (tmp_path / "durations.json").write_text('{"test_it.py::test_other": 7}')
    status, output = small_suite(GRID.format(holds=True), *two, "--record")  # one file, and so one worker
    assert status == 0 and "12 tests by 2 processes: about 7 s" in output and "12 passed" in output, output
    kept = json.loads((tmp_path / "durations.json").read_text())
    assert kept["test_it.py::test_grid"] >= 0.14 and all(name.startswith("test_it.py::") for name in kept)
    status, output = small_suite(GRID.format(holds=False), *two, "--minutes", "0.01")
    assert status == 1 and "failed: test_it.py::test_fails" in output
    left = int(re.search(r"left to --all: (\d) further cases of laws that are played; 1 that take long\n", output)[1])
    assert 1 <= left <= 8 and f"1 failed, {10 - left} passed" in output


@pytest.mark.slow
def test_a_test_over_its_budget_fails_where_all_are_measured(small_suite, tmp_path):
    budgets = tmp_path / "helpers/durations.py"
    budgets.write_text(budgets.read_text().replace('"quick": 2.0', '"quick": 0.2'))
    tests = "import pytest, time\n@pytest.mark.quick\ndef test_long(): time.sleep(0.3)\n"
    tests += "@pytest.fixture\ndef made(): time.sleep(0.3)\n@pytest.mark.quick\ndef test_shared(made): pass\n"
    assert re.search(r"\d s were in tests that durations.json does not know", small_suite(tests)[1])
    status, output = small_suite(tests, "--record")
    assert "does not know" not in output
    assert status == 1 and re.search(r"over its budget of 0\.2 s: test_it.py::test_long: \d+\.\d s", output), output
    assert output.count("over its budget") == 1, "what makes a fixture is shared by others"


@pytest.mark.parametrize("crowd, late", [(0.5, {"b": 1.0, "c": 1.5}), (1, {"b": 1.0, "c": 1.5}), (1.6, {"b": 0.625})])
def test_a_budget_is_for_free_cores_of_the_machine_of_the_file(monkeypatch, crowd, late):
    monkeypatch.setattr(Durations, "read", lambda: Durations({"a": 4.0, "b": 1.0}))
    recorder = Recorder(True, crowd)
    recorder.found = {"a": 8.0, "b": 2.0, "c": 99.0}  # of a machine half as fast; c is new
    recorder.own, recorder.budgets = {"a": 8.0, "b": 2.0, "c": 3.0}, {"a": 4.5, "b": 0.6, "c": 1.0}
    assert recorder.over_budget() == late


@pytest.mark.slow
def test_an_order_is_drawn_and_the_same_for_the_same_number(small_suite):
    tests = "import pytest\n@pytest.mark.parametrize('case', range(9))\ndef test_it(case): print('played', case)\n"
    orders = {seed: re.findall(r"played (\d)", small_suite(tests, "-s", "--shuffle", str(seed))[1]) for seed in (1, 2)}
    for seed, order in orders.items():  # another process draws it as this one does
        assert order == sorted(map(str, range(9)), key=lambda case: _draw(f"test_it.py::test_it[{case}]", seed))  # noqa: B023
    assert orders[1] != orders[2]


def grid(laws: dict) -> dict[str, float]:
    return {f"a.py::test_{law}[{case}]": s for law, cases in laws.items() for case, s in enumerate(cases)}


@given(LAWS, st.floats(0, 4000), st.integers(0, 99))
def test_every_law_is_played_once_and_what_fits_besides(laws, seconds, seed):
    grid_s = grid(laws)
    taken = choose(list(grid_s), Durations(grid_s), seconds, seed)
    assert {law_of(name) for name in taken} == {law_of(name) for name in grid_s}
    assert taken == choose(sorted(grid_s), Durations(grid_s), seconds, seed), "whatever the order of collection"
    once = choose(list(grid_s), Durations(grid_s), 0, seed)
    assert once <= taken and (taken == once or sum(grid_s[name] for name in taken) <= seconds)
    for law in {law_of(name) for name in once}:
        spent = [grid_s[name] for name in once if law_of(name) == law]
        assert len(spent) == 1 or sum(spent) <= AT_LEAST_S
    if sum(grid_s.values()) <= seconds:
        assert taken == grid_s.keys()


def test_of_a_turn_so_many_laws_are_played_whole_and_each_has_its_turn():
    def item(name: str, *turn):
        return SimpleNamespace(nodeid=name, get_closest_marker=lambda _: SimpleNamespace(args=turn) if turn else None)

    laws = [f"test_it.py::test_{letter}" for letter in "abcde"]
    items = [item(f"{law}[{case}]", "learns", 2) for law in laws for case in range(3)]
    items += [item("test_it.py::test_other"), item("test_it.py::test_alone", "draws", 2)]
    seen = set()
    for seed in range(40):
        waiting = wait_their_turn(items, seed)
        played = {one.nodeid for one in items} - waiting
        now = {name.partition("[")[0] for name in played}
        assert len(now) == 4 and len(played) == 2 * 3 + 2 and waiting == wait_their_turn(items, seed)
        seen |= now
    assert seen == {one.nodeid.partition("[")[0] for one in items}


def test_another_seed_draws_other_cases():
    grid_s = grid({law: [1.0] * 8 for law in range(40)})
    drawn = [choose(list(grid_s), Durations(grid_s), 80, seed) for seed in range(4)]
    assert all(len(one) == 80 for one in drawn)
    assert 10 < len(drawn[0] & drawn[1]) < 40, "a quarter is in both"
    assert len(set().union(*(choose(list(grid_s), Durations(grid_s), 80, seed) for seed in range(40)))) == len(grid_s)


@settings(max_examples=300)
@given(LAWS)
def test_durations_are_remembered_within_an_eighth(laws):
    grid_s = grid(laws)
    kept = Durations.measured(grid_s)
    for law, cases in laws.items():
        told = [kept.of(f"a.py::test_{law}[{case}]") for case in range(len(cases))]
        assert sum(told) == pytest.approx(sum(cases), rel=0.13)
        assert all(
            t == pytest.approx(s, rel=0.13)
            for t, s in zip(told, cases, strict=True)
            if s > max(1.0, 2 * sum(cases) / len(cases))
        )


def test_durations_are_of_tests_that_are_there():
    names = Durations.read().seconds
    assert not missing_laws(names, ROOT)
    gone = {"tests/test_proof.py::test_gone", "tests/gone.py::test_it"}
    assert missing_laws([*names, "tests/test_proof.py::test_gone[a]", "tests/gone.py::test_it"], ROOT) == gone


def test_what_is_quick_is_there():
    assert all((TESTS / one).exists() for one in QUICK)
    assert is_quick(TESTS / "cli/test_cli.py") and not is_quick(TESTS / "training/test_loops.py")


def test_the_marker_chooses_the_quick_tests():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-m",
        "quick",
        "tests/test_size.py",
        "tests/test_docs.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "tests/test_size.py::" in done.stdout and "tests/test_docs.py::" not in done.stdout, done.stdout


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
    calls = [call for call in (tmp_path / "calls").read_text().splitlines() if not re.search("-m (ruff|mypy)", call)]
    return status, calls, stderr


def test_ci_runs_every_law_on_one_python_and_the_quick_tests_on_the_oldest_and_the_newest(tmp_path):
    status, calls, stderr = prove(tmp_path, "quick", CI="true")
    assert status == 0, stderr
    assert calls[0] == f"references {tmp_path}/.venv"
    assert calls[1].startswith(f"{tmp_path}/.venv/bin/python REQUIRE=all -m pytest --dist loadfile ")
    assert " --minutes 7 --seed " in calls[1] and len(calls) == 4
    for call, version in zip(calls[2:], ("3.10", "3.13"), strict=True):
        assert f"/.venv-{version}/bin/python REQUIRE=s3,browser," in call and call.endswith(" -m quick")


def test_all_runs_all_everywhere_and_measures(tmp_path):
    status, calls, _ = prove(tmp_path, "full")
    runs = [call for call in calls if "-m pytest" in call]
    assert status == 0 and len(runs) == 4 and len(calls) == 8
    assert all("REQUIRE=all" in run and "--minutes" not in run and "-m quick" not in run for run in runs)
    assert ["--record" in run for run in runs] == [True, False, False, False]


@pytest.mark.parametrize("fail", ["--minutes", ".venv-3.10/", ".venv-3.13/"])
def test_one_failure_fails_it_and_the_rest_still_runs(tmp_path, fail):
    status, calls, stderr = prove(tmp_path, "quick", fail=fail)
    assert status == 1 and sum("-m pytest" in call for call in calls) == 3
    assert re.search(r"^error: failed: the tests on Python 3\.1\d;$", stderr.splitlines()[-1])


@pytest.mark.parametrize("fail", ["-m ruff check .", "-m ruff format --check .", "-m mypy"])
def test_style_and_types_are_part_of_it(tmp_path, fail):
    status, calls, stderr = prove(tmp_path, "quick", fail=fail)
    assert status == 1 and sum("-m pytest" in call for call in calls) == 3
    assert stderr.splitlines()[-1] == "error: failed: lint and types (make lint types);"


@pytest.mark.parametrize(("ci", "how", "status"), [("true", "1", 1), ("true", "2", 0), ("", "1", 0), ("", "2", 0)])
def test_a_missing_python_is_said_and_fails_ci_where_it_could_be_had(tmp_path, ci, how, status):
    found, calls, stderr = prove(tmp_path, "quick", absent="3.13", how=how, CI=ci)
    assert found == status and sum("-m pytest" in call for call in calls) == 2
    assert "NOT TESTED, since this machine has no such Python: 3.13" in stderr
