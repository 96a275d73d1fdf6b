"""Pictures that say how they were drawn, and what is drawn of that: again, in grids, of wildcards and weights."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_model import write_base

import ppldm
from ppldm.cli.main import run
from ppldm.diffusion.drawing import Drawing
from ppldm.inference.pictures.draw import infotext, model_sha256
from ppldm.utils import checksums
from ppldm.utils.errors import ConfigError
from ppldm.utils.pictures import labelled_grid

# How webui reads a picture's text (modules/infotext_utils.py, parse_generation_parameters).
FIELD = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')


def read_as_webui(text: str) -> dict:
    *lines, last = text.strip().split("\n")
    if len(FIELD.findall(last)) < 3:
        lines, last = [*lines, last], ""
    found = {"Prompt": [], "Negative prompt": []}
    into = "Prompt"
    for line in map(str.strip, lines):
        if line.startswith("Negative prompt:"):
            into, line = "Negative prompt", line.removeprefix("Negative prompt:").strip()
        found[into].append(line)
    found = {name: "\n".join(said) for name, said in found.items()}
    return found | {
        name: json.loads(value) if value.startswith('"') and value.endswith('"') else value
        for name, value in FIELD.findall(last)
    }


@pytest.mark.parametrize("prompt", ["a red heart", "a, b: (c:1.2)\nSteps: 3", '红心 "quoted", \\slash'])
@pytest.mark.parametrize("negative", ["", "dull: grey,\nnot sharp"])
@pytest.mark.parametrize("name", ["model", 'v1-5: "pruned", my', ""])
def test_webui_reads_our_text(prompt, negative, name):
    record = {"prompt": prompt, "negative_prompt": negative, "index": 3, "seed": 2**64 - 1, "guidance_scale": 7.0,
              "num_inference_steps": 20, "sampler": "euler-ancestral", "sigma_schedule": "karras", "height": 512,
              "width": 640, "strength": 0.75}  # fmt: skip
    read = read_as_webui(infotext(record, name, "0123456789abcdef" * 4))
    assert (read["Prompt"], read["Negative prompt"]) == (prompt, negative)
    assert {name: read[name] for name in ("Steps", "Sampler", "Schedule type", "CFG scale", "Seed", "Size")} == {
        **{"Steps": "20", "Sampler": "Euler a", "Schedule type": "Karras", "CFG scale": "7"},
        **{"Seed": str(2**64 - 1), "Size": "640x512"},
    }
    assert (read["Model hash"], read.get("Model", "")) == ("0123456789", name) and read["Picture"] == "3"
    assert read["Denoising strength"] == "0.75"


def test_the_hash_of_a_model_is_computed_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "m" / "unet").mkdir(parents=True)
    for name, content in (("unet/a.safetensors", b"1"), ("b.bin", b"2"), ("config.json", b"{}")):
        (tmp_path / "m" / name).write_bytes(content)
    sums = [hashlib.sha256(content).hexdigest() for content in (b"2", b"1")]
    expected = hashlib.sha256(f"{sums[0]}  b.bin\n{sums[1]}  unet/a.safetensors\n".encode()).hexdigest()
    assert model_sha256(tmp_path / "m") == expected and model_sha256(tmp_path / "m" / "b.bin") == sums[0]
    monkeypatch.setattr(checksums, "hash_file", None)
    assert model_sha256(tmp_path / "m") == expected
    monkeypatch.undo()
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path / "m" / "b.bin"))  # not a folder
    (tmp_path / "m" / "b.bin").write_bytes(b"3")
    assert model_sha256(tmp_path / "m" / "b.bin") == hashlib.sha256(b"3").hexdigest()
    assert model_sha256(tmp_path / "m" / "unet") != model_sha256(tmp_path / "m")


@pytest.fixture(scope="module")
def model(tiny):
    return write_base(tiny)


def draw(model, out, *flags):
    run(["generate", *(["--model", str(model)] if model else []), "--out", str(out), *flags])


def pixels(path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


FEW = ("--num-inference-steps", "3", "--num-samples", "2")


def test_a_picture_is_drawn_again_to_the_bit(model, tmp_path, capfd):
    draw(model, tmp_path / "o", "--prompt", "picture 1", "picture 2", *FEW, "--seed", "9", "--sampler", "euler-a",
         "--negative-prompt", "picture 3", "--guidance-scale", "30", "--size", "40x32", "--batch-size", "3",
         "--guidance-rescale", "0.3")  # fmt: skip
    picture = tmp_path / "o" / "001-01.png"
    record = json.loads(Image.open(picture).text["ppldm"])
    assert record["source"]["model"] == str(model) and record["source"]["batch"] == [1, 0]
    assert read_as_webui(Image.open(picture).text["parameters"])["Model hash"] == model_sha256(Path(model))[:10]
    for name in ("000-01.png", "001-01.png"):  # the second of a batch of three, and alone in one
        draw(None, tmp_path / name, "--like", str(tmp_path / "o" / name), "--same-weights")
        one, again = tmp_path / "o" / name, tmp_path / name / "000-01.png"
        assert (pixels(again) == pixels(one)).all() and Image.open(again).text == Image.open(one).text
    draw(None, tmp_path / "other", "--like", str(picture), "--seed", "10", "--guidance-scale", "7.5")
    changed = json.loads(Image.open(tmp_path / "other" / "000-01.png").text["ppldm"])
    assert {name for name in record if record[name] != changed[name]} == {"seed", "guidance_scale"}
    assert "with other weights" not in capfd.readouterr().err


def test_other_weights_are_told_or_refused(model, tiny, tmp_path, capfd):
    draw(model, tmp_path / "o", "--prompt", "picture 1", *FEW)
    shutil.copytree(model, tmp_path / "m")
    run(["export", str(model), "--to", "diffusers", "--out", str(tmp_path / "same")])
    like = ("--like", str(tmp_path / "o" / "000-01.png"))
    draw(tmp_path / "same", tmp_path / "a", *like, "--same-weights")
    assert (pixels(tmp_path / "a" / "000-01.png") == pixels(tmp_path / "o" / "000-01.png")).all()
    vocab = tmp_path / "m" / "tokenizer" / "vocab.txt"
    vocab.write_text(vocab.read_text() + "zebra\n")
    capfd.readouterr()
    draw(tmp_path / "m", tmp_path / "b", *like)
    assert capfd.readouterr().err.count("was drawn with other weights") == 1
    with pytest.raises(SystemExit):
        draw(tmp_path / "m", tmp_path / "c", *like, "--same-weights")
    said = capfd.readouterr().err
    assert said.startswith("error: ") and "give the weights that it was drawn with" in said and said.count("\n") == 1


def test_over_a_picture_and_again_over_the_same_or_another(model, tmp_path, capfd):
    rng = np.random.default_rng(0)
    for name in ("base", "other"):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
    Image.fromarray(np.repeat([[0, 255]], [16, 16], 1).repeat(32, 0).astype(np.uint8)).save(tmp_path / "mask.png")
    base, mask = (("--image", str(tmp_path / "base.png")), ("--mask", str(tmp_path / "mask.png")))
    ask = ("--prompt", "picture 1", *FEW, "--size", "32x32")
    for name, flags in {"weak": (*base, "--strength", "0.4"), "strong": base, "part": (*base, *mask)}.items():
        draw(model, tmp_path / name, *ask, *flags)
    drawn = {name: pixels(tmp_path / name / "000-00.png") for name in ("weak", "strong", "part")}
    assert len({one.tobytes() for one in drawn.values()}) == 3
    records = {name: json.loads(Image.open(tmp_path / name / "000-00.png").text["ppldm"]) for name in drawn}
    assert [records[name]["strength"] for name in ("weak", "strong")] == [0.4, 0.8] and "mask" in records["part"]
    like = ("--like", str(tmp_path / "part" / "000-00.png"))
    draw(None, tmp_path / "again", *like, *base, *mask, "--same-weights")
    assert (pixels(tmp_path / "again" / "000-00.png") == drawn["part"]).all()
    capfd.readouterr()
    draw(None, tmp_path / "over", *like, "--image", str(tmp_path / "other.png"), *mask)
    assert capfd.readouterr().err.count("was drawn with other image") == 1
    for flags, says in (
        (like, "give it too: --image PICTURE"),
        ((*like, *base), "give it too: --mask PICTURE"),
        ((*ask, *mask), "give the picture too: --image"),
    ):
        with pytest.raises(ConfigError, match=says):
            draw(model, tmp_path / "wrong", *flags)


def test_wildcards_are_resolved_in_records_and_drawn_again(model, tmp_path):
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "number.txt").write_text("1\n2\n3\n4\n5\n6\n7\n8\n")
    command = ("--prompt", "{picture|pictures} __number__", "--num-inference-steps", "1", "--num-samples", "6")
    draw(model, tmp_path / "o", *command, "--wildcards", str(tmp_path / "lists"))
    records = [json.loads(line) for line in (tmp_path / "o" / "pictures.jsonl").read_text().splitlines()]
    said = [record["prompt"] for record in records]
    assert all(re.fullmatch("pictures? [1-8]", one) for one in said) and len(set(said)) > 2
    assert {record["template"] for record in records} == {"{picture|pictures} __number__"}
    draw(model, tmp_path / "o", *command, "--wildcards", str(tmp_path / "lists"), "--seed", "5")  # another choice
    assert [json.loads(line)["prompt"] for line in (tmp_path / "o" / "pictures.jsonl").open()] != said
    draw(None, tmp_path / "again", "--like", str(tmp_path / "o" / "000-04.png"))
    assert (pixels(tmp_path / "again" / "000-04.png") == pixels(tmp_path / "o" / "000-04.png")).all()
    draw(model, tmp_path / "plain", *command[:4], "--num-samples", "1")
    assert json.loads((tmp_path / "plain" / "pictures.jsonl").read_text())["prompt"] == command[1]


def test_weights_and_breaks_change_pictures_and_their_absence_does_not(model, tmp_path):
    loaded = ppldm.load(model)

    def drawn(prompt, weighted=True, negative=""):
        return loaded.draw([prompt], [0], [1], negative_prompts=[negative], drawing=Drawing(2, 30.0), size=(32, 32),
                           weighted=weighted).astype(int)  # fmt: skip

    plain = drawn("picture 1", weighted=False)
    assert (drawn("picture 1") == plain).all() and (drawn("(picture 1:1.0)") == plain).all()
    assert (drawn("(picture) 1", weighted=False) != plain).any()
    others = [drawn(prompt) for prompt in ("(picture) 1", "picture [1]", "picture BREAK 1", "picture 1 BREAK")]
    assert all((one != plain).any() for one in others)
    both = [drawn("picture 1", negative="picture 2 BREAK picture 3"), drawn("picture 1 BREAK", negative="picture 2")]
    assert all((one != plain).any() for one in both)
    assert (drawn("(picture:2)", negative="") != drawn("(picture:3)", negative="")).any()


def test_each_text_is_encoded_once(model, tmp_path, monkeypatch):
    from ppldm.networks.latent_diffusion import LatentDiffusionModel

    encoded, sizes = [], []
    for name, noted in (("condition", encoded), ("denoise", sizes)):
        own = getattr(LatentDiffusionModel, name)

        def counted(self, first, *args, own=own, noted=noted, **named):
            noted.append(len(first))
            return own(self, first, *args, **named)

        monkeypatch.setattr(LatentDiffusionModel, name, counted)
    draw(model, tmp_path, "--prompt", "picture 1", "picture 2", "picture 3", "--num-samples", "4",
         "--num-inference-steps", "2", "--batch-size", "6", "--guidance-scale", "2", "3")  # fmt: skip
    assert encoded == [1] * 4  # three prompts and the empty one, at both scales
    assert sizes == [12] * 8  # two batches of six with their unguided halves, two steps, two scales


def test_grids_show_the_product_of_two_settings(model, tmp_path, capfd):
    command = ("--prompt", "picture 1", "picture 2", "--num-samples", "1", "--seed", "4")
    grid = ("--grid", "sampler=ddim,euler,pndm", "num_inference_steps=2,4")
    draw(model, tmp_path / "o", *command, *grid)
    records = [json.loads(line) for line in (tmp_path / "o" / "pictures.jsonl").open()]
    assert [(one["sampler"], one["num_inference_steps"]) for one in records] == [
        (sampler, steps) for sampler in ("ddim", "euler", "pndm") for steps in (2, 4) for _ in range(2)
    ]
    assert (tmp_path / "o" / "sampler=euler,num_inference_steps=4" / "001-00.png").is_file()
    assert sorted(path.name for path in (tmp_path / "o").glob("*.png")) == ["grid-000.png", "grid-001.png"]
    draw(model, tmp_path / "alone", *command, "--sampler", "pndm", "--num-inference-steps", "4")
    cell = tmp_path / "o" / "sampler=pndm,num_inference_steps=4" / "001-00.png"
    assert np.abs(pixels(cell) - pixels(tmp_path / "alone" / "001-00.png")).max() <= 1
    draw(model, tmp_path / "s", "--prompt", "picture 1", *FEW, "--grid", "seed=4,5")
    assert {json.loads(line)["seed"] for line in (tmp_path / "s" / "pictures.jsonl").open()} == {4, 5}
    capfd.readouterr()
    draw(model, tmp_path / "dry", *command, *grid, "--dry-run")
    said = capfd.readouterr().out
    assert re.search(r"12 pictures, 6 batches: about [\d,]+ s on this machine, by a first batch of", said)
    assert not (tmp_path / "dry").exists()


def test_every_cell_of_a_grid_is_where_its_names_say():
    colours = np.array([[(255, 0, 0), (0, 255, 0), (0, 0, 255)], [(255, 255, 0), (0, 255, 255), (255, 0, 255)]])
    cells = [[[np.full((20, 30, 3), one, np.uint8)] * 2 for one in line] for line in colours]
    sheet = np.asarray(labelled_grid("a prompt", ["steps 10", "steps 20"], ["ddim", "euler", "pndm"], cells, side=30))
    places = {}
    for row, line in enumerate(colours):
        for column, colour in enumerate(line):
            found = np.argwhere((sheet == colour).all(axis=-1))
            assert len(found) == 2 * 20 * 30
            places[row, column] = found.min(axis=0), found.max(axis=0)
    for row in (0, 1):
        assert places[row, 0][1][1] < places[row, 1][0][1] and places[row, 1][1][1] < places[row, 2][0][1]
    assert all(places[0, column][1][0] < places[1, column][0][0] for column in range(3))
    dark = (sheet.max(axis=-1) < 90).any(axis=1)
    assert dark[places[0, 0][0][0] :].any()  # names of rows stand beside them
