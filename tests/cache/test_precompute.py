"""`ppldm precompute` as a command: its flags, its account, several processes, kills."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import needs
import numpy as np
import pytest
from forking import forking, kill, stop_when
from sampling import ALL
from small_disk import fill, small_disk
from small_weights import write_clip

from ppldm.cache import command as module
from ppldm.cli.main import run
from ppldm.data.cached.file import CachedFile, Latents
from ppldm.utils.errors import ConfigError, OutputError, PartError

KILLS = {"latents": 30 if ALL else 6, "embeddings": 10 if ALL else 5}


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip"))


def command(tiny, folder, *flags) -> list[str]:
    words = ["precompute", tiny.file_list, "--vae", tiny.vae, "--resolutions", "16", "32", "--crops", "2", "--flips"]
    return [*words, "--latents-dir", str(folder), "--batch-size", "4", "--num-workers", "1", *map(str, flags)]


def text_command(tiny, clip, folder, *flags) -> list[str]:
    words = ["precompute", tiny.file_list, "--text_encoder", str(clip), "--latents-dir", str(folder)]
    return [*words, "--batch-size", "4", "--num-workers", "1", *map(str, flags)]


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--crops", "random"], "--crops random must be center, smart, or a number"),
        (["--crops", "0"], "--crops 0 must be center, smart, or a number"),
        (["--dtype", "int8"], "--dtype int8 is not one of float16, bfloat16, float32"),
        (["--batch-size", "0"], "--batch-size 0 must be 1 or more"),
        (["--resolutions", "16", "20"], "pictures of 20 x 20 cannot be encoded"),
        (["--engine", "tensorrt"], "invalid choice: 'tensorrt'"),
        (["--engine", "openvino-bfloat16"], "--engine openvino-bfloat16 would change the latents"),
        (["--bucket-group-size", "-1"], "--bucket-group-size no less than 0"),
        (["--buckets", "wide"], "--buckets wide is neither off, ratios, steps nor"),
        (["--crop-fraction", "2"], "crop_fraction is 2"),
        (["--text-encoder", "CLIP", "--text-dtype", "int8"], "--text-dtype int8 is not one of float16, bfloat16"),
        (["--text-encoder", "CLIP", "--model-max-length", "2"], "captions of 2 tokens have no room"),
        (["--text-encoder", "CLIP", "--model-max-length", "90"], "knows 520 words and 77 positions"),
        (["--captions", "caption"], "--captions"),
        (["--caption-choice", "last"], "--caption-choice"),
        (["--text-encoder", "CLIP", "--tokenizer", "nowhere"], "no tokenizer nowhere"),
    ],
)
def test_flags_that_cannot_work_are_refused_in_one_line(tiny, clip, tmp_path, flags, message, capsys):
    with pytest.raises((ConfigError, SystemExit)) as caught:
        run(command(tiny, tmp_path / "out", *(str(clip) if flag == "CLIP" else flag for flag in flags)))
    assert message in f"{caught.value} {capsys.readouterr().err}"


def test_one_of_both_is_asked_for(tiny):
    with pytest.raises(ConfigError, match="nothing to compute; name --vae for latents, --text-encoder for"):
        run(["precompute", tiny.file_list])


def test_it_says_how_much_it_is_and_makes_it_and_tells(tiny, tmp_path, capsys):
    run(command(tiny, tmp_path / "out", "--dry-run", "--json"))
    planned = json.loads(capsys.readouterr().out)
    assert planned["files"] == 4 and planned["finished_before"] == 0 and planned["projected_hours"] > 0
    assert contents(tmp_path / "out") == {}
    run(command(tiny, tmp_path / "out", "--json"))
    report = json.loads(capsys.readouterr().out)
    made = contents(tmp_path / "out")
    assert report["encoded"] == 40 * 2 * 4 and report["found"] == 0 and report["bad"] == {} and len(made) == 4
    assert abs(sum(map(len, made.values())) - planned["projected_bytes"]) < 4 * 1024
    run(command(tiny, tmp_path / "out"))
    assert "0 crops encoded" in capsys.readouterr().out and contents(tmp_path / "out") == made
    # Another size of batches changes at most the last bits.
    run(command(tiny, tmp_path / "other", "--batch-size", "32", "--dtype", "float32"))
    run(command(tiny, tmp_path / "other", "--batch-size", "1", "--dtype", "float32", "--latents-dir", tmp_path / "one"))
    for path in (tmp_path / "other").iterdir():
        together, alone = Latents(path), Latents(tmp_path / "one" / path.name)
        differences = [
            abs(together.read(row, v) - alone.read(row, v)).max() for row in range(len(alone)) for v in range(4)
        ]
        assert len(differences) >= 60 and max(differences) <= 1e-5


def test_of_captions_it_says_how_much_it_is_and_makes_it_and_tells(tiny, clip, tmp_path, capsys):
    run(text_command(tiny, clip, tmp_path / "out", "--dry-run"))
    assert "2 file(s) of captions, 0 there; the others: 0.000 GB" in capsys.readouterr().out
    vae = ["--vae", tiny.vae, "--resolutions", "16", "--json"]
    run(text_command(tiny, clip, tmp_path / "out", *vae))
    report = json.loads(capsys.readouterr().out)
    texts = report["text_embeddings"]
    assert report["encoded"] == 40 and texts["encoded"] == 42 and texts["bad"] == {} and texts["finished_before"] == 0
    made = {name: data for name, data in contents(tmp_path / "out").items() if name.endswith(".embeddings")}
    assert len(made) == 2 and len(contents(tmp_path / "out")) == 4
    assert abs(sum(map(len, made.values())) - texts["projected_bytes"]) < 2 * 1024
    run(text_command(tiny, clip, tmp_path / "out"))
    assert "0 captions encoded" in capsys.readouterr().out and made.items() <= contents(tmp_path / "out").items()
    # Another size of batches changes at most the last bits.
    for size in (1, 32):
        run(text_command(tiny, clip, tmp_path / str(size), "--batch-size", size, "--text-dtype", "float32"))
    for path in (tmp_path / "1").iterdir():
        alone, together = CachedFile(path), CachedFile(tmp_path / "32" / path.name)
        assert len(alone) in (16, 26)
        assert max(abs(alone.read(row, 0) - together.read(row, 0)).max() for row in range(len(alone))) <= 1e-5


@pytest.mark.turn("an engine computes what Paddle does", 1)
@pytest.mark.slow
def test_an_engine_makes_the_same_latents_and_goes_on_with_its_own(tiny, tmp_path, capsys):
    needs.need("engine")
    exact = ("--dtype", "float32", "--json")
    run(command(tiny, tmp_path / "eager", *exact))
    run(command(tiny, tmp_path / "other", *exact, "--engine", "openvino"))
    capsys.readouterr()
    for path in (tmp_path / "eager").iterdir():
        eager, other = Latents(path), Latents(tmp_path / "other" / path.name)
        assert [one.header.get("engine") for one in (eager, other)] == [None, "openvino"] and eager.key == other.key
        cells = [(row, variant) for row in range(len(eager)) for variant in range(4)]
        assert max(abs(eager.read(*cell) - other.read(*cell)).max() for cell in cells) <= 1e-4
    lacking = Latents(other.path, writable=True)
    lacking.forget(0, 0)
    lacking.close()
    with pytest.raises((ConfigError, SystemExit)) as caught:
        run(command(tiny, tmp_path / "other", *exact))
    assert "computed with --engine openvino" in f"{caught.value} {capsys.readouterr().err}"
    run(command(tiny, tmp_path / "other", *exact, "--engine", "openvino"))
    assert json.loads(capsys.readouterr().out)["encoded"] == 1


@pytest.mark.parametrize("left", [0, 3, 10])
def test_a_disk_that_fills_up_is_named_and_the_same_command_finishes_the_job(tiny, tmp_path, monkeypatch, capfd, left):
    """Others fill it once all that is needed was found to fit, but for a few pages."""
    run(command(tiny, tmp_path / "straight"))
    expected, encode_part = contents(tmp_path / "straight"), module.encode_part
    with small_disk(tmp_path / "disk", "1m") as disk:
        fillers = []

        def encode_on_a_filling_disk(*args):
            fillers.extend([] if fillers else [fill(disk, left * os.sysconf("SC_PAGE_SIZE"))])
            return encode_part(*args)

        monkeypatch.setattr(module, "encode_part", encode_on_a_filling_disk)
        with pytest.raises(SystemExit) as caught:
            run(command(tiny, disk))
        (error,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
        assert caught.value.code == OutputError.exit_status
        assert re.fullmatch(
            rf"error: the disk is full for {disk}/\S+ \(No space .*\); free some .* same command.*", error
        )
        finished = {name: data for name, data in contents(disk).items() if not name.startswith((".", "filler"))}
        assert finished.items() < expected.items()
        fillers[0].unlink()
        run(command(tiny, disk, "--json"))
        assert json.loads(capfd.readouterr().out)["repaired"] == 0 and contents(disk) == expected


IMPORTS = """
from pathlib import Path
import paddle
from ppldm.cache.command import run
from ppldm.cache.plan import EmbeddingsRequest, LatentsRequest
from ppldm.cache.plan import choose_rows, make_plan
from ppldm.data.filelist import read_sources
from ppldm.data.images import CropRule
import ppldm.data.kernels
from ppldm.utils.processes.ranks import World

