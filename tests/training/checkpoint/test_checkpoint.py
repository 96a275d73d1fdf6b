"""Checkpoints are read only if they verify, and rotate only after a new one does."""

import json
import pickle
import resource
import tracemalloc

import numpy as np
import paddle
import pytest
from paddlenlp.trainer import Trainer, TrainingArguments
from small_disk import small_disk

from ppldm.training.checkpoint import (
    TrainerState,
    TrainingState,
    contents_of,
    count_bytes,
    find_checkpoint,
    list_checkpoints,
    newest_checkpoint,
    read_manifest,
    removable,
    save_checkpoint,
    set_aside_after,
    verify,
    versions,
)
from ppldm.training.resume import _load, load_model, load_optimizer
from ppldm.training.run import copy_to_host
from ppldm.utils.errors import CheckpointError, ConfigError, DiskFullError, ModelError
from ppldm.weights.formats.paddle_files import write_tree

FILES = ["model_state.pdparams", "optimizer.pdopt", "scheduler.pdparams", "trainer_state.json"]


def make_state(width=3):
    with paddle.utils.unique_name.guard():
        layer = paddle.nn.Linear(2, width)
    scheduler = paddle.optimizer.lr.LambdaDecay(0.1, lambda step: 1.0)
    return TrainingState(layer, paddle.optimizer.AdamW(scheduler, parameters=layer.parameters()), scheduler)


def train_once(state):
    with paddle.utils.unique_name.guard():
        state.model(paddle.ones([4, 2])).square().sum().backward()
        state.optimizer.step()
    state.optimizer.clear_grad()
    state.scheduler.step()
    return state


def save(folder, step, limit=None, state=None, backup_every=0, **metadata):
    metadata = {"samples_seen": 8 * step, "identity": {"seed": 1}, "unlogged": [0.5, 0.25], **metadata}
    trainer_state = TrainerState(global_step=step)
    return save_checkpoint(folder, contents_of(state or make_state()), trainer_state, metadata, limit, backup_every)


def test_published_names_inside(tmp_path):
    folder = save(tmp_path, 7)
    assert folder.name == "checkpoint-7"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "manifest.json"])
    manifest = read_manifest(folder)
    assert (manifest["global_step"], manifest["samples_seen"], manifest["identity"]) == (7, 56, {"seed": 1})
    assert manifest["unlogged"] == [0.5, 0.25]
    assert manifest["versions"] == versions() and manifest["versions"]["paddle"] == paddle.__version__
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 7
    assert verify(folder) is None


@pytest.mark.parametrize("again", [False, True], ids=["", "in used memory"])
@pytest.mark.parametrize("half", [False, True])
def test_files_from_copies_are_those_of_the_moment_they_were_made(tmp_path, half, again):
    """To the byte, though weights, moments and their names are changed meanwhile."""
    state = train_once(make_state())
    if half:
        state.model.to(dtype="bfloat16")
    written = save_checkpoint(tmp_path / "waiting", contents_of(state), TrainerState(global_step=1), {})
    copies = copy_to_host(contents_of(state), copy_to_host(contents_of(train_once(make_state()))) if again else None)
    for value in (*state.model.parameters(), *state.optimizer.state_dict().values()):
        if isinstance(value, paddle.Tensor):
            value.set_value(paddle.zeros_like(value))
    beside = save_checkpoint(tmp_path / "beside", copies, TrainerState(global_step=1), {})
    for path in written.iterdir():
        assert path.read_bytes() == (beside / path.name).read_bytes(), path.name


