"""AdamW that updates all parameters in a few kernel launches in place of one for each parameter."""

import paddle
from paddle import _C_ops

_CHUNK_SIZE = 65536  # elements that a block of the GPU kernel takes at a time, as in Paddle's own tests of it


class FusedAdamW(paddle.optimizer.AdamW):
    """`paddle.optimizer.AdamW` through Paddle's `fused_adam_` kernel: the same formula, state and names of state.

    One launch for the parameters of one type, learning rate and weight decay. Paddle 3.3 has the kernel, but no
    optimizer that uses it. Sums are ordered as in AdamW; the results differ in the last bits at most.
    """

    def _create_optimization_pass(self, *args, **kwargs):
        self._groups: dict[tuple, list] = {}
        done = super()._create_optimization_pass(*args, **kwargs)
        for (_, _, with_master, with_decay, _), (rate, *members) in self._groups.items():
            self._update(rate, [list(column) for column in zip(*members, strict=True)], with_master, with_decay)
        self._groups = {}
        return done

    def _append_optimize_op(self, block, param_and_grad):
        """AdamW's own, put off until all parameters are known."""
        if isinstance(param_and_grad, dict):
            param_and_grad = self._update_param_group(param_and_grad)
        parameter, gradient = param_and_grad
        with_master = self._multi_precision and self._is_dtype_fp16_or_bf16(parameter.dtype)
        with_decay = self._apply_decay_param_fun is None or self._apply_decay_param_fun(parameter.name)
        ratio = parameter.optimize_attr["learning_rate"]
        # Of those that began at one update: the kernel takes the powers of its first parameter for all.
        key = (parameter.dtype, ratio, with_master, with_decay, parameter.optimize_attr.get("clip_group"))
        names = (self._moment1_acc_str, self._moment2_acc_str, self._beta1_pow_acc_str, self._beta2_pow_acc_str)
        state = [self._get_accumulator_master(name, parameter) for name in names]
        group = self._groups.setdefault(key, [self._create_param_lr(param_and_grad)])
        group.append((parameter, gradient, *state, self._master_weights.get(parameter.name)))

    def _update(self, rate, columns: list[list], with_master: bool, with_decay: bool) -> None:
        parameters, gradients, first, second, power1, power2, masters = columns
        _C_ops.fused_adam_(
            *(parameters, gradients, rate, first, second, None, power1, power2, masters if with_master else None, None),
            *(self._beta1, self._beta2, self._epsilon, _CHUNK_SIZE, self._weight_decay if with_decay else 0.0),
            *(True, with_master, False, False),  # decoupled decay, float32 masters, powers of their own, no AMSGrad
        )
