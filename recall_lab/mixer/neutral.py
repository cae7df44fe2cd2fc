"""Gates given as numbers, and tests of a mechanism's neutral gates: write every pair completely, forget nothing.

Neutral gates are tested by their consequences. A state with a single pair must return its value for its key: a gate
that writes nothing fails this test. Where the mechanism has no feature map, writing pairs with other, orthogonal keys
must not change the answer to the first key: a decay fails this test. A key that is written twice must be answered with
both values at equal weights, or with the second alone.
"""

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from recall_lab.checks import require
from recall_lab.mixer.base import Mixer
from recall_lab.shapes import Gates, Hidden, Query, Value


def number_gates(mixer: Mixer, hidden: Hidden, given: Mapping[str, float]) -> Gates:
    """The mixer's gates for hidden (b t m), each set to one number at every position if it has a number.

    The number is the one in `given`, or else the neutral value, unless the mixer's options fix the gate. A gate without
    a number is computed from hidden. Raises ValueError for a name in `given` that is no gate of this mixer.
    """
    gates = mixer.gates(hidden)
    for name in given:
        require(
            name in gates,
            f"{type(mixer).__name__} has no gate {name!r}; its gates: {', '.join(gates) or 'none'}",
        )
    numbers = {name: x for name, x in mixer.neutral_gates.items() if name not in mixer.fixed_gates} | dict(given)
    return _set(gates, numbers)


def neutral_fault(mixer: Mixer, numbers: Mapping[str, float]) -> str:
    """Which property of neutral gates these lack, with its value; empty where they have all three.

    - A single pair is answered with its value (cosine of at least .999).
    - Where no feature map is applied to keys, the answer to the first of several orthogonal keys stays the same when
      the others have been written.
    - Where the mechanism is linear in v, a second write of a key either leaves the weight of the first write unchanged
      or replaces it completely.
    """
    pairs = min(8, mixer.d_key)
    cosine = answers_one_pair(mixer, numbers)
    if cosine < 0.999:
        return f"a single pair is not answered with its value (cosine {cosine:.3f})"
    if reads_unmapped_keys(mixer, numbers) and (kept := keeps_first_pair(mixer, numbers, pairs)) < 0.999:
        return f"{pairs - 1} further writes leave only {kept:.3f} of the answer to the first key"
    if mixer.linear_in_v and min(abs(kept := weight_kept(mixer, numbers, pairs)), abs(kept - 1)) > 1e-3:
        return f"after a second write of a key, the first keeps {kept:.3f} of its weight, neither all nor none"
    return ""


@torch.no_grad()
def answers_one_pair(mixer: Mixer, gates: Mapping[str, float]) -> float:
    """Cosine between the value of the only pair in the state and the answer to its key, at gates given as numbers.

    It is the smallest over eight random pairs and all heads: 1 at neutral gates, 0 where the answer is zero.
    """
    k, v = _unit(mixer, 8, mixer.d_key), _unit(mixer, 8, mixer.d_value)
    o = _answers(mixer, gates, k, k, v)
    return float(torch.cosine_similarity(o, v, dim=-1).nan_to_num(nan=-1.0).min())


@torch.no_grad()
def keeps_first_pair(mixer: Mixer, gates: Mapping[str, float], pairs: int) -> float:
    """The share of the answer to the first of `pairs` orthogonal keys that remains after the others are written.

    1 − ‖o_m − o_1‖ / ‖o_1‖, where o_i is the answer to the first key after i pairs; the smallest over all heads: 1 at
    neutral gates. Meaningful only where `reads_unmapped_keys`. Raises ValueError for more pairs than d_key.
    """
    require(pairs <= mixer.d_key, f"pairs={pairs} orthogonal keys do not fit d_key={mixer.d_key}")
    k = _unit(mixer, mixer.d_key, mixer.d_key).permute(2, 1, 3, 0)  # 1 h k k
    k = torch.linalg.qr(k.cpu().double())[0].mT[:, :, :pairs].to(k)  # 1 h m k
    v = _unit(mixer, pairs, mixer.d_value).permute(2, 1, 0, 3)  # 1 h m v
    o = _answers(mixer, gates, k[:, :, :1].expand_as(k), k, v)
    first, last = o[:, :, 0], o[:, :, -1]
    return float((1 - (last - first).norm(dim=-1) / first.norm(dim=-1)).nan_to_num(nan=-1.0).min())


@torch.no_grad()
def reads_unmapped_keys(mixer: Mixer, gates: Mapping[str, float]) -> bool:
    """Whether the answer from one pair is c (q·k) v with one c for all queries.

    This holds without a feature map. It does not hold for softmax, nor for linear attention with a feature map.
    """
    k, v, q = _unit(mixer, 8, mixer.d_key), _unit(mixer, 8, mixer.d_value), _unit(mixer, 16, mixer.d_key)[8:]
    own = _answers(mixer, gates, k, k, v)
    expected = (q * k).sum(-1, keepdim=True) * own
    tolerance = 1e-3 * float(own.abs().max())
    return tolerance > 0 and all(
        torch.allclose(_answers(mixer, gates, sign * q, k, v), sign * expected, rtol=0, atol=tolerance)
        for sign in (1, -1)
    )


@torch.no_grad()
def weight_kept(mixer: Mixer, numbers: Mapping[str, float], pairs: int) -> float:
    """Weight of the first write of a key divided by that of its second, with pairs − 1 orthogonal keys in between."""
    weight = mixer.q_proj.weight
    k = torch.eye(mixer.d_key, dtype=weight.dtype, device=weight.device)[[*range(pairs), 0]]  # t k
    k = k.expand(1, mixer.heads, -1, -1)
    hidden = np.random.default_rng(0).standard_normal((1, pairs + 1, mixer.d_model))
    gates = number_gates(mixer, torch.from_numpy(hidden).to(weight), numbers)
    kept, last = mixer.effective_attention(k[:, :, -1:].expand_as(k), k, gates)[0, :, -1, [0, -1]].unbind(-1)
    return float((kept / last).nan_to_num(nan=torch.inf).max())


def _unit(mixer: Mixer, count: int, width: int) -> Float[Tensor, "n h 1 d"]:
    """Random unit vectors per head, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, mixer.heads, 1, width, generator=generator, dtype=torch.float64)
    return (x / x.norm(dim=-1, keepdim=True)).to(mixer.q_proj.weight)


def _answers(mixer: Mixer, numbers: Mapping[str, float], q: Query, k: Query, v: Value) -> Value:
    """The mechanism's outputs at gates given as numbers; a gate without a number is computed from x = 0."""
    gates = mixer.gates(mixer.q_proj.weight.new_zeros(q.shape[0], q.shape[2], mixer.d_model))
    return mixer.parallel(q, k, v, _set(gates, numbers))[0]


def _set(gates: Gates, numbers: Mapping[str, float]) -> Gates:
    """The gates, each with its number at every position where it has one."""
    return {name: torch.full_like(x, numbers[name]) if name in numbers else x for name, x in gates.items()}
