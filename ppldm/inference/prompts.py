"""What to draw, from the command line and from files: text, TSV, CSV or JSON lines, by the file's suffix.

    .tsv, .csv          with a header; the prompt's column is the first of `PROMPT_COLUMNS`
    .jsonl, .json       an object, or a text, a line, with the same names; or a JSON list of these
    .json of COCO       an object with `annotations`, as captions_val2014.json: of each picture its first caption
    anything else       a prompt a line; after a tab, a remark that is shown behind the prompt

Optional columns: `negative_prompt`, `seed`, `remark`.

Choices in prompts: "a {red|blue} heart", and `__colour__` for a line of FOLDER/colour.txt (`--wildcards FOLDER`). A
choice, a line that is not blank and does not begin with #, may hold braces and other lists. What is chosen is a
function of (seed, prompt, index), each choice as likely as the others.
"""

import csv
import io
import json
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from ..data.text.captions import expand_wildcards
from ..utils.errors import ConfigError
from ..utils.files import read_given_text
from ..utils.rng import MAX_SEED, Stream, make_rng
from ..utils.text import did_you_mean

PROMPT_COLUMNS = ("prompt", "caption_en", "caption", "text")
MOST_SAMPLES = 1_000_000  # of a prompt
_SHOWN = 60  # letters of a prompt in a message
_COCO_NAMES = ("coco1k", "coco10k", "coco30k")
_DEEPEST = 100  # lists that lead to one another
_MOST_LETTERS = 100_000  # of all the choices of one prompt together
_NAME = re.compile(r"__([^\W_](?:[\w/-]*?[^\W_])?)__")  # no dots, so nothing outside of the folder


@dataclass(frozen=True)
class Request:
    """One prompt. `seed` None: the seed of all. `line`: what a file of JSON says of it."""

    prompt: str
    negative_prompt: str = ""
    seed: int | None = None
    remark: str = ""
    line: str = field(default="", compare=False)


def read_requests(path) -> list[Request]:
    """The requests of a file, in its order. Raises ConfigError naming the file, and the line where one is at fault."""
    try:
        text = read_given_text(path)
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
        requests = _read_json(path, text)
    else:
        # Not splitlines, which cuts at characters that are within a prompt.
        lines = (line.partition("\t") for line in text.split("\n") if line.strip())
        requests = [Request(prompt.strip(), remark=remark.strip()) for prompt, _, remark in lines]
    if not requests:
        raise ConfigError(f"{path} holds no prompts; write one a line")
    return requests


def check_prompt(text, what: str) -> None:
    """Raises ConfigError for what is not text, or holds bytes that were not UTF-8 on the command line or in JSON."""
    if not isinstance(text, str):
        raise ConfigError(f"{what} {repr(text)[:_SHOWN]} is not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text[: error.start].encode().decode()[-_SHOWN:]
        raise ConfigError(f"{what} is not UTF-8 text, after {shown!r}; write it in UTF-8") from error


def _read_table(path, text: str, delimiter: str) -> list[Request]:
    """Quotes as in RFC 4180; in a TSV also inside a field, as captions have them, but none may span lines."""
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=delimiter == ",")
    requests = []
    try:
        for row in table:
            if delimiter == "\t" and any("\n" in value for value in row.values() if isinstance(value, str)):
                raise csv.Error("a quotation mark at the beginning of a field is not closed in its line")
            requests.append(_request(f"{path}, line {table.line_num}", row))
    except csv.Error as error:
        raise ConfigError(
            f"{path} is not a table, up to line {table.reader.line_num}: {error}; put a field that has quotation "
            "marks in quotation marks, and double its own"
        ) from error
    return requests


def read_licence(path) -> dict:
    """What a file of COCO's captions says of its origin and licences, JSON-ready; {} of all others."""
    if Path(path).suffix.lower() != ".json" or (found := _parse_coco(read_given_text(path))) is None:
        return {}
    info = found.get("info") if isinstance(found.get("info"), dict) else {}
    licences = [one.get("name") for one in found.get("licenses", []) if isinstance(one, dict)]
    kept = {name: info[name] for name in ("description", "url", "version", "year") if name in info}
    return kept | ({"licences": licences} if licences else {})


