"""PaddleNLP's own order of imports holds whatever is asked for first, and models ask for little of it."""

import json
from importlib.metadata import version

import pytest
from forking import forking

from ppldm.utils.machine.cpu import VERSION

pytestmark = pytest.mark.cold

# Each statement runs in a process of its own that has imported paddle.
IMPORTS = """
import json
from ppldm.utils.machine.cpu import load_paddle
load_paddle()
def go(line):
    statement, answer = json.loads(line)
    os.dup2(2, 1)  # what packages print while they load
    try:
        exec(statement)
        error = ""
    except BaseException as raised:
        error = repr(raised)
    loaded = [name for name in ("sklearn", "datasets", "fastapi", "seqeval") if name in sys.modules]
    with open(answer, "w") as file:
        json.dump([error, loaded], file)
"""
LIGHT = [
    "import ppldm.training.prepare, ppldm.training.train",
    "import ppldm.inference.pipeline",
    "import ppdiffusers, paddlenlp; assert paddlenlp.transformers.BertModel",
    # What numpy 2 has of that name is its own.
    "import numpy, ppdiffusers; assert numpy.bool is (numpy.bool_ if numpy.__version__ >= '2' else bool)",
]
WHOLE = [
    "import ppldm.training.trainer; from paddlenlp import trainer; assert trainer.Trainer is trainer.trainer.Trainer",
    "import paddlenlp.peft.lora; from paddlenlp.peft import LoRAModel as a; assert paddlenlp.peft.lora.LoRAModel is a",
    "from paddlenlp import Taskflow, SimpleServer",
    "import paddlenlp; assert paddlenlp.metrics.Perplexity and not hasattr(paddlenlp, 'nothing')",
]


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """(the error of a statement, which of what is heavy it has loaded)."""
    folder = tmp_path_factory.mktemp("asked")
    with forking(IMPORTS, folder / "log") as start:

        def ask(statement: str) -> tuple[str, list[str]]:
            assert start(json.dumps([statement, str(folder / "answer")]))[1]() == 0
            return tuple(json.loads((folder / "answer").read_text()))

        yield ask


@pytest.mark.slow
@pytest.mark.parametrize("statement", LIGHT)
def test_models_load_no_servers_metrics_and_data_sets(ask, statement):
    assert ask(statement) == ("", [])


@pytest.mark.slow
@pytest.mark.parametrize("statement", WHOLE)
def test_whatever_is_asked_for_first_all_of_it_is_there(ask, statement):
    error, loaded = ask(statement)
    assert not error and "seqeval" in loaded


def test_it_is_the_version_whose_folders_are_known():
    assert version("paddlenlp") == VERSION, "look at paddlenlp/__init__.py, then at light_paddlenlp.py"
