"""What a user asks of a run by files in RUN/control/ is done, once, and leaves no trace in the training."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from PIL import Image

from ppldm.training import run_folder as module
from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare
from ppldm.training.report import Reporter
from ppldm.training.run_folder import Order
from ppldm.training.train import Control, run_loop
from ppldm.training.trainer import run_trainer
from ppldm.training.validation import current_prompts
from ppldm.utils.entry import entry
from ppldm.utils.errors import Interrupted
from ppldm.utils.pictures import read_cells
from ppldm.utils.processes.ranks import World

ROOT = Path(__file__).resolve().parents[3]
MAX_STEPS = 7
# After these updates, so that the next one finds the files: by name, with what they hold.
ASKED = {
    1: {"sample_now": ""},
    2: {"prompts.txt": "a <b>red</b> heart\n一颗红心\n", "sample_now": "", "save_now": ""},
    3: {"save_now": "", "later": "", "prompts.txt": "picture 3\n"},
    4: {"prompts.txt": None},
    5: {"sample_now": ""},
}
STATES = ("model_state.pdparams", "ema_state.pdparams", "optimizer.pdopt")
SETTINGS = {"max_steps": MAX_STEPS, "use_ema": True, "num_inference_steps": 1, "validation_prompts": "picture 1"}


@contextmanager
def asking(folder, asked: dict):
    """Inside, the files of `asked` are made in, or taken out of, a run's control folder after these updates."""
    after_update = Reporter.after_update

    def ask(self, step, update, batches):
        after_update(self, step, update, batches)
        for name, text in asked.get(step, {}).items() if self.run.world.is_main else ():
            path = folder / "control" / name
            path.unlink() if text is None else path.write_text(text, encoding="utf-8")

    Reporter.after_update = ask
    try:
        yield
    finally:
        Reporter.after_update = after_update


def train(kind, words):
    loop = kind == "loop"
    run = prepare(*parse_arguments([*words, "--do_train"], loop))
    (run_loop if loop else run_trainer)(run)
    return run


def curve(folder):
    """The lines of metrics.jsonl without times, speeds and memory."""
    kept = ("global_step", "loss", "grad_norm", "data_crc32", "lr_abs", *(f"loss_quarter_{q}" for q in range(1, 5)))
    return [{name: record.get(name) for name in kept} for record in read_metrics(folder / "metrics.jsonl")]


def state(folder, step=MAX_STEPS):
    """All arrays of a checkpoint, by file and name."""
    found = {}
    for name in STATES:
        for key, value in paddle.load(str(folder / f"checkpoint-{step}" / name), return_numpy=True).items():
            if isinstance(value, np.ndarray):
                found[name, key] = value
    return found


def assert_same(folder, other):
    assert curve(folder) == curve(other)
    first, second = state(folder), state(other)
    assert first.keys() == second.keys()
    assert not [key for key in first if not np.array_equal(first[key], second[key])]


def checkpoints(folder):
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory):
    """Runs that nobody disturbs."""
    folders = {kind: tmp_path_factory.mktemp(kind) / "run" for kind in ("loop", "trainer")}
    for kind, folder in folders.items():
        train(kind, tiny.flags(folder, **SETTINGS))
    return folders


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_what_is_asked_for_is_done_once_and_changes_no_bit(tiny, straight, tmp_path, kind):
    folder = tmp_path / "run"
    with asking(folder, ASKED):
        train(kind, tiny.flags(folder, **SETTINGS))
    assert_same(folder, straight[kind])
    assert checkpoints(folder) == [3, 4, MAX_STEPS] and checkpoints(straight[kind]) == [MAX_STEPS]
    drawn = sorted((folder / "samples").glob("*-ddim-samples-7.5.png"))
    assert [path.name for path in drawn] == [f"step-{step:06d}-ddim-samples-7.5.png" for step in (2, 3, 6)]
    assert [[caption for caption, _ in read_cells(path)] for path in drawn] == [
        ["picture 1"], ["a <b>red</b> heart", "一颗红心"], ["picture 1"],
    ]  # fmt: skip
    for caption, box in read_cells(drawn[1]):  # where a prompt's picture is said to be, it is, and nothing else
        cell = np.asarray(Image.open(drawn[1]).crop(box))
        assert cell.shape == (128, 128, 3) and not (cell == 255).all(axis=(1, 2)).any(), caption
    left = {path.name for path in (folder / "control").iterdir()}
    assert left == {"status.json", "later"}  # an order is gone, what is none stays
    assert not (straight[kind] / "samples").exists()
    pipeline = json.loads((folder / "pipeline/ppldm.json").read_text())
    assert pipeline["example_prompt"] == "picture 1"
    status = json.loads((folder / "control/status.json").read_text())
    assert status["process"] == os.getpid() and (status["start_step"], status["max_steps"]) == (0, MAX_STEPS)


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_a_run_that_is_stopped_by_a_file_goes_on_with_the_same_bits(tiny, straight, tmp_path, kind):
    folder = tmp_path / "run"
    words = tiny.flags(folder, **SETTINGS)
    with asking(folder, {3: {"stop": ""}}), pytest.raises(Interrupted, match="after update 4 of 7") as caught:
        train(kind, words)
    assert caught.value.exit_status == 128 + signal.SIGINT  # no scheduler is to start it again
    assert checkpoints(folder) == [4] and not (folder / "control/stop").exists()
    (folder / "control/stop").touch()  # made while nothing ran: void
    assert train(kind, words).start_step == 4
    assert_same(folder, straight[kind])


