"""Files and folders of any name: every command does with names that are not UTF-8 what it was asked for."""

import json
import os
import shutil
from inspect import signature
from pathlib import Path

import pytest
from PIL import Image
from schema import read
from tiny_model import write_base

from ppldm.cli.main import COMMANDS as COMMANDS_OF_PPLDM
from ppldm.cli.main import load_command, run
from ppldm.config.load import Setting
from ppldm.config.recipe import write_settings
from ppldm.utils.errors import PpldmError, exit_on_error

ODD = os.fsdecode(b"caf\xe9")

# Commands in order, of a folder `at` with the data of `tiny`, pictures beside captions, a model and prompts, each of
# the name `n`.
_RUN = (
    "--config {n}/run-{n}.yaml model.vae_name_or_path={n}/vae model.text_encoder_config_file={n}/ldmbert.json "
    "model.unet_config_file={n}/unet.json model.tokenizer_name={n}/tokenizer data.file_list={n}/tiny.filelist.list "
    "run.output_dir={n}/runs/{n} validation.validation_prompts=[{n}/prompts-{n}.txt]"
)
# Which read and write parquet by a library that takes no such name, and say so.
BY_LIBRARIES = ("dedup", "filter", "download")
COMMANDS = [
    "convert {n}/pictures-{n} --out {n}/converted --name {n} --rows-per-part 4 --num-workers 2",
    "verify {n}/converted/{n}.filelist.list",
    "index {n}/converted/{n}.filelist",
    "stats {n}/converted/{n}.filelist.list --html {n}/stats-{n}.html",
    "stats {n}/converted/{n}.filelist.list --json",
    "show {n}/converted/{n}.filelist --n 2 --out {n}/shown-{n}.png",
    "head {n}/converted/{n}.filelist --json",
    "vocab {n}/converted/{n}.filelist.list --out {n}/vocabulary-{n}",
    "dedup {n}/converted/{n}.filelist.list --out {n}/dedup-{n}",
    "repack {n}/converted/{n}.filelist.list --out {n}/repacked-{n}",
    "filter --input {n}/table-{n}.parquet --output {n}/filtered-{n}",
    "filter --input {n}/table-{n}.parquet --output {n}/dry-{n} --dry-run",
    "download {n}/filtered-{n} --out {n}/down-{n} --dry-run",
    "forget {n}/converted --url {n}/prompts-{n}.txt --dry-run",
    f"train {_RUN}",
    f"train {_RUN} run.max_steps=3",
    "lineage {n}/converted --key b",
    "lineage --row 3 --runs {n}/runs/{n}",
    "report {n}/runs/{n} --out {n}/report-{n}.html",
    "plot-loss {n}/runs/{n} --out {n}/loss-{n}.png",
    "replay {n}/runs/{n} --step 1",
    "generate --model {n}/runs/{n}/pipeline --prompts {n}/prompts-{n}.txt --out {n}/drawn-{n} --num-inference-steps 1",
    "generate --like {n}/drawn-{n}/000-00.png --out {n}/again-{n} --num-inference-steps 1",
    "generate --model {n}/base-{n} --prompt cat --image {n}/pictures-{n}/a.png --out {n}/from-{n} "
    "--num-inference-steps 2",
    "generate --model {n}/base-{n} --prompt __w__ --wildcards {n}/wild-{n} --out {n}/wilder-{n} "
    "--num-inference-steps 1",
    "evaluate {n}/base-{n} --against {n}/tiny.filelist --metrics frechet --num-samples 4 --num-inference-steps 1 "
    "--out {n}/measured-{n}",
    "evaluate {n}/drawn-{n} --against {n}/pictures-{n} --metrics frechet --out {n}/sets-{n}",
    "compare {n}/sets-{n} {n}/sets-{n}",
    "embed {n}/converted/{n}.filelist.list --network pixels --out {n}/embedded-{n}",
    "precompute {n}/tiny.filelist --vae {n}/vae --resolutions 32",
    "export {n}/runs/{n}/checkpoint-3 --out {n}/exported-{n}",
    "train --config {n}/lora-{n}.yaml model.model_name_or_path={n}/base-{n} data.file_list={n}/tiny.filelist "
    "run.output_dir={n}/loras/{n}",
    "train --config {n}/runs/{n}/recipe.yaml --max_steps 4",
    "lora show {n}/loras/{n}/lora",
    "lora convert {n}/loras/{n}/lora --out {n}/lora-{n}.safetensors",
    "lora merge {n}/base-{n} --lora {n}/loras/{n}/lora --out {n}/merged-{n}",
    f"doctor {_RUN}",
    f"train {_RUN} --dry_run --json",
    f"train {_RUN} --print_config",
    "dataset list",
]


