"""A diffusion process: noise schedule x prediction target x loss weight x law of noise levels, as pure functions.

Notation of Ho et al. 2020 (DDPM, arXiv:2006.11239): q(x_t | x_0) = N(sqrt(abar_t) x_0, (1 - abar_t) I), with
abar_t the running product of 1 - beta_t. Velocity is that of Salimans and Ho 2022 (arXiv:2202.00512, appendix D).

What schedules have in common is log-SNR_t = ln(abar_t / (1 - abar_t)), the signal-to-noise ratio of x_t (Kingma et al.
2021, arXiv:2107.00630, section 3.1): a schedule is a falling table or function of it, and loss weights are functions of
it. From it abar = sigmoid(log-SNR) and 1 - abar = sigmoid(-log-SNR), where signal and noise have the squares 1 in sum.
"""

from dataclasses import asdict, dataclass, fields

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

    def log_snr(self) -> np.ndarray:
        """log-SNR_t of the same t, float64, strictly falling; -inf where nothing but noise is left."""
        return log_snr(self.alphas_cumprod())

    def scheduler_config(self) -> dict:
        """The keyword arguments that make a ppdiffusers scheduler of this schedule."""
        return asdict(self)


@dataclass(frozen=True)
class Process:
    """What a picture becomes at each noise level, what the network learns to predict there, and how much that counts.

    The law of the levels is that of the published LDM: all timesteps equally often. `snr_gamma`: Min-SNR weights of
    the loss, none by default. Raises ValueError for a target that tells nothing at the last level.
    """

    schedule: NoiseSchedule = NoiseSchedule()
    prediction_type: str = "epsilon"
    snr_gamma: float | None = None

    def __post_init__(self):
        if self.prediction_type not in PREDICTION_TYPES:
            raise ValueError(f"prediction_type {self.prediction_type!r} is not one of {PREDICTION_TYPES}")
        if self.schedule.rescale_betas_zero_snr and self.prediction_type == "epsilon":
            raise ValueError("where nothing but noise is left, the noise tells nothing: zero SNR needs v_prediction")

    @classmethod
    def of(cls, settings: dict, snr_gamma: float | None = None) -> "Process":
        """The process of a stored scheduler's settings; the published values for what they do not name."""
        known = {one.name: settings[one.name] for one in fields(NoiseSchedule) if one.name in settings}
        return cls(NoiseSchedule(**known), settings.get("prediction_type", cls.prediction_type), snr_gamma)

    @property
    def num_levels(self) -> int:
        """How many noise levels there are: timesteps 0 .. num_levels - 1."""
        return self.schedule.num_train_timesteps

    def settings(self) -> dict:
        """What model.json says of it, and a ppdiffusers scheduler takes."""
        return {**self.schedule.scheduler_config(), "prediction_type": self.prediction_type}

    def loss_weights(self) -> np.ndarray | None:
        """The weight of the squared error at each timestep, float32; None where all are 1."""
        if self.snr_gamma is None:
            return None
        return min_snr_weights(self.schedule.alphas_cumprod(), self.snr_gamma, self.prediction_type)


def log_snr(alphas_cumprod: np.ndarray) -> np.ndarray:
    """ln(abar / (1 - abar)), float64; -inf at 0."""
    signal = alphas_cumprod.astype(np.float64)
    with np.errstate(divide="ignore"):
        return np.log(signal) - np.log1p(-signal)


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
