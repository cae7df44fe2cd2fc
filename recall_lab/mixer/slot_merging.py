"""The engine of `merging`: softmax attention over slots, each the mean of the tokens merged into it.

A state holds the mean keys (b h s k), the mean values (b h s v) and the token counts (b h s) of its slots: first the
⌊B/2⌋ slots that tokens are merged into, then the slots of the ⌈B/2⌉ − 1 most recent tokens (B = budget). While there
are fewer than B − 1 tokens, each has its own slot. Each new position adds a slot. If there are then B slots, the oldest
of the recent tokens leaves: it is merged into the slot whose mean key has the largest cosine with its own key.
With ALiBi, whose m_h is given as `slope`, the state also holds the `age` of every slot (b h s 1, see `cache.extend`):
that of its latest token.

`step` does this for one position and is the definition. `attend` computes a block of positions and equals it.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from recall_lab.mixer.cache import CachedKey, causal, extend, read, score
from recall_lab.mixer.positions import distance_bias
from recall_lab.shapes import Query, State, Value

Count = Float[Tensor, "b h s"]
"""How many tokens each slot holds."""
Joins = Float[Tensor, "b h leaving slots"]
"""1 for the slot that a leaving token is merged into, 0 elsewhere."""
Slope = Float[Tensor, "h"] | None


def step(q: Query, k: Query, v: Value, state: State, budget: int, slope: Slope = None) -> tuple[Value, State]:
    """The output at one position (b h 1 v) and the state after it."""
    after = extend(state, k, v)
    keys, values = after["k"], after["v"]
    count = F.pad(state["count"], (0, 1), value=1)
    logits = score(q, keys) + count.log()[:, :, None]
    if slope is not None:
        logits = logits + distance_bias(after["age"].mT, 1, slope)
    o = read(logits, values)
    if keys.shape[2] == budget:
        slots = budget // 2
        key = keys.detach()
        tiny = torch.finfo(key.dtype).tiny  # a key of zeros has the cosine 0
        cosine = F.cosine_similarity(key[:, :, :slots], key[:, :, slots, None], dim=-1, eps=tiny)  # b h slots
        join = F.one_hot(cosine.argmax(-1), slots).to(count)  # b h slots
        total = count[:, :, :slots] + join
        fraction = (join / total)[..., None]
        keys, values = (
            torch.cat([x[:, :, :slots].lerp(x[:, :, slots, None], fraction), x[:, :, slots + 1 :]], dim=2)
            for x in (keys, values)
        )
        count = torch.cat([total, count[:, :, slots + 1 :]], dim=2)
        if slope is not None:
            slot, leaves, recent = after["age"].tensor_split([slots, slots + 1], dim=2)
            after["age"] = torch.cat([torch.where(join[..., None] > 0, leaves, slot), recent], dim=2)
    return o, after | {"k": keys, "v": values, "count": count}


def attend(q: Query, k: Query, v: Value, state: State, budget: int, slope: Slope = None) -> tuple[Value, State]:
    """The outputs at any number of positions (b h t v) and the state after the last."""
    after = extend(state, k, v)
    keys, values = after["k"], after["v"]
    count = F.pad(state["count"], (0, k.shape[2]), value=1)
    t, s = q.shape[2], keys.shape[2]
    slots, recent, leaving = budget // 2, (budget + 1) // 2, s - budget + 1
    if leaving <= 0:
        bias = None if slope is None else distance_bias(after["age"].mT, t, slope)
        return read(causal(q, keys, bias), values), after | {"count": count}
    # In order: the slots, the tokens that leave the recent ones within this block, and those recent at its end.
    sizes = [slots, leaving, recent - 1]
    (k_slot, k_left, k_recent), (v_slot, v_left, v_recent) = keys.split(sizes, dim=2), values.split(sizes, dim=2)
    count = count[:, :, :slots]
    joins = choose_slots(k_slot.detach(), k_left.detach(), count)
    left = count.new_ones(t, leaving).tril(leaving - t - 1)  # t leaving: 1 once the token has left

    # The logit of a mean key is the mean of its tokens' logits, and a slot's weight is shared equally by its tokens.
    # So the logits and weights of tokens suffice, and the slots are not formed for every position.
    size = count[:, :, None] + left @ joins  # b h t slots
    s_slot, s_left, s_recent = score(q, keys).split(sizes, dim=3)
    s_slot = (count[:, :, None] * s_slot + (s_left * left) @ joins) / size + size.log()
    unseen = size.new_full((t, s), -torch.inf).triu(s - t + 1)
    unseen[:, slots : slots + leaving].masked_fill_(left.bool(), -torch.inf)
    logits = torch.cat([s_slot, s_left, s_recent], dim=-1) + unseen
    if slope is not None:
        age, after["age"] = ages(after["age"], joins, left)
        logits = logits + distance_bias(age, t, slope)
    weight = torch.softmax(logits, dim=-1)
    w_slot, w_left, w_recent = weight.split(sizes, dim=3)
    share = w_slot / size  # b h t slots: the weight of each token of a slot
    o = share @ (count[..., None] * v_slot) + (w_left + share @ joins.mT * left) @ v_left + w_recent @ v_recent

    total = count + joins.sum(2)  # b h slots
    old, new = (count / total)[..., None], (joins / total[:, :, None]).mT  # b h slots 1, b h slots leaving
    return o, after | {
        "k": torch.cat([old * k_slot + new @ k_left, k_recent], dim=2),
        "v": torch.cat([old * v_slot + new @ v_left, v_recent], dim=2),
        "count": F.pad(total, (0, recent - 1), value=1),
    }


def ages(
    age: Float[Tensor, "b h s 1"], joins: Joins, left: Float[Tensor, "t leaving"]
) -> tuple[Float[Tensor, "b h t s"], Float[Tensor, "b h kept 1"]]:
    """The age of every slot and token at each query, and those of the slots kept; all relative to the next token.

    left: 1 where a token has left before the query. Tokens leave in order, so a slot is as old as the last to join it.
    """
    leaving, slots = joins.shape[2:]
    slot, leaves, recent = age.tensor_split([slots, slots + leaving], dim=2)
    joined = torch.where(joins > 0, leaves, torch.inf)  # b h leaving slots
    latest = torch.cat([slot.mT, joined], dim=2).cummin(2).values  # b h 1+leaving slots
    at_query = latest[:, :, left.sum(1).long()]  # b h t slots
    others = age[:, :, slots:].mT.expand(-1, -1, len(left), -1)  # b h t s−slots
    return torch.cat([at_query, others], dim=3), torch.cat([latest[:, :, -1:].mT, recent], dim=2)


@torch.no_grad()
def choose_slots(slot: CachedKey, left: Query, count: Count) -> Joins:
    """The slot that each leaving token joins, chosen for one token after another.

    slot: mean keys of the slots; left: keys of the leaving tokens; count: tokens per slot. The sum of a slot's keys has
    the same cosines as their mean. Only its products with the leaving keys and its squared norm are updated.
    """
    total, new = (slot * count[..., None]).flatten(0, 1), left.flatten(0, 1)  # bh slots k, bh leaving k
    onto, cross = new @ total.mT, new @ new.mT  # bh leaving slots, bh leaving leaving
    joins = torch.zeros_like(onto)
    tiny = torch.finfo(onto.dtype).tiny
    square = total.square().sum(-1)[:, None].clamp(min=tiny)  # bh 1 slots
    own = cross.diagonal(dim1=1, dim2=2)[..., None, None]  # bh leaving 1 1
    for dot, row, join, itself in zip(*(x.split(1, 1) for x in (onto, cross, joins, own)), strict=True):
        now = torch.baddbmm(dot, row, joins)  # bh 1 slots; tokens that come later have joined no slot yet
        join.scatter_(2, (now * square.rsqrt()).argmax(dim=-1, keepdim=True), 1)
        square.addcmul_(join, itself[:, 0].add(now, alpha=2)).clamp_(min=tiny)  # |a + b|² = |a|² + 2ab + |b|²
    return joins.view(*left.shape[:3], -1)
