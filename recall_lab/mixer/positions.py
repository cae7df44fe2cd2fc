"""Positions in softmax attention: rotary embeddings of q and k, and ALiBi's bias on the logits.

Rotary (Su et al., arXiv 2104.09864): q_t → R_t q_t and k_s → R_s k_s with rotations R, so that the logit depends on
positions only through t − s: (R_t q)·(R_s k) = q·R_{s−t} k. Of the first r channels of a head, the channels i and
i + r/2 are rotated by the angle t · base^(−2i/r), i = 0 … r/2 − 1. The other channels are not rotated.

ALiBi (Press et al., arXiv 2108.12409): −m_h (t − s) is added to the logits, m_h = 2^(−8h/H) for the heads h = 1 … H.
Their code departs from this formula where H is not a power of two; this one does not.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from recall_lab.checks import require
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Query

KINDS = ("none", "rotary", "alibi")

Angle = Float[Tensor, "#b #h t half"]
"""Cosine or sine of the angles of r/2 pairs of channels."""
Bias = Float[Tensor, "one_or_b h t s"]
"""What is added to logits, −∞ where s comes after t. The first axis is 1 where all sequences have the same bias."""
Age = Float[Tensor, "one_or_b one_or_h one_or_t s"]
"""How many positions before the next token the key s is, for all queries t alike or for each."""


def rotated_channels(share: float, d_key: int) -> int:
    """The number of channels r = share · d_key. Raises ValueError unless it is even and at least 2."""
    channels = share * d_key
    whole = round(channels)
    require(
        abs(channels - whole) < 1e-3 and whole % 2 == 0 and whole >= 2,
        f"rotary_share={share}: must rotate an even number of the d_key={d_key} channels of a head, at least 2, "
        f"not {channels:g}",
    )
    return whole


def turn(x: Query, cos: Angle, sin: Angle) -> Query:
    """x with its r/2 pairs of channels (i, i + r/2) rotated by their angles; the channels from r on are unchanged."""
    half = cos.shape[-1]
    one, two, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], dim=-1)


def rotate(x: Query, position: Float[Tensor, "#b #h t"], channels: int, base: float) -> Query:
    """R_t x_t with r = `channels`, computed in float32 or better and returned in the dtype of x.

    In float32 an angle is exact to 6·10⁻⁸ of the position, in radians: to 0.006 at position 10⁵.
    """
    half = channels // 2
    with without_autocast(x):
        full = full_precision(x)
        rate = base ** -(torch.arange(half, dtype=full.dtype, device=x.device) / half)
        angle = position.to(full)[..., None] * rate  # b h t r/2
        return turn(full, angle.cos(), angle.sin()).to(x.dtype)


def slopes(heads: int, like: Tensor) -> Float[Tensor, "h"]:
    """m_h = 2^(−8h/H), h = 1 … H = `heads`, in float32 or better and on the device of `like`."""
    head = torch.arange(1, heads + 1, device=like.device, dtype=full_precision(like).dtype)
    return torch.exp2(-8 * head / heads)


def distance_bias(age: Age, queries: int, slope: Float[Tensor, "h"]) -> Bias:
    """−m_h (t − s) for the last `queries` positions t, and −∞ where s comes after t."""
    own = torch.arange(queries, 0, -1, device=age.device, dtype=age.dtype)[:, None]  # the age of each query: t 1
    distance = age - own  # b h t s
    return (distance * -slope[:, None, None]).masked_fill(distance < 0, -torch.inf)
