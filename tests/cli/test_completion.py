"""Tab: a shell's own question is answered with what the table of commands and their helps say."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppldm.cli.completion import SCRIPTS, candidates
from ppldm.cli.main import COMMANDS, run
from ppldm.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
_COLOURS = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


@pytest.mark.parametrize(
    "words, found",
    [
        (["qui"], ["quickstart"]),
        (["--v"], ["--version"]),
        (["lora", ""], ["convert", "extract", "merge", "show"]),
        (["lora", "me"], ["merge"]),
        (["lora", "merge", "--off"], ["--offline"]),
        (["train", "--bf1"], ["--bf16"]),
        (["train", "--latents", "on"], ["ondemand"]),
        (["config", "import", "x.yaml", "--num-d"], ["--num-devices"]),
        (["head", ""], []),  # files
        (["generate", "--model", ""], []),
        (["nope", ""], []),
    ],
)
def test_candidates(words, found):
    assert candidates(words) == found


def test_every_first_word_is_offered():
    assert set(candidates([""])) == {name.split()[0] for name in COMMANDS} | {"--help", "--version"}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_of_its_shell(shell, capsys):
    run(["completion", shell])
    assert "ppldm completion next" in capsys.readouterr().out


def test_another_shell_is_refused():
    with pytest.raises(ConfigError, match="name one shell: bash, zsh or fish"):
        run(["completion", "tcsh"])


@pytest.mark.parametrize("words, found", [("lora m", ["merge"]), ("dataset ''", ["get", "list", "show"])])
def test_bash_completes(words, found):
    program = f"""ppldm() {{ {sys.executable} -c 'from ppldm.cli.main import main; main()' "$@"; }}
        {SCRIPTS["bash"]}
        COMP_WORDS=(ppldm {words}); COMP_CWORD=$(({len(words.split())})); _ppldm; printf '%s\\n' "${{COMPREPLY[@]}}" """
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == found


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """`ppldm` on PATH, and a folder with a file in it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ppldm").write_text(f'#!/bin/sh\nexec {sys.executable} -m ppldm "$@"\n')
    (tmp_path / "bin/ppldm").chmod(0o755)
    (tmp_path / "own.yaml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.needs("fish")
@pytest.mark.parametrize("typed, found", [("lora m", "merge"), ("dataset ", "get list show"), ("head o", "own.yaml")])
def test_fish_completes(installed, typed, found):
    program = f"ppldm completion fish | source; complete -C 'ppldm {typed}'"
    done = subprocess.run(["fish", "--no-config", "-c", program], capture_output=True, text=True, check=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == found.split()


@pytest.mark.needs("zsh")
@pytest.mark.parametrize("typed, found", [("lora m", "lora merge "), ("head o", "head own.yaml ")])
def test_zsh_completes(installed, typed, found):
    """In a terminal: only there does zsh complete."""
    process, terminal = pty.fork()
    if not process:
        os.execvp("zsh", ["zsh", "-f", "-i"])
    try:
        setup = "autoload -U compinit; compinit -u; eval \"$(ppldm completion zsh)\"; echo rea''dy\n"
        _type(terminal, setup, "ready")
        _type(terminal, f"ppldm {typed}\t", found)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def _type(terminal: int, text: str, answer: str) -> None:
    """Until the terminal shows `answer`, which what is typed does not hold."""
    os.write(terminal, text.encode())
    shown, end = "", time.monotonic() + 60
    while answer not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0, end - time.monotonic()))
        assert ready, f"there is no {answer} in {shown}"
        shown = _COLOURS.sub("", shown + os.read(terminal, 65536).decode(errors="replace"))
