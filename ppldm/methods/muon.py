"""Muon for the matrices inside a network, AdamW for all else: `--optimizer muon`.

A matrix W [r, c] with gradient G has a momentum M alone, and its update has singular values of about 1:

    M <- m M + (1 - m) G          U = m M + (1 - m) G (Nesterov), or M
    X <- U / |U|_F                five times: X <- (a I + b A + c A A) X, where A = X X^T
    W <- W - rate (decay W + 0.2 sqrt(max(r, c)) X)

The factors P = a I + b A + c A A are polynomials in the first A alone, so the five are multiplied as matrices [r, r],
with A <- P A P, and X once by their product: half to a third of the time for a convolution of 3 x 3, as much for r = c.

Jordan et al. 2024, kellerjordan.github.io/posts/muon: the iteration, its coefficients, momentum 0.95 by Nesterov; a
convolution is the matrix of its rows [out, in * height * width], and the queries, keys and values that one layer makes
are a matrix each; embeddings, input and output layers, gains and biases are AdamW's. Singular values that are above
0.002 of the norm end between 0.68 and 1.21. Liu et al. 2025, arXiv:2502.16982, eq. 4: the factor, by which an update
has the root mean square of AdamW's, so that rate and decay are the same for both.

Published: 18 % lower final loss than AdamW of a UNet of 23 M parameters (Schaipp 2025, arXiv:2510.19376), FID 15.55 in
place of 18.20 of a text-to-image transformer of 1.2 B (PRX, part 2, 2026).

Transposed matrices give transposed updates, so Paddle's layout of linear layers, [in, out], changes nothing. The
momentum is AdamW's first moment by name, so checkpoints and shares of ranks keep it as they keep that one. All is
computed in float32 on every device, one matrix after another: stacks of equal shapes take as long on a CPU, and their
bits would depend on which of them a rank has.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import paddle

from ..networks.cpu_operators import operators
from ..networks.cpu_operators.layers import operators_are_usable
from ..weights.components import is_linear_weight

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_RMS = 0.2  # of AdamW's updates, about
_SMALLEST_NORM = 1e-7  # added to the norm, as published
# Layers that read or write what is no hidden state, by the first part of a name in each kind of network, or any part.
_ENDS = {"pos_embed", "x_embedder", "patch_embed", "proj_out", "decoder_pred", "final_layer"}  # transformers
_ENDS |= {"in_block", "out_block", "embedding", "effnet_mapper", "pixels_mapper", "clf"}  # Stable Cascade
_ENDS_ANYWHERE = {"conv_in", "conv_out"}  # UNet, ControlNet, autoencoder
_SIDE_BY_SIDE = {"qkv": 3, "kv_linear": 2}  # matrices in the weight of a linear layer


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon updates the parameter with this name in its network: the weight of a linear layer or a convolution,
    or of several experts, inside of it. A convolution of each channel alone is none, and no adapter's factor."""
    parts = name.split(".")
    if len(shape) < 2 or min(shape[:2]) < 2 or parts[0] in _ENDS or _ENDS_ANYWHERE.intersection(parts):
        return False
    if parts[:2] == ["main", "0"]:  # a discriminator's first layer; its last has one channel
        return False
    return is_linear_weight(name, np.empty([0, 0])) if len(shape) == 2 else len(shape) == 3 or parts[-1] == "weight"


def find_matrices(parameters: Mapping) -> dict[str, int]:
    """Of named parameters, by Paddle's name: how many matrices lie side by side in each that Muon updates."""
    return {
        parameter.name: _SIDE_BY_SIDE.get(name.split(".")[-2], 1) if parameter.ndim == 2 else 1
        for name, parameter in parameters.items()
        if is_hidden_matrix(name.partition(".")[2], parameter.shape)
    }


def orthogonalized(matrix, product=paddle.matmul):
    """U V^T, nearly, of a matrix U S V^T [r, c] float32; zeros stay zeros. product: what multiplies two matrices."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalized(matrix.T, product).T
    a, b, c = COEFFICIENTS
    x = matrix / (matrix.square().sum().sqrt() + _SMALLEST_NORM)
    first, gram, whole = a * paddle.eye(x.shape[0]), product(x, x.T), None
    for step in range(1, _STEPS + 1):
        factor = first + b * gram + c * product(gram, gram)
        whole = factor if whole is None else product(factor, whole)
        if step < _STEPS:
            gram = product(product(factor, gram), factor)
    return product(whole, x)


def direction(update, side_by_side: int = 1, product=paddle.matmul):
    """What is subtracted, times the rate, for a parameter's `update`; the same shape, float32."""
    if update.ndim == 3:
        return paddle.stack([direction(one, product=product) for one in update])
    if side_by_side > 1:
        return paddle.concat([direction(one, product=product) for one in update.chunk(side_by_side, 1)], 1)
    matrix = update.flatten(1)
    return (orthogonalized(matrix, product) * (_RMS * max(matrix.shape) ** 0.5)).reshape(update.shape)


class Muon:
    """Mixin before a kind of `paddle.optimizer.AdamW`, which updates all that is not among `matrices`."""

    matrices: dict[str, int]  # `find_matrices`
    momentum: float
    nesterov: bool
    product: Callable

    def _add_moments_pows(self, parameter):
        """AdamW's state of a parameter, or of its float32 master; one moment of a matrix."""
        if parameter.name.partition("_fp32_master_")[0] not in self.matrices:
            return super()._add_moments_pows(parameter)
        return self._add_accumulator(self._moment1_acc_str, parameter, dtype=paddle.float32)

    def _append_optimize_op(self, block, param_and_grad):
        parameter, gradient = param_and_grad
        if parameter.name not in self.matrices:
            return super()._append_optimize_op(block, param_and_grad)
        gradient = gradient.astype("float32")
        moment = self._get_accumulator_master(self._moment1_acc_str, parameter)
        moment.lerp_(gradient, 1.0 - self.momentum)
        update = gradient.lerp(moment, self.momentum) if self.nesterov else moment
        rate = self.get_lr() * parameter.optimize_attr["learning_rate"]
        decays = self._apply_decay_param_fun is None or self._apply_decay_param_fun(parameter.name)
        weight = self._master_weights.get(parameter.name, parameter)
        weight.scale_(1.0 - rate * self._weight_decay * decays)
        weight.subtract_(direction(update, self.matrices[parameter.name], self.product) * rate)
        if weight is not parameter:
            paddle.assign(weight.astype(parameter.dtype), parameter)


def muon(kind: type, parameters: Mapping, momentum: float, nesterov: bool) -> type:
    """A kind of AdamW, by Muon for the matrices among the named `parameters`."""
    product = partial(operators.linear, bias=None) if operators_are_usable() else paddle.matmul
    own = {"matrices": find_matrices(parameters), "momentum": momentum, "nesterov": nesterov}
    return type(f"Muon{kind.__name__}", (Muon, kind), {**own, "product": staticmethod(product)})
