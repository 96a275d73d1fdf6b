"""`ppldm app` and `ppldm serve` from the command line: bad calls, the token, stopping, and the example of a client."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import needs
import numpy as np
import pytest
from PIL import Image
from small_weights import small_weights

import ppldm
from ppldm.cli.main import run
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.inference.serving.commands import read_token
from ppldm.inference.serving.jobs import ENDED
from ppldm.utils.errors import ConfigError, PpldmError
from ppldm.weights.write import write_weights

ROOT = Path(__file__).resolve().parents[3]
LIMITS = ("waiting", "pictures", "side", "steps", "memory_mb")
BAD = [
    ([], "--model"),
    (["--model"], "--model"),
    (["--model", "a", "a"], "names a twice"),
    (["--model", ""], "--model"),
    *((["--model", "m", f"--max_{name}", value], f"--max-{name.replace('_', '-')} {value} must be above 0")
      for name in LIMITS for value in ("0", "-1")),
    *((["--model", "m", f"--max-{name.replace('_', '-')}", value], "not an integer: ")
      for name in LIMITS for value in ("x", "1.5", "")),
    *((["--model", "m", "--port", value], "--port") for value in ("-1", "65536", "99999999999", "x", "80.5", "")),
    *((["--model", "m", "--token_file", value], "--token-file")
      for value in ("/nowhere", "/", "EMPTY", "SHORT", "BAD")),
    *((["--model", "m", f"--{name}"], "expected") for name in ("host", "port", "out", "lora", "device", "tokenizer")),
    *((["--model", "m", "--lora", value], "lora") for value in ("/nowhere", "x:y", ":1", "")),
    *((["--model", "m", *words], words[0]) for words in (["--engine", "tensorrt"], ["--dtype", "bfloat16"])),
    *((["--model", "m", *words], words[0]) for words in (["--prt", "1"], ["--what"], ["--max"], ["--page"])),
    (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
    (["--model", "BAD"], "BAD"),
]  # fmt: skip


@pytest.mark.parametrize("command", ["app", "serve"])
@pytest.mark.parametrize("words, said", BAD, ids=range(len(BAD)))
def test_each_bad_call_is_refused_in_a_sentence(command, words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, content in (("EMPTY", ""), ("SHORT", "abc"), ("BAD", "a token of several words")):
        (tmp_path / name).write_text(content)
    (tmp_path / "m").mkdir()
    with pytest.raises((PpldmError, SystemExit)) as found:
        run([command, *words])
    status = getattr(found.value, "code", None) or found.value.exit_status
    shown = capsys.readouterr().err + str(found.value)
    assert status and said in shown
    assert "Traceback" not in shown


def test_there_are_a_hundred_of_them():
    assert 2 * len(BAD) >= 100


def test_the_token_of_a_file(tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef\n")
    assert read_token(str(tmp_path / "token")) == "0123456789abcdef"
    (tmp_path / "token").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(str(tmp_path / "token"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    weights = small_weights(4)
    weights.tokenizer = CaptionTokenizer(build_vocab(["a red heart"]), 77)
    folder = tmp_path_factory.mktemp("served") / "model"
    write_weights(weights, "ppdiffusers", folder)
    return folder


@contextmanager
def serving(*words):
    """(process, address) of a server that has started."""
    command = [sys.executable, "-m", "ppldm", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            lines = []
            for line in server.stderr:
                lines.append(line)
                if found := re.search(r"http://[\d.]+:(\d+)/\S*", line):
                    yield server, found[0]
                    break
            else:
                pytest.fail("".join(lines))
        finally:
            server.kill()


def ask(url, asked=None, **headers):
    body = None if asked is None else json.dumps(asked).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.slow
def test_serving_with_a_token_until_sigterm(model, tmp_path):
    """The client of examples/ draws; at SIGTERM the drawing that is under way is finished, and others are refused."""
    (tmp_path / "token").write_text("0123456789abcdef")
    words = ["--model", str(model), "--port", "0", "--out", str(tmp_path / "out")]
    with serving("serve", *words, "--token_file", str(tmp_path / "token")) as (server, url):
        root, token = url.split("/#token=")
        assert ask(f"{root}/v1/jobs")[0] == 401 and ask(f"{root}/v1/health")[0] == 200 and ask(root)[0] == 404
        client = [sys.executable, "examples/draw_client.py", "a red zebra", "--url", root, "--out", str(tmp_path)]
        few = ["--set", "num_inference_steps=2", "num_samples=2", "sampler=euler"]
        done = subprocess.run([*client, "--token", token, *few], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "does not know: zebra" in done.stderr
        files = [Path(line) for line in done.stdout.splitlines()]
        assert len(files) == 2 and all(Image.open(file).size == (64, 64) for file in files)
        refused = subprocess.run(client, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert refused.returncode == 1 and "the token is missing or wrong" in refused.stderr
        asked = {"prompt": "x", "num_inference_steps": 100}
        jobs = [json.loads(ask(f"{root}/v1/pictures", asked, **{"X-Token": token})[1])["id"] for _ in range(2)]
        while json.loads(ask(f"{root}/v1/jobs/{jobs[0]}", **{"X-Token": token})[1])["step"] == 0:
            time.sleep(0.05)
        server.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 120
        while (health := ask(f"{root}/v1/health"))[0] == 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert json.loads(health[1]) == {"status": "stopping"} and health[0] == 503
        assert ask(f"{root}/v1/pictures", asked, **{"X-Token": token})[0] == 503
        assert server.wait(120) == 0
    names = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert f"{jobs[0]}-00.png" in names and not any(jobs[1] in name for name in names) and len(names) == 3


@pytest.mark.slow
def test_ctrl_c_ends_at_once_and_well(model):
    with serving("app", "--model", str(model), "--port", "0") as (server, url):
        asked = {"prompt": "x", "num_inference_steps": 100}
        job = json.loads(ask(f"{url}v1/pictures", asked)[1])["id"]
        while json.loads(ask(f"{url}v1/jobs/{job}")[1])["step"] == 0:
            time.sleep(0.05)
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0
        assert server.stderr.read().splitlines()[-1].endswith("stopped by Ctrl-C")


@pytest.mark.turn("an engine computes what Paddle does", 1)
@pytest.mark.slow
def test_what_an_engine_draws_is_what_paddle_draws(model):
    """Compiled in the thread that draws; the server still ends as asked."""
    needs.need("engine")
    asked = {"prompt": "a red heart", "num_inference_steps": 3, "num_samples": 2}
    with serving("serve", "--model", str(model), "--port", "0", "--engine", "openvino") as (server, url):
        job = json.loads(ask(f"{url}v1/pictures", asked)[1])
        while job["state"] not in ENDED:
            time.sleep(0.05)
            job = json.loads(ask(f"{url}v1/jobs/{job['id']}")[1])
        pictures = [Image.open(io.BytesIO(ask(f"{url}v1/jobs/{job['id']}/pictures/{place}")[1])) for place in (0, 1)]
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
    assert all(json.loads(one.text["ppldm"])["engine"] == "openvino" for one in pictures)
    expected = ppldm.load(model).generate("a red heart", num_inference_steps=3, num_samples=2)[0].astype(int)
    assert expected.std() > 5
    assert np.abs(np.stack(pictures) - expected).max() <= 1


@pytest.mark.slow
def test_a_port_that_is_taken(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = subprocess.run(
            [sys.executable, "-m", "ppldm", "serve", "--model", str(model), "--port", str(taken.getsockname()[1])],
            capture_output=True, text=True, timeout=120, env=os.environ, cwd=ROOT,
        )  # fmt: skip
    assert done.returncode == 2 and "cannot listen at 127.0.0.1" in done.stderr
    assert "already in use" not in done.stderr, "the server's own words"
