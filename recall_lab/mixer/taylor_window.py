"""The engine of based: the correction of attention with Taylor features by an exact window.

Weights outside the window are 1 + z + z²/2 with z = q·k / √d, inside it e^z. The Taylor features give 1 + z + z²/2
everywhere; `window_correction` is the difference inside the window, and `window_correction_naive` its definition.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from recall_lab.mixer.base import query_scale
from recall_lab.shapes import Query

PastKey = Float[Tensor, "b h s k"]
PastValue = Float[Tensor, "b h s v"]


def window_correction_naive(q: Query, k: PastKey, v: PastValue, window: int) -> Tensor:
    """Σ_s (e^z_ts − 1 − z_ts − z_ts²/2) v_s over the last `window` positions s of each t (q ends where k ends)."""
    z = q @ k.mT * query_scale(q.shape[-1])  # b h t s
    t, s = z.shape[-2:]
    seen = z.new_ones(t, s).tril(s - t).triu(s - t - window + 1)
    return ((z.exp() - 1 - z - z.square() / 2) * seen) @ v


def window_correction(q: Query, k: PastKey, v: PastValue, window: int) -> tuple[Tensor, Tensor]:
    """The correction times e^{−m} (b h t v), and that factor (b h t 1); m is the largest z of the window, at least 0.

    k and v begin up to window − 1 positions before q. Each block of `window` queries is compared with the keys of its
    own windows only, so time and storage are linear in t. In comments: n blocks of B queries and W keys each.
    """
    length, past = q.shape[2], k.shape[2] - q.shape[2]
    block = min(window, length)
    blocks = -(-length // block)
    fill = blocks * block - length
    q = F.pad(q, (0, 0, 0, fill)).unflatten(2, (blocks, block)) * query_scale(q.shape[-1])  # b h n B k
    k, v = (F.pad(x, (0, 0, window - 1 - past, fill)).unfold(2, window - 1 + block, block) for x in (k, v))
    query = torch.arange(block, device=q.device)[:, None]
    key = torch.arange(window - 1 + block, device=q.device)
    start = torch.arange(blocks, device=q.device)[:, None, None] * block
    seen = (key >= query) & (key < query + window) & (start + key >= window - 1 - past)  # n B W
    z = (q @ k).masked_fill(~seen, 0)  # b h n B W
    largest = z.detach().amax(-1, keepdim=True).clamp(min=0)
    factor = (-largest).exp()
    weight = ((z - largest).exp() - factor * (1 + z + z.square() / 2)) * seen
    correction = weight @ v.mT  # b h n B v
    return correction.flatten(2, 3)[:, :, :length], factor.flatten(2, 3)[:, :, :length]