@pytest.mark.turn("a stopped run goes on", 1)
@pytest.mark.slow
def test_two_processes_obey_together(tiny, tmp_path):
    """Each rank draws, saves and stops as the main one has read; both end as by Ctrl-C, after the same update."""
    launch = ("-m", "ppldm.training.distributed.launch", "--nproc_per_node", "2", "--log_dir")
    environ = {**os.environ, "OMP_NUM_THREADS": "1",
               "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers")])}  # fmt: skip
    asked = {**ASKED, 5: {"sample_now": "", "stop": ""}}
    runs = [[asked_of, tiny.flags(tmp_path / name, per_device_train_batch_size=2, save_steps=6, **SETTINGS)]
            for name, asked_of in (("straight", {}), ("asked", asked))]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *launch, tmp_path / "log", __file__, "trainer", json.dumps(runs)],
        env=environ, cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr[-3000:]
    assert curve(tmp_path / "asked") == curve(tmp_path / "straight")[:6]
    first, second = (state(tmp_path / name, 6) for name in ("asked", "straight"))
    assert not [key for key in first if not np.array_equal(first[key], second[key])]
    assert checkpoints(tmp_path / "asked") == [3, 4, 6]
    assert len(list((tmp_path / "asked/samples").glob("*-ddim-samples-7.5.png"))) == 3
    logs = [(tmp_path / f"log/workerlog.{rank}").read_text(errors="replace") for rank in (0, 1)]
    assert "as the user asks: sample_now, save_now" in logs[0] and "as the user asks" not in logs[1]


def test_an_order_is_taken_by_the_main_rank_and_once(tmp_path):
    main, other = Control(tmp_path, World(0, 2)), Control(tmp_path, World(1, 2))
    assert main.take() == 0  # there is no folder yet
    other.open()
    assert not list(tmp_path.iterdir())
    main.open(max_steps=3)
    for name in ("save_now", "stop", "SAMPLE_NOW", "save_now.txt"):
        (main.folder / name).touch()
    assert other.take() == 0
    assert main.take() == Order.SAVE_NOW | Order.STOP and main.take() == 0
    assert sorted(path.name for path in main.folder.iterdir()) == ["SAMPLE_NOW", "save_now.txt", "status.json"]
    shutil.rmtree(main.folder)
    assert main.take() == 0


def test_an_order_that_cannot_be_removed_is_not_obeyed_for_ever(tmp_path, caplog):
    control = Control(tmp_path, World())
    control.open()
    (control.folder / "save_now").mkdir()  # nor can a file in a folder that is another user's
    (control.folder / "sample_now").touch()
    assert [control.take(), control.take()] == [Order.SAMPLE_NOW, 0]
    assert caplog.text.count("is not obeyed") == 1 and "control/save_now cannot be removed" in caplog.text


@pytest.mark.parametrize(
    "content, prompts, word",
    [
        (None, [], ""),
        (b"one\n\n two \tremark\n", ["one", "two"], ""),
        (b"", [], "holds no prompts"),
        (b"\xff\xfe", [], "is not UTF-8"),
        (b"x\n" * 65, [], "has 65 prompts; 64 are drawn at most"),
        (b"x\n" * 64, ["x"] * 64, ""),
        (b"x" * 70_000, [], "has 70,000 bytes; 65,536 are read"),
    ],
)
def test_prompts_are_those_of_the_file_or_the_recipes_with_a_line_that_says_why(
    tmp_path, caplog, content, prompts, word
):
    (tmp_path / "control").mkdir()
    if content is not None:
        (tmp_path / "control/prompts.txt").write_bytes(content)
    assert current_prompts(tmp_path, World()) == prompts
    assert (word in caplog.text) if word else not caplog.records


def test_the_files_have_the_names_that_the_docs_give_them():
    text = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    for name in [*(order.file for order in Order), module.PROMPTS_FILE]:
        assert f"`{name}`" in text and name in module.__doc__


if __name__ == "__main__":  # one of two ranks, which do one run after another
    kind, runs = sys.argv[1:]
    with entry():
        for asked, words in json.loads(runs):
            place = Path(words[words.index("--output_dir") + 1])
            with asking(place, {int(step): names for step, names in asked.items()}):
                train(kind, words)
