"""What is optional or older and cannot be looked at is passed over, and the log says why."""

import builtins
import errno
import io
import json
import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from ppldm.data.formats.index import IndexSpec, find_stored, make_index, write_index
from ppldm.training.checkpoint import find_checkpoint, newest_checkpoint, set_aside_after, verify
from ppldm.training.run_folder import Order, read_start
from ppldm.training.train import Control
from ppldm.training.validation import current_prompts
from ppldm.utils.checksums import checksum_file, checksum_json
from ppldm.utils.errors import CheckpointError, DataError, OutputError
from ppldm.utils.files import lock_folder, read_json, remove_leftovers, write_json
from ppldm.utils.processes.ranks import World
from ppldm.weights.folders import list_checkpoints

ERRORS = [errno.EACCES, errno.EIO, errno.ESTALE, errno.EPERM, errno.ETIMEDOUT]
WAYS = ["open", "all"]  # mode 000 lets a file be looked at; a broken disk or mount does not
FUNCTIONS = {"open": [(builtins, "open"), (io, "open"), (os, "open"), (os, "listdir"), (os, "scandir")]}
FUNCTIONS["all"] = [*FUNCTIONS["open"], (os, "stat"), (os, "lstat"), (os, "unlink"), (os, "rename"), (os, "replace")]


@contextmanager
def failing(path: Path, number: int, way: str):
    """Inside the block, nothing at or below `path` can be opened, and with the way `all` not even looked at."""

    def wrap(function):
        def call(name, *rest, **more):
            inside = isinstance(name, str | os.PathLike) and Path(os.fspath(name)).is_relative_to(path)
            if inside:
                raise OSError(number, os.strerror(number), os.fspath(name))
            return function(name, *rest, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in FUNCTIONS[way]:
            patch.setattr(module, name, wrap(getattr(module, name)))
        yield


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of two sound checkpoints, as far as a look at them goes."""
    for step in (5, 10):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "tokenizer").mkdir(parents=True)
        for name in ("model_state.pdparams", "tokenizer/vocab.json"):
            (folder / name).write_text(f"{name} {step}")
        files = {name: checksum_file(folder / name) for name in ("model_state.pdparams", "tokenizer/vocab.json")}
        manifest = {"global_step": step, "files": files}
        write_json(folder / "manifest.json", {**manifest, "crc32": checksum_json(manifest)})
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    return tmp_path


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["", "manifest.json", "model_state.pdparams", "tokenizer", "tokenizer/vocab.json"])
@pytest.mark.parametrize("number", ERRORS)
def test_a_checkpoint_that_cannot_be_read_is_passed_over_for_an_older_one(run, number, name, way, capsys):
    newest = run / "checkpoint-10"
    with failing(newest / name, number, way):
        assert newest_checkpoint(run) == find_checkpoint(run, None) == run / "checkpoint-5"
        said = capsys.readouterr().err
        assert f"passing over {newest}: " in said and os.strerror(number) in said
        with pytest.raises(CheckpointError, match=f"cannot resume from {newest}: .*{os.strerror(number)}"):
            find_checkpoint(run, str(newest))


@pytest.mark.parametrize("files", [None, 3, "x", [], [1]])
def test_a_manifest_of_another_form_is_named(run, files):
    write_json(run / "checkpoint-10/manifest.json", {"global_step": 10, "files": files})
    if files != []:
        assert verify(run / "checkpoint-10") == "no readable manifest.json"


def test_what_cannot_be_set_aside_stops_in_one_line(run):
    with (
        failing(run / "checkpoint-10", errno.EIO, "all"),
        pytest.raises(OutputError, match="cannot rename .*; move it"),
    ):
        set_aside_after(run, 5)
    assert len(list_checkpoints(run)) == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("only_header", [False, True])
def test_an_index_that_cannot_be_read_is_as_good_as_none(tmp_path, monkeypatch, number, way, only_header, capsys):
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path / "cache"))
    part, spec = tmp_path / "part", IndexSpec(kinds=(1,))
    part.write_bytes(b"abc\n")
    write_index(spec.index_path(part), make_index(1, 4, 0, [(0, 4, 8, 8)]))
    assert find_stored(part, spec, only_header)
    with failing(spec.index_path(part), number, way):
        assert find_stored(part, spec, only_header) is None
    assert f"is not used: it cannot be read ({os.strerror(number)})" in capsys.readouterr().err


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("name", ["", "status.json", "prompts.txt"])
def test_a_control_folder_that_cannot_be_used_stops_no_training(tmp_path, number, name, way, capsys):
    control = Control(tmp_path, World())
    control.open()
    (tmp_path / "control/prompts.txt").write_text("a dog\n")
    assert current_prompts(tmp_path, World()) == ["a dog"]
    with failing(tmp_path / "control" / name, number, way):
        control.open(max_steps=3)
        control.take()
        assert current_prompts(tmp_path, World()) == (["a dog"] if name == "status.json" else [])
    assert name == "status.json" or os.strerror(number) in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["file", "fifo"])
def test_what_stands_where_control_should_is_passed_over(tmp_path, kind, capsys):
    target = tmp_path / "control"
    target.write_text("") if kind == "file" else os.mkfifo(target)
    control = Control(tmp_path, World())
    control.open()
    assert control.take() == Order(0) and current_prompts(tmp_path, World()) == []
    assert f"passing over {target}: " in capsys.readouterr().err


def test_prompts_that_are_no_plain_file_are_not_waited_for(tmp_path, capsys):
    (tmp_path / "control").mkdir()
    os.mkfifo(tmp_path / "control/prompts.txt")
    assert current_prompts(tmp_path, World()) == []
    assert "prompts.txt is not a plain file; --validation_prompts are drawn" in capsys.readouterr().err


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", ERRORS)
def test_a_record_that_decides_is_named_in_one_line_and_an_optional_one_is_none(tmp_path, number, way):
    path = tmp_path / "start.json"
    path.write_text(json.dumps({"job": None, "command": "x"}))
    with failing(path, number, way):
        with pytest.raises(DataError, match=rf"cannot read {path}: {os.strerror(number)}; make it readable"):
            read_start(tmp_path)
        assert read_json(path, optional=True) is None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", ERRORS)
def test_what_was_left_unfinished_and_cannot_be_removed_is_passed_over(tmp_path, number, way, capsys):
    (tmp_path / ".a.tmp").mkdir()
    (tmp_path / ".a.tmp/x").write_text("123")
    (tmp_path / ".b.tmp").write_text("12345")
    with failing(tmp_path / ".a.tmp", number, way):
        assert remove_leftovers(tmp_path) == 5
    assert f"passing over {tmp_path}/.a.tmp: {os.strerror(number)}" in capsys.readouterr().err
    assert remove_leftovers(tmp_path) == 3


def test_a_lock_of_somebody_else_is_named(tmp_path):
    with failing(tmp_path / ".lock", errno.EACCES, "open"), pytest.raises(OutputError, match="lock: Permission denied"):
        lock_folder(tmp_path)
