"""Names: fetched from a hub (here a small server of our own) once, checked, and never with --offline."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from small_weights import small_weights, write_clip

from ppldm.utils.errors import ModelError
from ppldm.utils.variables import is_offline
from ppldm.weights.fetch import PublishedFile, check_name, find_weights, locate_model
from ppldm.weights.source import COMPONENT_FOLDERS, read_component
from ppldm.weights.write import write_weights

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of a hub: the list of a model's files, and these. `folder`: those of owner/model."""

    folder: Path
    asked: list

    def do_GET(self):
        self.answer(True)

    def do_HEAD(self):
        self.answer(False)

    def answer(self, with_body: bool):
        self.asked.append(self.path)
        files = sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file())
        headers, body, status = {}, b"", 200
        if self.path.startswith("/api/models/owner/model"):
            body = json.dumps(
                {
                    "id": "owner/model",
                    "sha": COMMIT,
                    "siblings": [{"rfilename": f, "size": (self.folder / f).stat().st_size} for f in files],
                }
            ).encode()
        elif self.path.startswith("/models/community/owner/paddle/"):
            # Paddle's server: files alone.
            file = self.folder.parent / "paddle" / self.path.split("/", 5)[5]
            status, body = (200, file.read_bytes()) if file.is_file() else (404, b"")
        elif self.path.startswith("/owner/model/resolve/"):
            content = (self.folder / self.path.split("/", 5)[5]).read_bytes()
            body = content
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        else:
            status, headers = 404, {"X-Error-Code": "RepoNotFound"}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    write_weights(small_weights(), "diffusers", tmp_path / "model")
    (tmp_path / "model" / "unet" / "pytorch_model.bin").write_bytes(b"a pickle that nobody needs")
    handler = type("OneHub", (Hub,), {"folder": tmp_path / "model", "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    handler.url = f"http://127.0.0.1:{server.server_port}"
    handler.home = tmp_path / "home"
    handler.process, handler.imports = None, ()
    yield handler
    if handler.process:
        handler.process.stdin.close()
        handler.process.wait()
    server.shutdown()
    server.server_close()


PADDLES = ("paddlenlp.utils.download.bos_download",)  # where one fetch after another asks Paddle's server
# Runs the code of each line in a process of its own, and says with which status it ended.
FETCHER = """
import importlib, json, os, sys, traceback
from huggingface_hub import snapshot_download
import requests
import ppldm.weights.fetch, ppldm.weights.formats.files, ppldm.weights.source
for name in sys.argv[2:]:
    importlib.import_module(name)

def run(code):
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as ended:
        return ended.code
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{sys.argv[1]}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    status = run(json.loads(line))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""


def fetch(hub, name: str, *flags, code: str = ""):
    """In a process of its own, since huggingface_hub reads its settings when it is imported; one imports it for all."""
    code = code or (
        "from ppldm.utils.errors import exit_on_error\n"
        "from ppldm.weights.fetch import locate_model\n"
        "from ppldm.weights.formats.files import weight_files\n"
        "from ppldm.weights.source import COMPONENT_FOLDERS, find_component\n"
        "with exit_on_error():\n"
        f"    path = locate_model({name!r}, {'offline' in flags})\n"
        "    print(path, sum(len(weight_files(find_component(path, kind))) for kind in COMPONENT_FOLDERS))\n"
    )
    env = {
        "PPNLP_ENDPOINT": hub.url,
        "PPNLP_HOME": str(hub.home),
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(hub.home),
        "PYTHONPATH": str(ROOT),
        "NO_PROXY": "127.0.0.1",
    }
    if hub.process is None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        hub.process = subprocess.Popen(
            [sys.executable, "-c", FETCHER, hub.home.parent, *hub.imports], env=os.environ | env, **pipes
        )
    hub.process.stdin.write(f"{json.dumps(code)}\n")
    hub.process.stdin.flush()
    status = int(hub.process.stdout.readline())
    said = ((hub.home.parent / name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(code, status, *said)


@pytest.mark.turn("a model is fetched by its name", 1)
@pytest.mark.slow
def test_a_name_is_fetched_once_and_checked(hub):
    hub.imports = PADDLES
    missing = fetch(hub, "owner/model", "offline")
    assert (
        missing.returncode == 1
        and "no folder owner/model here (check the path), no model of that name in the cache" in missing.stderr
        and not hub.asked
    )
    first = fetch(hub, "owner/model")
    assert first.returncode == 0, first.stderr
    assert first.stdout.split()[1] == "3"
    assert any("unet" in path for path in hub.asked) and not any(path.endswith(".bin") for path in hub.asked)
    hub.asked.clear()
    again = fetch(hub, "owner/model", "offline")
    assert again.stdout == first.stdout and not hub.asked
    for name in ("owner/model@fp16", "owner/model/unet@fp16"):
        done = fetch(hub, name, code=f"from ppldm.weights.fetch import locate_model; locate_model({name!r})")
        assert done.returncode == 0, done.stderr
        assert any(path.startswith("/api/models/owner/model/revision/fp16") for path in hub.asked)
        hub.asked.clear()
    unknown = fetch(hub, "owner/nothing")
    assert (
        unknown.returncode == 1
        and "no folder owner/nothing here (check the path), and the hub gives no model" in unknown.stderr
    )
    # A file that changed on the way, or in the cache.
    shutil.rmtree(hub.home)
    file = hub.folder / "unet" / "diffusion_pytorch_model.safetensors"
    assert fetch(hub, "owner/model").returncode == 0
    (cached,) = hub.home.rglob("snapshots/*/unet/diffusion_pytorch_model.safetensors")
    cached.resolve().write_bytes(file.read_bytes()[:-4] + b"abcd")
    damaged = fetch(hub, "owner/model")
    assert damaged.returncode == 1 and "its SHA-256 is not the hub's" in damaged.stderr


@pytest.mark.turn("a model is fetched by its name", 1)
@pytest.mark.slow
def test_a_model_without_components_is_fetched_whole(hub):
    """As a CLIP is published: config, tokenizer and weights side by side."""
    shutil.rmtree(hub.folder)
    hub.folder.mkdir()
    for name in ("config.json", "vocab.json", "merges.txt", "pytorch_model.bin", "flax_model.msgpack"):
        (hub.folder / name).write_text("{}")
    code = (
        "from ppldm.weights.fetch import find_weights\n"
        "print(*sorted(file.name for file in find_weights('owner/model', {}).iterdir()))\n"
    )
    done = fetch(hub, "owner/model", code=code)
    assert done.stdout.split() == ["config.json", "merges.txt", "pytorch_model.bin", "vocab.json"], done.stderr


@pytest.mark.turn("a model is fetched by its name", 1)
@pytest.mark.slow
def test_a_text_encoder_that_is_published_by_itself(hub):
    """A name of two pieces, such as openai/clip-vit-large-patch14, with the files beside each other."""
    shutil.rmtree(hub.folder)
    shutil.move(write_clip(hub.folder.parent / "clip"), hub.folder)
    for file in (hub.folder.parent / "clip/tokenizer").iterdir():
        shutil.move(file, hub.folder)
    code = (
        "from pathlib import Path\n"
        "from ppldm.weights.source import read_component\n"
        "found = read_component('text_encoder', 'owner/model')\n"
        "print(len(found.arrays), *sorted(file.name for file in Path(found.source).iterdir()))\n"
    )
    done = fetch(hub, "owner/model", code=code)
    number = len(read_component("text_encoder", hub.folder).arrays)
    assert done.stdout.split() == [str(number), "config.json", "merges.txt", "model.safetensors", "vocab.json"], (
        done.stderr
    )


@pytest.mark.turn("a model is fetched by its name", 1)
@pytest.mark.slow
def test_paddles_server_is_asked_where_the_hub_has_not_got_it(hub):
    hub.imports = PADDLES
    write_weights(small_weights(), "ppdiffusers", hub.folder.parent / "paddle")
    first = fetch(hub, "owner/paddle")
    assert first.returncode == 0, first.stderr
    assert first.stdout.split()[1] == "3"
    hub.asked.clear()
    assert fetch(hub, "owner/paddle", "offline").stdout == first.stdout and not hub.asked


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A server of files, which cuts `short` off and sends an error for what it has not got."""
    content = bytes(range(256)) * 4096

    class Files(BaseHTTPRequestHandler):
        asked = []

        def do_GET(self):
            self.asked.append(self.path)
            known = self.path in ("/a.pth", "/short.pth")
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(content) if known else 0))
            self.end_headers()
            self.wfile.write(content[: 1000 if "short" in self.path else None] if known else b"")

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    url, right = f"http://127.0.0.1:{server.server_port}", hashlib.sha256(content).hexdigest()[:8]
    made = {"a": f"{url}/a.pth", "short": f"{url}/short.pth", "gone": f"{url}/gone.pth"}
    yield Files, content, {name: PublishedFile(one, right) for name, one in made.items()}
    server.shutdown()
    server.server_close()


