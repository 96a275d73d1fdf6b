"""Whatever stands in a YAML file, or in place of one, is read or is one line; nothing is waited for."""

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schema import read

from ppldm.config.load import parse_yaml, read_yaml
from ppldm.data.filelist import read_sources
from ppldm.inference.prompts import Wildcards, read_requests
from ppldm.utils.errors import PpldmError
from ppldm.utils.files import read_given_text

HOSTILE = [
    "9" * 5001, "-" + "9" * 5001, "0x" + "f" * 5001, "0b" + "1" * 20_000, "0" + "7" * 6000, "1:" * 3000 + "1",
    "[" * 1000, "[" * 1000 + "]" * 1000, "{a: " * 1000 + "1" + "}" * 1000, "\n" + "- " * 1000,
    "!!int x", "!!float x", "!!bool x",
    "!!timestamp x", "!!null [x]", "!!binary x", "&a [*a]", "!!python/object:os.system x",
    "'" + "${a" * 2000 + "}" * 2000,
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: value[:12])
def test_what_cannot_be_read_is_one_line(tmp_path, value):
    path = tmp_path / "a.yaml"
    for call in (
        lambda: parse_yaml(f"a: {value}", "x.yaml"),
        lambda: read(path),
        lambda: read(path, f"run.names={value}"),
    ):
        path.write_text(f"data:\n  size: {value}\n" if value[:1] != "\n" else f"data:{value}")
        with pytest.raises(PpldmError) as caught:
            call()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 2100


@given(st.text(st.sampled_from("a1.:-[]{}&*!|>'\"%@#? \n\t~0x_e$\\u"), max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_is_one_line(text):
    try:
        parse_yaml(text, "x.yaml")
    except PpldmError as error:
        assert "\n" not in str(error)


READERS = {
    "config": read_yaml,
    "filelist": read_sources,
    "prompts": read_requests,
    "wildcards": lambda path: Wildcards(path.parent).choices(path.stem),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["fifo", "zero", "folder"])
def test_what_is_no_file_is_one_line_and_nothing_is_waited_for(tmp_path, reader, kind):
    path = tmp_path / "x.txt"
    {"fifo": os.mkfifo, "zero": lambda place: place.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](path)
    ended = []

    def call():
        with pytest.raises(PpldmError, match="not a regular file|not a file|folder|Is a directory"):
            READERS[reader](path)
        ended.append(True)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert ended


def test_a_pipe_of_the_process_itself_and_a_bound_on_bytes(tmp_path):
    here, there = os.pipe()
    os.write(there, b"\xef\xbb\xbfa\r\nb\n")
    os.close(there)
    assert read_given_text(f"/dev/fd/{here}") == "a\nb\n"
    (tmp_path / "x").write_text("12345")
    assert read_given_text(tmp_path / "x", most=5) == "12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_given_text(tmp_path / "x", most=4)
