"""Results say what they are of, and what is committed can be read and says so too."""

import argparse
import importlib
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def results():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("results")


@pytest.fixture
def parse(results):
    parser = argparse.ArgumentParser()
    results.add_result_flags(parser, "mine")
    return parser.parse_args


def test_results_go_where_they_are_asked_for(results, parse, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.save_results(parse([]), {"x": 1})
    assert not list(tmp_path.iterdir())
    results.save_results(parse(["--json", str(tmp_path / "new/a.json"), "--note", "busy"]), {"x": 1})
    found = json.loads((tmp_path / "new/a.json").read_text())
    assert found["results"] == {"x": 1} and found["note"] == "busy"
    assert parse(["--json"]).json == str(BENCHMARKS / "results/mine.json")


def test_a_result_says_what_it_is_of(results, tmp_path, monkeypatch):
    monkeypatch.setattr(results.sys, "argv", [str(BENCHMARKS / "mine.py"), "--rows", "3 4"])
    monkeypatch.setattr(results.os, "getloadavg", lambda: (0.4, 0, 0))
    parser = argparse.ArgumentParser()
    results.add_result_flags(parser, "mine")
    results.save_results(parser.parse_args(["--json", str(tmp_path / "a.json")]), [])
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["command"] == "python benchmarks/mine.py --rows '3 4'"
    assert found["machine"]["processor"] and found["machine"]["avx512"] in (True, False)
    assert found["machine"]["cores"] > 0 and not found["machine"]["busy"]
    assert found["date"].endswith("+00:00") and found["versions"]["numpy"] == np.__version__
    monkeypatch.setattr(results.os, "getloadavg", lambda: (0.6, 0, 0))
    busy = results.describe("", {"before": 0.6, "after": 0.6})
    assert busy["machine"]["busy"] and "load 0.6" in busy["note"]  # said without being asked for


def test_the_commit_says_whether_the_tree_has_changes(results, tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True,
                       capture_output=True)  # fmt: skip

    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert results.commit() is None
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    clean = results.commit()
    assert len(clean) == 40
    (tmp_path / "untracked").touch()
    assert results.commit() == clean
    (tmp_path / "a").write_text("2")
    assert results.commit() == clean + "+changes"


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda path: path.stem)
def test_what_is_committed_says_what_it_is_of(path):
    found = json.loads(path.read_text())
    assert {"date", "commit", "command", "note", "machine", "versions", "results"} == found.keys()
    script = path.stem.removesuffix("_before").partition("-")[0]  # measured beside an earlier commit; one of several
    of_commands = found["command"].startswith("ppldm ")  # trainings by presets, which need no script
    assert of_commands or ((BENCHMARKS / f"{script}.py").exists() and f"benchmarks/{script}.py" in found["command"])
    assert found["commit"] and found["results"] and found["machine"]["processor"]
    assert found["note"] or not found["machine"]["busy"], "a busy machine is said in the note"


def test_every_benchmark_writes_results():
    helpers = {"results", "commands", "loaders", "photographs", "bare_spark", "paired", "currency"}
    for path in BENCHMARKS.glob("*.py"):
        if path.stem not in helpers:
            text = path.read_text()
            assert f'add_result_flags(parser, "{path.stem}")' in text and "save_results(arguments, " in text, path
