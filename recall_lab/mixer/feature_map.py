"""Feature maps φ for linear attention, which replace softmax's kernel e^{q·k} by φ(q)·φ(k)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from recall_lab.checks import choice

Input = Float[Tensor, "*batch d"]
Features = Float[Tensor, "*batch f"]


def taylor(x: Input) -> Features:
    """The Taylor series of e^z up to second order: φ(q)·φ(k) = 1 + z + z²/2 with z = q·k / √d.

    The number of features is f = 1 + d + d (d + 1) / 2.
    Source: Based, Arora et al., arXiv 2402.18668.
    """
    d = x.shape[-1]
    row, column = torch.triu_indices(d, d, offset=1, device=x.device)
    square = x.square() / (2 * d) ** 0.5
    # Channels are selected by products with zeros and ones, whose gradient is far faster than that of an index.
    eye = torch.eye(d, dtype=x.dtype, device=x.device)
    mixed = F.linear(x, eye[row] / d**0.5) * F.linear(x, eye[column])
    return torch.cat([torch.ones_like(x[..., :1]), x / d**0.25, square, mixed], dim=-1)


def series(z: Tensor) -> Tensor:
    """1 + z + z²/2, the products of the features of `taylor`."""
    return torch.addcmul(1 + z, z, z, value=0.5)


def dpfp(x: Input, nu: int = 2) -> Features:
    """Deterministic parameter-free projection: r ⊙ roll(r, j), j = 1 … ν, with r = relu([x, −x]); f = 2 ν d.

    Source: Schlag et al., arXiv 2102.11174.
    """
    r = F.relu(torch.cat([x, -x], dim=-1))
    return torch.cat([r * r.roll(j, dims=-1) for j in range(1, nu + 1)], dim=-1)


class Hedgehog(nn.Module):
    """A learned map: φ(x) = softmax([2y, −2y]) with y = W x + b; f = 2 d. Initially W = I and b = 0.

    Source: Zhang et al., arXiv 2402.04347.
    """

    def __init__(self, d: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d, d)
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Input) -> Features:
        y = 2 * self.linear(x)
        return torch.softmax(torch.cat([y, -y], dim=-1), dim=-1)


FIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "elu+1": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "softplus": F.softplus,
    "dpfp": dpfp,
    "taylor": taylor,
}
"""The maps that have no parameters, by name."""


def make_map(name: str, d: int) -> Callable[[Tensor], Tensor]:
    """The map of that name for vectors of width d: a function of FIXED, or a module where the map is learned.

    Raises ValueError for an unknown name.
    """
    choice("feature_map", name, [*FIXED, "hedgehog"])
    return Hedgehog(d) if name == "hedgehog" else FIXED[name]
