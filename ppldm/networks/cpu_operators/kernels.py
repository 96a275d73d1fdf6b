"""Normalisations and activations in one pass over memory, forward and backward, and updates of weights, by numba.

Each kernel takes a row of float64: addresses of float32 arrays, which have 48 bits and so are exact, then sizes and
settings, as its docstring lists them. The threads of Paddle share its rows or groups. The order of sums follows from
the shapes, so that no bit depends on the number of threads.
"""

import ctypes
from functools import cache, partial

import numpy as np
from llvmlite import binding, ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from ...utils.machine.cpu import keep_compiled
from .onednn import LOCK, libraries

_FEW = 16  # numbers, enough for one operator
_BLOCK = 128  # elements
_SIZE = 1 << 40  # arrays are not measured
F = np.float32
_inlined = njit(inline="always", fastmath=True, error_model="numpy")
_SHARE = types.void(types.CPointer(types.float64))  # what a thread is called with
_compiler = partial(cfunc, _SHARE, fastmath=True, error_model="numpy")


@intrinsic
def _pointer(typing, address):
    def build(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), build


@intrinsic
def _with_bits(typing, bits):
    def build(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), build


@_inlined
def _at(address, offset):
    """The array that begins `offset` elements behind an address."""
    return carray(_pointer(np.int64(address) + 4 * offset), _SIZE)


_thread = types.ExternalFunction("omp_get_thread_num", types.int32())
_num_threads = types.ExternalFunction("omp_get_num_threads", types.int32())
_set_address = types.ExternalFunction("dnnl_memory_set_data_handle", types.int32(types.int64, types.int64))
_execute = types.ExternalFunction(
    "dnnl_primitive_execute", types.int32(types.int64, types.int64, types.int32, types.int64)
)


@_inlined
def _told(numbers):
    """(the numbers, which of the threads this is, how many there are)."""
    return carray(numbers, _SIZE), np.int64(_thread()), np.int64(_num_threads())


@_inlined
def _share(size, thread, threads):
    """(first, behind the last) of this thread's elements. Blocks are whole, since the last elements of a loop are
    computed one by one, and rounded otherwise than those that are computed side by side."""
    blocks = (size + _BLOCK - 1) // _BLOCK
    return blocks * thread // threads * _BLOCK, min(size, blocks * (thread + 1) // threads * _BLOCK)


@_inlined
def _exp(x):
    """e to the power of x, within 2 units in the last place; x between -87 and 88 (Cephes' expf)."""
    x = x if x > F(-87.0) else F(-87.0)
    x = x if x < F(88.0) else F(88.0)
    power = np.int32(x * F(1.44269504088896341) + (F(0.5) if x > F(0.0) else F(-0.5)))
    r = x - F(power) * F(0.693359375) + F(power) * F(2.12194440e-4)
    p = F(1.9875691500e-4)
    p = p * r + F(1.3981999507e-3)
    p = p * r + F(8.3334519073e-3)
    p = p * r + F(4.1665795894e-2)
    p = p * r + F(1.6666665459e-1)
    p = p * r + F(5.0000001201e-1)
    return (p * r * r + r + F(1.0)) * _with_bits((power + np.int32(127)) << np.int32(23))


@_inlined
def _sigmoid(x):
    return F(1.0) / (F(1.0) + _exp(-x))


