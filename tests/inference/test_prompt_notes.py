"""What a prompt says and the model does not see is said once, by every door, with the part that is meant."""

import logging
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_weights import small_weights, write_clip

import ppldm
from ppldm.cli.main import run
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab, count_words, load_tokenizer
from ppldm.inference.prompt_weights import describe_prompts
from ppldm.inference.serving.paint import Painter
from ppldm.inference.serving.parameters import make_parameters, read_request
from ppldm.weights.source import open_model
from ppldm.weights.write import write_weights

LONG = "a red heart " * 25 + "and a blue boat"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    weights = small_weights(4)
    weights.tokenizer = CaptionTokenizer(build_vocab([LONG, "<lora:name:0.8> [a:b:0.5]"]), 77)
    write_weights(weights, "ppdiffusers", folder)
    return folder


@pytest.fixture(scope="module", params=["bert", "clip"])
def words(request, tmp_path_factory):
    """A stand-in of a model, as far as prompts are read by it, of 16 tokens."""
    own = CaptionTokenizer(build_vocab([LONG]), 16)
    if request.param == "clip":
        own = load_tokenizer(write_clip(tmp_path_factory.mktemp("clip")).parent / "tokenizer", 16)
    return SimpleNamespace(tokenizer=own, model=SimpleNamespace(words="encoder_hidden_states", joins_words=True))


def test_every_door_says_once_what_is_cut(place, tmp_path, caplog, monkeypatch):
    model, prompt = ppldm.load(place), f"{LONG} <lora:name:0.8>"
    said = ["longer than the 75 tokens", "'and a blue boat", "<lora:name:0.8> (load the file with --lora FILE:WEIGHT)"]

    def warnings():
        found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        caplog.clear()
        return [one for one in found if "longer than the" in one]

    model.generate([prompt, prompt], num_inference_steps=1, num_samples=2)
    (one,) = warnings()
    assert all(part in one for part in said)
    run(["generate", "--model", str(place), "--prompt", prompt, "a red heart", "--num-inference-steps", "1",
         "--num-samples", "2", "--out", str(tmp_path / "out")])  # fmt: skip
    assert warnings() == [one.replace("--prompt_syntax", "--prompt-syntax")]  # as the help has it
    values = read_request({"prompt": prompt, "num_inference_steps": 1}, make_parameters(("it",)))
    answer = Painter({"it": model}).prepare(values)[2]
    assert all(part in answer for part in said) and "prompt_syntax" not in answer
    model.generate("a red heart", num_inference_steps=1)
    assert warnings() == []


@settings(deadline=None, max_examples=150)
@given(prompt=st.lists(st.sampled_from(["a", "red", "heart", "boat", "blue", "BREAK", "(heart:1.2)", "[a", "]"]),
                       max_size=40).map(" ".join), weighted=st.booleans())  # fmt: skip
def test_it_is_said_where_and_only_where_something_is_cut(words, prompt, weighted):
    from ppldm.inference.prompt_weights import parse_weights

    chunks = [[text for text, _ in chunk] for chunk in parse_weights(prompt)] if weighted else [[prompt]]
    counts = [sum(words.tokenizer.measure(text, 10**6)[0] for text in chunk) for chunk in chunks]
    said = describe_prompts(words, [prompt], weighted)
    assert ("longer than the 14 tokens" in said) == any(count > 14 for count in counts)


def test_the_rest_is_what_the_model_does_not_see(words):
    count, over = words.tokenizer.measure(LONG, 14)
    assert count > 14 and LONG.endswith(over)
    assert words.tokenizer.measure(LONG, count) == (count, "")
    cut, whole = words.tokenizer.encode([LONG, LONG[: len(LONG) - len(over)]])
    assert (cut[:13] == whole[:13]).all() and words.tokenizer.measure(LONG[: len(LONG) - len(over)], 14)[0] <= 14


@pytest.mark.parametrize("mark", ["<lora:name:0.8>", "<lora:a-b_c:1>", "<hypernet:x:0.5>", "<lyco:x>", "[cat:dog:0.5]",
                                  "[dog:0.5]", "[cat::10]", "[:dog:.3]", "[a|b]", "[red cat|blue dog|x]", "(word:1.2)",
                                  "(two words: 0.8)"])  # fmt: skip
def test_webuis_syntax_is_named(words, mark):
    said = describe_prompts(words, [f"a red {mark} heart"])
    assert "webui's syntax, which is drawn as words" in said and mark in said
    assert said.count("webui's") == 1 and ("--lora" in said) == mark.startswith("<")


def test_and_is_named_beside_other_marks_of_webui_alone(words):
    assert "webui" not in describe_prompts(words, ["bread AND butter"])
    assert "AND" in describe_prompts(words, ["bread AND butter"], weighted=True)
    assert "AND" in describe_prompts(words, ["a cat AND a [dog:0.5]"])
    assert "webui" not in describe_prompts(words, ["a LAND AND1 and"], weighted=True)


@pytest.mark.parametrize("text", ["a (ratio 16:9) [at 10:30:00]", "[cat]", "(cat)", "a <b> c", "{a|b}", "x: 0.5",
                                  "[1]", "a|b", "(see: cats)", "John (3:16)", "[12:30]", "<lora>"])  # fmt: skip
def test_text_that_looks_alike_is_left_alone(words, text):
    assert "webui" not in describe_prompts(words, [text])


def test_words_that_no_caption_had_are_named_with_the_nearest_and_travel_with_the_model(tmp_path, caplog):
    captions = ["a purple heart", "Two blue boats!"]
    weights = small_weights(4)
    weights.tokenizer = CaptionTokenizer(build_vocab([*captions, "zebra"]), 77, seen=count_words(captions))
    write_weights(weights, "ppdiffusers", tmp_path / "model")
    model, again = ppldm.load(tmp_path / "model"), tmp_path / "again"
    write_weights(open_model(tmp_path / "model").read(), "ppdiffusers", again)
    said = "words that the model does not know: purplish (nearest that it knows: purple), zebra"
    assert describe_prompts(model, ["a Purple heart TWO boats! <lora:some:0.8>"]).startswith("webui's syntax")
    for one in (model, ppldm.load(again)):
        assert describe_prompts(one, ["a purplish zebra", "a blue purple heart!"]) == said
    assert describe_prompts(model, ["a heart", "blue", "purplish zebra", "Zebra"]).endswith(
        'purplish (in "purplish zebra"; nearest that it knows: purple), zebra (in "purplish zebra")'
    )
    model.generate("a purplish zebra", num_inference_steps=1)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [said]


def test_a_model_whose_captions_are_not_known_says_nothing_of_them(place):
    assert describe_prompts(ppldm.load(place), ["heartb"]) == ""


def test_added_tokens_are_no_words_of_captions():
    own = CaptionTokenizer(build_vocab(["a heart"]), 16, seen=["a", "heart"]).with_tokens(["<rex>"])
    assert own.unknown_words(["a <rex> heart"]) == [] and own.unknown_words(["rex"]) == ["rex"]


def test_a_tokenizer_in_the_place_of_another_knows_no_words_of_that(tmp_path):
    vocab = build_vocab(["a heart"])
    for seen in (["a"], None, ["heart"]):
        CaptionTokenizer(vocab, 16, seen=seen).save(tmp_path)
        found = load_tokenizer(tmp_path, 16).unseen_words(["heart"])
        assert found == ([] if seen in (None, ["heart"]) else ["heart"])
