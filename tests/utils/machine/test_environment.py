import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ppldm.utils.errors import EnvironmentProblem
from ppldm.utils.machine import environment, nvidia_smi
from ppldm.utils.machine.environment import KNOWN_BAD, PINS, check
from ppldm.utils.machine.nvidia_smi import Gpu

GOOD = {
    "pip": "26.3",
    "setuptools": "79.0.1",
    "numpy": "2.2.6",
    "protobuf": "6.33.6",
    "pillow": "12.3.0",
    "pandas": "2.3.3",
    "pyarrow": "21.0.0",
    "paddlepaddle": "3.3.1",
    "aistudio-sdk": "0.2.6",
    "huggingface-hub": "0.25.2",
    "datasets": "3.1.0",
    "tokenizers": "0.21.4",
    "visualdl": "2.5.3",
    "paddlenlp": "3.0.0b4",
    "ppdiffusers": "0.29.0",
    "fastcore": "2.2.39",
}
GPU_ONLY = {name: version for name, version in GOOD.items() if name != "paddlepaddle"} | {"paddlepaddle-gpu": "3.3.1"}


def test_the_stack_that_works_has_no_problem():
    assert check(GOOD) == []
    assert check(GPU_ONLY) == []
    assert check({**GOOD, "opencv-python": "4.11.0.86", "pyspark": "4.1.4"}) == []
    assert check({**GOOD, "numpy": "1.26.4", "huggingface-hub": "2.4.0", "aistudio-sdk": "0.3.9"}) == []


@pytest.mark.parametrize("name", GOOD)
def test_each_missing_package_is_named_once_with_its_fix(name):
    problems = check({other: version for other, version in GOOD.items() if other != name})
    assert [problem.name for problem in problems] == [name]
    assert "is missing" in str(problems[0])
    assert problems[0].fix.startswith(f"{environment.PYTHON} -m ")


@pytest.mark.parametrize(
    ("package", "versions", "word"),
    [
        ("protobuf", ["7.0.0", "7.37.0rc1", "3.19.6"], "protobuf"),
        ("pandas", ["3.0.0", "3.1.1"], "numpy 2"),
        ("pyarrow", ["26.0.0"], "numpy 2"),
        ("datasets", ["2.19.2", "5.2.0"], "datasets"),
        ("paddlenlp", ["2.8.1", "3.0.0b3"], "Paddle 2"),
        ("paddlepaddle", ["2.6.2"], "Paddle 3"),
        ("fastcore", ["1.7.29"], "2.2"),
    ],
)
def test_known_bad_versions_are_named_with_reason_and_fix(package, versions, word):
    for version in versions:
        (problem,) = check({**GOOD, package: version})
        assert (problem.name, problem.value) == (package, version)
        assert word in str(problem) and "\n" not in str(problem)
        pinned = Requirement(problem.fix.partition("install ")[2].strip("'"))
        assert pinned.name == package and not pinned.specifier.contains(version, prereleases=True)


def test_gpu_builds():
    (problem,) = check({**GPU_ONLY, "paddlepaddle-gpu": "2.6.2"})
    assert problem.name == "paddlepaddle-gpu" and "paddlepaddle-gpu==3.3.1" in problem.fix
    (problem,) = check({**GPU_ONLY, "paddlepaddle": "3.3.1"})
    assert "installed over it" in problem.reason


def test_the_fix_of_a_gpu_build_fits_driver_and_card(monkeypatch):
    for driver, card, word in [("550.54.14", 12.0, "/cu129/"), ("470.1", 7.0, "/cu118/"), ("390.1", 6.1, "too old")]:
        gpus = [Gpu("A", driver, card)]
        monkeypatch.setattr(nvidia_smi, "list_gpus", gpus.copy)
        assert word in environment.fix_command("paddlepaddle-gpu")


def test_every_pin_is_free_of_known_bad_versions():
    grid = [f"{major}.{minor}.{patch}" for major in range(8) for minor in range(40) for patch in (0, 2, 5)]
    for package, versions, _ in KNOWN_BAD:
        pin = SpecifierSet(PINS["paddlepaddle" if package == "paddlepaddle-gpu" else package])
        bad = SpecifierSet(versions)
        assert not [version for version in grid if version in pin and version in bad], (package, versions)


@pytest.mark.parametrize(("version", "fine"), [((3, 9), 0), ((3, 10), 1), ((3, 11), 1), ((3, 13), 1), ((3, 14), 0)])
def test_python_versions(version, fine):
    assert (environment.check_python(version) is None) == fine


def test_require_raises_one_line_with_the_first_problem(monkeypatch):
    monkeypatch.setattr(environment, "installed_versions", lambda: {**GOOD, "pandas": "3.0.0", "datasets": "5.2.0"})
    monkeypatch.setattr(environment, "check_libgomp", lambda: None)
    with pytest.raises(EnvironmentProblem, match=r"^pandas 3\.0\.0: .*fix: .* -m pip install 'pandas>=2\.2,<3'"):
        environment.require_working_environment()
    monkeypatch.setattr(environment, "installed_versions", lambda: GOOD)
    environment.require_working_environment()


def test_rows_of_the_machine():
    assert environment.shared_memory_row(2**31).status == "ok"
    assert environment.shared_memory_row(64 * 2**20).status == "note"
    assert environment.shared_memory_row(None).status == "note"
    gpus = [Gpu("A", "550.54.14", 8.0)]
    assert environment.gpu_row([], False).status == environment.gpu_row(gpus, True).status == "ok"
    assert environment.gpu_row(gpus, False).status == environment.gpu_row([], True).status == "note"
    assert [environment.java_row(v, True).status for v in ("17.0.1", "21", "1.8.0_4", None)] == ["ok"] * 2 + [
        "note"
    ] * 2
    assert environment.java_row(None, False).status == "ok"
    assert environment.libgl_row(False, True).status == "note"
    assert f"--force-reinstall --no-deps {environment.HEADLESS_OPENCV}" in environment.libgl_row(False, True).fix
    root = Path(__file__).parents[3]
    assert environment.HEADLESS_OPENCV in (root / "requirements/lock.txt").read_text().splitlines()
    for page in ("installation", "zh/installation", "faq", "zh/faq"):
        assert f"--no-deps {environment.HEADLESS_OPENCV}" in (root / f"docs/{page}.md").read_text(), page
    assert environment.libgl_row(False, False).status == environment.libgl_row(True, True).status == "ok"


def test_table_shows_problems_with_their_fix(monkeypatch, capsys):
    monkeypatch.setattr(environment, "installed_versions", lambda: {**GOOD, "protobuf": "7.36.2"})
    with pytest.raises(EnvironmentProblem, match="protobuf 7.36.2"):
        environment.env()
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.split()[:2] == ["problem", "protobuf"])
    assert lines[at + 2].split()[0] == "fix:"
    assert sum("protobuf " in line and "7.36.2" in line for line in lines) == 1


@pytest.mark.cold
def test_command_line_prints_json_and_imports_no_package():
    program = (
        "import sys\n"
        "from ppldm.cli.main import run\n"
        "run(['env', '--json'])\n"
        "assert not {'numpy', 'paddle', 'paddlenlp', 'ppdiffusers', 'google.protobuf'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    table = json.loads(done.stdout)
    assert table["ok"] is True
    assert {"Python", "cores", "memory", "/dev/shm", "Java", "libGL.so.1", *PINS} <= {
        row["name"] for row in table["rows"]
    }
