"""AdamW whose two moments are kept in 8 bits: `--optimizer adamw8bit`, or `--use_8bit_adam`.

A moment lies in blocks of 256 numbers. Each block has its largest magnitude a in float32, and a code of 8 bits for each
number x: the number of that value of a fixed map, sorted, which is nearest to x / a.

    m <- b1 a1 map[c1] + (1 - b1) G          v <- b2 a2 map[c2] + (1 - b2) G^2
    W <- W (1 - rate decay) - rate (m / (1 - b1^n)) / (sqrt(v / (1 - b2^n)) + epsilon)
    a1, c1 <- blocks of m; a2, c2 <- blocks of v, which has no sign

The map is the dynamic tree of Dettmers 2016 (arXiv:1511.04561), as Dettmers et al. 2022 (arXiv:2110.02861) take it:
seven decades below 1, the middles of 2^i equal parts in the i-th of them, of both signs; without a sign twice as many;
and 0 and 1. So a moment is off by at most 0.7 % of the largest of its block, a squared one by 0.35 %. A parameter of
fewer than 4,096 numbers keeps AdamW's own moments, as published.

Published: a quarter of the state's bytes, at the same results on language models, translation and pictures.

A number takes 2 bytes of state and 8 for each 256, in place of 8. All is computed in float32, a parameter at a time, by
Paddle's operations: on a CPU that takes much longer than AdamW's one pass, 0.3 s for a million parameters.
"""

from collections.abc import Mapping
from functools import cache

import numpy as np
import paddle

BLOCK = 256  # numbers; 2,048 in the paper, and 256 in its authors' own code since
SMALLEST = 4096  # numbers of a parameter whose moments are kept in 8 bits
_DECADES = 7
_LARGEST = ("absmax1", "absmax2")  # names of the state beside AdamW's


def dynamic_map(signed: bool) -> np.ndarray:
    """The 256 values that codes stand for, float32, sorted, from -1 (or 0) to 1."""
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = np.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1, dtype=np.float32)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade + 1 - _DECADES)
        found += [*middles, *(-middles if signed else ())]
    return np.sort(np.float32(found))


@cache
def _tables(signed: bool) -> tuple:
    """(the map, the middles between its values) as tensors."""
    values = dynamic_map(signed)
    return paddle.to_tensor(values), paddle.to_tensor((values[1:] + values[:-1]) / 2)


def quantized(moment, signed: bool) -> tuple:
    """(codes uint8 [blocks, BLOCK], largest magnitudes float32 [blocks, 1]) of a moment, float32 [blocks, BLOCK]."""
    largest = moment.abs().max(axis=1, keepdim=True)
    shares = moment / paddle.where(largest > 0, largest, paddle.ones_like(largest))
    return paddle.searchsorted(_tables(signed)[1], shares, out_int32=True).astype("uint8"), largest


def dequantized(codes, largest, signed: bool):
    """The moment that these stand for, float32 [blocks, BLOCK]."""
    return paddle.gather(_tables(signed)[0], codes.astype("int32").flatten()).reshape(codes.shape) * largest


def find_large(parameters: Mapping) -> set[str]:
    """Of named parameters, by Paddle's name, those whose moments are kept in 8 bits."""
    return {parameter.name for parameter in parameters.values() if parameter.size >= SMALLEST}


class AdamW8bit:
    """Mixin before a kind of `paddle.optimizer.AdamW`, which updates all that is not `in_8_bits`."""

    in_8_bits: set[str]

    def _add_moments_pows(self, parameter):
        """AdamW's state of a parameter, or of its float32 master; codes and largest magnitudes of a large one."""
        if parameter.name.partition("_fp32_master_")[0] not in self.in_8_bits:
            return super()._add_moments_pows(parameter)
        blocks = -(-parameter.size // BLOCK)
        for name, largest in zip((self._moment1_acc_str, self._moment2_acc_str), _LARGEST, strict=True):
            self._add_accumulator(name, parameter, dtype=paddle.uint8, shape=[blocks, BLOCK])
            self._add_accumulator(largest, parameter, dtype=paddle.float32, shape=[blocks, 1])
        for name, beta in ((self._beta1_pow_acc_str, self._beta1), (self._beta2_pow_acc_str, self._beta2)):
            self._add_accumulator(name, parameter, paddle.float32, fill_value=beta, shape=[1], device="cpu")

    def _append_optimize_op(self, block, param_and_grad):
        parameter, gradient = param_and_grad
        if parameter.name not in self.in_8_bits:
            return super()._append_optimize_op(block, param_and_grad)
        gradient = gradient.astype("float32").flatten()
        gradient = paddle.nn.functional.pad(gradient, [0, -parameter.size % BLOCK]).reshape([-1, BLOCK])
        moments, corrections = [], []
        for number, value in enumerate((gradient, gradient.square())):
            names = (self._moment1_acc_str, self._moment2_acc_str)[number], _LARGEST[number]
            state = [self._get_accumulator_master(name, parameter) for name in names]
            beta, power_name = ((self._beta1, self._beta1_pow_acc_str), (self._beta2, self._beta2_pow_acc_str))[number]
            power = self._get_accumulator_master(power_name, parameter)
            moments.append(dequantized(*state, number == 0) * beta + value * (1.0 - beta))
            for held, new in zip(state, quantized(moments[-1], number == 0), strict=True):
                paddle.assign(new, held)
            corrections.append(1.0 - float(power))
            power.scale_(beta)
        update = moments[0] / ((moments[1] / corrections[1]).sqrt() + self._epsilon)
        rate = self.get_lr() * parameter.optimize_attr["learning_rate"]
        decays = self._apply_decay_param_fun is None or self._apply_decay_param_fun(parameter.name)
        weight = self._master_weights.get(parameter.name, parameter)
        weight.scale_(1.0 - rate * self._weight_decay * decays)
        weight.subtract_(update.flatten()[: parameter.size].reshape(weight.shape) * (rate / corrections[0]))
        if weight is not parameter:
            paddle.assign(weight.astype(parameter.dtype), parameter)


def adamw8bit(kind: type, parameters: Mapping) -> type:
    """A kind of AdamW with moments in 8 bits, of the named `parameters`."""
    return type(f"{kind.__name__}8bit", (AdamW8bit, kind), {"in_8_bits": find_large(parameters)})
