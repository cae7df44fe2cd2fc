"""The short convolution over q, k and v, which all mechanisms share."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Channels = Float[Tensor, "b t c"]
Part = Float[Tensor, "b t _"]
"""Some of the channels."""
Cache = Float[Tensor, "b c w"]
"""The last w = width − 1 inputs."""


def shifted_products(x: Float[Tensor, "b n c"], taps: Float[Tensor, "width c"]) -> Channels:
    """y_i = Σ_j taps_j ⊙ x_{i+j}, j = 0 … width − 1, at the t = n − width + 1 positions i where all inputs exist."""
    t = x.shape[1] - len(taps) + 1
    y = x[:, :t] * taps[0]  # b t c
    for j in range(1, len(taps)):
        y.addcmul_(x[:, j : j + t], taps[j])
    return y


class ShiftedProducts(torch.autograd.Function):
    """`shifted_products` with a faster gradient: its backward pass reads the data 2 · width times.

    Autograd of the same sum would pad the gradient of every shifted input with zeros, and add these up.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, taps: Tensor) -> Tensor:
        return shifted_products(x, taps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, taps = ctx.saved_tensors  # b n c, width c
        grad_x = shifted_products(F.pad(grad, (0, 0, len(taps) - 1, len(taps) - 1)), taps.flip(0))  # b n c
        t = grad.shape[1]
        grad_taps = torch.stack([(grad * x[:, j : j + t]).sum((0, 1)) for j in range(len(taps))])  # width c
        return grad_x, grad_taps


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

    def forward(self, parts: Sequence[Part], cache: Cache | None = None) -> tuple[list[Part], Cache]:
        """y of each part, and the last width − 1 inputs of all channels.

        parts  x, its channels divided among any number of tensors; the outputs are divided in the same way
        cache  the last inputs of the segment before x; None: zeros
        """
        if cache is None:
            cache = self.empty_cache(parts[0])
        if parts[0].shape[1] == 0:
            return list(parts), cache
        sizes = [part.shape[2] for part in parts]
        before = cache.transpose(1, 2).split(sizes, dim=2)
        # A tap's weights must lie side by side in storage: products with strided weights take five times as long.
        taps = self.weight[:, 0].T.to(parts[0].dtype).split(sizes, dim=1)  # width c
        padded = [torch.cat(pair, dim=1) for pair in zip(before, parts, strict=True)]  # b t+w c
        outputs = [ShiftedProducts.apply(x, tap.contiguous()) for x, tap in zip(padded, taps, strict=True)]
        last = [x[:, x.shape[1] - self.width + 1 :] for x in padded]
        return outputs, torch.cat(last, dim=2).transpose(1, 2)
