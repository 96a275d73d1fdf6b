"""What a picture says of itself is a stranger's word: it is drawn again or refused in one line, and no address in it
is asked."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from ppldm.cli.main import parse_flags, run
from ppldm.diffusion.drawing import Drawing
from ppldm.inference.pictures.ask import plan_of
from ppldm.inference.pictures.draw import check_folder
from ppldm.inference.pictures.plan import Plan
from ppldm.utils.errors import ConfigError, PpldmError, StoreError
from ppldm.utils.store import client
from ppldm.utils.variables import network_forbidden

RECORD = {"prompt": "p", "negative_prompt": "", "index": 0, "seed": 1, "sampler": "ddim", "num_inference_steps": 2,
          "guidance_scale": 2.0, "height": 32, "width": 32, "weights": "0", "exact": False}  # fmt: skip
FURTHER = ("template", "prompt_syntax", "guidance_rescale", "eta", "timestep_spacing", "sigma_schedule", "strength",
           "guidance_interval", "cfg_zero", "control_scale", "engine", "dtype", "lora", "source")  # fmt: skip
SOURCE = {"model": "owner/model", "sha256": "0" * 64, "batch": [2, 1]}
OF_SOURCE = (
    *SOURCE,
    "ema",
    "original_config_file",
    "decoder",
    "controlnet",
    "tokenizer",
    "prediction_type",
    "guide_model",
)
ADDRESSES = [
    f"{scheme}://127.0.0.1:9/x" for scheme in ("http", "https", "HTTP", "s3", "gs", "hdfs", "oss", "ftp", "file")
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(2**31, 2**70) | st.floats() | st.text(max_size=20)
    | st.sampled_from(["64", "-1", "NaN", "a\0b", "x" * 5000, "\ud800", "../m", "/dev/zero", "\x1b[2J\n", *ADDRESSES]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_store(monkeypatch):
    def ask(url, *_):
        raise StoreError(f"{url} was asked")

    monkeypatch.setattr(client, "_filesystem", ask)


def write(path, text: str, side: int = 8):
    info = PngImagePlugin.PngInfo()
    info.add_itxt("ppldm", text)
    Image.new("RGB", (side, side)).save(path, pnginfo=info)
    return path


def asked_for(path, *flags) -> SimpleNamespace:
    return SimpleNamespace(**parse_flags("generate", ["--like", str(path), *flags]))


def planned(path, *flags) -> Plan | str:
    """The plan, or what it is refused with."""
    try:
        plan = plan_of(asked_for(path, *flags))
    except PpldmError as error:
        said = str(error)
        assert "\n" not in said and len(said) <= 2000 and said.isprintable() and "--" in said
        return said
    check(plan, Image.open(path).width)
    return plan


def check(plan: Plan, side: int) -> None:
    """That it is such as the command line makes."""
    assert type(plan.first) is int and 0 <= plan.first < 2**31 and type(plan.seed) is int
    assert all(side is None or (type(side) is int and 8 <= side <= 1 << 14) for side in (plan.height, plan.width))
    assert isinstance(plan.drawing, Drawing) and type(plan.exact) is bool and isinstance(plan.control_scale, float)
    plan.drawing.check()
    if plan.place:
        count, place = plan.place
        assert 0 <= place < count <= 256 and count * plan.height * plan.width <= 8 * max(1 << 20, side**2)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from([*RECORD, *FURTHER]), JSON, min_size=1, max_size=2),
       st.dictionaries(st.sampled_from(OF_SOURCE), JSON, max_size=2))  # fmt: skip
@example({"height": "64"}, {})
@example({"height": 8000000}, {})
@example({"width": 16384, "height": 16384}, {})
@example({"guidance_scale": [1, 2]}, {})
@example({"guidance_scale": float("nan")}, {})
@example({"index": -1}, {})
@example({"index": 2**64}, {})
@example({"lora": "abc"}, {})
@example({"source": [1]}, {})
@example({}, {"batch": [100000, 0]})
@example({}, {"batch": [2, -1]})
@example({}, {"batch": [True, False]})
@example({"height": 1024, "width": 1024}, {"batch": [256, 0]})
def test_any_record_is_planned_or_refused_in_a_line(tmp_path, changes, of_source):
    record = RECORD | {"source": SOURCE | of_source} | changes
    planned(write(tmp_path / "it.png", json.dumps(record)))


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**5, "1" * 6000, '{"prompt": ' + "9" * 6000 + "}", "null"])
def test_records_that_are_no_record(text, tmp_path):
    assert "does not say how it was drawn" in planned(write(tmp_path / "000-00.png", text))
    plan = planned(write(tmp_path / "good.png", json.dumps(RECORD | {"source": SOURCE})))
    with pytest.raises(ConfigError, match="that ppldm did not draw"):
        check_folder(plan, str(tmp_path))


def test_a_picture_as_large_as_it_says_is_drawn_again(tmp_path):
    large = RECORD | {"height": 1536, "width": 1536, "source": SOURCE | {"batch": [8, 7]}}
    assert planned(write(tmp_path / "it.png", json.dumps(large), 1536)).place == (8, 7)
    assert "give --size" in planned(write(tmp_path / "small.png", json.dumps(large)))
    assert planned(tmp_path / "small.png", "--size", "64x32").place is None


def test_a_flag_stands_for_what_a_picture_says_wrongly(tmp_path):
    wrong = {"seed": "x", "height": "64", "sampler": 3, "guidance_scale": [], "prompt": 5, "lora": 7}
    for name, value in wrong.items():
        write(tmp_path / "it.png", json.dumps(RECORD | {"source": SOURCE, name: value}))
        flag = {"seed": "--seed 3", "height": "--size 32x32", "sampler": "--sampler ddim", "prompt": "--prompt x",
                "guidance_scale": "--guidance-scale 3", "lora": ""}[name]  # fmt: skip
        assert isinstance(planned(tmp_path / "it.png"), str), name
        if name != "lora":
            assert isinstance(planned(tmp_path / "it.png", *flag.split()), Plan), name
    write(tmp_path / "it.png", json.dumps(RECORD | {"source": SOURCE | {"batch": [100000, 0]}}))
    assert "give --batch-size" in planned(tmp_path / "it.png")
    assert planned(tmp_path / "it.png", "--batch-size", "4").place is None


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("name", ["model", "original_config_file", "decoder", "controlnet", "tokenizer", "lora",
                                  "guide_model"])  # fmt: skip
def test_no_address_that_a_picture_names_is_followed(address, name, tmp_path):
    record = RECORD | {"source": SOURCE | {name: address}}
    if name == "lora":
        record = RECORD | {"source": SOURCE, "lora": [address]}
    said = planned(write(tmp_path / "it.png", json.dumps(record)))
    assert address in said and f"give --{name}" in said


def test_a_folder_or_a_name_of_a_hub_is_followed(tmp_path):
    for name in ("owner/model", str(tmp_path)):
        asked = asked_for(write(tmp_path / "it.png", json.dumps(RECORD | {"source": SOURCE | {"model": name}})))
        plan_of(asked)
        assert asked.model == name


COMMANDS = ["generate --model {} --prompt x --out o", "export {} --to diffusers --out o", "serve --model {}",
            "evaluate --model {} --prompts p.txt --out o", "precompute --file_list f.txt --vae {} --out o"]  # fmt: skip


@pytest.mark.parametrize("how", ["flag", "variable"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x", "s3://bucket/x", "HTTPS://127.0.0.1/m"])
def test_offline_no_address_of_a_model_is_asked(how, url, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    if how == "variable":
        monkeypatch.setenv("PPLDM_OFFLINE", "1")
    for command in COMMANDS[:2]:
        with pytest.raises((StoreError, SystemExit)) as stopped:
            run([*command.format(url).split(), *(["--offline"] if how == "flag" else [])])
        said = f"{stopped.value}{capfd.readouterr().err}"
        assert "the network is not to be used" in said, command


def test_offline_the_door_of_the_store_is_shut_for_all(monkeypatch):
    asks = (client.stat_now, client.find, client.expand, client.remove, lambda url: client.get(url, "x"))
    for ask in asks:
        with network_forbidden(), pytest.raises(StoreError, match="the network is not to be used"):
            ask("s3://bucket/x*")
        with pytest.raises(StoreError, match="was asked"):
            ask("s3://bucket/x*")
    monkeypatch.setenv("PPLDM_OFFLINE", "1")
    for ask in asks:
        with pytest.raises(StoreError, match="the network is not to be used"):
            ask("s3://bucket/x")
