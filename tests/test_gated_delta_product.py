"""Several keys and values per token: how they are projected, and that their reflections track the state of a group."""

from itertools import permutations

import pytest
import torch
from mixers import build, close
from torch import Tensor

from recall_lab.contract.mixer import draw
from recall_lab.mixer.base import l2_normalize


@pytest.mark.parametrize("short_conv", [0, 4])
def test_the_pairs_of_a_token_are_projected_and_convolved_like_one(short_conv):
    """Pair j of head h has the channels of the j-th block of that head's; all keys have unit length."""
    mixer = build("gated_delta_product", householders=3, short_conv=short_conv, d_key=4, d_value=6).double()
    x = draw(mixer, 20)
    _, k, v, gates, _ = mixer.project(x)
    projected = [mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)]
    if short_conv:
        projected, _ = mixer.conv(projected)
    keys, values = (torch.nn.functional.silu(x).unflatten(-1, (2, 3, -1)) for x in projected[1:])  # b t h n d
    for j in range(3):
        key, value = (k, v) if j == 0 else (gates["more_k"][:, :, :, j - 1], gates["more_v"][:, :, :, j - 1])
        assert close(key, l2_normalize(keys[:, :, :, j]).transpose(1, 2))
        assert close(value, values[:, :, :, j].transpose(1, 2))


def test_one_pair_per_token_is_the_gated_delta_rule():
    gated = build("gated_delta").double()
    one = build("gated_delta_product", householders=1, allow_neg_eigval=False).double()
    assert one.load_state_dict(gated.state_dict())
    x = draw(one, 70)
    assert torch.equal(one(x)[0], gated(x)[0])


def transpositions(element: tuple[int, ...]) -> list[tuple[int, int]]:
    """Swaps whose product, from the first to the last, moves element[i] to i: at most two for three elements."""
    swaps, current = [], list(range(len(element)))
    for i, wanted in enumerate(element):
        j = current.index(wanted)
        if i != j:
            swaps.append((i, j))
            current[i], current[j] = current[j], current[i]
    return swaps


@pytest.mark.parametrize("form", ["parallel", "run_recurrence"])
def test_two_reflections_per_token_track_the_permutations_of_three(form):
    """With β = 2 and k = (e_i − e_j)/√2, each write swaps two rows of the state, exactly and at any length."""
    mixer = build("gated_delta_product", heads=1, d_key=3, d_value=3, gated=False, short_conv=0).double()
    elements = list(permutations(range(3)))
    order = torch.randint(6, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    k, beta = torch.zeros(1, 1, 200, 2, 3).double(), torch.zeros(1, 1, 200, 2).double()
    state, expected = torch.eye(3).double(), []
    for t, which in enumerate(order):
        for j, (a, b) in enumerate(transpositions(elements[which])):
            k[0, 0, t, j, a], k[0, 0, t, j, b], beta[0, 0, t, j] = 0.5**0.5, -(0.5**0.5), 2
        state = state[list(elements[which])]
        expected.append(state)
    v = torch.zeros_like(k)
    gates = {"beta": beta[..., 0], "more_beta": beta[..., 1:], "more_k": k[:, :, :, 1:], "more_v": v[:, :, :, 1:]}
    q = 3**0.5 * torch.eye(3).double()[torch.arange(200) % 3][None, None]
    start: dict[str, Tensor] = {"S": torch.eye(3).double()[None, None]}
    o, after = getattr(mixer, form)(q, k[:, :, :, 0], v[:, :, :, 0], gates, start)
    assert close(o[0, 0], torch.stack([row[t % 3] for t, row in enumerate(expected)]))
    assert close(after["S"][0, 0], expected[-1])
    assert {tuple(map(tuple, row.tolist())) for row in expected} == {
        tuple(map(tuple, torch.eye(3)[list(e)].tolist())) for e in elements
    }
