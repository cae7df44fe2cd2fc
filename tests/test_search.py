"""Searches for settings: which values are tried, what is resumed, and what a report shows of them."""

import importlib.util
import json
import math
import os
import signal
from pathlib import Path

import pytest
from command_line import SERIAL, TINY, background, recall, run_folders, shell, started, states

from recall_lab import folders
from recall_lab.search import FAILED, Interval, Search, best_trials

pytestmark = pytest.mark.usefixtures("empty_folder")

RATE = "train.lr=tag(log, interval(1e-4, 1e-1))"
SEARCH = ["-m", "hydra/sweeper=optuna", RATE]


def searched(trials: int, batch: int = 4, seed: int = 0, failing: float = math.inf) -> tuple[list[float], Search]:
    """The rates that a search tries, and the search, whose loss is lowest at 0.02; those above `failing` have none."""
    search = Search([], {"train.lr": Interval(1e-4, 1e-1, log=True)}, seed, batch)
    tried = []
    for first in range(0, trials, batch):
        rates = [float(values["train.lr"]) for values in search.ask(min(batch, trials - first))]
        search.tell([FAILED if rate > failing else 1 + math.log(rate / 0.02) ** 2 for rate in rates])
        tried += rates
    return tried, search


def test_a_search_finds_the_minimum_and_repeats_itself():
    pytest.importorskip("optuna")
    tried, search = searched(24)
    assert all(1e-4 <= rate <= 1e-1 and rate == float(f"{rate:.3g}") for rate in tried)
    assert search.best is not None
    loss, values = search.best
    assert values["train.lr"] == min(tried, key=lambda rate: abs(math.log(rate / 0.02)))
    assert loss == pytest.approx(1 + math.log(values["train.lr"] / 0.02) ** 2)
    assert searched(24)[0] == tried
    assert searched(10)[0] == tried[:10]  # a search that ended in the middle of a batch
    assert searched(24, seed=1)[0] != tried


def test_a_search_is_better_than_chance():
    """Of n uniform values in an interval of width w, the nearest to a point is at a mean distance of w / 2(n + 1)."""
    pytest.importorskip("optuna")
    found = [searched(24, seed=seed)[1].best for seed in range(8)]
    distances = [math.sqrt(best[0] - 1) for best in found if best]
    assert sum(distances) / 8 < 0.5 * math.log(1e-1 / 1e-4) / (2 * 25)


def test_trials_without_a_loss_are_avoided_and_never_the_best():
    pytest.importorskip("optuna")
    tried, search = searched(24, failing=0.01)
    assert search.best is not None
    assert search.best[1]["train.lr"] == max(rate for rate in tried if rate <= 0.01)
    assert search.failed == sum(rate > 0.01 for rate in tried) < 12
    none = searched(4, failing=0)[1]
    assert (none.best, none.failed, none.describe()) == (None, 4, "no trial has a loss")


def test_whole_numbers_are_searched():
    pytest.importorskip("optuna")
    search = Search([], {"model.layers": Interval(1, 3, whole=True)}, 0, 20)
    assert {values["model.layers"] for values in search.ask(20)} == {1, 2, 3}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([RATE], f"{RATE}: give a list of values, or search it with hydra/sweeper=optuna"),
        (["hydra/sweeper=optuna", "seed=0,1"], "searches intervals, and none is given"),
        (["hydra/sweeper=optuna", "train.lr=interval(0.1, 0.01)"], "train.lr=interval(0.1, 0.01): the first number"),
        (["hydra/sweeper=optuna", "train.lr=tag(log, interval(0, 1))"], "the lower number must be above 0"),
        (
            ["hydra/sweeper=optuna", "train.lr=tag(x, interval(0, 1))"],
            "train.lr: an interval may have the tag log only",
        ),
        (["hydra/sweeper=optuna", "seed=int(interval(0, 9))"], "a seed is not searched"),
        (["hydra/sweeper=optuna", "threads=int(interval(1, 2))"], "no result depends on threads"),
        (["hydra/sweeper=optuna", "name=interval(0, 9)"], "a sweep over name"),
        (["hydra/sweeper=optuna", RATE, "train.lr=0.1"], "train.lr is given twice"),
        (["hydra/sweeper=optuna", RATE, "hydra.sweeper.trials=0"], "hydra.sweeper.trials=0: must be a whole number"),
        (["hydra/sweeper=optuna", RATE, "train.warmup=${hydra:job.num}"], "cannot depend on ${hydra:job.num}"),
        (["hydra/sweeper=optuna", "train.lr=interval(-2, -1)"], "nothing was started; impossible jobs: 4 of 4"),
    ],
)
def test_a_search_that_is_not_possible_is_refused_in_a_line(words, line, capsys):
    if "hydra/sweeper=optuna" in words:
        pytest.importorskip("optuna")
    assert recall("-m", *TINY, *words) == 2
    assert line in capsys.readouterr().err
    assert not list(Path("outputs").glob("*/*/status.json"))


