"""Pickled weights: values to the bit, and no program run, whatever the file asks for."""

import collections
import io
import json
import os
import pickle
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ppldm.utils.errors import ModelError
from ppldm.weights.components import OLDER_TORCH_START, widen_bfloat16
from ppldm.weights.formats import pickles
from ppldm.weights.formats.files import is_pytorch, read_arrays
from ppldm.weights.formats.paddle_files import read_pdparams, read_tree
from ppldm.weights.formats.torch_files import pickled_tensor, pickled_text, read_torch, write_torch

DTYPES = ("float32", "float16", "float64", "int64", "uint8", "bool")


class Evil:
    """A pickle of it creates the file `path` when it is run."""

    def __init__(self, path, call=os.mkdir):
        self.path, self.call = str(path), call

    def __reduce__(self):
        return self.call, (self.path,)


def torch_zip(path, data: bytes, members=()) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        for name, content in members:
            archive.writestr(f"archive/data/{name}", content)


def torch_pickle(tensors) -> bytes:
    """The data.pkl of (name, storage, offset, shape, strides)."""
    values = (
        pickled_text(name) + pickled_tensor(storage, "FloatStorage", 4, shape, strides, offset)
        for name, storage, offset, shape, strides in tensors
    )
    return b"\x80\x02}(" + b"".join(values) + b"u."


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(st.text(min_size=1), st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0)))))  # fmt: skip
def test_what_is_written_is_read(tmp_path_factory, state_dict):
    path = tmp_path_factory.mktemp("torch") / "a.ckpt"
    write_torch(path, state_dict, {"global_step": 3})
    again = read_torch(path)
    assert list(again) == list(state_dict)
    for name, array in state_dict.items():
        assert (again[name].dtype, again[name].shape) == (array.dtype, array.shape)
        assert again[name].tobytes() == array.tobytes()


def test_only_the_wanted_are_read(tmp_path):
    write_torch(tmp_path / "a.ckpt", {"a.x": np.ones(2, "f4"), "b.x": np.ones(3, "f4")}, {})
    assert list(read_torch(tmp_path / "a.ckpt", lambda name: name.startswith("b"))) == ["b.x"]


def test_paddles_files(tmp_path):
    layer = paddle.nn.Linear(3, 4)
    state = {**layer.state_dict(), "half": layer.weight.astype("bfloat16"), "number": 7}
    paddle.save(state, str(tmp_path / "a.pdparams"))
    read = read_pdparams(tmp_path / "a.pdparams")
    assert set(read) == {"weight", "bias", "half"}
    assert (read["weight"] == layer.weight.numpy()).all()
    assert (read["half"] == layer.weight.astype("bfloat16").astype("float32").numpy()).all()


def test_bfloat16_is_widened_exactly():
    assert widen_bfloat16(np.array(0x4000, dtype=np.uint16)) == 2
    values = np.array([1.0, -2.5, 0.0, np.inf, 3.0e38], dtype=np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    widened = widen_bfloat16(bits)
    assert widened.dtype == np.float32 and (widened.view(np.uint32) >> 16 == bits).all()
    assert (widened[:4] == values[:4]).all()


@pytest.mark.parametrize("call", [os.mkdir, os.system, eval, open, paddle.load, pickle.loads, np.load])
def test_malicious_pickles_are_refused_and_do_nothing(tmp_path, call):
    evil = Evil(tmp_path / "evil", call)
    torch_zip(tmp_path / "a.ckpt", pickle.dumps({"state_dict": evil}))
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps({"w": np.zeros(2), "x": evil}))
    for read, name in ((read_torch, "a.ckpt"), (read_pdparams, "a.pdparams")):
        with pytest.raises(ModelError, match=f"{name} is refused.*nothing of it was run"):
            read(tmp_path / name)
    assert not (tmp_path / "evil").exists()


def test_a_chain_through_allowed_names_leads_nowhere(tmp_path):
    # getattr chains, as in (ndarray.__reduce__ ...), need getattr: dotted names are no way around the table.
    for data in (
        b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93.",
        b"cbuiltins\ngetattr\n.",
        b"cnumpy\ntesting\n.",
    ):
        (tmp_path / "a.pdparams").write_bytes(b"\x80\x04" + data.removeprefix(b"\x80\x04"))
        with pytest.raises(ModelError, match="is refused"):
            read_pdparams(tmp_path / "a.pdparams")


