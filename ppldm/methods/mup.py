"""µP: rates and first weights by how much wider a network is than a base, so that the base's learning rate is right.

Of a matrix with m times the inputs that it has in the base network, by Adam's rules of µP:

    rate <- rate / m
    deviation of first weights <- the base's / m^(1/2), or / m where its outputs are no more than there

Heads of attention that are h times as wide divide q k by d, and not by d^(1/2): the rate and first weights of queries
are divided by h^(1/2) instead, which is the same. So the network stays of its kind, and draws and exports as any other.
Vectors, and matrices whose inputs do not grow, keep their rate; weight decay is by the rate. Shapes say which is which:
those of the base, a config with other widths, are compared with the network's own.

Yang et al. 2022 (arXiv:2203.03466); published: GPT-3's figures at 6.7 B outdone for 7 % of its cost in tuning, at 40 M.
Zheng et al. 2025 (arXiv:2505.15270), who prove it of diffusion transformers; published: DiT-XL/2 in 2.9 times fewer
iterations by a rate that was carried over.
"""

from dataclasses import dataclass

from ..networks.configs import read_new_config
from ..utils.errors import ConfigError
from .base import Method

RATE = "rate_factor"  # of a parameter, beside Paddle's own entries of `optimize_attr`


@dataclass(frozen=True)
class Mup(Method):
    """base: the config of the network that the learning rate is right for: a JSON file, or a name."""

    base: str = ""
    with_muon = False

    def problem(self, config):
        if not self.base:
            return "name the network that the learning rate is of, as --methods mup:base=FILE.json"
        if config.starts_from_pipeline or getattr(config, f"{config.denoiser}_name_or_path"):
            return f"it sets the first weights of a new {config.denoiser}; give --{config.denoiser}_config_file"
        read_new_config(config.denoiser, self.base, "--methods mup:base")
        return None

    def attach(self, model, seed):
        import paddle

        from ..networks.build import build_network

        config = read_new_config(model.denoiser_name, self.base, "--methods mup:base")
        with paddle.utils.unique_name.guard("mup_"):
            base = build_network(model.denoiser_name, config, seed)
        theirs, own = dict(base.named_parameters()), dict(model.denoiser.named_parameters())
        if odd := {*theirs} ^ {*own} or {name for name in own if theirs[name].ndim != own[name].ndim}:
            raise ConfigError(f"--methods mup:base={self.base} has other layers ({min(odd)}), not only other widths")
        queries = self._queries(base, model.denoiser)
        for name, parameter in own.items():
            slower = queries.get(name.rpartition(".")[0], 1.0) ** -0.5
            _follow(parameter, theirs[name], slower)
        return {}

    def _queries(self, base, network) -> dict[str, float]:
        """The names of the layers of queries, and how many times as wide as in the base their heads are."""
        found, theirs = {}, dict(base.named_sublayers())
        for name, layer in network.named_sublayers():
            ratio = _head_width(layer) / _head_width(theirs[name])
            if ratio != 1 and not hasattr(layer, "to_q"):
                raise ConfigError(f"--methods mup:base={self.base} has heads of another width; give it fewer, as wide")
            if ratio != 1:
                found[f"{name}.to_q"] = ratio
        return found


def _head_width(layer) -> float:
    """Of attention; 1 of other layers."""
    if hasattr(layer, "to_q") and hasattr(layer, "heads"):
        return layer.to_q.weight.shape[1] / layer.heads
    return getattr(layer, "head_size", None) or getattr(layer, "head_dim", None) or 1


def _inputs(shape: list[int]) -> tuple[int, int]:
    """(inputs, outputs) of a matrix: Linear [in, out], experts [E, in, out], convolution [out, in, h, w]."""
    return (shape[1], shape[0]) if len(shape) == 4 else (shape[-2], shape[-1])


def _follow(parameter, base, slower: float) -> None:
    """Give a parameter its rate and the size of its first weights. slower: what both are multiplied by besides."""
    import paddle

    parameter.optimize_attr[RATE] = slower
    if parameter.ndim >= 2 and parameter.shape != base.shape:
        (inputs, outputs), (inputs_there, outputs_there) = _inputs(parameter.shape), _inputs(base.shape)
        wider = inputs / inputs_there
        parameter.optimize_attr[RATE] /= wider
        rms, rms_there = (float(one.square().mean().sqrt()) for one in (parameter, base))
        slower *= rms_there / wider ** (0.5 if outputs > outputs_there else 1.0) / rms if rms else 1.0
    if slower != 1:
        with paddle.no_grad():
            parameter.set_value(parameter * slower)


METHOD = Mup