def test_what_a_search_needs_is_told_before_anything_starts(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "optuna" else find(name, *more)
    )
    assert recall(*SEARCH, *TINY) == 2
    assert capsys.readouterr().err.endswith("optuna is not installed: pip install 'recall_lab[optuna]'\n")
    assert recall(*SEARCH[1:2], *TINY) == 2
    assert capsys.readouterr().err.endswith("hydra/sweeper=optuna has no effect without -m\n")


def test_best_trials_are_a_table_with_the_settings_that_distinguish_searches(tmp_path):
    def write(name: str, mixer: str, layers: int, **more) -> None:
        settings = {"model.layers": layers, "train.steps": 9, "mixer._target_": mixer}
        interval = {"train.lr": {"low": 1e-4, "high": 0.1, "log": True, "whole": False}}
        found = {"best": {"train.lr": 0.0123}, "loss": 0.56789, "trials": 20, "failed": 0}
        content = {
            "task": "mqar",
            "mixer": mixer,
            "settings": settings,
            "intervals": interval,
            "seeds": [[0, 0], [1, 0]],
        }
        (tmp_path / f"search-{name}.json").write_text(json.dumps(content | found | more))

    assert best_trials([tmp_path]).empty
    write("a", "linear", 1)
    assert best_trials([tmp_path]).to_dict("records") == [
        {"task": "mqar", "mixer": "linear", "searched": "train.lr from 0.0001 to 0.1", "best": "train.lr=0.0123",
         "validation loss": "0.5679", "seeds": 2, "trials": "20"}
    ]  # fmt: skip
    write("b", "softmax", 1, best={}, loss=None, failed=20)
    assert list(best_trials([tmp_path])["best"]) == ["train.lr=0.0123", "every trial failed"]
    assert list(best_trials([tmp_path])["trials"]) == ["20", "20, 20 of them failed"]
    write("c", "linear", 2)
    assert list(best_trials([tmp_path])["settings"]) == ["model.layers=1", "", "model.layers=2"]


def losses(name: str) -> dict[str, float]:
    """Identity → validation loss, of every finished run."""
    facts = {run.name: folders.status(run) for run in run_folders(name)}
    return {run: each["loss"] for run, each in facts.items() if each["state"] == "finished"}


def records(name: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(Path("outputs", name).glob("search-*.json"))]


