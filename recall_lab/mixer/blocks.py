"""Blocks of tokens: a query's logits for their mean keys, and the choice of some blocks for each query.

Block c of size B holds the positions c B … (c+1) B − 1. The last block may be shorter. The queries are at the last
positions, and logits are −∞ where s comes after t.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from recall_lab.mixer.cache import largest
from recall_lab.shapes import Attention

OfBlocks = Float[Tensor, "b h t blocks"]


def mean_of_blocks(logits: Attention, size: int) -> OfBlocks:
    """The mean of a query's logits in each block, −∞ unless the block is complete at the query.

    The mean of q·k_s is q·k̄, the logit for the block's mean key. An incomplete block, or one that holds a token after
    the query, contains a logit of −∞, so its mean is −∞ too.
    """
    missing = -logits.shape[-1] % size
    return F.pad(logits, (0, missing), value=-torch.inf).unflatten(-1, (-1, size)).mean(-1)


def to_tokens(x: Shaped[Tensor, "b h t blocks"], size: int, tokens: int) -> Shaped[Tensor, "b h t s"]:
    """The values of x, one per block, repeated for each of the first `tokens` positions."""
    return x.repeat_interleave(size, dim=-1)[..., :tokens]


def chosen_blocks(p: OfBlocks, size: int, tokens: int, count: int, group: int) -> Bool[Tensor, "b h t blocks"]:
    """True at the first block, the block of the query, the one before it, and the others with the largest p.

    These are `count` blocks in all; where there are fewer up to the query's, all of those, and blocks after it may be
    True as well. Of equal ones the earliest are chosen. Each `group` of adjacent heads chooses the same blocks, by its
    mean p. `tokens` is the number of positions up to the last query. The choice has no gradient.
    """
    t, blocks = p.shape[-2:]
    own = torch.arange(tokens - t, tokens, device=p.device)[:, None] // size  # t 1
    block = torch.arange(blocks, device=p.device)
    always = (block == 0) | (block == own) | (block == own - 1)
    worth = p.detach().unflatten(1, (-1, group)).mean(2)  # b h/group t blocks
    worth = worth.masked_fill(always, 2).masked_fill(block > own, -torch.inf)  # p is at most 1
    return largest(worth, count).repeat_interleave(group, dim=1)
