"""The oracle: the distribution of its keys, values and queries, and the answers of mechanisms at neutral gates."""

import hydra
import numpy as np
import pytest
import torch
from conftest import config, names

from recall_lab.mixer.delta_rule import DeltaRule
from recall_lab.mixer.gated_linear import GatedLinear
from recall_lab.mixer.linear import Linear
from recall_lab.mixer.softmax import Softmax
from recall_lab.oracle import Oracle


def draw(make=Linear, seed=0, **fields):
    oracle = Oracle(**fields)
    return oracle.trace(oracle.mixer(make), np.random.default_rng(seed))


def test_keys_values_and_queries():
    trace = draw(pairs=12, d_key=8, d_value=6, candidates=40, reads=100)
    assert not trace.o.requires_grad
    assert trace.k.shape == (9, 1, 12, 8)
    assert trace.v.shape == (9, 1, 12, 6)
    assert trace.candidates.shape == (40, 6)
    assert torch.allclose(trace.k.norm(dim=-1), torch.ones(9, 1, 12))
    assert torch.allclose(trace.v.norm(dim=-1), torch.ones(9, 1, 12))
    queried = trace.k.gather(2, trace.source[:, None, :, None].expand(-1, -1, -1, 8))
    assert torch.allclose(trace.q, queried * 8**0.5, atol=1e-6)
    # Every value is a candidate, and the values of a sequence differ.
    which = (trace.v[:, 0] @ trace.candidates.T).argmax(-1)
    assert torch.allclose(trace.candidates[which], trace.v[:, 0])
    assert all(len(set(row)) == 12 for row in which.tolist())


def test_source_is_the_last_write_of_the_key():
    trace = draw(pairs=5, d_key=8, passes=3, overwrites=2, reads=400)
    k, source = trace.k[:, 0], trace.source
    same = (k[:, :, None] * k[:, None]).sum(-1) > 0.999
    queried = same[torch.arange(len(k))[:, None], source]  # b t s: positions that hold the key of query t
    position = torch.arange(k.shape[1])
    last = torch.where(queried & (position <= position[:, None]), position, -1).amax(-1)
    assert torch.equal(last, source)
    # Every key is queried.
    share = torch.bincount(same[torch.arange(len(k)), -1 - 2 - 5 :][..., :5].float().argmax(-1).flatten())
    assert len(share) == 5


def test_passes_and_overwrites():
    trace = draw(pairs=6, d_key=8, passes=2, overwrites=3, reads=6)
    k, v = trace.k[0, 0], trace.v[0, 0]
    assert torch.equal(k[:6], k[6:12])
    assert torch.equal(v[:6], v[6:12])
    again = (k[12:] @ k[:6].T).argmax(-1)
    assert len(set(again.tolist())) == 3
    assert torch.allclose(k[12:], k[again])
    assert (v[12:] @ v[:6].T).max() < 0.999


@pytest.mark.parametrize(
    ("fields", "cosine"),
    [({}, 0.0), ({"keys": "correlated", "cosine": 0.3}, 0.3), ({"keys": "relu"}, 1 / np.pi)],
)
def test_mean_cosine(fields, cosine):
    k = draw(pairs=32, d_key=64, reads=1600, **fields).k[:, 0]
    pairs = (k @ k.mT)[:, *np.triu_indices(32, 1)]
    assert float(pairs.mean()) == pytest.approx(cosine, abs=0.01)


def test_orthogonal_centered_and_shared_keys():
    k = draw(pairs=8, d_key=8, keys="orthogonal", reads=16).k
    assert torch.allclose(k @ k.mT, torch.eye(8).expand(2, 1, 8, 8), atol=1e-6)
    relu = {"keys": "relu", "pairs": 64, "d_key": 16, "reads": 640}
    plain, centered = draw(**relu).k, draw(**relu, centered=True).k
    assert float(plain.mean(2).norm(dim=-1).mean()) > 0.5 > 0.1 > float(centered.mean(2).norm(dim=-1).mean())
    shared = draw(pairs=4, d_key=8, shared_keys=True, reads=12).k
    assert torch.equal(shared[0], shared[2])


def test_same_seed_same_trace_whatever_the_mechanism():
    fields = {"pairs": 8, "d_key": 8, "reads": 16}
    one, two, other = draw(**fields), draw(DeltaRule, **fields), draw(seed=1, **fields)
    assert torch.equal(one.k, two.k)
    assert torch.equal(one.v, two.v)
    assert torch.equal(one.source, two.source)
    assert not torch.equal(one.k, other.k)


