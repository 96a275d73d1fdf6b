"""Dockerfiles: a parser reads them; what they run is known to setup.sh. That the steps work is tried where they run."""

import re
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from ppldm.utils.machine.setup_plan import choose_device

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(params=sorted((ROOT / "docker").glob("*.Dockerfile")), ids=lambda path: path.stem)
def image(request):
    return request.param, DockerfileParser(fileobj=request.param.open("rb")).structure


def test_the_steps_are_known_and_in_an_order_that_works(image):
    path, steps = image
    names = [step["instruction"] for step in steps if step["instruction"] != "COMMENT"]
    assert names[0] == "FROM" and names[-2:] == ["ENTRYPOINT", "CMD"]
    assert set(names) <= {"FROM", "ARG", "RUN", "ENV", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    setup = next(
        number for number, step in enumerate(steps) if "setup.sh" in step["value"] and step["instruction"] == "RUN"
    )
    assert any(step["instruction"] == "COPY" for step in steps[:setup])
    assert f"docker build -f docker/{path.name}" in path.read_text()  # how to


def test_the_set_up_of_an_image_is_one_that_setup_knows(image):
    path, steps = image
    (words,) = (step["value"] for step in steps if step["instruction"] == "RUN" and "setup.sh" in step["value"])
    assert re.fullmatch(r"bash run_scripts/setup\.sh --device (cpu|gpu --cuda \"\$CUDA\")", words)
    defaults = dict(step["value"].split("=") for step in steps if step["instruction"] == "ARG")
    device = path.stem.partition(".")[0]
    assert choose_device(device, defaults.get("CUDA"), [], "3.11")[0] == {"cpu": "cpu", "gpu": "cu126"}[device]


def test_what_is_copied_has_no_environment_of_this_machine():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", "**/__pycache__"} <= set(ignored)