file_list, model, kind = sys.argv[1:]
if kind == "latents":
    request, sizes = LatentsRequest(model=model, batch_size=4, crops=CropRule(num_crops=2, flip=True)), [16, 32]
else:
    request, sizes = EmbeddingsRequest(model=model, batch_size=1, model_max_length=8), [0]

def go(line):
    folder, sources = Path(line), read_sources(file_list)
    folder.mkdir(exist_ok=True)
    run([make_plan(request, request.load(), sources, choose_rows(sources, None, sizes, 1), folder)], 1, World(), False)
"""


@pytest.fixture(scope="module", params=["latents", "embeddings"])
def start(request, tmp_path_factory, tiny, clip):
    """start(folder), as `forking` gives it, and the suffix of the files that it makes."""
    model, log = tiny.vae if request.param == "latents" else clip, tmp_path_factory.mktemp("starter") / "log"
    with forking(IMPORTS, log, tiny.file_list, model, request.param) as start:
        yield start, request.param


def count_settled(folder, suffix) -> int:
    """Arrays that are there, in files with a name and without one yet."""
    count = 0
    for path in Path(folder).glob(f"*part*{suffix}*"):
        with contextlib.suppress(PartError, FileNotFoundError):
            count += int(np.count_nonzero(CachedFile(path).states))
    return count


@pytest.mark.turn("a killed command goes on", 1)
@pytest.mark.slow
def test_killed_at_many_moments(tiny, start, tmp_path):
    (start, suffix), chance, folder, moments = start, random.Random(3), tmp_path / "killed", []
    assert start(tmp_path / "straight")[1]() == 0
    for _ in range(KILLS[suffix]):
        before = count_settled(folder, suffix)
        pid, wait = start(folder)
        if chance.random() < 0.2:
            time.sleep(chance.uniform(0, 0.03))  # while it starts
        else:
            wanted = before + chance.randint(0, 12 if suffix == "latents" else 5)
            stop_when(pid, lambda: count_settled(folder, suffix) > wanted)  # noqa: B023
        kill(pid)
        assert wait() in (signal.SIGKILL, 0)
        moments.append(count_settled(folder, suffix))
        # What has its name is whole.
        for path in folder.glob(f"part*.{suffix}"):
            assert CachedFile(path).states.all()
    assert len({*moments}) > KILLS[suffix] // 3
    assert start(folder)[1]() == 0
    assert contents(folder) == contents(tmp_path / "straight")


@pytest.mark.turn("processes share the work of a command", 1)
@pytest.mark.slow
def test_two_processes_share_the_parts(tiny, clip, tmp_path):
    script = tmp_path / "main.py"  # as pip installs it, under a name that the launcher gives to Python
    script.write_text("from ppldm.cli.main import main\n\nmain()\n")
    launcher = [
        sys.executable,
        "-m",
        "paddle.distributed.launch",
        "--nproc_per_node",
        "2",
        "--log_dir",
        str(tmp_path / "log"),
    ]
    texts = ["--text-encoder", clip, "--text-dtype", "float32"]
    words = [*launcher, str(script), *command(tiny, tmp_path / "two", *texts, "--json")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    run(command(tiny, tmp_path / "one", *texts))
    assert len(contents(tmp_path / "one")) == 6
    for path in (tmp_path / "one").iterdir():  # computed by another number of threads: the last bits may differ
        one, two = Latents(path), Latents(tmp_path / "two" / path.name)
        assert (one.states == two.states).all() and one.text(3) == two.text(3)
        assert all(np.allclose(one.read(row, 0), two.read(row, 0), rtol=2e-3, atol=1e-6) for row in range(len(one)))
    shutil.rmtree(tmp_path / "log")
