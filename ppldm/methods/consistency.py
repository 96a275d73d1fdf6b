"""A student that draws in few steps: latent consistency distillation, from the model that the training starts from.

    f(x_t, t) = c_skip x_t + c_out x_0(x_t, t)    c_skip = 1 / (4 u^2 + 1), c_out = u / (u^2 + 1/4)^(1/2), u = 10 t
    loss = mean of (d^2 + h^2)^(1/2) - h,         d = f(x_t, t) - f'(x_s, s), s = max(t - skip, 0)

f is to be the same along each way of the teacher's, from noise to a picture: x_s is one step of it (DDIM, or Euler's
of flow) from x_t, guided by w, and f' is a running average of the student. At level 0 f is x_t itself, which holds it
to pictures. Song et al. 2023 (arXiv:2303.01469), consistency distillation; published: FID 3.55 on CIFAR-10 and 6.20 on
ImageNet 64 in one step. Luo et al. 2023 (arXiv:2310.04378), in latents, with guidance, skips and this loss;
published: 2 to 4 steps at 768 pixels after 32 hours of an A100. Here w is no input of the network, so that it stays of
its kind, and t is any level and not one of 50.

The student is drawn by `lcm`: x_0 = f(x_t, t), then x_s = a_s x_0 + s_s (fresh noise), and so on; unguided, since it
has learned w. Those are diffusers' LCMScheduler's steps: of its 50 levels, evenly.
"""

import math
from copy import deepcopy
from dataclasses import dataclass

from ..diffusion.drawing import LCM, Drawing
from ..diffusion.process import FLOW_SAMPLE, add_noise
from ..utils.errors import ConfigError
from .base import Method

_STATELESS = ("patch_masking", "input_perturbation", "loss_weighting", "snr_gamma")
_GUIDANCE, _TEACHER, _TARGET = "guidance", "teacher", "consistency_target"


@dataclass(frozen=True)
class Consistency(Method):
    """guidance: w of the teacher; 0: with which it is drawn by default. spread: w is drawn evenly from guidance -
    spread to guidance + spread, for each sample. skip: by how many levels the teacher steps. decay: of the average; 0
    is the student itself. huber: the h of the loss; 0 is the squared error."""

    guidance: float = 0.0
    spread: float = 0.0
    skip: int = 20
    decay: float = 0.95
    huber: float = 0.001
    is_whole_loss = True

    def problem(self, config):
        if name := next((name for name in _STATELESS if getattr(config, name, None) not in (None, 0, "none")), None):
            return f"--{name} is of the loss that it replaces; omit it"
        if len(config.methods) > 1:
            return "its term is the whole loss; omit the other methods"
        if not config.starts_from_pipeline:
            return "a student needs a trained model to learn from; give it with --model_name_or_path"
        if config.trained != (config.denoiser,):
            how = getattr(config, "how_to_freeze", "train another family")
            return f"a student shares the teacher's captions, so only its {config.denoiser} is trained; {how}"
        for name, least, most in (("guidance", 0, 50), ("skip", 1, 1000), ("decay", 0, 1), ("huber", 0, math.inf)):
            if not least <= getattr(self, name) <= most:
                return f"{name} {getattr(self, name):g} must be from {least} to {most}"
        return None if 0 <= self.spread <= 50 else f"spread {self.spread:g} must be from 0 to 50"

    def inputs(self, model):
        from ..data.inputs import Uniform
        from ..utils.rng import Stream

        return {_GUIDANCE: Uniform(Stream.GUIDANCE)} if self.spread else {}

    def attach(self, model, seed):
        import paddle

        from ..networks.model import Component, freeze

        if model.process.prediction_type == FLOW_SAMPLE:
            raise ConfigError("--methods consistency has no student of flow_sample; start from a model of flow")
        with paddle.utils.unique_name.guard("teacher_"):
            teacher, target = deepcopy(model.denoiser), deepcopy(model.denoiser)
        freeze(teacher)
        freeze(target)
        if self.decay:
            model.add_sublayer(_TARGET, target)
        model.taps[_TEACHER] = teacher, self.guidance or model.usual.guidance_scale
        model.usual = Drawing(4, 1.0, LCM)
        return {f"{model.denoiser_name}_{_TEACHER}": Component(teacher, trained=False)}

    def term(self, model, step):
        import paddle

        from ..diffusion.samplers import consistency

        process, below = model.process, (step.timesteps - self.skip).clip(min=0)
        noisy = add_noise(step.latents, step.noise, step.scales)
        told, target = self._conditions(model, step), getattr(model, _TARGET, model.denoiser)
        with paddle.no_grad():
            guided = self._guided(model, step, noisy, told)
            picture = process.picture(guided, noisy, step.scales)
            scales = process.scales(_column(model.levels[below]))
            noise = (noisy - step.scales[0] * picture) / step.scales[1]
            onward = add_noise(picture, noise, scales)
            if self.decay:
                target.eval()
            predicted = self._denoise(model, onward, below, target, told[0])
            aim = consistency(process, predicted, onward, scales, _column(below))
        made = consistency(process, step.predicted, noisy, step.scales, _column(step.timesteps))
        square = (made - aim).square()
        return ((square + self.huber**2).sqrt() - self.huber if self.huber else square).mean()

    def num_sums(self, model):
        return int(self.decay > 0)

    def sums(self, model, step):
        import paddle

        return paddle.zeros([1])  # so that `keep` is called

    def keep(self, model, sums):
        import paddle

        with paddle.no_grad():
            for mean, one in zip(getattr(model, _TARGET).parameters(), model.denoiser.parameters(), strict=True):
                mean.lerp_(one.astype(mean.dtype), 1.0 - self.decay)

    def _conditions(self, model, step) -> tuple[dict, dict]:
        """What the network takes of the captions, and of empty ones."""
        import paddle

        told, count = step.told, len(step.timesteps)
        sizes = model.size_condition(told.get("sizes"))
        said = model.condition(told["input_ids"], told.get("text_embeddings"))
        unsaid = model.condition(paddle.to_tensor(model.tokenizer.encode([""])))
        unsaid = {name: None if one is None else one.expand([count, *one.shape[1:]]) for name, one in unsaid.items()}
        return said | sizes, unsaid | sizes

    def _guided(self, model, step, noisy, told):
        """The teacher's prediction."""
        teacher, scale = model.taps[_TEACHER]
        if self.spread:
            scale = scale + self.spread * (2.0 * _column(model.taps[_GUIDANCE]) - 1.0)
        said = self._denoise(model, noisy, step.timesteps, teacher, told[0])
        if not self.spread and scale == 1:
            return said
        unsaid = self._denoise(model, noisy, step.timesteps, teacher, told[1])
        return unsaid + scale * (said - unsaid)

    def _denoise(self, model, noisy, timesteps, network, told):
        times = model.process.times(timesteps, model.levels[timesteps])
        return model.denoise(noisy, times, by=network, **told).astype("float32")


def _column(values):
    """[B] to float32 [B, 1, 1, 1]."""
    return values.astype("float32").reshape([-1, 1, 1, 1])


METHOD = Consistency
