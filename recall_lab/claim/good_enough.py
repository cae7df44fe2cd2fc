"""Claim 7: on how many tasks a fixed state is enough."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

from recall_lab.claim.base import (
    FEWEST,
    Claim,
    Decision,
    Estimate,
    Line,
    at_most,
    contrast,
    exact,
    reported,
    scores,
    unlearned,
    unless,
    untrained,
)
from recall_lab.families import best, members


@dataclass(frozen=True)
class Comparison:
    """The best mechanisms of both families on one task."""

    growing: str = ""
    fixed: str = ""
    differences: dict[str, Estimate] = field(default_factory=dict)
    """Cell of the trained range, in words → test score of `growing` minus that of `fixed`."""
    gap: str = ""
    """What was not measured; empty where nothing is missing."""
    obstacle: str = ""
    """Why the task cannot be judged."""


@dataclass(frozen=True, kw_only=True)
class GoodEnough(Claim):
    """For many undemanding uses linear attention is enough.

    A task is undemanding where the best mechanism with a fixed state is within `margin` of the best one with a growing
    state in every cell of the trained range: its line is judged by the cell with the largest difference. The best
    mechanism of a family on a task has the highest mean validation score over these cells. Both must be trained to the
    end, and one of them must have learned the task, because equal accuracies near chance show nothing about a state:
    on validation it must be at least half way from chance to 1 in some cell.

    The claim is supported if at least half of the tasks are undemanding, and refuted if none is. Tasks on which a fixed
    state is better are listed.
    """

    experiment: str = "tasks"
    """Experiment on all tasks."""
    tasks: Sequence[str] = ("mqar",)
    margin: float = 0.02
    """Largest difference in test score that counts as good enough."""

    def judge(self, table: pd.DataFrame) -> list[Line]:
        rows = table[table["experiment"] == self.experiment]
        compared = {task: _compare(rows[rows["task"] == task]) for task in self.tasks}
        lines = {task: self._task(task, found) for task, found in compared.items()}
        return [_count(lines), *lines.values(), _better(compared)]

    def _task(self, task: str, found: Comparison) -> Line:
        """The line of a task: that of the cell that decides it."""
        if found.gap:
            return at_most(f"{task}: growing minus fixed state", None, self.margin, f"{found.gap} on {task}")
        lines = [
            at_most(f"{task}: {found.growing} minus {found.fixed}, {cell}", estimate, self.margin)
            for cell, estimate in found.differences.items()
        ]
        order = ("supported", "undecided", "refuted")
        line = max(lines, key=lambda line: (order.index(line.decision), line.estimate.value if line.estimate else 0))
        return unless(line, found.obstacle)


def _compare(rows: pd.DataFrame) -> Comparison:
    """The comparison on the task of these rows."""
    validation, test = scores(rows, "validation"), scores(rows)
    growing, fixed = best(members(validation, "growing")), best(members(validation, "fixed"))
    if growing is None or fixed is None:
        absent = [name for name, found in (("growing", growing), ("fixed", fixed)) if found is None]
        return Comparison(gap=f"accuracy of a mechanism with {' or '.join(absent)} state")
    cells = [name for name in validation if name.startswith("task.") and validation[name].notna().all()]
    differences: dict[str, Estimate] = {}
    for _, cell in validation[cells].drop_duplicates().iterrows():
        words = _words(cell, validation)
        here = test[(test[cells] == cell).all(axis=1)]
        estimate = contrast(*(here[here["series"] == name] for name in (growing, fixed)))
        if estimate is None:
            gap = f"test accuracy of {growing} and {fixed} with equal seeds, {words},"
            return Comparison(gap=gap)
        differences[words] = estimate
    own = rows[rows["series"].isin([growing, fixed])]
    return Comparison(growing, fixed, differences, obstacle=unlearned(own) or untrained(own))


def _words(cell: pd.Series, rows: pd.DataFrame) -> str:
    """A cell as "length=64, pairs=8": the parameters that differ between the cells of these rows."""
    varied = [name for name in cell.index if rows[name].nunique() > 1]
    return ", ".join(f"{name.removeprefix('task.')}={cell[name]:g}" for name in varied) or "its only cell"


def _count(lines: dict[str, Line]) -> Line:
    """The line about all tasks: supported if at least half are undemanding, refuted if none is."""
    groups = {decision: [task for task, line in lines.items() if line.decision == decision]
              for decision in ("supported", "refuted", "undecided")}  # fmt: skip
    enough, demanding = len(groups["supported"]), len(groups["refuted"])
    decision: Decision = (
        "supported" if 2 * enough >= len(lines) else "refuted" if demanding == len(lines) else "undecided"
    )
    named = {"supported": "undemanding", "refuted": "demanding", "undecided": "undecided"}
    reason = "; ".join(f"{named[group]}: {', '.join(tasks)}" for group, tasks in groups.items() if tasks)
    return Line(
        f"share of {len(lines)} tasks that are undemanding", "≥ 0.5, refuted if none is", decision,
        exact(enough / len(lines)), reason,
    )  # fmt: skip


def _better(compared: dict[str, Comparison]) -> Line:
    """The tasks and cells in which the whole interval favours the fixed state."""
    found = []
    for task, comparison in compared.items():
        better = [f"{cell}: {-estimate.value:.3f}" for cell, estimate in comparison.differences.items()
                  if estimate.high < 0 and estimate.replicates >= FEWEST]  # fmt: skip
        doubt = f", {comparison.obstacle}" if comparison.obstacle else ""
        found += [f"{task} ({comparison.fixed}; {'; '.join(better)}{doubt})"] if better else []
    return reported("tasks on which a fixed state is better", None, ", ".join(found) or "none")
