"""One engine for every mechanism whose memory is a matrix S (d_key × d_value) that decays, erases and writes:

    S_t = diag(e^{g_t}) S_{t−1} + b_t (a_tᵀ S_{t−1}) + k_t v_tᵀ,      o_t = S_tᵀ q_t.

Within a chunk of C places let G_t = Σ_{r≤t} g_r since its start, S the memory at its start and u_t = S_{t−1}ᵀ a_t
what is read for erasing. Then, with every exponent ≤ 0 (so that nothing overflows, however strong the decay),

    u_t = (a_t e^{G_{t−1}})ᵀ S + Σ_{s<t} ⟨a_t, b_s⟩_{t−1,s} u_s + ⟨a_t, k_s⟩_{t−1,s} v_s,   ⟨x, y⟩_{t,s} = Σ_c x_c y_c e^{G_tc − G_sc},

which is one triangular solve a chunk, for all chunks together: u = X + Y S. What is left of the loop over chunks is
one small product, S ← (diag(e^{G_C}) + B̃ᵀ Y) S + (K̃ᵀ V + B̃ᵀ X); the outputs are one batched product at the end.
Source of the form: Yang et al., arXiv 2406.06484 and 2412.06464; secondary chunks: arXiv 2312.06635.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recall_lab.mixer.base import Mixer
from recall_lab.shapes import Gates, Query, State, Value


class Update(NamedTuple):
    """What a mechanism does to its memory at every place."""

    write_key: Tensor
    """k: b h t k."""
    write_value: Tensor
    """v: b h t v."""
    log_decay: Tensor | None = None
    """g ≤ 0: b h t (one for the matrix) or b h t k (one a key channel); None: no decay."""
    erase_read: Tensor | None = None
    """a, read from the memory before its decay: b h t k; None: nothing is erased."""
    erase_key: Tensor | None = None
    """b: b h t k; None: the write key."""


def step(q: Query, update: Update, memory: Tensor) -> tuple[Value, Tensor]:
    """One place, by the definition. memory: b h k v."""
    k, v, g, a, b = update
    read = None if a is None else a @ memory
    if g is not None:
        memory = memory * (g[..., None] if g.dim() == 3 else g.mT).exp()
    memory = memory + k.mT @ v
    if read is not None:
        memory = memory + (k if b is None else b).mT @ read
    return q @ memory, memory
