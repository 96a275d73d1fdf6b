import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppldm.training.commands.train import check_early
from ppldm.utils.errors import ConfigError, FilelistError, ModelError

pytestmark = pytest.mark.cold

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--file_list", "/nope"], "--file_list /nope is not there"),
        (["--file_list", str(Path(__file__).parent)], "holds neither parts nor pictures"),
        (["--validation_file_list=/nope"], "--validation_file_list /nope"),
        (["--unet_config_file", "/nope"], "--unet_config_file /nope"),
        (["--tokenizer_name", "/nope"], "no tokenizer /nope"),
        (["--model_name_or_path", "/nope"], "no folder or file /nope"),
        (["--pretrained_model_name_or_path", "/nope"], "no folder or file /nope"),
        (["--vae_name_or_path", "nowhere"], "no folder or file nowhere"),
    ],
)
def test_what_is_not_there_is_refused(argv, message, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])  # where the default of --file_list is
    with pytest.raises((ConfigError, FilelistError, ModelError)) as caught:
        check_early(argv)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--model_name_or_path", "CompVis/ldm_12_laion400M_pretrain"],
        ["--vae_name_or_path", "CompVis/stable-diffusion-v1-4/vae", "--tokenizer_name", "bert-base-chinese"],
    ],
)
def test_what_can_be_is_let_through(argv, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)  # the default filelist is there
    check_early(argv)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--unknown", "3"], "unknown flag --unknown"),
        (["--file_list"], "argument --file_list/--train_data_dir: expected one argument"),
        (["--resolution", "0"], "--resolution 0 must be above 0"),
        (["--fp16", "--bf16"], "--fp16 and --bf16 do not go together"),
    ],
)
def test_wrong_flags_are_refused(argv, message):
    with pytest.raises(ConfigError, match=message):
        check_early(argv)


@pytest.mark.parametrize("argv, refused", [([], True), (["--do_train"], False), (["--do_train", "true"], False)])
def test_the_trainer_script_wants_do_train(argv, refused, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    argv = ["--output_dir", "x", *argv]
    if refused:
        with pytest.raises(ConfigError, match="add --do_train"):
            check_early(argv, loop=False)
    else:
        check_early(argv, loop=False)


@pytest.mark.parametrize("script", ["train_txt2img_laion400m_trainer", "train_txt2img_laion400m_no_trainer"])
@pytest.mark.parametrize(
    "argv, said",
    [
        (["--file_list", "/nope"], "error: --file_list /nope is not there; give the path of a file\n"),
        (["--help"], ""),
        (["--lerning_rate", "1"], "error: unknown flag --lerning_rate; did you mean --learning_rate?\n"),
    ],
)
def test_the_scripts_refuse_and_explain_before_they_import_anything_heavy(script, argv, said):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['{script}', '--do_train', '--output_dir', 'x', *{argv}]\n"
        "try:\n"
        f"    runpy.run_path({str(EXAMPLES / (script + '.py'))!r}, run_name='__main__')\n"
        "except SystemExit as error:\n"
        "    print(error.code, *sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, *loaded = done.stdout.splitlines()[-1].split()
    assert status == ("2" if said else "0") and not {"paddle", "paddlenlp", "ppdiffusers"} & set(loaded)
    assert done.stderr == said


def test_flags_of_paddlenlp_load_paddle_on_a_prepared_cpu():
    """Its threads and MKL's path must be chosen before Paddle is loaded, or they have no effect."""
    code = (
        "import os, sys\n"
        "from ppldm.training.commands.train import refuse_other_flags\n"
        "seen = []\n"
        "class Watch:\n"
        "    def find_spec(name, *others):\n"
        "        seen.extend([os.environ.get('OMP_NUM_THREADS')] * (name == 'paddle'))\n"
        "sys.meta_path.insert(0, Watch)\n"
        "print(refuse_other_flags(['--dataloader_drop_last', 'false', 'word'], True), seen)\n"
    )
    environ = {
        name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PPLDM_NO_CPU_TUNING")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, cwd=EXAMPLES.parent
    )
    assert done.returncode == 0, done.stderr
    words, seen = done.stdout.strip().splitlines()[-1].split("] ")
    assert words == "['word'" and seen not in ("[]", "[None]")