def test_gates_are_as_given_or_neutral():
    trace = draw(GatedLinear, pairs=4, d_key=8, reads=4, gates={"log_decay": -0.5})
    assert torch.equal(trace.gates["log_decay"], torch.full((1, 1, 4), -0.5))
    assert torch.equal(trace.gates["write"], torch.ones(1, 1, 4))
    with pytest.raises(ValueError, match="has no gate 'beta'; its gates: log_decay, write"):
        draw(GatedLinear, pairs=4, d_key=8, gates={"beta": 1.0})


def test_softmax_logits():
    trace = draw(Softmax, pairs=16, d_key=8, reads=16, sharpness=3.0)
    logits = 3.0 * (trace.q / trace.q.norm(dim=-1, keepdim=True)) @ trace.k.mT
    seen = torch.ones(16, 16).tril().bool()
    expected = torch.softmax(logits.masked_fill(~seen, -torch.inf), dim=-1)
    assert torch.allclose(trace.mixer.effective_attention(trace.q, trace.k, {}), expected, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [n for n in names("mixer") if n not in ("hybrid", "module", "rnn", "lstm", "ttt_linear", "stickbreaking_attn")],
)
def test_a_single_pair_is_answered_with_its_value(name):
    """At neutral gates, independently of the scale that the mechanism itself applies."""
    make = hydra.utils.instantiate(config(f"mixer={name}").mixer)
    trace = draw(make, pairs=1, d_key=16, reads=8)
    assert torch.allclose(trace.o, trace.v, atol=2e-4)


@pytest.mark.parametrize("name", ["gated_linear", "gla", "mamba2", "log_linear", "hgrn2"])
def test_at_neutral_gates_gated_sums_equal_linear_attention(name):
    make = hydra.utils.instantiate(config(f"mixer={name}").mixer)
    fields = {"pairs": 24, "d_key": 8, "reads": 48}
    assert torch.allclose(draw(make, **fields).o, draw(Linear, **fields).o, atol=1e-5)


@pytest.mark.parametrize("name", ["gated_delta", "kda", "comba", "gated_delta_product"])
def test_at_neutral_gates_gated_deltas_equal_the_delta_rule(name):
    make = hydra.utils.instantiate(config(f"mixer={name}").mixer)
    fields = {"pairs": 24, "d_key": 8, "reads": 48}
    assert torch.allclose(draw(make, **fields).o, draw(DeltaRule, **fields).o, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pairs": 0}, "oracle.pairs=0: must be a whole number of at least 1"),
        ({"d_key": True}, "oracle.d_key=True: must be a whole number of at least 1"),
        ({"pairs": 9, "d_key": 8, "keys": "orthogonal"}, "oracle.pairs=9: must be at most oracle.d_key=8"),
        ({"keys": "gaussian"}, "oracle.keys='gaussian': must be one of random, orthogonal"),
        ({"cosine": 0.5}, "oracle.cosine=0.5 has an effect only with oracle.keys=correlated"),
        ({"cosine": -0.1, "keys": "correlated"}, "oracle.cosine=-0.1: must be a number of at least 0"),
        ({"cosine": 1, "keys": "correlated"}, "oracle.cosine=1: must be below 1"),
        ({"sharpness": 0}, "oracle.sharpness=0: must be a number above 0"),
        ({"gates": {"beta": float("nan")}}, "oracle.gates.beta=nan: must be a number"),
        ({"pairs": 4, "overwrites": 5}, "oracle.overwrites=5: must be at most oracle.pairs, which is 4"),
        (
            {"pairs": 40, "candidates": 32},
            "oracle.candidates=32: must be at least oracle.pairs=40 plus oracle.overwrites=0",
        ),
        (
            {"pairs": 30, "overwrites": 3, "candidates": 32},
            "oracle.candidates=32: must be at least oracle.pairs=30 plus oracle.overwrites=3",
        ),
    ],
)
def test_impossible_sizes_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Oracle(**fields)


def test_every_key_written_so_far_is_queried_equally_often():
    """Two passes over five pairs: position t queries one of the first t + 1 pairs, by its last writing."""
    source = draw(pairs=5, d_key=8, passes=2, reads=20_000).source
    for position, column in enumerate(source.T):
        share = torch.bincount(column % 5, minlength=5) / len(column)
        written = min(position + 1, 5)
        assert share[:written].tolist() == pytest.approx([1 / written] * written, abs=0.04)
        assert not share[written:].any()
    assert int(source[:, -1].min()) == 5
