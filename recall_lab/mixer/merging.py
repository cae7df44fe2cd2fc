"""Merging of tokens with similar keys (KVMerger, Wang et al., arXiv 2407.08454)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from recall_lab.mixer.base import without_autocast
from recall_lab.mixer.cache import Budget, CachedKey, CachedValue, causal, extend
from recall_lab.mixer.matrix_memory import full
from recall_lab.shapes import Gates, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Merging(Budget):
    """B = `budget` slots: the recent tokens each in one of its own, those that leave them merged by likeness of keys.

    The ⌈B/2⌉ most recent tokens (the current one included) stand alone. A token that leaves them takes a slot of its
    own while fewer than B are in use, that is, the first ⌊B/2⌋ tokens; every later one goes into the slot whose key
    has the largest cosine with its own, of equal ones the earliest. A slot holds the mean k̄ and v̄ of its c tokens:
    o_t = Σ_m softmax_m(q_t·k̄_m / √d_key + log c_m) v̄_m,  the log counting every token of a slot: merging tokens of
    equal keys changes nothing (proportional attention, as in ToMe).
    A_ts = softmax weight of the slot of s, divided by its c.  The choice of slots has no gradient.
    state: k̄, v̄ and c of at most B − 1 slots.
    Source: Wang et al., arXiv 2407.08454, and CaM, Zhang et al. (ICML 2024); log c from Bolya et al., arXiv 2210.09461.
    """

    least: ClassVar[int] = 2

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, memory: State) -> tuple[Value, State]:
        with without_autocast(q):
            o, memory = self.merge(
                q, *extend(memory, full(k), full(v)), F.pad(memory["count"], (0, k.shape[2]), value=1)
            )
        return o.to(v.dtype), memory

    def merge(self, q: Query, k: CachedKey, v: CachedValue, count: Tensor) -> tuple[Value, State]:
        """`attend` on the slots of the memory (b h s d, count b h s) with the new tokens behind them."""
        logits = causal(q, k)
        t, s = logits.shape[-2:]
        recent = (self.budget + 1) // 2
        slots = self.budget - recent
        leaving = s - self.budget + 1
        if leaving <= 0:
            return torch.softmax(logits + count.log()[:, :, None], dim=-1) @ v, {"k": k, "v": v, "count": count}
        k_slot, k_left, k_recent = k.split([slots, leaving, recent - 1], dim=2)
        v_slot, v_left, v_recent = v.split([slots, leaving, recent - 1], dim=2)
        count = count[:, :, :slots]
        joins = self.choose(k_slot.detach(), k_left.detach(), count)  # b h leaving slots, one-hot
        left = torch.ones(t, leaving, dtype=torch.bool, device=q.device).tril(leaving - t - 1)  # at place t: has left
        gone = logits.new_full((t, leaving), -torch.inf).tril(leaving - t - 1)

        # The logit of a mean key is the mean of its tokens' logits, and a weight on a mean is shared by its tokens: so
        # the slots, which change from place to place, need not be laid out for every place.
        size = count[:, :, None] + left.to(count) @ joins  # b h t slots
        l_slot, l_left, l_recent = logits.split([slots, leaving, recent - 1], dim=3)
        l_mean = (count[:, :, None] * l_slot + l_left.masked_fill(~left, 0) @ joins) / size + size.log()
        weight = torch.softmax(torch.cat([l_mean, l_left + gone, l_recent], dim=-1), dim=-1)
        w_slot, w_left, w_recent = weight.split([slots, leaving, recent - 1], dim=3)
        share = w_slot / size
        o = (share * count[:, :, None]) @ v_slot + (w_left + share @ joins.mT * left) @ v_left + w_recent @ v_recent

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
        onto, among = new @ total.mT, new @ new.mT
        joins = torch.zeros_like(onto)
        tiny = torch.finfo(onto.dtype).tiny
        square = total.square().sum(-1)[:, None].clamp(min=tiny)
        for e, (here, row, join) in enumerate(zip(onto.split(1, 1), among.split(1, 1), joins.split(1, 1), strict=True)):
            dot = torch.baddbmm(here, row[:, :, :e], joins[:, :e])
            join.scatter_(2, (dot * square.rsqrt()).argmax(dim=-1, keepdim=True), 1)
            square.addcmul_(join, torch.add(row[:, :, e, None], dot, alpha=2)).clamp_(min=tiny)
        return joins.view(*left.shape[:3], -1)

    def empty(self, q: Query, v: Value) -> State:
        k = full(q)[:, :, :0]
        return {"k": k, "v": full(v)[:, :, :0], "count": k[..., 0]}