def _parse_coco(text: str) -> dict | None:
    """The object of a file of COCO's captions; None of another file."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None  # lines of objects
    return found if isinstance(found.get("annotations"), list) else None


def _read_coco(path, annotations: list) -> list[Request]:
    """In order of the pictures' first captions; the remark is the picture's number."""
    requests = {}
    for number, entry in enumerate(annotations, 1):
        where = f"{path}, annotation {number}"
        if not isinstance(entry, dict) or "image_id" not in entry:
            raise ConfigError(f"{where} names no image_id; give COCO's own file of captions")
        if entry["image_id"] not in requests:
            requests[entry["image_id"]] = replace(_request(where, entry), remark=str(entry["image_id"]))
    return list(requests.values())


def _read_json(path, text: str) -> list[Request]:
    if coco := _parse_coco(text):
        return _read_coco(path, coco["annotations"])
    if text.lstrip().startswith("["):
        entries = ((f"{path}, item {number}", entry) for number, entry in enumerate(_parse(f"{path}", text), 1))
    else:
        lines = ((f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
        entries = ((where, _parse(where, line)) for where, line in lines)
    found = ((where, entry if isinstance(entry, dict) else {"prompt": entry}) for where, entry in entries)
    return [replace(_request(where, entry), line=json.dumps(entry)) for where, entry in found]


def _parse(where: str, text: str):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}); write an object a line, or a list of objects") from error


def _request(where: str, row: dict) -> Request:
    prompt = next((row[name] for name in PROMPT_COLUMNS if isinstance(row.get(name), str)), None)
    if prompt is None:
        raise ConfigError(f"{where} has no prompt; name its column one of {', '.join(PROMPT_COLUMNS)}")
    negative_prompt = row.get("negative_prompt") or ""
    check_prompt(prompt, f"{where}: the prompt")
    check_prompt(negative_prompt, f"{where}: the negative_prompt")
    said, seed = row.get("seed"), None
    if said is not None and said != "":
        text = str(said).strip()
        if not text.isdecimal() or len(text) > 20 or int(text) > MAX_SEED:
            raise ConfigError(f"{where}: the seed {said!r} is not a whole number from 0 to {MAX_SEED}")
        seed = int(text)
    return Request(prompt.strip(), negative_prompt, seed, str(row.get("remark") or ""))


class Wildcards:
    """The lists of a folder. Raises ConfigError where it is none, or `check` does of one of `texts`."""

    def __init__(self, folder, texts: Iterable[str] = ()):
        self.folder = Path(folder).expanduser()
        if not os.path.isdir(self.folder):
            raise ConfigError(f"--wildcards {folder}: there is no such folder; give one with a text file for each list")
        self.choices = cache(self._read)
        self._depths: dict[str, int] = {}  # of the lists that have been checked
        for text in texts:
            self.check(text)

    def check(self, text: str, within: tuple[str, ...] = ()) -> int:
        """How many lists lead to one another below `text`. Raises ConfigError: missing, empty, circular, deep ones."""
        deepest = 0
        for name in dict.fromkeys(_NAME.findall(text)):
            if name in within:
                circle = " -> ".join([*within[within.index(name) :], name])
                raise ConfigError(f"--wildcards {self.folder}: {circle} is a circle; take one of the names out")
            if name not in self._depths and len(within) < _DEEPEST:
                self._depths[name] = 1 + self.check("\n".join(self.choices(name)), (*within, name))
            deepest = max(deepest, self._depths.get(name, 1))
        if len(within) + deepest > _DEEPEST:
            way = " -> ".join(within[:3] or _NAME.findall(text)[:1])
            raise ConfigError(
                f"--wildcards {self.folder}: more than {_DEEPEST} lists lead to one another, from {way} on; put their "
                "choices in fewer lists"
            )
        return deepest

    def resolve(self, text: str, seed: int, index: int) -> str:
        """What picture `index` of the prompt `text`, which `check` has passed, is drawn of."""
        draw, letters = make_rng(seed, Stream.PROMPT_WILDCARD, zlib.crc32(text.encode()), index).random, 0

        def choose(found: re.Match) -> str:
            nonlocal letters
            lines = self.choices(found[1])
            line = lines[int(draw() * len(lines))]
            letters += len(line)
            if letters > _MOST_LETTERS:
                raise ConfigError(
                    f"--wildcards {self.folder}: the choices for {text[:_SHOWN]!r} come to more than "
                    f"{_MOST_LETTERS:,} letters; name fewer lists in the lists"
                )
            return expand(line)

        def expand(one: str) -> str:
            return _NAME.sub(choose, expand_wildcards(one, draw))

        return expand(text)

    def _read(self, name: str) -> list[str]:
        path = self.folder / f"{name}.txt"
        if path.exists() and not path.is_file():
            raise ConfigError(f"__{name}__: {path} is not a file; write one choice a line into one")
        try:
            lines = read_given_text(path).split("\n")
        except OSError as error:
            known = [one.relative_to(self.folder).with_suffix("").as_posix() for one in self.folder.rglob("*.txt")]
            raise ConfigError(
                f"__{name}__: cannot read {path} ({error.strerror}); {did_you_mean(name, sorted(known))}"
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"__{name}__: {path} is not UTF-8 text; write one choice a line") from error
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise ConfigError(f"__{name}__: {path} holds no choices; write one a line")
        return found
