"""`ppldm compare`: what may differ, what may not, and when a difference is one."""

import copy
import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppldm.cli.main import run
from ppldm.evaluation.compare import compare_results, judge
from ppldm.evaluation.result import Result, read_result
from ppldm.utils.errors import ConfigError, DataError


def measured(value, margin=1.0, higher=False):
    return {"value": value, "low": value - margin, "high": value + margin, "details": {}, "higher_is_better": higher}


def result(**changes):
    settings = {
        "real": {"digest": "a" * 64, "count": 9},
        "generated": {"requests": "b" * 64, "count": 9, "size": "8x8"},
        "drawn": {"sampler": "ddim", "guidance_scale": 3.0},
        "versions": {"numpy": "1"},
        "features.pixels": {"digest": "", "convention": "c"},
        "metrics.frechet": {"estimator": "e", "seed": 0},
    }
    for name, value in changes.items():
        group, _, own = name.partition("__")
        settings[group.replace("_of_", ".")][own] = value
    return Result({"weights": {"fingerprint": "1"}}, settings, {"frechet": measured(5.0)})


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("real__digest", "c" * 64, "real.digest is aaaaaaaaaaaa… and cccccccccccc…"),
        ("generated__count", 8, "generated.count is 9 and 8"),
        ("drawn__sampler", None, "drawn.sampler is ddim and not known"),
        ("versions__numpy", "2", "versions.numpy is 1 and 2"),
        ("features_of_pixels__convention", "d", "features.pixels.convention is c and d"),
        ("metrics_of_frechet__seed", 1, "metrics.frechet.seed is 0 and 1"),
    ],
)
def test_settings_that_differ_are_refused_by_name_unless_allowed(name, value, words):
    full = name.replace("_of_", ".").replace("__", ".")
    with pytest.raises(ConfigError, match=f"cannot be compared: {words}. Evaluate again .* by --allow {full}"):
        compare_results(result(), result(**{name: value}))
    for allowed in (full, full.rpartition(".")[0], full.partition(".")[0]):
        assert compare_results(result(), result(**{name: value}), (allowed,))["accepted"] == [words]
    with pytest.raises(ConfigError, match="--allow drawn.smapler is not a setting of these results; did you mean"):
        compare_results(result(), result(), ("drawn.smapler",))


def test_what_was_evaluated_and_what_only_one_has_may_differ():
    other = result()
    other.of = {"weights": {"fingerprint": "2"}}
    other.metrics["fid"] = measured(1.0)
    other.settings["features.inception"] = other.settings["metrics.fid"] = {"digest": "x"}
    found = compare_results(result(), other)
    assert found["accepted"] == [] and found["only"] == {"a": [], "b": ["fid"]}
    assert list(found["metrics"]) == ["frechet"]
    other.metrics.pop("frechet")
    with pytest.raises(ConfigError, match="no metric in common"):
        compare_results(result(), other)


@given(st.floats(-5, 5), st.floats(-5, 5), st.sampled_from([True, False, None]))
def test_verdicts(a, b, higher):
    """Swapping the two swaps the verdict; overlapping intervals are no difference."""
    found, swapped = (judge(measured(x, 1, higher), measured(y, 1, higher))["verdict"] for x, y in ((a, b), (b, a)))
    assert (found == "no difference") == (max(a - 1, b - 1) <= min(a + 1, b + 1))
    if found == "no difference":
        assert swapped == found
        return
    assert {found[0], swapped[0]} == {"a", "b"} and found[1:] == swapped[1:]
    assert (found[0] == "a") == ((a > b) == (higher is not False))
    assert found.endswith("higher" if higher is None else "better")


def test_the_command(tmp_path, capsys):
    for name, value in (("a", 5.0), ("b", 9.0)):
        one = result()
        one.metrics["frechet"] = measured(value)
        (tmp_path / name).mkdir()
        (tmp_path / name / "g3.json").write_text(json.dumps(asdict(one)))
    run(["compare", str(tmp_path / "a"), str(tmp_path / "b" / "g3.json")])
    shown = capsys.readouterr().out
    assert "frechet  5 (4 to 6)" in shown and "9 (8 to 10)" in shown and "a is better" in shown
    run(["compare", str(tmp_path / "a"), str(tmp_path / "a"), "--json"])
    assert json.loads(capsys.readouterr().out)["metrics"]["frechet"]["verdict"] == "no difference"
    (tmp_path / "a" / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds 2 results \(g3.json, x.json\); name one"):
        run(["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    with pytest.raises(DataError, match="is not a result of"):
        read_result(tmp_path / "a" / "x.json")
    assert read_result(tmp_path / "a" / "g3.json").metrics == copy.deepcopy(result().metrics)
