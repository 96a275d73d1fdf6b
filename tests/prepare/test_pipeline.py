"""The file of settings is checked to the flag; reports add up."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastcore.script import anno_parser

from ppldm.cli import main as cli
from ppldm.cli.main import load_command
from ppldm.prepare.pipeline import (
    StageResult,
    check_accounts,
    describe,
    make_report,
    make_stages,
    pipeline,
    read_config,
)
from ppldm.utils.errors import ConfigError, DataError, OutputError


@pytest.fixture
def folder(tmp_path):
    pq.write_table(pa.table({"URL": ["http://a/b"] * 4, "TEXT": ["c"] * 4}), tmp_path / "a.parquet")
    return tmp_path


def write(folder, text):
    (folder / "pipeline.yaml").write_text(text)
    return folder / "pipeline.yaml"


GOOD = "out: data\nmetadata: a.parquet\n"


def test_the_least_that_is_needed(folder):
    settings = read_config(write(folder, GOOD))
    assert settings.out == folder / "data" and settings.metadata == (folder / "a.parquet",)
    assert settings.stages == {"download": {}, "convert": {}}
    download, convert = make_stages(settings)
    assert download.arguments == {"metadata": str(folder / "a.parquet"), "out": str(folder / "data/images")}
    assert convert.arguments == {"folder": str(folder / "data/images"), "out": str(folder / "data/data")}


def test_stages_read_what_the_one_before_writes(folder):
    text = GOOD + "filter: {min-width: 512}\ndownload: {timeout: 5}\nannotate: {}\nconvert: {name: art}\n"
    stages = {stage.name: stage for stage in make_stages(read_config(write(folder, text)))}
    assert list(stages) == ["filter", "download", "annotate", "convert"]
    assert stages["filter"].arguments["min_width"] == 512
    assert stages["download"].arguments["metadata"] == stages["filter"].arguments["output"]
    assert stages["download"].arguments["timeout"] == 5.0
    assert stages["convert"].arguments["folder"] == stages["download"].arguments["out"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "holds no settings"),
        ("out: [", "pipeline.yaml:1: not YAML"),
        ("metadata: a.parquet\n", "out is missing; add it"),
        ("out: data\n", "metadata is missing; add it"),
        ("out: data\nmetadata: b.parquet\n", "b.parquet does not exist"),
        ("out: data\nmetadata: [a.parquet, a.parquet]\n", "several `metadata` need a `filter`"),
        (GOOD + "downlod: {}\n", "pipeline.yaml:3: downlod is not known; did you mean download?"),
        (GOOD + "download: {image_sise: 3}\n", "download.image_sise is not known; did you mean download.image_size?"),
        (GOOD + "download: {image_size: big}\n", "pipeline.yaml:3: download.image_size big must be a whole number"),
        (GOOD + "download: {out: elsewhere}\n", "pipeline.yaml:3: download.out is not known; write out:"),
        (GOOD + "download: 3\n", "pipeline.yaml:3: download 3 must hold settings"),
        (GOOD + "whole_rows: many\n", "pipeline.yaml:3: whole_rows many must be a whole number"),
    ],
)
def test_mistakes_are_one_line(folder, text, message):
    with pytest.raises(ConfigError) as caught:
        read_config(write(folder, text))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def results(**changes):
    good = {
        "filter": StageResult(1000, 100, {"WIDTH >= 512": 900}, 5000, 2.0),
        "download": StageResult(100, 80, {"4xx": 20}, 80_000, 10.0),
        "annotate": StageResult(80, 80, {}, 800, 0.5),
        "convert": StageResult(80, 79, {"empty_caption": 1}, 79_000, 4.0),
    }
    return good | changes


def test_a_lost_row_is_an_error(folder):
    settings = read_config(write(folder, GOOD + "filter: {}\nannotate: {}\n"))
    check_accounts(results(), settings)
    with pytest.raises(DataError, match="convert lost rows"):
        check_accounts(results(convert=StageResult(80, 79, {}, 1)), settings)
    with pytest.raises(DataError, match="download gave 80 rows and convert took 79"):
        check_accounts(results(convert=StageResult(79, 79, {}, 1)), settings)
    with pytest.raises(DataError, match="filter gave 100 rows and download took 50"):
        check_accounts(results(download=StageResult(50, 50, {}, 1)), settings)
    with pytest.raises(DataError, match="no picture"):
        nothing = StageResult(100, 0, {"dns": 100}, 0)
        check_accounts({"filter": results()["filter"], "download": nothing}, settings)


def test_one_part_of_many_is_projected_to_all(folder):
    settings = read_config(write(folder, GOOD + "whole_rows: 2000\nfilter: {}\ndownload: {part_id: 1}\n"))
    report = make_report(results(download=StageResult(50, 40, {"4xx": 10}, 40_000, 10.0)), settings)
    assert report["projected"]["filter"] == {"rows_in": 2000, "rows_out": 200, "bytes": 10_000, "seconds": 4.0}
    assert report["projected"]["download"] == {"rows_in": 200, "rows_out": 160, "bytes": 160_000, "seconds": 40.0}
    assert report["projected"]["convert"]["rows_in"] == 160
    assert "projected for 2,000 rows" in describe(report)


def test_dry_run_says_what_would_run_and_writes_nothing(folder, capsys):
    pipeline(str(write(folder, GOOD + "download: {image_size: 64}\n")), dry_run=True)
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("ppldm download /") and "--image-size 64" in out
    assert out.endswith("nothing was written\n") and not (folder / "data").exists()


def test_the_commands_of_a_dry_run_can_be_pasted(folder, capsys):
    text = "out: it's all $here\nmetadata: a.parquet\nannotate: {save_csv_per_img_folder: true, folder_prefix: -x}\n"
    text += "filter: {where: 'TEXT != \"two words\" and TEXT != \"*\"', no_shuffle: true, language: ''}\n"
    text += "download: {timeout: 5, user_agent_token: a b, refuse_private: false}\nconvert: {name: art, min_size: 3}\n"
    pipeline(str(write(folder, text)), dry_run=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    stages = make_stages(read_config(folder / "pipeline.yaml"))
    assert len(lines) == len(stages) == 4
    for line, stage in zip(lines, stages, strict=True):
        # As a shell cuts it into words, and the command reads these.
        command, name, *words = json.loads(
            subprocess.check_output(
                ["bash", "-c", f"{PRINT_WORDS} {line}"], text=True, cwd=folder, env={"PATH": os.environ["PATH"]}
            )
        )
        assert (command, name) == ("ppldm", stage.name)
        read = vars(anno_parser(load_command(name)).parse_args([cli._with_hyphens(word) for word in words]))
        assert {key: read[key] for key in stage.arguments} == stage.arguments


PRINT_WORDS = f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"


@pytest.mark.parametrize(
    "text, message",
    [
        ("filter: {preset: laion-atr}", "--preset laion-atr is not known"),
        ("filter: {where: 'nosuch > 1'}", "no column is 'nosuch'"),
        ("filter: {where: 'TEXT >'}", "TEXT >"),
        ("filter: {engine: dukdb}", "--engine dukdb"),
        ("filter: {num_partitions: -1}", "--num-partitions is -1"),
        ("filter: {}\ndownload: {output_format: tars}", "--output-format 'tars'"),
        ("filter: {}\ndownload: {part_id: 2}", "--part-id 2 is not in"),
        ("filter: {}\ndownload: {url_col: nosuch}", "no column nosuch"),
        ("download: {image_size: -1}", "--image-size is -1"),
        ("download: {distributor: dask}", "--distributor 'dask'"),
        ("download: {save_additional_columns: nosuch}", "no column 'nosuch'"),
        ("download: {timeout: 0}", "--timeout is 0"),
        ("convert: {format: jpgg}", "--format"),
        ("convert: {name: a/b}", "--name 'a/b'"),
        ("convert: {rows_per_part: 0}", "--rows-per-part is 0"),
        ("convert: {num_workers: -1}", "--num-workers is -1"),
    ],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_what_a_stage_would_refuse_is_said_before_the_first_begins(folder, text, message, dry_run):
    with pytest.raises(ConfigError) as caught:
        pipeline(str(write(folder, GOOD + text + "\n")), dry_run=dry_run)
    assert message in str(caught.value)
    assert not (folder / "data").exists()


def test_a_folder_that_holds_something_else_is_known_before_the_first_stage(folder):
    (folder / "data/metadata").mkdir(parents=True)
    (folder / "data/metadata/mine.txt").touch()
    with pytest.raises(OutputError, match="unknown origin"):
        pipeline(str(write(folder, GOOD + "filter: {}\n")), dry_run=True)


def test_a_finished_stage_is_known_until_its_input_changes(folder):
    stage = make_stages(read_config(write(folder, GOOD)))[0]
    assert stage.finished() is None
    result = StageResult(4, 4, {}, 1, 1.0)
    stage.output.mkdir(parents=True)
    stage.record.parent.mkdir()
    states = {"input": stage.input_state(), "output": stage.output_state()}
    stage.record.write_text(json.dumps({"arguments": stage.arguments, "result": vars(result), **states}))
    assert stage.finished() == result
    (stage.output / "00000.tar").touch()
    assert stage.finished() is None
    (stage.output / "00000.tar").unlink()
    assert stage.finished() == result
    pq.write_table(pa.table({"URL": ["http://a/c"] * 4, "TEXT": ["c"] * 4}), folder / "a.parquet")
    assert stage.finished() is None


def test_records_hold_nothing_of_the_environment(folder, monkeypatch, capsys):
    (secret := folder / "hidden-7c1f").mkdir()
    pq.write_table(pa.table({"URL": ["http://127.0.0.1:9/b"] * 4, "TEXT": ["c"] * 4}), secret / "a.parquet")
    monkeypatch.setenv("PLACE", str(secret))
    monkeypatch.setenv("WORD", "hidden-7c1f")
    text = "out: data\nmetadata: '${oc.env:PLACE}/a.parquet'\n"
    text += "filter: {where: \"TEXT != '${oc.env:WORD}'\", language: null}\n"
    text += "download: {timeout: 1, retries: 0}\n"
    for _ in range(2):  # the second time the filter is known to be finished
        with pytest.raises(DataError):  # of convert, as nothing could be downloaded
            pipeline(str(write(folder, text)))
    files = [path for path in (folder / "data").rglob("*") if path.is_file()]
    assert len(files) > 4 and [path for path in files if b"hidden-7c1f" in path.read_bytes()] == []
    said = capsys.readouterr()
    assert "hidden-7c1f" not in said.out + said.err and "filter: finished before" in said.err
