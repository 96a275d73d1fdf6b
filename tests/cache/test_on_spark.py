"""Law: Spark's executors make the bytes that one process makes, and an error of theirs is one line."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_weights import write_clip

from ppldm.cache import command as on_spark
from ppldm.cli.main import run
from ppldm.utils.errors import ConfigError, DiskFullError, ModelError, PartError


def words(tiny, folder, *more) -> list[str]:
    flags = ["--resolutions", "16", "--latents-dir", str(folder), "--batch-size", "4", "--num-workers", "1"]
    return ["precompute", str(tiny.file_list), "--vae", str(tiny.vae), *flags, *more]


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_a_gpu_is_refused_on_spark(tiny, tmp_path):
    with pytest.raises(ConfigError, match="--device gpu is not for Spark"):
        run(words(tiny, tmp_path, "--master", "local[2]", "--device", "gpu"))


@pytest.mark.parametrize(
    "error, kind, message",
    [
        (None, ModelError, "has the encoder abc, but the driver has xyz"),
        (PartError("it has changed"), PartError, "it has changed"),
        (OSError(errno.ENOSPC, "No space left on device", "/d/file"), DiskFullError, "the disk is full for /d/file on"),
    ],
)
def test_what_a_part_cannot_be_made_for_comes_back_in_our_words(monkeypatch, error, kind, message):
    def fail(*_):
        raise error

    task = SimpleNamespace(path="part", digest="abc" if error else "xyz", request=SimpleNamespace(model="vae"))
    monkeypatch.setattr(on_spark, "_load", lambda *_: SimpleNamespace(digest="abc"))
    monkeypatch.setattr(on_spark, "encode_part", fail)
    with pytest.raises(kind, match=message):
        on_spark._encode(task, 1)


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.slow
def test_the_bytes_are_those_of_one_process_and_the_same_command_repairs(session, tiny, tmp_path, capsys, monkeypatch):
    texts = ("--text-encoder", str(write_clip(tmp_path / "clip")))
    run(words(tiny, tmp_path / "here", *texts))
    monkeypatch.chdir(tmp_path)  # executors may have another
    capsys.readouterr()

    def run_on_spark(*more) -> dict:
        run(words(tiny, "spark", "--master", "local[2]", "--json", *texts, *more))
        return json.loads(capsys.readouterr().out)

    planned = run_on_spark("--dry-run")
    assert "encoded" not in planned and contents("spark") == {}
    made = run_on_spark()
    assert contents("spark") == contents("here") and made["encoded"] > 0 == made["found"]
    assert made["text_embeddings"]["encoded"] == 42
    path, data = max(item for item in contents("spark").items() if item[0].endswith(".latents"))
    Path("spark", path).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # of the last row
    repaired = run_on_spark()
    assert repaired["repaired"] == 1 == repaired["encoded"] and contents("spark") == contents("here")
