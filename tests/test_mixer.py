"""The contract of a mixer, tested for every file of conf/mixer; a new file is tested automatically."""

import pytest
import torch
from mixers import build, every_case, every_mechanism
from torch import Tensor

from recall_lab.contract.base import Finding, examine
from recall_lab.contract.mixer import CHECKS, draw, parallel_equals_recurrence, split_equals_whole, total
from recall_lab.mixer.base import Mixer

LENGTHS = (1, 70)
"""Lengths at which the forms are compared in the default suite; its slow tests use those of `recall-lab check`."""
FORMS = (parallel_equals_recurrence, split_equals_whole)
OTHERS = [check for check in CHECKS if check not in FORMS]


def assert_holds(finding: Finding) -> None:
    assert finding.holds, finding.detail


@every_case
def test_all_forms_agree(name, options):
    """Outputs, states and gradients of the complete module, in float64 and float32."""
    assert_holds(parallel_equals_recurrence(build(name, **options), LENGTHS))


@every_mechanism
def test_a_sequence_can_be_split(name):
    assert_holds(split_equals_whole(build(name), LENGTHS))


@pytest.mark.slow
@every_case
def test_a_sequence_can_be_split_with_any_options(name, options):
    assert_holds(split_equals_whole(build(name, **options)))


@pytest.mark.slow
@every_mechanism
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_all_forms_agree_at_the_lengths_of_the_command(name, form):
    assert_holds(form(build(name)))


@every_mechanism
def test_all_forms_agree_with_norms_and_gates(name):
    mixer = build(name, output_norm=True, output_gate=True, conv_activation=True)
    assert_holds(parallel_equals_recurrence(mixer, (20,)))


@every_mechanism
def test_all_forms_agree_with_one_head_and_complete_chunks(name):
    """Without a split into heads and without padding, tensors keep the strides of the projections."""
    assert_holds(parallel_equals_recurrence(build(name, heads=1), (64,)))


@every_case
def test_contract(name, options):
    """Not applicable is a check only to a mechanism that is not linear in v, or whose gates cannot be tested."""
    mixer = build(name, **options)
    findings = {finding.check: finding for finding in examine(OTHERS, mixer)}
    assert len(findings) == len(OTHERS)
    assert not [finding for finding in findings.values() if finding.failed]
    skipped = {check for check, finding in findings.items() if finding.holds is None}
    assert skipped - {"neutral gates"} == (set() if mixer.linear_in_v else {"linearity in v", "effective attention"})
    positioned = getattr(mixer, "positions", "none") != "none"
    undeclared = not mixer.neutral_gates and not mixer.linear_in_v
    assert ("neutral gates" in skipped) == (not mixer.gates(draw(mixer, 1)) or positioned or undeclared)


@pytest.mark.parametrize("name", ["rnn", "lstm"])
def test_a_mechanism_that_is_not_linear_in_v_has_no_effective_attention(name):
    mixer = build(name)
    q, k, _, gates, _ = mixer.project(draw(mixer, 3))
    with pytest.raises(TypeError, match="is not linear in v"):
        mixer.effective_attention(q, k, gates)


@every_mechanism
def test_state_size_counts_bytes(name):
    mixer = build(name)
    _, state = mixer(torch.zeros(1, 70, 16))
    assert mixer.state_size(70)[1] == sum(part.numel() * part.element_size() for part in state.values())


@every_mechanism
def test_deterministic(name):
    def run() -> tuple[Tensor, ...]:
        mixer: Mixer = build(name)
        y, _ = mixer(draw(mixer, 80))
        return y, *torch.autograd.grad(total(y), list(mixer.parameters()))

    assert all(torch.equal(x, y) for x, y in zip(run(), run(), strict=True))
