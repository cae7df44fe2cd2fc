"""Eviction of the tokens that have received the least attention (H2O, Zhang et al., arXiv 2306.14048)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from recall_lab.mixer.cache import Static, extend, read
from recall_lab.mixer.numerics import full_precision
from recall_lab.shapes import Attention, Gates, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class HeavyHitter(Static):
    """The cache holds the most recent tokens and those of the others that have received the most attention so far.

    o_t = Σ_{s∈C_t} A_ts v_s,  A_ts = softmax_s(q_t·k_s / √d_key) over C_t. The mass of token s is Σ_{r=s..t} A_rs per
    head, its weight on itself included. C_t = {0 … t} while t < B = `budget`. From t = B − 1 on, one token is evicted
    after each position. The ⌈B/2⌉ most recent tokens, counting token t + 1, are safe; of the others the one with the
    least mass is evicted, among equal ones the earliest. An evicted token never comes back.
    The choice has no gradient; q, k and v get theirs through the weights of the tokens kept.
    state: k, v and mass of at most B − 1 tokens.
    Raises ValueError for a budget below 3: with 2, token 0 would always have more mass than token t and stay for ever.
    Source: Zhang et al., arXiv 2306.14048; related: Scissorhands, Liu et al., arXiv 2305.17118.
    """

    compiles: ClassVar[bool] = False
    least_budget: ClassVar[int] = 3
    gaps: ClassVar[bool] = True

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        cached = extend(state, k, v)
        logits = self.logits(q, cached["k"], self.bias(q, cached))
        evicted, mass = self.evict(logits.detach(), state["mass"])
        # The tokens kept after the last position, in the order of the sequence: evicted ones sort last.
        order = evicted[:, :, -1].argsort(dim=-1, descending=True, stable=True)
        kept = order[:, :, : self.budget - 1]  # b h kept
        after = {name: x.gather(2, kept[..., None].expand(-1, -1, -1, x.shape[3])) for name, x in cached.items()}
        return read(logits + evicted[:, :, :-1], cached["v"]), after | {"mass": mass.gather(2, kept)}

    @torch.no_grad()
    def evict(
        self, logits: Attention, mass: Float[Tensor, "b h cached"]
    ) -> tuple[Float[Tensor, "b h t+1 s"], Float[Tensor, "b h s"]]:
        """Evicts tokens, one per position. Returns a mask of evicted tokens, and the mass of each token at the end.

        The mask is added to the logits: −∞ for tokens that are evicted, 0 for others, before each new position and
        after the last. The mass of an evicted token is ∞.
        logits  of the new positions, causally masked
        mass    of the cached tokens, before the new positions
        """
        t, s = logits.shape[-2:]
        mass = F.pad(mass, (0, t))  # b h s
        evicted = torch.zeros_like(mass)
        history = [evicted]
        for position in range(s - t, s):
            mass = mass + torch.softmax(logits[:, :, position - s] + evicted, dim=-1)
            if position + 1 >= self.budget:
                old = position + 2 - (self.budget + 1) // 2  # tokens outside the most recent
                least = mass[:, :, :old].argmin(dim=-1, keepdim=True)
                mass.scatter_(2, least, torch.inf)
                evicted = evicted.scatter(2, least, -torch.inf)
            history.append(evicted)
        return torch.stack(history, dim=2), mass

    def empty_state(self, q: Query, v: Value) -> State:
        return super().empty_state(q, v) | {"mass": full_precision(q)[:, :, :0, 0]}
