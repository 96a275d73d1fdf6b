"""A run goes on with the data that it began with, or says which part is another one."""

import json
import shutil

import pytest
from command_line import parse_arguments

from ppldm.data.filelist import write_filelist
from ppldm.data.formats.part import Part, write_part
from ppldm.training.checkpoint import DATA_FILE, MANIFEST, read_manifest
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.training.trainer import run_trainer
from ppldm.utils.checksums import checksum_json
from ppldm.utils.errors import CheckpointError, ConfigError


@pytest.fixture
def data(tiny, tmp_path):
    """A folder with a copy of the tiny parts and their filelist."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(2):
        shutil.copy(tiny.folder / f"part-{number:05d}.gz", folder / f"{number}.gz")
    write_filelist(folder / "all.filelist", ["0.gz", "1.gz"])
    return folder


def rewrite(path, change):
    """Put the rows of a part, changed as a list, in its place."""
    part = Part(path)
    rows = change([part.read(number) for number in range(len(part))])
    part.close()
    write_part(path, rows)


def start(kind, tiny, tmp_path, data, **changes):
    settings = {"file_list": data / "all.filelist", "max_steps": 2, "save_steps": 1, **changes}
    flags = tiny.flags(tmp_path / "run", **settings)
    run = prepare(*parse_arguments([*flags, "--do_train"], kind == "loop"))
    (run_loop if kind == "loop" else run_trainer)(run)
    return run


def swap_rows(folder):
    rewrite(folder / "1.gz", lambda rows: [rows[1], rows[0], *rows[2:]])


def grow(folder):
    shutil.copy(folder / "0.gz", folder / "2.gz")
    rewrite(folder / "2.gz", lambda rows: rows[:5])
    write_filelist(folder / "all.filelist", ["0.gz", "1.gz", "2.gz"])


CHANGES = [
    (swap_rows, r"in list 1, .*all.filelist, part 2 was 1.gz \(15 rows, .*is now 1.gz \(15 rows"),
    (lambda folder: write_filelist(folder / "all.filelist", ["1.gz", "0.gz"]), "another order: 1.gz .* is part 1"),
    (lambda folder: write_filelist(folder / "all.filelist", ["0.gz"]), "1.gz .* is gone"),
    (grow, "2.gz .* was added"),
]


@pytest.mark.parametrize("change, message", CHANGES)
def test_other_data_are_refused_by_name_and_accepted_by_name(tiny, tmp_path, data, change, message):
    first = start("loop", tiny, tmp_path, data)
    change(data)
    for kind in ("loop", "trainer"):
        with pytest.raises(CheckpointError, match=f"checkpoint-2 was trained on other data: .*{message}") as caught:
            start(kind, tiny, tmp_path, data, max_steps=3)
        assert "\n" not in str(caught.value) and "--accept_changes data" in str(caught.value)
    run = start("loop", tiny, tmp_path, data, max_steps=3, accept_changes="data")
    assert run.start_step == 2 and run.identity["data"] != first.identity["data"]
    assert start("trainer", tiny, tmp_path, data, max_steps=4).start_step == 3


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_moved_and_renamed_parts_are_the_same_data(tiny, tmp_path, data, kind):
    start(kind, tiny, tmp_path, data)
    (data / "moved").mkdir()
    (data / "0.gz").rename(data / "moved/first.gz")
    write_filelist(data / "all.filelist", ["moved/first.gz", "1.gz"])
    assert start(kind, tiny, tmp_path, data, max_steps=3).start_step == 2


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_checkpoints_without_a_record_go_on_and_say_so(tiny, tmp_path, data, kind, capsys):
    start(kind, tiny, tmp_path, data)
    folder = tmp_path / "run/checkpoint-2"
    manifest = read_manifest(folder)
    del manifest["crc32"], manifest["identity"]["data"], manifest["files"][DATA_FILE]
    (folder / DATA_FILE).unlink()
    manifest["crc32"] = checksum_json(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    swap_rows(data)
    assert start(kind, tiny, tmp_path, data, max_steps=3).start_step == 2
    assert "checkpoint-2 does not record its data" in capsys.readouterr().err


def test_weights_and_interpolation_are_part_of_the_run(tiny, tmp_path, data):
    for name, part in (("a", "0.gz"), ("b", "1.gz")):
        write_filelist(data / f"{name}.filelist", [part])

    def resume(first, second, **changes):
        write_filelist(data / "all.list", [f"a.filelist {first}", f"b.filelist {second}"])
        return start("loop", tiny, tmp_path, data, file_list=data / "all.list", **changes)

    resume(1, 1)
    with pytest.raises(CheckpointError, match=r"was trained with weights \[1.0, 1.0\], this run has \[1.0, 2.0\]"):
        resume(1, 2, max_steps=3)
    with pytest.raises(CheckpointError, match="was trained with interpolation lanczos, this run has area"):
        resume(1, 1, max_steps=3, interpolation="area")
    assert resume(1, 1, max_steps=3).start_step == 2


def test_another_tokenizer_is_refused_and_no_matter_of_the_data(tiny, tmp_path, data):
    shutil.copytree(tiny.tokenizer, tmp_path / "words")
    start("loop", tiny, tmp_path, data, tokenizer_name=tmp_path / "words")
    vocab = tmp_path / "words/vocab.txt"
    words = vocab.read_text(encoding="utf-8").splitlines()
    vocab.write_text("\n".join([*words[:-2], words[-1], words[-2]]) + "\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match="trained with tokenizer.* --accept_changes tokenizer"):
        start("loop", tiny, tmp_path, data, max_steps=3, tokenizer_name=tmp_path / "words")


@pytest.mark.parametrize("how", ["symlink", "copy"])
def test_a_part_that_is_trained_on_under_another_name_is_not_held_out(tiny, tmp_path, data, how):
    (data / "held").mkdir()
    if how == "symlink":
        (data / "held/x.gz").symlink_to(data / "0.gz")
    else:
        shutil.copy(data / "0.gz", data / "held/x.gz")
    write_filelist(data / "held/held.filelist", ["x.gz"])
    with pytest.raises(ConfigError, match="x.gz (is in|in) --validation_file_list (and|has the content of 0.gz)"):
        start("loop", tiny, tmp_path, data, validation_file_list=data / "held/held.filelist")