@pytest.mark.slow
def test_a_search_of_each_combination_with_its_report(capsys):
    """Two mixers and two seeds, searched together; continued with more trials; finished trials are not repeated."""
    pytest.importorskip("optuna")
    words = [*SEARCH, *TINY, SERIAL, "mixer=linear,softmax", "seed=0,1", "report=true", "name=both"]
    words += ["hydra.sweeper.batch=2"]
    assert recall("--dry-run", *words, "hydra.sweeper.trials=3") == 0
    printed = capsys.readouterr().out
    assert printed.count("new  ") == 2 * 2 * 2
    assert "2 × 3 trials: of each search 0 are done, 2 are next; the values of the other 1 depend on" in printed
    assert not Path("outputs").exists()

    assert recall(*words, "hydra.sweeper.trials=3") == 0
    printed = capsys.readouterr().out
    assert printed.count("finished  ") == 2 * 3 * 2
    found = records("both")
    assert {each["mixer"] for each in found} == {"linear", "softmax"}
    page = Path("outputs/both/report.md").read_text(encoding="utf-8").partition("## Searches")[2]
    for each in found:
        loss, rate = each["loss"], each["best"]["train.lr"]
        runs = [run for run in run_folders("both") if folders.read_config(run)["choice"]["mixer"] == each["mixer"]]
        means: dict[float, list[float]] = {}
        for run in runs:
            means.setdefault(folders.read_config(run)["train"]["lr"], []).append(folders.status(run)["loss"])
        assert all(len(pair) == 2 for pair in means.values())
        assert len(means) == each["trials"] == 3
        assert loss == pytest.approx(min(sum(pair) / 2 for pair in means.values()))
        assert sum(means[rate]) / 2 == loss
        assert (
            f"search    mixer={each['mixer']} best train.lr={rate:g}, validation loss {loss:.4g} after 3 of" in printed
        )
        assert (
            f"| mqar | {each['mixer']} | train.lr from 0.0001 to 0.1 | train.lr={rate:g} | {loss:.4g} | 2 | 3 |" in page
        )
    assert "Searches" in Path("outputs/both/report.html").read_text(encoding="utf-8")
    assert json.loads(Path("outputs/both/select.json").read_text()) == ["train.lr"]

    assert recall("--dry-run", *words, "hydra.sweeper.trials=3") == 0
    assert capsys.readouterr().out.count("after 3 of 3 trials") == 2
    assert recall(*words, "hydra.sweeper.trials=4") == 0
    printed = capsys.readouterr().out
    assert (printed.count("finished  "), printed.count("found  ")) == (2 * 1 * 2, 2 * 3 * 2)
    assert [each["trials"] for each in records("both")] == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_search_is_resumed_and_is_then_as_without_the_interruption(number):
    pytest.importorskip("optuna")
    words = [*SEARCH, *TINY, "train.steps=21", "hydra.sweeper.trials=8"]
    with background("run", *words, "name=cut", slowed=True) as process:
        started(process, "cut", runs=6)
        os.killpg(process.pid, number)
        process.wait(timeout=60)
    assert 0 < states("cut").count("finished") < 8
    before = losses("cut")
    times = {run: Path("outputs/cut", run, "rows.json").stat().st_mtime_ns for run in before}
    done = shell("run", *words, "name=cut")
    assert (done.returncode, done.stderr) == (0, "")
    assert {run: Path("outputs/cut", run, "rows.json").stat().st_mtime_ns for run in before} == times
    assert recall(*words, SERIAL, "name=alone") == 0
    assert losses("cut") == losses("alone")
    assert records("cut") == records("alone")


@pytest.mark.slow
def test_failed_trials_and_other_processes_do_not_end_a_search(capsys):
    """Rates of which most give losses that are not finite; two processes share the runs."""
    pytest.importorskip("optuna")
    words = ["-m", "hydra/sweeper=optuna", "train.lr=tag(log, interval(1e-3, 1e9))", "hydra.sweeper.trials=9", *TINY]
    words += ["train.steps=30", "train.clip=1e30", "name=failing", "report=true"]
    with background("run", *words, slowed=True) as process:
        started(process, "failing", runs=1)
        done = shell("run", *words)
        process.wait(timeout=120)
    assert (process.returncode, done.returncode) == (1, 1)
    (found,) = records("failing")
    assert found["trials"] == 9
    assert 0 < found["failed"] < 9
    assert states("failing").count("failed") == found["failed"]
    assert found["loss"] == min(losses("failing").values())
    assert recall("--dry-run", *words) == 0
    printed = capsys.readouterr().out
    assert f"{found['failed']} failed" in printed
    assert "after 9 of 9 trials" in printed
    assert f"9, {found['failed']} of them failed" in Path("outputs/failing/report.md").read_text(encoding="utf-8")
