"""`ppldm generate`: files, records, and words for bad input."""

import json
import sys

import numpy as np
import pytest
from PIL import Image

from ppldm.cli import run
from ppldm.inference.generate import read_facts, read_prompts
from ppldm.inference.grid import prompt_grid, tile
from ppldm.training.arguments import parse_arguments
from ppldm.training.loop import run_loop
from ppldm.training.text_to_image import prepare_text_to_image
from ppldm.utils.errors import ConfigError, ModelError


@pytest.fixture(scope="module")
def pipeline(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    run_loop(prepare_text_to_image(*parse_arguments(tiny.flags(folder, max_steps=1), loop=True)))
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


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--prompt", "x"], "the following arguments are required: --model"),
        (["--model", "nowhere", "--prompt", "x"], "nowhere is no exported model"),
        (["--model", "m"], "no prompts"),
        (["--model", "m", "--prompts", "nowhere.txt"], "cannot read the prompts in nowhere.txt"),
        (["--model", "m", "--prompt", "x", "--num-samples", "0"], "--num-samples 0 must be above 0"),
        (["--model", "m", "--prompt", "x", "--guidance", "2"], "did you mean --guidance-scale?"),
    ],
)
def test_bad_input_is_one_line(flags, message, capfd, monkeypatch):
    from ppldm.cli import main

    monkeypatch.setattr(sys, "argv", ["ppldm", "generate", *flags])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code not in (0, None)
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "ppldm.json").write_text('{"scaling_factor": 1.0}')
    with pytest.raises(ModelError, match="is no exported model"):
        read_facts(tmp_path)


def test_prompts_file(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("红心\tseen\n  blue heart \n")
    assert read_prompts(path) == [("红心", "seen"), ("blue heart", "")]
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_prompts(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_prompts(path)


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
