"""What WebDataset's and img2dataset's own writers write is read back as it was."""

import http.server
import os
import subprocess
import sys
import threading
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppldm.data.filelist import Source
from ppldm.data.formats.open import open_part

# img2dataset imports packages that are not used here and need not be installed: for reports, resizing and tensors.
DOWNLOAD = """
import sys
from types import ModuleType

sys.modules.update({"wandb": ModuleType("wandb"), "albumentations": ModuleType("albumentations"), "torch": None})
from img2dataset import download

if __name__ == "__main__":
    urls, out, format = sys.argv[1:]
    download(
        url_list=urls, input_format="parquet", url_col="url", caption_col="caption", output_folder=out,
        output_format=format, processes_count=1, thread_count=4, disable_all_reencoding=True, resize_mode="no",
        number_sample_per_shard=10, user_agent_token="test",
    )
"""


@pytest.fixture(scope="module")
def pictures(make_image):
    return {f'a "caption" of {i}, 图': make_image(i, (20, 18), "JPEG") for i in range(14)}


@pytest.fixture(scope="module")
def urls(tmp_path_factory, pictures):
    """A parquet file of URLs on this machine, and captions."""
    folder = tmp_path_factory.mktemp("pictures")
    for number, image in enumerate(pictures.values()):
        (folder / f"{number}.jpg").write_bytes(image)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        table = {"url": [f"{address}/{i}.jpg" for i in range(len(pictures))], "caption": list(pictures)}
        pq.write_table(pa.table(table), folder / "urls.parquet")
        yield folder / "urls.parquet"
        server.shutdown()


def read_all(paths, format) -> list:
    parts = [open_part(path, Source(path.with_name("x.filelist"), (), format=format)) for path in paths]
    return [part.read(row) for part in parts for row in range(len(part))]


def test_shards_of_webdataset(tmp_path, pictures):
    from webdataset import ShardWriter

    with ShardWriter(str(tmp_path / "shard-%02d.tar"), maxcount=5, verbose=0) as writer:
        for number, (caption, image) in enumerate(pictures.items()):
            writer.write({"__key__": f"{number:04}", "jpg": image, "txt": caption, "json": {"number": number}})
    rows = read_all(sorted(tmp_path.glob("*.tar")), "webdataset")
    assert {row.caption: row.image for row in rows} == pictures
    assert [row.meta["number"] for row in rows] == list(range(len(pictures)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "format, pattern", [("webdataset", "*.tar"), ("files", "00*[0-9]"), ("parquet", "*[0-9].parquet")]
)
def test_downloads_of_img2dataset(tmp_path, pictures, urls, format, pattern):
    # A file and not -c: the processes that img2dataset spawns run its head too.
    (tmp_path / "download.py").write_text(DOWNLOAD)
    subprocess.run(
        [sys.executable, tmp_path / "download.py", urls, tmp_path / "out", format],
        check=True,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": ""},
    )
    files = sorted((tmp_path / "out").glob(pattern))
    assert len(files) == 2
    rows = read_all(files, {"files": "folder"}.get(format, format))
    assert {row.caption: row.image for row in rows} == pictures
    assert all(row.meta["url"].endswith(".jpg") for row in rows)
