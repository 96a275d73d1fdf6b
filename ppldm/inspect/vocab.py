"""`ppldm vocab`: a tokenizer of one's own, learned from the captions that filelists hold.

Captions in, `vocab.txt` and its settings out: a folder for `--tokenizer_name`. The same captions give the same
vocabulary, whatever the number of processes. A hidden file beside it holds what it was made from, so that the same
command again only says what is there.
"""

from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated

from ..data.fingerprint import read_options
from ..data.formats.layouts import DEFAULT_LAYOUT
from ..data.formats.open import summarize
from ..data.text.captions import VOCABULARY_SIZE, CaptionRule
from ..utils.checksums import checksum_file
from ..utils.errors import ConfigError, DataError, OutputError, RowError
from ..utils.files import write_json
from ..utils.jobs import find_finished
from ..utils.log import get_logger
from ..utils.processes.workers import check_workers
from ..utils.report import print_report
from ..utils.text import as_json
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
    from ..data.text.tokenizer import SPECIAL_TOKENS
    from ..data.text.vocabulary import LANGUAGES, learn_vocabulary

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
    if is_there and not record_path.exists():
        raise _occupied(out)
    learn_vocabulary(Counter(), size, languages)  # refuses a size too small before any row is read
    rule, num_workers = CaptionRule.of_flags(captions, clean_captions), check_workers(num_workers)
    indexed = index_parts(list_parts(filelists, layout, must_exist=False), num_workers)
    settings = {"size": size, "language": languages, "max_length": max_length, "captions": captions,
                "clean_captions": clean_captions, "max_rows": max_rows}  # fmt: skip
    key = {"settings": as_json(settings), "input": {"content": list_contents(indexed)}}
    record = is_there and find_finished(
        record_path, key, lambda found: found["vocabulary"] == checksum_file(vocabulary)
    )
    if is_there and not record:
        raise _occupied(out)
    if record:
        get_logger().info("the vocabulary of these captions and settings is there already")
    else:
        record_path.unlink(missing_ok=True)
        report = make_vocabulary(out, indexed, rule, num_workers, settings)
        record = {"report": report, "vocabulary": checksum_file(vocabulary), "key": key}
        write_json(record_path, record)
    print_report(record["report"] | {"out": str(out)}, describe, json)


def make_vocabulary(out: str, indexed: Indexed, rule: CaptionRule, num_workers: int, settings: dict) -> dict:
    """Learn it from parts and write it; the report. settings: the flags by name. Raises DataError."""
    from ..data.text.tokenizer import MOST_WORDS, CaptionTokenizer
    from ..data.text.vocabulary import learn_vocabulary

    counts, rows = Counter(), 0
    for span, own in over_rows(partial(count_span, rule=rule), indexed, num_workers, "captions", settings["max_rows"]):
        counts.update(own)
        rows += span.stop - span.start
    if not counts:
        raise DataError("no caption of these filelists holds a word; check the files with `ppldm head`")
    learned = learn_vocabulary(counts, settings["size"], settings["language"])
    is_whole = rows == indexed.num_rows and len(counts) <= MOST_WORDS
    tokenizer = CaptionTokenizer(learned, settings["max_length"], seen=counts if is_whole else None)
    tokenizer.save(out)
    return {
        "out": str(out),
        "size": tokenizer.vocab_size,
        "rows": rows,
        "words": counts.total(),
        "different_words": len(counts),
        "bad_parts": indexed.bad_parts(),
        **measure_fit(tokenizer, indexed, rule, num_workers),
    }


def list_contents(indexed: Indexed) -> list:
    """What is known of the content of each part, JSON-ready: format and the like, bytes and CRC-32 as its index has
    them; of one that cannot be opened, only that."""
    return as_json(
        [[read_options(part.source), summarize(part.path, part.source).content] for part in indexed.rows]
        + [None] * len(indexed.bad)
    )


def _occupied(out: str) -> OutputError:
    return OutputError(
        f"{out} holds a vocabulary made from other data or settings; name another folder, or add --overwrite to "
        "replace it"
    )


def count_span(span: Span, rule: CaptionRule) -> Counter:
    """How often each word comes in the captions of a span."""
    from ..data.text.tokenizer import count_words

    return count_words(read_captions(span, rule))


def read_captions(span: Span, rule: CaptionRule) -> list[str]:
    """All captions that may be drawn of the rows of a span that can be read."""
    captions = []
    with closing(open_rows(span.part)) as part:
        for number in range(span.start, span.stop):
            try:
                row = part.read(number)
            except RowError:
                continue  # `ppldm verify` and training count these by reason
            captions += rule.texts(row)
    return captions


def measure_fit(tokenizer, indexed: Indexed, rule: CaptionRule, num_workers: int) -> dict:
    """How the tokenizer fits captions, of at most 20,000 rows spread evenly."""
    from ..data.text.coverage import Coverage, CoverageMeter

    measure = partial(measure_span, rule=rule, meter=CoverageMeter(tokenizer))
    found, max_length = Coverage(), tokenizer.max_length
    for _, own in over_rows(measure, indexed, num_workers, "coverage", _MEASURED_ROWS):
        found += own
    return {
        "unknown_share": found.unknown_share,
        "unknown_words": [word for word, _ in found.unknown.most_common(20)],
        "max_length": max_length,
        "cut_share": found.cut_share(max_length),
        "median_tokens": found.length_at(0.5),
        "tokens_of_99_percent": found.length_at(_COVERED_SHARE),
    }


def measure_span(span: Span, rule: CaptionRule, meter):
    """The coverage of the captions of a span."""
    return meter.measure(read_captions(span, rule))


def describe(report: dict) -> str:
    """A report for people."""
    unknown = f" ({', '.join(report['unknown_words'][:10])})" if report["unknown_words"] else ""
    lines = [
        f"{report['size']:,} tokens, the characters of each language among them, in {report['out']}; the captions of "
        f"{report['rows']:,} rows have {report['words']:,} words, {report['different_words']:,} of them different",
        f"  unknown words: {report['unknown_share']:.2%}{unknown}",
        f"  captions cut at {report['max_length']} tokens: {report['cut_share']:.2%}; the median has "
        f"{report['median_tokens']}, 99 % have at most {report['tokens_of_99_percent']}",
        f"train with --tokenizer_name {report['out']} --model_max_length {report['max_length']}",
    ]
    return "\n".join(lines + describe_bad_parts(report["bad_parts"]))
