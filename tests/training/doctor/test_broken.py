"""`ppldm doctor`: each of twenty broken set-ups is named by its line before the training, and a sound one by none."""

import http.server
import json
import os
import shutil
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import parse_arguments
from PIL import Image
from small_disk import fill, small_disk

from ppldm.config.network_files import DEFAULT_VAE
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.training.doctor import memory
from ppldm.training.doctor.command import FoundErrors, doctor
from ppldm.training.doctor.memory import Activations
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import ConfigError
from ppldm.utils.machine.environment import check
from ppldm.utils.machine.resources import count_usable_cores


@pytest.fixture
def data(tiny, tmp_path):
    """A copy of the tiny data, which a test may break."""
    for path in tiny.folder.glob("*part-*"):
        shutil.copy2(path, tmp_path)
    for name in ("tiny.filelist", "tiny.filelist.list"):
        shutil.copy2(tiny.folder / name, tmp_path)
    return tmp_path


@pytest.fixture
def wholly_examined(tiny, tmp_path, capsys):
    """A function: what is not sound of a command line, by name."""

    def look(*words, **changes) -> dict[str, dict]:
        argv = ["--json", "--no_timing", *words, *tiny.flags(changes.pop("output_dir", tmp_path / "out"), **changes)]
        capsys.readouterr()
        with suppress(FoundErrors):
            doctor(argv)
        found = json.loads(capsys.readouterr().out)["findings"]
        return {one["name"]: one for one in found if one["status"] != "ok"}

    return look


@pytest.fixture
def examined(wholly_examined, monkeypatch):
    """The same without counting what networks keep, which takes seconds."""
    monkeypatch.setattr(memory, "count_activations", lambda *_: Activations(0, 0))
    return wholly_examined


def test_a_sound_run_is_without_a_finding(wholly_examined):
    assert wholly_examined() == {}


def lines(data: Path) -> str:
    return str(data / "tiny.filelist.list")


def test_a_missing_part(examined, data):
    (data / "part-00001.gz").unlink()
    found = examined(file_list=lines(data))["parts"]
    assert found["status"] == "error" and "part-00001.gz" in found["text"] and "line 2" in found["text"]


def test_a_part_that_is_something_else(examined, data):
    for index in data.glob("*.idx"):
        index.unlink()
    (data / "part-00001.gz").write_bytes(b"\x1f\x8bnot gzip at all")
    found = examined(file_list=lines(data))["parts"]
    assert found["status"] == "error" and "part-00001.gz" in found["text"]


def test_a_stale_index(examined, data):
    assert examined(file_list=lines(data)) == {}
    shutil.copy(data / "part-00001.gz.idx", data / "part-00000.gz.idx")
    found = examined(file_list=lines(data))["indexes"]
    assert found["status"] == "warning" and "part-00000.gz.idx" in found["text"] and "ppldm index" in found["fix"]
    assert examined(file_list=lines(data)) == {}  # it was made again


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"file_list": "no.list"}, "--file_list no.list is not there"),
        ({"resolutoin": 64}, "did you mean --resolution"),
        ({"learning_rate": "-1"}, "--learning_rate -1.0 must be above 0"),
        ({"resolution": 33}, "--resolution 33 must be a multiple of 8"),
        ({"fp16": True, "bf16": True}, "do not go together"),
        ({"tokenizer_name": "no-tokenizer"}, "no tokenizer no-tokenizer"),
        ({"vae_name_or_path": "./no-vae"}, "no folder or file no-vae"),
        ({"validation_file_list": "no.list"}, "--validation_file_list no.list is not there"),
    ],
)
def test_a_recipe_that_cannot_be(examined, changes, words):
    found = examined(**changes)["recipe"]
    assert found["status"] == "error" and words in found["text"]


def test_settings_that_do_nothing(examined):
    found = examined(lr_end=1e-5)["recipe"]
    assert found["status"] == "warning" and "--lr_end does nothing without" in found["text"]


