"""Tab: a shell's own question is answered with what the table of commands and their helps say."""

import shutil
import subprocess
import sys

import pytest

from ppldm.cli.completion import SCRIPTS, candidates
from ppldm.cli.main import COMMANDS, run
from ppldm.utils.errors import ConfigError


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
    script = capsys.readouterr().out
    assert "ppldm completion next" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


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
