"""Numerics that several mechanisms share: precision, and sums of log decays."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full_precision(x: Tensor) -> Tensor:
    """x in float32 where it is float16 or bfloat16, else x itself.

    A state that adds up thousands of writes would lose most of them in half precision.
    """
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which autocast is off on x's device, so that nothing in it is rounded to half precision.

    It does nothing on a device that has no autocast.
    """
    known = torch.amp.is_autocast_available(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if known else nullcontext()


def log_decay_sums(g: Tensor) -> Tensor:
    """Σ_{r=s+1..t} g_r for every s ≤ t, and −inf for s > t (… t → … t s).

    Each sum runs over its own terms alone. A difference of two longer sums would lose a weak decay that follows a
    strong one.
    """
    ones = g.new_ones(g.shape[-1], g.shape[-1])
    return (ones.tril() @ (g[..., None] * ones.tril(-1))).masked_fill(ones.triu(1).bool(), -torch.inf)
