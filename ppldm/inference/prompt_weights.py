r"""`--prompt-syntax weighted`: words that count more or less, and prompts longer than the text encoder takes.

    (word)        weight 1.1; ((word)): 1.21          [word]       weight 1 / 1.1
    (word:1.3)    weight 1.3                          \( \) \[ \] \\   these characters as they are
    BREAK         what follows is encoded by itself; its hidden states stand behind those of what precedes

The grammar is that of AUTOMATIC1111's stable-diffusion-webui ("Attention/emphasis" and "BREAK keyword" of its wiki): a
bracket that is not closed reaches to the end, one that was not opened is text. So is what it does with weights (its
emphasis "Original"): a token's hidden state is multiplied by its weight, then all states of the chunk by one number
that restores their mean.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import TypeVar

import numpy as np

from ..utils.errors import ConfigError

SYNTAXES = ("plain", "weighted")
MORE = 1.1  # what a bracket multiplies by
_MARKS = re.compile(r"\\([()\[\]\\])|:\s*([+-]?(?:\d+\.?\d*|\.\d+))\s*\)|([(\[)\]])")
_BREAK = re.compile(r"\s*\bBREAK\b\s*")

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
    return _divide(pieces)


def _divide(pieces: list[list]) -> list[Chunk]:
    """The chunks of texts, each with its weight and whether BREAK divides it."""
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
    """(token ids [L] int64, weights [L] float32, 1 of special tokens and padding) of a chunk, cut where it is too long
    for the text encoder."""
    *rows, ids = tokenizer.encode([*(text for text, _ in chunk), ""])
    weights, start = np.ones(len(ids), np.float32), 1
    for row, (_, weight) in zip(rows, chunk, strict=True):
        own = row[1 : 1 + int(np.argmax(row[1:] == tokenizer.end_id))][: len(ids) - 1 - start]
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
    """Jobs in their order, in batches of at most `size` that are `alike`: as pictures of as many chunks are, which are
    drawn together."""
    for _, run in groupby(jobs, alike):
        found = list(run)
        yield from (found[start : start + size] for start in range(0, len(found), size))


def check_syntax(syntax: str) -> str:
    """The same. Raises ConfigError for a syntax of prompts that is not there."""
    if not isinstance(syntax, str) or syntax not in SYNTAXES:
        raise ConfigError(f"--prompt-syntax {syntax} is not one of {', '.join(SYNTAXES)}")
    return syntax
