"""The short convolution over q, k and v, which all mechanisms share."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Channels = Float[Tensor, "b t c"]
Cache = Float[Tensor, "b c w"]
"""The last w = width − 1 inputs."""


class ShortConv(nn.Module):
    """Causal depthwise convolution over time: y_t = Σ_j weight_j ⊙ x_{t−width+1+j}, j = 0 … width − 1.

    The last width − 1 inputs are carried from one segment to the next; before the first token they are zero.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def empty_cache(self, x: Float[Tensor, "b _ _"]) -> Cache:
        """The cache before the first token: width − 1 zeros per channel, with the batch size, dtype and device of x."""
        return x.new_zeros(x.shape[0], self.weight.shape[0], self.width - 1)

    def forward(self, x: Channels, cache: Cache | None = None) -> tuple[Channels, Cache]:
        """y, and the last width − 1 inputs; `cache` holds those of the segment before x (None: zeros)."""
        cache = self.empty_cache(x) if cache is None else cache
        if x.shape[1] == 0:
            return x, cache
        padded = torch.cat([cache, x.transpose(1, 2)], dim=2)
        y = F.conv1d(padded, self.weight, groups=self.weight.shape[0])
        return y.transpose(1, 2), padded[:, :, padded.shape[2] - self.width + 1 :]
