"""Files and functions are short, so that each can be read in one go; the package, and what a training goes through of
it, only becomes smaller. A method is a file beside it, shorter still, and nobody else's lines."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ppldm"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_METHOD_LINES = 500, 60, 150
FILES = sorted(PACKAGE.rglob("*.py"))
METHODS = sorted((PACKAGE / "methods").rglob("*.py"))

# Numbers that may only fall: what is counted -> (today's number, slack). A change that makes one smaller by more than
# the slack lowers it here. A training is `ppldm train --preset ldm-tiny-cpu`, its main thread, in a process of its own.
RATCHETS = {
    # All lines of ppldm/**/*.py but of methods. To become 44,000 to 46,000.
    "lines of the package": (58985, 20),
    # Modules of ppldm that are imported when the first update has ended. To become 110.
    "files that a training imports": (106, 1),
    # All lines of these. To become 15,000.
    "lines that a training imports": (21048, 20),
    # Files where a function is entered from main() to the first step of the optimizer. To become 80.
    "files up to the first update": (77, 1),
    # Files where a function is entered from step 12 of the optimizer to the next: the latents of all rows are kept, and
    # no line of the metrics is due. To become 15.
    "files of a later update": (13, 1),
}
TRAINING = [
    *("--preset", "ldm-tiny-cpu", "--file_list", "tiny.filelist.list", "--tokenizer_name", "tokenizer"),
    *("--resolution", "32", "--per_device_train_batch_size", "4", "--max_steps", "14", "--logging_steps", "14"),
    *("--validation_prompts", "a picture", "--image_logging_steps", "0", "--output_dir", "out"),
]


def over_long(source: str) -> list[str]:
    """The functions of a source that have too many lines, and "" for the file itself."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    long = [node.name for node in functions if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES]
    return [""] * (len(source.splitlines()) > MAX_FILE_LINES) + long


def test_files_and_functions_are_short():
    found = {path.relative_to(PACKAGE).as_posix(): over_long(path.read_text(encoding="utf-8")) for path in FILES}
    assert not {name: functions for name, functions in found.items() if functions}


@pytest.mark.parametrize(
    "lines, inner, found",
    [(500, 60, []), (501, 60, [""]), (500, 61, ["f"]), (501, 61, ["", "f"])],
)
def test_what_is_too_long_is_found(lines, inner, found):
    source = "def f():\n" + "    pass\n" * (inner - 1)
    assert over_long(source + "pass\n" * (lines - inner)) == found


def count_lines(paths) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def must_fall(name: str, found: int, number: int, slack: int) -> str | None:
    """What is wrong with a count, and what to do; None where it holds."""
    if found > number:
        return f"{name}: {found}, {found - number} above {number}; take away as many as you add"
    if found < number - slack:
        return f"{name}: {found}, was {number}; write {found} into RATCHETS of tests/test_size.py"
    return None


def test_the_package_only_becomes_shorter():
    name = "lines of the package"
    assert must_fall(name, count_lines(set(FILES) - set(METHODS)), *RATCHETS[name]) is None


def test_a_method_is_a_short_file():
    assert not [path.name for path in METHODS if count_lines([path]) > MAX_METHOD_LINES]


@pytest.mark.cold
@pytest.mark.slow
def test_a_training_only_goes_through_fewer_files(tiny, tmp_path):
    for path in (*tiny.folder.glob("part-*.gz"), *tiny.folder.glob("tiny.filelist*")):  # without their indexes
        shutil.copy(path, tmp_path)
    shutil.copytree(tiny.tokenizer, tmp_path / "tokenizer")
    script = Path(__file__).with_name("helpers") / "traced_run.py"
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PPLDM_CACHE_DIR": str(tmp_path / "cache")}
    environment["PPLDM_NO_CPU_TUNING"] = "1"  # the same files on every processor
    done = subprocess.run(
        [sys.executable, script, "trace.json", *TRAINING], cwd=tmp_path, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = json.loads((tmp_path / "trace.json").read_text())
    found = {
        "files that a training imports": len(files["imported"]),
        "lines that a training imports": count_lines(PACKAGE / name for name in files["imported"]),
        "files up to the first update": len(files["first_update"]),
        "files of a later update": len(files["later_update"]),
    }
    wrong = [text for name, count in found.items() if (text := must_fall(name, count, *RATCHETS[name]))]
    assert not wrong, f"{wrong}; the files: {files}"


@pytest.mark.parametrize(
    "found, said",
    [(101, "1 above 100"), (100, None), (95, None), (94, "write 94 into RATCHETS")],
)
def test_a_number_follows_what_it_counts(found, said):
    text = must_fall("lines", found, 100, 5)
    assert text is None if said is None else said in text
