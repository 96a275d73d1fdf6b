"""What two ranks do together, at the size of a few numbers: agree, gather, compare, reduce, update, fail."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ports import free_port

from ppldm.training.distributed import rank_checks as ranks_module
from ppldm.training.run import TrainingRun

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory) -> list[dict]:
    """What each of two ranks found."""
    path = tmp_path_factory.mktemp("ranks") / "facts"
    environ = {
        **os.environ, "PADDLE_TRAINERS_NUM": "2", "PADDLE_MASTER": f"127.0.0.1:{free_port()}",
        "PADDLE_DISTRI_BACKEND": "gloo", "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:1,127.0.0.1:2", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, ROOT / "tests/helpers/two_ranks.py", path],
            env={**environ, "PADDLE_TRAINER_ID": str(rank), "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{rank + 1}"},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        texts = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    return [json.loads(Path(f"{path}-{rank}").read_text()) for rank in (0, 1)]


def test_ranks_agree_on_means_and_on_any_wish_to_stop(metadata):
    for of_rank in metadata:
        assert of_rank["agreed"] == [1.5, 4.0, True, True, 5]
        assert of_rank["ordered"] == [6, True, 0]  # by the main rank, and known to both
        assert of_rank["not agreed"] == [False, False]
        assert of_rank["gathered"] == [{"rank": 0}, {"rank": 1}]


def test_a_gradient_is_whole_on_its_owner_and_nowhere_else(metadata):
    one, other = (of_rank["gradients"] for of_rank in metadata)
    assert all(a != b for a, b in zip(one["owned"], other["owned"], strict=True))
    for gradients in (one, other):
        for whole, shared in ((gradients["whole"], gradients["shared"]), gradients["clipped"]):
            assert shared == [bits if owned else None for bits, owned in zip(whole, gradients["owned"], strict=True)]
        before, _, whole = gradients["bytes"]
        assert before == whole  # accumulated so far, and not reduced yet
        assert gradients["norms"][0] == pytest.approx(gradients["norms"][1], rel=1e-6)
    assert one["bytes"][1] + other["bytes"][1] == one["bytes"][2]
    assert None in one["whole"] and any(map(bool, one["whole"]))  # an idle layer has none


def test_an_update_has_the_same_bits_with_shared_gradients(metadata):
    one, other = (of_rank["update"] for of_rank in metadata)
    assert json.dumps(one) == json.dumps(other)
    assert one["whole"].pop("left") == 0 == one["shared"].pop("left")
    assert json.dumps(one["whole"]) == json.dumps(one["shared"])
    assert [applied for *_, applied in one["whole"]["updates"]] == [True, False, True]


@pytest.mark.parametrize("model", ["layers", "critic"])
def test_an_update_has_the_same_bits_with_shared_parameters(metadata, model):
    one, other = (of_rank["parameters"][model] for of_rank in metadata)
    for found in (one, other):
        assert json.dumps(found["gradients"]["updates"]) == json.dumps(found["parameters"]["updates"])
        for name in ("weights", "restored"):  # which all ranks have inside of `whole`, and again after its end
            assert found["gradients"]["weights"] == found["parameters"][name]
    average = one["gradients"]["average"]
    assert average and None not in average and one["parameters"]["average"] == average
    assert not other["parameters"]["average"]  # whole on the main rank alone


@pytest.mark.parametrize("model", ["layers", "critic"])
def test_a_parameter_is_on_its_owner_between_updates_and_everywhere_while_it_is_needed(metadata, model):
    one, other = (of_rank["parameters"][model]["parameters"] for of_rank in metadata)
    for mine, others in zip(one["here"], other["here"], strict=True):
        assert sorted(mine + others) == sorted({*mine, *others}) == one["shared"] and mine and others
    for found in (one, other):
        assert found["idle"] and not set(found["idle"]) & set(found["shared"])
        assert all(found["at once"]) and max(found["at once"]) < len(found["shared"])


def test_the_norm_of_two_ranks_is_that_of_one_with_both_batches(metadata):
    import paddle
    from two_ranks import Layers, batches

    for step in (0,):
        model, loss = Layers(), 0.0
        for batch in (*batches(0, step), *batches(1, step)):
            part = model(batch["pixels"]).value / 4
            part.backward()
            loss += float(part)
        norm = float(paddle.add_n([(p.grad**2).sum() for p in model.parameters() if p.grad is not None]).sqrt())
        for of_rank in metadata:
            for kind in ("whole", "shared"):
                np.testing.assert_allclose(of_rank["update"][kind]["updates"][step][:2], [loss, norm], rtol=1e-5)


def test_all_ranks_say_whose_rows_and_which_parameter(metadata):
    one, other = (of_rank["errors"] for of_rank in metadata)
    assert one == other
    assert "; rows of rank 1: [100, 101]; 1 such updates in a row;" in one["bad row"]
    assert one["differs"].startswith("after update 7, other on rank 1 differs from the others' of 2;")


@pytest.mark.parametrize(
    "start_step, every, compared",
    [(0, 4, [1, 4, 8]), (3, 4, [4, 8]), (5, 4, [6, 8]), (5, 500, [6]), (0, 0, []), (0, 1, [*range(1, 10)])],
)
def test_ranks_are_compared_after_the_first_update_of_a_start(monkeypatch, start_step, every, compared):
    steps = []
    monkeypatch.setattr(ranks_module, "check_ranks", lambda parameters, step, world: steps.append(step))
    model = SimpleNamespace(named_parameters=lambda: [])
    run = SimpleNamespace(arguments=SimpleNamespace(check_ranks_every=every), start_step=start_step, world=None,
                          state=SimpleNamespace(model=model, shares=None))  # fmt: skip
    for step in range(start_step + 1, 10):
        TrainingRun.check_ranks(run, step)
    assert steps == compared
