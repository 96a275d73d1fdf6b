"""`ppldm evaluate`: the same pictures are at no distance, the same command gives the same result, errors are a line."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from command_line import parse_arguments
from forking import forking, kill, stop_when
from PIL import Image
from small_loras import small_lora

import ppldm
from ppldm.cli.main import run
from ppldm.evaluation import measure
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import ConfigError, DataError
from ppldm.utils.pictures import save_png
from ppldm.weights.lora.files import write_lora
from ppldm.weights.source import open_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    run_loop(prepare(*parse_arguments(tiny.flags(folder, max_steps=2, save_steps=1, use_ema=True), loop=True)))
    return folder


@pytest.fixture
def pictures(tmp_path):
    rng = np.random.default_rng(3)
    for folder, shift in (("a", 0), ("b", 40)):
        (tmp_path / folder).mkdir()
        for number in range(12):
            picture = rng.integers(0, 200, (16, 16, 3), dtype=np.uint8) + np.uint8(shift)
            save_png(tmp_path / folder / f"{number}.png", picture)
    return tmp_path


def results_of(folder):
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}


@contextmanager
def fails(message, capfd):
    """One line on stderr, once paddle is in the process."""
    capfd.readouterr()
    with pytest.raises(SystemExit):
        yield
    assert re.search(f"^error: .*{message}", capfd.readouterr().err, re.MULTILINE)


def sweep(trained, tiny, out, *more):
    return ["evaluate", str(trained / "pipeline"), "--against", tiny.file_list, "--metrics", "frechet", "--num-samples",
            "6", "--num-inference-steps", "2", "--guidance-scale", "1", "3", "--batch-size", "4", "--out", str(out),
            *more]  # fmt: skip


def test_a_set_is_at_no_distance_from_itself(pictures, capsys):
    for folder in ("b", "a"):
        capsys.readouterr()
        run(["evaluate", str(pictures / folder), "--against", str(pictures / "a"), "--metrics", "frechet", "--json",
             "--out", str(pictures / f"out-{folder}")])  # fmt: skip
    found = [results_of(pictures / f"out-{folder}")["pictures.json"] for folder in ("a", "b")]
    same, other = (one["metrics"]["frechet"]["value"] for one in found)
    assert abs(same) < 1e-6 < 0.1 < other
    assert found[0]["of"]["pictures"] == found[0]["settings"]["real"]["digest"] != found[1]["of"]["pictures"]
    assert json.loads(capsys.readouterr().out) == {str(pictures / "out-a" / "pictures.json"): found[0]}
    run(["compare", str(pictures / "out-a"), str(pictures / "out-b")])
    assert "a is better" in capsys.readouterr().out


def test_of_several_processes_one_measures_pictures_that_are_there(pictures, monkeypatch, capsys):
    command = ["evaluate", str(pictures / "a"), "--against", str(pictures / "b"), "--out", str(pictures / "out")]
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    run([*command, "--metrics", "frechet"])
    assert not (pictures / "out").exists() and capsys.readouterr().out == ""
    monkeypatch.setenv("PADDLE_TRAINER_ID", "0")
    run([*command, "--metrics", "frechet"])
    assert results_of(pictures / "out").keys() == {"pictures.json"}


def test_what_needs_no_network_is_on_by_default_and_the_rest_is_named(pictures, capsys):
    run(["evaluate", str(pictures / "a"), "--against", str(pictures / "b"), "--out", str(pictures / "out")])
    shown, found = capsys.readouterr().out, results_of(pictures / "out")["pictures.json"]
    assert "frechet" in found["metrics"] and found["left_out"]["fid"] == "needs --inception FILE"
    assert "(needs --inception FILE)" in shown and found["metrics"].keys().isdisjoint(found["left_out"])


def test_against_statistics_the_distance_is_that_of_the_pictures_they_were_made_of(pictures, monkeypatch, capfd):
    """As pytorch-fid stores them. What needs pictures is left out by name, and refused where it is asked for."""

    class Five:
        digest = convention = "five"

        def __call__(self, pictures):
            return np.stack([one.reshape(-1)[:5] for one in pictures]).astype(np.float32)

    monkeypatch.setattr(measure, "load_features", lambda *told: Five())
    rows = Five()([np.asarray(Image.open(pictures / "b" / f"{number}.png")) for number in range(12)])
    np.savez(pictures / "st.npz", mu=rows.mean(0), sigma=np.cov(rows, rowvar=False))
    command = ["evaluate", str(pictures / "a"), "--inception", "random", "--against"]
    for against, more in (("b", ["fid"]), ("st.npz", ["fid", "diversity"])):
        run([*command, str(pictures / against), "--metrics", *more, "--out", str(pictures / f"out-{against}")])
    of_pictures, of_file = (results_of(pictures / f"out-{one}")["pictures.json"] for one in ("b", "st.npz"))
    fid, theirs = of_file["metrics"]["fid"], of_pictures["metrics"]["fid"]
    assert fid["value"] == pytest.approx(theirs["value"], rel=1e-6) and fid["low"] < fid["value"] < fid["high"]
    assert fid["high"] - fid["low"] < theirs["high"] - theirs["low"]
    assert of_file["settings"]["real"]["digest"] != of_pictures["settings"]["real"]["digest"]
    run([*command, str(pictures / "st.npz"), "--out", str(pictures / "all")])
    assert "needs real pictures" in results_of(pictures / "all")["pictures.json"]["left_out"]["kid"]
    for more, message in ((["--metrics", "kid"], "kid needs real pictures, and .*st.npz has statistics for fid"),
                          (["--metrics", "fid", "--num-real", "3"], "--num-real chooses pictures")):  # fmt: skip
        with fails(message, capfd):
            run([*command, str(pictures / "st.npz"), *more, "--out", str(pictures / "not")])
    np.savez(pictures / "st.npz", mu=rows.mean(0)[:4], sigma=np.cov(rows[:, :4], rowvar=False))
    with fails("statistics are of 4 numbers, and the features have 5", capfd):
        run([*command, str(pictures / "st.npz"), "--metrics", "fid", "--out", str(pictures / "not1")])
    np.savez(pictures / "st.npz", mean=rows.mean(0))
    with fails("is not a file of statistics with mu and sigma", capfd):
        run([*command, str(pictures / "st.npz"), "--metrics", "fid", "--out", str(pictures / "not2")])


def test_a_sweep_draws_captions_of_the_real_pictures_and_keeps_all_that_its_results_depend_on(
    trained, tiny, tmp_path, monkeypatch, capfd
):
    embedded, embed = [], measure.Networks.embed

    def counted(self, name, pictures, keep=False):
        before = set(self.cache.glob("*.npy")) if self.cache.is_dir() else set()
        features = embed(self, name, pictures, keep)
        embedded.append(len(pictures) if not keep or set(self.cache.glob("*.npy")) != before else "kept")
        return features

    monkeypatch.setattr(measure.Networks, "embed", counted)
    run(sweep(trained, tiny, tmp_path / "o"))
    assert embedded == [6, 40, 6, "kept"]
    found = results_of(tmp_path / "o")
    assert list(sorted(found)) == ["g1.json", "g3.json"]
    one, three = found["g1.json"], found["g3.json"]
    assert one["settings"]["drawn"] | {"guidance_scale": 3.0} == three["settings"]["drawn"]
    drawn = {"sampler": "ddim", "seed": 23, "num_inference_steps": 2, "guidance_scale": 1.0, "negative_prompt": ""}
    assert drawn.items() <= one["settings"]["drawn"].items()
    assert one["settings"]["generated"] == three["settings"]["generated"] and one["of"]["weights"]["step"] == 2
    assert one["settings"]["real"]["count"] == 40 and one["settings"]["real"]["size"] == "32x32"
    prompts = {json.loads(Image.open(path).text["ppldm"])["prompt"] for path in (tmp_path / "o" / "g1").glob("*.png")}
    assert len(prompts) == 6 and prompts <= {f"picture {number}" for number in range(40)}
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "o").rglob("[!.]*.*")}
    run(sweep(trained, tiny, tmp_path / "o"))
    assert embedded[4:] == [] and {path: path.stat().st_mtime_ns for path in (tmp_path / "o").rglob("[!.]*.*")} == times
    with fails("holds another evaluation .seed was 23 and is 5.; choose another --out, or", capfd):
        run(sweep(trained, tiny, tmp_path / "o", "--seed", "5"))
    run(sweep(trained, tiny, tmp_path / "o", "--seed", "5", "--guidance-scale", "2", "--redo"))
    assert list(results_of(tmp_path / "o")) == ["g2.json"] and not (tmp_path / "o" / "g1").exists()


def test_pictures_drawn_with_a_lora_are_another_result(trained, tiny, tmp_path, capfd):
    pairs = small_lora({"unet": open_model(trained / "pipeline").read().components["unet"]})
    file, command = write_lora(pairs, tmp_path / "one.safetensors"), sweep(trained, tiny, tmp_path / "o")
    run([*command, "--lora", f"{file}:0.5"])
    found = results_of(tmp_path / "o")["g1.json"]["of"]["weights"]
    assert found["lora"] == [{"sha256": [hashlib.sha256(file.read_bytes()).hexdigest()], "weight": 0.5}]
    merged = ppldm.load(trained / "pipeline", lora=[f"{file}:0.5"]).fingerprint
    assert found["fingerprint"] == merged != ppldm.load(trained / "pipeline").fingerprint
    with fails("holds another evaluation .*lora was .*'weight': 0.5.* and is None", capfd):
        run(command)
    write_lora(small_lora({"unet": open_model(trained / "pipeline").read().components["unet"]}, seed=1), file)
    with fails("holds another evaluation .*lora was", capfd):
        run([*command, "--lora", f"{file}:0.5"])


def test_pictures_by_a_guide_are_another_result(trained, tiny, tmp_path, capfd):
    command = sweep(trained, tiny, tmp_path / "o", "--guidance-interval", "0.2", "0.9")
    run([*command, "--guide-model", str(trained / "checkpoint-2")])
    found = results_of(tmp_path / "o")["g3.json"]
    assert found["of"]["weights"]["guide_model"] == str(trained / "checkpoint-2")
    assert found["settings"]["drawn"]["guidance_interval"] == [0.2, 0.9]
    with fails("holds another evaluation", capfd):
        run(command)
    for more, why in (
        (["--negative-prompt", "red"], "a negative prompt is for"),
        (["--cfg-zero"], "--cfg-zero scales"),
    ):
        with pytest.raises(ConfigError, match=why):
            run([*command, "--guide-model", "m", *more])


def test_a_dry_run_says_what_would_be_done(trained, tiny, tmp_path, capsys):
    run(sweep(trained, tiny, tmp_path / "o", "--dry-run"))
    assert capsys.readouterr().out == "metrics: frechet\npictures: 12\nprompts: 6\nguidance_scale: 1.0, 3.0\n"
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--metrics", "fdi"], "no metric 'fdi'; did you mean fid"),
        (["--metrics", "fid"], "--metrics fid needs --inception FILE, a path or a name such as pytorch-fid"),
        (["--metrics", "frechet:dino"], "no network 'dino'; did you mean dinov2"),
        (["--metrics", "frechet:dinov2"], "frechet:dinov2 needs --dinov2 FILE"),
        (["--lora", "a/1.png"], "--lora changes a model that draws, and a is none"),
        (["--guide-model", "m"], "--guide-model changes a model that draws, and a is none"),
        (["--lora", "nowhere:2"], "--lora nowhere:2: there is no nowhere"),
        (["--watch", "x"], "name what to evaluate, a model or a folder of pictures, or the run to watch"),
        (["--seed", "-1"], "--seed -1 must not be negative"),
        (["--num-samples", "0"], "--num-samples 0 must be above 0"),
        (["--num-samples", "1", "--metrics", "frechet"], "frechet needs 2 generated pictures, and there are 1"),
        (["--against", "empty"], "empty and what is below it hold no pictures"),
    ],
)
def test_bad_input_is_one_line(pictures, monkeypatch, flags, message):
    monkeypatch.chdir(pictures)
    (pictures / "empty").mkdir()
    with pytest.raises((ConfigError, DataError), match=message):
        run(["evaluate", "a", "--against", "b", *flags])
    assert not (pictures / "evaluation" / "pictures.json").exists()


def test_prompts_and_their_number(pictures, trained, tmp_path, capfd):
    with fails("12 of 12 pictures of .*a have no caption to draw from; give --prompts FILE", capfd):
        run(["evaluate", str(trained / "pipeline"), "--against", str(pictures / "a"), "--out", str(tmp_path / "o")])
    (tmp_path / "p.txt").write_text("picture 1\npicture 2\n")
    command = ["evaluate", str(trained / "pipeline"), "--against", str(pictures / "a"), "--prompts",
               str(tmp_path / "p.txt"), "--out", str(tmp_path / "o"), "--num-inference-steps", "1"]  # fmt: skip
    with fails("--num-samples 5 is not a multiple of the 2 prompts; give 4, or at most 2", capfd):
        run([*command, "--num-samples", "5"])
    run([*command, "--num-samples", "4", "--metrics", "frechet"])
    assert sorted(path.name for path in (tmp_path / "o" / "g7.5").iterdir()) == [
        *(f"00{number}-0{index}.png" for number in (0, 1) for index in (0, 1))
    ]


def test_pictures_are_drawn_as_the_model_says(trained, tiny, tmp_path, capsys):
    own = shutil.copytree(trained / "pipeline", tmp_path / "own")
    known = json.loads((own / "ppldm.json").read_text()) | {"guidance_scale": 2, "num_inference_steps": 1}
    (own / "ppldm.json").write_text(json.dumps(known))
    command = ["evaluate", str(own), "--against", tiny.file_list, "--num-samples", "2", "--metrics", "frechet"]
    run([*command, "--dry-run"])
    assert "guidance_scale: the model's" in capsys.readouterr().out
    run([*command, "--out", str(tmp_path / "o")])
    drawn = results_of(tmp_path / "o")["g2.json"]["settings"]["drawn"]
    assert {"guidance_scale": 2.0, "num_inference_steps": 1}.items() <= drawn.items()


IMPORTS = """
import contextlib, io
from ppldm.utils.machine.cpu import load_paddle
load_paddle()
import ppldm.evaluation.job, ppldm.inference.pipeline, ppldm.evaluation.features.base
from ppldm.cli.main import run
def go(line):
    with contextlib.redirect_stdout(io.StringIO()):
        run(line.split("\\t"))