def test_a_published_file_is_fetched_once_and_whole(files, tmp_path):
    server, content, names = files
    with pytest.raises(ModelError, match=f"network is not to be used; download {names['a'].url} to that path"):
        find_weights("a", names, offline=True)
    assert server.asked == []
    path = find_weights("a", names)
    assert path.read_bytes() == content and server.asked == ["/a.pth"]
    assert find_weights("a", names) == find_weights("a", names, offline=True) == find_weights(path, {}) == path
    assert server.asked == ["/a.pth"]
    path.unlink()
    wrong = {"a": PublishedFile(names["a"].url, "01234567")}
    for name, known, message in (
        ("a", wrong, "another SHA-256 than is published"),
        ("short", names, "short.pth (ended after 1000 of|cannot be fetched)"),
        ("gone", names, "gone.pth cannot be fetched .404"),
        ("b", names, r"no folder or file b; check the path, or give a name \(a, short, gone\)"),
    ):
        with pytest.raises(ModelError, match=message):
            find_weights(name, known)
        assert not path.exists() and not [*path.parent.iterdir()]


@pytest.mark.parametrize(
    "path, meant",
    [
        ("quickstart/difusion", "did you mean quickstart/diffusion?"),
        ("quikstart/diffusion/pipline", "did you mean quickstart/diffusion/pipeline?"),
        ("quikstart", "did you mean quickstart?"),
        ("quickstart/vae", "check the path"),
        ("openai/clip-vit-base-patch32", "check the path"),
        ("/nowhere/diffusion", "check the path"),
    ],
)
def test_a_mistyped_path_is_answered_with_the_nearest_one(path, meant, tmp_path, monkeypatch):
    (tmp_path / "quickstart/diffusion/pipeline").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=re.escape(meant)):
        locate_model(path, offline=True)


