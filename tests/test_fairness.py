"""Learning rates at the edge of their grid, and series that are not trained to the end, in invented tables."""

import pandas as pd
import pytest
from tables import drawn, legend, lines, panels

from recall_lab import results
from recall_lab.fairness import notes, trained_to_end
from recall_lab.figure import learning_rate


def table(*runs: dict) -> pd.DataFrame:
    """Validation rows in two cells of runs that are given as {mixer, lr, seed, steps, score, …}."""
    rows = []
    for number, run in enumerate(runs):
        for length, offset in ((16, 0.01), (64, -0.01)):
            rows.append(
                {"run": f"r{number}", "task": "mqar", "mixer": run.get("mixer", "linear"), "seed": run.get("seed", 0),
                 "data_seed": 0, "train.lr": run.get("lr", 0.01), "train.steps": run.get("steps", 100),
                 "schedule.total_iters": run.get("steps", 100), "train.solved": run.get("solved", 0.98),
                 "split": "validation", "metric": "accuracy", "value": run["score"] + offset, "task.length": length}
            )  # fmt: skip
    made = pd.DataFrame(rows)
    return made.assign(series=results.series(made))


def grid(scores: dict[float, float], **run) -> list[dict]:
    return [{"lr": lr, "score": score, **run} for lr, score in scores.items()]


EDGE = grid({0.003: 0.2, 0.01: 0.5, 0.03: 0.6})
INNER = grid({0.003: 0.2, 0.01: 0.5, 0.03: 0.4}, mixer="softmax")
TIE = grid({0.003: 0.9, 0.01: 0.9, 0.03: 0.4}, mixer="gla")


def test_the_best_of_a_grid_and_whether_it_is_at_its_edge():
    points = results.rates(table(*EDGE, *INNER, *TIE, {"mixer": "rnn", "score": 0.5}))
    assert set(points["series"]) == {"linear", "softmax", "gla"}  # one rate is no grid
    best = points[points["chosen"]].set_index("series")
    assert best["train.lr"].to_dict() == {"linear": 0.03, "softmax": 0.01, "gla": 0.003}
    assert best["edge"].to_dict() == {"linear": True, "softmax": False, "gla": False}
    assert not points.loc[~points["chosen"], "edge"].any()
    assert points.set_index(["series", "train.lr"]).loc[("linear", 0.01), "mean"] == pytest.approx(0.5)


def test_the_marked_rate_is_the_selected_one_and_incomplete_rates_are_not_chosen():
    """At 0.1 one of two seeds failed: the grid of complete rates ends at 0.03."""
    seeds = [*EDGE, *(run | {"seed": 1} for run in EDGE), {"lr": 0.1, "score": 0.9}]
    made = table(*seeds)
    points = results.rates(made)
    assert (
        points.loc[points["chosen"], "train.lr"].tolist()
        == [0.03]
        == results.select(made)["train.lr"].unique().tolist()
    )
    assert points.loc[points["edge"], "train.lr"].tolist() == [0.03]
    assert points["runs"].tolist() == [2, 2, 2, 1]


@pytest.mark.parametrize(("best", "edge"), [(0.01, False), (0.03, True), (0.003, True)])
def test_a_grid_of_one_seed_has_its_edges(best, edge):
    """The best rate has further seeds, which do as badly as the other rates."""
    points = results.rates(table(*EDGE, *({"lr": best, "score": 0.1, "seed": seed} for seed in (1, 2))))
    assert points.loc[points["chosen"], ["train.lr", "edge"]].to_numpy().tolist() == [[best, edge]]


def test_a_table_without_a_grid_has_no_rates_and_no_figure():
    for made in (table({"score": 0.5}), table({"score": 0.5}).drop(columns="train.lr")):
        assert results.rates(made).empty
        assert drawn(learning_rate, made) == {}


def test_the_figure_frames_the_chosen_rates():
    (figure,) = drawn(learning_rate, table(*EDGE, *INNER)).values()
    (ax,) = panels(figure)
    assert lines(ax)["linear"].get_xydata().tolist() == [[0.003, pytest.approx(0.2)], [0.01, 0.5], [0.03, 0.6]]
    frames = {
        line.get_label(): (line.get_marker(), *line.get_xydata()[0]) for line in ax.lines if line.get_ls() == "None"
    }
    assert frames["chosen"] == ("o", 0.01, 0.5)
    assert frames["chosen, at the edge\nof the grid"] == ("s", 0.03, pytest.approx(0.6))
    assert legend(figure) == ["softmax", "linear", "chosen", "chosen, at the edge\nof the grid"]
    assert ax.get_xscale() == "log"
    assert [text.get_text() for text in ax.get_xticklabels()] == ["0.003", "0.01", "0.03"]


