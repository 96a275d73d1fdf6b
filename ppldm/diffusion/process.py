"""A diffusion process: noise levels x prediction target x loss weight, as pure functions.

x_t = a_t x_0 + s_t noise. Of a `NoiseSchedule`, in the notation of Ho et al. 2020 (DDPM, arXiv:2006.11239), a_t**2 is
abar_t, the running product of 1 - beta_t, and s_t**2 = 1 - abar_t. Of flow a_t = 1 - sigma_t and
s_t = sigma_t: straight lines. What is predicted is a file of `methods/targets`, how much its squared error counts at a
level one of `methods/weights`.

What they have in common is log-SNR_t = ln(a_t**2 / s_t**2), the signal-to-noise ratio of x_t (Kingma et al. 2021,
arXiv:2107.00630, section 3.1). Larger pictures lose their content at a larger share of noise, for neighbouring pixels
say the same: a shift m divides SNR by m**2, m the side by the one that the levels were made for (Hoogeboom et al. 2023,
arXiv:2301.11093, section 3.1; Esser et al. 2024, arXiv:2403.03206, section 5.3.2, for flow).
"""

from dataclasses import asdict, dataclass, fields

import numpy as np

from ..methods import load, names

FLOW, FLOW_SAMPLE = "flow", "flow_sample"
PREDICTION_TYPES = names("targets", "epsilon", "v_prediction", "sample", FLOW, FLOW_SAMPLE)
FLOWS = tuple(name for name in PREDICTION_TYPES if name.startswith(FLOW))
BETA_SCHEDULES = ("scaled_linear", "linear", "squaredcos_cap_v2", "cosine")
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

    `beta_schedule`: "scaled_linear" is linear in sqrt(beta), "linear" in beta. "squaredcos_cap_v2" is the cosine of
    Nichol and Dhariwal 2021 (arXiv:2102.09672, equation 17), each beta at most 0.999; "cosine" the same without that,
    and abar kept within 1e-4 .. 0.9999, as Stable Cascade was trained. `rescale_betas_zero_snr` shifts and scales
    sqrt(abar) so that the last one is 0 and the first one stays: algorithm 1 of Lin et al. 2023 (arXiv:2305.08891); x_T
    is then pure noise, from which epsilon tells nothing. `timestep_shift`: the m by whose square SNR is divided, last.
    """

    num_train_timesteps: int = 1000
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = "scaled_linear"
    rescale_betas_zero_snr: bool = False
    timestep_shift: float = 1.0

    def alphas_cumprod(self) -> np.ndarray:
        """abar_t for t = 0 .. num_train_timesteps - 1, float32, falling within (0, 1), or to 0 exactly."""
        return self._signal().astype(np.float32)

    def _signal(self) -> np.ndarray:
        """abar_t, float64."""
        if self.beta_schedule == "scaled_linear":
            betas = np.linspace(self.beta_start**0.5, self.beta_end**0.5, self.num_train_timesteps) ** 2
        elif self.beta_schedule == "linear":
            betas = np.linspace(self.beta_start, self.beta_end, self.num_train_timesteps)
        elif self.beta_schedule in BETA_SCHEDULES:
            cosine = np.cos((np.linspace(0, 1, self.num_train_timesteps + 1) + 0.008) / 1.008 * np.pi / 2) ** 2
            betas = np.minimum(1.0 - cosine[1:] / cosine[:-1], 0.999)
        else:
            raise ValueError(f"beta_schedule {self.beta_schedule!r} is not one of {BETA_SCHEDULES}")
        signal = np.cumprod(1.0 - betas)
        if self.beta_schedule == "cosine":
            signal = np.clip(cosine[1:] / cosine[0], 1e-4, 0.9999)
        if self.rescale_betas_zero_snr:
            roots = np.sqrt(signal)
            signal = ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2
        if self.timestep_shift != 1:
            signal = signal / (signal + self.timestep_shift**2 * (1.0 - signal))
        return signal

    def log_snr(self) -> np.ndarray:
        """log-SNR_t of the same t, float64, falling; -inf where nothing but noise is left."""
        signal = self.alphas_cumprod().astype(np.float64)
        return log_snr(signal, 1.0 - signal)

    def ratios(self) -> np.ndarray:
        """The u in 0 .. 1 at which the cosine schedule has abar_t, float64: what the networks of Stable Cascade are
        told of a level (arXiv:2102.09672, equation 17, solved for t / T)."""
        first = np.cos(0.008 / 1.008 * np.pi / 2) ** 2
        return np.arccos((self._signal() * first) ** 0.5) / (np.pi / 2) * 1.008 - 0.008

    def sigmas(self) -> np.ndarray:
        """The share of noise at each level of flow, float32, rising to 1: evenly spaced, and shifted."""
        sigmas = np.arange(1, self.num_train_timesteps + 1) / self.num_train_timesteps
        return (self.timestep_shift * sigmas / (1.0 + (self.timestep_shift - 1.0) * sigmas)).astype(np.float32)

    def scheduler_config(self) -> dict:
        """Keyword arguments of ppdiffusers' and diffusers' schedulers: all betas where they have no name for them."""
        config = asdict(self)
        if config.pop("timestep_shift") != 1 or self.beta_schedule == "cosine":
            signal = self._signal()
            config["trained_betas"] = (1.0 - signal / np.append(1.0, signal[:-1])).tolist()
        return config


@dataclass(frozen=True)
class Process:
    """What a picture becomes at each noise level, what the network learns to predict there, and how much that counts.
    Which levels are drawn how often is what a batch must hold (`data.inputs`). Of flows only the number of levels and
    the shift of `schedule` say anything. Raises ValueError for a target that tells nothing at the last level."""

    schedule: NoiseSchedule = NoiseSchedule()
    prediction_type: str = "epsilon"
    weighting: object | None = None  # of `methods.weights`; None: all levels alike

    def __post_init__(self):
        if self.prediction_type not in PREDICTION_TYPES:
            raise ValueError(f"prediction_type {self.prediction_type!r} is not one of {PREDICTION_TYPES}")
        if self.schedule.rescale_betas_zero_snr and self.prediction_type == "epsilon":
            raise ValueError("where nothing but noise is left, the noise tells nothing: zero SNR needs v_prediction")

    @classmethod
    def of(cls, settings: dict, weighting: object | None = None) -> "Process":
        """The process of a stored scheduler's settings; the published values for what they do not name."""
        known = {one.name: settings[one.name] for one in fields(NoiseSchedule) if one.name in settings}
        return cls(NoiseSchedule(**known), settings.get("prediction_type", cls.prediction_type), weighting)

    @property
    def num_levels(self) -> int:
        """How many noise levels there are: timesteps 0 .. num_levels - 1."""
        return self.schedule.num_train_timesteps

    @property
    def is_flow(self) -> bool:
        """Whether its x_t lie on straight lines between x_0 and noise."""
        return self.prediction_type in FLOWS

    def settings(self) -> dict:
        """What model.json says of it."""
        settings = {**asdict(self.schedule), "prediction_type": self.prediction_type}
        if self.schedule.timestep_shift == 1:
            del settings["timestep_shift"]
        return settings

    def levels(self) -> np.ndarray:
        """The noise level at each timestep, float32: abar_t, or of flow sigma_t."""
        return self.schedule.sigmas() if self.is_flow else self.schedule.alphas_cumprod()

    def scales(self, level):
        """(a, s) of x_t = a x_0 + s noise for values of `levels`."""
        return (1.0 - level, level) if self.is_flow else (level**0.5, (1.0 - level) ** 0.5)

    def times(self, timesteps, level):
        """What the network is told of the noise level: the timestep, or of flow its sigma by the number of levels."""
        return level * self.num_levels if self.is_flow else timesteps

    def powers(self) -> tuple[np.ndarray, np.ndarray]:
        """(a**2, s**2) at each timestep, float64."""
        level = self.levels().astype(np.float64)
        return ((1.0 - level) ** 2, level**2) if self.is_flow else (level, 1.0 - level)

    def loss_weights(self) -> np.ndarray | None:
        """The weight of the squared error at each timestep, float32; None where all are 1, or are learned."""
        weights = getattr(self.weighting, "weights", None)
        return None if weights is None else weights(*self.powers(), self.prediction_type).astype(np.float32)

    def target(self, latents, noise, scales):
        """What is predicted at scales (a, s), which broadcast against `latents`."""
        return load("targets", self.prediction_type).target(latents, noise, scales)

    def prediction(self, output, noisy, sigma):
        """What the network's output at x_t says of the `target`, float32 like x_t, with sigma_t (s) broadcasting."""
        read = getattr(load("targets", self.prediction_type), "prediction", None)
        return read(output, noisy, sigma) if read else output

    def picture(self, predicted, noisy, scales):
        """The x_0 that a prediction says of x_t: the inverse of `target`."""
        return load("targets", self.prediction_type).picture(predicted, noisy, scales)


def log_snr(signal: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """ln(a**2 / s**2), float64; -inf where nothing but noise is left."""
    with np.errstate(divide="ignore"):
        return np.log(signal) - np.log(noise)


def sampling_settings(scheduler: dict) -> dict:
    """The settings of a stored scheduler that say how to sample, those that it has."""
    return {name: scheduler[name] for name in SAMPLING_KEYS if name in scheduler}


def add_noise(latents, noise, scales):
    """x_t of scales (a, s) that broadcast against `latents`: [B, 1, 1, 1]."""
    return scales[0] * latents + scales[1] * noise
