"""PaddleNLP's own order of imports holds whatever is asked for first, and models ask for little of it."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

from ppldm.utils.machine.light_paddlenlp import VERSION

# Each runs in a process of its own that has imported paddle.
ASKED = """
import json, os, sys
from ppldm.utils.machine.cpu import load_paddle
load_paddle()
for statement in json.loads(sys.argv[1]):
    if not os.fork():
        try:
            exec(statement)
            loaded = [name for name in ("sklearn", "datasets", "fastapi", "seqeval") if name in sys.modules]
            os.write(1, (json.dumps([statement, "", loaded]) + "\\n").encode())
        except BaseException as error:
            os.write(1, (json.dumps([statement, repr(error), []]) + "\\n").encode())
        os._exit(0)
    os.wait()
"""
LIGHT = [
    "import ppldm.training.prepare, ppldm.training.loop",
    "import ppldm.inference.pipeline",
    "import ppdiffusers, paddlenlp; assert paddlenlp.transformers.BertModel",
]
WHOLE = [
    "import ppldm.training.trainer; from paddlenlp import trainer; assert trainer.Trainer is trainer.trainer.Trainer",
    "import paddlenlp.peft.lora; from paddlenlp.peft import LoRAModel as a; assert paddlenlp.peft.lora.LoRAModel is a",
    "from paddlenlp import Taskflow, SimpleServer",
    "import paddlenlp; assert paddlenlp.metrics.Perplexity and not hasattr(paddlenlp, 'nothing')",
]


@pytest.fixture(scope="module")
def answers():
    done = subprocess.run(
        [sys.executable, "-c", ASKED, json.dumps(LIGHT + WHOLE)], stdout=subprocess.PIPE, text=True, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    return {statement: (error, loaded) for statement, error, loaded in lines}


@pytest.mark.slow
@pytest.mark.parametrize("statement", LIGHT)
def test_models_load_no_servers_metrics_and_data_sets(answers, statement):
    assert answers[statement] == ("", [])


@pytest.mark.slow
@pytest.mark.parametrize("statement", WHOLE)
def test_whatever_is_asked_for_first_all_of_it_is_there(answers, statement):
    error, loaded = answers[statement]
    assert not error and "seqeval" in loaded


def test_it_is_the_version_whose_folders_are_known():
    assert version("paddlenlp") == VERSION, "look at paddlenlp/__init__.py, then at light_paddlenlp.py"
