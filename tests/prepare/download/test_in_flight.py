"""Laws: a picture that cannot be decoded in time, or ends the process, costs its own row alone; what was killed for
other reasons is tried again."""

from dataclasses import replace

import pytest
import stubborn
import web
from downloads import SETTINGS, read_rows, write_metadata

from ppldm.data.images import check_pixels, check_scans, decode_image, decode_pixels
from ppldm.prepare.download import download as download_run
from ppldm.prepare.download.download import download
from ppldm.prepare.download.shard import Journal
from ppldm.utils.errors import RowError


@pytest.mark.parametrize("end", stubborn.ENDS)
def test_all_rows_but_the_stubborn_ones_are_delivered(tmp_path, monkeypatch, capsys, end):
    poison = (7, 13)
    pictures = tuple(web.encode(web.picture(number)) for number in poison)
    monkeypatch.setattr("ppldm.prepare.download.shard.download_shard", stubborn.download_stubborn_shard)
    make = download_run._make_settings

    def make_stubborn(*arguments):
        settings = make(*arguments)
        resizer = stubborn.StubbornResizer(**vars(settings.resizer), poison=pictures, end=end)
        return replace(settings, resizer=resizer)

    monkeypatch.setattr(download_run, "_make_settings", make_stubborn)
    with web.serve() as server:
        urls = [server.url(f"good/{number}.jpg") for number in range(20)]
        metadata = write_metadata(tmp_path / "part_1.parquet", urls)
        report = download(metadata, tmp_path / "out", **SETTINGS)
    assert report["success"] == 18 and report["failed"] == {"deadline": 2}
    failed = [row["url"] for row in read_rows(tmp_path / "out/part_1") if row["status"] != "success"]
    assert sorted(failed) == sorted(urls[number] for number in poison)
    assert "good/" in report["examples"]["deadline"]
    assert not list((tmp_path / "out/part_1/.download/journals").iterdir())


def test_only_what_ended_its_process_is_blamed(tmp_path):
    path = tmp_path / "journal"

    def blamed(text: bytes, has_ended: bool = False) -> set[int]:
        """By a journal that ends with this text."""
        with open(path, "ab") as file:
            file.write(text)
        journal = Journal(path, "a")
        with journal.opened(has_ended):
            return journal.blamed

    assert blamed(b"") == set()
    assert blamed(b"decoding 3\n") == set()  # of a run that was killed as a whole
    assert blamed(b"", has_ended=True) == set()  # between two pictures
    assert blamed(b"decoding 3\nTimeout (0:02:00)!\nThread 0x1\n") == {3}
    assert blamed(b"decoding 5\n", has_ended=True) == {3, 5}
    assert blamed(b"decoding 7", has_ended=True) == {3, 5}
    journal, before = Journal(path, "a"), path.read_bytes()
    with journal.opened():
        with pytest.raises(RowError, match="^deadline: "), journal.decoding(5):
            pass
        with journal.decoding(4):
            assert path.read_bytes() == before + b"decoding 4\n"
    assert path.read_bytes() == before


@pytest.mark.parametrize("decode", [decode_image, decode_pixels, check_pixels])
@pytest.mark.parametrize(
    "jpeg",
    [
        web.many_scans(501),
        web.many_scans(40_000),
        web.many_scans(501).replace(b"\xff\xda", b"\xff\xff\xff\xda"),
        web.many_scans(100, (5000, 5000)),
    ],
    ids=["501", "40000", "with fill bytes", "of a large picture"],
)
def test_a_file_of_too_many_scans_is_refused_before_it_is_decoded(monkeypatch, decode, jpeg):
    for name in ("PIL.Image.open", "simplejpeg.decode_jpeg"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("it was opened"))
    with pytest.raises(RowError, match="scans of"):
        decode(jpeg)


@pytest.mark.parametrize(
    "jpeg",
    [
        web.encode(web.picture(1)),
        web.encode(web.picture(1), progressive=True),
        web.many_scans(400),
        web.many_scans(50, (5000, 5000)),
        web.encode(web.picture(1)) + b"\xff\xda\x00\x02" * 1000,  # behind the picture, as of a film
        web.encode(web.picture(1), exif=b"Exif\0\0" + b"\xff\xda" * 1000),  # in a segment
        b"\xff\xd8\xff" + b"\xff\xda" * 100,
        web.encode(web.picture(1), "PNG") + b"\xff\xda" * 1000,
    ],
)
def test_what_encoders_write_is_let_through(jpeg):
    check_scans(jpeg)
