"""Kinds of devices: what each can do is asked here, and nowhere else by its name."""

import ast
import re
from pathlib import Path

import paddle
import pytest

from ppldm.utils.errors import ConfigError
from ppldm.utils.machine import devices

PACKAGE = Path(devices.__file__).resolve().parents[2]
# The one that knows, and those that install Paddle or report what is installed, before or without it.
MAY_NAME_DEVICES = {
    "utils/machine/devices.py",
    "utils/machine/builds.py",
    "utils/machine/setup_plan.py",
    "utils/machine/environment.py",
}
FLAGS = {"cudnn_search"}
_ASKS = re.compile(r"cuda|cudnn|cublas|rocm|xpu|gpu|get_device", re.IGNORECASE)
_NAMED = re.compile(r"(cpu|gpu|xpu|npu|cuda)(:\d*)?")


def names_devices(source: str) -> list[str]:
    """The places of a source that ask for a kind of device by its name: attributes, names and imports of libraries, and
    texts that are compared with or looked for. Help and messages are neither."""
    found = []
    for node in ast.walk(ast.parse(source)):
        words = []
        if isinstance(node, ast.Attribute):
            words = [node.attr]
        elif isinstance(node, ast.Name):
            words = [node.id]
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0):
            words = [alias.name for alias in node.names]
        found += [word for word in words if _ASKS.search(word) and word not in FLAGS]
        texts = []
        if isinstance(node, ast.Compare):
            texts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "set_device", "to"):
            texts = node.args
        found += [one.value for one in texts if isinstance(one, ast.Constant) and _NAMED.fullmatch(str(one.value))]
    return found


def test_no_other_module_asks_for_a_kind_of_device():
    names = {path: path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    found = {name: names_devices(path.read_text(encoding="utf-8")) for path, name in names.items()}
    assert {name: places for name, places in found.items() if places and name not in MAY_NAME_DEVICES} == {}
    assert found["utils/machine/devices.py"]


@pytest.mark.parametrize(
    "source",
    [
        "if paddle.get_device().startswith('gpu'): pass",
        "x = name == 'cpu'",
        "x = 'gpu:' != name",
        "paddle.device.cuda.empty_cache()",
        "paddle.is_compiled_with_cuda()",
        "paddle.set_device('gpu:1')",
        "from paddle.device import cuda",
    ],
)
def test_asking_is_found(source):
    assert names_devices(source)


def test_help_and_messages_are_not_asking():
    assert not names_devices('raise ConfigError("--x needs a GPU; omit it on a CPU")\nx = {"help": "GPUs: faster"}')


def test_the_cpu_can_do_none_of_it(monkeypatch):
    monkeypatch.setattr(paddle, "get_device", lambda: "cpu")
    kind = devices.current_kind()
    assert kind == devices.Kind("cpu") and not (kind.mixed_precision or kind.own_memory or kind.efficient_attention)
    assert devices.peak_device_memory_bytes() == 0
    devices.release_device_memory()
    devices.set_exactness(True, True)


def test_a_card_is_known_by_its_kind_and_an_unknown_kind_by_its_name(monkeypatch):
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:3")
    assert devices.current_kind() == devices.KINDS["gpu"] and devices.current_kind().mixed_precision
    monkeypatch.setattr(paddle, "get_device", lambda: "npu:0")
    assert devices.current_kind() == devices.Kind("npu")


def test_memory_is_asked_of_the_device_that_has_its_own(monkeypatch):
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:0")
    monkeypatch.setattr(paddle.device.cuda, "max_memory_allocated", lambda: 7)
    assert devices.peak_device_memory_bytes() == 7


def test_a_device_that_is_not_there_is_named():
    devices.use_device(None)
    with pytest.raises(ConfigError, match="--device quantum cannot be used here; this Paddle finds cpu"):
        devices.use_device("quantum")
