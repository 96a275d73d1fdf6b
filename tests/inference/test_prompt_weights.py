"""`--prompt-syntax weighted`: the grammar, the tokens, and what weights do to hidden states."""

import itertools

import numpy as np
import paddle
import pytest

from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.inference.pipeline import emphasise
from ppldm.inference.prompt_weights import parse_weights, tokens_of

UP, DOWN = 1.1, 1 / 1.1


@pytest.mark.parametrize(
    "prompt, chunks",
    [
        ("plain words, and more", [[("plain words, and more", 1)]]),
        ("", [[("", 1)]]),
        # The examples of webui's documentation of the grammar.
        ("an (important) word", [[("an ", 1), ("important", UP), (" word", 1)]]),
        ("(unbalanced", [[("unbalanced", UP)]]),
        (r"\(literal\]", [[("(literal]", 1)]]),
        ("(unnecessary)(parens)", [[("unnecessaryparens", UP)]]),
        (
            "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
            [[("a ", 1), ("house", 1.3 * UP * UP), (" ", UP), ("on", 1), (" a ", UP), ("hill", 0.5 * UP),
              (", sun, ", UP), ("sky", UP**4), (".", UP)]],
        ),
        ("[dull] [[duller", [[("dull", DOWN), (" ", 1), ("duller", DOWN * DOWN)]]),
        ("(a: 1.5 ) b) c] :1.2) d\\e", [[("a", 1.5), (" b) c] :1.2) d\\e", 1)]]),
        ("(against:-1)", [[("against", -1)]]),
        ("one BREAK two\nBREAK\n(three BREAK four:2)", [[("one", 1)], [("two", 1)], [("three", 2)], [("four", 2)]]),
        ("BREAK x BREAKING", [[("", 1)], [("x BREAKING", 1)]]),
    ],
)  # fmt: skip
def test_the_grammar(prompt, chunks):
    parsed = parse_weights(prompt)
    assert [[text for text, _ in chunk] for chunk in parsed] == [[text for text, _ in chunk] for chunk in chunks]
    np.testing.assert_allclose(*([w for chunk in one for _, w in chunk] for one in (parsed, chunks)), rtol=1e-12)


def test_every_text_has_a_meaning():
    """Whatever the order of marks: all letters are there, in order, and weights are numbers above 0."""
    for marks in itertools.product(("(", ")", "[", "]", ":2)", "\\", "BREAK", "a"), repeat=4):
        parsed = parse_weights(" ".join(marks))
        said = "".join(text for chunk in parsed for text, _ in chunk)
        assert said.count("a") == marks.count("a") and len(parsed) == 1 + marks.count("BREAK")
        assert all(weight > 0 for chunk in parsed for _, weight in chunk)


def tokenizer(length=8):
    return CaptionTokenizer(build_vocab(["a red heart two boats"]), length)


def test_tokens_stand_beside_one_another_with_their_weights():
    own = tokenizer()
    ids, weights = tokens_of([("a ", 1.0), ("red", 2.0), (" heart", 0.5)], own)
    assert (ids == own.encode(["a red heart"])[0]).all()
    assert weights.tolist() == [1, 1, 2, 0.5, 1, 1, 1, 1]
    ids, weights = tokens_of([("a red heart two", 1.0), (" boats boats boats", 3.0)], own)
    assert (ids == own.encode(["a red heart two boats boats boats"])[0]).all() and ids[-1] == own.end_id
    assert weights.tolist() == [1, 1, 1, 1, 1, 3, 3, 1]
    for text in ("", "a red heart", r"red \[SEP\] heart", "a " * 20):
        plain = text.replace("\\", "")
        assert (tokens_of(parse_weights(text)[0], own)[0] == own.encode([plain])[0]).all()


@pytest.mark.parametrize("shift", [0.5, 0.0])
def test_weights_multiply_and_the_mean_is_restored(shift):
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((1, 6, 16)).astype(np.float32)
    hidden += shift - hidden.mean()
    weights = np.array([1, 1, 1.5, 1.5, 1, 1], np.float32)
    assert emphasise(states := paddle.to_tensor(hidden), np.ones(6, np.float32)) is states
    found = emphasise(states, weights).numpy()
    expected = hidden.astype(np.float64) * weights[:, None]
    if shift:
        expected *= hidden.mean(dtype=np.float64) / expected.mean()
        np.testing.assert_allclose(found.mean(), shift, rtol=1e-5)
    np.testing.assert_allclose(found, expected, rtol=2e-5)  # a mean that is rounding restores nothing
