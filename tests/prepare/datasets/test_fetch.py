"""A file arrives whole, once, and only as it was stated, however its server behaves."""

import hashlib

import pytest
from dataset_server import serving

from ppldm.prepare.datasets import fetch as fetching
from ppldm.prepare.datasets.fetch import RemoteFile, fetch
from ppldm.utils.errors import DataError, EnvironmentProblem

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(fetching, "_FIRST_WAIT_SECONDS", 0.0)
    with serving({("", "a.tar"): CONTENT}) as server:
        yield server


def remote(server, **facts) -> RemoteFile:
    return RemoteFile("folder/a.tar", f"{server.url}/a.tar", **{"page": "http://page", **facts})


@pytest.mark.parametrize("busy", [0, 1, 7])
@pytest.mark.parametrize("drops", [0, 1, 12])
def test_each_byte_is_sent_once(server, tmp_path, busy, drops):
    server.busy, server.drops = busy, drops
    path = fetch(remote(server, sha256=hashlib.sha256(CONTENT).hexdigest()), tmp_path)
    assert path.read_bytes() == CONTENT and server.sent.total() == len(CONTENT)
    assert [one.name for one in path.parent.iterdir()] == ["a.tar"]
    hits = server.hits.total()
    (tmp_path / "folder/.a.tar.part.json").write_text("{}")  # as a kill leaves it between two steps
    assert fetch(remote(server), tmp_path) == path and server.hits.total() == hits
    assert [one.name for one in path.parent.iterdir()] == ["a.tar"]


def test_a_server_that_never_answers_is_given_up_and_what_came_stays(server, tmp_path):
    server.drops = 1
    server.busy = 8
    with pytest.raises(EnvironmentProblem, match="answers 429.*same command goes on"):
        fetch(remote(server), tmp_path)
    server.hits.clear()
    server.busy, server.drops = 0, 100
    with pytest.raises(EnvironmentProblem, match="bytes have arrived"):
        fetch(remote(server, size=len(CONTENT) + 1), tmp_path)
    part = tmp_path / "folder/.a.tar.part"
    assert CONTENT.startswith(part.read_bytes())


def test_a_file_that_changes_meanwhile_is_fetched_anew(server, tmp_path):
    server.drops, server.busy = 1, 0
    part = tmp_path / "folder/.a.tar.part"
    part.parent.mkdir()
    part.write_bytes(b"of another state")
    (part.parent / ".a.tar.part.json").write_text('{"version": "\\"older\\""}')
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT


def test_what_is_not_as_stated_is_not_kept(server, tmp_path):
    with pytest.raises(DataError, match="SHA-256 is not the one stated"):
        fetch(remote(server, sha256="0" * 64), tmp_path)
    assert not list((tmp_path / "folder").iterdir())
    (tmp_path / "folder/a.tar").write_bytes(b"short")
    assert fetch(remote(server, size=len(CONTENT)), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "facts, message",
    [
        ({"url": "missing"}, r"not there any longer \(the server answers 404\); http://page"),
        ({"is_link": True}, r"is refused \(403\): such links expire; get a new list at http://page"),
        ({}, r"not open to everybody \(403\); accept the terms at http://page.*HF_TOKEN"),
        ({"url": ""}, "name the list with its link by --links"),
    ],
)
def test_refusals_say_what_to_do(server, tmp_path, facts, message):
    server.refused = {"a.tar"}
    file = remote(server)
    facts = facts | ({"url": f"{server.url}/none"} if facts.get("url") else {})
    with pytest.raises(DataError, match=message):
        fetch(RemoteFile(**{**vars(file), **facts}), tmp_path)


def test_the_token_goes_to_the_hub_only(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", server.token)
    server.gated = {""}
    with pytest.raises(DataError, match="401"):
        fetch(remote(server), tmp_path)
    assert fetch(remote(server, is_hub=True), tmp_path).read_bytes() == CONTENT
