"""Files of a store on this machine: finished or absent, the right bytes, within bounds, never taken from users."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from forking import forking, kill, stop_when
from hypothesis import given
from hypothesis import strategies as st

from ppldm.utils.errors import StoreError
from ppldm.utils.store import cache, client

FORKED = """
from pathlib import Path
from ppldm.utils.store import cache
def go(path):
    cache.hold(Path(path))
"""


def put(tmp_path: Path, name: str, content: bytes) -> Path:
    """The place of a file of the store, which is not here yet."""
    (tmp_path / "source").write_bytes(content)
    client.put(tmp_path / "source", f"s3://bucket/{name}")
    return cache.place_of(f"s3://bucket/{name}")


names = st.text("ab.@-0 é", min_size=1, max_size=5).filter(lambda name: name not in (".", ".."))


@given(
    st.lists(names, min_size=1, max_size=4), st.integers(0, 9**9), st.text(max_size=9), st.sampled_from(["s3", "hdfs"])
)
def test_a_path_says_which_file_it_is(folders, size, tag, scheme):
    url = f"{scheme}://{'' if scheme == 'hdfs' else 'host'}/{'/'.join(folders)}"
    path = cache._place(url, client.Stored(size, tag))
    assert cache.in_store(path) and not cache.in_store("/else") and path.name == folders[-1]
    assert cache.address_of(path) == url == cache.name_of(path) and cache.size_of(path) == size
    assert cache.address_of(path.with_name(f"{path.name}.idx")) == f"{url}.idx"
    assert cache._place(url, client.Stored(size, f"{tag}+")) != path


@pytest.mark.parametrize(
    "faults", [["cut"], ["cut"] * 3, ["flip"], ["500", "cut", "429", "hang up"], ["flip", "503", "cut"]]
)
def test_what_comes_is_what_is_there(store, tmp_path, faults):
    content = os.urandom(100_000)
    path = put(tmp_path, "a", content)
    store.fail(*faults)
    release = cache.hold(path)
    assert path.read_bytes() == content and [one.name for one in path.parent.iterdir()] == ["a"]
    release()


def test_of_a_store_without_checksums_the_size_must_be_right(store, tmp_path, monkeypatch):
    path, lengths = put(tmp_path, "a", os.urandom(1000)), iter([10, 1000])
    monkeypatch.setattr(client, "stat_now", lambda url, stat_now=client.stat_now: replace(stat_now(url), md5=""))

    def get(url, target, get=client.get):
        get(url, target)
        os.truncate(target, next(lengths))

    monkeypatch.setattr(client, "get", get)
    cache.bring(path)
    assert path.stat().st_size == 1000


def test_what_is_another_now_is_an_error(store, tmp_path):
    path = put(tmp_path, "a", os.urandom(1000))
    path.unlink(missing_ok=True)
    client.put(Path(__file__), "s3://bucket/a")
    with pytest.raises(StoreError, match="s3://bucket/a has changed since this command began"):
        cache.bring(path)
    assert not list(path.parent.iterdir())


def test_an_etag_that_is_no_md5_is_found_out(store, tmp_path, monkeypatch):
    path = put(tmp_path, "a", b"encrypted")
    found = client.stat_now("s3://bucket/a")
    monkeypatch.setattr(client, "stat_now", lambda url: client.Stored(found.size, found.tag, "0" * 32))
    cache.bring(path)
    assert path.read_bytes() == b"encrypted"


def test_one_fetches_for_all(store, tmp_path):
    path = put(tmp_path, "a", os.urandom(10_000))
    store.requests()
    store.tell(latency=0.05)
    threads = [threading.Thread(target=cache.hold, args=(path,)) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [method for method, _ in store.requests()].count("GET") == 1


def test_room_is_made_of_what_was_used_longest_ago_and_nobody_holds(store, tmp_path, monkeypatch, caplog):
    paths = [put(tmp_path, str(number), bytes(1000 * [number])) for number in range(6)]
    monkeypatch.setenv("PPLDM_STORE_CACHE_GB", "0.000003")  # three of them
    release = cache.hold(paths[0])
    for path in (*paths[1:3], paths[1]):
        cache.hold(path)()
    index = paths[2].with_name("2.idx")
    index.write_bytes(b"beside")
    cache.bring(paths[3])
    assert [path.exists() for path in paths[:4]] == [True, True, False, True] and index.exists()
    # A child has what its parent held, also when the parent gives it back.
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.read(reader, 1)
        os._exit(0)
    release()
    for path in paths[4:]:
        cache.bring(path)
    assert [path.exists() for path in paths] == [True, False, False, False, True, True]
    os.write(writer, b"x")
    os.waitpid(pid, 0)
    cache.bring(paths[3])
    assert not paths[0].exists() and "raise it" not in caplog.text
    held = [cache.hold(path) for path in paths[3:]]
    cache.bring(paths[0])
    assert all(path.exists() for path in (paths[0], *paths[3:])) and "PPLDM_STORE_CACHE_GB; raise it" in caplog.text
    for one in held:
        one()


@pytest.mark.slow
def test_whoever_is_killed_leaves_nothing_in_the_way(store, tmp_path):
    content = os.urandom(2_000_000)
    with forking(FORKED, tmp_path / "log") as start:
        for number in range(4):
            path = put(tmp_path, f"{number}", content)
            store.tell(latency=0.1)
            pid, wait = start(path)
            stop_when(pid, lambda path=path, number=number: len(list(path.parent.glob(".*"))) and number % 2 == 0)
            kill(pid)
            wait()
            store.tell(latency=0)
            cache.hold(path)()
            assert path.read_bytes() == content and len(list(path.parent.iterdir())) == 1


@pytest.mark.slow
def test_a_thousand_small_faults(store, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "_FIRST_PAUSE", 0.001)
    number = int(os.environ.get("PPLDM_FAULTS", "150"))
    kinds = ("500", "503", "cut", "hang up", "429", "flip")
    store.fail(*[kinds[one % len(kinds)] for one in range(number)], every=2)
    path = put(tmp_path, "a", bytes(range(256)) * 20)
    store.fail(*[kinds[one % len(kinds)] for one in range(number)], every=2)
    while store.faults_left():
        cache.bring(path)
        assert path.read_bytes() == bytes(range(256)) * 20
        path.unlink()