def test_what_frameworks_leave_beside_the_weights_is_passed_over(tmp_path):
    module = type(os)("pytorch_lightning")
    callback = type("ModelCheckpoint", (), {"__module__": "pytorch_lightning"})
    module.ModelCheckpoint = callback
    sys.modules["pytorch_lightning"] = module
    try:
        state = callback()
        state.best = 3
        data = pickle.dumps(
            {"callbacks": {callback: state}, "state_dict": collections.OrderedDict(), "epoch": np.float64(2)}
        )
    finally:
        del sys.modules["pytorch_lightning"]
    torch_zip(tmp_path / "a.ckpt", data)
    assert read_torch(tmp_path / "a.ckpt") == {}


def test_damage_is_named(tmp_path):
    good = tmp_path / "good.ckpt"
    write_torch(good, {"w": np.arange(1000, dtype="f4")}, {})
    data = good.read_bytes()
    cases = {
        "cut.ckpt": data[: len(data) // 2],
        "version.ckpt": data.replace(b"PK\x01\x02\x14\x03\x14", b"PK\x01\x02\x14\x03\xff"),
        "method.ckpt": data.replace(b"PK\x01\x02\x14\x03\x14\0\0\0\0\0", b"PK\x01\x02\x14\x03\x14\0\0\0\x63\0"),
        "password.ckpt": data.replace(b"PK\x01\x02\x14\x03\x14\0\0\0", b"PK\x01\x02\x14\x03\x14\0\x01\0"),
        "flipped.ckpt": data.replace(np.float32(500).tobytes() + np.float32(501).tobytes(), b"\0" * 8),
        "old.ckpt": pickle.dumps(0x1950A86A20F9469CFC6C),
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=name):
            read_torch(tmp_path / name)
    torch_zip(tmp_path / "list.ckpt", pickle.dumps([1, 2]))
    with pytest.raises(ModelError, match="no weights of PyTorch"):
        read_torch(tmp_path / "list.ckpt")
    for name, content in {"cut.pdparams": pickle.dumps({"w": np.zeros(99)})[:80], "no.pdparams": b"hello"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=name):
            read_pdparams(tmp_path / name)
    with pytest.raises(ModelError, match="cannot read"):
        read_pdparams(tmp_path / "absent.pdparams")


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    good = tmp_path / "good.ckpt"
    write_torch(good, {"w": np.arange(6, dtype="f4")}, {})
    with zipfile.ZipFile(good) as archive:
        data = archive.read("archive/data.pkl")
    torch_zip(tmp_path / "short.ckpt", data, [("0", np.zeros(3, "f4").tobytes())])
    with pytest.raises(ModelError, match="storage 0 has 3 values"):
        read_torch(tmp_path / "short.ckpt")


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=60))
def test_any_bytes_give_a_named_error_or_arrays(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a.pdparams").write_bytes(b"\x80\x04" + data)
    torch_zip(folder / "a.ckpt", b"\x80\x02" + data)
    for read, name in ((read_pdparams, "a.pdparams"), (read_torch, "a.ckpt")):
        try:
            read(folder / name)
        except ModelError as error:
            assert "\n" not in str(error)


def test_the_writer_is_read_by_pickle_tools():
    import pickletools

    buffer = io.BytesIO()
    write_torch(buffer, {"w": np.zeros((2, 3), "f4")}, {"global_step": 2**40})
    with zipfile.ZipFile(buffer) as archive:
        pickletools.dis(archive.read("archive/data.pkl"), out=io.StringIO())


def same(one, other) -> bool:
    """Equal to the bit, tensors by name and value."""
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in other)
    if isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(other, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    return one == other


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_whatever_holds_numbers_is_read_as_python_reads_it(tmp_path, protocol):
    tree = {
        **{dtype: np.arange(6).astype(dtype).reshape(2, 3) for dtype in DTYPES},
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "swapped": np.arange(3, dtype=">f4"),
        "long": np.random.default_rng(0).integers(0, 256, 3 << 20).astype("u1"),  # more than one piece
        "empty": np.zeros((0, 3), "f4"),
        "none": np.array(3.0),
        "named": ("linear_0.w_0", np.ones(2, "f4")),
        "LR": {"last_lr": 0.1, "scalar": np.float64(0.3), "last_epoch": -7, "big": 2**40, "on": True, "no": None},
        "list": [1, (2, "three"), collections.OrderedDict(a=1)],
        "keys": {(1, (2, 3)): 4, 5: 6, None: 7},
    }
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps(tree, protocol=protocol))
    expected = {**tree, "swapped": tree["swapped"].astype("f4"), "keys": {5: 6, None: 7}}
    assert same(read_tree(tmp_path / "a.pdparams"), expected)
    flat = {name: value for name, value in expected.items() if isinstance(value, np.ndarray)}
    assert same(read_pdparams(tmp_path / "a.pdparams"), {**flat, "named": tree["named"][1]})


