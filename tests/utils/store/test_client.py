"""What a store's answers become: whatever can pass is tried again, what cannot is one line that shows no secret."""

import logging
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppldm.utils.errors import ConfigError, StoreError
from ppldm.utils.files import check_address, is_address, shown
from ppldm.utils.store import client

SMALL_FAULTS = ("500", "502", "503", "429", "cut", "flip", "hang up")


@pytest.mark.parametrize("fault", SMALL_FAULTS)
def test_what_passes_is_tried_again(store, tmp_path, fault):
    (tmp_path / "a").write_bytes(bytes(range(256)) * 40)
    store.fail(fault)
    client.put(tmp_path / "a", "s3://bucket/x/a")
    store.fail(*[fault] * 2)
    client.get("s3://bucket/x/a", tmp_path / "b")
    assert fault == "flip" or (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    store.fail(fault)
    assert client.find("s3://bucket/x").keys() == {"a"} and client.find("s3://bucket/none") == {}
    client.remove("s3://bucket/x/a")
    client.remove("s3://bucket/x/a")
    assert client.find("s3://bucket/x") == {}


def test_many_files_are_asked_for_by_folder(store, tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    urls = [f"s3://bucket/{folder}/{number}" for folder in "ab" for number in range(5)]
    for url in urls:
        client.put(tmp_path / "a", url)
    store.requests()
    client.survey(urls)
    assert {client.stat(url).size for url in urls} == {1} and len(store.requests()) == 2
    with pytest.raises(StoreError, match="there is no s3://bucket/a/none") as raised:
        client.stat("s3://bucket/a/none")
    assert raised.value.missing and not store.requests()


def test_a_store_that_stays_away_is_one_line_after_a_while(store, monkeypatch, caplog):
    monkeypatch.setenv("PPLDM_STORE_RETRY_SECONDS", "0.5")
    store.tell(gone=True)
    caplog.set_level(logging.INFO, "ppldm")
    with pytest.raises(StoreError, match=r"cannot find s3://bucket/a for 0 s \(.*\); see whether the store is there"):
        client.stat("s3://bucket/a")
    assert sum("trying again" in one.message for one in caplog.records if one.levelname == "INFO") <= 1


@pytest.mark.parametrize(
    "fault, message", [("403", "may not find .*set credentials"), ("400", "cannot find .*correct the address")]
)
def test_what_does_not_pass_is_said_at_once(store, fault, message):
    store.fail(*[fault] * 9)
    store.requests()
    with pytest.raises(StoreError, match=message) as raised:
        client.stat("s3://bucket/a")
    assert "hidden-secret" not in str(raised.value) and len(store.requests()) <= 3


def test_a_missing_package_says_what_to_install(monkeypatch):
    for package, url in {"gcsfs": "gs://a/b", "ossfs": "oss://a/b"}.items():
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(StoreError, match=rf"{url} needs the package {package} .*pip install '{package}"):
            client.stat(url)


def test_a_forked_process_speaks_for_itself(store, tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    client.put(tmp_path / "a", "s3://bucket/a")
    if not (pid := os.fork()):
        client.get("s3://bucket/a", tmp_path / "child")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0 and (tmp_path / "child").read_bytes() == b"abc"
    client.get("s3://bucket/a", tmp_path / "parent")


@given(st.text("ab/:", max_size=6), st.text("ps@:", min_size=1, max_size=6), st.text("k=&/", max_size=6))
def test_secrets_are_refused_and_never_shown(path, secret, query):
    secret = f"{secret}SECRET"
    for url in (f"https://u:{secret}@host/{path}?{query}", f"s3://{secret}@bucket/{path}"):
        with pytest.raises(ConfigError) as raised:
            check_address(url)
        assert "SECRET" not in str(raised.value) and "SECRET" not in shown(url)


@pytest.mark.parametrize("text, expected", [("s3://b/c", True), ("HTTPS://b", True), ("ftp://b", False),
                                            ("s3:/b", False), ("/s3://b", False), ("file:///a", False),
                                            ("bos://b/c", True)])  # fmt: skip
def test_addresses(text, expected):
    assert is_address(text) == expected
