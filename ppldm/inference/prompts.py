"""What to draw, from the command line and from files: text, TSV, CSV or JSON lines, by the file's suffix.

    .tsv, .csv          with a header; the prompt's column is the first of `prompt`, `caption_en`, `caption`, `text`
    .jsonl, .json       an object a line, with the same names
    anything else       a prompt a line; after a tab, a remark that is shown behind the prompt

Optional columns: `negative_prompt`, `seed`, `remark`.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from ..utils.errors import ConfigError

PROMPT_COLUMNS = ("prompt", "caption_en", "caption", "text")
_COCO_NAMES = ("coco1k", "coco10k", "coco30k")


@dataclass(frozen=True)
class Request:
    """One prompt. `seed` None: the seed of all."""

    prompt: str
    negative_prompt: str = ""
    seed: int | None = None
    remark: str = ""


def read_requests(path) -> list[Request]:
    """The requests of a file, in its order. Raises ConfigError naming the file, and the line where one is at fault."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        hint = "; the published caption sets are not part of this package" if str(path) in _COCO_NAMES else ""
        raise ConfigError(
            f"cannot read the prompts in {path}: {error.strerror}{hint}; give a file, one prompt a line"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; write one prompt a line") from error
    suffix = Path(path).suffix.lower()
    if suffix in (".tsv", ".csv"):
        requests = _read_table(path, text, "\t" if suffix == ".tsv" else ",")
    elif suffix in (".jsonl", ".json"):
        requests = _read_json_lines(path, text)
    else:
        lines = (line.partition("\t") for line in text.splitlines() if line.strip())
        requests = [Request(prompt.strip(), remark=remark.strip()) for prompt, _, remark in lines]
    if not requests:
        raise ConfigError(f"{path} holds no prompts; write one a line")
    return requests


def _read_table(path, text: str, delimiter: str) -> list[Request]:
    try:
        rows = list(csv.DictReader(text.splitlines(), delimiter=delimiter))
    except csv.Error as error:
        raise ConfigError(f"{path} is no table: {error}") from error
    return [_request(path, number, row) for number, row in enumerate(rows, 2)]


def _read_json_lines(path, text: str) -> list[Request]:
    requests = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is not JSON ({error}); write an object a line") from error
        requests.append(_request(path, number, row if isinstance(row, dict) else {"prompt": row}))
    return requests


def _request(path, number: int, row: dict) -> Request:
    prompt = next((row[name] for name in PROMPT_COLUMNS if isinstance(row.get(name), str)), None)
    if prompt is None:
        raise ConfigError(f"{path}, line {number} has no prompt; name its column one of {', '.join(PROMPT_COLUMNS)}")
    seed = row.get("seed")
    try:
        seed = None if seed in (None, "") else int(seed)
        if seed is not None and seed < 0:
            raise ValueError
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}, line {number}: the seed {seed!r} is no whole number from 0") from error
    return Request(prompt.strip(), row.get("negative_prompt") or "", seed, str(row.get("remark") or ""))
