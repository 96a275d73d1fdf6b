"""What a diffusion model learns to predict, at which noise levels, and how much each counts: settings of families."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ...config.option import Bounds, Needs, option
from ...utils.errors import ConfigError
from ...utils.rng import Stream

_loss = partial(option, section="model", identity=True)
_ABOVE_0, _NOT_NEGATIVE = Bounds(above=0), Bounds(least=0)
_LOGIT_NORMAL = Needs("--timestep_sampling logit_normal", lambda given: given.timestep_sampling == "logit_normal")
_P2 = Needs("--loss_weighting p2", lambda given: given.loss_weighting == "p2")


@dataclass(kw_only=True)
class ObjectiveSettings:
    """A base of the settings of families that have a `diffusion.process.Process`."""

    prediction_type: str = _loss(
        "epsilon",
        "What the UNet predicts: the noise, the velocity, the picture, or the direction of rectified flow "
        "(docs/methods.md).",
        choices=("epsilon", "v_prediction", "sample", "flow"),
    )
    beta_schedule: str | None = _loss(
        None,
        "Noise schedule (default: the starting model's, else scaled_linear, or cosine for Stable Cascade); "
        "squaredcos_cap_v2 is diffusers'. Flow has none.",
        choices=("scaled_linear", "linear", "squaredcos_cap_v2", "cosine"),
    )
    rescale_betas_zero_snr: bool = _loss(
        False, "A noise schedule that ends in pure noise; needs v_prediction or sample."
    )
    timestep_shift: float | None = _loss(
        None,
        "Move all noise levels: SNR / shift^2; above 1 means more noise, as large pictures need (default: the starting "
        "model's, else 1).",
        bounds=_ABOVE_0,
    )
    shift_base_resolution: int | None = _loss(
        None,
        "The same by the resolution that the noise levels were made for: shift = --resolution / this.",
        bounds=_ABOVE_0,
        unit="pixels",
    )
    timestep_sampling: str = _loss(
        "uniform",
        "How often each noise level is drawn: all alike, or as the sigmoid of a normal number.",
        choices=("uniform", "logit_normal"),
    )
    logit_mean: float = _loss(0.0, "Mean of that normal number; above 0 means more noise.", needs=_LOGIT_NORMAL)
    logit_std: float = _loss(1.0, "Its standard deviation.", bounds=_ABOVE_0, needs=_LOGIT_NORMAL)
    stratified_timesteps: bool = _loss(
        False, "Spread the noise levels of each update evenly, whatever ranks and micro-batches it is cut into."
    )
    noise_offset: float = _loss(
        0.0, "Strength of a noise that is constant over each latent channel; 0 is none.", bounds=_NOT_NEGATIVE
    )
    input_perturbation: float = _loss(
        0.0,
        "Strength of a second noise in what the UNet sees but does not predict (0.1 recommended).",
        bounds=_NOT_NEGATIVE,
    )
    loss_weighting: str | None = _loss(
        None,
        "How much each noise level counts; adaptive learns it (default: min_snr with --snr_gamma, else none).",
        choices=("none", "min_snr", "p2", "adaptive"),
    )
    snr_gamma: float | None = _loss(
        None,
        "Min-SNR loss weighting with this gamma (5.0 recommended, and the default with --loss_weighting min_snr).",
        bounds=_ABOVE_0,
        needs=Needs("--loss_weighting min_snr", lambda given: given.loss_weighting in (None, "min_snr")),
    )
    p2_gamma: float = _loss(1.0, "Exponent of the P2 weights (k + SNR)^-gamma.", bounds=_NOT_NEGATIVE, needs=_P2)
    p2_k: float = _loss(1.0, "The k of the P2 weights.", bounds=_ABOVE_0, needs=_P2)

    def check_objective(self) -> None:
        """Raises ConfigError for combinations that cannot work."""
        if self.prediction_type == "flow":
            for name in ("beta_schedule", "rescale_betas_zero_snr"):
                if getattr(self, name):
                    raise ConfigError(f"--{name} is not for --prediction_type flow, which has no betas; omit it")
        if self.rescale_betas_zero_snr and self.prediction_type == "epsilon":
            raise ConfigError(
                "--rescale_betas_zero_snr with --prediction_type epsilon cannot learn: the last timestep is noise "
                "alone; add --prediction_type v_prediction"
            )
        if self.rescale_betas_zero_snr and self.beta_schedule == "cosine":
            raise ConfigError("--beta_schedule cosine always keeps some signal; use squaredcos_cap_v2 with "
                              "--rescale_betas_zero_snr")  # fmt: skip
        if self.timestep_shift and self.shift_base_resolution:
            raise ConfigError("--timestep_shift and --shift_base_resolution say the same; give one of them")

    def chosen_schedule(self, resolution: int | None) -> dict:
        """What of a process the settings choose for pictures of `resolution`, by the names of model.json; the rest
        comes from the starting model, or is as published."""
        shift = resolution / self.shift_base_resolution if self.shift_base_resolution else self.timestep_shift
        chosen = {"beta_schedule": self.beta_schedule, "timestep_shift": shift}
        return {
            "prediction_type": self.prediction_type,
            "rescale_betas_zero_snr": self.rescale_betas_zero_snr,
            **{name: value for name, value in chosen.items() if value is not None},
        }

    def weighting(self):
        """The weights of the loss (`diffusion.weighting`); None: all are 1."""
        from ...diffusion.weighting import P2, Adaptive, MinSNR

        kind = self.loss_weighting or ("min_snr" if self.snr_gamma else "none")
        return {
            "none": None,
            "min_snr": MinSNR(self.snr_gamma or MinSNR.gamma),
            "p2": P2(self.p2_gamma, self.p2_k),
            "adaptive": Adaptive(),
        }[kind]

    def noise_inputs(self, normals: Callable) -> dict:
        """The inputs of a model (`data.inputs`) that are noise, of `normals(stream)` for its latents. Offset noise:
        crosslabs.org/blog/diffusion-with-offset-noise; a second noise in what the network sees: Ning et al. 2023,
        arXiv:2301.11706."""
        from ...data.inputs import Sum

        noise = normals(Stream.NOISE)
        if self.noise_offset:
            noise = Sum(noise, self.noise_offset, normals(Stream.NOISE_OFFSET, factor=None))
        inputs = {"noise": noise}
        if self.input_perturbation:
            inputs["input_noise"] = Sum("noise", self.input_perturbation, normals(Stream.INPUT_PERTURBATION))
        return inputs

    def level_input(self, num_levels: int):
        """The input of a model (`data.inputs`) that draws its noise level, of so many."""
        from ...data.inputs import Integer, Level

        logit = (self.logit_mean, self.logit_std) if self.timestep_sampling == "logit_normal" else None
        if not (logit or self.stratified_timesteps):
            return Integer(Stream.TIMESTEP, num_levels)
        return Level(Stream.TIMESTEP, num_levels, logit, self.stratified_timesteps)
