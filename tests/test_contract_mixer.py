"""Every check of a mixer notices the fault that it is meant for, and no other check complains."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from recall_lab.contract.base import Deviation, Finding, NotApplicableError, examine, within_limits
from recall_lab.contract.mixer import CHECKS, parallel_equals_recurrence, split_equals_whole
from recall_lab.mixer.gated_linear import GatedLinear
from recall_lab.mixer.linear import Linear
from recall_lab.mixer.window import Window

FORMS = (parallel_equals_recurrence, split_equals_whole)
PLAIN = dataclass(eq=False, repr=False, kw_only=True)


@PLAIN
class SeesTheFuture(GatedLinear):
    """The gate for writing depends on the mean of all tokens of the segment."""

    def gates(self, x):
        return super().gates(x) | {"write": super().gates(x.mean(1, keepdim=True).expand_as(x))["write"]}


@PLAIN
class WrongRecurrence(Linear):
    def recurrence(self, q, k, v, gates, state):
        o, after = super().recurrence(q, k, v, gates, state)
        return 1.001 * o, after


@PLAIN
class WrongGradient(Linear):
    """The outputs are right."""

    def recurrence(self, q, k, v, gates, state):
        return super().recurrence(q, k.detach(), v, gates, state)


@PLAIN
class ForgetsTheState(Linear):
    def parallel(self, q, k, v, gates, state=None):
        return super().parallel(q, k, v, gates)


@PLAIN
class KeepsAllValues(Linear):
    """The state grows, though declared constant."""

    def parallel(self, q, k, v, gates, state=None):
        state = self.empty_state(q, v) if state is None else state
        o, after = super().parallel(q, k, v, gates, {"S": state["S"]})
        return o, after | {"log": torch.cat([state["log"], v], dim=2)}

    def recurrence(self, q, k, v, gates, state):
        o, after = super().recurrence(q, k, v, gates, {"S": state["S"]})
        return o, after | {"log": torch.cat([state["log"], v], dim=2)}

    def empty_state(self, q, v):
        return super().empty_state(q, v) | {"log": v[:, :, :0]}


@PLAIN
class DeclaredToGrow(Linear):
    state_limit = None


@PLAIN
class DeclaredShorter(Window):
    """It holds 63 tokens, not 10."""

    state_limit = 10


@PLAIN
class MiscountsTheState(Linear):
    def state_size(self, length):
        return 7, 28


@PLAIN
class MixesTheBatch(GatedLinear):
    """The gates depend on the mean token of all sequences."""

    def gates(self, x):
        return super().gates(x.mean(0, keepdim=True).expand_as(x))


@PLAIN
class ForgetsAtNeutralGates(GatedLinear):
    neutral_gates: ClassVar[Mapping[str, float]] = {"log_decay": -0.5, "write": 1.0}


@PLAIN
class WritesNothingAtNeutralGates(GatedLinear):
    neutral_gates: ClassVar[Mapping[str, float]] = {"log_decay": 0.0, "write": 0.0}


@PLAIN
class MisnamesANeutralGate(GatedLinear):
    neutral_gates: ClassVar[Mapping[str, float]] = {"decay": 0.0, "write": 1.0}


@PLAIN
class MakesATensorOnTheCPU(Linear):
    def query(self, q):
        return super().query(q) * torch.ones(q.shape[-1])


@PLAIN
class NotLinear(Linear):
    """Declared as linear in v."""

    def output(self, o, v, gates):
        return o.tanh()


@PLAIN
class WrongAttention(Linear):
    def effective_attention(self, q, k, gates):
        return 1.001 * super().effective_attention(q, k, gates)


@PLAIN
class AttentionToTheFuture(Linear):
    def effective_attention(self, q, k, gates):
        A = super().effective_attention(q, k, gates).clone()
        A[:, :, 3, 5] = 1e-6
        return A


@PLAIN
class InfiniteInHalfPrecision(Linear):
    """Divides by 1.001 − 1, which bfloat16 rounds to 0."""

    def read_out(self, o, x):
        nearly_one = F.linear(torch.ones_like(x[..., :1]), torch.full_like(x[0, :1, :1], 1.001))
        return super().read_out(o, x) * 1e-3 / (nearly_one - 1)


@PLAIN
class IgnoresItsToken(Linear):
    def read_out(self, o, x):
        return super().read_out(o, x) * 0


FORMS_AND_CAUSALITY = {"parallel equals recurrence", "split equals whole", "causality"}
FAULTS = {
    # A recurrence cannot see later tokens, so what leaks is also what it lacks.
    SeesTheFuture: (FORMS_AND_CAUSALITY, "when the tokens from position"),
    WrongRecurrence: ({"parallel equals recurrence"}, "largest relative error 1.0e-03 (allowed 1e-10): outputs at"),
    WrongGradient: ({"parallel equals recurrence"}, "gradient of"),
    ForgetsTheState: ({"split equals whole"}, "length 40, float64"),
    KeepsAllValues: ({"state size"}, "declared constant: elements 272 before the first token, 288 after 1"),
    DeclaredToGrow: ({"state size"}, "declared to grow without limit: elements 272 after 1, 272 after 31"),
    DeclaredShorter: ({"state size"}, "declared largest after 10 tokens: elements"),
    MiscountsTheState: ({"state size"}, "state_size(3) is 7 elements, but the state after 3 steps has 272"),
    MixesTheBatch: ({"batch independence"}, "alone"),
    ForgetsAtNeutralGates: ({"neutral gates"}, "7 further writes leave only 0.030 of the answer to the first key"),
    WritesNothingAtNeutralGates: ({"neutral gates"}, "a single pair is not answered with its value"),
    MisnamesANeutralGate: ({"neutral gates"}, "neutral_gates names decay; its gates are log_decay, write"),
    MakesATensorOnTheCPU: ({"device placement"}, "RuntimeError: "),
    # Weights that depend on v cannot be those that the identity in place of v shows.
    NotLinear: ({"linearity in v", "effective attention"}, "linear_in_v = True is declared"),
    WrongAttention: ({"effective attention"}, "largest relative error 1.0e-03 (allowed 1e-10): A v versus o"),
    AttentionToTheFuture: (
        {"effective attention"},
        "A[3, 5] is 1.0e-06: position 3 attends to a later one",
    ),
    InfiniteInHalfPrecision: ({"bfloat16"}, "not finite: outputs, output of a step"),
    IgnoresItsToken: ({"causality"}, "the output at position 1 does not depend on the token there"),
}


def short(check):
    """The check, at two lengths instead of five where it has a choice."""

    def run(mixer):
        return check(mixer, (1, 40)) if check in FORMS else check(mixer)

    run.__name__ = check.__name__
    return run


@pytest.mark.parametrize("made", FAULTS, ids=lambda made: made.__name__)
def test_a_fault_fails_the_check_meant_for_it(made):
    torch.manual_seed(0)
    checks, detail = FAULTS[made]
    failed = {f.check: f.detail for f in examine(map(short, CHECKS), made(d_model=16, heads=2)) if f.failed}
    assert failed.keys() == checks
    assert any(detail in found for found in failed.values()), failed
    assert not any("\n" in found for found in failed.values())


def test_a_check_that_raises_has_failed_and_the_others_go_on():
    def raises(mixer):
        raise KeyError("some\nkey")

    def reason(mixer):
        raise NotApplicableError("it has no S")

    def fine(mixer):
        return Finding(True, str(mixer))

    first, second, third = examine([raises, reason, fine], 5)
    assert first.failed
    assert first.check == "raises"
    assert first.detail.startswith(r"KeyError: 'some\nkey' (")
    assert "test_contract_mixer.py:" in first.detail
    assert second == Finding(None, "not applicable: it has no S", "reason")
    assert not second.failed
    assert third == Finding(True, "5", "fine")


def test_the_largest_error_is_relative_to_its_limit_and_nan_is_the_largest():
    small, large = Deviation(1e-9, 1e-10, "first"), Deviation(1e-6, 1e-5, "second")
    assert within_limits([small, large]) == Finding(False, "largest relative error 1.0e-09 (allowed 1e-10): first")
    assert within_limits([large]).holds
    nan = within_limits([small, Deviation(float("nan"), 1.0, "third")])
    assert not nan.holds
    assert nan.detail.endswith("third")


def test_the_mixer_is_left_unchanged():
    torch.manual_seed(0)
    mixer = GatedLinear(d_model=16, heads=2)
    before = {name: weight.clone() for name, weight in mixer.named_parameters()}
    assert not any(finding.failed for finding in examine(map(short, CHECKS), mixer))
    assert all(torch.equal(weight, before[name]) for name, weight in mixer.named_parameters())
    assert {weight.dtype for weight in mixer.parameters()} == {torch.float32}
    assert all(weight.grad is None for weight in mixer.parameters())
