"""Numerics that several mechanisms share: precision, and sums of log decays."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full_precision(x: Tensor) -> Tensor:
    """x in float32 where it is float16 or bfloat16, else x itself.

    A state that adds up thousands of writes would lose most of them in half precision.
    """
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast is off on x's device, so that nothing in it is rounded to half precision.

    It does nothing on a device that has no autocast.
    """
    known = torch.amp.is_autocast_available(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if known else nullcontext()


def finite_log_decay(g: Tensor) -> Tensor:
    """The log decay g ≤ 0, limited to at least −10⁴; e^g is zero in every dtype, as it is for −inf.

    Unlike −inf, −10⁴ can be multiplied by zero and summed without NaN. Its gradient is zero, as is that of e^g.
    """
    return g.clamp(min=-1e4)


def log_decay_sums(g: Tensor) -> Tensor:
    """Σ_{r=s+1..t} g_r for every s ≤ t, and −inf for s > t (… t → … t s); g ≤ 0 is made finite first.

    Each sum is computed from its own terms: the difference of two longer sums would lose a weak decay next to a strong
    one. This needs storage for t³ numbers besides the result, and is meant for the positions of a chunk.
    """
    t = g.shape[-1]
    position = torch.arange(t, device=g.device)
    later = position > position[:, None]  # s r: r comes after s
    summed = (~later[:, None] & later).flatten(0, 1).to(g.dtype)  # (t s) r: r ≤ t and r > s
    undefined = g.new_zeros(t, t).masked_fill(later, -torch.inf).flatten()  # (t s)
    rows = finite_log_decay(g).reshape(g.shape[:-1].numel(), t)  # … r
    return torch.addmm(undefined, rows, summed.mT).view(*g.shape, t)
