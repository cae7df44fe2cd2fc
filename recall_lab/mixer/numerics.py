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


LEAST_LOG_DECAY = -1e4
"""A log decay below which e^g is zero in every type, also times any number of positions."""


def log_decay_sums(g: Tensor) -> Tensor:
    """Σ_{r=s+1..t} g_r for every s ≤ t, and −inf for s > t (… t → … t s); g ≤ 0 may be −inf.

    Each sum runs over its own terms alone: a difference of two longer sums would lose a weak decay beside a strong
    one, and be NaN beside −inf. A g below LEAST_LOG_DECAY counts as LEAST_LOG_DECAY, which forgets as completely and
    can be multiplied by zero. Its gradient is zero, as is that of e^g. Takes memory for t³ numbers beside the result.
    """
    t = g.shape[-1]
    position = torch.arange(t, device=g.device)
    first = position > position[:, None]  # s r: r comes after s
    last = position <= position[:, None]  # t r: r is not after t
    summed = (last[:, None] & first).flatten(0, 1).to(g.dtype)  # (t s) r
    never = torch.zeros(t, t, dtype=g.dtype, device=g.device).masked_fill(first, -torch.inf).flatten()  # (t s)
    sums = torch.addmm(never, g.clamp(min=LEAST_LOG_DECAY).reshape(-1, t), summed.mT)  # … (t s)
    return sums.view(*g.shape, t)
