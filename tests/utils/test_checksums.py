"""Checksums: of files in pieces and whole, of settings in any order of their keys."""

import io
import zlib

import pytest

from ppldm.utils.checksums import checksum_file, checksum_json, hash_file, measure, measure_file

CONTENT = bytes(range(256)) * 8193  # more than one block, and not a whole number of them


@pytest.mark.parametrize("start, num_bytes", [(0, None), (5, None), (0, 7), (3, 1 << 20), (9, (1 << 20) + 1), (1, 0)])
def test_a_stretch_is_measured(start, num_bytes):
    file = io.BytesIO(CONTENT)
    file.seek(start)
    wanted = CONTENT[start:] if num_bytes is None else CONTENT[start : start + num_bytes]
    assert measure(file, num_bytes) == (len(wanted), zlib.crc32(wanted))


def test_a_file_is_measured_whole(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(CONTENT)
    assert measure_file(path) == (len(CONTENT), zlib.crc32(CONTENT))
    assert checksum_file(path) == {"bytes": len(CONTENT), "crc32": zlib.crc32(CONTENT)}
    path.write_bytes(b"abc")
    assert hash_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_settings_have_one_checksum_in_any_order():
    assert checksum_json({"a": 1, "b": [2]}) == checksum_json({"b": [2], "a": 1}) != checksum_json({"a": 1, "b": [3]})
