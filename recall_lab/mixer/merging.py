"""Merging of tokens with similar keys (KVMerger, Wang et al., arXiv 2407.08454)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from recall_lab.mixer.cache import Budget, CachedKey, CachedValue, causal, extend, score, weigh
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Gates, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Merging(Budget):
    """A bounded number of slots: recent tokens each in one of its own, older ones merged by likeness of keys.

    Of B = `budget` slots ⌈B/2⌉ hold the most recent tokens (the current one included), one each. A token that leaves
    them keeps a slot of its own as long as there is one, as the first ⌊B/2⌋ tokens do; every later one goes into the
    slot of these whose key has the largest cosine with its own, of equal ones the earliest. A slot holds the means
    k̄ and v̄ of its c tokens:  o_t = Σ_m softmax_m(q_t·k̄_m / √d_key + log c_m) v̄_m.  By log c every token of a slot
    counts, so that merging equal keys changes nothing.  A_ts is the weight of the slot of s, divided by its c.
    The choice of slots has no gradient.
    state: k̄, v̄ and c of at most B − 1 slots.
    Source: Wang et al., arXiv 2407.08454, and CaM, Zhang et al. (ICML 2024); log c from Bolya et al., arXiv 2210.09461.
    """

    least: ClassVar[int] = 2

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        with without_autocast(q):
            o, state = self.merge(
                q, *extend(state, full_precision(k), full_precision(v)), F.pad(state["count"], (0, k.shape[2]), value=1)
            )
        return o.to(v.dtype), state

    def merge(self, q: Query, k: CachedKey, v: CachedValue, count: Tensor) -> tuple[Value, State]:
        """`attend` on the slots of the state (b h s d, count b h s) with the new tokens behind them."""
        t, s = q.shape[2], k.shape[2]
        recent = (self.budget + 1) // 2
        leaving = s - self.budget + 1
        if leaving <= 0:
            return weigh(causal(q, k), v), {"k": k, "v": v, "count": count}
        # Behind the slots for good stand the tokens that leave in this block, then those that are recent at its end.
        sizes = [self.budget - recent, leaving, recent - 1]
        (k_slot, k_left, k_recent), (v_slot, v_left, v_recent) = k.split(sizes, dim=2), v.split(sizes, dim=2)
        count = count[:, :, : sizes[0]]
        joins = self.choose(k_slot.detach(), k_left.detach(), count)  # b h leaving slots, one-hot
        left = count.new_ones(t, leaving).tril(leaving - t - 1)  # 1 once the token has left

        # The logit of a mean key is the mean of its tokens' logits, and a weight on a mean is shared by its tokens: so
        # the slots, which change from place to place, need not be laid out for every place.
        size = count[:, :, None] + left @ joins  # b h t slots
        l_slot, l_left, l_recent = score(q, k).split(sizes, dim=3)
        l_slot = (count[:, :, None] * l_slot + (l_left * left) @ joins) / size + size.log()
        unseen = size.new_full((t, s), -torch.inf).triu(s - t + 1)
        unseen.split(sizes, dim=1)[1].masked_fill_(left.bool(), -torch.inf)
        weight = torch.softmax(torch.cat([l_slot, l_left, l_recent], dim=-1) + unseen, dim=-1)
        w_slot, w_left, w_recent = weight.split(sizes, dim=3)
        share = w_slot / size
        o = share @ (count[..., None] * v_slot) + (w_left + share @ joins.mT * left) @ v_left + w_recent @ v_recent

        total = count + joins.sum(2)
        fold = (count / total)[..., None], (joins / total[:, :, None]).mT
        return o, {
            "k": torch.cat([fold[0] * k_slot + fold[1] @ k_left, k_recent], dim=2),
            "v": torch.cat([fold[0] * v_slot + fold[1] @ v_left, v_recent], dim=2),
            "count": F.pad(total, (0, recent - 1), value=1),
        }

    @torch.no_grad()
    def choose(self, slot: CachedKey, left: Query, count: Tensor) -> Tensor:
        """The slot that each token joins, one after another (b h leaving slots, one-hot)."""
        total, new = (slot * count[..., None]).flatten(0, 1), left.flatten(0, 1)
        onto, cross = new @ total.mT, new @ new.mT
        joins = torch.zeros_like(onto)
        tiny = torch.finfo(onto.dtype).tiny
        square = total.square().sum(-1)[:, None].clamp(min=tiny)
        own = cross.diagonal(dim1=1, dim2=2)[..., None, None]
        for here, row, join, itself in zip(*(x.split(1, 1) for x in (onto, cross, joins, own)), strict=True):
            dot = torch.baddbmm(here, row, joins)  # those still to come have joined none yet
            join.scatter_(2, (dot * square.rsqrt()).argmax(dim=-1, keepdim=True), 1)
            square.addcmul_(join, itself[:, 0].add(dot, alpha=2)).clamp_(min=tiny)
        return joins.view(*left.shape[:3], -1)

    def empty_state(self, q: Query, v: Value) -> State:
        k = full_precision(q)[:, :, :0]
        return {"k": k, "v": full_precision(v)[:, :, :0], "count": k[..., 0]}
