r"""`--prompt-syntax weighted`: words that count more or less, and prompts longer than the text encoder takes.

    (word)        weight 1.1; ((word)): 1.21          [word]       weight 1 / 1.1
    (word:1.3)    weight 1.3                          \( \) \[ \] \\   these characters as they are
    BREAK         what follows is encoded by itself; its hidden states stand behind those of what precedes

As in AUTOMATIC1111's stable-diffusion-webui, a bracket that is not closed reaches to the end, one not opened is
text; a token's hidden state is multiplied by its weight, then all states of the chunk by one that restores their mean.

`describe_prompts` says what of a prompt does not reach the model as it was meant: unknown words, with the nearest
known; what is cut at the text encoder's length; and webui's syntax that is drawn as words. There `AND` is named only
beside other marks of webui: people also stress a word so. Of brackets with numbers only those are that hold letters
right before the number: "(ratio 16:9)" and "[at 10:30:00]" are text.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from string import punctuation
from typing import TypeVar

import numpy as np

from ..utils.errors import ConfigError
from ..utils.text import nearest, shorten

SYNTAXES = ("plain", "weighted")
MORE = 1.1  # what a bracket multiplies by
_MARKS = re.compile(r"\\([()\[\]\\])|:\s*([+-]?(?:\d+\.?\d*|\.\d+))\s*\)|([(\[)\]])")
_BREAK = re.compile(r"\s*\bBREAK\b\s*")
_SHOWN_WORDS, _SHOWN_MARKS, _SHOWN_LETTERS = 20, 3, 60
_NEAR = 0.7  # of 1: as near words must be
_NUMBER = r"\s*[+-]?(?:\d+\.?\d*|\.\d+)\s*"
_LORA = re.compile(r"<(?:lora|lyco|hypernet):[^<>:\s]+(?::[^<>]*)?>", re.IGNORECASE)
_EDITS = re.compile(rf"\[[^\[\]:|]*:?[^\[\]:|]*[^\W\d]\s*::?{_NUMBER}\]|\[[^\[\]|]*\|[^\[\]]*\]")
_WEIGHTS = re.compile(rf"\([^()\[\]:]*[^\W\d]\s*:{_NUMBER}\)")
_AND = re.compile(r"\bAND\b")

_Job = TypeVar("_Job")
Chunk = list[tuple[str, float]]  # texts and their weights, one behind the other


def parse_weights(prompt: str) -> list[Chunk]:
    """The chunks of a prompt, which BREAK divides; in each, texts beside one another differ in weight."""
    pieces: list[list] = []  # [text, weight, whether BREAK in it divides]
    opened: dict[str, list[int]] = {"(": [], "[": []}

    def close(bracket: str, factor: float) -> None:
        for piece in pieces[opened[bracket].pop() :]:
            piece[1] *= factor

    position = 0
    for mark in _MARKS.finditer(prompt):
        pieces.append([prompt[position : mark.start()], 1.0, True])
        position = mark.end()
        plain, weight, bracket = mark.groups()
        if bracket and bracket in opened:
            opened[bracket].append(len(pieces))
        elif (weight or bracket == ")") and opened["("]:
            close("(", float(weight or MORE))
        elif bracket == "]" and opened["["]:
            close("[", 1 / MORE)
        else:
            pieces.append([plain or mark[0], 1.0, False])
    pieces.append([prompt[position:], 1.0, True])
    for bracket, factor in (("(", MORE), ("[", 1 / MORE)):
        while opened[bracket]:
            close(bracket, factor)
    chunks: list[Chunk] = [[]]
    for text, weight, divides in pieces:
        for number, part in enumerate(_BREAK.split(text) if divides else [text]):
            if number:
                chunks.append([])
            last = chunks[-1]
            if part and last and last[-1][1] == weight:
                last[-1] = (last[-1][0] + part, weight)
            elif part:
                last.append((part, weight))
    return [chunk or [("", 1.0)] for chunk in chunks]


def tokens_of(chunk: Chunk, tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(token ids [L] int64, weights [L] float32, 1 of special tokens and padding) of a chunk, cut where too long."""
    *rows, ids = tokenizer.encode([*(text for text, _ in chunk), ""])
    weights, first = np.ones(len(ids), np.float32), tokenizer.start
    start = first
    for row, (_, weight) in zip(rows, chunk, strict=True):
        own = row[first : first + int(np.argmax(row[first:] == tokenizer.end_id))][: len(ids) - 1 - start]
        ids[start : start + len(own)], weights[start : start + len(own)] = own, weight
        start += len(own)
    ids[start] = tokenizer.end_id
    return (ids if len(rows) > 1 else rows[0]), weights