@pytest.mark.turn("a model is fetched by its name", 1)
@pytest.mark.slow
@pytest.mark.parametrize("repository, files", [
    ("owner/model", ("merges.txt", "vocab.json")),
    ("owner/paddle", ("merges.txt", "vocab.json")),
    ("owner/paddle", ("vocab.txt", "tokenizer_config.json")),
])  # fmt: skip
def test_a_text_encoder_by_name_comes_with_its_tokenizer(hub, repository, files):
    folder = hub.folder if repository == "owner/model" else hub.folder.parent / "paddle"
    form = "diffusers" if folder == hub.folder else "ppdiffusers"
    write_weights(small_weights(), form, folder)
    (folder / "tokenizer").mkdir(exist_ok=True)
    for name in files:
        (folder / "tokenizer" / name).write_text("{}")
    (encoder,) = (name for name in COMPONENT_FOLDERS["text_encoder"] if (folder / name).is_dir())
    code = (
        "from ppldm.weights.fetch import locate_model\n"
        "from ppldm.weights.source import open_model\n"
        f"path = locate_model('{repository}/{encoder}', kinds=['text_encoder'])\n"
        "print(path.name, *sorted(file.name for file in open_model(path).tokenizer.iterdir()))\n"
    )
    found = fetch(hub, repository, code=code)
    assert found.stdout.split() == [encoder, *sorted(files)], found.stderr
    assert not any("/unet/" in path and not path.endswith(".json") for path in hub.asked)


def test_paths_are_not_names(tmp_path):
    assert locate_model(tmp_path) == tmp_path
    for wrong in (tmp_path / "none", "./none", "~/none-of-this", "none", "some/model.ckpt", "a/b/c/d"):
        with pytest.raises(ModelError, match="no folder or file"):
            locate_model(wrong)


