"""What of a prompt does not reach the model as it was meant, in one sentence: words that its vocabulary lacks or that
no caption of its training had, with the nearest that one had; what is cut at the text encoder's length; and webui's
syntax that is drawn as words.

`AND` between prompts is named only in a prompt that is weighted or has other marks of webui: by itself it is also how
people stress a word ("bread AND butter"), and most prompts are not written for webui. Of brackets with numbers only
those are named that hold letters right before the number: "(ratio 16:9)" and "[at 10:30:00]" are text.
"""

import re
from collections.abc import Iterable
from string import punctuation

from ..utils.text import nearest
from .prompt_weights import parse_weights

_SHOWN_WORDS, _SHOWN_MARKS, _SHOWN_LETTERS = 20, 3, 60
_NEAR = 0.7  # of 1: as near words must be
_NUMBER = r"\s*[+-]?(?:\d+\.?\d*|\.\d+)\s*"
_LORA = re.compile(r"<(?:lora|lyco|hypernet):[^<>:\s]+(?::[^<>]*)?>", re.IGNORECASE)
_EDITS = re.compile(rf"\[[^\[\]:|]*:?[^\[\]:|]*[^\W\d]\s*::?{_NUMBER}\]|\[[^\[\]|]*\|[^\[\]]*\]")
_WEIGHTS = re.compile(rf"\([^()\[\]:]*[^\W\d]\s*:{_NUMBER}\)")
_AND = re.compile(r"\bAND\b")


def describe_prompts(pipeline, texts: Iterable[str], weighted: bool = False, has_syntaxes: bool = True) -> str:
    """What a model does not see of texts as they say it; "" where there is nothing. has_syntaxes: whether another
    syntax of prompts may be chosen."""
    found = list(dict.fromkeys(text for text in texts if text))
    read = ["".join(one for one, _ in chunk) for text in found for chunk in parse_weights(text)] if weighted else found
    said = [_unknown(pipeline.tokenizer, read), _cut(pipeline, found, weighted, has_syntaxes),
            _webui(found, weighted, has_syntaxes)]  # fmt: skip
    return "; ".join(one for one in said if one)


def _unknown(tokenizer, texts: list[str]) -> str:
    found = tokenizer.unknown_words([_LORA.sub(" ", text) for text in texts])
    words = [word for word in found if not {*word} <= {*punctuation}]
    shown = [_with_nearest(word, tokenizer.seen or ()) for word in words[:_SHOWN_WORDS]]
    more = ", …" if len(words) > _SHOWN_WORDS else ""
    return f"words that the model does not know: {', '.join(shown)}{more}" if words else ""


def _with_nearest(word: str, seen: Iterable[str]) -> str:
    """The first letter is that of the word meant: so few of many words are compared."""
    near = nearest(word.lower(), sorted(one for one in seen if one[0] == word[0].lower()), _NEAR)
    return f"{word} (nearest that it knows: {near})" if near else word


def _cut(pipeline, texts: list[str], weighted: bool, has_syntaxes: bool) -> str:
    room, rests = pipeline.tokenizer.max_length - 2, []
    for text in texts:
        for chunk in parse_weights(text) if weighted else [[(text, 1.0)]]:
            left, rest = room, ""
            for piece, _ in chunk:
                count, over = pipeline.tokenizer.measure(piece, left)
                left, rest = max(0, left - count), f"{rest}{over}"
            rests += [rest.strip()] if rest.strip() else []
    if not rests:
        return ""
    more = f" and {len(rests) - 1} more" if len(rests) > 1 else ""
    joins = has_syntaxes and pipeline.model.words is not None and pipeline.model.joins_words
    remedy = ", or divide it with BREAK (--prompt_syntax weighted)" if joins else ""
    unseen = f"{_short(rests[0])!r}{more}"
    return f"longer than the {room} tokens that the model reads: it does not see {unseen}; shorten it{remedy}"


def _webui(texts: list[str], weighted: bool, has_syntaxes: bool) -> str:
    loras, others = _found(_LORA, texts), _found(_EDITS, texts)
    others += [] if weighted else _found(_WEIGHTS, texts)
    if weighted or loras or others:
        others += _found(_AND, texts)
    said = [f"{', '.join(loras)} (load the file with --lora FILE:WEIGHT)"] if loras else []
    if others:
        syntax = "" if weighted or not has_syntaxes else "; --prompt_syntax weighted reads (word:1.2), [word] and BREAK"
        said.append(f"{', '.join(others)} (write it out{syntax})")
    return f"webui's syntax, which is drawn as words: {', '.join(said)}" if said else ""


def _found(pattern: re.Pattern, texts: list[str]) -> list[str]:
    marks = list(dict.fromkeys(_short(mark[0]) for text in texts for mark in pattern.finditer(text)))
    return [*marks[:_SHOWN_MARKS], *(["…"] if len(marks) > _SHOWN_MARKS else [])]


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…"
