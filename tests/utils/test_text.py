"""Law: nothing that a terminal obeys is left, all that people read is; JSON says the same after it."""

import io
import json
import re
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppldm.utils.text import EscapingStream, count_of, did_you_mean, escape, name_ranks, nearest, one_line, shorten

BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def is_dangerous(character: str) -> bool:
    if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
        return True
    return unicodedata.bidirectional(character) in BIDI or character in "\u061c\u200e\u200f\ufeff"


def test_every_character_is_escaped_or_stays():
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        if character in "\n\t":
            assert escape(character) == character
        elif is_dangerous(character):
            assert escape(character) == f"\\u{number:04x}"
        elif not 0xFFF9 <= number <= 0xFFFB:
            assert escape(character) == character


@pytest.mark.parametrize("text", ["图画，红", "👩\u200d🚀🏳️\u200d🌈", "é à ß", "العربية", "a\tb\nc", "\\u001b", ""])
def test_what_people_read_passes(text):
    assert escape(text) == text


@given(st.text(st.characters()))
def test_json_says_the_same(text):
    assert json.loads(escape(json.dumps({"a": text}, ensure_ascii=False))) == json.loads(json.dumps({"a": text}))
    assert escape(escape(text)) == escape(text)
    line = one_line(text)
    assert not any(map(is_dangerous, line)) and not re.search(r"[\t\n]", line)


@given(st.text(), st.integers(8, 40))
def test_what_is_too_long_keeps_its_ends(text, length):
    short = shorten(text, length)
    assert len(short) == min(length, len(text))
    if len(text) > length:
        head, tail = short.split(" … ", 1) if " … " not in text else (short[:1], short[-1:])
        assert text.startswith(head) and text.endswith(tail) and head and tail


def test_one_line_cuts_after_escaping():
    assert one_line("a\r\n\tb\x1bc") == "a b\\u001bc"
    assert len(one_line("\x1b" * 100, 50)) == 50


@pytest.mark.parametrize("number, words", [(0, "0 lists"), (1, "1 list"), (2, "2 lists"), (1000, "1,000 lists")])
def test_one_thing_has_no_s(number, words):
    assert count_of(number, "list") == words


def test_ranks_are_named_in_order():
    assert name_ranks([3]) == "rank 3" and name_ranks({3, 1}) == "ranks 1, 3"


def test_the_nearest_known_word():
    known = ["learning_rate", "resolution", "seed"]
    assert nearest("learnin_rate", known) == "learning_rate" and nearest("seeds", known) == "seed"
    assert nearest("wholly_other", known) is None and nearest("seed", ()) is None
    assert did_you_mean("resolutoin", known) == "did you mean resolution?"
    assert did_you_mean("xyz", iter(known)) == "known: learning_rate, resolution, seed"


def test_only_the_end_of_colours_passes_as_it_is():
    told = io.StringIO()
    for text in ("\x1b[0m", "\x1b[31mred", "a\x1b[0m"):
        EscapingStream(told).write(text)
    assert told.getvalue() == "\x1b[0m" + escape("\x1b[31mreda\x1b[0m")
