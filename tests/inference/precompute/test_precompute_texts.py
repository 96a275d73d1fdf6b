"""`ppldm precompute --text_encoder` as a command: its flags, its account, kills, several processes."""

import contextlib
import json
import random
import signal
from pathlib import Path

import numpy as np
import pytest
from forking import forking, kill, stop_when
from sampling import ALL
from small_weights import write_clip

from ppldm.cli.main import run
from ppldm.data.cached.file import CachedFile
from ppldm.utils.errors import ConfigError, PartError

KILLS = 10 if ALL else 5


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip"))


def command(tiny, clip, folder, *flags) -> list[str]:
    words = ["precompute", tiny.file_list, "--text_encoder", str(clip), "--latents-dir", str(folder)]
    return [*words, "--batch-size", "4", "--num-workers", "1", *map(str, flags)]


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--text-dtype", "int8"], "--text-dtype int8 is not one of float16, bfloat16, float32"),
        (["--model-max-length", "2"], "captions of 2 tokens have no room"),
        (["--model-max-length", "90"], "knows 520 words and 77 positions"),
        (["--captions", "caption"], "--captions"),
        (["--caption-choice", "last"], "--caption-choice"),
        (["--tokenizer", "nowhere"], "no tokenizer nowhere"),
    ],
)
def test_flags_that_cannot_work_are_refused_in_one_line(tiny, clip, tmp_path, flags, message, capsys):
    with pytest.raises((ConfigError, SystemExit)) as caught:
        run(command(tiny, clip, tmp_path / "out", *flags))
    assert message in f"{caught.value} {capsys.readouterr().err}"


def test_one_of_both_is_asked_for(tiny):
    with pytest.raises(ConfigError, match="nothing to compute; name --vae for latents, --text-encoder for"):
        run(["precompute", tiny.file_list])


def test_it_says_how_much_it_is_and_makes_it_and_tells(tiny, clip, tmp_path, capsys):
    run(command(tiny, clip, tmp_path / "out", "--dry-run"))
    assert "2 file(s) of captions, 0 there; the others: 0.000 GB" in capsys.readouterr().out
    vae = ["--vae", tiny.vae, "--resolutions", "16", "--json"]
    run(command(tiny, clip, tmp_path / "out", *vae))
    report = json.loads(capsys.readouterr().out)
    texts = report["text_embeddings"]
    assert report["encoded"] == 40 and texts["encoded"] == 42 and texts["bad"] == {} and texts["finished_before"] == 0
    made = {name: data for name, data in contents(tmp_path / "out").items() if name.endswith(".embeddings")}
    assert len(made) == 2 and len(contents(tmp_path / "out")) == 4
    assert abs(sum(map(len, made.values())) - texts["projected_bytes"]) < 2 * 1024
    run(command(tiny, clip, tmp_path / "out"))
    assert "0 captions encoded" in capsys.readouterr().out and made.items() <= contents(tmp_path / "out").items()
    # Another size of batches changes at most the last bits.
    for size in (1, 32):
        run(command(tiny, clip, tmp_path / str(size), "--batch-size", size, "--text-dtype", "float32"))
    for path in (tmp_path / "1").iterdir():
        alone, together = CachedFile(path), CachedFile(tmp_path / "32" / path.name)
        assert len(alone) in (16, 26)
        assert max(abs(alone.read(row, 0) - together.read(row, 0)).max() for row in range(len(alone))) <= 1e-5


IMPORTS = """
from pathlib import Path
import paddle
from ppldm.data.filelist import read_sources
from ppldm.data.text.captions import CaptionRule
from ppldm.inference.precompute.encode_texts import encode_texts, measure_texts
from ppldm.inference.precompute.latents_plan import choose_rows
from ppldm.inference.precompute.command import Plan, run
from ppldm.inference.precompute.text_encoder import load_text_encoder
from ppldm.inference.precompute.texts_plan import TextSettings, list_text_tasks
from ppldm.utils.processes.world import World

file_list, text_encoder = sys.argv[1:]

def go(line):
    encoder = load_text_encoder(text_encoder, None, 8, False, "float16", 1, True)
    sources = read_sources(file_list)
    settings = TextSettings(encoder.rule, encoder.width, CaptionRule(), Path(line))
    tasks = list_text_tasks(settings, sources, [selection for _, selection in choose_rows(sources, None, [0], 1)])
    run([Plan(tasks, encoder, (), measure_texts, encode_texts)], 1, World(), False)
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory, tiny, clip):
    """start(folder), as `forking` gives it."""
    with forking(IMPORTS, tmp_path_factory.mktemp("starter") / "log", tiny.file_list, clip) as start:
        yield start


def count_settled(folder) -> int:
    """Embeddings that are there, in files with a name and without one yet."""
    count = 0
    for path in Path(folder).glob("*part*embeddings*"):
        with contextlib.suppress(PartError, FileNotFoundError):
            count += int(np.count_nonzero(CachedFile(path).states))
    return count


@pytest.mark.slow
def test_killed_at_many_moments(start, tmp_path):
    chance, folder, moments = random.Random(3), tmp_path / "killed", []
    assert start(tmp_path / "straight")[1]() == 0
    for _ in range(KILLS):
        wanted = count_settled(folder) + chance.randint(0, 5)
        pid, wait = start(folder)
        stop_when(pid, lambda: count_settled(folder) > wanted)  # noqa: B023
        kill(pid)
        assert wait() in (signal.SIGKILL, 0)
        moments.append(count_settled(folder))
        # What has its name is whole.
        for path in folder.glob("part*.embeddings"):
            assert CachedFile(path).states.all()
    assert len({*moments}) > KILLS // 3
    assert start(folder)[1]() == 0
    assert contents(folder) == contents(tmp_path / "straight")
