"""Kinds of devices: what each can do is asked here, and nowhere else by its name."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import paddle
import pytest
from trained_here import train_here

from ppldm.training import optimizer as precision
from ppldm.training import prepare
from ppldm.training.metrics import read_metrics
from ppldm.utils.errors import ConfigError
from ppldm.utils.log import get_logger
from ppldm.utils.machine import devices, nvidia_smi
from ppldm.utils.machine.setup_plan import choose_device

PACKAGE = Path(devices.__file__).resolve().parents[2]
ROOT = PACKAGE.parent
HELPERS = ROOT / "tests/helpers"
TABLE = Path(__file__).with_name("device_table.json")
# The one that knows, and those that install Paddle or report what is installed, before or without it.
MAY_NAME_DEVICES = {
    "utils/machine/devices.py",
    "utils/machine/nvidia_smi.py",
    "utils/machine/setup_plan.py",
    "utils/machine/environment.py",
}
FLAGS = {"cudnn_search"}
_ASKS = re.compile(r"cuda|cudnn|cublas|rocm|is_compiled_with|xpu|npu|mlu|gcu|dcu|gpu|get_device", re.IGNORECASE)
_WORDS = re.compile(r"input|output", re.IGNORECASE)  # which have three of these letters
_NAMED = re.compile(r"(cpu|gpu|xpu|npu|dcu|mlu|gcu|metax_gpu|cuda)(:\d*)?")
_MAKERS = re.compile(r"\b(nvidia|cuda|rocm|ascend|huawei|kunlun|hygon|cambricon|enflame|metax)\b", re.IGNORECASE)


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
        found += [word for word in words if _ASKS.search(_WORDS.sub("", word)) and word not in FLAGS]
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


def test_no_other_module_names_a_maker():
    found = {path.relative_to(PACKAGE).as_posix(): _MAKERS.findall(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {name: words for name, words in found.items() if words and name not in MAY_NAME_DEVICES} == {}


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


@pytest.fixture
def paddle_on(monkeypatch):
    """Let Paddle say that it computes on a device of a kind, with or without bfloat16."""

    def on(kind: devices.Kind, bfloat16: bool = True) -> devices.Device:
        facts = {
            "get_device": lambda: kind.paddle if kind.is_cpu else f"{kind.paddle}:0",
            "set_device": lambda name: None,
            "device.is_compiled_with_rocm": lambda: kind.name == "dcu",
            "device.get_device_name": lambda name: f"Card of {kind.words.split()[1]}",
            "device.get_device_properties": lambda name: SimpleNamespace(total_memory=32 << 30),
            "device.xpu.memory_total": lambda: 32 << 30,
            "device.max_memory_allocated": lambda: 7,
            "amp.is_bfloat16_supported": lambda: bfloat16,
            "amp.is_float16_supported": lambda: not kind.is_cpu,
        }
        for name, said in facts.items():
            monkeypatch.setattr(f"paddle.{name}", said, raising=False)
        return devices.current_device()

    return on


def said(function, *arguments) -> str:
    """What a function returns, or the error that it raises."""
    try:
        return function(*arguments)
    except ConfigError as error:
        return f"error: {error}"


def describe(device: devices.Device, caplog, monkeypatch) -> dict:
    """How a run on a device is started, what it computes in and what it says, JSON-ready."""
    kind, limited, switched = device.kind, {}, []
    monkeypatch.setattr(devices, "set_exactness", lambda *switches: switched.append(switches))
    two = dict.fromkeys(kind.visible[:1], "0,1")
    row = {"words": kind.words, "start": said(devices.launch_arguments, kind, "0,1", {}),
           "start on 0 and 2 of two": said(devices.launch_arguments, kind, "0,2", two)}  # fmt: skip
    for variable in kind.visible:
        limited[variable] = said(devices.launch_arguments, kind, "5", {variable: "4,5"})
    for flags in ({}, {"bf16": True}, {"fp16": True}):
        asked = {"bf16": False, "fp16": False, "fp16_opt_level": "O1", **flags}
        arguments = SimpleNamespace(**asked)
        caplog.clear()
        precision.warn_of_cpu(arguments)
        refused = said(devices.check_precision, arguments.bf16, arguments.fp16, device)
        row[" ".join(["computes in", *(f"--{name}" for name in flags)])] = [
            refused or precision.precision_name(arguments), *dict.fromkeys(caplog.messages)
        ]  # fmt: skip
    caplog.clear()
    prepare.apply_switches(SimpleNamespace(tf32=True, cudnn_search=False))
    return row | {
        **{f"start on 5 of {variable}=4,5": start for variable, start in limited.items()},
        **{
            "--tf32": [*dict.fromkeys(caplog.messages)],
            "settings": dict(kind.settings),
            "ranks talk": devices.collective_variables(kind),
        },
        **{"memory": devices.peak_device_memory_bytes(), "efficient attention": kind.efficient_attention},
        **{
            f"set up on Python {python}": said(lambda python=python: choose_device(kind.name, None, [], python)[0])
            for python in ("3.10", "3.12")
        },
    }


@pytest.fixture
def table(paddle_on, caplog, monkeypatch):
    monkeypatch.setattr(get_logger(), "propagate", True)
    return {
        f"{name}, {'bfloat16' if bfloat16 else 'no bfloat16'}": describe(paddle_on(kind, bfloat16), caplog, monkeypatch)
        for name, kind in devices.KINDS.items()
        for bfloat16 in (True, False)
    }


def test_plan_flags_precision_and_messages_on_every_kind_of_device(table):
    if os.environ.get("PPLDM_WRITE_TABLE"):
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
    assert json.loads(TABLE.read_text()) == json.loads(json.dumps(table))
    assert len({row["words"] for row in table.values()}) >= 8
    for name, row in table.items():  # what the table must say, whatever it says
        cpu = name.startswith("cpu")
        assert (row["computes in --bf16"][0] == "bfloat16 O1") == (not cpu and "no bfloat16" not in name)
        assert row["computes in --bf16"][0].startswith("error: ") == (not cpu and "no bfloat16" in name)
        assert (row["start on 0 and 2 of two"] == row["start"]) == cpu == (not row["memory"])


def train_as_a_user(tiny, folder: Path, *words, launcher=(), **environ) -> tuple[list[float], str]:
    """The losses of two updates by `ppldm train`, and what it said."""
    command = [sys.executable, *(launcher or ("-m", "ppldm", "train")), *tiny.flags(folder, max_steps=2), *words]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)
    losses = folder / "metrics.jsonl"
    return [record["loss"] for record in read_metrics(losses)] if losses.exists() else [], done.stdout + done.stderr


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    """The losses of the same two updates on the CPU, in this process, by Paddle's own operators, as devices have."""
    folder = tmp_path_factory.mktemp("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPLDM_NO_CPU_TUNING", "1")
        train_here(tiny.flags(folder, max_steps=2))
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """A folder with a plug-in of Paddle's for devices in the machine's own memory."""
    folder, include = tmp_path_factory.mktemp("plugin"), Path(paddle.sysconfig.get_include())
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", f"-I{include}", HELPERS / "fake_device.cc",
                    "-o", folder / "libfake.so"], check=True)  # fmt: skip
    return folder