def test_slices_of_big_arrays_are_refused(tmp_path):
    tree = {"w@@.0": np.ones(4, "f4"), "UnpackBigParamInfor@@": {"w": {"OriginShape": (4,), "slices": ["w@@.0"]}}}
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps(tree, protocol=2))
    for read in (read_pdparams, read_tree):
        with pytest.raises(ModelError, match="arrays in slices of 1 GiB"):
            read(tmp_path / "a.pdparams")


NAMED_NUMBER = b"cnumpy\ndtype\nX\2\0\0\0u8\x89\x88\x87R"
NAMED_OBJECT = b"cnumpy\ndtype\nX\2\0\0\0O8\x89\x88\x87R"


@pytest.mark.parametrize(
    "kind, state",
    [
        (NAMED_OBJECT, b""),
        (NAMED_NUMBER.replace(b"u8", b"V8"), b""),
        # A field of type object with no flags: numpy follows the bytes as a pointer.
        (NAMED_NUMBER, b"(K\3X\1\0\0\0|N(X\1\0\0\0ft}X\1\0\0\0f" + NAMED_OBJECT + b"K\0\x86sK\x08K\1K\0tb"),
        (NAMED_NUMBER, b"(K\3X\1\0\0\0|N(X\1\0\0\0ft}X\1\0\0\0f" + NAMED_NUMBER + b"K\0\x86sK\x08K\1K\0tb"),
        (NAMED_NUMBER, b"(K\3X\1\0\0\0|NNNK\x10K\1K\0tb"),
    ],
)
def test_a_forged_type_is_refused(tmp_path, kind, state):
    scalar = b"cnumpy.core.multiarray\nscalar\n" + kind + state + b"C\x08" + b"\x41" * 8 + b"\x86R"
    (tmp_path / "a.pdparams").write_bytes(b"\x80\x04}X\1\0\0\0w" + scalar + b"s.")
    for read in (read_pdparams, read_tree):
        with pytest.raises(ModelError, match="refused"):
            read(tmp_path / "a.pdparams")


# (what stands for twelve bytes, what would stand for so many others), by protocol
STORED = {
    2: lambda n: (b"X\x0c\0\0\0" + b"a" * 12, b"X" + n.to_bytes(4, "little") + b"a" * n),
    4: lambda n: (b"C\x0c" + b"a" * 12, b"B" + n.to_bytes(4, "little") + b"a" * n),
    5: lambda n: (b"\x96\x0c" + bytes(7) + b"a" * 12, b"\x96" + n.to_bytes(8, "little") + b"a" * n),
}


@pytest.mark.parametrize("protocol", STORED)
@pytest.mark.parametrize("count", [0, 8, 11, 13, 16, 70_000])
def test_an_array_has_the_bytes_of_its_shape(tmp_path, protocol, count):
    path, array = tmp_path / "a.pdparams", np.frombuffer(b"a" * 12, "f4").copy()
    path.write_bytes(pickle.dumps({"w": array}, protocol=protocol))
    assert read_pdparams(path)["w"].tobytes() == b"a" * 12
    data = path.read_bytes().replace(*STORED[protocol](count))
    assert data != path.read_bytes()
    path.write_bytes(data)
    # What bytes a text of protocol 2 makes is known when it is read.
    said = f"an array of 12 bytes has {count}" if protocol > 2 or count < 12 else "an array"
    for read in (read_pdparams, read_tree):
        with pytest.raises(ModelError, match=said):
            read(path)


