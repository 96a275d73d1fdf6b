"""Laws: what is recorded comes back, up to the first record that is torn; other rows and settings find nothing."""

import pytest

from ppldm.prepare.download.shard import Journal


def meta(row, status="success", message=None) -> dict:
    return {"key": f"{row:09}", "caption": f"row {row} 图\n", "url": "u", "status": status, "error_message": message,
            "similarity": 0.1 + row, "hash": 2**62 + row, "exif": None}  # fmt: skip


ROWS = [(3, meta(3), b"picture\n3"), (0, meta(0, "failed_to_download", "HTTP Error 404: x"), None), (2, meta(2), b"p")]


def write(path, rows=ROWS, stamp="a") -> Journal:
    journal = Journal(path, stamp)
    with journal.opened():
        for row in rows:
            journal.add(*row)
    return journal


def read(path, stamp="a") -> list:
    journal = Journal(path, stamp)
    with journal.opened():
        return [(row, *journal.read(row)) for row in journal.rows]


def test_what_is_recorded_comes_back_and_more_can_follow(tmp_path):
    path = tmp_path / "journals" / "00000"
    write(path)
    assert read(path) == ROWS
    more = (1, meta(1, "failed_to_resize", "decode"), None)
    write(path, [more])
    assert read(path) == [*ROWS, more]


def test_what_another_try_may_mend_is_not_recorded(tmp_path):
    messages = ["<urlopen error [Errno -2] x>", "HTTP Error 503: x", "HTTP Error 429: x", "timed out", "deadline: x"]
    rows = [(row, meta(row, "failed_to_download", message), None) for row, message in enumerate(messages)]
    write(tmp_path / "journal", rows)
    assert read(tmp_path / "journal") == []


def test_a_torn_end_is_cut_off_wherever_it_is(tmp_path):
    path = tmp_path / "journal"
    write(path)
    whole = path.read_bytes()
    ends = [len(whole)]
    for count in (2, 1, 0):
        write(tmp_path / f"{count}", ROWS[:count])
        ends.append((tmp_path / f"{count}").stat().st_size)
    for length in range(0, len(whole) + 1, 3):
        path.write_bytes(whole[:length])
        left = sum(end <= length for end in ends[:-1])
        assert read(path) == ROWS[:left]
        write(path, ROWS[left:])
        assert path.read_bytes() == whole


def test_a_damaged_record_ends_the_journal(tmp_path):
    path = tmp_path / "journal"
    write(path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        rows = read(path)
        assert rows == ROWS[: len(rows)] and len(rows) < 3


def test_other_rows_or_settings_find_nothing(tmp_path):
    write(tmp_path / "journal")
    assert read(tmp_path / "journal", "b") == [] == read(tmp_path / "journal", "a")


def test_a_full_disk_leaves_no_torn_record_behind(tmp_path):
    class Full:
        """A file that takes only a part."""

        def __init__(self, file):
            self.file = file

        def write(self, data):
            return self.file.write(data[:5])

        def __getattr__(self, name):
            return getattr(self.file, name)

    path = tmp_path / "journal"
    write(path)
    journal = Journal(path, "a")
    with journal.opened():
        journal._file, whole = Full(journal._file), journal._file
        with pytest.raises(OSError, match="No space"):
            journal.add(1, meta(1), b"lost")
        journal._file = whole
        journal.add(1, meta(1), b"kept")
    assert read(path) == [*ROWS, (1, meta(1), b"kept")]
