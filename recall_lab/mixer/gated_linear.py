"""Linear attention with a scalar decay and a write gate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from recall_lab.checks import choice, number, require
from recall_lab.mixer.matrix_memory import MatrixMemory, Update
from recall_lab.shapes import Gates, Hidden, Query, Value


@dataclass(eq=False, repr=False, kw_only=True)
class GatedLinear(MatrixMemory):
    """A decay γ favours recent tokens, and a write gate σ selects what is written.

    S_t = γ_t S_{t−1} + σ_t k_t v_tᵀ,  o_t = S_tᵀ q_t / √d;  A_ts = σ_s Π_{r=s+1..t} γ_r q_t·k_s / √d;  state: S.
    γ and σ are computed from x, per token and head, or they are constants. The constants of "retention" are
    γ_h = 1 − 2^(−5−h) for head h. A learned γ = sigmoid(·)^(1/16) starts near .96, a half-life of 16 tokens, as in GLA;
    a learned σ = sigmoid(·) starts near ½.
    Source: RetNet, Sun et al., arXiv 2307.08621 (constant γ); Mamba-2, Dao and Gu, arXiv 2405.21060 (γ and σ tied).
    """

    decay: str | int | float = "learned"
    """γ: "learned", "retention", or a number in (0, 1]; at 1 nothing decays."""
    write: str | int | float = "learned"
    """σ: "learned", or a number; at 1 every pair is written completely."""

    neutral_gates: ClassVar[Mapping[str, float]] = {"log_decay": 0.0, "write": 1.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.decay, str):
            choice("decay", self.decay, ["learned", "retention"])
        else:
            number("decay", self.decay, above=0.0)
            require(self.decay <= 1, f"decay={self.decay!r}: must be at most 1")
        if isinstance(self.write, str):
            choice("write", self.write, ["learned"])
        else:
            number("write", self.write)
        self.decay_proj = nn.Linear(self.d_model, self.heads) if self.decay == "learned" else None
        self.write_proj = nn.Linear(self.d_model, self.heads) if self.write == "learned" else None

    @property
    def fixed_gates(self) -> frozenset[str]:
        projections = {"log_decay": self.decay_proj, "write": self.write_proj}
        return frozenset(name for name, proj in projections.items() if proj is None)

    def gates(self, x: Hidden) -> Gates:
        """log_decay g = log γ and write σ: b h t each. A gate that is the constant 1 is left out."""
        gates = {}
        ones = x.new_ones(x.shape[0], self.heads, x.shape[1])  # b h t
        if self.decay_proj is not None:
            gates["log_decay"] = F.logsigmoid(self.decay_proj(x)).transpose(1, 2) / 16
        elif self.decay == "retention":
            gamma = 1 - torch.exp2(-5 - torch.arange(self.heads, dtype=x.dtype, device=x.device))
            gates["log_decay"] = ones * gamma.log()[:, None]
        elif not isinstance(self.decay, str) and self.decay != 1:
            gates["log_decay"] = (ones * self.decay).log()
        if self.write_proj is not None:
            gates["write"] = torch.sigmoid(self.write_proj(x)).transpose(1, 2)
        elif not isinstance(self.write, str) and self.write != 1:
            gates["write"] = ones * self.write
        return gates

    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        return Update(k, v * gates["write"][..., None] if "write" in gates else v, gates.get("log_decay"))
