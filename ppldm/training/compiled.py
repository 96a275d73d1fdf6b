"""`--to_static`: a model's `predict` as one graph, which Paddle runs as a whole while training.

Paddle makes a graph in three ways. It rewrites a function's syntax tree, which fails at the UNet, or its bytecode,
which takes minutes; or it runs the function once on symbols that have the shapes of the batch, and keeps the operations
that it meets. That is what happens here: the model's Python code is called as it is, and may not depend on the values
of tensors. The batches of a run have one shape, so that there is one graph.

The graph works on the model's own parameters. Nothing else changes: drawing, validating and exporting call the modules.
"""

import time
import warnings

import paddle

from ..utils.log import get_logger
from ..utils.rank_watch import barrier
from ..utils.world import World


def compile_predict(model):
    """`model.predict` as a function that Paddle compiles when it is called, for the shapes and types of the call."""

    def predict(noisy, timesteps, input_ids):
        return model.predict(noisy, timesteps, input_ids)

    # Neither it nor what it calls is rewritten. Without CINN: the kernels are those that run when it is not compiled.
    return paddle.jit.to_static(paddle.jit.not_to_static(predict), full_graph=True, backend=None)


class CompiledPrediction:
    """`model.predict`, compiled. The log says so at the first call, at which the ranks wait for one another."""

    def __init__(self, model, world: World):
        self._predict, self._world, self._is_ready = compile_predict(model), world, False

    def __call__(self, noisy, timesteps, input_ids):
        if self._is_ready:
            return self._predict(noisy, timesteps, input_ids)
        get_logger().info("--to_static: compiling what is trained, which takes seconds, on a busy machine minutes")
        started = time.perf_counter()
        with warnings.catch_warnings():
            # The model's code asks symbols for what only tensors know, and does without.
            warnings.filterwarnings("ignore", "Tensor do not have '\\w+' interface for pir graph mode")
            predicted = self._predict(noisy, timesteps, input_ids)
        get_logger().info("--to_static: compiled in %.1f s", time.perf_counter() - started)
        self._is_ready = True
        barrier(self._world)
        return predicted
