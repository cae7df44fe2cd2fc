"""What the README and docs/extending.md show works: files of one's own, and commands."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from recall_lab.folders import read_config
from recall_lab.mixer.base import Trace

ROOT = Path(__file__).parents[1]
TEXT = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/extending.md"))
FILES = dict(re.findall(r"^`(mine/\S+)`:\n\n```\w+\n(.*?)^```", TEXT, re.S | re.M))


@pytest.fixture
def mine(empty_folder, tmp_path, monkeypatch):
    """The files shown, written to a folder that is on the Python path."""
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    return tmp_path / "mine"


def test_these_files_are_shown():
    own = {"mine/reversal.py", "mine/task/reversal.yaml", "mine/leaky.py", "mine/mixer/leaky.yaml"}
    claim = {"mine/longer.py", "mine/claim/longer.yaml"}
    probe = {"mine/overlap.py", "mine/probe/overlap.yaml", "mine/figure/overlap.py"}
    cache = {"mine/dilated.py", "mine/mixer/dilated.yaml"}
    assert set(FILES) == {*own, *claim, *probe, *cache, "mine/gated.py", "mine/schedule/halving.yaml"}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/extending.md", "docs/cluster.md"])
def test_links_lead_to_files_and_headings(name):
    page = ROOT / name
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page.read_text("utf-8"))
    assert links or name == "CONTRIBUTING.md"
    for file, heading in links:
        target = page.parent / file if file else page
        assert target.exists(), file
        headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.M) if heading else []
        assert heading in {"", *(text.lower().replace(" ", "-") for text in headings)}


def test_the_task_and_the_mixer_fulfil_the_contract(mine, capsys):
    from recall_lab.cli import check

    assert check.check(["mixer=leaky", "task=reversal"], str(mine)) == 0
    printed = capsys.readouterr().out
    assert "neutral gates: log_decay=-0.0001: every pair is written and kept" in printed
    assert "factors are declared: source" in printed
    task = importlib.import_module("reversal").Reversal(length=12, letters=5)
    with pytest.raises(ValueError, match="length=7: must be even"):
        task.at(length=7)


def test_the_claim_is_found_and_judged(mine):
    """Of four lengths, the longest is judged, over three seeds and in the claim's own experiment only."""
    from recall_lab.cli import claim

    (own,) = claim.load(["longer"], "mine").values()
    same = {"split": "test", "metric": "accuracy", "data_seed": 0}
    rows = [
        {**same, "experiment": experiment, "mixer": mixer, "seed": seed, "task.length": 2**length, "value": value}
        for experiment, gain in (("quickstart", 0.3), ("needle", 0.0))
        for mixer, value in (("delta_rule", 0.5 + gain), ("linear", 0.5))
        for seed in range(3)
        for length in range(4)
    ]
    table = pd.DataFrame(rows)
    shorter = table["task.length"] < 8
    (line,) = own.judge(table.assign(value=table["value"].where(~shorter, 0.0)))
    assert line.decision == "supported"
    assert line.estimate.value == pytest.approx(0.3)
    (line,) = own.judge(table[table["mixer"] == "linear"])
    assert line.missing


def test_the_cache_mechanism_fulfils_the_contract(mine, capsys):
    from recall_lab.cli import check

    words = ["mixer=dilated", "mixer.budget=4", "mixer.positions=rotary,alibi"]
    assert check.check(words, str(mine)) == 0
    assert capsys.readouterr().out.count("ok      state size") == 2


def test_the_cache_mechanism_attends_to_every_fourth_token(mine):
    """Softmax over the tokens t, t − 4, t − 8, computed for one query at a time; the state holds the 8 before."""
    dilated = importlib.import_module("dilated").Dilated
    torch.manual_seed(0)
    mixer = dilated(d_model=8, budget=3, short_conv=0).double()
    with torch.no_grad():
        q, k, v, _, _ = mixer.project(torch.randn(1, 30, 8, dtype=torch.float64))
        o, state = mixer.parallel(q, k, v, {})
    for t in range(30):
        seen = [s for s in (t - 8, t - 4, t) if s >= 0]
        weight = (k[0, 0, seen] @ q[0, 0, t] / 8**0.5).softmax(0)
        assert o[0, 0, t] == pytest.approx(weight @ v[0, 0, seen])
    assert state["k"].shape == (1, 1, 8, 8)


def test_the_model_has_the_mlp_that_it_shows(mine):
    """Its commands' settings make it; a block is x + SwiGLU(norm(x)); decoding equals the parallel form."""
    from recall_lab import building
    from recall_lab.cli.base import compose, resolved

    settings = ["model._target_=gated.Gated", "+model.bias=true", "model.d_model=8", "model.layers=1"]

    def workload(*words):
        return building.build(resolved(compose([*settings, *words], "mine"), {"task": "mqar", "mixer": "softmax"}))

    workload("model.mlp=2").check()
    model = workload("model.mlp=2").untrained()
    (mlp,) = (block.mlp for block in model.blocks)
    x, mixed = torch.randn(2, 1, 5, 8)
    first, second = mlp[1].inner.weight.split(16)
    one, two = mlp[1].inner.bias.split(16)
    normed = (x + mixed) / ((x + mixed).square().mean(-1, keepdim=True) + 1e-5).sqrt()
    left, right = normed @ first.T + one, normed @ second.T + two
    hidden = left * torch.sigmoid(left) * right
    expected = x + mixed + hidden @ mlp[1].outer.weight.T + mlp[1].outer.bias
    torch.testing.assert_close(model.blocks[0].output(x, mixed), expected)
    tokens = torch.arange(6)[None]
    logits, states = model.prefill(tokens[:, :5], model.initial_state())
    last, _ = model.step(tokens[:, 5:], states)
    torch.testing.assert_close(torch.cat([logits, last], dim=1), model(tokens))
    with pytest.raises(ValueError, match=r"model\.mlp=0"):
        workload("model.mlp=0").check()
    with pytest.raises(TypeError, match="layer_count"):
        workload("model.mlp=2", "+model.layer_count=2").check()