"""


@pytest.mark.turn("a killed command goes on", 1)
@pytest.mark.slow
def test_a_sweep_that_is_killed_anywhere_ends_with_the_same_results(trained, tiny, tmp_path):
    """Killed when it has drawn a number of pictures, or written the first result, and begun again, several times."""
    with forking(IMPORTS, tmp_path / "log") as start:
        _, wait = start("\t".join(sweep(trained, tiny, tmp_path / "whole")))
        assert wait() == 0
        out, reached = tmp_path / "cut", []
        for count in (1, 5, 8, 12):
            pid, wait = start("\t".join(sweep(trained, tiny, out)))
            stop_when(pid, lambda count=count: len(list(out.glob("g*/*-*.png"))) >= count)
            reached.append(len(list(out.glob("g*/*-*.png"))))
            kill(pid)
            wait()
        _, wait = start("\t".join(sweep(trained, tiny, out)))
        assert wait() == 0
    assert reached[0] < 6 < reached[-1]
    assert results_of(out) == results_of(tmp_path / "whole")
    for path in (tmp_path / "whole").glob("g*/*.png"):
        assert (out / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes()


@pytest.mark.turn("processes share the work of a command", 1)
@pytest.mark.slow
def test_ranks_share_the_drawing_and_one_measures(trained, tiny, tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    (script := tmp_path / "go.py").write_text("from ppldm.cli.main import main\n\nmain()\n")
    for ranks in (1, 2):
        launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", str(tmp_path / "log")]
        command = [sys.executable, *(launcher if ranks > 1 else []), str(script)]
        command += sweep(trained, tiny, tmp_path / str(ranks), "--exact")
        done = subprocess.run(
            command, cwd=ROOT, env=environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
    assert results_of(tmp_path / "1") == results_of(tmp_path / "2")
    assert done.stdout.count("6 pictures against 40") <= 2
