"""Merging of tokens with similar keys (KVMerger, Wang et al., arXiv 2407.08454)."""

from dataclasses import dataclass
from typing import ClassVar

from recall_lab.mixer import slot_merging
from recall_lab.mixer.cache import Static
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Gates, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Merging(Static):
    """A bounded number of slots: recent tokens have one each, older tokens with similar keys share one.

    Of B = `budget` slots ⌈B/2⌉ hold the most recent tokens (the current one included). A token that is no longer among
    them keeps its slot if it is one of the first ⌊B/2⌋ tokens; any later one is merged into one of the other
    ⌊B/2⌋ slots: that whose key has the largest cosine with its own (of equal ones the earliest). A slot holds the means
    k̄ and v̄ of its c tokens:  o_t = Σ_m softmax_m(q_t·k̄_m / √d_key + log c_m) v̄_m.  The term log c gives every token of
    a slot its own weight, so merging equal keys changes nothing.  A_ts is the weight of the slot of s divided by its c.
    The choice of slots has no gradient.  state: k̄, v̄ and c of at most B − 1 slots. With rotary positions k̄ is the mean
    of rotated keys, which are compared too; for ALiBi a slot is at the position of the latest of its tokens.
    Source: Wang et al., arXiv 2407.08454, and CaM, Zhang et al. (ICML 2024); log c from Bolya et al., arXiv 2210.09461.
    """

    least_budget: ClassVar[int] = 2
    gaps: ClassVar[bool] = True

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        with without_autocast(q):
            o, state = slot_merging.attend(q, full_precision(k), full_precision(v), state, self.budget, self.slope(q))
        return o.to(v.dtype), state

    def attend_one(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        with without_autocast(q):
            o, state = slot_merging.step(q, full_precision(k), full_precision(v), state, self.budget, self.slope(q))
        return o.to(v.dtype), state

    def empty_state(self, q: Query, v: Value) -> State:
        state = super().empty_state(full_precision(q), full_precision(v))
        return state | {"count": state["k"][..., 0]}
