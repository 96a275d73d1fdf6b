"""Settings from files, overrides and flags: the strength of sources, resolving, where a value came from."""

import pytest
from schema import read

from ppldm.config.load import file_layers
from ppldm.utils.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "run.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def values(found: dict) -> dict:
    return {key: setting.value for key, setting in found.items()}


def test_the_strongest_source_wins_and_is_named(write):
    base = write("data: {list: base, size: 1, kind: area}\nrun: {rate: 1, where: base}", "base.yaml")
    path = write("base: base.yaml\ndata:\n  list: file\n  size: 2\nrun:\n  rate: 2")
    found = read(path, "data.size=3", "run.rate=3", rate=4.0)
    assert {key: (one.value, one.origin) for key, one in found.items()} == {
        "family": ("ldm", "default"),
        "data.list": ("file", f"{path}:3"),
        "data.size": (3, "override"),
        "data.kind": ("area", f"{base}:1"),
        "run.rate": (4.0, "flag"),
        "run.names": (["visualdl"], "default"),
        "run.where": ("base", f"{base}:2"),
        "run.flip": (False, "default"),
    }


def test_values_refer_to_what_is_in_force(write):
    path = write(
        "data: {list: '${run.where}/${data.size}', size: 64}\nrun: {rate: '${data.size}', names: ['${family}']}"
    )
    found = values(read(path, "run.where=here", size=32))
    assert found["data.list"] == "here/32" and found["run.names"] == ["ldm"]
    assert found["run.rate"] == 32.0 and isinstance(found["run.rate"], float)
    assert values(read(path, "data.list=${data.kind}"))["data.list"] == "lanczos"


@pytest.mark.parametrize("text", ["${data.size}", r"\${data.size}", r"a\\${x", "???", "$", r"\\"])
def test_a_flag_is_taken_as_it_is(write, text):
    path = write("data: {list: x}\nrun: {where: a}")
    assert values(read(path, where=text))["run.where"] == text
    if text != "???":
        assert values(read(write("data: {list: '${run.where}'}"), where=text))["data.list"] == text


def test_the_environment_gives_text_that_becomes_the_options_type(write, monkeypatch):
    monkeypatch.setenv("SIZE", "48")
    monkeypatch.setenv("NAMES", "[a, b]")
    run = "run: {names: '${oc.env:NAMES}', where: '${data.size}'}"
    found = read(write("data: {list: '${oc.env:NOPE,12}', size: '${oc.env:SIZE}'}\n" + run))
    assert found["data.list"].value == "12" and found["data.size"].value == 48
    assert found["run.names"].value == ["a", "b"]
    # Whatever the environment has a part in, keeps the expression, which is what may be saved.
    assert found["data.size"].written == "${oc.env:SIZE}" and found["run.where"].written == "${data.size}"
    assert found["data.kind"].written is None
    assert read(write("data: {list: 'x${data.size}'}"))["data.list"].written is None


@pytest.mark.parametrize(
    "word, key, value",
    [
        ("data.list=2024", "data.list", "2024"),
        ("data.list=a=b", "data.list", "a=b"),
        ("data.list=", "data.list", ""),
        ("run.where=null", "run.where", None),
        ("run.rate=1e-3", "run.rate", 1e-3),
        ("run.names=[a, b]", "run.names", ["a", "b"]),
        ("run.flip=true", "run.flip", True),
    ],
)
def test_overrides_are_written_as_in_yaml_and_text_as_it_is(write, word, key, value):
    assert values(read(write("data: {list: x}"), word))[key] == value


def test_bases_are_relative_to_the_file_that_names_them(write):
    write("data: {size: 7}", "deep/b.yaml")
    write("base: b.yaml\ndata: {kind: area}", "deep/a.yaml")
    found = values(read(write("base: deep/a.yaml\ndata: {list: x}")))
    assert found["data.size"] == 7 and found["data.kind"] == "area"