@pytest.fixture
def plugged_in(tmp_path, plugin):
    """The variables with which a real Paddle finds two devices of the plug-in."""

    def variables(kind: devices.Kind) -> dict[str, str]:
        info = tmp_path / "packages" / f"{kind.package.replace('-', '_')}-{kind.version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {kind.package}\nVersion: {kind.version}\n")
        paths = [str(PACKAGE.parent), str(info.parent), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUSTOM_DEVICE_ROOT": str(plugin),
                "FAKE_DEVICE": kind.name}  # fmt: skip

    return variables


@pytest.mark.needs("g++")
def test_devices_of_a_plug_in_are_counted(plugged_in):
    program = "from ppldm.utils.machine import devices as d; print(d.count_devices(d.KINDS['mlu']))"
    mlu = {**os.environ, **plugged_in(devices.KINDS["mlu"])}
    done = subprocess.run([sys.executable, "-c", program], env=mlu, capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr


@pytest.mark.turn("a plug-in's device is trained on", 1)
@pytest.mark.slow
@pytest.mark.needs("g++")
def test_a_device_of_a_plug_in_is_chosen_prepared_and_trained_on(tiny, tmp_path, plain, plugged_in):
    """Its operations run on the CPU: so losses are the CPU's, to the bit. Without what the kind needs, Paddle fails."""
    mlu = plugged_in(kind := devices.KINDS["mlu"])
    launcher = (
        "-m",
        "ppldm.training.distributed.launch",
        "--log_dir",
        tmp_path / "log",
        *devices.launch_arguments(kind, "1", {}),
        ROOT / "examples/train_txt2img_laion400m_no_trainer.py",
    )
    losses, said = train_as_a_user(tiny, tmp_path / "mlu", launcher=launcher, **mlu)
    assert len(plain) == 2 and losses == plain and " on mlu:1" in said, said
    _, said = train_as_a_user(tiny, tmp_path / "half", "--bf16", FAKE_BFLOAT16="0", **mlu)
    assert "error: --bf16: a Cambricon MLU (mlu:0) has no bfloat16, says Paddle; use --fp16, or omit --bf16" in said
    # On the CPU of such a machine, with all that another kind needs set: no bit differs.
    losses, said = train_as_a_user(tiny, tmp_path / "chosen", "--device", "cpu", PPLDM_NO_CPU_TUNING="1", **mlu)
    assert losses == plain and " on cpu" in said, said


OFFLOADED = """
import numpy as np, paddle
from ppldm.methods.averages.ema_interval import IntervalDecay
from ppldm.networks.ema import ExponentialMovingAverage
paddle.set_device("mlu")
def made(dtype):
    weight = paddle.create_parameter([4, 3], dtype, default_initializer=paddle.nn.initializer.Constant(1.0))
    return weight, ExponentialMovingAverage({"w": weight}, IntervalDecay(2, 1, 0.5), offloaded=OFFLOADED)
for dtype in ("float32", "float16"):
    weight, average = made(dtype)
    for value in (2.0, 3.0, 5.0):  # two copies, one mean
        weight.set_value(paddle.full([4, 3], value, dtype))
        average.update({})
        print(average.shadow["w"].place, *np.unique(average.shadow["w"].numpy()))
    state = {"w": average.shadow["w"].numpy(), "num_updates": 3}
    average.load_state_dict(state)
    with average.applied():
        print(average.shadow["w"].place, weight.place, *np.unique(weight.numpy()))
    print(weight.place, *np.unique(weight.numpy()))
"""


@pytest.mark.needs("g++")
@pytest.mark.parametrize("offloaded, place", [(True, "Place(cpu)"), (False, "Place(mlu:0)")])
def test_averages_lie_in_host_memory_if_asked_for(plugged_in, offloaded, place):
    environment = {**os.environ, **plugged_in(devices.KINDS["mlu"])}
    program = OFFLOADED.replace("OFFLOADED", str(offloaded))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    one = [f"{place} 2.0", f"{place} 3.0", f"{place} 4.0", f"{place} Place(mlu:0) 4.0", "Place(mlu:0) 5.0"]
    assert done.stdout.splitlines() == 2 * one, done.stderr


# Not npu: ppdiffusers takes operations of its own from that plug-in.
OTHERS = [kind for kind in devices.KINDS.values() if kind.plugin and kind.name not in ("mlu", "npu")]


@pytest.mark.turn("a plug-in's device is trained on", 1)
@pytest.mark.slow
@pytest.mark.needs("g++")
@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.name)
def test_other_kinds_that_are_plug_ins_train_by_their_plans(tiny, tmp_path, plain, plugged_in, kind):
    """As before; builds of Paddle for the other kinds (gpu, dcu, xpu) do not start without their drivers."""
    strides = {"FLAGS_use_stride_kernel": "0"}  # the device for tests has no kernels for them, whatever its kind has
    losses, said = train_as_a_user(tiny, tmp_path / "run", **plugged_in(kind), **strides)
    assert len(plain) == 2 and losses == plain and f" on {kind.name}:0" in said, said


