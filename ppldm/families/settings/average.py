"""Moving averages of the weights: settings of families."""

from dataclasses import dataclass
from functools import partial

from ...config.option import Bounds, Needs, option
from ...config.training import LARGEST_STD
from ...utils.errors import ConfigError

_optimizer = partial(option, section="optimizer")
_ABOVE_0, _SHARE = Bounds(above=0), Bounds(least=0, most=1)
_POSTHOC = Needs("--ema_posthoc", lambda given: given.ema_posthoc is not None)


@dataclass(kw_only=True)
class AverageSettings:
    """A base of the settings of families whose weights may be averaged."""

    use_ema: bool = _optimizer(
        False, "Keep an exponential moving average of the weights; pictures are drawn with it.", part_of="ema"
    )
    ema_decay: float = _optimizer(
        0.9999,
        "Decay of the average; reached gradually.",
        bounds=_SHARE,
        needs=Needs(
            "--use_ema without --ema_start_iters, --ema_iters and --ema_beta, which have a decay of their own",
            lambda given: given.use_ema and given.ema_start_iters is given.ema_iters is given.ema_beta is None,
        ),
        part_of="ema",
    )
    ema_start_iters: int | None = _optimizer(
        None,
        "With one of the ema_ flags below: copy the weights up to this update (default: 5000).",
        unit="updates",
        part_of="ema",
    )
    ema_iters: int | None = _optimizer(
        None,
        "Average every this many updates, with --ema_beta for a decay (default: 100).",
        bounds=_ABOVE_0,
        unit="updates",
        part_of="ema",
    )
    ema_beta: float | None = _optimizer(
        None,
        "Decay of the average that is taken every --ema_iters updates (default: 0.9).",
        bounds=_SHARE,
        part_of="ema",
    )
    ema_posthoc: list[float] | None = _optimizer(
        None,
        "Track two more averages, of these relative standard deviations (0.05 0.10 recommended), and keep snapshots of "
        "them, from which `ppldm ema` makes any other after the training (docs/methods.md).",
        bounds=Bounds(above=0, most=LARGEST_STD),
        identity=True,
    )
    ema_posthoc_every: int | None = _optimizer(
        None,
        "Keep snapshots every this many updates, and after the last one (default: a fiftieth of the run).",
        bounds=_ABOVE_0,
        unit="updates",
        needs=_POSTHOC,
    )
    ema_posthoc_dtype: str = _optimizer(
        "float16", "Type of the snapshots' numbers.", choices=("float16", "float32"), needs=_POSTHOC
    )

    def check_average(self) -> None:
        """Raises ConfigError for combinations that cannot work."""
        if self.ema_posthoc is not None and (len(self.ema_posthoc) != 2 or len(set(self.ema_posthoc)) != 2):
            raise ConfigError("--ema_posthoc takes two different standard deviations; give --ema_posthoc 0.05 0.10")

    @property
    def averages_at_intervals(self) -> bool:
        """True where an average of the form of Stable Cascade's training is asked for."""
        return any(value is not None for value in (self.ema_start_iters, self.ema_iters, self.ema_beta))

    def decay(self):
        """The decay of the average (`networks.ema`): at intervals where one of their settings is given, else gradual
        with `use_ema`; None for no average."""
        from ...networks.ema import GradualDecay, IntervalDecay

        if self.averages_at_intervals:
            given = {"start_iters": self.ema_start_iters, "iters": self.ema_iters, "beta": self.ema_beta}
            return IntervalDecay(**{name: value for name, value in given.items() if value is not None})
        return GradualDecay(self.ema_decay) if self.use_ema else None


def learning_rate_of(what: str, needs: Needs | None = None):
    """The option `<component>_learning_rate`; None is that of all (`--learning_rate`)."""
    return option(
        None,
        f"Learning rate of {what} (default: --learning_rate).",
        section="optimizer",
        bounds=Bounds(above=0),
        identity=True,
        needs=needs,
    )