def test_a_byte_order_mark_and_empty_sections_are_nothing(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes("\ufeffdata:\n  list: é\nrun:\n".encode())
    assert values(read(path))["data.list"] == "é"


@pytest.mark.parametrize(
    "text, words",
    [
        ("data: {list: x, sise: 3}", ["run.yaml:1: data.sise is not known", "did you mean data.size?"]),
        ("data: {list: x, rate: 3}", ["data.rate is not known", "rate stands under run: run.rate"]),
        ("size: 3", ["run.yaml:1: size is not known", "data.size"]),
        ("data.size: 3", ["run.yaml:1: data.size is written in two lines"]),
        ("run: {lr: 1}", ["run.lr is not known", "it is called run.rate here"]),
        ("dta: {list: x}", ["dta.list is not known", "data.list"]),
        ("zzz: 3", ["zzz is not known", "known: family, data, run"]),
        ("data: 3", ["run.yaml:1: data 3 must hold settings", "known: list, size, kind"]),
        ("data:\n  list: ???", ["run.yaml:2: data.list is ???", "data.list=VALUE"]),
        ("data:\n  size: 3", ["data.list is missing; add it"]),
        ("data: {list: x, size: big}", ["run.yaml:1: data.size big must be a whole number"]),
        ("data: {list: x, size: 0}", ["data.size 0 must be above 0"]),
        ("data: {list: x, size: 1.5}", ["data.size 1.5 must be a whole number"]),
        ("data: {list: x, kind: lanczso}", ["data.kind lanczso is not known; did you mean lanczos?"]),
        ("data: {list: x}\nrun: {names: a}", ["run.yaml:2: run.names 'a' must be a list"]),
        ("data: {list: {a: 1}}", ["data.list {'a': 1} must be text"]),
        ("data: {list: '${data.nope}'}", ["yaml:1: data.list ${data.nope} cannot be", "'data.nope' not found"]),
        ("data: {list: '${oc.env:NOPE_X}'}", ["${oc.env:NOPE_X} cannot be resolved", "'NOPE_X' not found"]),
        ("data: {list: '${data.list}'}", ["Recursive interpolation"]),
        ("data: {list: '${data.list'}", ["run.yaml: data.list: no viable alternative"]),
        ("data: {list: '${oc.nope:1}'}", ["Unsupported interpolation type oc.nope"]),
        ("data: {list: a}\ndata: {list: b}", ["run.yaml:2: not YAML: found duplicate key data"]),
        ("data:\n  list: a\n   size: 3", ["run.yaml:3: not YAML"]),
        ("data: {list: x", ["run.yaml:", "not YAML"]),
        ("data: &a {list: *a}", ["not YAML: YAML recursive aliases are not supported"]),
        ("data: !!python/name:os.system", ["run.yaml:1: not YAML: could not determine a constructor"]),
        ("- 1", ["run.yaml holds no settings"]),
        ("", ["run.yaml holds no settings"]),
        ("just text", ["run.yaml holds no settings"]),
        ("1: x", ["run.yaml:1: the key 1 is not text"]),
        ("? [a]\n: b", ["run.yaml"]),
        ("a: 1\n---\nb: 2", ["another document"]),
        ("base: 3", ["run.yaml:1: base 3 must be text"]),
        ("base: nope.yaml", ["run.yaml:1: base nope.yaml is not there"]),
        ("base: run.yaml", ["base: goes round in a circle", "run.yaml -> ", "remove one of them"]),
        ("base: zzz", ["run.yaml:1: base zzz is not a preset"]),
        ("data: {list: x, size: null}", ["data.size None must be a whole number"]),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_with_file_key_and_remedy(write, text, words):
    with pytest.raises(ConfigError) as caught:
        read(write(text))
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message


@pytest.mark.parametrize(
    "word, message",
    [
        ("data.sise=3", "data.sise is not known; did you mean data.size?"),
        ("data.size", "data.size is not an override; write key=value"),
        ("data.size=big", "data.size big must be a whole number"),
        ("run.names=[a", "run.names [a is not a value in YAML's spelling"),
        ("data.list=???", "data.list is ???"),
    ],
)
def test_mistakes_in_overrides_are_one_line(write, word, message):
    with pytest.raises(ConfigError) as caught:
        read(write("data: {list: x}"), word)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(ConfigError, match="cannot read .*nope.yaml .No such file"):
        file_layers(tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match="cannot read .*Is a directory"):
        file_layers(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("data: {list: é}".encode("latin-1"))
    with pytest.raises(ConfigError, match="latin.yaml is not UTF-8 .* save it as UTF-8"):
        file_layers(tmp_path / "latin.yaml")
