"""Workloads, the kinds of run: their settings, what is refused, which targets are allowed, and probes that fail."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from command_line import TINY, recall, run_folders, run_probe, shell
from conftest import CONF

from recall_lab import building, files, folders, messages, results, workload
from recall_lab.cli.base import compose, resolved

pytestmark = pytest.mark.usefixtures("empty_folder")

ORACLE = ["oracle=random", "oracle.d_key=8", "oracle.reads=64", "mixer=linear", "probe=[state_retention]",
          "probe.state_retention.lags=[]", "report=false"]  # fmt: skip


@pytest.mark.parametrize("kind", [workload.TrainAndTest, workload.AskOracle])
def test_the_yaml_of_a_workload_names_exactly_its_fields(kind):
    """A setting that is not a field has no effect, and every field must be given."""
    found = {}
    for path in (CONF / "workload").glob("*.yaml"):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        found[content.pop("_target_")] = content
    content = found[f"recall_lab.workload.{kind.__name__}"]
    assert content == {field.name: f"${{{field.name}}}" for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.layers=1"], "model.layers has no effect in this kind of run"),
        (["optimizer=sgd"], "optimizer has no effect in this kind of run"),
        (["schedule.total_iters=5"], "schedule.total_iters has no effect in this kind of run"),
        (["train.steps=5"], "train.steps has no effect in this kind of run"),
        (["test.tokens=5"], "test.tokens has no effect in this kind of run"),
        (["task=needle"], "task has no effect in this kind of run"),
        (["task.length=32"], "task.length has no effect in this kind of run"),
        (["mixer.heads=2"], "mixer.heads has no effect with oracle=random"),
        (["mixer.short_conv=2"], "mixer.short_conv has no effect with oracle=random"),
        (["mixer.qk_norm=true"], "mixer.qk_norm has no effect with oracle=random"),
        (["mixer.output_gate=true"], "mixer.output_gate has no effect with oracle=random"),
        (["mixer.d_key=4"], "mixer.d_key has no effect with oracle=random: .*oracle.d_key"),
        (["mixer=softmax", "mixer.positions=rotary"], "mixer.positions has no effect .* without positions"),
        (["mixer=window", "mixer.rotary_base=500"], "mixer.rotary_base has no effect .* without positions"),
        (["mixer=delta_rule", "mixer.allow_neg_eigval=true"], "mixer.allow_neg_eigval has no effect"),
        (["size=large"], "size has no effect here"),
    ],
)
def test_a_setting_without_effect_on_the_oracle_is_refused(arguments, message, capsys):
    assert recall(*ORACLE, *arguments) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert re.search(message, printed), printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["oracle.pairs=3"], "oracle.pairs has an effect only with oracle=random"),
        (["test.probe_sequences=3"], "test.probe_sequences has no effect without a probe"),
        (["size=large"], "size has no effect here"),
        (["select=[train.lrr]"], "select: there is no setting train.lrr; did you mean train.lr?"),
        (
            ["task.length=99", "train.cells=[{length: 8, pairs: 1}]", "test.cells={length: [8], pairs: [1]}"],
            "task.length has no effect: every cell of train.cells and test.cells sets length itself",
        ),
    ],
)
def test_a_setting_without_effect_on_training_is_refused(arguments, message, capsys):
    tiny = [word for word in TINY if not word.startswith(("task.length", "task.pairs"))]
    assert recall(*tiny, *arguments) == 2
    assert message in capsys.readouterr().err
    assert run_folders("main") == []


def test_variants_whose_options_only_shape_gates_are_refused_by_the_oracle(capsys):
    assert recall(*ORACLE, "mixer=delta_rule/neg_eigval") == 2
    printed = capsys.readouterr().err
    assert "allow_neg_eigval" in printed
    assert "oracle.gates.beta" in printed


def test_a_variant_with_positions_is_refused_by_the_oracle(capsys):
    assert recall(*ORACLE, "mixer=softmax/rotary") == 2
    assert "mixer.positions has no effect with the oracle" in capsys.readouterr().err


def test_a_fixed_gate_has_an_effect_in_the_oracle():
    """gated_linear with the decay of RetNet forgets; at neutral gates it equals linear attention."""
    for name, mixer in (("linear", "linear"), ("neutral", "gated_linear"), ("fixed", "gated_linear/fixed_decay")):
        assert recall(*ORACLE, f"mixer={mixer}", f"name={name}") == 0
    errors = {}
    for name in ("linear", "neutral", "fixed"):
        table = results.collect(Path("outputs", name))
        errors[name] = table.loc[table["metric"] == "error", "value"].iloc[-1]
    assert errors["neutral"] == pytest.approx(errors["linear"], rel=1e-5)
    assert abs(errors["fixed"] - errors["linear"]) > 0.05


def test_a_probe_that_fails_does_not_affect_scores_and_other_probes(capsys):
    """A decoder needs at least four sequences. With fewer it fails; the other probe and the scores are kept."""
    arguments = [*TINY, "mixer=linear", "probe=[retrieval,state_retention]", "test.probe_sequences=2"]
    assert recall(*arguments, "probe.state_retention.lags=[1]") == 1
    (folder,) = run_folders("main")
    status = folders.status(folder)
    assert status["state"] == "incomplete"
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "probe state_retention, layer 0" in printed
    assert "test.probe_sequences" in printed
    rows = files.read_json(folder / "rows.json")["rows"]
    assert {"validation", "test", "probe"} == {row["split"] for row in rows}
    assert {row["probe"] for row in rows if row["split"] == "probe"} == {"retrieval"}
    table = results.collect(Path("outputs/main"))
    assert "accuracy" in set(table["metric"])
    assert recall(*arguments, "probe.state_retention.lags=[1]") == 1  # the probe is repeated from the checkpoint


def test_a_probe_of_ones_own_that_fails_is_named_once_with_file_and_line(capsys):
    """It fails in each of two layers and five cells."""
    Path("mine/probe").mkdir(parents=True)
    Path("mine/unsound.py").write_text(
        "import torch\n\n\n@torch.no_grad()\ndef unsound(trace, rng):\n    return {}[f'{trace.layer} {len(trace.q)}']\n"
    )
    Path("mine/probe/unsound.yaml").write_text("# @package probe.unsound\n_target_: unsound.unsound\n_partial_: true\n")
    assert recall("--config-dir", "mine", *TINY, "mixer=linear", "model.layers=2", "probe=[unsound,retrieval]") == 1
    (folder,) = run_folders("main")
    place = Path("mine/unsound.py").absolute()
    assert capsys.readouterr().err == (
        f"recall-lab: {Path('outputs/main', folder.name)} is incomplete: probe unsound, layer 0: KeyError: '0 16' "
        f"({place}, line 6) (cell {{'length': 4, 'pairs': 1}}), and 9 more times\n"
    )
    assert (folder / "run.log").read_text().count("Traceback") == 2  # the error, and the one that it caused
    rows = files.read_json(folder / "rows.json")["rows"]
    assert {row["probe"] for row in rows if row["split"] == "probe"} == {"retrieval"}


def test_a_later_probe_that_fails_does_not_affect_the_others(capsys):
    assert recall(*TINY, "mixer=linear") == 0
    (folder,) = run_folders("main")
    words = ["probe=[retrieval,state_retention]", "probe.state_retention.lags=[1]", "test.probe_sequences=2"]
    assert run_probe(str(folder), *words) == 1
    printed = capsys.readouterr().err
    assert "probe state_retention, layer 0" in printed
    assert "Traceback" in (folder / "run.log").read_text(encoding="utf-8")
    (path,) = folder.glob("probe-*.json")
    assert {row["probe"] for row in files.read_json(path)["rows"]} == {"retrieval"}


def test_an_oracle_run_without_any_rows_has_failed(capsys):
    """There is nothing to report, so the run is not half done: it is named with the reason, without a traceback."""
    words = [word for word in ORACLE if not word.startswith(("oracle.reads", "probe.", "report"))]
    assert recall(*words, "oracle.pairs=4", "oracle.reads=8") == 1  # two sequences, too few for a decoder
    (folder,) = run_folders("main")
    assert folders.status(folder)["state"] == "failed"
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "probe state_retention" in printed
    assert "oracle.reads" in printed


@pytest.mark.parametrize(
    ("part", "target"),
    [
        ("task", "os.system"),
        ("task", "pathlib.Path"),
        ("mixer", "subprocess.Popen"),
        ("mixer", "recall_lab.task.mqar.MQAR"),
        ("model", "recall_lab.mixer.softmax.Nothing"),
        ("train", "builtins.dict"),
        ("test", "recall_lab.train.Training"),
    ],
)
def test_a_folder_cannot_run_arbitrary_code(part, target, capsys):
    """The config.yaml of a run names the objects to build; only known kinds, such as tasks and mixers, are allowed."""
    assert recall(*TINY) == 0
    (folder,) = run_folders("main")
    config = folders.read_config(folder)
    config[part]["_target_"] = target
    folders.write_config(folder, config)
    assert run_probe(str(folder), "probe=retrieval") == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert f"{part}._target_={target}" in printed


def test_a_part_without_target_is_named():
    config = resolved(compose([]), {"task": "mine", "mixer": "softmax"})
    with pytest.raises(ValueError, match="task: its configuration has no _target_, so it is no Task"):
        building.build(config | {"task": {"length": 8}})


def test_a_yaml_with_a_syntax_error_gives_one_line(tmp_path, capsys):
    (tmp_path / "task").mkdir()
    (tmp_path / "task/mine.yaml").write_text("length: [8\nx: }\n")
    assert recall("--config-dir", str(tmp_path), "task=mine") == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "mine.yaml" in printed


def test_an_error_whose_message_says_little_comes_with_its_type():
    assert messages.one_line(KeyError("heads")) == "KeyError: 'heads'"
    assert messages.one_line(ValueError("heads=0: must be positive")) == "heads=0: must be positive"


def test_a_nested_target_is_checked_too():
    with pytest.raises(ValueError, match=r"mixer\.first\._target_=os\.system"):
        building.check_targets("mixer", {"first": {"_target_": "os.system"}})
    with pytest.raises(ValueError, match=r"probe\.mine\._target_=os\.system"):
        building.check_targets("probe", {"mine": {"_target_": "os.system"}})
    for part, target in (("optimizer", "os.system"), ("optimizer", "torch.nn.GRU"), ("schedule", "torch.optim.SGD")):
        with pytest.raises(ValueError, match=rf"^{part}\._target_={target}: must be "):
            building.check_targets(part, {"_target_": target})
    building.check_targets("optimizer", {"_target_": "torch.optim.SGD"})
    building.check_targets("mixer", {"first": {"_target_": "torch.nn.GRU"}})  # a plain module, where modules are built


@pytest.mark.parametrize("mixer", ["softmax", "hybrid", "gated_linear/fixed_decay"])
def test_every_target_that_the_command_line_composes_is_allowed(mixer):
    config = resolved(compose([f"mixer={mixer}", "probe=[retrieval,cost]"]), {"task": "mqar", "mixer": mixer})
    assert isinstance(building.build(config), workload.TrainAndTest)
    json.dumps(config)


@pytest.mark.slow
def test_cells_left_out_of_a_derived_grid_are_named_once():
    tiny = [word for word in TINY if not word.startswith("task.")]
    done = shell("run", "-m", *tiny, "task.length=16", "task.pairs=4", "task.vocab=16", "seed=0,1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("a cell of the derived grid is left out: length=64, pairs=16") == 1
