"""Mamba's decay, which several mechanisms use."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recall_lab.mixer.numerics import full_precision
from recall_lab.shapes import Hidden


class MambaDecay(nn.Module):
    """The log decay g = −e^{A_log} Δ with Δ = softplus(W x + dt_bias).

    A_log is one number per head; Δ has `width` channels per head. A starts uniform in (0, 16) and Δ log-uniform in
    [1e−3, 0.1], so that some states last for a few tokens and others for thousands.
    Source: Mamba-2, Dao and Gu, arXiv 2405.21060.
    """

    def __init__(self, d_model: int, heads: int, width: int = 1) -> None:
        super().__init__()
        self.width = width
        self.a_proj = nn.Linear(d_model, heads * width, bias=False)
        self.A_log = nn.Parameter((16 * (1 - torch.rand(heads))).log())
        dt = torch.empty(heads * width).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(dt + (-torch.expm1(-dt)).log())

    def forward(self, x: Hidden) -> tuple[Tensor, Tensor]:
        """g and Δ from x: b h t each for width 1, b h t width for more."""
        dt = F.softplus(full_precision(self.a_proj(x)) + self.dt_bias)  # b t (h w)
        dt = dt.unflatten(-1, (-1, self.width)).transpose(1, 2)  # b h t w
        g = -self.A_log.exp()[:, None, None] * dt  # b h t w
        return (g, dt) if self.width > 1 else (g[..., 0], dt[..., 0])
