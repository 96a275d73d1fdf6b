"""A hundred calls of `ppldm generate` that cannot work: each ends with one sentence, and nothing is written."""

import json
import re
import sys

import numpy as np
import pytest
from tiny_model import write_base

from ppldm.utils.pictures import save_png

RECORD = {"prompt": "p", "negative_prompt": "", "sampler": "ddim", "num_inference_steps": 2, "guidance_scale": 2.0,
          "seed": 1, "index": 0, "height": 32, "width": 32, "weights": "0"}  # fmt: skip
# A call -> what its sentence says. {f}: the folder of files; those of FLAGS also have a model, and a prompt.
WHOLE = {
    "": "no model; give --model, or --like PICTURE",
    "--prompt x": "no model",
    "--model m": "no prompts; give --prompt TEXT",
    "--model m --prompts {f}/none.txt": "cannot read the prompts",
    "--model m --prompts {f}/empty.txt": "holds no prompts",
    "--model m --prompts {f}/latin.txt": "is not UTF-8 text",
    "--model m --prompts {f}": "cannot read the prompts",
    "--model m --prompts {f}/seed.csv": "line 2: the seed 'x'",
    "--model m --prompts {f}/other.tsv": "line 2 has no prompt",
    "--model m --prompts {f}/cut.jsonl": "line 1 is not JSON",
    "--model s3://bucket/m --prompt x": "s3://bucket/m",
    "--model ../m --prompt x": "no folder or file",
    "--model {f}/none --prompt x": "no folder or file",
    "--like {f}/none.png": "there is no such file; give a picture",
    "--like {f}": "there is no such file",
    "--like {f}/empty.txt": "does not say how it was drawn",
    "--like {f}/plain.png": "does not say how it was drawn",
    "--like {f}/cut.png": "does not say how it was drawn",
    "--like {f}/json.png": "does not say how it was drawn",
    "--like {f}/list.png": "does not say how it was drawn",
    "--like {f}/record.png": "does not say which model has drawn it; give --model",
    "--like {f}/led.png": "after a control image; give it too: --control",
    "--like {f}/seed.png --model m": "--seed",
    "--like {f}/kind.png --model m": "--sampler",
    "--like {f}/record.png --model m --seed -2": "--seed -2 must be from 0",
    "--like {f}/record.png --model m --grid sampler=none": "--sampler none is not one of",
}
FLAGS = {
    "--num-samples 0": "--num-samples 0 must be above 0",
    "--num-samples -3": "--num-samples -3 must be above 0",
    "--num-samples x": "--num-samples",
    "--num-samples 1.5": "--num-samples",
    "--batch-size 0": "--batch-size 0 must be above 0",
    "--batch-size -1": "--batch-size -1 must be above 0",
    "--batch-size many": "--batch-size",
    "--columns 0": "--columns 0 must be above 0",
    "--columns -2": "--columns -2 must be above 0",
    "--num-inference-steps 0": "--num-inference-steps 0 must be above 0",
    "--num-inference-steps -1": "--num-inference-steps -1 must be above 0",
    "--num-inference-steps few": "--num-inference-steps",
    "--guidance-scale nan": "--guidance-scale nan is not a number",
    "--guidance-scale inf": "--guidance-scale inf is not a number",
    "--guidance-scale 2 nan": "--guidance-scale nan is not a number",
    "--guidance-scale strong": "--guidance-scale",
    "--guidance-scale": "--guidance-scale",
    "--guidance-rescale 2": "--guidance-rescale 2 must be from 0 to 1",
    "--guidance-rescale -1": "--guidance-rescale -1 must be from 0 to 1",
    "--guidance-rescale nan": "--guidance-rescale nan is not a number",
    "--eta 2": "--eta 2 must be from 0 to 1",
    "--eta nan": "--eta nan is not a number",
    "--eta 0.5 --sampler euler": "--eta 0.5 is for",
    "--sampler magic": "--sampler magic is not one of",
    "--sampler DDIM": "--sampler DDIM is not one of",
    "--sampler": "--sampler",
    "--timestep-spacing odd": "--timestep-spacing odd is not one of",
    "--sigmas odd": "odd is not one of karras, exponential",
    "--sigmas karras --sampler ddim": "karras",
    "--seed -2": "--seed -2 must be from 0",
    "--seed 18446744073709551616": "--seed 18446744073709551616 must be from 0",
    "--seed x": "--seed",
    "--seed 1.5": "--seed",
    "--size 64": "--size 64 is not width x height",
    "--size 64x": "--size 64x is not width x height",
    "--size 0x8": "--width 0 must be above 0",
    "--size 64x8 --width 64": "all that --width 64 does; omit one",
    "--size 64x8 --resolution 64": "all that --resolution 64 does; omit one",
    "--resolution 0": "--resolution 0 must be above 0",
    "--height -8": "--height -8 must be above 0",
    "--width 0": "--width 0 must be above 0",
    "--width wide": "--width",
    "--control {f}/none.png": "there is no such file",
    "--control-scale 2": "give --control PICTURE",
    "--control-filter canny": "give --control PICTURE",
    "--control {f}/plain.png --control-scale nan": "--control-scale nan is not a number",
    "--control {f}/plain.png --control-filter magic": "magic",
    "--lora {f}/none.safetensors": "there is no",
    "--lora {f}/plain.png:nan": "the weight is not a number",
    "--lora": "--lora",
    "--out s3://bucket/o": "s3://bucket/o is an address",
    "--out {f}/drawn": "a picture that ppldm did not draw",
    "--out {f}/others": "a picture of the prompt 'other'",
    "--guidance 2": "did you mean --guidance-scale?",
    "--promt y": "did you mean --prompt?",
    "--magic": "--magic",
    "--prompt-syntax fancy": "--prompt-syntax fancy is not one of plain, weighted",
    "--wildcards {f}/none": "there is no such folder; give one with a text file for each list",
    "--wildcards {f}/empty.txt": "there is no such folder",
    "--wildcards {f}/lists --prompt __thin__": "did you mean thing?",
    "--wildcards {f}/lists --prompt __empty__": "holds no choices",
    "--wildcards {f}/lists --prompt __latin__": "is not UTF-8 text",
    "--wildcards {f}/lists --prompt __a__": "a -> b -> a is a circle",
    "--wildcards {f}/lists --negative-prompt __none__": "__none__: cannot read",
    "--grid": "--grid",
    "--grid sampler": "--grid sampler names no values; write sampler=ddim,euler",
    "--grid sampler=": "names no values",
    "--grid magic=1,2": "no setting magic; known: seed, num_inference_steps",
    "--grid sampler=ddim,magic": "--sampler magic is not one of",
    "--grid sampler=ddim,": "is not one of",
    "--grid steps=ten": "'ten' is not a whole number; write num_inference_steps=10,20",
    "--grid num_inference_steps=1.5": "'1.5' is not a whole number",
    "--grid num_inference_steps=0,5": "--num-inference-steps 0 must be above 0",
    "--grid guidance_scale=low": "'low' is not a number; write guidance_scale=3,7.5",
    "--grid guidance_scale=1,nan": "--guidance-scale nan is not a number",
    "--grid seed=-1": "the seed -1 must be from 0",
    "--grid seed=1,18446744073709551616": "18446744073709551616 must be from 0",
    "--grid seed=1 seed=2": "names seed twice",
    "--grid seed=1 eta=0 sampler=ddim": "3 settings are named; name two",
    "--grid sampler=ddim,pndm --sampler ddim": "says all that --sampler does; omit one",
    "--grid seed=1,2 --guidance-scale 2 3": "with 2 guidance scales; name them in it",
    "--grid eta=0,0.5 --sampler euler": "--eta 0.5 is for",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name in ("lists", "drawn", "others"):
        (folder / name).mkdir()
    texts = {"empty.txt": "\n", "seed.csv": "prompt,seed\na,x\n", "other.tsv": "id\n3\n", "cut.jsonl": '{"prompt"\n',
             "lists/thing.txt": "x", "lists/empty.txt": "#", "lists/a.txt": "__b__",
             "lists/b.txt": "__a__"}  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name in ("latin.txt", "lists/latin.txt"):
        (folder / name).write_bytes(b"\xe9\xff")
    black = np.zeros((8, 8, 3), np.uint8)
    records = {"plain.png": None, "drawn/000-00.png": None, "json.png": "{", "list.png": "[1]",
               "others/000-00.png": json.dumps(RECORD | {"prompt": "other"}), "record.png": json.dumps(RECORD),
               "led.png": json.dumps(RECORD | {"control": "0"}), "seed.png": json.dumps(RECORD | {"seed": -7}),
               "kind.png": json.dumps(RECORD | {"sampler": "magic"})}  # fmt: skip
    for name, text in records.items():
        save_png(folder / name, black, {"ppldm": text} if text else None)
    (folder / "cut.png").write_bytes((folder / "record.png").read_bytes()[:-30])
    return folder


def said_by(words, tmp_path, capfd, monkeypatch) -> str:
    from ppldm.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppldm", "generate", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code not in (0, None) and not list(tmp_path.iterdir())
    lines = [line for line in capfd.readouterr().err.strip().splitlines() if not line.startswith("usage:")]
    assert sum("error: " in line for line in lines) == 1 and not any("Traceback" in line for line in lines)
    return lines[-1]


@pytest.mark.parametrize("call", [*WHOLE, *FLAGS])
def test_one_sentence(call, files, tmp_path, capfd, monkeypatch):
    words = call.replace("{f}", str(files)).split(" ") if call else []
    if call in FLAGS:
        words = ["--model", "m", *(() if "--prompt " in call else ("--prompt", "x")), *words]
    said = said_by(words, tmp_path, capfd, monkeypatch)
    assert {**WHOLE, **FLAGS}[call] in said and len(said) < 600


def test_there_are_a_hundred():
    assert len({**WHOLE, **FLAGS}) >= 100


@pytest.mark.parametrize(
    "words, message",
    [
        (["--size", "33x32"], "width 33, height 32: choose multiples of 8"),
        (["--device", "magic"], "magic"),
        (["--num-inference-steps", "1001"], "must be from 1 to 1000"),
        (["--sampler", "flow-euler"], "flow-euler does not draw with a model of"),
        (["--grid", "sampler=ddim,flow-euler"], "flow-euler does not draw with a model of"),
        (["--control", "{f}/plain.png"], "--control is for models with a ControlNet"),
        (["--decoder", "{f}"], "--decoder is for stage C of Stable Cascade"),
    ],
)
def test_what_only_the_model_shows(words, message, files, tiny, tmp_path, capfd, monkeypatch):
    given = [word.replace("{f}", str(files)) for word in words]
    command = ["--model", str(write_base(tiny)), "--prompt", "picture 1", "--num-samples", "1", *given]
    said = said_by(command, tmp_path, capfd, monkeypatch)
    assert re.search(re.escape(message), said)
