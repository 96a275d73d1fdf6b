"""CFG-Zero* (`--cfg_zero`), guidance made for flow: Fan et al. 2025, arXiv:2503.18886.

The branch without caption v_u is scaled to come nearest to the one with it, v_c, for each picture by itself:
s* = <v_c, v_u> / |v_u|^2, and the prediction is s* v_u + w (v_c - s* v_u). At the first of all steps it is 0: a
network that is not trained to the end is further from the truth there (zero-init; one step, as by default in the
authors' code and in diffusers' `ClassifierFreeZeroStarGuidance`). Published: better than plain guidance with Stable
Diffusion 3, Flux, Lumina-Next and Wan 2.1.
"""

ZERO_STEPS = 1  # at the start, of those from pure noise
_TINY = 1e-8  # added to |v_u|^2, as in the authors' code


def scale_without(without, said):
    """s* v_u [B, C, h, w] of both branches' predictions, `without` and `said`, of that shape, float32."""
    rest = [1, 2, 3]
    along = (said * without).sum(rest, keepdim=True)
    return along / (without.square().sum(rest, keepdim=True) + _TINY) * without