def test_a_batch_larger_than_the_data(examined):
    found = examined(per_device_train_batch_size=20, gradient_accumulation_steps=3)["rows"]
    assert found["status"] == "warning" and "larger than the data" in found["text"]
    assert "--per_device_train_batch_size" in found["fix"]
    assert "rows" not in examined(per_device_train_batch_size=20, gradient_accumulation_steps=2)


def test_no_row_is_selected(examined):
    assert "no row" in examined(where="width>=512")["rows"]["text"]
    assert "no row" in examined(resolution=64)["rows"]["text"]


def test_captions_that_are_cut(examined, tmp_path, tiny):
    found = examined(model_max_length=3)["captions"]
    assert found["status"] == "warning" and "100.0% are cut at 3 tokens" in found["text"]
    assert "--model_max_length" in found["fix"]
    assert examined(model_max_length=3, latents="ondemand", random_crop=False)["captions"] == found
    CaptionTokenizer(build_vocab(["another"]), 12).save(tmp_path / "strange")
    assert "ppldm vocab" in examined(tokenizer_name=tmp_path / "strange")["captions"]["fix"]


def test_rows_without_a_caption(examined, tmp_path):
    (tmp_path / "pictures").mkdir()
    for number in range(4):
        Image.new("RGB", (48, 48)).save(tmp_path / f"pictures/{number}.png")
        (tmp_path / f"pictures/{number}.txt").write_text("a red heart")
    (tmp_path / "p.filelist").write_text(f"{tmp_path}/pictures\n")
    (tmp_path / "p.list").write_text("p.filelist format=folder\n")
    CaptionTokenizer(build_vocab(["a red heart"]), 12).save(tmp_path / "words")
    few = {"file_list": tmp_path / "p.list", "per_device_train_batch_size": 1, "tokenizer_name": tmp_path / "words"}
    assert "captions" not in examined(**few)
    (tmp_path / "pictures/2.txt").unlink()
    found = examined(**few)["captions"]
    assert found["status"] == "warning" and "1 of 4 rows looked at cannot be used (1 no_caption)" in found["text"]
    assert found["fix"] == "`ppldm verify` names the bad rows"


def test_a_tokenizer_with_more_words_than_the_encoder(examined, tiny, tmp_path):
    from tiny_model import write_base

    base = write_base(tiny)
    CaptionTokenizer(build_vocab([f"word{number}" for number in range(200)]), 12).save(tmp_path / "large")
    own = {"model_name_or_path": base, "vae_name_or_path": None, "text_encoder_config_file": None,
           "unet_config_file": None}  # fmt: skip
    found = examined(**own, tokenizer_name=tmp_path / "large")["tokenizer"]
    assert found["status"] == "error" and "the text encoder knows 100 words" in found["text"]
    assert "tokenizer" not in examined(**own)


def test_a_small_shared_memory(examined, tmp_path, monkeypatch):
    from ppldm.training.doctor import machine

    with small_disk(tmp_path / "shm", "2m") as folder:
        monkeypatch.setattr(machine, "SHARED_MEMORY", folder)
        assert "shared memory" not in examined(dataloader_num_workers=1)
        fill(folder, 1 << 16)
        found = examined(dataloader_num_workers=1)["shared memory"]
        assert found["status"] == "error" and "--shm-size" in found["fix"]
        assert "shared memory" not in examined()
        assert examined("--num_devices", "2")["shared memory"]["status"] == "warning"


def test_a_full_disk(examined, tmp_path):
    with small_disk(tmp_path / "disk", "8m") as folder:
        fill(folder, 1 << 18)
        found = examined(output_dir=folder / "run")["disk"]
        assert found["status"] == "error" and "--save_total_limit" in found["fix"]


