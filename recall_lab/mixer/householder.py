"""Keys that every later token changes: k_s → (I − β_r w_r w_rᵀ) k_s for r = s+1 … t, r in this order.

Over some positions r the product Π_r P_r = P_{s+1} … P_t with P_r = I − β_r w_r w_rᵀ is I − Wᵀ U W. The rows of W are
the w_r, U = D (I + N D)⁻¹, N is the part of W Wᵀ above its diagonal and D the diagonal matrix of β (the compact form of
Bischof and Van Loan; Yang et al., arXiv 2505.16381). U is upper triangular, and the U of a contiguous part of the
positions is the corresponding diagonal block. So one triangular system gives the products for all s and t of a block.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from recall_lab.mixer.cache import CachedKey
from recall_lab.shapes import Attention, Query


class Carried(NamedTuple):
    """The results of `carry` for a block of positions."""

    products: Attention
    """k_sᵀ P_{s+1} … P_t q_t for all keys s of the state and of the block: b h t s; undefined where s comes after t."""
    keys: CachedKey
    """The keys of the state and of the block, changed up to the last position of the block."""


def carry(q: Query, k: Query, w: Query, beta: Float[Tensor, "b h t"], before: CachedKey) -> Carried:
    """The products of a block of positions, and the keys after it.

    before  the keys of the state, changed up to the position before the block
    """
    gram = (w @ w.mT).tril(-1) * beta[..., None]
    U = torch.linalg.solve_triangular(gram, torch.diag_embed(beta), upper=False, unitriangular=True).mT  # b h r r
    read = (q @ w.mT).tril() @ U.mT  # b h t r
    within = q @ k.mT - read @ (w @ k.mT).tril(-1)  # b h t t
    earlier = (q - read @ w) @ before.mT  # b h t s
    change = torch.cat([before @ w.mT, (k @ w.mT).triu(1)], dim=2) @ U @ w
    return Carried(torch.cat([earlier, within], dim=-1), torch.cat([before, k], dim=2) - change)
