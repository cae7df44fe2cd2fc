"""Gates, and norms of queries, keys and values, by the role of the token."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from recall_lab.mixer.base import Trace
from recall_lab.probe.base import Row
from recall_lab.probe.rows import mean_row

ALL = "all"
"""The role of the rows on all positions."""


@torch.no_grad()
def gates(trace: Trace, rng: object) -> list[Row]:
    """Means of the gates, and of the norms of q, k and v, over the tokens of each role.

    Rows, per head, with the columns layer, head and role (a word of the task, such as "value" or "filler"; "all": all
    positions, the only one where roles are not known):
      gate_NAME               the gate, averaged over its channels where it has one per channel
      q_norm, k_norm, v_norm  ‖q‖, ‖k‖, ‖v‖
    A decay γ is given as gate_log_decay, its natural logarithm. With the mean g over all positions, a pair's weight
    falls to one half in ln 2 / (−g) tokens.
    """
    measured: dict[str, Float[Tensor, "b h t"]] = {
        f"gate_{name}": gate if gate.dim() == 3 else gate.flatten(3).mean(-1) for name, gate in trace.gates.items()
    }
    measured |= {f"{name}_norm": getattr(trace, name).norm(dim=-1) for name in ("q", "k", "v")}
    b, _, t, _ = trace.q.shape
    roles = np.full((b, t), ALL) if trace.roles is None else trace.roles
    sequence = np.broadcast_to(np.arange(b)[:, None], (b, t))
    chosen = {ALL: np.ones((b, t), dtype=bool)} | {str(role): roles == role for role in np.unique(roles)}
    return [
        {"layer": trace.layer, "head": head, **mean_row(metric, values[where], sequence[where], role=role)}
        for metric, tensor in measured.items()
        for head, values in enumerate(tensor.float().cpu().numpy().swapaxes(0, 1))
        for role, where in chosen.items()
    ]
