"""What paddle.save writes: state dicts of weights (.pdparams), and nested ones of optimizers and schedules (.pdopt).

Three layouts, by the version that wrote them: arrays by name; tensors as (generated name, array); and arrays by name
with `StructuredToParameterName@@`, a table of the generated names. bfloat16 is stored as uint16. Under protocols 2 and
3 arrays of 1 GiB and more are cut, and `UnpackBigParamInfor@@` says how to join them.

`write_tree` writes the last layout, and the second where tensors are nested, as paddle.save does, but one array after
the other. paddle.save first copies all tensors, and its pickler keeps a second copy of each until the file is whole:
for an optimizer's state four times the bytes of the weights, at each checkpoint.
"""

import math
import os
import pickle

import numpy as np

from ...utils.files import open_regular
from .pickled_arrays import NUMPY_NAMES, Array
from .pickles import ORDERED_DICT, TUPLE, Machine, Malformed, named_errors

NAME_TABLE = "StructuredToParameterName@@"
_SLICES = "UnpackBigParamInfor@@"
_NAMES = {
    **NUMPY_NAMES,
    ("collections", "OrderedDict"): ORDERED_DICT,
    ("builtins", "tuple"): TUPLE,
    ("__builtin__", "tuple"): TUPLE,
}
_DEEPEST = 16  # dicts and lists in one another


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """uint16 bit patterns of bfloat16 to the float32 of the same values."""
    wide = np.left_shift(bits, 16, out=np.empty(bits.shape, np.uint32), dtype=np.uint32)
    return wide.view(np.float32)


def read_pdparams(path, wanted=None) -> dict[str, np.ndarray]:
    """Name to array of a state dict that paddle.save wrote; bfloat16 becomes float32. `wanted(name)` chooses.

    Raises ModelError.
    """
    with named_errors(path, "Paddle"), open(path, "rb") as file:
        tree = _parse(file)
        slices = _slices(tree)
        cut = {part for parts, _ in slices.values() for part in parts}
        arrays = {}
        for name, value in tree.items():
            value = value[1] if _is_named(value) else value
            if isinstance(name, str) and isinstance(value, Array) and name not in cut and _is_wanted(name, wanted):
                arrays[name] = _widened(value.read(file))
        for name, (parts, shape) in slices.items():
            if _is_wanted(name, wanted):
                arrays[name] = _widened(_join([tree[part] for part in parts], shape, file))
        return arrays


def read_tree(path) -> dict:
    """The whole of a nested dict that paddle.save wrote, its tensors as arrays or as (generated name, array).

    Raises ModelError.
    """
    with named_errors(path, "Paddle"), open_regular(path) as file:
        tree = _parse(file)
        if _SLICES in tree:
            raise Malformed("arrays in slices, which no checkpoint has")
        return _read_all(tree, file, {}, _DEEPEST)


def write_tree(path, tree: dict) -> None:
    """Write nested dicts with tensors and arrays for `paddle.load` and `read_tree`. The memory that it takes is twice
    that of the largest tensor."""
    import paddle

    names = {key: value.name for key, value in tree.items() if isinstance(value, paddle.Tensor)}
    if names and not any(isinstance(value, dict) and _has_tensors(value, paddle.Tensor) for value in tree.values()):
        plain = {key: _Later(value) if key in names else value for key, value in tree.items()}
        tree = {**plain, NAME_TABLE: names}
    with open(path, "wb") as file:
        _ArrayByArray(file, protocol=4).dump(tree)


def _has_tensors(tree: dict, kind: type) -> bool:
    return any(isinstance(one, kind) or (isinstance(one, dict) and _has_tensors(one, kind)) for one in tree.values())


class _Later:
    """A tensor that becomes an array when its turn comes."""

    def __init__(self, tensor):
        self.tensor = tensor


class _ArrayByArray(pickle.Pickler):
    """Tensors as (name, array). It has no memo, which would keep the bytes of all arrays."""

    def __init__(self, file, protocol: int):
        super().__init__(file, protocol=protocol)
        self.fast = True

    def reducer_override(self, value):
        import paddle

        if isinstance(value, _Later):
            return value.tensor.numpy().__reduce__()
        if isinstance(value, paddle.Tensor):
            return tuple, ((value.name, value.numpy()),)
        return NotImplemented


def _parse(file) -> dict:
    tree = Machine(file, os.fstat(file.fileno()).st_size, _NAMES).run()
    if not isinstance(tree, dict):
        raise Malformed("not a dict of tensors")
    return tree


def _is_wanted(name: str, wanted) -> bool:
    return wanted is None or wanted(name)


def _is_named(value) -> bool:
    """True for a tensor as (generated name, array)."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)


def _widened(array: np.ndarray) -> np.ndarray:
    return widen_bfloat16(array) if array.dtype == np.uint16 else array


def _slices(tree: dict) -> dict[str, tuple[list[str], tuple]]:
    """(names of its slices, shape) of each array that is cut. No slice may serve twice, which would
    take more memory than the file has bytes."""
    found, used = {}, set()
    table = tree.get(_SLICES, {})
    if not isinstance(table, dict):
        raise Malformed(f"{_SLICES} is not a dict")
    for name, info in table.items():
        parts, shape = (info.get(key) for key in ("slices", "OriginShape")) if isinstance(info, dict) else (None, None)
        if not isinstance(parts, list) or not isinstance(shape, (tuple, list)) or not parts:
            raise Malformed(f"{_SLICES} of no known form")
        for part in parts:
            if not isinstance(part, str) or part in used or not isinstance(tree.get(part), Array):
                raise Malformed(f"{_SLICES} names a slice that is not there, or twice")
            used.add(part)
        if not isinstance(name, str) or not all(isinstance(side, int) and side >= 0 for side in shape):
            raise Malformed(f"{_SLICES} of no known form")
        found[name] = parts, tuple(shape)
    return found


def _join(slices: list[Array], shape: tuple, file) -> np.ndarray:
    """The array of its slices, each read and put into its place."""
    if len({one.dtype for one in slices}) != 1 or sum(math.prod(one.shape) for one in slices) != math.prod(shape):
        raise Malformed(f"{_SLICES}: the slices do not make an array of shape {list(shape)}")
    flat, start = np.empty(math.prod(shape), dtype=slices[0].dtype.newbyteorder("=")), 0
    for one in slices:
        values = one.read(file).reshape(-1)
        flat[start : start + values.size] = values
        start += values.size
    return flat.reshape(shape)


def _read_all(value, file, seen: dict, deeper: int):
    """The value with its arrays read. What stands in several places is read once."""
    if not isinstance(value, (dict, list, tuple, Array)):
        return value
    if id(value) in seen:
        return seen[id(value)]
    if not deeper:
        raise Malformed(f"it is nested more than {_DEEPEST} times")
    if isinstance(value, Array):
        result = value.read(file)
    elif isinstance(value, dict):
        result = {key: _read_all(one, file, seen, deeper - 1) for key, one in value.items()}
    else:
        result = type(value)(_read_all(one, file, seen, deeper - 1) for one in value)
    seen[id(value)] = result
    return result
