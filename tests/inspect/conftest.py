"""A folder of parts in two formats, some rows of which are bad."""

import io
import os
import sys
from inspect import signature

import numpy as np
import pytest
from formats import write_tar
from PIL import Image

from ppldm.cli import main as cli
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Work in a folder of its own, the cache in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return tmp_path


def make_rows(start, stop) -> list[Row]:
    rows = []
    for i in range(start, stop):
        pixels = np.random.default_rng(i).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).resize((20 + i, 30), Image.Resampling.NEAREST).save(buffer, "PNG")
        rows.append(Row(f"picture {i}", buffer.getvalue(), {"key": f"{i:03}"}))
    return rows


@pytest.fixture
def data(here):
    """`all.list`: parts a (10 good rows), b (12 rows, 2 of them no image) and a tar c (8 rows, one without caption)."""
    bad = make_rows(10, 22)
    for i in (3, 7):
        bad[i] = Row(bad[i].caption, bad[i].image[:60], bad[i].meta)
    write_part("a.gz", make_rows(0, 10))
    write_part("b.gz", bad)
    tar_rows = make_rows(22, 30)
    tar_rows[4] = Row(" ", tar_rows[4].image, tar_rows[4].meta)
    write_tar("c.tar", tar_rows)
    (here / "parts.filelist").write_text("a.gz\nb.gz\n")
    (here / "tars.filelist").write_text("c.tar\n")
    (here / "all.list").write_text("parts.filelist 1\ntars.filelist 3 format=webdataset\n")
    return here


@pytest.fixture
def run(capsys):
    """The output of a command line; this process does the work where the words name no number of workers."""

    def call(*words):
        words = [str(word) for word in words]
        if "num_workers" in signature(cli.load_command(words[0])).parameters and not any("workers" in w for w in words):
            words += ["--num-workers", "1"]
        cli.run(words)
        return capsys.readouterr().out

    return call
