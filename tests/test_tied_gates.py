"""Mechanisms whose queries, keys and gates are made from each other: what `project` makes of the projections."""

import pytest
import torch
import torch.nn.functional as F
from mixers import build, close

from recall_lab.contract.mixer import draw


@pytest.mark.parametrize("bound", [0.0, 0.9])
def test_hgrn2_writes_by_as_much_as_it_forgets(bound):
    """f = l + (1 − l) sigmoid(convolved keys), k = 1 − f, q = SiLU(convolved queries)."""
    mixer = build("hgrn2", lower_bound=bound).double()
    x = draw(mixer, 30)
    q, k, v, gates, _ = mixer.project(x)
    queries, keys, values, _, _ = mixer.vectors(x)
    assert close(gates["log_decay"].exp(), bound + (1 - bound) * torch.sigmoid(keys))
    assert close(k, 1 - gates["log_decay"].exp())
    assert close(q, F.silu(queries))
    assert torch.equal(v, values)
    assert torch.equal(mixer.gates(x)["log_decay"], gates["log_decay"])
    least = float(gates["log_decay"].detach().exp().min())
    assert bound < least < 1 - 0.5 * (1 - bound)


def test_comba_corrects_the_query_before_it_is_normalized():
    """q − D b k of the convolved projections, scaled to its learned length; keys have unit length."""
    mixer = build("comba", d_key=4).double()
    with torch.no_grad():
        mixer.D.copy_(torch.tensor([0.5, -2.0]))
        mixer.b.copy_(torch.tensor([0.0, 3.0]))
    x = draw(mixer, 30)
    q, k, v, gates, _ = mixer.project(x)
    queries, keys, values, _, _ = mixer.vectors(x)
    factor = torch.tensor([0.5 * 0.5, -2 * 0.9525741268224334], dtype=torch.float64)[:, None, None]
    assert close(q, 4 * F.normalize(queries - factor * keys, dim=-1))
    assert close(k, F.normalize(keys, dim=-1))
    assert torch.equal(v, values)
    assert close(gates["feedback"][0, :, 7], torch.tensor([0.5, 0.9525741268224334], dtype=torch.float64))


def test_comba_without_decay_or_at_full_feedback_is_a_delta_rule():
    """S − β k (Sᵀ b k)ᵀ + β k vᵀ: at g = 0 and b = 1 the delta rule, at b = e^{g} the gated delta rule."""
    comba, gated = (build(name, short_conv=0).double() for name in ("comba", "gated_delta"))
    q, k, v, gates, _ = gated.project(draw(gated, 50))
    gates["log_decay"] = -0.3 * torch.rand(2, 2, 50, generator=torch.Generator().manual_seed(0)).double()
    expected, state = gated.parallel(q, k, v, gates)
    o, after = comba.parallel(q, k, v, gates | {"feedback": gates["log_decay"].exp()})
    assert close(o, expected)
    assert close(after["S"], state["S"])


def test_hgrn2_forgets_and_writes_without_overflow():
    """Forget gates at 0 and 1 to rounding, where their logarithm and complement need their own formulas."""
    mixer = build("hgrn2", short_conv=0, heads=1).double()
    with torch.no_grad():
        mixer.k_proj.weight.copy_(1000 * torch.eye(16))
        _, k, _, gates, _ = mixer.project(torch.tensor([-1.0, 0.0, 1.0, 0.05]).double()[:, None, None].expand(4, 1, 16))
    g, k = gates["log_decay"][:, 0, 0, 0], k[:, 0, 0, 0]
    assert g.tolist() == pytest.approx([-1000, -0.6931471805599453, 0, -1.9287498479639178e-22], rel=1e-12)
    assert k.tolist() == pytest.approx([1, 0.5, 0, 1.9287498479639178e-22], rel=1e-12)
