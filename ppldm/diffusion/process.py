"""The mathematics of the forward process, as pure functions of arrays.

Notation of Ho et al. 2020 (DDPM, arXiv:2006.11239): q(x_t | x_0) = N(sqrt(abar_t) x_0, (1 - abar_t) I), with
abar_t the running product of 1 - beta_t. Velocity is that of Salimans and Ho 2022 (arXiv:2202.00512, appendix D).
SNR_t = abar_t / (1 - abar_t) is the signal-to-noise ratio of x_t.
"""

from dataclasses import asdict, dataclass

import numpy as np

PREDICTION_TYPES = ("epsilon", "v_prediction")
BETA_SCHEDULES = ("scaled_linear", "linear")
TIMESTEP_SPACINGS = ("leading", "trailing", "linspace")

# DDIM as the published model samples: no clipping of x_0, the last step to abar_0, one step of offset.
PUBLISHED_SAMPLING = {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}
# What a stored scheduler says of sampling, beside its noise schedule.
SAMPLING_KEYS = (
    *(*PUBLISHED_SAMPLING, "timestep_spacing", "thresholding", "dynamic_thresholding_ratio"),
    *("clip_sample_range", "sample_max_value"),
)


@dataclass(frozen=True)
class NoiseSchedule:
    """The training noise schedule. The defaults are those of the published LDM (its YAML files).

    `beta_schedule="scaled_linear"` is linear in sqrt(beta), `"linear"` in beta. `rescale_betas_zero_snr` shifts and
    scales sqrt(abar) so that the last one is 0 and the first one stays: algorithm 1 of Lin et al. 2023
    (arXiv:2305.08891); x_T is then noise alone, from which only the velocity tells anything.
    """

    num_train_timesteps: int = 1000
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = "scaled_linear"
    rescale_betas_zero_snr: bool = False

    def alphas_cumprod(self) -> np.ndarray:
        """abar_t for t = 0 .. num_train_timesteps - 1, float32, strictly falling within (0, 1), or to 0 exactly."""
        if self.beta_schedule == "scaled_linear":
            betas = np.linspace(self.beta_start**0.5, self.beta_end**0.5, self.num_train_timesteps) ** 2
        elif self.beta_schedule == "linear":
            betas = np.linspace(self.beta_start, self.beta_end, self.num_train_timesteps)
        else:
            raise ValueError(f"beta_schedule {self.beta_schedule!r} is not one of {BETA_SCHEDULES}")
        alphas_cumprod = np.cumprod(1.0 - betas)
        if self.rescale_betas_zero_snr:
            roots = np.sqrt(alphas_cumprod)
            alphas_cumprod = ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2
        return alphas_cumprod.astype(np.float32)

    def scheduler_config(self) -> dict:
        """The keyword arguments that make a ppdiffusers scheduler of this schedule."""
        return asdict(self)


def sampling_settings(scheduler: dict) -> dict:
    """The settings of a stored scheduler that say how to sample, those that it has."""
    return {name: scheduler[name] for name in SAMPLING_KEYS if name in scheduler}


def add_noise(latents, noise, alpha_bar):
    """x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise. `alpha_bar` broadcasts against `latents`: [B, 1, 1, 1]."""
    return alpha_bar**0.5 * latents + (1.0 - alpha_bar) ** 0.5 * noise


def training_target(latents, noise, alpha_bar, prediction_type: str):
    """What the network learns to predict: the noise, or the velocity sqrt(abar_t) noise - sqrt(1 - abar_t) x_0."""
    if prediction_type == "epsilon":
        return noise
    if prediction_type == "v_prediction":
        return alpha_bar**0.5 * noise - (1.0 - alpha_bar) ** 0.5 * latents
    raise ValueError(f"prediction_type {prediction_type!r} is not one of {PREDICTION_TYPES}")


def min_snr_weights(alphas_cumprod: np.ndarray, gamma: float, prediction_type: str) -> np.ndarray:
    """The weight of the squared error at each timestep, float32: min(SNR, gamma) by SNR, or by SNR + 1 for velocity.

    Both amount to the weight min(SNR, gamma) on the error of x_0: Hang et al. 2023 (arXiv:2303.09556, section 3.4).
    Written in abar, so that neither end divides by 0: min(1, gamma (1 - abar) / abar) and min(abar, gamma (1 - abar)).
    """
    signal = alphas_cumprod.astype(np.float64)
    if prediction_type == "epsilon":
        return np.minimum(1.0, gamma * (1.0 - signal) / signal).astype(np.float32)
    return np.minimum(signal, gamma * (1.0 - signal)).astype(np.float32)