class Program:
    """Writes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["model_state.pdparams", "optimizer.pdopt", "scheduler.pdparams"])
def test_a_program_in_the_place_of_weights_is_not_run(tmp_path, name):
    state = train_once(make_state())
    folder = save(tmp_path / "run", 3, state=state)
    with open(folder / name, "wb") as file:
        pickle.dump({"weight": Program(tmp_path / "was here")}, file)
    with pytest.raises(ModelError, match=f"{name} is refused: its pickle asks for .*open"):
        load_model(folder, state)
        load_optimizer(folder, state)
    assert not (tmp_path / "was here").exists()


def _plain(tree):
    """What can be compared: arrays and tensors with their types and names."""
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if not isinstance(tree, paddle.Tensor | np.ndarray):
        return tree
    name = "" if isinstance(tree, np.ndarray) or tree.name.startswith("generated_tensor") else tree.name
    return name, str(tree.dtype), np.asarray(tree).tolist()


@pytest.mark.parametrize("nested", [False, True])
def test_writing_takes_room_for_two_tensors_and_not_for_all(tmp_path, nested):
    state = {f"w{i}": paddle.ones([1 << 18]) for i in range(16)}  # 1 MiB each
    tracemalloc.start()
    try:
        write_tree(tmp_path / "a.pdparams", {"posthoc": state} if nested else state)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 << 20
    assert (tmp_path / "a.pdparams").stat().st_size > 16 << 20


@pytest.mark.parametrize("write", [paddle.save, lambda state, path: write_tree(path, state)], ids=["theirs", "ours"])
@pytest.mark.parametrize("return_numpy", [True, False])
def test_files_are_read_as_paddle_reads_its_own(tmp_path, return_numpy, write):
    """Values, types and generated names, by which an optimizer finds its state, of every layout of paddle.save; and
    paddle reads what we write as what it writes."""
    layer = paddle.nn.Linear(3, 4)
    weight, bias = layer.weight, layer.bias
    nested = {"w": weight, "master_weights": {"m": bias}, "LR": {"last_lr": 0.1, "last_epoch": 2}, "n": None}
    half = {"half": weight.astype("bfloat16"), "scale": paddle.to_tensor(2.0)}
    for number, state in enumerate((layer.state_dict(), nested, {"w": weight.numpy(), "k": 3}, half)):
        path = tmp_path / f"{number}.pdparams"
        paddle.save(state, str(path))
        theirs = paddle.load(str(path), return_numpy=return_numpy)
        write(state, str(path))
        ours, again = _load(path, return_numpy), paddle.load(str(path), return_numpy=return_numpy)
        assert _plain(again) == _plain(theirs)
        ours, theirs = (tree | tree.pop("master_weights", {}) | tree.pop("LR", {}) for tree in (ours, theirs))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert type(ours[name]) is type(value)
            if isinstance(value, paddle.Tensor):
                assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape)
                assert bool((ours[name] == value).all())
                if not value.name.startswith("generated_tensor"):
                    assert ours[name].name == value.name
            elif isinstance(value, np.ndarray):
                assert ours[name].dtype == value.dtype and (ours[name] == value).all()
            else:
                assert ours[name] == value


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_damage_is_noticed_and_an_older_one_taken(tmp_path, name, damage):
    old, new = save(tmp_path, 2), save(tmp_path, 10)
    assert newest_checkpoint(tmp_path) == new
    path = new / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-1] if name != "manifest.json" else content[: len(content) // 2])
    else:
        path.write_bytes(content.replace(content[20:24], b"\0\0\0\0", 1))
    assert verify(new)
    assert newest_checkpoint(tmp_path) == old


def test_a_manifest_with_another_number_is_noticed(tmp_path):
    path = save(tmp_path, 10) / "manifest.json"
    path.write_text(path.read_text().replace('"samples_seen": 80', '"samples_seen": 88'))
    assert verify(path.parent) == "manifest.json has changed"


def test_nothing_sound_is_an_error_and_no_new_start(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    (save(tmp_path, 1) / "optimizer.pdopt").unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints in .* verifies.*--overwrite_output_dir"):
        newest_checkpoint(tmp_path)


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-100", "checkpoint-10", "checkpoint-9"]


@pytest.mark.parametrize("limit, kept", [(None, [4, 3, 2, 1]), (0, [4, 3, 2, 1]), (1, [4]), (2, [4, 3])])
def test_rotation(tmp_path, limit, kept):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, limit)
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in kept]


def steps(folders):
    return [int(folder.name.split("-")[-1]) for folder in folders]


@pytest.mark.parametrize(
    "there, step, limit, backup_every, gone",
    [
        ([50, 40, 30, 20, 10], 50, 2, 0, [30, 20, 10]),
        ([50, 40, 30, 20, 10], 50, 2, 20, [30, 10]),
        # The run went back to 20: what it left behind is no reason to remove what it writes.
        ([50, 40, 20, 10], 20, 1, 0, [10]),
        ([60, 50, 40], 60, 9, 0, []),
    ],
)
def test_which_checkpoints_go(tmp_path, there, step, limit, backup_every, gone):
    folders = [tmp_path / f"checkpoint-{n}" for n in there]
    assert steps(removable(folders, step, limit, backup_every)) == gone


def test_backups_are_kept_for_ever(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step, limit=1, backup_every=3)
    assert steps(list_checkpoints(tmp_path)) == [7, 6, 3]


def test_nothing_is_removed_before_the_new_one_verifies(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr("ppldm.training.checkpoint.verify", lambda _: "a bad disk")
    with pytest.raises(CheckpointError, match="does not verify after writing"):
        save(tmp_path, 2, limit=1)
    assert steps(list_checkpoints(tmp_path)) == [2, 1]


def test_every_spelling_of_resuming(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    for word in (None, "latest", "last", "auto", "true", "True", "false", "none"):
        assert find_checkpoint(run, word) is None
    three, six, elsewhere = save(run, 3), save(run, 6), save(other, 9)
    for word in (None, "", "latest", "Last", "auto", "true"):
        assert find_checkpoint(run, word) == six
    for name in (str(three), "checkpoint-3"):
        assert find_checkpoint(run, name) == three
    assert find_checkpoint(run, str(elsewhere)) == elsewhere
    with pytest.raises(ConfigError, match="--overwrite_output_dir"):
        find_checkpoint(run, "false")
    for name in (other, "checkpoint-4", tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="cannot resume from"):
            find_checkpoint(run, str(name))


def test_a_named_checkpoint_wins_and_the_same_command_again_goes_on(tmp_path):
    three, _six = save(tmp_path, 3), save(tmp_path, 6)
    assert find_checkpoint(tmp_path, "checkpoint-3") == three
    set_aside_after(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["abandoned-checkpoint-6", "checkpoint-3"]
    five = save(tmp_path, 5, resumed_from=str(three.resolve()))
    assert find_checkpoint(tmp_path, "checkpoint-3") == five
    assert find_checkpoint(tmp_path, None) == five


def test_another_model_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="weight, this model wants"):
        load_model(folder, make_state(width=4))


def test_a_smaller_model_is_refused(tmp_path):
    state = make_state()
    state.model.extra = paddle.nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match="extra.bias for one"):
        load_model(save(tmp_path, 1, state=state), make_state())


def test_a_parameter_without_moments_is_refused(tmp_path):
    folder = save(tmp_path, 1, state=train_once(make_state()))
    load_optimizer(folder, make_state())
    other = make_state()
    other.model.weight.name = "another_name"
    with pytest.raises(CheckpointError, match="no optimizer state for another_name"):
        load_optimizer(folder, other)


class Row(paddle.io.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, _):
        return {"input": np.ones(2, "float32")}


class SquareTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        return model(**inputs).square().sum()


def test_paddlenlp_resumes_from_it(tmp_path):
    state = make_state()
    for _ in range(3):
        train_once(state)
    folder = save(tmp_path, 3, state=state)
    expected = train_once(state).model.weight.numpy()
    fresh = make_state()
    arguments = TrainingArguments(str(tmp_path / "out"), max_steps=4, per_device_train_batch_size=4, device="cpu",
                                  disable_tqdm=True, max_grad_norm=0, report_to=[])  # fmt: skip
    with paddle.utils.unique_name.guard():
        trainer = SquareTrainer(fresh.model, args=arguments, train_dataset=Row(),
                                optimizers=(fresh.optimizer, fresh.scheduler))  # fmt: skip
        trainer.train(resume_from_checkpoint=str(folder))
    assert trainer.state.global_step == 4
    np.testing.assert_allclose(fresh.model.weight.numpy(), expected, rtol=1e-6)


def test_the_space_is_counted_before_writing(tmp_path, monkeypatch):
    state = train_once(make_state())
    written = save(tmp_path / "first", 1, state=state)
    tensors = count_bytes({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()})
    assert tensors == (9 * 3 + 4) * 4  # weights and two moments of each, four powers of beta
    assert 0 < sum(path.stat().st_size for path in written.iterdir()) - tensors < 1 << 20
    monkeypatch.setattr("ppldm.training.checkpoint.count_free_bytes", lambda _: 1 << 20)
    with pytest.raises(DiskFullError, match=r"needs 0.001 GB, .* has 0.001 GB free; free some"):
        save(tmp_path, 2, state=state)
    assert not list(tmp_path.glob("*checkpoint*"))


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk") as folder:
        yield folder


@pytest.mark.parametrize("counted", [True, False])
def test_a_full_disk_keeps_the_older_checkpoint(disk, monkeypatch, counted):
    state = make_state(width=100_000)  # 1.2 MB, as there are no moments yet
    old = save(disk, 1, state=state, limit=1)
    if not counted:  # somebody else fills the disk while we write
        monkeypatch.setattr("ppldm.training.checkpoint.count_free_bytes", lambda _: 1 << 40)
    (disk / "filler").write_bytes(bytes(2 << 20))
    with pytest.raises(DiskFullError, match="needs 0.002 GB" if counted else "the disk filled up while writing"):
        save(disk, 2, state=state, limit=1)
    assert newest_checkpoint(disk) == old
    assert sorted(path.name for path in disk.iterdir()) == ["checkpoint-1", "filler"]
    (disk / "filler").unlink()
    new = save(disk, 3, state=state, limit=1)
    assert newest_checkpoint(disk) == new and list_checkpoints(disk) == [new]


def test_an_interrupted_save_leaves_no_checkpoint(tmp_path, monkeypatch):
    old = save(tmp_path, 1)
    monkeypatch.setattr(TrainerState, "save_to_json", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == [old.name]
    assert newest_checkpoint(tmp_path) == old


def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path):
    old = save(tmp_path, 1, limit=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
    try:
        with pytest.raises(DiskFullError, match="the disk filled up while writing .* free some"):
            save(tmp_path, 2, state=make_state(width=100_000), limit=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [old] and newest_checkpoint(tmp_path) == old


def test_the_trainers_state_is_paddlenlps(tmp_path):
    """The same file to the byte, which its Trainer reads."""
    from paddlenlp.trainer import TrainerState as Theirs

    TrainerState(global_step=3, max_steps=7).save_to_json(str(tmp_path / "ours.json"))
    Theirs(global_step=3, max_steps=7).save_to_json(str(tmp_path / "theirs.json"))
    assert (tmp_path / "ours.json").read_bytes() == (tmp_path / "theirs.json").read_bytes()
    assert Theirs.load_from_json(str(tmp_path / "ours.json")).max_steps == 7
