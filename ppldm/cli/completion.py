"""`ppldm completion`: Tab completes commands, flags and choices, in bash, zsh and fish.

A shell asks `ppldm completion next WORD…`, the last of which is being typed, so that it shows what is installed.
Candidates are those of the commands' table and of each command's own help; where there are none, the shell shows files.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

from ..utils.errors import ConfigError

_SHELLS = ("bash", "zsh", "fish")
SCRIPTS = {shell: Path(__file__).with_name(f"completion.{shell}").read_text(encoding="utf-8") for shell in _SHELLS}
_FLAG = re.compile(r"^ +(--[\w-]+)(?: \{([^}]+)\})?", re.MULTILINE)  # of a help text, with its choices


def completion(argv: list[str]) -> None:
    """Print what makes Tab complete commands and flags: `eval "$(ppldm completion bash)"`, or zsh or fish."""
    if argv[:1] == ["next"]:
        sys.stdout.write("".join(f"{word}\n" for word in candidates(argv[1:])))
    elif len(argv) == 1 and argv[0] in SCRIPTS:
        sys.stdout.write(SCRIPTS[argv[0]])
    elif argv in (["-h"], ["--help"]):
        sys.stdout.write(
            "usage: ppldm completion {bash,zsh,fish}\n\n"
            'bash and zsh: eval "$(ppldm completion bash)" in ~/.bashrc, or zsh in ~/.zshrc after compinit\n'
            "fish: ppldm completion fish > ~/.config/fish/completions/ppldm.fish\n"
        )
        sys.exit(0)
    else:
        raise ConfigError(f"ppldm completion {' '.join(argv)}: name one shell: bash, zsh or fish")


completion.takes_words = True


def candidates(words: list[str]) -> list[str]:
    """What the last of the words after `ppldm` can become; [] where that is a file or anything else."""
    from .main import COMMANDS, run

    *before, last = words or [""]
    name = next((" ".join(before[:n]) for n in (2, 1) if " ".join(before[:n]) in COMMANDS), None)
    if name is None:
        depth = len(before)
        known = [full.split() for full in COMMANDS]
        found = {full[depth] for full in known if full[:depth] == before and len(full) > depth}
        found |= set() if before else {"--help", "--version"}
    else:
        text = io.StringIO()  # its help, which has its flags with their choices
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):
            run([*name.split(), "--help"])
        flags = {flag: choices.split(",") if choices else [] for flag, choices in _FLAG.findall(text.getvalue())}
        found = flags.get(before[-1]) or (flags if last.startswith("-") else ())
    return sorted(word for word in found if word.startswith(last))