@_inlined
def _normal(x):
    """(distribution function, density) of the standard normal at x, within 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    exponential = _exp(F(-0.5) * x * x)
    t = F(1.0) / (F(1.0) + F(0.3275911) * abs(x) * F(0.70710678118654752))
    p = F(1.061405429)
    p = p * t + F(-1.453152027)
    p = p * t + F(1.421413741)
    p = p * t + F(-0.284496736)
    p = p * t + F(0.254829592)
    tail = F(0.5) * p * t * exponential
    tail = tail if tail > F(2.0**-25) else F(0.0)  # as float32's 1 + erf: squares of smaller ones would be too small
    return (F(1.0) - tail if x > F(0.0) else tail), F(0.3989422804014327) * exponential


def group_norm(numbers):
    """x [B, G C, S], y, weight and bias [G C], shift [B, G C] that is added to x, or 0, mean and 1 / deviation [B, G];
    B, G, C, S, epsilon, whether SiLU follows"""
    a, thread, threads = _told(numbers)
    B, G, C, S = int(a[7]), int(a[8]), int(a[9]), int(a[10])
    epsilon, silu, shifted = a[11], a[12] != 0.0, a[4] != 0.0
    weight, bias, shift, means, scales = _at(a[2], 0), _at(a[3], 0), _at(a[4], 0), _at(a[5], 0), _at(a[6], 0)
    for group in range(thread, B * G, threads):
        total = 0.0
        for c in range(group * C, (group + 1) * C):
            x, part = _at(a[0], c * S), F(0.0)
            for i in range(S):
                part += x[i]
            total += part + (S * shift[c] if shifted else F(0.0))
        mean = F(total / (C * S))
        total = 0.0
        for c in range(group * C, (group + 1) * C):
            x, part, middle = _at(a[0], c * S), F(0.0), mean - (shift[c] if shifted else F(0.0))
            for i in range(S):
                part += (x[i] - middle) * (x[i] - middle)
            total += part
        means[group], scales[group] = mean, F(1.0 / np.sqrt(total / (C * S) + epsilon))
        for c in range(group * C, (group + 1) * C):
            x, y, channel = _at(a[0], c * S), _at(a[1], c * S), c % (G * C)
            scale = scales[group] * weight[channel]
            offset = bias[channel] - (mean - (shift[c] if shifted else F(0.0))) * scale
            if silu:
                for i in range(S):
                    z = x[i] * scale + offset
                    y[i] = z * _sigmoid(z)
            else:
                for i in range(S):
                    y[i] = x[i] * scale + offset


def group_norm_back(numbers):
    """x, dy, dx, weight, bias, shift or 0, mean, 1 / deviation, d weight, d bias, d shift; B, G, C, S, whether SiLU"""
    a, thread, threads = _told(numbers)
    B, G, C, S = int(a[11]), int(a[12]), int(a[13]), int(a[14])
    silu, shifted = a[15] != 0.0, a[5] != 0.0
    weight, bias, shift, means, scales = _at(a[3], 0), _at(a[4], 0), _at(a[5], 0), _at(a[6], 0), _at(a[7], 0)
    dweight, dbias, dshift = _at(a[8], 0), _at(a[9], 0), _at(a[10], 0)
    for g in range(thread, G, threads):
        for channel in range(g * C, (g + 1) * C):
            dweight[channel], dbias[channel] = F(0.0), F(0.0)
        for group in range(g, B * G, G):
            first, second, scale = 0.0, 0.0, scales[group]
            for c in range(group * C, (group + 1) * C):
                x, dy, dx, channel = _at(a[0], c * S), _at(a[1], c * S), _at(a[2], c * S), c % (G * C)
                middle, w, b = means[group] - (shift[c] if shifted else F(0.0)), weight[channel], bias[channel]
                sums, products = F(0.0), F(0.0)
                if silu:
                    for i in range(S):
                        normed = (x[i] - middle) * scale
                        z = normed * w + b
                        s = _sigmoid(z)
                        d = dy[i] * s * (F(1.0) + z * (F(1.0) - s))
                        sums += d
                        products += d * normed
                        dx[i] = d
                else:
                    for i in range(S):
                        d = dy[i]
                        sums += d
                        products += d * (x[i] - middle) * scale
                        dx[i] = d
                dbias[channel] += sums
                dweight[channel] += products
                first += sums * w
                second += products * w
            p, q = F(first / (C * S)), F(second / (C * S)) * scale
            for c in range(group * C, (group + 1) * C):
                x, dx, w = _at(a[0], c * S), _at(a[2], c * S), weight[c % (G * C)]
                middle, sums = means[group] - (shift[c] if shifted else F(0.0)), F(0.0)
                for i in range(S):
                    d = scale * (dx[i] * w - p - (x[i] - middle) * q)
                    sums += d
                    dx[i] = d
                if shifted:
                    dshift[c] = sums


def add_bias(numbers):
    """y [B, C, S], bias [C]; B, C, S"""
    a, thread, threads = _told(numbers)
    B, C, S, bias = int(a[2]), int(a[3]), int(a[4]), _at(a[1], 0)
    for row in range(thread, B * C, threads):
        y = _at(a[0], row * S)
        for i in range(S):
            y[i] += bias[row % C]


def softmax_back(numbers):
    """y [R, M], dy, which dx takes the place of; R, M"""
    a, thread, threads = _told(numbers)
    R, M = int(a[2]), int(a[3])
    for r in range(R * thread // threads, R * (thread + 1) // threads):
        y, d, total = _at(a[0], r * M), _at(a[1], r * M), F(0.0)
        for i in range(M):
            total += y[i] * d[i]
        for i in range(M):
            d[i] = y[i] * (d[i] - total)


def layer_norm(numbers):
    """x [R, D], y, weight and bias [D], 0, mean and 1 / deviation [R]; R, D, epsilon, 1 (0: the mean counts as 0)"""
    a, thread, threads = _told(numbers)
    R, D, epsilon, centred = int(a[7]), int(a[8]), a[9], F(a[10])
    weight, bias, means, scales = _at(a[2], 0), _at(a[3], 0), _at(a[5], 0), _at(a[6], 0)
    for r in range(R * thread // threads, R * (thread + 1) // threads):
        x, y = _at(a[0], r * D), _at(a[1], r * D)
        part = F(0.0)
        for i in range(D):
            part += x[i]
        mean = centred * (part / F(D))
        part = F(0.0)
        for i in range(D):
            part += (x[i] - mean) * (x[i] - mean)
        scale = F(1.0 / np.sqrt(part / F(D) + epsilon))
        means[r], scales[r] = mean, scale
        for i in range(D):
            y[i] = (x[i] - mean) * scale * weight[i] + bias[i]


def layer_norm_back(numbers):
    """x, dy, dx, weight, bias, 0, mean, 1 / deviation, d weight, d bias, 0; R, D, 1 (0: as above)"""
    a, thread, threads = _told(numbers)
    R, D, centred = int(a[11]), int(a[12]), F(a[13])
    weight, means, scales = _at(a[3], 0), _at(a[6], 0), _at(a[7], 0)
    for r in range(R * thread // threads, R * (thread + 1) // threads):
        x, dy, dx = _at(a[0], r * D), _at(a[1], r * D), _at(a[2], r * D)
        mean, scale = means[r], scales[r]
        first, second = F(0.0), F(0.0)
        for i in range(D):
            d = dy[i] * weight[i]
            first += d
            second += d * (x[i] - mean)
        p, q = centred * (first / F(D)), second / F(D) * scale * scale
        for i in range(D):
            dx[i] = scale * (dy[i] * weight[i] - p - (x[i] - mean) * q)
    column, behind = _share(D, thread, threads)
    dweight, dbias = _at(a[8], column), _at(a[9], column)
    for i in range(behind - column):
        dweight[i], dbias[i] = F(0.0), F(0.0)
    for r in range(R):
        x, dy = _at(a[0], r * D + column), _at(a[1], r * D + column)
        mean, scale = means[r], scales[r]
        for i in range(behind - column):
            dweight[i] += dy[i] * (x[i] - mean) * scale
        for i in range(behind - column):
            dbias[i] += dy[i]


def geglu(numbers):
    """x [R, 2 D]: values and gates, y [R, D]; R, D"""
    a, thread, threads = _told(numbers)
    R, D = int(a[2]), int(a[3])
    for r in range(R * thread // threads, R * (thread + 1) // threads):
        x, gate, y = _at(a[0], 2 * r * D), _at(a[0], (2 * r + 1) * D), _at(a[1], r * D)
        for i in range(D):
            y[i] = x[i] * gate[i] * _normal(gate[i])[0]


def geglu_back(numbers):
    """x, dy, dx; R, D"""
    a, thread, threads = _told(numbers)
    R, D = int(a[3]), int(a[4])
    for r in range(R * thread // threads, R * (thread + 1) // threads):
        x, gate, dy = _at(a[0], 2 * r * D), _at(a[0], (2 * r + 1) * D), _at(a[1], r * D)
        dx, dgate = _at(a[2], 2 * r * D), _at(a[2], (2 * r + 1) * D)
        for i in range(D):
            g = gate[i]
            c, p = _normal(g)
            d = dy[i]
            dx[i] = d * g * c
            dgate[i] = d * x[i] * (c + g * p)


def gelu(numbers):
    """x, y; their size"""
    a, thread, threads = _told(numbers)
    start, stop = _share(int(a[2]), thread, threads)
    x, y = _at(a[0], start), _at(a[1], start)
    for i in range(stop - start):
        y[i] = x[i] * _normal(x[i])[0]


def gelu_back(numbers):
    """x, dy, dx; their size"""
    a, thread, threads = _told(numbers)
    start, stop = _share(int(a[3]), thread, threads)
    x, dy, dx = _at(a[0], start), _at(a[1], start), _at(a[2], start)
    for i in range(stop - start):
        c, p = _normal(x[i])
        dx[i] = dy[i] * (c + x[i] * p)


def silu(numbers):
    """x, y; their size"""
    a, thread, threads = _told(numbers)
    start, stop = _share(int(a[2]), thread, threads)
    x, y = _at(a[0], start), _at(a[1], start)
    for i in range(stop - start):
        y[i] = x[i] * _sigmoid(x[i])


def silu_back(numbers):
    """x, dy, dx; their size"""
    a, thread, threads = _told(numbers)
    start, stop = _share(int(a[3]), thread, threads)
    x, dy, dx = _at(a[0], start), _at(a[1], start), _at(a[2], start)
    for i in range(stop - start):
        s = _sigmoid(x[i])
        dx[i] = dy[i] * s * (F(1.0) + x[i] * (F(1.0) - s))


def squared_norms(numbers):
    """the results [N], N; of each of N: tensor, size"""
    a, thread, threads = _told(numbers)
    found = _at(a[0], 0)
    for number in range(thread, int(a[1]), threads):
        x, size, total = _at(a[2 + 2 * number], 0), int(a[3 + 2 * number]), 0.0
        for start in range(0, size, 32 * _BLOCK):
            part = F(0.0)
            for i in range(start, min(size, start + 32 * _BLOCK)):
                part += x[i] * x[i]
            total += part
        found[number] = F(total)


def adamw(numbers):
    """rate, factor of the weights, beta and 1 - beta of both moments, epsilon, N; of each of N: weight, gradient, first
    moment, second moment, size"""
    a, thread, threads = _told(numbers)
    rate, kept, beta1, rest1, beta2, rest2, epsilon = F(a[0]), F(a[1]), F(a[2]), F(a[3]), F(a[4]), F(a[5]), F(a[6])
    for row in range(8, 8 + 5 * int(a[7]), 5):
        start, stop = _share(int(a[row + 4]), thread, threads)
        w, g, first, second = _at(a[row], start), _at(a[row + 1], start), _at(a[row + 2], start), _at(a[row + 3], start)
        for i in range(stop - start):
            m = beta1 * first[i] + rest1 * g[i]
            v = beta2 * second[i] + rest2 * g[i] * g[i]
            first[i], second[i] = m, v
            w[i] = kept * w[i] - rate * m / (np.sqrt(v) + epsilon)


def average(numbers):
    """share of the new values, N; of each of N: average, new value, size"""
    a, thread, threads = _told(numbers)
    share = F(a[0])
    for row in range(2, 2 + 3 * int(a[1]), 3):
        start, stop = _share(int(a[row + 2]), thread, threads)
        old, new = _at(a[row], start), _at(a[row + 1], start)
        for i in range(stop - start):
            old[i] += share * (new[i] - old[i])


def spread(numbers):
    """a status that is not 0 where one failed, N, W, O, addresses of W tensors; of each of N parts: its kind, W offsets
    in bytes; of each kind and each of O threads: oneDNN's primitive, stream, arguments, W memories"""
    a, thread, threads = _told(numbers)
    parts, width, owners = int(a[1]), int(a[2]), int(a[3])
    sharing = min(threads, owners)
    for number in range(parts * thread // sharing, parts * (thread + 1) // sharing if thread < sharing else 0):
        part = 4 + width + number * (1 + width)
        own = 4 + width + parts * (1 + width) + (int(a[part]) * owners + thread) * (3 + width)
        for i in range(width):
            _set_address(int(a[own + 3 + i]), int(a[4 + i]) + int(a[part + 1 + i]))
        status = _execute(int(a[own]), int(a[own + 1]), np.int32(width), int(a[own + 2]))
        if status != 0:
            a[0] = status


_EXTERNAL = (  # functions that kernels call, by the number of the library
    *((1, "omp_get_thread_num"), (1, "omp_get_num_threads")),
    *((0, "dnnl_memory_set_data_handle"), (0, "dnnl_primitive_execute")),
)


class Kernel:
    """A kernel that is called with its numbers."""

    def __init__(self, share):
        openmp = libraries()[1]
        for library, name in _EXTERNAL:
            binding.add_symbol(name, ctypes.cast(getattr(libraries()[library], name), ctypes.c_void_p).value)
        self._compiled, self._run = keep_compiled(_compiler, share), openmp.GOMP_parallel
        self._address, self._on_all = ctypes.c_void_p(self._compiled.address), (ctypes.c_uint(0), ctypes.c_uint(0))
        self._numbers = (ctypes.c_double * _FEW)()

    def __call__(self, *numbers: float) -> None:
        with LOCK:
            if len(numbers) > len(self._numbers):
                self._numbers = (ctypes.c_double * len(numbers))()
            self._numbers[: len(numbers)] = numbers
            self.run(self._numbers)

    def run(self, numbers: ctypes.Array) -> None:
        """Called with numbers that somebody holds, and the lock."""
        self._run(self._address, ctypes.byref(numbers), *self._on_all)


@cache
def kernel(name: str) -> Kernel:
    """Compiled, or loaded, at its first use."""
    return Kernel(globals()[name])
