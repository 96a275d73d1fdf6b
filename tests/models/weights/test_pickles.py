"""Pickled weights: values to the bit, and no program run, whatever the file asks for."""

import collections
import io
import os
import pickle
import zipfile

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ppldm.models.weights.pickles import read_pdparams, read_torch, widen_bfloat16, write_torch
from ppldm.utils.errors import ModelError

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
    import sys

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
