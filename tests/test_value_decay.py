"""A decay per value channel: chunks equal the recurrence, at any chunk, length and strength of decay."""

import math

import pytest
import torch
from mixers import build, close
from torch import Tensor

from recall_lab.contract.mixer import draw, total
from recall_lab.mixer.value_decay import chunked, step


def inputs(length: int) -> list[Tensor]:
    """q, k, v, g and the first state, float64: two heads, three key channels and five value channels."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, 2, *shape, generator=generator, dtype=torch.float64)

    g = -normal(length, 5).square()
    g = torch.where(normal(length, 5) > 1.5, 1e3 * g, g)  # every fifteenth decay is strong
    return [normal(length, 3), normal(length, 3), normal(length, 5), g, normal(3, 5)]


def stepped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    outputs = [v[:, :, :0]]
    for t in range(q.shape[2]):
        o, state = step(*(x[:, :, t : t + 1] for x in (q, k, v, g)), state)
        outputs.append(o)
    return torch.cat(outputs, dim=2), state


@pytest.mark.parametrize("chunk", [1, 2, 16, 64])
@pytest.mark.parametrize("length", [0, 1, 2, 31, 64])
def test_chunks_equal_steps(length, chunk):
    given = [x.requires_grad_() for x in inputs(length)]
    results = [chunked(*given, chunk=chunk), stepped(*given)]
    gradients = [torch.autograd.grad(total(*result), given, materialize_grads=True) for result in results]
    for x, y in zip(*results, strict=True):
        assert close(x, y, 1e-12)
    for x, y in zip(*gradients, strict=True):
        assert close(x, y, 1e-11)


def test_a_log_decay_of_minus_infinity_forgets_its_channel():
    q, k, v, g, state = inputs(40)
    g[:, :, [0, 7, 31], 2] = -math.inf
    g.requires_grad_()
    results = [form(q, k, v, g, state) for form in (chunked, stepped)]
    for x, y in zip(*results, strict=True):
        assert close(x, y, 1e-12)
    (gradient,) = torch.autograd.grad(total(*results[0]), g)
    assert torch.isfinite(gradient).all()
    assert not gradient[:, :, [0, 7, 31], 2].any()


def test_slots_that_each_hold_one_token_are_softmax_attention():
    """With as many slots as tokens, token t written completely to slot t, and nothing forgotten."""
    mixer = build("gsa", slots=12, short_conv=0).double()
    q, k, v, _, _ = mixer.project(draw(mixer, 12))
    write = torch.eye(12).double().expand(2, 2, 12, 12)
    o, _ = mixer.parallel(q, k, v, {"log_decay": torch.zeros_like(write), "write": write})
    logits = (q @ k.mT).tril()  # an empty slot has a key and a value of zeros, hence logit 0
    assert close(o, torch.softmax(logits, dim=-1) @ v - torch.softmax(logits, dim=-1).triu(1) @ v)
