"""What a run's folder tells of its rows is what its batches held; what it cannot tell is refused."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from command_line import parse_arguments
from PIL import Image
from toy import registered_toy
from toy_runs import train as train_toy

from ppldm.cli.main import run as run_command
from ppldm.data.filelist import write_filelist
from ppldm.data.order import StepSampler
from ppldm.prepare.convert.convert import convert_source
from ppldm.prepare.provenance.forget import forget_rows
from ppldm.prepare.provenance.forgotten import Forgotten
from ppldm.runs.past import opened_past
from ppldm.runs.read import open_run
from ppldm.runs.remake import remade
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import CheckpointError, ConfigError
from ppldm.utils.processes.ranks import World

NUM_ROWS, BAD = 30, {4, 5, 6, 17, 22}  # of these the caption that is asked for is missing


def make_data(folder: Path) -> Path:
    """30 rows of two shapes in three parts of `ppldm convert`, and a list of two filelists with weights."""
    draw = np.random.default_rng(3)
    (folder / "in").mkdir(parents=True)
    for row in range(NUM_ROWS):
        size = (32, 48) if row % 3 else (48, 32)
        Image.fromarray(draw.integers(0, 256, (*size, 3), np.uint8)).save(folder / f"in/{row:04}.png")
        (folder / f"in/{row:04}.txt").write_text("another")
        said = {} if row in BAD else {"said": f"picture {row}"}
        (folder / f"in/{row:04}.json").write_text(json.dumps({"url": f"http://a.org/{row}", **said}))
    convert_source(folder / "in", folder / "data", num_workers=1, rows_per_part=10)
    parts = sorted((folder / "data/parts").glob("part-*.gz"))
    write_filelist(folder / "a.filelist", [parts[0], parts[1]])
    write_filelist(folder / "b.filelist", [parts[2]])
    (folder / "both.list").write_text("a.filelist 1\nb.filelist 3\n")
    return folder / "data"


def train(tiny, folder: Path, output: Path, **changes) -> None:
    flags = tiny.flags(
        output, **{"file_list": folder / "both.list", "captions": "said:1", "buckets": "48x32,32x48",
        "save_steps": 2, "lr_scheduler_type": "constant", "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, **changes},
    )  # fmt: skip
    run_loop(prepare(*parse_arguments(flags, True)))


def batches(run: Path) -> dict[int, Counter]:
    """By row its (update, epoch, row asked for, timestep), from the batches as training makes them."""
    opened, found = open_run(run), {}
    with remade(opened, 1) as again:
        sampler = StepSampler(again.mix, again.global_batch_size, 2, World(), 0, opened.num_updates)
        per_update = len(sampler) // opened.num_updates
        for number, places in enumerate(sampler):
            batch = again.dataset.make_batch(places, sampler.strata(number))
            for (epoch, place), row, timestep in zip(places, batch["row_ids"], batch["timesteps"], strict=True):
                one = (number // per_update + 1, epoch, again.dataset.selection[place], int(timestep))
                found.setdefault(int(row), Counter())[one] += 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"stratified_timesteps": True, "timestep_sampling": "logit_normal"},
        {"prediction_type": "flow", "buckets": "off"},
    ],
)
def test_a_rows_past_is_that_of_the_batches_over_a_resumption(tiny, tmp_path, changes):
    data, run = make_data(tmp_path), tmp_path / "run"
    train(tiny, tmp_path, run, **changes, max_steps=6)
    train(tiny, tmp_path, run, **changes, max_steps=16)
    expected = batches(run)
    assert expected.keys().isdisjoint(BAD)
    num_stand_ins = 0
    with opened_past(run) as past:
        assert past.checkpoints == [2, 4, 6, 8, 10, 12, 14, 16] and past.stand_ins
        for row in range(NUM_ROWS):
            report = past.see([row])
            assert json.loads(json.dumps(report, allow_nan=False)) == report
            found = Counter(
                (one["update"], one["epoch"], one.get("in_place_of", row), one["timestep"]) for one in report["seen"]
            )
            assert found == expected.get(row, Counter()) and report["times"] == len(report["seen"])
            num_stand_ins += sum("in_place_of" in one for one in report["seen"])
            first = min((update for update, *_ in expected.get(row, ())), default=99)
            assert report["never_seen"] == [step for step in past.checkpoints if step < first]
            assert past.start_again([row])["never_seen"] == report["never_seen"]
    assert num_stand_ins
    # Rows by key, through the command and the parts.
    report = forget_rows(data, Forgotten(keys=frozenset(["0007", "0025"])), dry_run=True, runs=[str(run)])["runs"][0]
    first = min(update for row in (7, 25) for update, *_ in expected[row])
    never = [step for step in range(2, 17, 2) if step < first]
    assert (report["first_update"], report["never_seen"]) == (first, never)
    assert report["train_again_from"] == (f"checkpoint-{never[-1]}" if never else None)


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory) -> Path:
    """A folder with data/ and a run of 6 updates of 4 rows on them, with checkpoints after 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("past")
    make_data(folder)
    with registered_toy():
        train_toy(folder / "run", folder / "data/custom.filelist", max_steps=6, save_steps=2)
        yield folder