def verdicts(*runs: dict) -> dict[str, tuple]:
    made = table(*runs)
    ends = trained_to_end(results.select(made), made)
    return {row["series"]: (row["verdict"], row["gain"], row["half"]) for row in ends.to_dict("records")}


NOTHING = pytest.approx(float("nan"), nan_ok=True)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([{"score": 0.995}], {"linear": ("solved", NOTHING, NOTHING)}),
        ([{"score": 0.985}], {"linear": ("unknown", NOTHING, NOTHING)}),  # 0.975 in one cell
        ([{"score": 0.995}, {"score": 0.9, "seed": 1}], {"linear": ("unknown", NOTHING, NOTHING)}),
        ([{"score": 0.995, "solved": None}], {"linear": ("unknown", NOTHING, NOTHING)}),
        ([{"score": 0.7}, {"score": 0.71, "steps": 200}],
         {"linear steps=100": ("end", pytest.approx(0.01), 100),
          "linear steps=200": ("end", pytest.approx(0.01), 100)}),
        ([{"score": 0.7}, {"score": 0.73, "steps": 200}],
         {"linear steps=100": ("gains", pytest.approx(0.03), 100),
          "linear steps=200": ("gains", pytest.approx(0.03), 100)}),
        ([{"score": 0.7}, {"score": 0.8, "seed": 1}, {"score": 0.705, "steps": 200}],  # only seed 0 is compared
         {"linear steps=100": ("end", pytest.approx(0.005), 100),
          "linear steps=200": ("end", pytest.approx(0.005), 100)}),
        ([{"score": 0.7}, {"score": 0.7, "steps": 150}],
         {"linear steps=100": ("unknown", NOTHING, NOTHING), "linear steps=150": ("unknown", NOTHING, NOTHING)}),
        ([{"score": 0.7}, {"score": 0.7, "steps": 200, "mixer": "softmax"}],
         {"linear": ("unknown", NOTHING, NOTHING), "softmax": ("unknown", NOTHING, NOTHING)}),
    ],
)  # fmt: skip
def test_trained_to_the_end(runs, expected):
    assert verdicts(*runs) == expected


def test_twice_the_steps_are_compared_at_the_chosen_rate():
    """0.01 is chosen at 100 steps; 200 steps at another rate say nothing about it."""
    found = verdicts(*grid({0.003: 0.4, 0.01: 0.5, 0.03: 0.4}), {"lr": 0.03, "steps": 200, "score": 0.9})
    assert found["linear steps=100"] == ("unknown", NOTHING, NOTHING)


def test_rows_of_later_probes_are_no_series_of_their_own():
    made = table({"score": 0.5})
    probed = made.assign(split="probe", series="linear order=1")
    both = pd.concat([made, probed], ignore_index=True)
    pd.testing.assert_frame_equal(trained_to_end(both, both), trained_to_end(made, made))


def test_runs_without_training_have_no_end():
    made = table({"score": 0.5}).drop(columns=["train.steps", "schedule.total_iters"])
    assert trained_to_end(made, made).empty
    assert notes(made, made) == []


def test_notes_name_the_series_and_the_run_that_is_missing():
    made = table(*EDGE, {"mixer": "softmax", "score": 0.995}, {"mixer": "rnn", "score": 0.3},
                 {"mixer": "rnn", "score": 0.5, "steps": 200})  # fmt: skip
    unknown = (
        "not shown to be trained to the end after 100 steps (the same runs with seed=0 train.steps=200 would show it)"
    )
    gains = (f"rnn steps={steps} (+0.200 from twice 100 steps)" for steps in (100, 200))
    assert notes(results.select(made), made) == [
        "mqar: the best train.lr is at the edge of its grid; a better one may lie beyond: linear (0.03)",
        f"mqar: {unknown}: linear",
        f"mqar: not trained to the end: {', '.join(gains)}",
    ]
