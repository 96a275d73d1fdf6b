"""`ppldm <command>`: help that teaches, one line for mistakes, nothing heavy before a command runs."""

import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise

import pytest

from ppldm.cli import main
from ppldm.cli.main import COMMANDS, load_command, run, usage
from ppldm.utils.errors import ConfigError, exit_on_error

pytestmark = pytest.mark.cold


def test_every_command_is_there_with_its_help(capsys):
    text = usage()
    for name in COMMANDS:
        assert f"  {name} " in text and load_command(name).__doc__.strip().splitlines()[0] in text
        with pytest.raises(SystemExit) as stopped:
            run([*name.split(), "--help"])
        assert stopped.value.code == 0
        help_text = capsys.readouterr().out
        assert f"usage: ppldm {name}" in help_text
        # A parameter without a comment would have a flag without help.
        lines = [*help_text.splitlines(), ""]
        mute = [line for line, below in pairwise(lines)
                if line.startswith("  --") and "  " not in line.strip() and not below.startswith(" " * 8)]  # fmt: skip
        assert mute == [], name


@pytest.mark.parametrize(
    "argv, message",
    [
        (["gen"], "did you mean generate?"),
        (["convrt"], "did you mean convert?"),
        (["xyz"], "known: "),
        (["lora", "marge"], "did you mean lora"),
        (["env", "--jsn"], "unknown flag --jsn; did you mean --json?"),
        (["env", "--hepl"], "unknown flag --hepl; did you mean --help?"),
        (["watch", "--runs", "x"], "unknown flag --runs; give only its value, without a flag"),
        (["watch", "x", "--xtr"], "unknown flag --xtr; `--help` lists the known ones"),
        (["demo-data"], "required: --out"),
        (["demo-data", "--out", "x", "--size", "big"], "not an integer: 'big'"),
    ],
)
def test_mistakes_are_one_line(argv, message):
    with pytest.raises(ConfigError) as caught:
        run(argv)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("printed_by", [nullcontext, exit_on_error], ids=["main", "the command itself"])
def test_errors_have_flags_as_the_commands_help_shows_them_and_python_as_parameters(monkeypatch, capsys, printed_by):
    said = "--num_workers -1 is odd; see --max_steps, num_workers and --num_workers_too"

    def probe(num_workers: int = 0):
        """Fail."""
        with printed_by():
            raise ConfigError(said)

    monkeypatch.setattr(main, "load_command", lambda name: probe)
    monkeypatch.setitem(COMMANDS, "probe", ("", ""))
    monkeypatch.setattr(sys, "argv", ["ppldm", "probe"])
    with pytest.raises(SystemExit):
        main.main()
    assert capsys.readouterr().err == f"error: {said.replace('--num_workers -1', '--num-workers -1')}\n"
    with pytest.raises((ConfigError, SystemExit)) as caught:
        probe()
    assert said in capsys.readouterr().err + str(caught.value)


@pytest.mark.parametrize("words", [["lora"], ["lora", "--help"]])
def test_commands_of_two_words_are_listed_by_the_first(words, capsys):
    run(words)
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:]] == [
        name.split() for name in COMMANDS if name.startswith("lora ")
    ]


def test_nothing_heavy_is_imported_for_help():
    code = "import sys; from ppldm.cli.main import run; run(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert not {"paddle", "paddlenlp", "ppdiffusers", "matplotlib", "pyarrow"} & set(loaded)


def test_hyphens_and_underscores_are_the_same(capsys):
    with pytest.raises(ConfigError, match="--num-samples 0"):
        run(["generate", "--model", "m", "--prompt", "x", "--num_samples=0"])


@pytest.mark.parametrize("flag", ["--num-workers", "--num_workers", "--workers"])
def test_the_number_of_workers_has_a_short_name(tmp_path, flag):
    (tmp_path / "part").write_text("a\t\tYQ==\n")
    (tmp_path / "x.filelist").write_text("part\n")
    with pytest.raises(ConfigError, match="--num-workers is -1"):
        run(["index", str(tmp_path / "x.filelist"), f"{flag}=-1"])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_values_as_one_types_them(name, capsys):
    with pytest.raises(SystemExit):
        run([*name.split(), "--help"])
    text = capsys.readouterr().out
    wrong = ["(str)", "(int)", "(float)", "(default: [", "(default: (", "(default: '", "(default: False", "str)"]
    assert [word for word in wrong if word in text] == []


def test_help_shows_lists_words_and_numbers(capsys):
    with pytest.raises(SystemExit):
        run(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "--guidance-scale S [S ...]",
        "by default the model's",
        "--num-samples N",
        "default: drawn, or drawn-2",
        "--exact ",
    ):
        assert words in text
    assert "prompts on the command line --like" in text  # nothing for an empty default


ON = [[], ["--refuse-private"], ["--refuse_private=True"], ["--ignore-disk-space=False"]]
OFF = [["--no-refuse-private"], ["--no_refuse_private"], ["--refuse-private=false"], ["--no-refuse-private=true"]]


@pytest.mark.parametrize("words", ON + OFF)
def test_what_is_on_by_default_has_a_flag_for_either(words, monkeypatch):
    given = []
    monkeypatch.setattr("ppldm.prepare.download.download._find_columns", lambda *args: ([], ()))
    monkeypatch.setattr(
        "ppldm.prepare.download.fetch.FetchSettings.__post_init__", lambda self: given.append(self.refuse_private)
    )
    run(["download", "metadata", "--out", "out", "--dry-run", *words])
    assert given == [words in ON]
