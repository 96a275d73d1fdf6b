"""What a flag names at the address of a store: read here as it is there now, and fetched once."""

import threading

import pytest

from ppldm.utils.errors import StoreError
from ppldm.utils.store import client
from ppldm.utils.store.cache import input_path

URL = "s3://bucket/models/a"
FILES = {"config.json": b"{}", "unet/weights.bin": bytes(range(256)) * 40, "unet/deep/er.txt": b"x"}


@pytest.fixture
def model(store, tmp_path):
    put(tmp_path, FILES)
    client._known.clear()
    return store


def put(tmp_path, files):
    for name, content in files.items():
        (tmp_path / "source").write_bytes(content)
        client.put(tmp_path / "source", f"{URL}/{name}")


def forget():
    """As another process begins."""
    for memory in (client._known, client._surveyed):
        memory.clear()


def content(folder) -> dict:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_path_of_this_machine_is_itself(tmp_path):
    assert input_path(tmp_path) == tmp_path and input_path(str(tmp_path / "none")) == tmp_path / "none"


@pytest.mark.parametrize("faults", [[], ["503", "hang up"], ["cut"]])
def test_a_folder_is_here_as_it_is_there_and_fetched_once(model, faults):
    model.fail(*faults, every=2)
    folder = input_path(f"{URL}/")
    assert content(folder) == FILES and folder.name == "a"
    forget()
    model.requests()
    assert input_path(URL) == folder and not [
        path for method, path in model.requests() if method == "GET" and "weights" in path
    ]


def test_another_state_is_another_folder(model, tmp_path):
    first = input_path(URL)
    changed = {"config.json": b'{"a": 1}'}
    put(tmp_path, changed)
    forget()
    assert content(input_path(URL)) == FILES | changed and content(first) == FILES


def test_many_at_once_fetch_once(model):
    model.tell(latency=0.02)
    model.requests()
    threads = [threading.Thread(target=input_path, args=(URL,)) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    asked = [path for method, path in model.requests() if method == "GET" and path.endswith("weights.bin")]
    assert len(asked) == 1


def test_one_file(model, tmp_path):
    assert input_path(f"{URL}/config.json").read_bytes() == FILES["config.json"]
    with pytest.raises(StoreError, match="s3://bucket/models/none"):
        input_path("s3://bucket/models/none")