def test_a_kind_that_a_plug_in_brings_is_taken_by_what_paddle_says_of_it(paddle_on):
    other = devices.Kind("fpga", "a device fpga", visible=("FPGA_VISIBLE_DEVICES",))
    assert paddle_on(other) == devices.Device(other, "fpga:0", "a device fpga", 0, True, True)


@pytest.mark.parametrize("words", ["0,0", "a", "0,", "-1", "0 1", "0;1"])
def test_devices_must_be_different_numbers(words):
    for kind in devices.KINDS.values():
        with pytest.raises(ConfigError, match="--devices .* different whole numbers"):
            devices.launch_arguments(kind, words, {})


def test_without_a_word_the_launcher_takes_what_it_sees():
    for kind in devices.KINDS.values():
        assert devices.launch_arguments(kind, "", {}) == []


def test_positions_are_counted_where_paddles_launcher_counts_them(monkeypatch):
    """Its own source is asked: of what our arguments name, it must find the device."""
    from paddle.distributed.launch.context.device import Device as Launchers

    for kind in (kind for kind in devices.KINDS.values() if not kind.is_cpu):
        for variable in kind.visible:
            labels = ["4", "7", "5"]
            own = variable in kind.launcher_reads
            launcher = Launchers(labels=labels if own else ["0", "1", "2"])
            for number, label in enumerate(labels):
                flag, told = devices.launch_arguments(kind, label, {variable: ",".join(labels)})
                assert flag == "--devices" and launcher.get_selected_devices(told) == [str(number)]


