"""Mechanisms whose queries, keys and gates are made from each other: what `project` makes of the projections."""

import pytest
import torch
import torch.nn.functional as F
from mixers import build, close, draw


@pytest.mark.parametrize("bound", [0.0, 0.9])
def test_hgrn2_writes_by_as_much_as_it_forgets(bound):
    """f = l + (1 − l) sigmoid(convolved keys), k = 1 − f, q = SiLU(convolved queries)."""
    mixer = build("hgrn2", lower_bound=bound).double()
    x = draw(mixer, 30)
    q, k, v, gates, _ = mixer.project(x)
    queries, keys, values, _ = mixer.vectors(x)
    assert close(gates["log_decay"].exp(), bound + (1 - bound) * torch.sigmoid(keys))
    assert close(k, 1 - gates["log_decay"].exp())
    assert close(q, F.silu(queries))
    assert torch.equal(v, values)
    assert torch.equal(mixer.gates(x)["log_decay"], gates["log_decay"])
    least = float(gates["log_decay"].detach().exp().min())
    assert bound < least < 1 - 0.5 * (1 - bound)


def test_hgrn2_forgets_and_writes_without_overflow():
    """Forget gates at 0 and 1 to rounding, where their logarithm and complement need their own formulas."""
    mixer = build("hgrn2", short_conv=0, heads=1).double()
    with torch.no_grad():
        mixer.k_proj.weight.copy_(1000 * torch.eye(16))
        _, k, _, gates, _ = mixer.project(torch.tensor([-1.0, 0.0, 1.0, 0.05]).double()[:, None, None].expand(4, 1, 16))
    g, k = gates["log_decay"][:, 0, 0, 0], k[:, 0, 0, 0]
    assert g.tolist() == pytest.approx([-1000, -0.6931471805599453, 0, -1.9287498479639178e-22], rel=1e-12)
    assert k.tolist() == pytest.approx([1, 0.5, 0, 1.9287498479639178e-22], rel=1e-12)