def prepare(at: Path, name: str, tiny) -> None:
    """What the commands read, below `at`/`name`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = at / name
    shutil.copytree(tiny.folder, folder)
    shutil.copytree(write_base(tiny), folder / f"base-{name}")
    pictures = folder / f"pictures-{name}"
    pictures.mkdir()
    for number, stem in enumerate(("a", "b", f"c-{name}", "d", "e", "f")):
        Image.new("RGB", (40, 40 + number), (number * 40, 9, 200)).save(pictures / f"{stem}.png")
        (pictures / f"{stem}.txt").write_text(f"caption {number}")
    pq.write_table(pa.table({"URL": ["http://a/b"] * 4, "TEXT": ["c"] * 4}), at / "table.parquet")
    (at / "table.parquet").rename(folder / f"table-{name}.parquet")
    (folder / f"prompts-{name}.txt").write_text("cat\ndog\n")
    (folder / f"wild-{name}").mkdir()
    (folder / f"wild-{name}" / "w.txt").write_text("red\nblue\n")
    recipe = {
        "family": "ldm",
        "model": {"model_max_length": 12},
        "data": {"resolution": 32},
        "compute": {"dataloader_num_workers": 0, "device": "cpu"},
        "run": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
                "max_steps": 2},
        "logging": {"report_to": ["visualdl", "tensorboard"], "logging_steps": 1},
        "validation": {"num_inference_steps": 1, "image_logging_steps": 2,
                       },
    }  # fmt: skip
    lora = recipe | {"model": {"lora_rank": 2, "model_max_length": 12}}
    for kind, tree in {"run": recipe, "lora": lora}.items():
        (folder / f"{kind}-{name}.yaml").write_text(json.dumps(tree))


def outcome(words: str, name: str) -> str:
    """How a command ends: nothing, or the kind of its error, and its text where it is none of ours. It works in this
    process where the words name no number of workers."""
    line = [word.replace("{n}", name) for word in words.split()]
    takes = line[0] in COMMANDS_OF_PPLDM and "num_workers" in signature(load_command(line[0])).parameters
    if takes and "--num-workers" not in line:
        line += ["--num-workers", "1"]
    try:
        with exit_on_error():
            run(line)
    except PpldmError as error:
        return f"{type(error).__name__}: {error}"
    except SystemExit as error:
        return f"exit {error.code}" if error.code else "done"
    except Exception as error:
        return f"traceback of {error!r}"
    return "done"


@pytest.mark.slow
def test_a_name_that_is_not_utf8_is_as_good_as_any(tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path / "cache"))
    prepare(tmp_path, ODD, tiny)
    found = {words: outcome(words, ODD) for words in COMMANDS}
    assert found == {words: "exit 2" if words.startswith(BY_LIBRARIES) else "done" for words in COMMANDS}
    refused = [line for line in capfd.readouterr().err.splitlines() if "is not UTF-8" in line]
    assert len(refused) == 3 and all("rename that file or folder: " in line for line in refused)
    # What a record says is the name.
    record = json.loads((tmp_path / ODD / "runs" / ODD / "run.json").read_text())
    assert record["data"]["file_list"] == f"{ODD}/tiny.filelist.list"
    drawn = Image.open(tmp_path / ODD / f"drawn-{ODD}" / "000-00.png").text["ppldm"]
    assert json.loads(drawn)["source"]["model"].endswith(f"{ODD}/pipeline")


def test_a_recipe_keeps_a_name_that_is_not_utf8(tmp_path):
    path, values = tmp_path / "recipe.yaml", {"data.list": ODD, "run.names": [f"{ODD}/x", "é"], "run.rate": 0.5}
    path.write_text(write_settings({key: Setting(value) for key, value in values.items()}))
    assert {key: one.value for key, one in read(path).items() if key in values} == values
    assert read(path, f"run.names=[{ODD}]")["run.names"].value == [ODD]
