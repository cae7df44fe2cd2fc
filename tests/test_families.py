"""The two families of mechanisms, compared with what each mechanism declares of its state."""

from mixers import MECHANISMS, build

from recall_lab.families import GROWING


def test_the_growing_family_is_that_of_states_without_a_limit():
    """Except for log_linear, whose state grows with the logarithm of the length only."""
    assert {name for name in MECHANISMS if build(name).state_limit is None} == {*GROWING, "log_linear"}
