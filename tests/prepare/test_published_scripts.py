"""Law: the scripts that have the names and flags of the published LAION recipe do what the commands behind them do."""

import csv
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import web

from ppldm.cli.main import run
from ppldm.utils.errors import ConfigError

SCRIPTS = Path(__file__).resolve().parents[2] / "run_scripts"


def call(name: str, *words) -> None:
    runpy.run_path(str(SCRIPTS / name))["main"]([str(word) for word in words])


@pytest.fixture
def metadata(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "laion").mkdir()
    sides = [float(side) for side in (511, 512, 600, 2000)] * 10
    table = {"URL": [f"http://x/{i}" for i in range(40)], "TEXT": ["a"] * 40, "WIDTH": sides, "HEIGHT": sides[::-1]}
    table |= {"punsafe": [0.98, 0.99] * 20, "AESTHETIC_SCORE": [4.5] * 20 + [6.0] * 20, "LANGUAGE": ["en", "de"] * 20}
    for number in (1, 2):
        pq.write_table(pa.table(table), tmp_path / f"laion/{number}.parquet")


def kept(folder: str) -> list:
    manifest = json.loads(Path(folder, "manifest.json").read_text())
    return [pq.read_table(Path(folder, part["path"])).to_pylist() for part in manifest["parts"]]


@pytest.mark.parametrize(
    "given, meant",
    [
        ((), ("--preset", "laion2b-en")),
        (
            ("--dataset_name", "laion2b_en_ae4.5", "--min_aesthetic", "5"),
            ("--preset", "laion2b-en", "--min-aesthetic", 5),
        ),
        (("--dataset_name=laion_art", "--no_shuffle"), ("--preset", "laion-art", "--no-shuffle")),
    ],
)
def test_the_filter_is_the_commands(metadata, given, meant):
    call("laion_filter_metadata.py", "--data_dir", "laion", "--output_dir", "theirs", *given)
    run(["filter", "--input", "laion", "--output", "ours", *map(str, meant)])
    assert kept("theirs") == kept("ours") != []


def test_the_check_writes_nothing_and_other_names_are_refused(metadata, capsys):
    call("laion_filter_metadata.py", "--data_dir", "laion", "--output_dir", "out", "--task", "check")
    assert "4.5" in capsys.readouterr().out and not Path("out").exists()
    with pytest.raises(ConfigError, match="use laion2b_en or laion_art"):
        call("laion_filter_metadata.py", "--data_dir", "laion", "--output_dir", "out", "--dataset_name", "coco")


@pytest.mark.parametrize("given, shards", [((), False), (("--save_csv_per_img_folder", "False"), False),
                                           (("--save_csv_per_img_folder", "True"), True)])  # fmt: skip
def test_the_tables_are_the_commands(tmp_path, given, shards):
    (tmp_path / "part_1/00000").mkdir(parents=True)
    for row in range(3):
        (tmp_path / f"part_1/00000/{row:09}.jpg").write_bytes(web.encode(web.picture(row)))
        (tmp_path / f"part_1/00000/{row:09}.json").write_text(json.dumps({"caption": f"a, {row}"}))
    call("laion_to_csv.py", "--data_dir", tmp_path, "--folder_prefix", "x", *given)
    with open(tmp_path / "part_1.csv", newline="") as file:
        assert [*csv.reader(file)] == [["dir", "text"], *([f"x/part_1/00000/{i:09}.jpg", f"a, {i}"] for i in range(3))]
    assert (tmp_path / "part_1/00000.csv").exists() == shards


@pytest.mark.parametrize("name", ["laion_filter_metadata.py", "laion_to_csv.py"])
def test_they_run_from_anywhere_and_say_in_one_line_what_is_wrong(name, tmp_path):
    words = [sys.executable, SCRIPTS / name, "--data_dir", "none"]
    done = subprocess.run(words, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