def test_a_mistyped_path_of_three_pieces_asks_nobody(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("outputs/run/vae", "outputs/run/vae_1_0"):
        check_name(name)
    (tmp_path / "outputs").mkdir()
    for wrong in ("outputs/run/vae", "outptus/run/model"):
        with pytest.raises(ModelError, match="no folder or file"):
            check_name(wrong)


def test_a_path_of_two_pieces_that_is_not_there_asks_nobody(tmp_path, monkeypatch):
    """The folder is here that it lies in, unless an owner's models do: then only what is near was meant as a path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/mine/diffusion").mkdir(parents=True)
    (tmp_path / "owner/mine/unet").mkdir(parents=True)
    for wrong, meant in (("outputs/mien", "outputs/mine"), ("owner/mien", "owner/mine")):
        with pytest.raises(ModelError, match=f"no folder or file {wrong}; did you mean {meant}?"):
            check_name(wrong)
    for name in ("owner/another-model", "elsewhere/mien"):
        check_name(name)
    with pytest.raises(ModelError, match="no folder or file outputs/another-model; check the path"):
        check_name("outputs/another-model")
    (tmp_path / "outputs/mine/diffusion/run.json").write_text("{}")
    with pytest.raises(ModelError, match="nothere; name one that is there, as the run outputs/mine/diffusion"):
        check_name("nothere")


@pytest.mark.parametrize("name", ["PPLDM_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_by_environment(monkeypatch, name):
    monkeypatch.delenv("PPLDM_OFFLINE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert not is_offline() and is_offline(True)
    monkeypatch.setenv(name, "1")
    assert is_offline()


def command(hub, *words) -> subprocess.CompletedProcess:
    code = (
        "from ppldm.cli.main import run\n"
        "from ppldm.utils.errors import exit_on_error\n"
        f"with exit_on_error():\n    run(['fetch', *{words}])\n"
    )
    return fetch(hub, "", code=code)


@pytest.mark.turn("a model is fetched by its name", 1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["owner/model", "owner/model/vqvae", "alone"])
def test_the_command_fetches_what_it_said_before(hub, name):
    (hub.folder / "vqvae" / "pytorch_model.bin").write_bytes(b"not needed")
    shutil.move(hub.folder / "unet" / "diffusion_pytorch_model.safetensors", hub.folder.parent / "taken")
    if name == "alone":
        name = "owner/model"
        for path in [*hub.folder.iterdir()]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for file in ("config.json", "model.safetensors", "pytorch_model.bin", "flax_model.msgpack"):
            (hub.folder / file).write_text("{}")
    missing = command(hub, name, "--offline")
    assert missing.returncode == 1 and "network is not to be used" in missing.stderr and not hub.asked
    planned = json.loads(command(hub, name, "--dry-run", "--json").stdout)
    assert planned["folder"] is None and not [*hub.home.rglob("*.safetensors")] and planned["bytes"] > 0
    pickles = [file for file in planned["files"] if file.endswith(".bin")]
    assert pickles == (["unet/pytorch_model.bin"] if name == "owner/model" and (hub.folder / "unet").is_dir() else [])
    made = json.loads(command(hub, name, "--json").stdout)
    lies = Path(made["folder"]).relative_to(hub.home / "hub/models--owner--model/snapshots" / COMMIT)
    found = {(lies / file).as_posix(): size for file, size in made["files"].items()}
    assert found == {file: size for file, size in planned["files"].items() if Path(file).is_relative_to(lies)}
    hub.asked.clear()
    text = command(hub, name, "--offline").stdout
    assert (
        text == f"{name}: {len(found)} files, {sum(found.values()) / 1e6:,.1f} MB; in {made['folder']}\n"
        and not hub.asked
    )
    out = hub.home / "own"
    copied = json.loads(command(hub, name, "--offline", "--json", "--out", str(out)).stdout)
    assert copied == made | {"folder": str(out)} and not any(path.is_symlink() for path in out.rglob("*"))
    again = command(hub, name, "--offline", "--out", str(out))
    assert again.returncode == 2 and "own is there already" in again.stderr


@pytest.mark.turn("a model is fetched by its name", 1)
@pytest.mark.slow
def test_the_command_says_what_cannot_be_fetched(hub):
    hub.imports = PADDLES
    write_weights(small_weights(), "ppdiffusers", hub.folder.parent / "paddle")
    for words in (["owner/nothing"], ["owner/nothing", "--dry-run"], ["owner/paddle", "--dry-run"]):
        done = command(hub, *words)
        assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: there is no folder owner/"), (
            words
        )
    assert "owner/paddle: " in command(hub, "owner/paddle").stdout