@pytest.fixture
def copy(toy_run, tmp_path) -> Path:
    """Data that may be changed, and a run on them by the path that they have here."""
    shutil.copytree(toy_run, tmp_path / "copy")
    for name in [*(tmp_path / "copy/run").glob("checkpoint-*/recipe.yaml")]:
        name.write_text(name.read_text().replace(str(toy_run), str(tmp_path / "copy")))
    return tmp_path / "copy"


@pytest.fixture(scope="module")
def updates(toy_run) -> list[list[int]]:
    """Of each row."""
    with opened_past(toy_run / "run") as past:
        return [[one["update"] for one in past.see([row])["seen"]] for row in range(NUM_ROWS)]


def test_the_commands_tell_it_of_keys_and_numbers(toy_run, updates, capsys):
    assert sorted(map(len, updates)) == [0] * 6 + [1] * 24
    row = updates.index([3])
    run, data = str(toy_run / "run"), str(toy_run / "data")
    capsys.readouterr()
    run_command(["lineage", data, "--key", f"{row:04}", "--runs", run, "--num-workers", "1", "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    run_command(["lineage", "--row", str(row), "--runs", run, "--json"])
    assert json.loads(capsys.readouterr().out) == found["runs"]
    (report,) = found["runs"]
    assert report["never_seen"] == [2] and report["seen"] == [{"update": 3, "row": row, "epoch": 0}]
    for above in (str(toy_run), f"{toy_run}/"):  # which holds the run
        run_command(["lineage", "--row", str(row), "--runs", above, "--json"])
        assert json.loads(capsys.readouterr().out) == found["runs"]
    run_command(["lineage", "--row", str(row), "--runs", run])
    assert "seen 1 time\n  update 3, epoch 0\n" in (text := capsys.readouterr().out)
    assert text.endswith("  checkpoints that have never seen it: checkpoint-2\n")
    for words in ([data], ["--row", "1"], [data, "--row", "1", "--runs", run], ["--row", "99", "--runs", run]):
        with pytest.raises(ConfigError):
            run_command(["lineage", *words])


def test_forget_says_from_where_to_train_again_before_it_changes_anything(copy, updates, capsys, tmp_path):
    row = updates.index([5])
    (tmp_path / "keys").write_text(f"{row:04}\n")
    words = ["forget", str(copy / "data"), "--key", str(tmp_path / "keys"), "--num-workers", "1", "--runs"]
    run_command([*words, str(copy / "run"), "--dry-run", "--json"])
    (dry,) = json.loads(capsys.readouterr().out)["runs"]
    words.append(f"{copy}/")  # which holds the run
    run_command([*words, "--json"])
    (report,) = json.loads(capsys.readouterr().out)["runs"]
    assert report == dry
    assert report["never_seen"] == [2, 4] and report["train_again_from"] == "checkpoint-4"
    other = next(other for other in range(NUM_ROWS) if other != row)
    (tmp_path / "keys").write_text(f"{other:04}\n")
    before = (copy / "data/manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="was trained on other data"):
        run_command(words)
    assert (copy / "data/manifest.json").read_bytes() == before


@pytest.mark.parametrize("runs", ["run", "."])
def test_an_interrupted_forget_still_tells_what_the_runs_had_seen(copy, runs):
    wanted, runs = Forgotten(keys=frozenset(["0001"])), [str(copy / runs)]
    expected = forget_rows(copy / "data", wanted, dry_run=True, runs=runs)["runs"]

    def die(report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forget_rows(copy / "data", wanted, tell=die, runs=runs)
    more = Forgotten(keys=frozenset(["0001", "0002"]))
    with pytest.raises(ConfigError, match="an interrupted `ppldm forget` has changed"):
        forget_rows(copy / "data", more, runs=runs)
    assert forget_rows(copy / "data", wanted, runs=runs)["runs"] == expected


def test_what_cannot_be_told_is_refused(copy, toy_run):
    with pytest.raises(CheckpointError, match="has no checkpoint"), opened_past(copy):
        pass
    other = copy / "other"
    (other / "in").mkdir(parents=True)
    shutil.copy(copy / "in/0000.png", other / "in")
    shutil.copy(copy / "in/0000.txt", other / "in")
    convert_source(other / "in", other / "data", num_workers=1)
    with opened_past(copy / "run") as past:
        part = sorted((other / "data/parts").glob("*.gz"))[0]
        with pytest.raises(CheckpointError, match="was trained on another part-00000.gz"):
            past.rows_of(part, [0])
        part = part.rename(part.with_name("another.gz"))
        assert past.rows_of(part, [0]) == []
        assert past.start_again([])["train_again_from"] == "checkpoint-6"
        assert past.rows_of(toy_run / "data/parts/part-00001.gz", [3]) == [13]
    manifest = copy / "run/checkpoint-4/manifest.json"
    changed = json.loads(manifest.read_text())
    changed["identity"]["seed"] = 8
    manifest.write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match="has changed seed on its way, from 5 to 8"), opened_past(copy / "run"):
        pass