def test_the_installed_paddle_says_the_kind():
    assert devices.installed_kind([]) is devices.CPU is devices.installed_kind(["paddlepaddle"])
    for kind in devices.KINDS.values():
        assert devices.installed_kind(["paddlepaddle", kind.package]) == kind
    assert devices.installed_kind() in devices.KINDS.values()


def test_a_driver_shows_its_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(nvidia_smi, "list_gpus", list)
    assert devices.seen_kinds(tmp_path) == []
    for kind in devices.KINDS.values():
        for number, sign in enumerate(kind.signs):
            root = tmp_path / f"{kind.name}-{number}"
            path = root / sign[1:].replace("[0-9]*", "0")
            path.parent.mkdir(parents=True)
            path.touch()
            (root / "dev").mkdir(exist_ok=True)
            (root / "dev/null").touch()
            assert devices.seen_kinds(root) == [kind]
    monkeypatch.setattr(nvidia_smi, "list_gpus", lambda: ["one"])
    assert devices.seen_kinds(tmp_path) == [devices.GPU]


def test_scripts_start_processes_on_the_cpu_where_nothing_else_is(monkeypatch, capsys):
    kinds = {"installed_kind": devices.CPU, "seen_kinds": []}
    for words, expected in {
        "": "--nproc_per_node 2", "--processes 3": "--nproc_per_node 3", "--devices 0,1,2": "--nproc_per_node 3",
    }.items():  # fmt: skip
        assert start_words(monkeypatch, capsys, kinds, words) == expected
    kinds = {"installed_kind": devices.KINDS["npu"], "seen_kinds": [devices.KINDS["npu"]]}
    for words, expected in {"": "", "--processes 3": "--nproc_per_node 3", "--devices 0,1": "--devices 0,1"}.items():
        assert start_words(monkeypatch, capsys, kinds, words) == expected
    kinds["seen_kinds"] = [devices.GPU]  # cards that the installed Paddle is not made for
    assert start_words(monkeypatch, capsys, kinds, "") == "--nproc_per_node 2"


def start_words(monkeypatch, capsys, kinds: dict, words: str) -> str:
    for name, found in kinds.items():
        monkeypatch.setattr(devices, name, lambda found=found: found)
    monkeypatch.setattr(sys, "argv", ["devices", *words.split()])
    devices.main()
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quantum", "this Paddle finds cpu: choose one of these, or omit"),
        ("npi:1", "did you mean npu"),
        ("npu", "setup.sh --device npu"),
        ("gpu:1", "an NVIDIA GPU"),
        ("dcu", "setup.sh --device dcu"),
    ],
)
def test_a_device_that_is_not_there_is_named_with_what_to_do(name, words):
    devices.use_device(None)
    devices.use_device("auto")
    with pytest.raises(ConfigError, match=f"--device {name} cannot be used here; .*{words}"):
        devices.use_device(name)


def test_what_is_not_a_device_is_refused():
    for name in ("gpu:x", "GPU 1", "gpu:", ""):
        with pytest.raises(ConfigError, match="is not a device; choose auto"):
            devices.parse_device(name)
