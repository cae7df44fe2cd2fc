"""Attention to tokens drawn at random: the control for policies that choose tokens by their content."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from recall_lab.checks import require, whole_number
from recall_lab.mixer.cache import Budget, CachedKey, largest, only
from recall_lab.mixer.positions import Bias
from recall_lab.shapes import Attention, Query

WORD = 2**32
"""Number of 32-bit words. They are hashed in 64-bit integers, in which no product below overflows."""


def mix(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """A hash of 32-bit words: a bijection of 0 … 2³² − 1. Flipping a bit of x flips each bit of the result with
    probability ½.

    The constants are those of Wellons, "Hash Prospector" (github.com/skeeto/hash-prospector, issue 19).
    """
    x = (x ^ (x >> 16)) * 0x21F0AAAD % WORD
    x = (x ^ (x >> 15)) * 0x735A2D97 % WORD
    return x ^ (x >> 15)


def drawn(queries: int, tokens: int, count: int, seed: int, device: torch.device) -> Bool[Tensor, "t s"]:
    """True at the tokens s that each position t of the last `queries` attends to: t itself, and count − 1 before it.

    Those are the tokens s < t with the largest hash of (seed, t, s), or all of them if there are fewer. For a given t
    all hashes differ, so there are no ties.
    """
    position = torch.arange(tokens, device=device)
    t = position[tokens - queries :, None]
    key = mix(mix(mix(torch.full_like(t, seed)) ^ t) ^ position)  # t s
    key = key.masked_fill(position == t, WORD).masked_fill(position > t, -1)
    return largest(key, count) & (position <= t)


@dataclass(eq=False, repr=False, kw_only=True)
class RandomK(Budget):
    """Every token is kept, and each query attends to its own and to `budget` − 1 past tokens drawn without regard to q.

    o_t = Σ_{s∈C_t} softmax_s(q_t·k_s / √d_key) v_s,  C_t = {t} and the `budget` − 1 positions s < t with the largest
    hash of (`draw_seed`, t, s), or all if there are fewer;  A is that softmax;  state: all k and v so far.
    The tokens are drawn anew at each position t, and are the same for all sequences, heads and layers. Since a hash is
    used instead of a stream of random numbers, a draw does not depend on segments, steps, batch or device.
    It is the control for `top_k`: as many tokens, from a cache of the same size, but chosen without the query.
    Source: a control of this project; fixed random sets of keys: BigBird, Zaheer et al., arXiv 2007.14062.
    Raises ValueError unless 0 ≤ draw_seed < 2³².
    """

    draw_seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("draw_seed", self.draw_seed, 0)
        require(self.draw_seed < WORD, f"draw_seed={self.draw_seed}: must be less than 2^32")

    def logits(self, q: Query, k: CachedKey, bias: Bias | None = None) -> Attention:
        logits = super().logits(q, k, bias)
        t, s = logits.shape[-2:]
        return only(logits, drawn(t, s, self.budget, self.draw_seed, q.device).expand_as(logits))
