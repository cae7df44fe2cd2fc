"""Probe policies: another policy on trained weights scores as the same model with that mixer does."""

import numpy as np
import pytest
import torch
from conftest import config
from hydra.utils import instantiate
from probes import value

from recall_lab import metrics
from recall_lab.data import arrays
from recall_lab.mixer.softmax import Softmax
from recall_lab.model import Model
from recall_lab.probe.base import ProbeError, run_on_model
from recall_lab.probe.policies import policies
from recall_lab.task.mqar import MQAR

WINDOW, TOP_K = "recall_lab.mixer.window.Window", "recall_lab.mixer.top_k.TopK"


def model(*mixers: str, layers: int = 2) -> Model:
    """Untrained, with large keys and queries, so that the weights differ much between tokens."""
    torch.manual_seed(0)
    makers = [instantiate(config(*mixer.split()).mixer) for mixer in mixers]
    made = Model(vocab=16, mixer=makers, d_model=16, layers=layers)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight *= 3
    return made


@pytest.fixture
def batch(rng):
    return MQAR(vocab=16, length=32, pairs=4).sample(300, rng)


def accuracy(made: Model, batch) -> tuple[float, float]:
    """Of the first and of the second half of the sequences."""
    tokens, scored, targets = arrays(batch)
    with torch.no_grad():
        hits = metrics.correct(made(tokens, scored), targets).numpy()
    first = np.nonzero(batch.scored)[0] < len(batch.tokens) // 2
    return hits[first].mean(), hits[~first].mean()


@pytest.mark.parametrize("positions", ["none", "rotary", "alibi"])
@pytest.mark.parametrize("policy", ["window", "sink_window", "heavy_hitter", "merging", "random_k", "paged", "top_k"])
def test_accuracy_is_that_of_the_model_with_this_mixer(policy, positions, batch, rng):
    own = {"paged": {"page": 4}, "sink_window": {"sinks": 3}}.get(policy, {})
    trained = model(f"mixer=softmax mixer.positions={positions} mixer.heads=2")
    options = [f"mixer.{key}={given}" for key, given in own.items()]
    same = model(" ".join([f"mixer={policy} mixer.positions={positions} mixer.heads=2 mixer.budget=8", *options]))
    same.load_state_dict(trained.state_dict())
    target = config(f"mixer={policy}").mixer["_target_"]
    rows = policies(trained, batch, rng, policies=[{"policy": target, **own}], shares=[0.25])
    first, second = accuracy(same, batch)
    assert value(rows, "policy_validation_accuracy", policy=policy) == pytest.approx(first)
    assert value(rows, "policy_accuracy", policy=policy, budget=8, share=0.25) == pytest.approx(second)
    assert all(type(block.mixer) is Softmax for block in trained.blocks)  # the model itself is unchanged


def test_what_each_policy_keeps(rng):
    """Bounded caches B, top_k C where it is given, others all of n; nobody more than n."""
    batch = MQAR(vocab=16, length=32, pairs=4).sample(4, rng)
    rows = policies(model("mixer=softmax"), batch, rng, shares=[0.125, 0.5])
    kept = {(row["policy"], row["budget"]): row["kept"] for row in rows}
    bounded = ("window", "sink_window", "heavy_hitter", "merging")
    assert all(kept[name, budget] == budget for name in bounded for budget in (4, 16))
    assert all(kept[name, budget] == 32 for name in ("random_k", "paged", "top_k") for budget in (4, 16))
    assert [kept[f"top_k C={c}B", b] for c, b in ((2, 4), (4, 4), (2, 16), (4, 16))] == [8, 16, 32, 32]


def test_at_a_budget_of_all_tokens_every_policy_is_softmax(batch, rng):
    trained = model("mixer=softmax")
    rows = policies(trained, batch, rng, shares=[1])
    scores = [row["value"] for row in rows if row["metric"] == "policy_accuracy"]
    assert len(scores) == 9
    assert scores == pytest.approx([accuracy(trained, batch)[1]] * 9, abs=0.002)  # a near tie may be rounded either way


def test_only_layers_that_attend_are_changed(batch, rng):
    """Of a hybrid, the layer with a state keeps its mechanism."""
    trained = model("mixer=delta_rule", "mixer=softmax")
    same = model("mixer=delta_rule", "mixer=window mixer.budget=4")
    same.load_state_dict(trained.state_dict())
    rows = policies(trained, batch, rng, policies=[{"policy": WINDOW}], shares=[0.125])
    assert value(rows, "policy_accuracy") == pytest.approx(accuracy(same, batch)[1])


@pytest.mark.parametrize(
    ("mixer", "policy", "message"),
    [
        ("delta_rule", {"policy": WINDOW}, "no layer of this model is softmax attention over a cache"),
        ("softmax", {"policy": "mine.Own"}, "policy=mine.Own cannot be imported: No module named 'mine'"),
        ("softmax", {"policy": "os.path.join"}, "policy=os.path.join: must be a class of mixer with a budget"),
        ("softmax", {"policy": WINDOW, "page": 3}, f"policy={WINDOW} has no option page"),
        ("softmax", {"policy": TOP_K, "kept": 0.5}, "kept=4: must be at least budget=8"),
        ("forgetting", {"policy": WINDOW}, f"policy={WINDOW} has other weights than Forgetting"),
        ("softmax", {"policy": "recall_lab.mixer.paged.Paged", "page": 3}, "page=3: must divide budget=8"),
    ],
)
def test_what_is_impossible_is_named(mixer, policy, message, batch, rng):
    def probe(model, batch, rng):
        return policies(model, batch, rng, policies=[policy], shares=[0.25])

    with pytest.raises(ProbeError) as raised:
        run_on_model(probe, model(f"mixer={mixer}"), batch, rng)
    assert str(raised.value).startswith(f"probe probe: {message}")


def test_half_of_the_sequences_are_for_validation(rng):
    one = MQAR(vocab=16, length=32, pairs=4).sample(1, rng)
    with pytest.raises(ValueError, match=r"^test.probe_sequences=1: must be at least 2, half of them for validation$"):
        policies(model("mixer=softmax"), one, rng)
