"""Eviction of the tokens that have been attended to least (H2O, Zhang et al., arXiv 2306.14048)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recall_lab.mixer.cache import Budget, extend, weigh
from recall_lab.mixer.numerics import full_precision
from recall_lab.shapes import Attention, Gates, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class HeavyHitter(Budget):
    """The most recent tokens kept, and as many of the others as have had the most attention up to now.

    o_t = Σ_{s∈C_t} A_ts v_s,  A_ts = softmax_s(q_t·k_s / √d_key) over C_t;  each head keeps the mass of each token,
    Σ_{r=s..t} A_rs, its weight on itself included. C_t is all of {0 … t} while these are no more than B = `budget`;
    from then on each place, having been read out, puts one token out: of those outside the ⌈B/2⌉ most recent (the
    next token counted in) the one with the least mass, of equal ones the earliest. What is out stays out.
    The choice has no gradient; q, k and v have theirs through the weights that are kept.
    state: k, v and mass of at most B − 1 tokens.
    Source: Zhang et al., arXiv 2306.14048; akin to Scissorhands, Liu et al., arXiv 2305.17118.
    """

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        k, v = extend(state, k, v)
        logits = self.logits(q, k)
        hidden, mass = self.evict(logits.detach(), state["mass"])
        order = hidden[:, :, -1].argsort(dim=-1, descending=True, stable=True)
        stay = order[:, :, : min(k.shape[2], self.budget - 1)]
        kept = {
            name: x.gather(2, stay[..., None].expand(-1, -1, -1, x.shape[3])) for name, x in {"k": k, "v": v}.items()
        }
        return weigh(logits + hidden[:, :, :-1], v), kept | {"mass": mass.gather(2, stay)}

    @torch.no_grad()
    def evict(self, logits: Attention, mass: Tensor) -> tuple[Tensor, Tensor]:
        """0 for a token that is there and −∞ for one that is out, at each place and behind the last (b h t+1 s), and
        the mass of each behind the last (b h s); from the logits (b h t s) and the mass before the first place."""
        t, s = logits.shape[-2:]
        mass = F.pad(mass, (0, t))
        out = torch.zeros_like(mass)
        hidden = [out]
        for place in range(s - t, s):
            mass = mass + torch.softmax(logits[:, :, place - s] + out, dim=-1)
            if place + 1 >= self.budget:
                old = place + 2 - (self.budget + 1) // 2
                least = mass[:, :, :old].argmin(dim=-1, keepdim=True)
                mass.scatter_(2, least, torch.inf)
                out = out.scatter(2, least, -torch.inf)
            hidden.append(out)
        return torch.stack(hidden, dim=2), mass

    def empty_state(self, q: Query, v: Value) -> State:
        return super().empty_state(q, v) | {"mass": full_precision(q)[:, :, :0, 0]}
