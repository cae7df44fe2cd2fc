"""The contract of a mixer. Its tests and `recall-lab check` use the same functions.

A check takes a mixer, which it leaves unchanged, and uses what the mixer declares: `linear_in_v`, `neutral_gates`,
`state_limit`. Inputs are random, the same at every call.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from recall_lab.contract.base import BrokenError, Deviation, Finding, NotApplicableError, within_limits
from recall_lab.mixer.base import Mixer
from recall_lab.mixer.layer import Layer, state_elements
from recall_lab.mixer.neutral import neutral_fault
from recall_lab.shapes import Hidden, State

LENGTHS = (1, 31, 33, 65, 130)
"""Lengths at which the forms of a mechanism are compared: one token, and lengths that do not end with a chunk."""

LIMITS = {torch.float64: (1e-10, 1e-9), torch.float32: (1e-5, 1e-3)}
"""Type → the largest relative errors of outputs and states, and of gradients."""

Results = dict[str, Tensor]
"""Outputs, parts of the state and gradients by their names."""


def draw(mixer: Layer, length: int, batch: int = 2, seed: int | None = None) -> Hidden:
    """Normal random inputs (b t m) with the dtype and device of the mixer's weights. seed: by default `length`."""
    weight = next(mixer.parameters(), torch.empty(0))
    generator = torch.Generator().manual_seed(length if seed is None else seed)
    return torch.randn(batch, length, mixer.d_model, generator=generator, dtype=torch.float64).to(weight)


def total(*tensors: Tensor) -> Tensor:
    """A loss whose gradient differs between positions and channels."""
    return sum((x.sin() * torch.linspace(0.5, 1.5, x.numel()).to(x).view_as(x)).sum() for x in tensors)  # type: ignore[return-value]


def relative_error(x: Tensor, reference: Tensor) -> float:
    """‖x − reference‖ / (‖reference‖ + 10⁻³); a reference, such as a gradient, may be zero."""
    x, reference = x.detach().double(), reference.detach().double()
    return float((x - reference).norm() / (reference.norm() + 1e-3))


def parallel_equals_recurrence(mixer: Mixer, lengths: Collection[int] = LENGTHS) -> Finding:
    """`forward` equals a loop of `step`: outputs, final state and gradients, in float64 and float32."""
    found: list[Deviation] = []
    for dtype, limits in LIMITS.items():
        made = converted(mixer, dtype)
        x = draw(made, max(lengths)).requires_grad_()
        stepped = _stepped(made, x, lengths)
        for length in lengths:
            y, state = made(x[:, :length])
            case = f"length {length}, {_name(dtype)}"
            found += _compare(_results(made, x, y, state), stepped[length], limits, case)
    return within_limits(found)


def split_equals_whole(mixer: Mixer, lengths: Collection[int] = LENGTHS) -> Finding:
    """A sequence in segments, each continued from the state after the one before, equals the whole sequence.

    Outputs, final state and gradients, in float64 and float32; the segments end at 1, 37, 64 and 99 and one before the
    end.
    """
    found: list[Deviation] = []
    for dtype, limits in LIMITS.items():
        made = converted(mixer, dtype)
        for length in sorted({*lengths} - {1}):
            x = draw(made, length).requires_grad_()
            whole = _results(made, x, *made(x))
            outputs, state = [], None
            for start, end in _segments(length):
                y, state = made(x[:, start:end], state)
                outputs.append(y)
            assert state is not None
            parts = _results(made, x, torch.cat(outputs, dim=1), state)
            found += _compare(parts, whole, limits, f"length {length}, {_name(dtype)}")
    return within_limits(found)


@torch.no_grad()
def causality(mixer: Mixer) -> Finding:
    """If all tokens from a position on change, the outputs before it stay the same, and the output at it changes."""
    made = converted(mixer, torch.float64)
    x, other = draw(made, 100), draw(made, 100, seed=1)
    y, _ = made(x)
    found = []
    for t in (1, 32, 33, 64, 99):
        changed, _ = made(torch.cat([x[:, :t], other[:, t:]], dim=1))
        if torch.equal(changed[:, t], y[:, t]):
            raise BrokenError(f"the output at position {t} does not depend on the token there")
        position = _position(changed[:, :t], y[:, :t])
        where = f"output at position {position} of 100, when the tokens from position {t} on change"
        found.append(Deviation(relative_error(changed[:, :t], y[:, :t]), 1e-12, where))
    return within_limits(found)


