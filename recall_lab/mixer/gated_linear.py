"""Linear attention with a scalar decay and a write gate."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from recall_lab.mixer.matrix_memory import MatrixMemory, Update
from recall_lab.shapes import Gates, Hidden, Query, Value


@dataclass(eq=False, repr=False, kw_only=True)
class GatedLinear(MatrixMemory):
    """A decay γ favours recent tokens, a write gate σ picks what enters.

    S_t = γ_t S_{t−1} + σ_t k_t v_tᵀ,  o_t = S_tᵀ q_t / √d;  A_ts = σ_s Π_{r=s+1..t} γ_r q_t·k_s / √d;  state: S.
    γ and σ are learned a token and head, or set by a number (1: off), or, γ alone, "retention": γ_h = 1 − 2^(−5−h).
    Source: RetNet, Sun et al., arXiv 2307.08621 (fixed γ); Mamba-2, Dao and Gu, arXiv 2405.21060 (γ and σ tied).
    """

    decay: str | int | float = "learned"
    """γ: "learned", "retention", or a number in (0, 1], 1 being off."""
    write: str | int | float = "learned"
    """σ: "learned", or a number, 1 being off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.decay, int | float)
        if not (0 < self.decay <= 1 if number else self.decay in ("learned", "retention")):
            raise ValueError(f"decay={self.decay!r}: learned, retention, or a number in (0, 1]")
        if not isinstance(self.write, int | float) and self.write != "learned":
            raise ValueError(f"write={self.write!r}: learned, or a number")
        # γ = sigmoid(…)^(1/16) starts near .96, as in GLA: half-lives of 16 tokens and more are there to be chosen.
        self.decay_proj = nn.Linear(self.d_model, self.heads) if self.decay == "learned" else None
        self.write_proj = nn.Linear(self.d_model, self.heads) if self.write == "learned" else None

    def gates(self, x: Hidden) -> Gates:
        """log_decay g = log γ and write σ: b h t each, those that are off left out."""
        gates = {}
        if self.decay_proj is not None:
            gates["log_decay"] = F.logsigmoid(self.decay_proj(x)).transpose(1, 2) / 16
        elif self.decay == "retention":
            gamma = 1 - torch.exp2(-5 - torch.arange(self.heads, dtype=x.dtype, device=x.device))
            gates["log_decay"] = gamma.log()[:, None].expand(x.shape[0], -1, x.shape[1])
        elif self.decay != 1:
            gates["log_decay"] = x.new_full((x.shape[0], self.heads, x.shape[1]), self.decay).log()
        if self.write_proj is not None:
            gates["write"] = torch.sigmoid(self.write_proj(x)).transpose(1, 2)
        elif self.write != 1:
            gates["write"] = x.new_full((x.shape[0], self.heads, x.shape[1]), self.write)
        return gates

    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        return Update(k, v * gates["write"][..., None] if "write" in gates else v, gates.get("log_decay"))
