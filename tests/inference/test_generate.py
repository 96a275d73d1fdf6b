"""`ppldm generate`: files, records, and words for bad input."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import parse_arguments
from PIL import Image
from small_weights import small_weights

import ppldm
from ppldm.cli.main import run
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.diffusion.drawing import Drawing
from ppldm.inference.load import load
from ppldm.inference.pictures.plan import Plan
from ppldm.inference.pipeline import TextToImage
from ppldm.inference.prompt_weights import _first_with, describe_prompts
from ppldm.inference.prompts import Request, read_requests
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.utils.pictures import LINE_HEIGHT, caption_font, fit_text, pad_alike, prompt_grid, save_png, tile, wrap_text
from ppldm.weights.write import write_weights

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pipeline(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    run_loop(prepare(*parse_arguments(tiny.flags(folder, max_steps=1), loop=True)))
    return folder / "pipeline"


def test_pictures_grid_and_record(pipeline, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("picture 1\tseen\n\npicture 2\n")
    out = tmp_path / "out"
    run(["generate", "--model", str(pipeline), "--prompts", str(prompts), "--prompt", "a b", "--out", str(out),
         "--num-samples", "2", "--num-inference-steps", "2", "--batch_size", "3"])  # fmt: skip
    names = sorted(path.name for path in out.iterdir())
    assert names == [*(f"{n:03d}-{i:02d}.png" for n in range(3) for i in range(2)), "grid.png", "pictures.jsonl"]
    assert Image.open(out / "000-00.png").size == (32, 32)
    records = [json.loads(line) for line in (out / "pictures.jsonl").read_text().splitlines()]
    assert [(r["prompt"], r["index"]) for r in records] == [
        (p, i) for p in ("a b", "picture 1", "picture 2") for i in (0, 1)
    ]
    assert all(r["guidance_scale"] == 7.5 and r["num_inference_steps"] == 2 for r in records)


def test_genevals_folders_hold_what_its_evaluation_reads(pipeline, tmp_path, capfd):
    lines = [{"tag": "counting", "prompt": "two 心", "include": [{"class": "heart", "count": 2}]}, {"prompt": "a b"}]
    prompts, out = tmp_path / "evaluation_metadata.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["generate", "--model", str(pipeline), "--prompts", str(prompts), "--num-inference-steps", "2"]
    plain, words = [*words, "--out", str(tmp_path / "plain")], [*words, "--out", str(out), "--layout", "geneval"]
    for _ in range(2):  # the second time one is missing
        run(words)
        for number, line in enumerate(lines):  # as its evaluate_images.py goes through them
            folder = out / f"{number:05d}"
            assert json.loads((folder / "metadata.jsonl").read_text()) == line
            names = sorted(path.name for path in (folder / "samples").iterdir())
            assert names == [f"{sample:05d}.png" for sample in range(4)]
            assert Image.open(folder / "grid.png").width > 4 * 32
        assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["00000", "00001"]
        kept = {path: path.stat().st_mtime_ns for path in out.glob("*/samples/*")}
        (out / "00001/samples/00002.png").unlink()
    run(words)
    assert "7 of 8 pictures are there already" in capfd.readouterr().err
    assert {path for path, time in kept.items() if path.stat().st_mtime_ns != time} == {out / "00001/samples/00002.png"}
    run(plain)
    pairs = [
        (out / f"{n:05d}/samples/{i:05d}.png", tmp_path / f"plain/{n:03d}-{i:02d}.png")
        for n in (0, 1)
        for i in range(4)
    ]
    assert all((np.asarray(Image.open(one)) == np.asarray(Image.open(other))).all() for one, other in pairs)
    with pytest.raises(ConfigError, match="holds 00000.png, a picture of the prompt 'two 心'"):
        run([*words, "--prompt", "another"])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--model", "m", "--prompt", "x", "--layout", "coco"], "--layout coco is unknown; use geneval"),
        (
            ["--model", "m", "--prompt", "x", "--layout", "geneval", "--grid", "seed=1,2"],
            "--layout geneval has no --grid",
        ),
        (["--prompt", "x"], "no model; give --model, or --like PICTURE"),
        (["--model", "nowhere", "--prompt", "x"], "no folder or file nowhere"),
        (["--model", "m"], "no prompts"),
        (["--model", "m", "--prompts", "nowhere.txt"], "cannot read the prompts in nowhere.txt"),
        (["--model", "m", "--prompt", "x", "--num-samples", "0"], "--num-samples 0 must be above 0"),
        (["--model", "m", "--prompt", "x", "--resolution", "0"], "--resolution 0 must be above 0"),
        (["--model", "m", "--prompt", "x", "--height", "-8"], "--height -8 must be above 0"),
        (["--model", "m", "--prompt", "x", "--size", "0x8"], "--width 0 must be above 0"),
        (["--model", "m", "--prompt", "x", "--size", "640*448"], "--size 640*448 is not width x height"),
        (["--model", "m", "--prompt", "x", "--size", "64x8", "--width", "64"], "all that --width 64 does; omit one"),
        (
            ["--model", "m", "--prompt", "x", "--seed", "18446744073709551616"],
            "--seed 18446744073709551616 must be from",
        ),
        (["--model", "m", "--prompt", "x", "--guidance-scale", "nan"], "--guidance-scale nan is not a number"),
        (["--model", "m", "--prompt", "red \udcff"], "--prompt is not UTF-8 text, after 'red '"),
        (["--model", "m", "--prompt", "x", "--guidance", "2"], "did you mean --guidance-scale?"),
    ],
)
def test_bad_input_is_one_line(flags, message, capfd, monkeypatch):
    from ppldm.cli.main import main

    monkeypatch.setattr(sys, "argv", ["ppldm", "generate", *flags])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code not in (0, None)
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_prompts_file(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("红心\tseen\n  blue heart \n")
    assert [(one.prompt, one.remark) for one in read_requests(path)] == [("红心", "seen"), ("blue heart", "")]
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_requests(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_requests(path)


def test_pictures_of_several_shapes_are_put_in_the_middle_of_white():
    shapes = [(2, 6), (4, 2), (4, 6)]
    padded = pad_alike([np.full((*shape, 3), number, np.uint8) for number, shape in enumerate(shapes)])
    assert padded.shape == (3, 4, 6, 3)
    assert (padded[0, 1:3] == 0).all() and (padded[0, [0, 3]] == 255).all()
    assert (padded[1, :, 2:4] == 1).all() and (padded[1, :, [0, 1, 4, 5]] == 255).all() and (padded[2] == 2).all()


def test_tiles_are_row_by_row():
    pictures = np.stack([np.full((2, 3, 3), value, dtype=np.uint8) for value in (10, 20, 30)])
    whole = tile(pictures, 2)
    assert whole.shape == (4, 6, 3)
    assert (whole[:2, :3] == 10).all() and (whole[:2, 3:] == 20).all() and (whole[2:, :3] == 30).all()
    assert (whole[2:, 3:] == 255).all()


def test_grid_holds_every_picture():
    red, blue = (np.full((8, 8, 3), colour, dtype=np.uint8) for colour in ((255, 0, 0), (0, 0, 255)))
    grid = np.asarray(prompt_grid(["red", "a caption that is far too long for its two pictures " * 3, "none"],
                                  [[red, red], [blue, red], [blue, blue]], side=20))  # fmt: skip
    area = 20 * 20
    assert (grid == (255, 0, 0)).all(axis=-1).sum() == 3 * area
    assert (grid == (0, 0, 255)).all(axis=-1).sum() == 3 * area


@pytest.mark.parametrize(
    "size, shown", [((64, 64), (128, 128)), ((32, 64), (64, 128)), ((200, 100), (200, 100)), ((512, 384), (256, 192))]
)
def test_a_grid_keeps_the_shape_of_pictures(size, shown):
    red = np.full((*size, 3), (255, 0, 0), dtype=np.uint8)
    grid = np.asarray(prompt_grid(["one picture"], [[red]]))
    found = np.argwhere((grid == (255, 0, 0)).all(axis=-1))
    assert tuple(np.ptp(found, axis=0) + 1) == shown
    assert grid.shape[1] < shown[1] + 40  # no empty columns of blocks


def test_a_caption_that_needs_it_has_a_third_line_over_a_narrow_picture():
    red = np.full((64, 64, 3), (255, 0, 0), dtype=np.uint8)
    long = "a yellow house with a blue roof by night"
    height, more = prompt_grid(["a cat"], [[red]]).height, prompt_grid([long], [[red]]).height
    assert more == height + LINE_HEIGHT and prompt_grid([long], [[red] * 2]).height == height
    assert wrap_text(long, caption_font(text=long), 128, 3)[-1].endswith("night")


def test_long_prompts_are_cut_in_the_grid():
    red = np.full((8, 8, 3), (255, 0, 0), dtype=np.uint8)
    font = caption_font()
    for text in ("word " * 40_000, "w" * 200_000):
        assert prompt_grid([text], [[red, red]]).width < 400
        cut = fit_text(text, font, 200)
        assert cut.endswith("…") and font.getlength(cut) <= 200 < font.getlength(cut[:-1] + "ww…")
    assert fit_text("short", font, 200) == "short" and fit_text("word", font, 1) == "…"


def test_scales_that_hardly_differ_have_folders_of_their_own():
    scales = [7.5, 7.50000001, 1e-7, 12345678.0, 12345679.0, 1.0, 0.1]
    plan = Plan([Request("x")], 1, {"guidance_scale": scales}, Drawing(1, sampler="ddim"), 0, None, None, False)
    files = [plan.file((scale,), 0, 0) for scale in scales]
    assert len(set(files)) == len(scales) and files[0] == "g7.5/000-00.png" and files[-1] == "g0.1/000-00.png"


def pixels(folder) -> dict:
    return {str(p.relative_to(folder)): np.asarray(Image.open(p)).astype(int) for p in sorted(folder.rglob("*-*.png"))}


def test_scales_negative_prompts_and_older_flags(pipeline, tmp_path):
    table = tmp_path / "p.tsv"
    table.write_text("caption_en\tnegative_prompt\tseed\npicture 1\tpicture 2\t7\npicture 3\t\t\n")
    run(["generate", "--model_name_or_path", str(pipeline), "--file", str(table), "--save_path", str(tmp_path / "out"),
         "--guidance_scales", "1.5", "3", "--scheduler_type", "euler-ancest", "--num_inference_steps", "2",
         "--num-samples", "1", "--size", "40x32", "--batch_size", "3", "--device", "cpu"])  # fmt: skip
    drawn = pixels(tmp_path / "out")
    assert set(drawn) == {f"g{scale}/00{n}-00.png" for scale in ("1.5", "3") for n in (0, 1)}
    assert all(picture.shape == (32, 40, 3) for picture in drawn.values())
    records = [json.loads(line) for line in (tmp_path / "out" / "pictures.jsonl").read_text().splitlines()]
    assert [r["seed"] for r in records] == [7, 23, 7, 23]
    assert records[0]["negative_prompt"] == "picture 2" and records[0]["sampler"] == "euler-ancestral"
    assert Image.open(tmp_path / "out" / records[0]["file"]).text["ppldm"]


def test_the_same_command_draws_only_what_is_missing(pipeline, tmp_path, monkeypatch):
    command = ["generate", "--model", str(pipeline), "--prompt", "picture 1", "picture 2", "--out", str(tmp_path / "o"),
               "--num-samples", "2", "--num-inference-steps", "2"]  # fmt: skip
    run(command)
    before = pixels(tmp_path / "o")
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "o").glob("*-*.png")}
    (tmp_path / "o" / "000-01.png").unlink()
    (tmp_path / "o" / "001-00.png").write_bytes((tmp_path / "o" / "001-00.png").read_bytes()[:-40])
    run([*command, "--batch-size", "1"])
    after = pixels(tmp_path / "o")
    assert before.keys() == after.keys() and all(np.abs(before[name] - after[name]).max() <= 1 for name in before)
    for name in ("000-00.png", "001-01.png"):
        assert (tmp_path / "o" / name).stat().st_mtime_ns == times[name]
    run([*command, "--seed", "5"])
    assert all((pixels(tmp_path / "o")[name] != before[name]).any() for name in before)


def test_batches_do_not_depend_on_what_is_drawn_already(pipeline, tmp_path, monkeypatch):
    """The batch of a picture may change its last bit; after a kill it is drawn in the one that it was meant for."""
    drawn, draw = [], TextToImage.draw

    def noted(self, prompts, *args, **settings):
        drawn.append(prompts)
        return draw(self, prompts, *args, **settings)

    monkeypatch.setattr(TextToImage, "draw", noted)
    prompts = [f"picture {number}" for number in range(5)]
    command = ["generate", "--model", str(pipeline), "--prompt", *prompts, "--out", str(tmp_path), "--num-samples", "1",
               "--num-inference-steps", "1", "--batch-size", "2"]  # fmt: skip
    run(command)
    assert drawn == [prompts[:2], prompts[2:4], prompts[4:]]
    kept = (tmp_path / "002-00.png").stat().st_mtime_ns
    for number in (0, 1, 3):
        (tmp_path / f"00{number}-00.png").unlink()
    drawn.clear()
    run(command)
    assert drawn == [prompts[:2], prompts[2:4]] and (tmp_path / "002-00.png").stat().st_mtime_ns == kept


@pytest.mark.slow
def test_processes_do_not_change_pictures(pipeline, tmp_path):
    command = ["--model", str(pipeline), "--prompt", "picture 1", "picture 2", "picture 3", "--num-samples", "1",
               "--num-inference-steps", "2", "--sampler", "ddpm"]  # fmt: skip
    one = launch(tmp_path / "one", 1, [*command, "--batch-size", "3"])
    two = launch(tmp_path / "two", 2, command)
    assert one.keys() == two.keys() and all(np.abs(one[name] - two[name]).max() <= 1 for name in one)
    assert (tmp_path / "one" / "pictures.jsonl").read_text() == (tmp_path / "two" / "pictures.jsonl").read_text()


def launch(folder: Path, processes: int, command: list[str]) -> dict:
    """The pictures that a command draws into `folder`, in this process or several others."""
    command = [*command, "--out", str(folder)]
    if processes == 1:
        run(["generate", *command])
        return pixels(folder)
    several = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(processes), "--log_dir", f"{folder}-log"]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    launched = subprocess.run(
        [sys.executable, *several, "examples/generate_images.py", *command],
        cwd=ROOT, env=environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr[-2000:]
    return pixels(folder)


@pytest.mark.slow
def test_exact_pictures_are_the_same_to_the_bit(tmp_path):
    """With this model and strong guidance, one process differs in some 20 values when its batches do."""
    weights = small_weights(4)
    weights.tokenizer = CaptionTokenizer(build_vocab(["a red heart", "two boats"]), 77)
    write_weights(weights, "ppdiffusers", tmp_path / "m")
    command = ["--model", str(tmp_path / "m"), "--prompt", "a red heart", "two boats", "--num-samples", "3", "--exact",
               "--guidance-scale", "30", "--num-inference-steps", "8", "--sampler", "euler-ancestral"]  # fmt: skip
    alone = launch(tmp_path / "alone", 1, [*command, "--batch-size", "1"])
    for name, processes, batch_size in (("batch", 1, 6), ("two", 2, 2)):
        other = launch(tmp_path / name, processes, [*command, "--batch-size", str(batch_size)])
        assert alone.keys() == other.keys() and len(alone) == 6
        assert all((alone[file] == other[file]).all() for file in alone)


def test_checkpoints_draw_what_their_export_draws(tiny, pipeline, tmp_path):
    """A checkpoint and the pipeline of the run are the same weights in two forms; so is what `ppldm export` writes."""
    folder = tmp_path / "run"
    flags = tiny.flags(folder, max_steps=2, save_steps=2, use_ema=True)
    run_loop(prepare(*parse_arguments(flags, loop=True)))
    few = {"num_inference_steps": 2}
    raw, exported = (ppldm.load(folder / name) for name in ("checkpoint-2", "pipeline"))
    averaged = ppldm.load(folder / "checkpoint-2", ema=True)
    assert averaged.fingerprint == exported.fingerprint != raw.fingerprint
    assert (averaged.generate("picture 1", **few) == exported.generate("picture 1", **few)).all()
    shutil.rmtree(folder / "pipeline")
    run(["export", str(folder / "checkpoint-2"), "--ema", "--to", "diffusers", "--out", str(tmp_path / "d")])
    assert ppldm.load(tmp_path / "d").fingerprint == exported.fingerprint
    metadata = json.loads((tmp_path / "d" / "ppldm.json").read_text())
    assert (metadata["global_step"], metadata["samples_seen"], metadata["ema"], metadata["resolution"]) == (
        2,
        8,
        True,
        32,
    )
    card = (tmp_path / "d" / "README.md").read_text()
    assert "samples_seen | 8" in card and '"cross_attention_dim": 32' in card
    with pytest.raises(ConfigError, match="holds files that are not an exported model"):
        run(["export", str(folder / "checkpoint-2"), "--out", str(folder)])
    with pytest.raises(ConfigError, match="--safetensors is not for --to compvis"):
        run(["export", str(folder / "checkpoint-2"), "--to", "compvis", "--safetensors", "--out", str(tmp_path / "c")])
    state = folder / "checkpoint-2" / "model_state.pdparams"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(ModelError, match="has changed or is cut short"):
        ppldm.load(folder / "checkpoint-2")


@pytest.mark.parametrize("form", ["ppdiffusers", "diffusers", "checkpoint"])
def test_training_starts_from_every_form(tiny, pipeline, tmp_path, form):
    start = tmp_path / form
    if form == "checkpoint":
        run_loop(prepare(*parse_arguments(tiny.flags(tmp_path / "r", max_steps=1, save_steps=1), loop=True)))
        start = tmp_path / "r" / "checkpoint-1"
    else:
        run(["export", str(pipeline), "--to", form, "--out", str(start)])
    flags = tiny.flags(tmp_path / "new", model_name_or_path=start, vae_name_or_path=None, unet_config_file=None,
                       text_encoder_config_file=None, tokenizer_name=None)  # fmt: skip
    prepared = prepare(*parse_arguments(flags, loop=True))
    source = ppldm.load(start).model.state_dict()
    assert all(
        (value.numpy() == source[name].numpy()).all() for name, value in prepared.state.model.state_dict().items()
    )


def test_exact_pictures_are_drawn_alone_by_one_thread(pipeline, tmp_path, monkeypatch):
    # Of a model as small as this one, pictures hardly ever show how sums were rounded.
    sizes, draw = [], TextToImage.draw

    def counted(self, prompts, *args, **settings):
        sizes.append(len(prompts))
        return draw(self, prompts, *args, **settings)

    monkeypatch.setattr(TextToImage, "draw", counted)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    command = ["generate", "--model", str(pipeline), "--prompt", "picture 1", "--num-samples", "3",
               "--num-inference-steps", "1", "--batch-size", "2", "--out", str(tmp_path)]  # fmt: skip
    run(command)
    assert sizes == [2, 1] and os.environ["OMP_NUM_THREADS"] == "2"
    run([*command, "--exact"])
    assert sizes == [2, 1, 1, 1, 1] and os.environ["OMP_NUM_THREADS"] == "1"


def test_unknown_words_and_other_pictures_are_named(pipeline, tmp_path, capfd):
    command = ["generate", "--model", str(pipeline), "--num-samples", "1", "--num-inference-steps", "1", "--out",
               str(tmp_path)]  # fmt: skip
    run([*command, "--prompt", "picture 1", "--out", str(tmp_path / "inner")])
    run([*command, "--prompt", "picture 1", "picture 2"])
    said = capfd.readouterr().err
    assert "does not know" not in said and "other commands" not in said
    (tmp_path / "000-00.png").unlink()
    run([*command, "--prompt", "picture zebra", "--negative-prompt", "zebra horse"])
    said = capfd.readouterr().err
    assert "words that the model does not know: zebra, horse\n" in said
    assert f"1 pictures of other commands are in {tmp_path} too" in said


@pytest.mark.parametrize(
    "word, found",
    [("a", "a green heart"), ("A", "a green heart"), ("紫", "紫色的心"), ("tar", "blue star"), ("owl", "")],
)
def test_the_prompt_that_is_named_has_the_word_by_itself_where_one_has(word, found):
    assert _first_with(word, ["blue star", "a green heart", "紫色的心"]) == found


@pytest.mark.parametrize("syntax, prompt, lost", [
    ("plain", "picture 1 " * 20 + "picture 2", True), ("plain", "picture 1", False),
    ("weighted", "(picture 1:1.2) " * 20, True), ("weighted", "picture 1 BREAK " * 20, False),
])  # fmt: skip
def test_what_a_prompt_is_cut_to_is_said(pipeline, syntax, prompt, lost):
    said = describe_prompts(load(pipeline), ["picture 1", prompt], syntax == "weighted")
    assert ("it does not see '" in said) is lost and "does not know" not in said


def test_pictures_of_other_prompts_are_never_replaced(pipeline, tmp_path):
    command = ["generate", "--model", str(pipeline), "--num-samples", "2", "--num-inference-steps", "1", "--out",
               str(tmp_path), "--prompt"]  # fmt: skip
    run([*command, "picture 1", "picture 2"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="holds 001-00.png, a picture of the prompt 'picture 2'; name another"):
        run([*command, "picture 1", "picture 3"])
    save_png(tmp_path / "000-01.png", np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(ConfigError, match="holds 000-01.png, a picture that ppldm did not draw"):
        run([*command, "picture 1"])
    (tmp_path / "000-01.png").write_bytes(before["000-01.png"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    run([*command, "picture 1", "picture 2", "--seed", "5"])  # other settings replace
    assert (tmp_path / "001-00.png").read_bytes() != before["001-00.png"]


def test_without_a_folder_other_pictures_go_beside(tiny, pipeline, tmp_path, monkeypatch):
    """Of other prompts, settings or weights; the same command again replaces nothing."""
    monkeypatch.chdir(tmp_path)
    run_loop(prepare(*parse_arguments(tiny.flags("further", max_steps=2), loop=True)))
    cases = {
        "drawn": (pipeline, "picture 1"),
        "drawn-2": (pipeline, "picture 2"),
        "drawn-3": (pipeline, "picture 1", "--seed", "5"),
        "drawn-4": ("further", "picture 1"),
    }
    before = {}
    for folder, (model, prompt, *flags) in [*cases.items()] * 2:
        run(["generate", "--model", str(model), "--num-samples", "1", "--num-inference-steps", "1", *flags,
             "--prompt", prompt])  # fmt: skip
        picture = Path(folder, "000-00.png")
        assert before.setdefault(folder, picture.stat().st_mtime_ns) == picture.stat().st_mtime_ns
    sheet = Path("drawn/grid.png").read_bytes()
    words = ["generate", "--model", str(pipeline), "--num-samples", "1", "--num-inference-steps", "1", "--prompt"]
    run([*words, "picture 1", "picture 3"])  # more than lies there
    assert Path("drawn/grid.png").read_bytes() != sheet
    sheet = Path("drawn/grid.png").read_bytes()
    run([*words, "picture 1"])  # fewer: the sheet of both stays
    assert Path("drawn/grid.png").read_bytes() == sheet
    assert sorted(path.name for path in tmp_path.iterdir()) == [*cases, "drawn-5", "further"]


@pytest.mark.parametrize("command", ["generate", "export", "plot-loss"])
def test_an_address_is_refused(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = {"generate": ["--model", "m", "--prompt", "x"], "export": ["m"], "plot-loss": ["m"]}[command]
    with pytest.raises(ConfigError, match="s3://bucket/x is an address, and ppldm reads and writes folders"):
        run([command, *flags, "--out", "s3://bucket/x"])
    assert not list(tmp_path.iterdir())


@pytest.mark.turn("processes share the work of a command", 1)
@pytest.mark.slow
def test_processes_share_the_seed_that_is_chosen(pipeline, tmp_path):
    launched = subprocess.run(
        [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", str(tmp_path / "log"),
         "examples/generate_images.py", "--model", str(pipeline), "--prompt", "picture 1", "picture 2", "--seed", "-1",
         "--num-samples", "1", "--num-inference-steps", "1", "--out", str(tmp_path / "out")],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr[-2000:]
    written = [json.loads(line) for line in (tmp_path / "out" / "pictures.jsonl").read_text().splitlines()]
    drawn = [json.loads(Image.open(tmp_path / "out" / line["file"]).text["ppldm"])["seed"] for line in written]
    assert len(set(drawn)) == 1 and drawn == [line["seed"] for line in written]
