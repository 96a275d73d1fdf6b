"""Laws: a prompt with the token of a textual inversion has the hidden states that its vectors give; any other file is
refused in one line, and nothing in it is run."""

import json
import pickle

import needs
import numpy as np
import paddle
import pytest
from safetensors.numpy import save_file
from small_weights import small_weights, write_clip

import ppldm
from ppldm.cli.main import run
from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.utils.errors import ConfigError, ModelError, PpldmError
from ppldm.weights.formats.torch_files import write_torch
from ppldm.weights.source import read_component
from ppldm.weights.write import write_weights

PROMPTS = ["a red <cat> on blue", "<cat>, <cat>! red", "dog<cat>dog", "été & <Mon-Chat> rouge", "red blue"]
DRAWN = {"num_inference_steps": 2, "guidance_scale": 1.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A pipeline of Stable Diffusion's structure with a tiny CLIP, also as diffusers has it."""
    folder = tmp_path_factory.mktemp("inversions")
    weights = small_weights(4, unet={"sample_size": 2})
    clip = write_clip(folder / "clip", 5)
    weights.components["text_encoder"] = read_component("text_encoder", clip)
    weights.tokenizer = clip.parent / "tokenizer"
    write_weights(weights, "ppdiffusers", folder / "base")
    write_weights(weights, "diffusers", folder / "diffusers")
    return folder


@pytest.fixture(scope="module")
def width(base):
    return json.loads((base / "base/text_encoder/config.json").read_text())["hidden_size"]


def vectors(count: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.05, (count, width)).astype(np.float32)


def states(pipeline, prompts=PROMPTS) -> np.ndarray:
    with paddle.no_grad():
        return pipeline.model.encode_text(paddle.to_tensor(pipeline.tokenizer.encode(prompts))).numpy()


def write_a1111(path, rows: np.ndarray) -> None:
    """As stable-diffusion-webui writes its embeddings."""
    needs.need("parity")
    import torch

    said = {"string_to_token": {"*": 265}, "name": "another name", "step": 99, "sd_checkpoint": None}
    torch.save({**said, "string_to_param": {"*": torch.nn.Parameter(torch.tensor(rows))}}, path)


@pytest.mark.parametrize("count", [1, 3])
def test_hidden_states_are_those_of_diffusers(base, width, tmp_path, count):
    needs.need("parity")
    import diffusers

    rows, other = vectors(count, width), vectors(2, width, 1)
    save_file({"<cat>": rows if count > 1 else rows[0]}, tmp_path / "learned_embeds.safetensors")
    write_a1111(tmp_path / "<Mon-Chat>.pt", other)
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(str(base / "diffusers"))
    theirs.tokenizer.model_max_length = 77
    theirs.load_textual_inversion(str(tmp_path / "learned_embeds.safetensors"))
    theirs.load_textual_inversion(str(tmp_path / "<Mon-Chat>.pt"), token="<Mon-Chat>")
    ours = ppldm.load(base / "base", textual_inversion=[str(tmp_path), str(tmp_path / "<Mon-Chat>.pt")])
    found = states(ours)
    for prompt, own in zip(PROMPTS, found, strict=True):
        (expected, _) = theirs.encode_prompt(prompt, "cpu", 1, False)
        expected = expected[0].detach().numpy()
        assert np.abs(own - expected).max() <= 1e-6 * np.abs(expected).max(), prompt
    assert np.abs(found - states(ppldm.load(base / "base"))).max(axis=(1, 2))[:4].min() > 1e-3


def write_bin(path, rows):
    write_torch(path, {"<cat>": rows}, {})


def write_a1111_safetensors(path, rows):
    save_file({"emb_params": rows}, path)


@pytest.mark.parametrize("name, write, given", [
    ("learned_embeds.bin", write_bin, ""), ("learned_embeds.bin", write_bin, ":<dog>"),
    ("<cat>.pt", write_a1111, ""), ("x.pt", write_a1111, ":<cat>"), ("<cat>.safetensors", write_a1111_safetensors, ""),
])  # fmt: skip
def test_every_form_gives_the_same(base, width, tmp_path, name, write, given):
    rows, token = vectors(2, width), given[1:] or "<cat>"
    save_file({token: rows}, tmp_path / "plain.safetensors")
    write(tmp_path / name, rows)
    one = ppldm.load(base / "base", textual_inversion=[f"{tmp_path / name}{given}"])
    other = ppldm.load(base / "base", textual_inversion=[str(tmp_path / "plain.safetensors")])
    prompts = [f"a {token} red", f"{token}{token}", "red"]
    assert (states(one, prompts) == states(other, prompts)).all()
    table = one.model.text_encoder.state_dict()["text_model.embeddings.token_embedding.weight"].numpy()
    assert (table[-2:] == rows).all()


def test_tokens_stay_whole_and_other_words_what_they_were(base):
    plain = load_tokenizer(base / "base/tokenizer", 77)
    more = plain.with_tokens(["<a>", "<a>_1", "<a>b", "<B>"])
    more.runs = {"<a>": "<a> <a>_1"}
    numbers = {token: plain.vocab_size + number for number, token in enumerate(more.added)}
    texts = {
        "<a>": ["<a>", "<a>_1"],
        "<a>b": ["<a>b"],
        "É <a>_1": ["<a>_1"],
        "red<a>": ["<a>", "<a>_1"],
        "é <B>": ["<B>"],
    }
    for text, added in texts.items():
        ids = [number for number in more.encode([text])[0].tolist() if number >= plain.vocab_size]
        assert ids == [numbers[token] for token in added], text
    assert (plain.encode(["red é & blue"]) == more.encode(["red é & blue"])).all()
    assert more.measure("<a> red", 77)[0] == 2 + plain.measure("red", 77)[0]


def test_pictures_say_their_files_and_are_drawn_again(base, width, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({"<cat>": vectors(2, width)}, "cat.safetensors")
    flags = ["--prompt", "a <cat>", "--num-samples", "1", "--num-inference-steps", "2", "--guidance-scale", "1"]
    run(["generate", "--model", str(base / "base"), *flags, "--out", "one", "--textual-inversion", "cat.safetensors"])
    run(["generate", "--model", str(base / "base"), *flags, "--out", "plain"])
    run(["generate", "--like", "one/000-00.png", "--out", "again"])
    record = json.loads((tmp_path / "one/pictures.jsonl").read_text())
    assert record["textual_inversion"] == ["cat.safetensors"]
    pictures = [(tmp_path / name / "000-00.png").read_bytes() for name in ("one", "again", "plain")]
    assert json.loads((tmp_path / "again/pictures.jsonl").read_text())["weights"] == record["weights"]
    assert pictures[0] == pictures[1] != pictures[2]
    drawn = ppldm.load(base / "base", textual_inversion=["cat.safetensors"]).generate("a <cat>", **DRAWN)
    assert drawn.shape[-1] == 3


class Run:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize("content, words, error, message", [
    ({"<cat>": (2, 5)}, "", ModelError, "vectors of 5 numbers, and the model's text encoder has"),
    ({"<cat>": (2, 2, 32)}, "", ModelError, "is no vectors but"),
    ({"<cat>": (1, 32), "<dog>": (1, 32)}, ":<x>", ConfigError, "has 2 tokens"),
    ({"my cat": (1, 32)}, "", ConfigError, "has spaces; choose another: --textual-inversion FILE:TOKEN"),
    ({"<cat>": (1, 32)}, ":red</w>", ConfigError, "it is there"),
    ({}, "", ConfigError, "has 0 tokens"),
    (None, "", ConfigError, "there is no such file"),
    (Run(), "", ModelError, "nothing of it was run"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(base, width, tmp_path, content, words, error, message, capsys):
    file = tmp_path / "x.safetensors"
    if isinstance(content, Run):
        file = tmp_path / "x.pt"
        import zipfile

        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("x/data.pkl", pickle.dumps(content, 2))
    elif content is not None:
        sizes = {name: tuple(width if n == 32 else n for n in shape) for name, shape in content.items()}
        save_file({name: np.ones(shape, np.float32) for name, shape in sizes.items()}, file)
    with pytest.raises(error, match=message) as caught:
        ppldm.load(base / "base", textual_inversion=[f"{file}{words}"])
    assert (
        isinstance(caught.value, PpldmError)
        and "\n" not in str(caught.value)
        and "run\n" not in capsys.readouterr().out
    )


def test_two_files_for_one_token_are_refused(base, width, tmp_path):
    for number in (1, 2):
        save_file({"<cat>": vectors(1, width)}, tmp_path / f"{number}.safetensors")
    with pytest.raises(ConfigError, match="two files are for <cat>"):
        ppldm.load(base / "base", textual_inversion=[str(tmp_path / f"{number}.safetensors") for number in (1, 2)])
