"""The mathematics of the forward process, as pure functions of arrays.

Notation of Ho et al. 2020 (DDPM, arXiv:2006.11239): q(x_t | x_0) = N(sqrt(abar_t) x_0, (1 - abar_t) I), with
abar_t the running product of 1 - beta_t. Velocity is that of Salimans and Ho 2022 (arXiv:2202.00512, appendix D).
"""

from dataclasses import asdict, dataclass

import numpy as np

PREDICTION_TYPES = ("epsilon", "v_prediction")


@dataclass(frozen=True)
class NoiseSchedule:
    """The training noise schedule. The defaults are those of the published LDM (its YAML files).

    `beta_schedule="scaled_linear"` is linear in sqrt(beta), `"linear"` in beta.
    """

    num_train_timesteps: int = 1000
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = "scaled_linear"

    def alphas_cumprod(self) -> np.ndarray:
        """abar_t for t = 0 .. num_train_timesteps - 1, float32, strictly falling within (0, 1)."""
        if self.beta_schedule == "scaled_linear":
            betas = np.linspace(self.beta_start**0.5, self.beta_end**0.5, self.num_train_timesteps) ** 2
        elif self.beta_schedule == "linear":
            betas = np.linspace(self.beta_start, self.beta_end, self.num_train_timesteps)
        else:
            raise ValueError(f"beta_schedule {self.beta_schedule!r} is neither scaled_linear nor linear")
        return np.cumprod(1.0 - betas).astype(np.float32)

    def scheduler_config(self) -> dict:
        """The keyword arguments that make a ppdiffusers scheduler of this schedule."""
        return asdict(self)


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
