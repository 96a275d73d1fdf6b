"""An output folder in a store: what is there is whole, and a run goes on from it on another machine."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import paddle
import pytest
from toy import registered_toy
from toy_runs import ROOT, flags, train

from ppldm.training.output_store import OutputStore
from ppldm.utils.errors import ConfigError, OutputError
from ppldm.utils.store import client

URL = "s3://bucket/runs/a"


@pytest.fixture(scope="module", autouse=True)
def toy_family():
    with registered_toy():
        yield


def manifest(folder, step):
    return json.loads((folder / f"checkpoint-{step}" / "manifest.json").read_text())["files"]


def here(tmp_path):
    return tmp_path / "cache" / "outputs" / "s3" / "bucket" / "runs" / "a"


def test_a_run_goes_on_from_its_copy(tiny, store, tmp_path):
    train(tmp_path / "disk", tiny.file_list)
    store.fail("503", "cut", "hang up", every=5)
    train(URL, tiny.file_list, max_steps=8, save_total_limit=1)
    there = client.find(URL)
    assert {name.partition("/")[0] for name in there if name.startswith("checkpoint-")} == {"checkpoint-8"}
    sizes = {path.relative_to(here(tmp_path)).as_posix(): path.stat().st_size for path in here(tmp_path).rglob("*")
             if path.is_file() and not path.name.startswith(".")}  # fmt: skip
    assert sizes == {name: one.size for name, one in there.items()}
    shutil.rmtree(tmp_path / "cache")
    train(URL, tiny.file_list, max_steps=12)
    weights = "model_state.pdparams"
    assert manifest(here(tmp_path), 12)[weights] == manifest(tmp_path / "disk", 12)[weights]
    lines = (here(tmp_path) / "metrics.jsonl").open()
    assert [json.loads(line)["global_step"] for line in lines] == [2, 4, 6, 8, 10, 12]


@pytest.mark.turn("what holds on one rank holds on two", 2)
@pytest.mark.slow
def test_two_ranks_have_one_copy_and_go_on_from_it(tiny, store, tmp_path):
    launch = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", str(tmp_path / "log")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for steps in (8, 12):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        words = flags(URL, tiny.file_list, max_steps=steps, per_device_train_batch_size=2)
        done = subprocess.run(
            [sys.executable, *launch, ROOT / "tests/helpers/law_run.py", "toy", "loop", *words],
            env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (here(tmp_path) / "metrics.jsonl").open()
    assert [json.loads(line)["global_step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    train(tmp_path / "disk", tiny.file_list)
    weights = [paddle.load(str(folder / "checkpoint-12/model_state.pdparams"), return_numpy=True)
               for folder in (here(tmp_path), tmp_path / "disk")]  # fmt: skip
    for name, value in weights[1].items():
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(weights[0][name], value, rtol=1e-4, atol=1e-6)


def test_the_manifest_comes_last_and_goes_first(tiny, store, tmp_path):
    train(tmp_path / "run", tiny.file_list, max_steps=4)
    copy = OutputStore(tmp_path / "run", URL)
    copy.push(wait=True)
    names = [path for method, path in store.requests() if method == "PUT" and "/checkpoint-4/" in path]
    assert names[-1].endswith("/manifest.json") and len(names) == len(set(names)) > 5
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    store.requests()
    copy.push(wait=True)
    gone = [path for method, path in store.requests() if method == "DELETE"]
    assert gone[0].endswith("/manifest.json") and len(gone) == len(names)
    assert not [name for name in client.find(URL) if name.startswith("checkpoint")]


def test_a_damaged_copy_is_passed_over(tiny, store, tmp_path):
    train(URL, tiny.file_list, max_steps=8)
    client.put(tmp_path / "cache" / "outputs/s3/bucket/runs/a/run.json", f"{URL}/checkpoint-8/model_state.pdparams")
    shutil.rmtree(tmp_path / "cache")
    here(tmp_path).mkdir(parents=True)
    OutputStore(here(tmp_path), URL).bring_newest()
    assert [path.name for path in here(tmp_path).glob("checkpoint-*")] == ["checkpoint-4"]


def test_an_address_that_holds_something_else_is_refused(tiny, store, tmp_path):
    client.put(tiny.folder / "unet.json", f"{URL}/unet.json")
    with pytest.raises(ConfigError, match=f"--output_dir {URL} holds files that are not a run of ppldm"):
        train(URL, tiny.file_list, max_steps=4)


def test_what_cannot_be_copied_at_last_is_an_error(tiny, store, tmp_path):
    train(tmp_path / "run", tiny.file_list, max_steps=4)
    with pytest.raises(OutputError, match="could not be copied to s3://nobucket/run: .*the same command goes on"):
        OutputStore(tmp_path / "run", "s3://nobucket/run").push(wait=True)