def words_of(prompt: str) -> str:
    """A weighted prompt without its marks: what its noise is drawn by, so that a weight changes nothing else."""
    return " ".join("".join(text for text, _ in chunk) for chunk in parse_weights(prompt))


def chunks_of(prompts: Iterable[str], weighted: bool) -> int:
    """Of how many chunks a picture is drawn that has this prompt and this negative prompt."""
    return max(len(parse_weights(one)) for one in prompts) if weighted else 1


def batches_alike(jobs: Iterable[_Job], alike: Callable[[_Job], object], size: int) -> Iterator[list[_Job]]:
    """Jobs in their order, in batches of at most `size` that are `alike`, and so can be drawn together."""
    for _, run in groupby(jobs, alike):
        found = list(run)
        yield from (found[start : start + size] for start in range(0, len(found), size))


def check_syntax(syntax: str) -> str:
    """The same. Raises ConfigError for a syntax of prompts that is not there."""
    if not isinstance(syntax, str) or syntax not in SYNTAXES:
        raise ConfigError(f"--prompt-syntax {syntax} is not one of {', '.join(SYNTAXES)}")
    return syntax


def describe_prompts(pipeline, texts: Iterable[str], weighted: bool = False, has_syntaxes: bool = True) -> str:
    """What a model does not see of texts as they say it, or "". has_syntaxes: whether a syntax may be chosen."""
    found = list(dict.fromkeys(text for text in texts if text))
    read = ["".join(one for one, _ in chunk) for text in found for chunk in parse_weights(text)] if weighted else found
    said = [_unknown(pipeline.tokenizer, read), _cut(pipeline, found, weighted, has_syntaxes),
            _webui(found, weighted, has_syntaxes)]  # fmt: skip
    return "; ".join(one for one in said if one)


def _unknown(tokenizer, texts: list[str]) -> str:
    found = tokenizer.unknown_words([_LORA.sub(" ", text) for text in texts])
    words, shown = [word for word in found if not {*word} <= {*punctuation}], []
    for word in words[:_SHOWN_WORDS]:  # only words with the same first letter are compared
        near = nearest(word.lower(), sorted(one for one in tokenizer.seen or () if one[0] == word[0].lower()), _NEAR)
        where = _first_with(word, texts) if len(texts) > 2 else ""
        notes = where and f'in "{shorten(where, _SHOWN_LETTERS)}"', near and f"nearest that it knows: {near}"
        shown.append(f"{word} ({'; '.join(filter(None, notes))})" if any(notes) else word)
    more = ", …" if len(words) > _SHOWN_WORDS else ""
    return f"words that the model does not know: {', '.join(shown)}{more}" if words else ""


def _first_with(word: str, texts: list[str]) -> str:
    """The first text that has a word by itself, else in another, as languages without spaces have it; "" for none."""
    alone = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)
    return next(filter(alone.search, texts), next((text for text in texts if word.lower() in text.lower()), ""))


def _cut(pipeline, texts: list[str], weighted: bool, has_syntaxes: bool) -> str:
    room, rests = pipeline.tokenizer.room, []
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
    unseen = f"{shorten(rests[0], _SHOWN_LETTERS)!r}{more}"
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
    marks = list(dict.fromkeys(shorten(mark[0], _SHOWN_LETTERS) for text in texts for mark in pattern.finditer(text)))
    return [*marks[:_SHOWN_MARKS], *(["…"] if len(marks) > _SHOWN_MARKS else [])]
