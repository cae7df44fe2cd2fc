"""The engine of matrix states versus naive forms: outputs and gradients, for any decay and length, and under vmap."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recall_lab.mixer.channel_decay import channel_decay
from recall_lab.mixer.decayed_products import DecayedProducts, naive_decay, scalar_decay
from recall_lab.mixer.delta_rule import DeltaRule
from recall_lab.mixer.gated_delta import GatedDelta
from recall_lab.mixer.gated_linear import GatedLinear
from recall_lab.mixer.gla import GLA
from recall_lab.mixer.kda import KDA
from recall_lab.mixer.log_linear import LogLinear
from recall_lab.mixer.mamba2 import Mamba2
from recall_lab.mixer.matrix_memory import MatrixMemory, Update, chunked, naive
from recall_lab.mixer.mesa import Mesa
from recall_lab.mixer.numerics import log_decay_sums
from recall_lab.mixer.rwkv7 import RWKV7

LENGTHS = [1, 31, 32, 33, 63, 100, 130]
DECAYS = {
    "weak": lambda g: 0.1 * g,
    "strong": lambda g: 20 * g,
    "none": lambda g: 0 * g,
    "huge": lambda g: torch.full_like(g, -1e4),
    "forget": lambda g: torch.full_like(g, -torch.inf),
    "mixed": lambda g: torch.where(g < -0.9, -torch.inf, torch.where(g < -0.8, -1e4, torch.where(g < -0.5, 0.0, g))),
}
"""Name → map from g, uniform in (−1, 0), to the log decays that a chunk may have."""


def decays(g: Tensor) -> Tensor:
    """Log decays, of a different kind in each sequence of the batch."""
    return torch.stack([decay(x) for x, decay in zip(g, DECAYS.values(), strict=True)])


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def close(first: tuple[Tensor, ...], second: tuple[Tensor, ...], tolerance: float = 1e-9) -> None:
    for i, (x, y) in enumerate(zip(first, second, strict=True)):
        assert torch.isfinite(y).all(), i
        assert torch.allclose(x, y, rtol=tolerance, atol=tolerance), f"{i}: {(x - y).abs().max()}"


def with_gradients(form: Callable, leaves: tuple[Tensor, ...], seed: int = 0) -> tuple[Tensor, ...]:
    """Outputs of form(*leaves), and gradients of a random linear function of them with respect to the leaves."""
    leaves = tuple(x.detach().requires_grad_() for x in leaves)
    outputs = form(*leaves)
    generator = torch.Generator().manual_seed(seed)
    d_outputs = [normal(generator, *x.shape) for x in outputs]
    return *outputs, *torch.autograd.grad(outputs, leaves, d_outputs, materialize_grads=True)


# The products within a chunk.


def products(form: Callable, reads_before_decay: bool) -> Callable[..., tuple[Tensor, ...]]:
    """All products in one tuple, from g and joined reads and keys (n c r k); those that are undefined are zero."""

    def run(g: Tensor, reads: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
        out: DecayedProducts = form(g, reads.unbind(2), keys.unbind(2), reads_before_decay)
        pairs = [pair.tril(-i) for i, row in enumerate(out.pairs) for pair in row]
        return *pairs, *out.from_start, *out.to_end, out.total

    return run


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("reads_before_decay", [False, True])
@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("reads", [1, 2])
@pytest.mark.parametrize(("form", "channels"), [(scalar_decay, ()), (channel_decay, (5,))])
def test_decayed_products(form, channels, reads, keys, reads_before_decay, decay):
    reads_before_decay = reads_before_decay and reads > 1
    generator = torch.Generator().manual_seed(1)
    g = DECAYS[decay](-uniform(generator, 3, 8, *channels))
    leaves = (g, normal(generator, 3, 8, reads, 5), normal(generator, 3, 8, keys, 5))
    fast, slow = (products(which, reads_before_decay) for which in (form, naive_decay))
    close(with_gradients(fast, leaves), with_gradients(slow, leaves))


@pytest.mark.parametrize("reads_before_decay", [False, True])
def test_channel_decay_by_finite_differences(reads_before_decay):
    generator = torch.Generator().manual_seed(2)
    leaves = [-uniform(generator, 2, 8, 3), normal(generator, 2, 8, 2, 3), normal(generator, 2, 8, 2, 3)]
    leaves = [x.requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(
        products(channel_decay, reads_before_decay), leaves, check_batched_grad=True, fast_mode=True
    )


def test_channel_decay_under_vmap():
    generator = torch.Generator().manual_seed(3)
    g, reads, keys = -uniform(generator, 4, 2, 8, 3), normal(generator, 2, 8, 2, 3), normal(generator, 2, 8, 4, 1, 3)
    run = products(channel_decay, True)
    mapped = torch.vmap(run, in_dims=(0, None, 2))(g, reads, keys)
    loop = [run(g[i], reads, keys[:, :, i]) for i in range(4)]
    close(mapped, tuple(torch.stack(x) for x in zip(*loop, strict=True)))


def test_channel_decay_in_pieces():
    """The result does not depend on how many chunks are processed at a time."""
    generator = torch.Generator().manual_seed(4)
    leaves = (-uniform(generator, 1100, 2, 3), normal(generator, 1100, 2, 1, 3), normal(generator, 1100, 2, 1, 3))
    close(with_gradients(products(channel_decay, False), leaves), with_gradients(products(naive_decay, False), leaves))


def test_log_decay_sums():
    g = torch.tensor([-1.0, -torch.inf, -2.0, -1e-12], dtype=torch.float64)
    sums = log_decay_sums(g)
    assert sums.diagonal().tolist() == [0, 0, 0, 0]
    assert sums[3, 1:].tolist() == [-2 - 1e-12, -1e-12, 0]
    assert (sums[1:, 0].exp() == 0).all()
    assert (sums.triu(1)[sums.triu(1) != 0] == -torch.inf).all()


# The complete engine.


def update(generator: torch.Generator, length: int, kind: str, decay: bool, channels: bool) -> list:
    """q, the fields of an update and a state; each sequence of the batch has another kind of decay."""
    shape, k, v = (len(DECAYS), 2, length), 4, 3
    g = decays(-uniform(generator, *shape, *((k,) if channels else ()))) if decay else None
    a, b = (0.3 * normal(generator, *shape, k) for _ in range(2))
    erase = {"write": [None, None], "erase": [a, None], "erase apart": [a, b]}[kind]
    q, key = (F.normalize(normal(generator, *shape, k), dim=-1) for _ in range(2))
    return [q, key, normal(generator, *shape, v), g, *erase, normal(generator, *shape[:2], k, v)]


def run(form: Callable, fields: list, before: bool) -> tuple[Tensor, ...]:
    """Outputs, state and the gradients of all fields that are tensors."""
    given = [x is not None for x in fields]

    def of(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        rest = iter(leaves)
        q, *here, state = (next(rest) if there else None for there in given)
        return form(q, Update(*here, reads_before_decay=before), state)

    return with_gradients(of, tuple(x for x in fields if x is not None))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("kind", "before"),
    [("write", False), ("erase", False), ("erase", True), ("erase apart", False), ("erase apart", True)],
)
def test_chunks_equal_the_recurrence(length, kind, before):
    generator = torch.Generator().manual_seed(length)
    for decay, channels in ((False, False), (True, False), (True, True)):
        fields = update(generator, length, kind, decay, channels)
        close(run(chunked, fields, before), run(naive, fields, before))


@pytest.mark.parametrize("chunk", [1, 2, 32, 64])
@pytest.mark.parametrize("kind", ["write", "erase", "erase apart"])
def test_the_length_of_chunks_has_no_effect(kind, chunk):
    generator = torch.Generator().manual_seed(chunk)
    for channels in (False, True):
        fields = update(generator, 70, kind, True, channels)
        close(run(partial(chunked, chunk=chunk), fields, False), run(naive, fields, False))


@pytest.mark.parametrize("kind", ["write", "erase", "erase apart"])
@pytest.mark.parametrize("channels", [False, True])
def test_an_empty_segment_leaves_the_state(kind, channels):
    q, *fields, state = update(torch.Generator().manual_seed(0), 0, kind, True, channels)
    for form in (chunked, naive):
        o, after = form(q, Update(*fields), state)
        assert o.shape == (len(DECAYS), 2, 0, 3)
        assert torch.equal(after, state)


def test_decays_that_differ_by_much():
    """A weak decay after a strong one keeps its accuracy in float32."""
    g = torch.full((1, 1, 32), -1e-3)
    g[..., 10] = -1e4
    q, k, v = torch.randn(3, 1, 1, 32, 4, generator=torch.Generator().manual_seed(0))
    for channels in (g, g[..., None].expand_as(k)):
        fast, _ = chunked(q, Update(k, v, channels), torch.zeros(1, 1, 4, 4))
        slow, _ = naive(q.double(), Update(k.double(), v.double(), channels.double()), torch.zeros(1, 1, 4, 4).double())
        assert torch.allclose(fast.double(), slow, rtol=1e-5, atol=1e-5)


# The mechanisms.

GATES: dict[type, dict[str, tuple[int, ...]]] = {
    GatedLinear: {"log_decay": (), "write": ()},
    GatedDelta: {"log_decay": (), "beta": ()},
    GLA: {"log_decay": (4,)},
    KDA: {"log_decay": (4,), "beta": ()},
    RWKV7: {"log_decay": (4,), "a": (4,)},
    Mamba2: {"log_decay": (), "write": (), "skip": ()},
    Mesa: {"log_decay": (), "write": (), "ridge": (4,)},
    LogLinear: {"log_decay": (), "level": (4,)},
}
"""Gate → its axes after b h t."""


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mechanism", GATES)
def test_any_decay_in_every_mechanism(mechanism, length):
    """Parallel equals recurrence, outputs and gradients, also where a decay forgets everything."""
    mixer = mechanism(d_model=8, heads=2).double()
    generator = torch.Generator().manual_seed(length)
    shape = (len(DECAYS), 2, length)
    gates = {name: 0.1 + uniform(generator, *shape, *axes) for name, axes in GATES[mechanism].items()}
    gates["log_decay"] = decays(-uniform(generator, *gates["log_decay"].shape))
    vectors = [F.normalize(normal(generator, *shape, 4), dim=-1) for _ in range(3)]

    def form(name: str) -> tuple[Tensor, ...]:
        def of(q: Tensor, k: Tensor, v: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            o, state = getattr(mixer, name)(q, k, v, dict(zip(gates, values, strict=True)))
            return o, *(state[part] for part in sorted(state))

        return with_gradients(of, (*vectors, *gates.values()))

    close(form("parallel"), form("run_recurrence"), 1e-7)


@pytest.mark.parametrize("mechanism", GATES)
def test_an_empty_segment_in_every_mechanism(mechanism):
    mixer = mechanism(d_model=8, heads=2, short_conv=0).double()
    x = normal(torch.Generator().manual_seed(0), 2, 7, 8)
    with torch.no_grad():
        _, state = mixer(x)
        y, after = mixer(x[:, :0], state)
    assert y.shape == (2, 0, 8)
    assert all(torch.equal(after[name], part) for name, part in state.items())


class Squared:
    """v enters by its square, so that the mechanism is not linear in v."""

    linear_in_v: ClassVar[bool] = False

    def update(self, k, v, gates):
        return super().update(k, v * v, gates)


def squared(kind: type[MatrixMemory]) -> type[MatrixMemory]:
    return dataclass(eq=False, repr=False, kw_only=True)(type(f"Squared{kind.__name__}", (Squared, kind), {}))


@pytest.mark.parametrize("kind", [GatedLinear, DeltaRule, GatedDelta, GLA, KDA, RWKV7])
def test_jacobian_by_batched_gradients(kind):
    """Gradients of many outputs at once, by each method of torch, equal those of one output at a time."""
    mixer = squared(kind)(d_model=8, heads=2, d_value=2).double()
    q, k, v, gates, _ = mixer.project(normal(torch.Generator().manual_seed(0), 1, 40, 8))
    v = v.detach().requires_grad_()
    o, _ = mixer.parallel(q, k, v, gates)
    ones = torch.eye(o.numel(), dtype=o.dtype).view(-1, *o.shape)[::7]
    inputs = [x for x in (v, k, *gates.values()) if x.requires_grad]

    def gradients(d_o: Tensor, batched: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, inputs, d_o, retain_graph=True, is_grads_batched=batched)

    expected = tuple(torch.stack(rows) for rows in zip(*map(gradients, ones), strict=True))
    close(gradients(ones, batched=True), expected)
    close(torch.vmap(gradients)(ones), expected)
    jacobian = torch.func.jacrev(lambda v: mixer.parallel(q, k, v, gates)[0])(v.detach())
    assert torch.allclose(jacobian.view(-1, *v.shape)[::7], expected[0])
