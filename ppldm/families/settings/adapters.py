"""Small additions that are trained while the model itself stays as it is: settings of families."""

import re
from dataclasses import dataclass
from functools import partial

from ...config.option import Bounds, Needs, option
from ...utils.errors import ConfigError

_ABOVE_0 = Bounds(above=0)
_adapter = partial(option, section="model", identity=True)
_NEEDS_LORA = Needs("--lora_rank", lambda given: given.lora_rank is not None)
_NEW = re.compile(r"(\[[^\s\[\]]+\]|<[^\s<>]+>)(?:=(.*))?", re.S)


def lora_components(*able: str):
    """The option, of a model with these components that can have some; by default the first has them."""
    return _adapter([able[0]], f"The networks of these layers: {', '.join(able)}.", needs=_NEEDS_LORA)


def lora_modules(default: str, others: str):
    """The option; others: what else it may be, in words."""
    what = f"Linear and convolution layers with one of these in their names get one: {default}, {others}"
    return _adapter([default], what, needs=_NEEDS_LORA)


def trains_adapters(given) -> bool:
    """True where settings ask for adapters, and nothing else is trained."""
    return given.lora_rank is not None or bool(given.train_tokens)


def adapts_text_encoder(given) -> bool:
    """Whether some adapter is in the text encoder."""
    return bool(given.train_tokens) or (given.lora_rank is not None and "text_encoder" in given.lora_components)


@dataclass(kw_only=True)
class AdapterSettings:
    """A base of the settings of families whose networks `networks.adapters` can adapt."""

    lora_rank: int | None = _adapter(
        None, "Train low-rank adapters (LoRA) of this rank in place of the weights (docs/finetune.md).", bounds=_ABOVE_0
    )
    lora_alpha: float | None = _adapter(
        None, "They are scaled by this over their rank (default: the rank).", bounds=_ABOVE_0, needs=_NEEDS_LORA
    )
    lora_modules: list[str] = lora_modules("attn", "ff, conv, to_q …")
    lora_components: list[str] = lora_components("unet", "text_encoder")
    train_tokens: list[str] = _adapter(
        [],
        "Train the embeddings of these tokens: a new one in <> or [], such as <fido>=^dog, which starts as the mean of "
        "the tokens that the regular expression matches; or an expression for known ones, such as ^dog.",
    )
    export_merged: bool = option(
        False,
        "Beside the adapters, export the whole model with them merged in.",
        section="run",
        needs=Needs("--lora_rank or --train_tokens", lambda given: trains_adapters(given)),
    )

    @property
    def trains_adapters(self) -> bool:
        """True where nothing else is trained."""
        return trains_adapters(self)

    def wanted_tokens(self) -> list[tuple[str, str | None]]:
        """(token, expression of what it starts from) of new tokens, (expression, None) of known ones."""
        matches = [_NEW.fullmatch(word) for word in self.train_tokens]
        return [(m[1], m[2] or "") if m else (word, None) for m, word in zip(matches, self.train_tokens, strict=True)]

    def check_adapters(self) -> None:
        """Raises ConfigError for what cannot work."""
        for token, pattern in self.wanted_tokens():
            try:
                re.compile(pattern or token)
            except re.error as error:
                raise ConfigError(
                    f"--train_tokens {pattern or token} is not a regular expression ({error}); correct it"
                ) from error
        tokens = [token for token, _ in self.wanted_tokens()]
        if double := next((token for token in tokens if tokens.count(token) > 1), None):
            raise ConfigError(f"--train_tokens names {double} twice; omit one")