@torch.no_grad()
def linearity_in_v(mixer: Mixer) -> Finding:
    """o(2 v + 3 w) = 2 o(v) + 3 o(w) at the same q, k and gates, where the mixer declares `linear_in_v`."""
    _require_linear(mixer)
    made = converted(mixer, torch.float64)
    q, k, v, gates, _ = made.project(draw(made, 100))
    w = made.project(draw(made, 100, seed=1))[2]
    both, first, second = (made.parallel(q, k, x, gates)[0] for x in (2 * v + 3 * w, v, w))
    expected = 2 * first + 3 * second
    where = f"o at position {_position(both, expected)} of 100; linear_in_v = True is declared"
    return within_limits([Deviation(relative_error(both, expected), 1e-10, where)])


@torch.no_grad()
def effective_attention(mixer: Mixer) -> Finding:
    """A v = o for the weights A that `effective_attention` returns, and A is zero above the diagonal."""
    _require_linear(mixer)
    made = converted(mixer, torch.float64)
    q, k, v, gates, _ = made.project(draw(made, 100))
    o, A = made.parallel(q, k, v, gates)[0], made.effective_attention(q, k, gates)
    later = A.triu(1).abs().amax(dim=(0, 1))
    if later.any():
        t, s = divmod(int(later.argmax()), 100)
        raise BrokenError(f"A[{t}, {s}] is {float(later.max()):.1e}: position {t} attends to a later one")
    where = f"A v versus o at position {_position(A @ v, o)} of 100"
    return within_limits([Deviation(relative_error(A @ v, o), 1e-10, where)])


def neutral_gates(mixer: Mixer) -> Finding:
    """At the gates that the mixer declares as neutral, every pair is written completely and nothing is forgotten."""
    names = mixer.gates(draw(mixer, 1)).keys()
    if not names:
        raise NotApplicableError("it has no gates")
    if not mixer.neutral_gates and not mixer.linear_in_v:
        raise NotApplicableError("it declares no neutral gates and is not linear in v")
    defaults = {field.name: field.default for field in fields(mixer)}
    if any(getattr(mixer, name) != defaults[name] for name in mixer.position_options):
        raise NotApplicableError("its outputs depend on positions")
    unknown = set(mixer.neutral_gates) - names - mixer.fixed_gates
    if unknown:
        raise BrokenError(f"neutral_gates names {', '.join(sorted(unknown))}; its gates are {', '.join(names)}")
    numbers = {name: value for name, value in mixer.neutral_gates.items() if name in names}
    stated = ", ".join(f"{name}={value:g}" for name, value in numbers.items()) or "none declared, gates as computed"
    fault = neutral_fault(mixer, numbers)
    return Finding(not fault, f"{stated}: {fault or 'every pair is written and kept'}")


def state_size(mixer: Mixer) -> Finding:
    """`state_size` counts the elements of the state after steps, and grows up to `state_limit` tokens only."""
    limit = mixer.state_limit
    stepped = mixer.initial_state()
    with torch.no_grad():
        for token in draw(mixer, 3, batch=1).split(1, dim=1):
            _, stepped = mixer.step(token, stepped)
    counted, stated = state_elements(stepped), mixer.state_size(3)[0]
    if counted != stated:
        raise BrokenError(f"state_size(3) is {stated:,} elements, but the state after 3 steps has {counted:,}")
    # A state of one matrix per set bit of the length is largest at 2^n − 1 tokens.
    lengths = (1, 31, 127) if limit is None else tuple(limit + more for more in (0 if limit else 1, 2, 33, 97, 130))
    sizes = [mixer.state_size(length)[0] for length in lengths]
    described = ", ".join(f"{size:,} after {length}" for size, length in zip(sizes, lengths, strict=True))
    if limit is None:
        return Finding(sizes == sorted(set(sizes)), f"declared to grow without limit: elements {described} tokens")
    if limit == 0:
        sizes.append(state_elements(mixer.initial_state()))
        described = f"{sizes[-1]:,} before the first token, {described}"
        return Finding(len(set(sizes)) == 1, f"declared constant: elements {described} tokens")
    return Finding(max(sizes) == sizes[0], f"declared largest after {limit} tokens: elements {described} tokens")


@torch.no_grad()
def batch_independence(mixer: Mixer) -> Finding:
    """A sequence has the same outputs alone and in a batch, in `forward` and in the `step` after it."""
    made = converted(mixer, torch.float64)
    x = draw(made, 66, batch=3)
    found, outputs = [], _forward_and_step(made, x)
    for i in range(3):
        alone = _forward_and_step(made, x[i : i + 1])
        where = f"output of sequence {i} of 3 at position {_position(alone, outputs[i : i + 1])} of 66, alone"
        found.append(Deviation(relative_error(alone, outputs[i : i + 1]), 1e-10, where))
    return within_limits(found)


