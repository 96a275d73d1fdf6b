"""`ppldm compare`: what may differ, what may not, and when a difference is one."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppldm.cli.main import run
from ppldm.evaluation.compare import compare_results, judge
from ppldm.evaluation.measure import Result, read_result
from ppldm.evaluation.metrics.base import METRICS
from ppldm.evaluation.metrics.bootstrap import Measured
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


@given(st.integers(0, 99), st.sampled_from([True, False]))
def test_pictures_that_go_together_are_compared_one_by_one(seed, higher):
    """Where intervals overlap by far, and b is a little more of each picture."""
    rng, terms = np.random.default_rng(seed), {}
    terms["a"] = [10 * rng.normal(size=80), 10 * rng.normal(size=60)]
    terms["b"] = [terms["a"][0] + 1 + rng.normal(size=80), terms["a"][1]]
    a, b = (paired_result(own, higher) for own in terms.values())
    found, swapped = compare_results(a, b)["metrics"]["frechet"], compare_results(b, a)["metrics"]["frechet"]
    assert found["rule"] == "paired" and found["difference"]["value"] == -swapped["difference"]["value"]
    assert found["difference"]["low"] == pytest.approx(-swapped["difference"]["high"], rel=0.05, abs=0.02)
    assert found["verdict"] == f"{'b' if higher else 'a'} is better"
    assert compare_results(a, a)["metrics"]["frechet"]["verdict"] == "no difference"
    for other in (paired_result(terms["b"], higher, requests="c"), paired_result([], higher)):
        apart = compare_results(a, other, ("generated.requests",))["metrics"]["frechet"]
        assert (apart["rule"], apart["verdict"]) == ("intervals", "no difference") and "difference" not in apart


def paired_result(terms, higher, requests="b" * 64):
    one = result(generated__requests=requests)
    value = sum(own.mean() for own in terms) if terms else 0.0
    one.metrics["frechet"], one.own_terms["frechet"] = measured(value, 20, higher), terms
    return one


def test_terms_lie_beside_the_result_and_belong_to_it(tmp_path):
    one = result()
    one.add("frechet", METRICS["frechet"], Measured(1.0, 0.0, 2.0, {}, (np.arange(3), np.ones(12))))
    one.write(tmp_path / "g3.json", keep_terms=True)
    found = read_result(tmp_path / "g3.json")
    assert [own.tolist() for own in found.own_terms["frechet"]] == [[0, 1, 2], [1] * 12]
    before = (tmp_path / "g3.terms.npz").read_bytes()
    one.write(tmp_path / "g3.json", keep_terms=True)
    assert (tmp_path / "g3.terms.npz").read_bytes() == before
    for damaged in (before[:90], b"", None):
        if damaged is None:
            (tmp_path / "g3.terms.npz").unlink()
        else:
            (tmp_path / "g3.terms.npz").write_bytes(damaged)
        assert read_result(tmp_path / "g3.json").own_terms == {}
    one.own_terms["frechet"][0] += 1
    one.write(tmp_path / "other.json", keep_terms=True)
    (tmp_path / "other.terms.npz").rename(tmp_path / "g3.terms.npz")
    assert read_result(tmp_path / "g3.json").own_terms == {}


def test_the_command(tmp_path, capsys):
    for name, value in (("a", 5.0), ("b", 9.0)):
        one = result()
        one.metrics["frechet"] = measured(value)
        (tmp_path / name).mkdir()
        (tmp_path / name / "g3.json").write_text(json.dumps(one.as_json()))
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
