"""A trained model is on the hub, byte by byte, when its run has ended; the token is nowhere else."""

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flask import Flask, request
from served import served

from ppldm.training.commands.train import read_recipe
from ppldm.training.hub import check_hub
from ppldm.training.metrics import read_metrics
from ppldm.utils.errors import ConfigError

ROOT, TOKEN = Path(__file__).resolve().parents[2], "hf_hidden7c1f"


class Hub:
    """The part of the hub's interface that huggingface_hub takes to send a folder. files: content by path of each
    repository; large ones come as LFS objects."""

    def __init__(self, owner: str = "me"):
        self.files: dict[str, dict[str, bytes]] = {}
        self.private, self.objects, self.messages, self.owner = {}, {}, [], owner
        self.application = app = Flask("hub")
        for rule, answer in {
            "/api/repos/create": self.create,
            "/api/validate-yaml": lambda: {"errors": [], "warnings": []},
            "/api/models/<owner>/<name>/preupload/main": self.sort,
            "/api/models/<owner>/<name>/commit/main": self.commit,
            "/<owner>/<name>.git/info/lfs/objects/batch": self.batch,
        }.items():
            app.add_url_rule(rule, rule, answer, methods=["POST"])
        app.add_url_rule("/objects/<oid>", "put", self.put, methods=["PUT"])
        app.before_request(self.refuse)

    def refuse(self):
        is_object = request.path.startswith("/objects/")
        return None if is_object or request.headers.get("Authorization") == f"Bearer {TOKEN}" else ({}, 401)

    def create(self):
        owner, name = request.json.get("organization") or self.owner, request.json["name"]
        if owner != self.owner:
            return {"error": "forbidden"}, 403
        self.files.setdefault(f"{owner}/{name}", {})
        self.private[f"{owner}/{name}"] = request.json["private"]
        return {"url": f"{request.host_url}{owner}/{name}"}

    def sort(self, owner, name):
        how = {one["path"]: "lfs" if one["path"].endswith(".pdparams") else "regular" for one in request.json["files"]}
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in how.items()]}

    def batch(self, owner, name):
        place = f"{request.host_url}objects/"
        found = [
            one | {"actions": {"upload": {"href": place + one["oid"]}}}
            for one in request.get_json(force=True)["objects"]
        ]
        return {"transfer": "basic", "objects": found}

    def put(self, oid):
        self.objects[oid] = request.get_data()
        return {}

    def commit(self, owner, name):
        for line in map(json.loads, request.get_data().splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            else:
                content = base64.b64decode(value["content"]) if line["key"] == "file" else self.objects[value["oid"]]
                self.files[f"{owner}/{name}"][value["path"]] = content
        return {"commitUrl": f"{request.host_url}{owner}/{name}/commit/1", "commitOid": "1" * 40}


# Imports read the variables of the hub: a training that has them from its start, which is not `late`, starts cold.
LATE = """
import json, os, sys
os.environ.update(json.loads(sys.argv.pop(1)))
from huggingface_hub import constants
constants.ENDPOINT = os.environ["HF_ENDPOINT"]
from ppldm.cli.main import main
main()
"""


def train(flags, hub: str, late: bool = True, **variables):
    """What a training says, as a user gives it, and its exit status."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environ["PYTHONPATH"], variables = str(ROOT), variables | {"HF_ENDPOINT": hub.rstrip("/"), "HF_HOME": "hf"}
    start = ["-c", LATE, json.dumps(variables)] if late else ["-m", "ppldm"]
    place = Path(flags[flags.index("--output_dir") + 1]).parent
    done = subprocess.run(
        [sys.executable, *start, "train", *flags], env=environ if late else environ | variables, cwd=place,
        capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout + done.stderr, done.returncode


def written(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_the_trained_model_is_sent_with_its_card(tiny, tmp_path, named):
    """By a token on the command line, and by HF_TOKEN; a run that is done sends its model again."""
    hub, name = Hub(), "me/my-model" if named else "me/run"
    flags = [*tiny.flags(tmp_path / "run", max_steps=2), "--push_to_hub"]
    token = {} if named else {"HF_TOKEN": TOKEN}
    flags += ["--hub_model_id", name, "--hub_token", TOKEN] if named else []
    with served(hub.application) as address:
        said, status = train(flags, address, late=False, **token)
        assert status == 0, said
        sent = hub.files[name]
        assert sent == written(tmp_path / "run/pipeline") and "README.md" in sent and hub.private[name]
        large = [path for path in sent if path.endswith(".pdparams")]
        assert {hashlib.sha256(sent[path]).hexdigest() for path in large} == hub.objects.keys()
        sent.pop("README.md")
        again, status = train(flags, address, **token)
        assert status == 0, again
        assert "already trained" in again and "README.md" in hub.files[name]
    assert hub.messages == ["After update 2"] * 2 and f"{name}/tree/main" in said
    assert TOKEN not in said + again
    assert not [path for path, content in written(tmp_path).items() if TOKEN.encode() in content]
    recipe = (tmp_path / "run/recipe.yaml").read_text()
    assert ("hub_token: ${oc.env:HF_TOKEN,null}" in recipe) == named
    read = read_recipe(["--config", str(tmp_path / "run/recipe.yaml"), "--push_to_hub", "false"], True, None)
    assert read.training.hub_token is None


@pytest.mark.slow
def test_a_refusal_comes_before_the_first_update_in_one_line(tiny, tmp_path):
    flags = [*tiny.flags(tmp_path / "run", max_steps=2), "--push_to_hub", "--hub_model_id", "other/model"]
    with served(Hub().application) as address:
        said, status = train(flags, address, HF_TOKEN=TOKEN)
    last = said.splitlines()[-1]
    assert status and last.startswith("error: --push_to_hub other/model: the hub answers 403; name another with"), said
    assert not (tmp_path / "run/metrics.jsonl").exists() or not read_metrics(tmp_path / "run/metrics.jsonl")
    said, status = train([*flags, "--hub_token", "wrong"], address, HF_TOKEN=TOKEN)
    assert status and "the hub is not reached" in said.splitlines()[-1]


@pytest.mark.parametrize("offline, told", [(False, "needs a token of your account"), (True, "needs the network")])
def test_without_token_or_network_nothing_begins(tiny, tmp_path, monkeypatch, offline, told):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "PPLDM_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("huggingface_hub.utils._token.constants.HF_TOKEN_PATH", str(tmp_path / "none"), raising=False)
    if offline:
        monkeypatch.setenv("PPLDM_OFFLINE", "1")
    with pytest.raises(ConfigError, match=f"--push_to_hub {told}"):
        read_recipe([*tiny.flags(tmp_path / "run"), "--push_to_hub"], True)
    if not offline:
        check_hub(read_recipe([*tiny.flags(tmp_path / "run"), "--push_to_hub", "--hub_token", "one"], True).training)
