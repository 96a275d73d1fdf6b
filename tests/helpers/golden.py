"""What every command says of itself, and of a command line that cannot work:  python tests/helpers/golden.py

Writes tests/golden again from the code; `git diff` then shows what a user sees change. help/ has the help of each
command, of each family's training and of each script; errors.txt has command lines ("$ …") with their exit status and
all that they print. To add one, write its "$" line and run this. `golden.py FOLDER` writes into another folder.

All runs in one process, in an empty folder but for a few inputs (INPUTS), and leaves nothing behind there. Neither the
terminal's width nor the machine nor the version of Python is seen in a text.
"""

import contextlib
import difflib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
# One preset of each family, whose settings `ppldm train --help` shows.
PRESETS = (
    *("autoencoder-f4", "sd15-finetune", "sd15-controlnet-canny", "uvit-tiny-cpu", "dit-tiny-cpu", "microdit-tiny-cpu"),
    *("sd3-tiny-cpu", "sdxl-tiny-cpu", "single-stream-tiny-cpu"),
    *("cascade-a-tiny-cpu", "cascade-b-tiny-cpu", "cascade-c-tiny-cpu", "cascade-controlnet-tiny-cpu"),
)
SCRIPTS = (
    *("examples/train_autoencoder.py", "examples/train_txt2img_laion400m_no_trainer.py"),
    *("examples/train_txt2img_laion400m_trainer.py", "examples/generate_images.py", "examples/draw_client.py"),
    *("run_scripts/accept_gpu.py", "run_scripts/setup.sh", "run_scripts/test.sh"),
    *("run_scripts/laion_filter_metadata.py", "run_scripts/laion_to_csv.py"),
)
MODULES = ("ppldm.utils.machine.devices", "ppldm.utils.machine.setup_plan", "ppldm.demo.quickstart")
# What a command line of errors.txt may read.
INPUTS = {
    "words.txt": b"just words\n",
    "empty.txt": b"",
    "brace.json": b"{",
    "list.yaml": b"- a\n",
    "gone.filelist": b"gone.gz\n",
    "part-00000.gz": b"not gzip",
    "broken.filelist": b"part-00000.gz\n",
    "photo.png": b"\x89PNG\r\n\x1a\n",
    "weights.safetensors": b"short",
    "folder/notes.txt": b"a\n",
}


def say(words: list[str], script: str = "") -> tuple[int, str]:
    """(exit status, all that is printed) of `ppldm words`, or of a script or module by its path or name."""
    if script.endswith(".sh"):
        done = subprocess.run(["bash", ROOT / script, *words], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr
    printed, sys.argv, status = io.StringIO(), [script or "ppldm", *words], 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            if not script:
                from ppldm.cli.main import main

                main()
            elif script.endswith(".py"):
                runpy.run_path(str(ROOT / script), run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return status, printed.getvalue()


def help_texts() -> dict[str, str]:
    """Name -> help: of each command; of families and scripts of training what `ppldm train --help` has not."""
    from ppldm.cli.main import COMMANDS

    texts = {"ppldm": help_of([])}
    for name in (*COMMANDS, "lora", "dataset"):
        texts[f"ppldm {name}"] = help_of(name.split())
    base = texts["ppldm train"]
    texts["ppldm train --loop trainer"] = beyond(base, help_of(["train", "--loop", "trainer"]))
    for preset in PRESETS:
        texts[f"ppldm train --preset {preset}"] = beyond(base, help_of(["train", "--preset", preset]))
    for script in (*SCRIPTS, *MODULES):
        text = help_of([], script)
        texts[script.replace("/", " ")] = beyond(base, text) if "/train_" in script else text
    for action in ("device", "commands"):
        texts[f"{MODULES[1]} {action}"] = help_of([action], MODULES[1])
    return texts


def help_of(words: list[str], script: str = "") -> str:
    status, text = say([*words, "--help"], script)
    if status:
        raise ValueError(f"{script} {words} --help ends with {status}: {text}")
    usage, gap, rest = text.partition("\n\n")
    if "[-h]" in usage:  # argparse breaks its lines otherwise in other versions of Python
        usage = textwrap.fill(" ".join(usage.split()), 118, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(line.rstrip() for line in (usage + gap + rest).splitlines()) + "\n"


def beyond(base: str, text: str) -> str:
    """The lines that `text` has and `base` has not (+), and the other way round (-)."""
    lines = difflib.unified_diff(base.splitlines(), text.splitlines(), n=0, lineterm="")
    found = [line for line in lines if not line.startswith(("+++", "---", "@@"))]
    return "\n".join(["beside `ppldm train --help`:", *found]) + "\n"


def error_texts(listed: str) -> str:
    """The text of errors.txt with what each of its command lines says now; its comments stay."""
    blocks = []
    for block in re.split(r"\n{2,}", listed.strip()):
        comments = [line for line in block.splitlines() if line.startswith("#")]
        for line in (line for line in block.splitlines() if line.startswith("$ ")):
            program, *words = shlex.split(line[2:])
            status, said = say(words, "" if program == "ppldm" else program)
            comments += [line, f"{status}: {_plain(said)}"]
        blocks.append("\n".join(comments))
    return "\n\n".join(blocks) + "\n"


def _plain(said: str) -> str:
    """Without lines of the log, the folder's own path, and the quotes that only some versions of argparse set."""
    said = re.sub(r"^\d\d:\d\d:\d\d INFO .*\n", "", said.replace(f"{Path.cwd()}/", "HERE/"), flags=re.MULTILINE)
    return re.sub(r"\(choose from [^)]*\)", lambda found: found[0].replace("'", ""), said).strip()


def write(folder: Path) -> None:
    """Write all into `folder`."""
    for path in folder.glob("help/*"):
        path.unlink()
    (folder / "help").mkdir(parents=True, exist_ok=True)
    for name, text in help_texts().items():
        (folder / "help" / (name.replace(" --", " ").replace(" ", "-") + ".txt")).write_text(text, encoding="utf-8")
    listed = (GOLDEN / "errors.txt").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as home:
        place = Path(home, "work")
        for name, content in INPUTS.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
        os.chdir(place)
        text = error_texts(listed)
        here = {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        if left := {name for name in here.keys() | INPUTS.keys() if here.get(name) != INPUTS.get(name)}:
            raise ValueError(f"the command lines of errors.txt left or changed: {', '.join(sorted(left))}")
        os.chdir(ROOT)
    (folder / "errors.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "run_scripts")]
    warnings.simplefilter("ignore")  # runpy's, of modules that are imported already
    for variable in [name for name in os.environ if name.startswith("PPLDM_")]:
        del os.environ[variable]
    with tempfile.TemporaryDirectory() as own:
        os.environ |= {"COLUMNS": "120", "HOME": own, "PPLDM_CACHE_DIR": f"{own}/cache", "USE_TORCH": "0"}
        write(Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN)
