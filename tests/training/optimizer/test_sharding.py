"""Ranks that share out the optimizer's state train as ranks that each keep all of it, to the bit.

Two ranks do one run after another: those that the cases need, of which PPLDM_SEED draws some, and PPLDM_ALL plays all.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import poisoned
from sampling import ALL
from small_lpips import write_lpips

from ppldm.data.order import Mix
from ppldm.training.checkpoint import count_bytes
from ppldm.training.distributed.sharding import assign_owners, parameter_of
from ppldm.training.metrics import read_metrics
from ppldm.training.optimizer import is_sharded
from ppldm.training.prepare import prepare as prepare_run
from ppldm.training.train import run_loop

ROOT = Path(__file__).resolve().parents[3]
FILES = ("model_state.pdparams", "optimizer.pdopt", "ema_state.pdparams", "scheduler.pdparams")
SETTINGS = {
    "max_steps": 4, "save_steps": 2, "use_ema": True, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine",
    "unet_learning_rate": 2e-3, "decay_norms_and_biases": False, "check_ranks_every": 1,
}  # fmt: skip
SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}  # over two ranks, 8 samples
AT_ONCE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
NO_TEXT = dict.fromkeys(
    ("vae_name_or_path", "text_encoder_config_file", "unet_config_file", "tokenizer_name", "model_max_length",
     "num_inference_steps", "unet_learning_rate")
)  # fmt: skip
ADVERSARY = {
    "max_steps": 6, "adversarial_weight": 0.5, "adversarial_start": 2, "discriminator_channels": 4,
    "discriminator_layers": 2, "discriminator_learning_rate": 2e-4,
}  # fmt: skip
SHARES = {"sharding": "stage1"}
GRADIENTS = {"sharding": "stage2"}
PARAMETERS = {"sharding": "stage3"}
MUON = {"optimizer": "muon"}
SMALL = {"optimizer": "adamw8bit"}
SEED = int(os.environ.get("PPLDM_SEED", 1))


_DRAWN: set = set()


def drawn(*cases: tuple) -> list[tuple]:
    """All, or of those that need the fewest runs besides what is drawn already one by the seed."""
    if ALL:
        return [*cases]
    one = max(random.Random(SEED).sample(cases, len(cases)), key=lambda case: len(_DRAWN & {*case}))
    _DRAWN.update(one)
    return [one]


PAIRS = drawn(("loop whole", "loop shares"), ("trainer whole", "trainer shares"), ("loop whole", "fused shares"),
              ("loop whole", "loop gradients"), ("trainer whole", "trainer gradients"),
              ("at once whole", "at once gradients"), ("muon whole", "muon shares"),
              ("muon whole", "muon gradients"), ("loop whole", "loop parameters"),
              ("trainer whole", "trainer parameters"), ("at once whole", "at once parameters"),
              ("muon whole", "muon parameters"), ("small whole", "small shares"),
              ("small whole", "small gradients"), ("small whole", "small parameters"))  # fmt: skip
TWO_NETWORKS = drawn(("autoencoder whole", "autoencoder shares"), ("autoencoder whole", "autoencoder gradients"),
                     ("autoencoder whole", "autoencoder parameters"))  # fmt: skip
BEGINNINGS = drawn(("before it began", 2), ("after it began", 4))
CHANGES = drawn(("loop whole", "whole then shares"), ("trainer whole", "shares then whole"),
                ("loop whole", "whole then gradients"), ("trainer whole", "gradients then whole"),
                ("loop whole", "whole then parameters"), ("trainer whole", "parameters then whole"),
                ("muon whole", "muon whole then shares"), ("small whole", "small shares then whole"))  # fmt: skip
RANKS = drawn(("one then shares", "loop shares"), ("one then gradients", "loop gradients"),
              ("one then parameters", "loop parameters"))  # fmt: skip
OWNERS = drawn(("loop gradients", "loop whole"), ("trainer gradients", "trainer whole"),
               ("at once gradients", "at once whole"), ("whole then gradients", "loop whole"),
               ("loop parameters", "loop whole"), ("at once parameters", "at once whole"))  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**9), max_size=60), st.integers(1, 65))
def test_shares_are_even_and_the_same_everywhere(sizes, num_ranks):
    owners = assign_owners(sizes, num_ranks)
    assert len(owners) == len(sizes) and owners == assign_owners(tuple(sizes), num_ranks)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(num_ranks)]
    assert sum(loads) == sum(sizes)  # every owner is a rank
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_keys_of_the_state_name_their_parameter():
    assert parameter_of("linear_0.w_0_moment1_0") == "linear_0.w_0" == parameter_of("linear_0.w_0_beta2_pow_acc_0")
    assert parameter_of("conv2d_3.b_0_fp32_master_0_moment2_0") == "conv2d_3.b_0"
    assert parameter_of("conv2d_3.w_0_fp32_master_0_absmax1_0") == "conv2d_3.w_0"
    assert parameter_of("LR_Scheduler") is None


def test_one_rank_has_nothing_to_share_and_is_told(tiny, tmp_path, capfd):
    run = prepare(tiny.flags(tmp_path, **SHARES))
    assert not is_sharded(run.state.optimizer)
    assert "--sharding stage1 does nothing here: there is one rank" in capfd.readouterr().err


def plans(tiny, top: Path) -> dict[str, list]:
    """[name, loop or trainer, flags, family] of each run by its name, those before that others go on from."""
    found = {}

    def plan(name, kind, family="ldm", **changes):
        found[name] = [name, kind, tiny.flags(top / name, **{**SETTINGS, **SPLIT, **changes}), family]

    def plan_autoencoder(name, kind, **changes):
        losses = {"perceptual_weight": 1, "lpips_weights": write_lpips(top), **ADVERSARY}
        plan(name, kind, "autoencoder", **NO_TEXT, vae_config_file=tiny.config("vae"), **losses, **changes)

    def after(name):
        return {"resume_from_checkpoint": top / name / "checkpoint-2"}

    plan("loop whole", "loop", recompute=True)
    plan("loop shares", "loop", recompute=True, **SHARES)
    plan("fused shares", "loop", recompute=True, fused_adamw=True, **SHARES)  # on a CPU its bits are AdamW's
    plan("whole then shares", "loop", recompute=True, **SHARES, **after("loop whole"))
    plan("trainer whole", "trainer")
    plan("trainer shares", "trainer", **SHARES)
    plan("shares then whole", "trainer", **after("trainer shares"))
    plan("one then shares", "loop", **SHARES, **after("one"))
    plan("loop gradients", "loop", recompute=True, **GRADIENTS)
    plan("whole then gradients", "loop", recompute=True, **GRADIENTS, **after("loop whole"))
    plan("trainer gradients", "trainer", **GRADIENTS)
    plan("gradients then whole", "trainer", **after("trainer gradients"))
    plan("one then gradients", "loop", **GRADIENTS, **after("one"))
    plan("at once whole", "loop", **AT_ONCE)
    plan("at once gradients", "loop", **AT_ONCE, **GRADIENTS)
    plan("loop parameters", "loop", recompute=True, **PARAMETERS)
    plan("whole then parameters", "loop", recompute=True, **PARAMETERS, **after("loop whole"))
    plan("trainer parameters", "trainer", **PARAMETERS)
    plan("parameters then whole", "trainer", **after("trainer parameters"))
    plan("one then parameters", "loop", **PARAMETERS, **after("one"))
    plan("at once parameters", "loop", **AT_ONCE, **PARAMETERS)
    plan("six parameters", "loop", **PARAMETERS, per_device_train_batch_size=1, gradient_accumulation_steps=3)
    plan("muon whole", "loop", **MUON)
    plan("muon parameters", "loop", **MUON, **PARAMETERS)
    plan("muon shares", "loop", **MUON, **SHARES)
    plan("muon gradients", "trainer", **MUON, **GRADIENTS)
    plan("muon whole then shares", "trainer", **MUON, **SHARES, **after("muon whole"))
    plan("small whole", "loop", **SMALL)
    plan("small parameters", "loop", **SMALL, **PARAMETERS)
    plan("small shares", "loop", **SMALL, **SHARES)
    plan("small gradients", "trainer", **SMALL, **GRADIENTS)
    plan("small shares then whole", "trainer", **SMALL, **after("small shares"))
    fused, whole = {"fused_adamw": True}, top / "autoencoder whole"
    plan_autoencoder("autoencoder whole", "loop")
    plan_autoencoder("autoencoder shares", "loop", **fused, **SHARES)
    plan_autoencoder("autoencoder gradients", "trainer", **fused, **GRADIENTS)
    plan_autoencoder("autoencoder parameters", "loop", **PARAMETERS)
    plan_autoencoder("before it began", "loop", **fused, **GRADIENTS, **after("autoencoder whole"))
    plan_autoencoder("after it began", "trainer", **fused, **SHARES, resume_from_checkpoint=whole / "checkpoint-4")
    return found


def needed(items, plans: dict[str, list]) -> list:
    """The plans of the runs that cases among `items` look at, and of those that these go on from."""
    names = set().union(*(item.callspec.params.values() for item in items if hasattr(item, "callspec")))
    names = names & plans.keys() or {"loop shares"}
    for name in reversed(plans):
        flags = plans[name][2]
        if name in names and "--resume_from_checkpoint" in flags:
            names.add(Path(flags[flags.index("--resume_from_checkpoint") + 1]).parent.name)
    return [plan for name, plan in plans.items() if name in names]


@pytest.fixture(scope="module")
def runs(request, tiny, tmp_path_factory):
    """Folders by name, of runs of two ranks and one of one, and the facts of ranks 0 and 1."""
    top = tmp_path_factory.mktemp("shares")
    bad_row = rows_of(3)[5]
    with poisoned([bad_row]):
        run_loop(prepare(tiny.flags(top / "one", **SETTINGS, per_device_train_batch_size=8)))
    played = [item for item in request.session.items if item.path == request.path]
    return top, launch(top, 2, needed(played, plans(tiny, top)), bad_row), bad_row


def launch(folder: Path, num_ranks: int, plans: list, bad_row: int) -> list[dict]:
    """The facts of so many ranks that do these runs."""
    (folder / "plans.json").write_text(json.dumps(plans))
    result = subprocess.run(
        [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(num_ranks),
         "--log_dir", folder / "log", ROOT / "tests/helpers/shares.py", str(bad_row), folder / "facts",
         folder / "plans.json"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return [json.loads((folder / f"facts-{rank}").read_text()) for rank in range(num_ranks)]


@pytest.mark.slow
@pytest.mark.parametrize("whole, shares", PAIRS)
def test_shares_change_no_bit(runs, whole, shares):
    top, _, _ = runs
    assert losses(top / whole) == losses(top / shares)
    assert [loss is None for loss in losses(top / shares)] == [False, False, True, False]
    for step in (2, 4):
        assert_same_checkpoint(top / whole, top / shares, step)


@pytest.mark.turn("a run with shares goes on in another way", 1)
@pytest.mark.slow
@pytest.mark.parametrize("name, shares", TWO_NETWORKS)
def test_two_networks_of_which_one_begins_later_share_as_well(runs, name, shares):
    """The whole loss of an autoencoder, by the fused update, whose discriminator learns from update 3 on."""
    top, _, _ = runs
    whole = top / name
    assert losses(whole) == losses(top / shares)
    for step in (2, 4, 6):
        assert_same_checkpoint(whole, top / shares, step)
    states = [load(whole / f"checkpoint-{step}/optimizer.pdopt").keys() for step in (2, 4)]
    begun = states[1] - states[0]
    assert begun and all(key.startswith("discriminator_") for key in begun)


@pytest.mark.turn("a run with shares goes on in another way", 1)
@pytest.mark.slow
@pytest.mark.parametrize("changed, start", BEGINNINGS)
def test_a_run_of_two_networks_goes_on_with_shares(runs, changed, start):
    top, _, _ = runs
    assert losses(top / "autoencoder whole")[start:] == losses(top / changed)
    assert_same_checkpoint(top / "autoencoder whole", top / changed, 6)


@pytest.mark.turn("a run with shares goes on in another way", 1)
@pytest.mark.slow
@pytest.mark.parametrize("straight, changed", CHANGES)
def test_a_run_goes_on_with_shares_or_without(runs, straight, changed):
    top, _, _ = runs
    assert losses(top / straight)[2:] == losses(top / changed)
    assert_same_checkpoint(top / straight, top / changed, 4)


@pytest.mark.turn("a run with shares goes on in another way", 1)
@pytest.mark.slow
@pytest.mark.parametrize("more, fewer", RANKS)
def test_the_number_of_ranks_may_change(tiny, runs, tmp_path, more, fewer):
    top, _, bad_row = runs
    settings = {**SETTINGS, **GRADIENTS, "per_device_train_batch_size": 8}
    with poisoned([bad_row]):
        run_loop(prepare(tiny.flags(tmp_path / "one", **settings, resume_from_checkpoint=top / fewer / "checkpoint-2")))
    straight = losses(top / "one")[2:]
    for folder in (tmp_path / "one", top / more):
        found = losses(folder)
        assert found[0] is None is straight[0]
        np.testing.assert_allclose(found[1:], straight[1:], rtol=1e-5)


@pytest.mark.turn("a run with shares goes on in another way", 1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["six parameters"])
def test_three_ranks_go_on_from_two_as_stage_2_does(tiny, runs, tmp_path, name):
    settings = {**SETTINGS, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    settings["resume_from_checkpoint"] = runs[0] / name / "checkpoint-2"
    stages = {"two": GRADIENTS, "three": PARAMETERS}
    made = [[one, "loop", tiny.flags(tmp_path / one, **settings, **how), "ldm"] for one, how in stages.items()]
    facts = [fact["counted"]["three"] for fact in launch(tmp_path, 3, made, runs[2])]
    assert_same_checkpoint(tmp_path / "two", tmp_path / "three", 4)
    straight, found = losses(runs[0] / name)[2:], losses(tmp_path / "three")
    assert found == losses(tmp_path / "two") and found[1] is None is straight[1]
    np.testing.assert_allclose(found[0], straight[0], rtol=1e-5)
    assert sum(fact["settled"][1] for fact in facts) == facts[0]["all"]
    assert max(fact["settled"][1] for fact in facts) < 0.35 * facts[0]["all"]


@pytest.mark.slow
@pytest.mark.parametrize("whole, shares", PAIRS)
def test_each_rank_keeps_half(runs, whole, shares):
    top, metadata, _ = runs
    in_all = count_bytes(load(top / shares / "checkpoint-4" / "optimizer.pdopt"))
    assert [fact["held"][whole] for fact in metadata] == [in_all, in_all]
    held = [fact["held"][shares] for fact in metadata]
    share = 0.52 if "small" in whole else 0.51  # owners are chosen by numbers, of which some take 8 bytes, others 2
    assert sum(held) == in_all and max(held) < share * in_all
    stage = {"shares": "stage1", "gradients": "stage2", "parameters": "stage3"}[shares.split()[-1]]
    logs = [(top / "log" / f"workerlog.{rank}").read_text(errors="replace") for rank in (0, 1)]
    assert all(f"--sharding {stage}: this rank keeps 0.000 GB of the optimizer's 0.00" in log for log in logs)


@pytest.mark.turn("gradients and parameters lie on their owner", 1)
@pytest.mark.slow
@pytest.mark.parametrize("name, other", OWNERS)
def test_gradients_end_whole_on_their_owner_and_nowhere_else(runs, name, other):
    metadata = [fact["counted"][name] for fact in runs[1]]
    in_all = metadata[0]["all"]
    assert sum(fact["settled"][0] for fact in metadata) == in_all
    assert max(fact["settled"][0] for fact in metadata) < 0.51 * in_all
    if "at once" in name:  # with accumulation, the sum of a rank's micro-batches is nowhere else
        assert max(fact["peak"][0] for fact in metadata) < 0.75 * in_all
    assert [fact["counted"][other]["settled"] for fact in runs[1]] == [[in_all, in_all]] * 2


@pytest.mark.turn("gradients and parameters lie on their owner", 1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["loop parameters", "at once parameters"])
def test_a_rank_holds_its_parameters_and_what_is_computed(runs, name):
    """And no more than is reckoned: a share, and at a time a quarter of one, or the largest layer."""
    metadata = [fact["counted"][name] for fact in runs[1]]
    in_all = metadata[0]["all"]
    assert sum(fact["settled"][1] for fact in metadata) == in_all
    for fact in metadata:
        assert in_all / 2 < fact["peak"][1] <= fact["settled"][1] + in_all / 2 / 4
        assert fact["settled"][1] < 0.51 * in_all


@pytest.mark.slow
def test_float32_masters_are_shared_out_and_gathered(runs):
    _, metadata, _ = runs
    own = [set(fact["masters"]["own"]) for fact in metadata]
    assert len(own[0] | own[1]) == 3 and not own[0] & own[1] and all(own)
    for fact in metadata:
        assert fact["masters"]["gathered"] and fact["masters"]["averages"] and fact["masters"]["restored"]
        assert fact["masters"]["all"] == dict.fromkeys(own[0] | own[1], True)


def assert_same_checkpoint(first: Path, second: Path, step: int):
    for name in FILES:
        assert_equal_to_the_bit(*(load(folder / f"checkpoint-{step}" / name) for folder in (first, second)))


def assert_equal_to_the_bit(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        if isinstance(value, dict):
            assert_equal_to_the_bit(value, second[name])
        else:
            assert np.asarray(value).tobytes() == np.asarray(second[name]).tobytes(), name


def load(path: Path) -> dict:
    return paddle.load(str(path))


def losses(folder: Path) -> list:
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]


def rows_of(step: int) -> list[int]:
    """The rows that update `step`, counted from 1, takes of the 40, in order."""
    return Mix([40], None, 5).samples((step - 1) * 8, step * 8)[1].tolist()


def prepare(flags: list):
    return prepare_run(*parse_arguments([*flags, "--do_train"], loop=True))
