"""Stick-breaking attention (Tan et al., arXiv 2410.17980)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from recall_lab.checks import flag
from recall_lab.mixer.cache import Cache, extend, score
from recall_lab.shapes import Gates, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class StickbreakingAttn(Cache):
    """Each earlier token, from the latest to the first, takes a share of the weight that later tokens have left over.

    z_ts = q_t·k_s / √d_key,  A_ts = σ(z_ts) Π_{s<l<t} (1 − σ(z_tl)) for s < t,  o_t = Σ_{s<t} A_ts v_s;  state: all k
    and v so far. There is no softmax: a query may leave weight unused, and of equal keys the latest counts most. A
    token does not attend to itself, so the first output is zero, and a query of the oracle at the position at which
    its pair is written is not answered. With `remainder` the weight that is left, Π_{l<t} (1 − σ(z_tl)), goes to
    the token's own value, and the rows of A sum to one.
    With positions, z is of rotated q and k, or includes ALiBi's bias.
    Source: Tan et al., arXiv 2410.17980.
    """

    remainder: bool = False
    """Give the weight that is left to the token's own value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        flag("remainder", self.remainder)

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        cached = extend(state, k, v)
        z, bias = score(q, cached["k"]), self.bias(q, cached)
        z = z if bias is None else z + bias
        t, s = z.shape[-2:]
        later = torch.ones(t, s, dtype=torch.bool, device=z.device).triu(s - t)  # the token itself included
        left = F.logsigmoid(-z).masked_fill(later, 0)
        left = F.pad(left, (0, 1)).flip(-1).cumsum(-1).flip(-1)  # b h t s+1: log of what the tokens from s on leave
        weight = (F.logsigmoid(z) + left[..., 1:]).masked_fill(later, -torch.inf).exp()
        o = weight.to(v.dtype) @ cached["v"]
        return (o + left[..., :1].exp().to(v.dtype) * v if self.remainder else o), cached