def bombs() -> dict[str, bytes]:
    """Small pickles that would grow, or overrun a stack."""
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85C\1b\x87R(K\1"
    kind = b"cnumpy\ndtype\nX\2\0\0\0u1\x89\x88\x87R"
    shared = b"".join(
        text + made + b"J\xa0\x86\1\0\x85" + kind + b"\x89h\0tb"
        for text in (b"X\4\0\0\0" + f"{number:04d}".encode() for number in range(9))
    )
    doubled = (
        b"]" + b"q\0" + b"".join(b"](h%bh%be" % (bytes([i]), bytes([i])) + b"q" + bytes([i + 1]) for i in range(40))
    )
    return {
        "a length that is not there": b"\x80\x04}X\1\0\0\0w\x96" + b"\0\0\0\0\1\0\0\0" + b"s.",
        "a memo of 64 GB": b"\x80\x04}r\xff\xff\xff\xff.",
        "one content for nine arrays": b"\x80\x04B\xa0\x86\1\0" + bytes(100_000) + b"q\x000}(" + shared + b"u.",
        "doubled 40 times": b"\x80\x04}X\1\0\0\0w" + doubled + b"s.",
        "tuples in one another": b"\x80\x04}N" + b"\x85" * 200_000 + b"Ns.",
        "dicts in one another": b"\x80\x04" + b"}N" * 100_000 + b"N" + b"s" * 2 + b".",
        "too many opcodes": b"\x80\x04" + b"]" * 110_000 + b".",
        "a text as bytes 10,000 times": called_often(
            b"c_codecs\nencode\n", b"X\xff\xff\0\0" + b"a" * 65_535 + b"X\6\0\0\0latin1\x86", 10_000
        ),
        "a list as dict 10,000 times": called_often(
            b"ccollections\nOrderedDict\n", b"](" + b"NN\x86" * 10_000 + b"e\x85", 10_000
        ),
        "an argument that is half a pair of UTF-16": b"\x80\x04}X\3\0\0\0\xed\xa0\x80Ns.",
    }


def called_often(function: bytes, argument: bytes, times: int) -> bytes:
    """A list of what a function gives for one argument again and again."""
    return b"\x80\x04}X\1\0\0\0w](" + function + b"q\0" + argument + b"q\1" + b"h\0h\1R" * times + b"es."


SAID = {
    "a length that is not there": "cut short",
    "a memo of 64 GB": "memo has gaps",
    "one content for nine arrays": "more bytes than the file",
    "too many opcodes": "more than 100000 opcodes",
    "a text as bytes 10,000 times": "more than the file has",
    "a list as dict 10,000 times": "more than the file has",
    "an argument that is half a pair of UTF-16": "invalid continuation byte",
}


@pytest.mark.parametrize("name", bombs())
def test_small_pickles_stay_small(tmp_path, monkeypatch, name):
    if name == "too many opcodes":
        monkeypatch.setattr(pickles, "_MOST_OPCODES", pickles._MOST_OPCODES // 20)
    path = tmp_path / "a.pdparams"
    path.write_bytes(bombs()[name])
    for read in (read_pdparams, read_tree):
        tracemalloc.start()
        try:
            read(path)
            assert name not in SAID
        except ModelError as error:
            assert SAID.get(name, "") in str(error) and "more memory" not in str(error)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 300e6


def test_arrays_are_in_memory_once(tmp_path):
    state = {name: np.ones(4 << 20, "f4") for name in "abc"}
    size = sum(array.nbytes for array in state.values())
    write_torch(tmp_path / "a.ckpt", state, {})
    paddle.save(state, str(tmp_path / "a.pdparams"))
    for read, name in ((read_torch, "a.ckpt"), (read_pdparams, "a.pdparams"), (read_tree, "a.pdparams")):
        tracemalloc.start()
        found = read(tmp_path / name)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1.1 * size and same(found, state)


def test_an_array_under_many_names_is_in_memory_once(tmp_path):
    array = np.ones(1 << 20, "f4")
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps({str(i): ("w_0", array) if i % 2 else array for i in range(20)}))
    tracemalloc.start()
    found = read_pdparams(tmp_path / "a.pdparams")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * array.nbytes and len(found) == 20 and all(same(one, array) for one in found.values())


def test_an_array_without_its_values_is_named(tmp_path):
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85C\1b\x87R"
    (tmp_path / "a.pdparams").write_bytes(b"\x80\x04}(X\1\0\0\0w" + made + b"u.")
    for read in (read_pdparams, read_tree):
        with pytest.raises(ModelError, match="a.pdparams is damaged.*an array without its values"):
            read(tmp_path / "a.pdparams")


TENSOR = torch_pickle([("w", "0", 0, (2, 2), (2, 1))])


@pytest.mark.parametrize("state", [b"}X\5\0\0\0shapeK\x09\x85s", b"N}X\5\0\0\0shapeK\x09\x85s\x86", b"N"])
@pytest.mark.parametrize(
    "made",
    [
        *(b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"ctorch\nSize\n"),
        *(TENSOR[TENSOR.index(b"((") + 1 : TENSOR.index(b"Q") + 1], TENSOR[TENSOR.index(b"ct") : -2]),
    ],
)
def test_no_state_is_set_of_what_has_none(tmp_path, made, state):
    torch_zip(tmp_path / "a.ckpt", b"\x80\x02}X\1\0\0\0w" + made + state + b"bs.", [("0", bytes(16))])
    with pytest.raises(ModelError, match="a.ckpt is refused: its pickle asks for a state"):
        read_torch(tmp_path / "a.ckpt")


def test_compressed_members_are_refused(tmp_path):
    write_torch(tmp_path / "good.ckpt", {"w": np.zeros(1 << 20, "f4")}, {})
    with (
        zipfile.ZipFile(tmp_path / "good.ckpt") as good,
        zipfile.ZipFile(tmp_path / "bomb.ckpt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in good.namelist():
            bomb.writestr(name, good.read(name))
    with pytest.raises(ModelError, match="is compressed, which torch.save never does"):
        read_torch(tmp_path / "bomb.ckpt")


@pytest.mark.parametrize(
    "offset, shape, strides, message",
    [
        (0, (30_000, 30_000), (0, 0), "more bytes than the file"),
        (0, (4, 2), (0, 1), "shows some of them twice"),
        (0, (3, 2), (1, 1), "shows some of them twice"),
        (1, (4,), (1,), "a tensor wants 5"),
        (0, (2,), (4,), "a tensor wants 5"),
        (0, (2,), (1, 1), "no tensor has"),
        (0, (2**50,), (1,), "no tensor has"),
        (0, (-1,), (1,), "no tensor has"),
        (-1, (2,), (1,), "no tensor has"),
        (0, (0, 2**40, 2**40), (1, 1, 1), "damaged"),
    ],
)
def test_tensors_that_expand_are_refused(tmp_path, offset, shape, strides, message):
    data = torch_pickle([("w", "0", offset, shape, strides)])
    torch_zip(tmp_path / "a.ckpt", data, [("0", np.arange(4, dtype="f4").tobytes())])
    with pytest.raises(ModelError, match=message):
        read_torch(tmp_path / "a.ckpt")


def test_views_of_one_storage(tmp_path):
    data = torch_pickle([("t", "0", 0, (2, 2), (1, 2)), ("b", "0", 2, (2,), (1,)), ("again", "0", 2, (2,), (1,))])
    torch_zip(tmp_path / "a.ckpt", data, [("0", np.arange(4, dtype="f4").tobytes())])
    read = read_torch(tmp_path / "a.ckpt")
    assert list(read) == ["t", "b", "again"]
    assert read["t"].tolist() == [[0, 2], [1, 3]] and read["b"].tolist() == read["again"].tolist() == [2, 3]
    many = [(str(i), "0", 0, (2, 2), (1 + i % 2, 2 - i % 2)) for i in range(99)]
    torch_zip(tmp_path / "b.ckpt", torch_pickle(many), [("0", np.arange(4, dtype="f4").tobytes())])
    assert len(read_torch(tmp_path / "b.ckpt")) == 99  # two tensors, whatever their names
    many = [(str(i), "0", i % 999, (1, 1000), (1, 1)) for i in range(999)]
    torch_zip(tmp_path / "c.ckpt", torch_pickle(many), [("0", bytes(8000))])
    with pytest.raises(ModelError, match="more bytes than the file"):
        read_torch(tmp_path / "c.ckpt")


def fuzz(count: int, seed: int) -> dict:
    script = Path(__file__).with_name("fuzz_pickles.py")
    command = [sys.executable, str(script), "--count", str(count), "--seed", str(seed)]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout)


def test_random_programs_are_read_or_refused():
    outcomes = fuzz(2000, int(os.environ.get("PPLDM_SEED", 1)))
    assert outcomes["files"] == 2000
    assert all(outcomes[f"read_pdparams {kind}"] > 10 for kind in ("read", "refused", "damaged"))


@pytest.mark.night("many random programs")
def test_many_random_programs():
    assert fuzz(100_000, int(os.environ.get("PPLDM_SEED", 1)))["files"] == 100_000


def older_file(path, arrays_by_name, keys=None, version=1001, counts=None, little_endian=True):
    """What torch.save wrote before PyTorch 1.6: the bytes of its pickles, and each storage with its size."""
    tree = b"\x80\x02}("
    for name, array in arrays_by_name.items():
        strides = [stride // array.itemsize for stride in array.strides]
        tree += pickled_text(name) + pickled_tensor(name, "FloatStorage", array.size, array.shape, strides)
    # Its persistent ids have a sixth entry, None.
    tree = (tree + b"u.").replace(b"tQ", b"NtQ")
    keys = list(arrays_by_name) if keys is None else keys
    counts = counts or {}
    with open(path, "wb") as file:
        file.write(OLDER_TORCH_START)
        for value in (version, {"protocol_version": 1001, "little_endian": little_endian}):
            file.write(pickle.dumps(value, protocol=2))
        file.write(tree)
        file.write(pickle.dumps(keys, protocol=2))
        for name, array in arrays_by_name.items():
            file.write(counts.get(name, array.size).to_bytes(8, "little") + array.tobytes())
    return path


def test_files_from_before_pytorch_1_6_are_read(tmp_path):
    given = {"fc.weight": np.arange(6, dtype="f4").reshape(2, 3), "n": np.ones((), "f4")}
    path = older_file(tmp_path / "a.pth", given)
    read = read_arrays(path)
    assert list(read) == list(given)
    assert all((read[name] == given[name]).all() and read[name].shape == given[name].shape for name in given)
    assert is_pytorch(path)
    assert list(read_torch(path, lambda name: name == "n")) == ["n"]


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 1000},
        {"little_endian": False},
        {"keys": ["b"]},
        {"keys": []},
        {"counts": {"a": 2}},
        {"counts": {"a": 1 << 60}},
        {"counts": {"a": (1 << 64) - 1}},
    ],
)
def test_damaged_files_from_before_pytorch_1_6_are_named(tmp_path, damage):
    with pytest.raises(ModelError, match="a.pth is damaged or holds no weights of PyTorch"):
        read_arrays(older_file(tmp_path / "a.pth", {"a": np.ones(3, "f4")}, **damage))


def test_files_from_before_pytorch_1_6_run_no_program(tmp_path):
    path = older_file(tmp_path / "a.pth", {"a": np.ones(3, "f4")})
    path.write_bytes(path.read_bytes().replace(pickle.dumps(1001, protocol=2), pickle.dumps(Evil(tmp_path / "run"), 2)))
    with pytest.raises(ModelError, match="refused"):
        read_arrays(path)
    assert not (tmp_path / "run").exists()


@pytest.mark.needs("parity")
def test_pytorchs_own_older_files_are_read(tmp_path):
    import torch

    base = torch.arange(12, dtype=torch.float32)
    tensors = {"a": base[2:8].view(2, 3).T, "b": base.half(), "c": torch.tensor(3), "d": base > 4}
    torch.save(tensors, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    read = read_arrays(tmp_path / "a.pt")
    for name, tensor in tensors.items():
        assert (read[name] == tensor.numpy()).all()