@pytest.mark.slow
def test_the_commands_for_own_files(mine):
    """As shown, but with tiny settings, after a run to be probed. A memory card would take minutes."""
    commands = [
        line.partition("#")[0]
        for line in re.findall(r"^recall-lab (.* --config-dir mine .*)$", TEXT, re.M)
        if not line.startswith("card ")
    ]
    verbs = ["show", "check", "run", "show", "check", "run", "show", "check", "probe", "run", "run", "run"]
    assert [line.split()[0] for line in commands] == verbs
    small = ["train.steps=3", "train.validation_sequences=4", "test.tokens=64", "test.sequences=2", "task.length=32"]
    for line in ["run name=mine", *commands]:
        verb, *rest = line.split()
        command = [sys.executable, "-m", "recall_lab", verb, *rest, *(small if verb == "run" else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert Path("outputs/backwards/report.html").exists()
    assert Path("outputs/gated/report.html").exists()
    assert Path("outputs/overlap/figure/overlap.png").exists()
    (used,) = (read_config(path.parent) for path in Path("outputs/sgd").glob("*/config.yaml"))
    assert used["optimizer"] == {"_target_": "torch.optim.SGD", "_partial_": True, "momentum": 0.95, "nesterov": False}
    assert used["schedule"]["step_size"] == 250


def test_the_oracle_uses_the_gates_that_the_mixer_declares(mine):
    """Nearly every pair is recalled at a quarter of the capacity of linear attention."""
    from recall_lab.oracle import Oracle

    leaky = importlib.import_module("leaky").Leaky
    oracle = Oracle(pairs=16, d_key=32, candidates=64, reads=256)
    trace = oracle.trace(oracle.mixer(leaky), np.random.default_rng(0))
    answer = (trace.o[:, 0, -1] @ trace.candidates.T).argmax(-1)
    right = (trace.v[torch.arange(len(answer)), 0, trace.source[:, -1]] @ trace.candidates.T).argmax(-1)
    assert (answer == right).float().mean() > 0.95
    leaky.neutral_gates = {}
    with pytest.raises(ValueError, match=r"Declare Leaky\.neutral_gates = \{'log_decay': …\}"):
        oracle.trace(oracle.mixer(leaky), np.random.default_rng(0))


def test_the_probe_measures_what_it_says_and_the_figure_draws_it(mine):
    """Of the pairs of three keys, two are at right angles, and one at 45°."""
    import recall_lab as rl

    overlap = importlib.import_module("overlap").overlap
    mixer = importlib.import_module("leaky").Leaky(d_model=4, heads=1)
    k = torch.tensor([[1.0, 0, 0, 0], [0, 3, 0, 0], [2, 0, 2, 0]])[None, None]
    trace = Trace(mixer, k, k, k, {}, k, torch.zeros(1, 3, dtype=torch.long), layer=1)
    (row,) = overlap(trace, None)
    assert (row["metric"], row["layer"], row["head"], row["count"]) == ("key_overlap", 1, 0, 3)
    assert row["value"] == pytest.approx(0.5 / 3)
    assert overlap(trace, None, power=1)[0]["value"] == pytest.approx(0.5**0.5 / 3)
    table = pd.DataFrame([{**row, "series": "linear", "task.length": length} for length in (3, 6)])
    (figure,) = rl.plot("overlap", table, config_dir="mine").values()
    assert figure.axes[0].lines[0].get_xydata() == pytest.approx(np.array([[3, 0.5 / 3], [6, 0.5 / 3]]))
    assert rl.plot("overlap", table.assign(metric="other"), config_dir="mine") == {}


def test_every_command_shown_parses(mine):
    """Verbs exist and overrides compose; the commands are not run."""
    from recall_lab.cli.base import compose

    for line in re.findall(r"^recall-lab (.*)$", TEXT, re.M):
        verb, *rest = shlex.split(line.partition("#")[0])
        assert verb in ("run", "show", "report", "list", "probe", "rates", "claim", "check", "status", "clean", "card")
        if verb in ("run", "show", "probe", "check"):
            words = [word for word in rest if "=" in word and not word.startswith("-")]
            words = [re.sub(r"=.*interval\((.*?),.*", r"=\1", word) for word in words]  # its first value
            overrides = [word if "[" in word else word.split(",")[0] for word in words]
            compose(overrides, "mine" if "--config-dir" in rest else None)