def test_a_folder_that_holds_something_else(examined, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    assert "not a run of ppldm" in examined(output_dir=tmp_path / "other")["output"]["text"]


def test_a_device_that_is_not_there(examined):
    found = examined(device="gpu:7")["device"]
    assert found["status"] == "error" and "--device gpu:7 cannot be used here" in found["text"]


def test_half_precision_on_a_cpu(examined):
    found = examined(device="cpu", bf16=True)["device"]
    assert found["status"] == "warning" and "--bf16" in found["fix"]


def test_more_loaders_than_cores(examined):
    found = examined(dataloader_num_workers=count_usable_cores() + 1)["loaders"]
    assert f"--dataloader_num_workers {count_usable_cores()}" in found["fix"]


def test_too_little_memory(examined, monkeypatch):
    monkeypatch.setattr(memory, "count_activations", lambda *_: Activations(1 << 44, 1 << 44))
    found = examined()["memory"]
    assert found["status"] == "error" and "--recompute" in found["fix"]


@pytest.mark.parametrize(("words", "machine", "status"), [
    (("--devices", "0"), 1.3e9, None),
    (("--devices", "0,1"), 1.9e9, "error"),
    (("--devices", "0,1"), 2.2e9, "warning"),
    (("--devices", "0,1"), 2.5e9, None),
    (("--devices", "0", "--nnodes", "2", "--master", "127.0.0.1:6170"), 1.3e9, None),
])  # fmt: skip
def test_processes_of_a_cpu_share_its_memory(examined, monkeypatch, words, machine, status):
    from ppldm.training.doctor import memory, run

    purposes = {"weights": 0, "gradients": 0, "optimizer": 0, "average": 0, "process": 10**9}
    monkeypatch.setattr(memory, "estimate", lambda *_: memory.Memory(purposes))
    monkeypatch.setattr(run.resources, "usable_memory_bytes", lambda: int(machine))
    found = examined(*words).get("memory")
    assert (found and found["status"]) == status
    if found:
        assert "for each of 2 processes, 2.00 GB together" in found["text"] and "fewer processes" in found["fix"]


def test_a_port_in_use(examined):
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        found = examined("--master", place)["ports"]
        assert found["status"] == "error" and f"{place} is in use" in found["text"]
    assert "ports" not in examined("--master", place)
    assert "HOST:PORT" in examined("--master", "6170")["ports"]["text"]


def test_a_clock_that_is_behind(examined, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{}")
    assert "clock" not in examined()
    os.utime(tmp_path / "out" / "run.json", (time.time() + 86400,) * 2)
    assert "86" in examined()["clock"]["text"] and "timedatectl" in examined()["clock"]["fix"]


@pytest.mark.parametrize("vae, repository", [("someone/some-vae", "someone/some-vae"), (None, DEFAULT_VAE[:-4])])
@pytest.mark.parametrize(("status", "words"), [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (404, "check --vae_name_or_path")])
def test_an_expired_token(examined, monkeypatch, status, words, vae, repository):
    """Of a model that is named, and of that which stands where none is."""

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        found = examined(vae_name_or_path=vae)["access"]
    finally:
        server.shutdown()
        server.server_close()
    assert found["status"] == "error" and f"{status} for {repository}" in found["text"] and words in found["fix"]


def test_a_model_that_is_not_there_is_an_error_once(examined, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    found = examined(vae_name_or_path="outputs/autoencoder/vae")
    assert "no folder outputs/autoencoder/vae here" in found["access"]["text"]
    assert [name for name, one in found.items() if one["status"] == "error"] == ["access"]


def test_versions_that_do_not_go_together(examined, monkeypatch):
    from ppldm.training.doctor import command

    versions = command.installed_versions() | {"pandas": "3.0.0"}
    assert check(versions)
    monkeypatch.setattr(command, "installed_versions", lambda: versions)
    found = examined()["packages"]
    assert found["status"] == "error" and "pandas 3.0.0" in found["text"] and "pip install" in found["fix"]


@pytest.mark.parametrize("workers, free, is_short", [(1, 10**8, True), (1, 10**12, False), (0, 10**8, False)])
def test_loaders_that_the_memory_has_no_room_for(examined, monkeypatch, workers, free, is_short):
    from ppldm.training.doctor import run

    monkeypatch.setattr(run.resources, "available_memory_bytes", lambda: free)
    found = examined(dataloader_num_workers=workers)
    assert ("loaders' memory" in found) == is_short
    if is_short:
        assert "lower --dataloader_num_workers" in found["loaders' memory"]["fix"]


@pytest.mark.parametrize("where, gigabytes", [("process", "5.00"), ("weights", "1.00")])
def test_beside_loaders_counts_what_a_training_takes_of_the_host(monkeypatch, where, gigabytes):
    """All of it where it computes there, and else what its process writes there."""
    from ppldm.training.doctor import run

    monkeypatch.setattr(run.resources, "available_memory_bytes", lambda: 10**10)
    memory, facts = SimpleNamespace(total=5 * 10**9, by_purpose={where: 1}), {"loader_bytes": 10**8}
    [found] = run._look_at_loaders(2, 1, memory, 10**9, facts)
    assert f"beside {gigabytes} GB of training" in found.text


def test_a_run_is_looked_at_by_its_own_recipe(tiny, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs/run"
    run_loop(prepare(*parse_arguments(tiny.flags(output_dir=folder, max_steps=1), loop=True)))
    monkeypatch.setattr(memory, "count_activations", lambda *_: Activations(0, 0))
    monkeypatch.chdir(tmp_path)
    for more, said in (((), "nothing is left to do"), (("--seed", "99"), "seed 5, this run has 99")):
        with suppress(FoundErrors):
            doctor(["--json", "--no_timing", "--run", "runs", *more])
        texts = [one["text"] for one in json.loads(capsys.readouterr().out)["findings"]]
        assert f"the run goes on from {folder / 'checkpoint-1'}" in texts and any(said in one for one in texts)
    monkeypatch.setattr("ppldm.training.doctor.command.look", lambda words, given: pytest.fail(str(words)))
    with pytest.raises(ConfigError, match="is not there; name a training's --output_dir"):
        doctor(["--run", "nowhere"])


def test_a_checkpoint_of_other_settings_or_data(examined, tiny, data, tmp_path):
    same = {"output_dir": tmp_path / "run", "max_steps": 1}
    run_loop(prepare(*parse_arguments(tiny.flags(**same), loop=True)))
    assert examined(**same) == {}
    for change, said in (
        ({"seed": 99}, "seed 5, this run has 99"),
        ({"max_steps": 2, "lr_scheduler_type": "cosine"}, "max_steps None, this run has 2"),
        ({"gradient_accumulation_steps": 3}, "global_batch_size "),
    ):
        found = examined(**same | change)["settings"]
        assert found["status"] == "error" and f"checkpoint-1 was trained with {said}" in found["text"], change
        assert f"--accept_changes {said.split()[0]}" in found["fix"], change
    assert "settings" not in examined("--accept_changes", "seed", **same, seed=99)
    (data / "part-00001.gz").unlink()
    (data / "tiny.filelist").write_text("part-00000.gz\n")
    found = examined(**same, file_list=lines(data))["data"]
    assert "checkpoint-1 was trained on other data: " in found["text"] and "--accept_changes data" in found["fix"]
    assert "data" not in examined("--accept_changes", "data", **same, file_list=lines(data))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("max_steps, ends", [(4, True), (10**9, False)])
def test_what_is_looked_at_is_named_and_a_run_without_an_end_is_not_forecast(
    tiny, tmp_path, monkeypatch, capsys, named, max_steps, ends
):
    monkeypatch.setattr(memory, "count_activations", lambda *_: Activations(0, 0))
    words = ["--json", "--no_timing", *["--preset", "ldm-tiny-cpu"] * named]
    doctor([*words, *tiny.flags(tmp_path / "out", max_steps=max_steps)])
    found = {one["name"]: one["text"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert ("without --preset or --config" in found["recipe"]) == (not named)
    assert ("nothing ends this run; give --max_steps" in found["forecast"]) == (not ends)
