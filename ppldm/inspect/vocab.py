"""`ppldm vocab`: a tokenizer of one's own, learned from the captions that filelists hold.

The same captions give the same vocabulary, whatever the number of processes. A hidden file in its folder holds what it
was made from, so that the same command again only says what is there.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Annotated

from ..data.filelist import read_options
from ..data.formats.layouts import DEFAULT_LAYOUT
from ..data.formats.open import summarize
from ..data.text.captions import VOCABULARY_SIZE, CaptionRule, Coverage, CoverageMeter
from ..data.text.tokenizer import MOST_WORDS, SPECIAL_TOKENS, CaptionTokenizer, count_words
from ..data.text.vocabulary import LANGUAGES, learn_vocabulary
from ..utils.checksums import checksum_file
from ..utils.errors import ConfigError, DataError, OutputError, RowError
from ..utils.finished import find_finished, finish
from ..utils.log import get_logger
from ..utils.processes.workers import check_workers
from ..utils.text import as_json, print_report
from .parts import Indexed, Span, describe_bad_parts, index_parts, list_parts, open_rows, over_rows

VOCABULARY_FILE, RECORD_FILE = "vocab.txt", ".vocab.json"  # in its folder
_MEASURED_ROWS = 20_000
_COVERED_SHARE = 0.99
_Languages = Annotated[list[str], {"nargs": "+", "type": str, "metavar": "L"}]


def vocab(
    filelists: Annotated[str, {"nargs": "+", "metavar": "FILELIST"}],  # filelists, lists of filelists, or folders
    out: Annotated[str, {"opt": True, "required": True}],  # folder to write, for --tokenizer_name
    size: int = VOCABULARY_SIZE,  # tokens at most; few captions give fewer
    language: _Languages = ("en",),  # en, zh or both: their characters are known even where no caption has them
    max_length: int = 77,  # tokens of a caption, as --model_max_length of the training to come
    captions: str = "",  # learn from these texts of a row, as --captions of training: caption:0.5,caption_blip:0.5
    clean_captions: bool = False,  # learn from cleaned captions, as training with --clean_captions sees them
    max_rows: int = 1_000_000,  # rows to learn from, spread evenly over all
    layout: str = DEFAULT_LAYOUT,  # column order of the parts of lists that name none (docs/data.md)
    num_workers: int = 0,  # processes; 0 means one per core
    overwrite: bool = False,  # replace a vocabulary that is there
    json: bool = False,  # print the numbers as JSON
):  # fmt: skip
    """Make a tokenizer from captions: English, Chinese, or both mixed."""
    languages = list(dict.fromkeys(language))
    if unknown := [name for name in languages if name not in LANGUAGES]:
        raise ConfigError(f"--language {unknown[0]} is not one of {', '.join(LANGUAGES)}")
    if size <= len(SPECIAL_TOKENS) or max_length < 3 or max_rows < 1:
        raise ConfigError(
            f"--size {size}, --max-length {max_length} and --max-rows {max_rows} must be at least "
            f"{len(SPECIAL_TOKENS) + 1}, 3 and 1"
        )
    record_path, vocabulary = Path(out, RECORD_FILE), Path(out, VOCABULARY_FILE)
    is_there = vocabulary.exists() and not overwrite
    occupied = OutputError(
        f"{out} holds a vocabulary made from other data or settings; name another folder, or add --overwrite to "
        "replace it"
    )
    if is_there and not record_path.exists():
        raise occupied
    learn_vocabulary(Counter(), size, languages)  # refuses a size too small before any row is read
    rule, num_workers = CaptionRule.of_flags(captions, clean_captions), check_workers(num_workers)
    indexed = index_parts(list_parts(filelists, layout, must_exist=False), num_workers)
    settings = {"size": size, "language": languages, "max_length": max_length, "captions": captions,
                "clean_captions": clean_captions, "max_rows": max_rows}  # fmt: skip
    # Of each part format and the like, bytes and CRC-32 as its index has them; of one that cannot be opened nothing.
    contents = [[read_options(part.source), summarize(part.path, part.source).content] for part in indexed.rows]
    key = {"settings": as_json(settings), "input": {"content": as_json(contents + [None] * len(indexed.bad))}}

    def is_whole(found: dict) -> bool:
        return is_there and found["vocabulary"] == checksum_file(vocabulary)

    def make() -> dict:
        report = make_vocabulary(out, indexed, rule, num_workers, settings)
        return {"report": report, "vocabulary": checksum_file(vocabulary)}

    if is_there and not find_finished(record_path, key, is_whole):
        raise occupied
    record, was_there = finish(record_path, key, is_whole, make)
    if was_there:
        get_logger().info("the vocabulary of these captions and settings is there already")
    print_report(record["report"] | {"out": str(out)}, describe, json)


def make_vocabulary(out: str, indexed: Indexed, rule: CaptionRule, num_workers: int, settings: dict) -> dict:
    """Learn it from parts and write it; the report. settings: the flags by name. Raises DataError."""
    counts, rows = Counter(), 0
    counting = partial(take_captions, rule=rule, take=count_words)
    for span, own in over_rows(counting, indexed, num_workers, "captions", settings["max_rows"]):
        counts.update(own)
        rows += span.stop - span.start
    if not counts:
        raise DataError("no caption of these filelists holds a word; check the files with `ppldm head`")
    learned = learn_vocabulary(counts, settings["size"], settings["language"])
    is_whole = rows == indexed.num_rows and len(counts) <= MOST_WORDS
    tokenizer = CaptionTokenizer(learned, settings["max_length"], seen=counts if is_whole else None)
    tokenizer.save(out)
    # How it fits captions is measured of at most 20,000 rows spread evenly.
    found, measure = Coverage(), partial(take_captions, rule=rule, take=CoverageMeter(tokenizer).measure)
    for _, own in over_rows(measure, indexed, num_workers, "coverage", _MEASURED_ROWS):
        found += own
    return {
        "out": str(out),
        "size": tokenizer.vocab_size,
        "rows": rows,
        "words": counts.total(),
        "different_words": len(counts),
        "bad_parts": indexed.bad_parts(),
        "unknown_share": found.unknown_share,
        "unknown_words": [word for word, _ in found.unknown.most_common(20)],
        "max_length": settings["max_length"],
        "cut_share": found.cut_share(settings["max_length"]),
        "median_tokens": found.length_at(0.5),
        "tokens_of_99_percent": found.length_at(_COVERED_SHARE),
    }


def take_captions(span: Span, rule: CaptionRule, take: Callable):
    """What `take` makes of all captions that may be drawn of the rows of a span that can be read."""
    captions = []
    with closing(open_rows(span.part)) as part:
        for number in range(span.start, span.stop):
            with suppress(RowError):  # `ppldm verify` and training count these by reason
                captions += rule.texts(part.read(number))
    return take(captions)


def describe(report: dict) -> str:
    unknown = f" ({', '.join(report['unknown_words'][:10])})" if report["unknown_words"] else ""
    lines = [
        f"{report['size']:,} tokens, the characters of each language among them, in {report['out']}; the captions of "
        f"{report['rows']:,} rows have {report['words']:,} words, {report['different_words']:,} of them different",
        f"  unknown words: {report['unknown_share']:.2%}{unknown}",
        f"  captions cut at {report['max_length']} tokens: {report['cut_share']:.2%}; the median has "
        f"{report['median_tokens']}, 99 % have at most {report['tokens_of_99_percent']}",
        f"for ppldm train: --tokenizer_name {report['out']} --model_max_length {report['max_length']}",
    ]
    return "\n".join(lines + describe_bad_parts(report["bad_parts"]))
