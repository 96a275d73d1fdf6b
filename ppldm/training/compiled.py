"""`--to_static`: a model's `predict` as one graph, which Paddle runs as a whole while training.

Paddle could rewrite a function's syntax tree, which fails at the UNet, or its bytecode, which takes minutes. Here it
runs the function once on symbols that have the shapes of the batch, and keeps the operations that it meets: the model's
Python code is called as it is, and may not depend on the values of tensors. There is one graph for each shape of a
batch. It works on the model's own parameters; drawing, validating and exporting call the modules.
"""

import inspect
import time
import warnings

import paddle

from ..utils.log import get_logger
from ..utils.processes.ranks import World, barrier


def compile_predict(model):
    """`model.predict` as a function that Paddle compiles when it is called, for the shapes and types of the call."""

    def predict(*inputs, **given):
        return model.predict(*inputs, **given)

    predict.__signature__ = inspect.signature(model.predict)  # Paddle asks for the names of arguments
    # Neither it nor what it calls is rewritten. Without CINN: the kernels are those that run when it is not compiled.
    return paddle.jit.to_static(paddle.jit.not_to_static(predict), full_graph=True, backend=None)


class CompiledPrediction:
    """`model.predict`, compiled. The log says so at the first call for a shape; at the very first, which is slowest,
    the ranks wait for one another."""

    def __init__(self, model, world: World):
        self._predict, self._world, self._shapes = compile_predict(model), world, set()

    def __call__(self, *inputs, **given):
        shape = (*given, *(tuple(one.shape) for one in (*inputs, *given.values())))
        if shape in self._shapes:
            return self._predict(*inputs, **given)
        get_logger().info("--to_static: compiling what is trained, which takes seconds, on a busy machine minutes")
        started = time.perf_counter()
        with warnings.catch_warnings():
            # The model's code asks symbols for what only tensors know, and does without.
            warnings.filterwarnings("ignore", "Tensor do not have '\\w+' interface for pir graph mode")
            predicted = self._predict(*inputs, **given)
        get_logger().info("--to_static: compiled in %.1f s", time.perf_counter() - started)
        if not self._shapes:
            barrier(self._world)
        self._shapes.add(shape)
        return predicted
