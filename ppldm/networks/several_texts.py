"""What models are told of captions by several frozen text encoders (Stable Diffusion 3, Stable Diffusion XL)."""

import paddle
from paddle import nn
from paddle.nn import functional as F

from .configs import CLIPS, TEXT_ENCODERS, clip_widths, is_sd3, pooled_width
from .model import Component, hidden_states, projected_caption


class CaptionEncoders:
    """Frozen text encoders, by the names of TEXT_ENCODERS, and the config of the transformer or UNet that they tell.

    hidden [B, L + M, D]: the states of both CLIPs before their last layer, side by side, filled to the width D with
    zeros; behind them the last states of a T5, of M tokens. pooled [B, P]: the projected states of both CLIPs at the
    end of a caption, side by side. As diffusers' StableDiffusion3Pipeline has it, zeros stand in place of a T5 that is
    missing, of M = L. So they do for a CLIP, in states and pooled: of the width that the other one leaves of P.
    As its StableDiffusionXLPipeline has it, M is 0, and pooled is of the second CLIP alone."""

    def __init__(self, encoders: dict[str, nn.Layer], denoiser, tokenizer):
        """tokenizer: `data.text.several.SeveralTokenizers` of these encoders."""
        self.encoders, self._tokenizer, self._length = encoders, tokenizer, tokenizer.clip_length
        configs, self._with_t5 = {name: one.config for name, one in encoders.items()}, is_sd3(denoiser)
        if self._with_t5:
            self._width, self._pooled = denoiser["joint_attention_dim"], denoiser["pooled_projection_dim"]
            self._widths = clip_widths(configs, self._pooled)
        else:
            self._width, self._pooled = denoiser["cross_attention_dim"], pooled_width(denoiser)
            own = zip(CLIPS, (0, self._pooled), strict=True)
            self._widths = {name: (configs[name]["hidden_size"], projected) for name, projected in own}

    @property
    def shape(self) -> tuple[int, int]:
        """Of a caption's `embed`: as many rows as there are tokens that are seen, and one; the width of the widest."""
        clips = self._length * any(name in self.encoders for name in CLIPS)
        words = len(self._tokenizer.spans["text_encoder_3"]) if "text_encoder_3" in self.encoders else 0
        states = sum(width for width, _ in self._widths.values()) if clips else 0
        return clips + words + 1, max(states, self._pooled, self._width if words else 0)

    @property
    def facts(self) -> list[int]:
        """What of `embed` does not follow from the text encoders and their tokenizers."""
        return [*self.shape, self._pooled]

    @paddle.no_grad()
    def embed(self, input_ids):
        """Tokens [B, N] of all to what is kept of captions, [B, *shape]: the CLIPs' states, a T5's, and pooled."""
        rows, states, pooled, width = [], [], [], self.shape[1]
        for name, (own, projected) in self._widths.items():
            if name in self.encoders:
                ids, end = self._tokens(name, input_ids), self._tokenizer.of[name].end_id
                found, one = projected_caption(self.encoders[name], ids, end, before=2, masked=False)
            else:
                found = paddle.zeros([input_ids.shape[0], self._length, own])
                one = paddle.zeros([input_ids.shape[0], 1, projected])
            states.append(found)
            pooled += [one] if projected else []
        if any(name in self.encoders for name in CLIPS):
            rows.append(_joined(states, width))
        if "text_encoder_3" in self.encoders:
            ids = self._tokens("text_encoder_3", input_ids)
            rows.append(_joined([hidden_states(self.encoders["text_encoder_3"], ids, None)], width))
        return paddle.concat([*rows, _joined(pooled, width).astype(rows[0].dtype)], axis=1)

    def tell(self, embedded) -> dict:
        """What `embed` gives as `hidden` and `pooled`."""
        rows, pooled = embedded[:, :-1], embedded[:, -1, : self._pooled]
        rows = _joined([rows[:, :, : self._width]], self._width)
        zeros = paddle.zeros([rows.shape[0], self._length, self._width], rows.dtype)
        before = [] if any(name in self.encoders for name in CLIPS) else [zeros]
        behind = [zeros] if self._with_t5 and "text_encoder_3" not in self.encoders else []
        return {"hidden": paddle.concat([*before, rows, *behind], axis=1), "pooled": pooled}

    def _tokens(self, name: str, input_ids):
        span = self._tokenizer.spans[name]
        return input_ids[:, span.start : span.stop]


def _joined(parts: list, width: int):
    """[B, L, …] side by side, filled with zeros to `width`."""
    whole = paddle.concat([part.astype(parts[-1].dtype) for part in parts], axis=2)
    return F.pad(whole, [0, 0, 0, 0, 0, width - whole.shape[2]]) if whole.shape[2] < width else whole


class SeveralTextEncoders:
    """A base of models, before `LatentDiffusionModel`. Their state has the names of TEXT_ENCODERS that are there."""

    words = None  # it is told one state of the whole caption too
    captions: CaptionEncoders

    def read_by(self, tokenizer, mask_pad_tokens: bool, empty_caption: str) -> None:
        super().read_by(tokenizer, mask_pad_tokens, empty_caption)
        self.captions = CaptionEncoders(self.text_encoders, self.denoiser.config, tokenizer)

    @property
    def text_encoders(self) -> dict[str, nn.Layer]:
        """Those that are there."""
        return {name: getattr(self, name) for name in TEXT_ENCODERS if hasattr(self, name)}

    @property
    def networks(self) -> dict[str, Component]:
        """The VAE in float32, text encoders that are not trained, and what removes the noise."""
        name, recompute_again = self.denoiser_name, self.denoiser.enable_gradient_checkpointing
        return {
            "vae": Component(self.vae, trained=False, stays_float32=True),
            **{one: Component(layer, trained=False) for one, layer in self.text_encoders.items()},
            name: Component(self.denoiser, True, name, recompute=recompute_again),
        }

    def told_of(self, input_ids, text_embeddings=None) -> dict:
        """`hidden` and `pooled` of the tokens of all text encoders [B, N], or of what was kept of them."""
        embedded = self.captions.embed(input_ids) if text_embeddings is None else text_embeddings
        if self.empty_end is not None:
            place, end = self.empty_end
            embedded = embedded * (input_ids[:, place] != end).astype(embedded.dtype).reshape([-1, 1, 1])
        return self.captions.tell(embedded)