def device_placement(mixer: Mixer) -> Finding:
    """On the meta device, outputs and states stay there, and no operation mixes in a tensor of another device."""
    made = copy.deepcopy(mixer).to("meta")
    x = torch.empty(2, 70, made.d_model, device="meta")
    y, state = made(x)
    y, state = made(x, state)
    token, state = made.step(x[:, :1], state)
    tensors = {"outputs": y, "output of a step": token} | {f"state {name}": part for name, part in state.items()}
    tensors |= {f"initial state {name}": part for name, part in made.initial_state().items()}
    if made.linear_in_v:
        q, k, _, gates, _ = made.project(x)
        tensors["effective attention"] = made.effective_attention(q, k, gates)
    elsewhere = [f"{name} is on {tensor.device}" for name, tensor in tensors.items() if tensor.device.type != "meta"]
    return Finding(not elsewhere, "; ".join(elsewhere) or "every tensor is on the device of the input")


def bfloat16(mixer: Mixer) -> Finding:
    """Under autocast to bfloat16 outputs and gradients are finite, and outputs close to those in full precision."""
    made = converted(mixer, torch.float32)
    x = draw(made, 100)
    with torch.autocast(x.device.type, torch.bfloat16):
        y, state = made(x)
        token, _ = made.step(x[:, :1], state)
    weights = {name: weight for name, weight in made.named_parameters() if weight.requires_grad}
    gradients = torch.autograd.grad(y.float().square().sum(), list(weights.values()), materialize_grads=True)
    named = {f"gradient of {name}": g for name, g in zip(weights, gradients, strict=True)}
    tensors = {"outputs": y, "output of a step": token} | named
    wrong = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if wrong:
        raise BrokenError(f"not finite: {', '.join(wrong)}")
    return within_limits([Deviation(relative_error(y.float(), made(x)[0]), 0.1, "outputs versus float32; all finite")])


CHECKS = (
    parallel_equals_recurrence,
    split_equals_whole,
    causality,
    linearity_in_v,
    effective_attention,
    neutral_gates,
    state_size,
    batch_independence,
    device_placement,
    bfloat16,
)
"""All checks of a mixer."""


def built(make: Callable[..., Any], **sizes: int) -> Any:
    """The mixer with the weights of seed 0."""
    torch.manual_seed(0)
    return make(**sizes)


def converted(mixer: Mixer, dtype: torch.dtype) -> Mixer:
    """A copy of the mixer with weights of this type."""
    return copy.deepcopy(mixer).to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _segments(length: int) -> Sequence[tuple[int, int]]:
    ends = sorted({end for end in (1, 37, 64, 99, length - 1) if end < length} | {length})
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _stepped(mixer: Mixer, x: Hidden, lengths: Collection[int]) -> dict[int, Results]:
    """Length → the results after that many steps from the start, all from one loop."""
    state, outputs, states = mixer.initial_state(len(x)), [], {}
    for length, token in enumerate(x.split(1, dim=1), start=1):
        y, state = mixer.step(token, state)
        outputs.append(y)
        if length in lengths:
            states[length] = state
    return {n: _results(mixer, x, torch.cat(outputs[:n], dim=1), after) for n, after in states.items()}


def _results(mixer: Mixer, x: Tensor, y: Tensor, state: State) -> Results:
    """y, the parts of the state, and the gradients of `total` of them by x and by all weights."""
    leaves = {"x": x} | {name: weight for name, weight in mixer.named_parameters() if weight.requires_grad}
    parts = {f"state {name}": part for name, part in sorted(state.items())}
    loss = total(y, *(part for part in parts.values() if part.requires_grad))
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True, retain_graph=True)
    return {"outputs": y} | parts | {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}


def _compare(fast: Results, slow: Results, limits: tuple[float, float], case: str) -> Iterator[Deviation]:
    """The relative error of each result. Raises BrokenError where names or shapes differ."""
    shapes = [", ".join(f"{name} {tuple(x.shape)}" for name, x in form.items()) for form in (fast, slow)]
    if shapes[0] != shapes[1]:
        one, other = (text.partition(", gradient")[0] for text in shapes)
        raise BrokenError(f"{case}: the shapes are {one} in one form, {other} in the other")
    for name, reference in slow.items():
        x = fast[name]
        where = f"{name} at position {_position(x, reference)}" if name == "outputs" else name
        yield Deviation(relative_error(x, reference), limits[name.startswith("gradient")], f"{where}, {case}")


def _position(y: Tensor, reference: Tensor) -> int:
    """The position at which y (b t m or b h t v) deviates most."""
    return int((y - reference).detach().square().movedim(-2, 0).flatten(1).sum(1).argmax())


def _forward_and_step(mixer: Mixer, x: Hidden) -> Hidden:
    """The outputs for all tokens but the last from `forward`, and for the last from `step`."""
    y, state = mixer(x[:, :-1])
    token, _ = mixer.step(x[:, -1:], state)
    return torch.cat([y, token], dim=1)


def _require_linear(mixer: Mixer) -> None:
    if not mixer.linear_in_v:
        raise NotApplicableError("it is declared as not linear in v, so it has no effective attention")
