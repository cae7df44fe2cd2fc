"""The claims on cost and equivalence, whose numbers are counted or computed without sampling, on made-up tables."""

import pandas as pd
import pytest

from recall_lab.claim.cost import Cost
from recall_lab.claim.equivalence import Equivalence

LENGTHS, WIDTHS = (128, 256, 512, 1024, 2048, 4096), (16, 32, 64)

POWERS = {  # metric → exponents of n and d
    "softmax": {"prefill_flops": (2, 1), "decode_flops": (1, 1), "state_bytes": (1, 1), "prefill_seconds": (2, 1)},
    "linear": {"prefill_flops": (1, 2), "decode_flops": (0, 2), "state_bytes": (0, 2), "prefill_seconds": (1, 2)},
}


def costs(**changed) -> pd.DataFrame:
    """Power laws of every cost; changed: mixer → metrics with other exponents."""
    rows = [
        {"mixer": mixer, "metric": metric, "length": n, "d_key": d, "value": 3.0 * n**a * d**b}
        for mixer in POWERS
        for metric, (a, b) in (POWERS[mixer] | changed.get(mixer, {})).items()
        for n in LENGTHS
        for d in WIDTHS
    ]
    return pd.DataFrame(rows).assign(experiment="cost")


def judged(table, **fields):
    return {line.name: line for line in Cost(**fields).judge(table)}


def test_the_claimed_exponents_are_supported():
    lines = judged(costs())
    assert {name: line.decision for name, line in lines.items() if line.decision != "reported"} == dict.fromkeys(
        [
            "softmax: prefill FLOPs over n", "matrix memories: prefill FLOPs over n", "softmax: decode FLOPs over n",
            "matrix memories: decode FLOPs over n", "softmax: bytes of state over n",
            "matrix memories: bytes of state over n", "matrix memories: decode FLOPs over d",
        ],
        "supported",
    )  # fmt: skip
    assert lines["matrix memories: decode FLOPs over d"].estimate.value == pytest.approx(2)
    assert (
        lines["linear: length from which a prefill is faster than softmax's"].estimate.value == 128
    )  # the shortest measured


@pytest.mark.parametrize(
    ("mixer", "metric", "powers", "refuted"),
    [
        ("linear", "decode_flops", (0.1, 2), "matrix memories: decode FLOPs over n"),
        ("linear", "decode_flops", (0, 3), "matrix memories: decode FLOPs over d"),
        ("softmax", "prefill_flops", (1.5, 1), "softmax: prefill FLOPs over n"),
        ("softmax", "state_bytes", (0, 1), "softmax: bytes of state over n"),
    ],
)
def test_another_exponent_is_refuted(mixer, metric, powers, refuted):
    lines = judged(costs(**{mixer: {metric: powers}}))
    assert [name for name, line in lines.items() if line.decision == "refuted"] == [refuted]


def test_lengths_below_eight_widths_do_not_count():
    """At short lengths, where d matters, an exponent says little."""
    table = costs()
    short = (table["length"] < 512) & (table["d_key"] == 64)
    table.loc[short, "value"] *= 100
    assert all(line.decision in ("supported", "reported") for line in judged(table).values())


def test_the_mechanism_farthest_from_the_claim_counts():
    other = costs(linear={"decode_flops": (0.5, 2)}).query("mixer == 'linear'").assign(mixer="other")
    table = pd.concat([costs(), other])
    name = "matrix memories: decode FLOPs over n"
    assert judged(table)[name].decision == "supported"
    assert judged(table, matrix_memories=("linear", "other"))[name].decision == "refuted"
    beside = judged(table[table["metric"] != "prefill_flops"])["other: exponents of FLOPs"]
    assert beside.reason == "prefill not measured, decode step 0.50, decode step in d 2.00"


def test_what_was_not_measured_is_named():
    table = costs()
    line = judged(table[(table["mixer"] != "linear") | (table["metric"] != "decode_flops")])[
        "matrix memories: decode FLOPs over n"
    ]
    assert line.missing
    assert line.reason == "not measured: decode_flops of linear"


def test_mechanisms_of_other_experiments_are_left_out():
    other = pd.DataFrame([{"mixer": "rnn", "metric": "relative_error", "value": 1.0, "experiment": "equivalence"}])
    assert not any("rnn" in name for name in judged(pd.concat([costs(), other])))


def errors(**values) -> pd.DataFrame:
    rows = [{"mixer": mixer, "metric": "relative_error", "part": part, "value": value}
            for mixer, value in values.items() for part in ("output", "gradient of q")]  # fmt: skip
    return pd.DataFrame(rows)


def test_equivalence():
    lines = Equivalence().judge(errors(linear=1e-15, mesa=3e-12))
    assert [line.decision for line in lines] == ["supported", "supported", "reported"]
    assert lines[1].estimate.value == 3e-12
    assert lines[2].reason.startswith("mesa: ")
    lines = Equivalence().judge(errors(linear=1e-15, mesa=1e-3))
    assert [line.decision for line in lines] == ["supported", "refuted", "reported"]


def test_equivalence_of_linear_attention_is_needed():
    (line,) = Equivalence().judge(errors(mesa=1e-15))
    assert line.missing
    assert line.decision == "undecided"
