"""Whether the delta rule's update is one step of gradient descent, by automatic differentiation."""

import copy

import torch

from recall_lab.checks import whole_number
from recall_lab.mixer.base import Trace
from recall_lab.probe.base import Row
from recall_lab.probe.queries import exact


def sgd_step(trace: Trace, rng: object, *, steps: int = 32) -> list[Row]:
    """Compares the update of a mechanism with a write strength β and a matrix state S to a step of gradient descent.

    steps  positions that are compared, from the first on

    Row: sgd_error, the largest ‖S_t − Ŝ_t‖_F/‖S_t‖_F over positions, sequences and heads, in float64. S_t is the state
    after the mechanism's recurrence, and Ŝ_t = S' − β ∇½‖S'ᵀk_t − v_t‖², with the gradient of torch.autograd at
    S' = S_{t−1}, or at the decayed state e^g S_{t−1} for a mechanism with a decay.
    No rows for a mechanism without the gate beta or the state S. Raises ValueError unless steps is a positive whole
    number.
    """
    whole_number("steps", steps)
    mixer = copy.deepcopy(trace.mixer).double().to(exact(trace.q).device)
    q, k, v = (exact(x.detach()) for x in (trace.q, trace.k, trace.v))
    gates = {name: exact(gate.detach()) for name, gate in trace.gates.items()}
    state = mixer.empty_state(q, v)
    if "beta" not in gates or "S" not in state:
        return []
    largest = 0.0
    for t in range(min(steps, q.shape[2])):
        here = slice(t, t + 1)
        gate = {name: x[:, :, here] for name, x in gates.items()}
        with torch.no_grad():
            after = mixer.recurrence(q[:, :, here], k[:, :, here], v[:, :, here], gate, state)[1]
        decayed = state["S"].detach()  # b h k v
        if "log_decay" in gate:
            decay = gate["log_decay"].exp()  # b h 1, or b h 1 k
            decayed = decayed * (decay[..., None] if decay.dim() == 3 else decay.mT)
        decayed.requires_grad_()
        with torch.enable_grad():
            loss = (decayed.mT @ k[:, :, t, :, None] - v[:, :, t, :, None]).square().sum() / 2
            (gradient,) = torch.autograd.grad(loss, decayed)
        stepped = decayed.detach() - gate["beta"][..., None] * gradient
        error = (after["S"] - stepped).norm(dim=(-2, -1)) / after["S"].norm(dim=(-2, -1)).clamp(min=1e-300)
        largest = max(largest, float(error.max()))
        state = after
    return [{"metric": "sgd_error", "layer": trace.layer, "value": largest}]
