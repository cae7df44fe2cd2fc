"""The contract of a mixer, tested for every file of conf/mixer; a new file is tested automatically."""

import pytest
import torch
from mixers import build, close, draw, every_case, every_mechanism, same_state, total
from torch import Tensor


@every_case
def test_parallel_equals_the_recurrence(name, options):
    """Outputs, states and gradients, at odd lengths and at lengths close to a chunk."""
    mixer = build(name, **options).double()
    x = draw(mixer, 100).requires_grad_()
    q, k, v, gates, _ = mixer.project(x)
    states, outputs, state = {}, [], mixer.empty_state(q, v)
    for t in range(100):
        here = slice(t, t + 1)
        gate = {key: value[:, :, here] for key, value in gates.items()}
        o, state = mixer.recurrence(q[:, :, here], k[:, :, here], v[:, :, here], gate, state)
        outputs.append(o)
        states[t + 1] = state
    stepped = torch.cat(outputs, dim=2)
    for length in (1, 31, 63, 64, 65, 100):
        gate = {key: value[:, :, :length] for key, value in gates.items()}
        o, state = mixer.parallel(q[:, :, :length], k[:, :, :length], v[:, :, :length], gate)
        assert close(o, stepped[:, :, :length])
        assert same_state(state, states[length])
    weights = [x, *mixer.parameters()]
    gradients = [
        torch.autograd.grad(total(out, *state.values()), weights, allow_unused=True, retain_graph=True)
        for out, state in ((o, state), (stepped, states[100]))
    ]
    for parallel, recurrent in zip(*gradients, strict=True):
        assert (parallel is None) == (recurrent is None)
        assert parallel is None or close(parallel, recurrent, 1e-9)


@every_case
@pytest.mark.parametrize("cut", [1, 37, 64, 99])
def test_a_segment_continues_from_a_state(name, options, cut):
    """A segment continued from a state equals one segment, gradients included."""
    mixer = build(name, **options).double()
    x = draw(mixer, 100).requires_grad_()
    full, end = mixer(x)
    first, state = mixer(x[:, :cut])
    second, state = mixer(x[:, cut:], state)
    parts = torch.cat([first, second], dim=1)
    assert close(parts, full)
    assert same_state(state, end)
    gradients = [torch.autograd.grad(total(y, *s.values()), x)[0] for y, s in ((parts, state), (full, end))]
    assert close(*gradients, 1e-9)


@every_case
def test_forward_equals_a_loop_of_steps(name, options):
    """The complete module, including short convolution, norms and gates."""
    mixer = build(name, **options, output_norm=True, output_gate=True, conv_activation=True).double()
    x = draw(mixer, 20)
    state, outputs = mixer.initial_state(2), []
    for token in x.split(1, dim=1):
        y, state = mixer.step(token, state)
        outputs.append(y)
    full, end = mixer(x)
    assert close(torch.cat(outputs, dim=1), full)
    assert same_state(state, end)
    continued, _ = mixer(x[:, :5], end)
    assert close(continued[:, :1], mixer.step(x[:, :1], state)[0])


@every_case
@pytest.mark.parametrize("length", [32, 64])
def test_one_head_and_complete_chunks(name, options, length):
    """Without a split into heads and without padding, tensors keep the strides of the projections."""
    mixer = build(name, **options, heads=1).double()
    x = draw(mixer, length)
    q, k, v, gates, _ = mixer.project(x)
    outputs = [getattr(mixer, form)(q, k, v, gates)[0] for form in ("parallel", "run_recurrence")]
    gradients = [torch.autograd.grad(total(o), [q, k, v], retain_graph=True) for o in outputs]
    assert close(*outputs)
    assert all(close(x, y, 1e-9) for x, y in zip(*gradients, strict=True))


@every_case
def test_causal(name, options):
    mixer = build(name, **options).double()
    x = draw(mixer, 90)
    later = x.clone()
    later[:, 70] += 1
    before, after = mixer(x)[0], mixer(later)[0]
    assert close(after[:, :70], before[:, :70], 1e-12)
    assert not torch.equal(after[:, 70], before[:, 70])


@every_case
def test_effective_attention_gives_the_outputs(name, options):
    mixer = build(name, **options)
    q, k, v, gates, _ = mixer.project(draw(mixer, 100))
    if not mixer.linear_in_v:
        with pytest.raises(TypeError, match="is not linear in v"):
            mixer.effective_attention(q, k, gates)
        return
    o, _ = mixer.parallel(q, k, v, gates)
    A = mixer.effective_attention(q, k, gates)
    assert close(A @ v, o, 1e-5)
    assert not A.triu(1).any()


@every_mechanism
@pytest.mark.parametrize("length", [1, 2, 70])
def test_state_size_counts_the_numbers_that_steps_carry(name, length):
    mixer = build(name)
    state = mixer.initial_state()
    with torch.no_grad():
        for token in torch.zeros(1, length, 16).split(1, dim=1):
            _, state = mixer.step(token, state)
    elements = sum(part.numel() for part in state.values())
    assert mixer.state_size(length) == (elements, sum(p.numel() * p.element_size() for p in state.values()))


@every_case
def test_every_tensor_is_on_the_inputs_device(name, options):
    """On the meta device a tensor made anywhere else is an error."""
    mixer = build(name, **options).to("meta")
    x = torch.empty(2, 70, 16, device="meta")
    y, state = mixer(x)
    y, state = mixer(x, state)
    y, state = mixer.step(x[:, :1], state)
    assert {part.device.type for part in (y, *state.values(), *mixer.initial_state().values())} == {"meta"}
    if mixer.linear_in_v:
        q, k, _, gates, _ = mixer.project(x)
        assert mixer.effective_attention(q, k, gates).device.type == "meta"


@every_case
def test_half_precision(name, options):
    """Under bf16 autocast, outputs and gradients are finite and close to full precision, and states stay float32."""
    mixer = build(name, **options)
    x = draw(mixer, 100)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = mixer(x)
        token, _ = mixer.step(x[:, :1], state)
    y.float().square().sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in mixer.parameters())
    assert torch.isfinite(token).all()
    full, _ = mixer(x)
    assert (y.float() - full).norm() < 0.1 * full.norm()


@every_mechanism
def test_deterministic(name):
    def run() -> tuple[Tensor, ...]:
        mixer = build(name)
        y, _ = mixer(draw(mixer, 80))
        return y, *torch.autograd.grad(total(y), list(mixer.parameters()))

    assert all(torch.equal(x, y) for x, y in zip(run(), run(), strict=True))
