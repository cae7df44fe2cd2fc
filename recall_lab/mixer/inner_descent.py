"""A linear model that is trained on the tokens as they come, by one step of gradient descent per mini-batch.

The model f(x) = x + LN(x W + c) maps k_s to v_s; its loss is ½‖f(k_s) − v_s‖². LN is a layer norm with a learned
scale and shift, the same at all positions. With W and c at the start of the mini-batch and u_s the gradient of the loss
of token s with respect to k_s W + c at that W and c, the read-out at position t is

    z_t = q_t W_t + c_t,  W_t = W − a_t Σ_s l_s k_sᵀ u_s,  c_t = c − a_t Σ_s l_s u_s

with sums over the positions s ≤ t of the mini-batch, a rate l_s of each token and a share a_t of each position. The
next mini-batch starts from the last W_t and c_t. `step` is one position of this; `mini_batches` computes all z_t of a
mini-batch together, as q_t W + c − a_t Σ_s l_s (q_t·k_s + 1) u_s.

Source: Sun et al., arXiv 2407.04620 (the dual form).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from recall_lab.shapes import Query, State, Value


class Norm(NamedTuple):
    """The layer norm of the model: scale and shift, h 1 v each."""

    scale: Tensor
    shift: Tensor


EPS = 1e-6


def layer_norm(z: Tensor, norm: Norm) -> Tensor:
    """LN(z) over the last axis of z (… h t v)."""
    normal, _ = _standardized(z)
    return normal * norm.scale + norm.shift


def _standardized(z: Tensor) -> tuple[Tensor, Tensor]:
    """z with mean 0 and variance 1 along its last axis, and the standard deviation that it was divided by."""
    centred = z - z.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    return centred / deviation, deviation


def gradient(z: Tensor, target: Tensor, norm: Norm) -> Tensor:
    """The gradient of ½‖LN(z) − target‖² with respect to z."""
    normal, deviation = _standardized(z)
    d = norm.scale * (normal * norm.scale + norm.shift - target)
    return (d - d.mean(-1, keepdim=True) - normal * (d * normal).mean(-1, keepdim=True)) / deviation


def empty(W: Tensor, c: Tensor) -> State:
    """The state of the model W (b h k v), c (b h 1 v) at the start of a mini-batch."""
    b, h, k, v = W.shape
    return {"W": W, "c": c, "keys": W.new_zeros(b, h, 0, k), "gradients": W.new_zeros(b, h, 0, v)}


def step(
    q: Query, k: Query, v: Value, rate: Tensor, share: Tensor, norm: Norm, state: State, size: int
) -> tuple[Value, State]:
    """One position (t = 1) by the definition: z (b h 1 v) and the state after it."""
    W, c, keys, gradients = _with_new(k, v, rate, norm, state)
    share = share[..., None]  # b h 1 1
    W_t, c_t = W - share * (keys.mT @ gradients), c - share * gradients.sum(2, keepdim=True)
    last = keys.shape[2] == size
    return q @ W_t + c_t, empty(W_t, c_t) if last else {"W": W, "c": c, "keys": keys, "gradients": gradients}


def mini_batches(
    q: Query, k: Query, v: Value, rate: Tensor, share: Tensor, norm: Norm, state: State, size: int
) -> tuple[Value, State]:
    """All positions: z (b h t v) and the state after the last. rate l and share a: b h t each. t may be 0.

    The state holds W and c at the start of the current mini-batch, and the keys and gradients l u of its tokens so far.
    """
    length, start, outputs = q.shape[2], 0, [v[:, :, :0]]
    while start < length:
        stop = min(length, start + size - state["keys"].shape[2])
        here = slice(start, stop)
        query, a = q[:, :, here], share[:, :, here, None]  # b h s k, b h s 1
        W, c, keys, gradients = _with_new(k[:, :, here], v[:, :, here], rate[:, :, here], norm, state)
        weights = (query @ keys.mT + 1).tril(keys.shape[2] - query.shape[2])
        outputs.append(query @ W + c - a * (weights @ gradients))
        state = {"W": W, "c": c, "keys": keys, "gradients": gradients}
        if keys.shape[2] == size:
            a = a[:, :, -1:]  # b h 1 1
            state = empty(W - a * (keys.mT @ gradients), c - a * gradients.sum(2, keepdim=True))
        start = stop
    return torch.cat(outputs, dim=2), state


def _with_new(k: Query, v: Value, rate: Tensor, norm: Norm, state: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W and c, and the keys and gradients l u of the mini-batch with those of the new tokens."""
    W, c = state["W"], state["c"]
    new = rate[..., None] * gradient(k @ W + c, v - k, norm)
    return W, c, torch.cat([state["keys"], k], dim=2), torch.cat([state["gradients"], new], dim=2)
