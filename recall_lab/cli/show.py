"""`recall-lab show`: an example of a task, with its targets, its roles in colour and the chance level."""

import hydra
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recall_lab.checks import require, whole_number
from recall_lab.cli.base import compose, parse, part_of
from recall_lab.task.base import IGNORE, Batch, Task

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_black")


def show(overrides: list[str], sequences: int = 1, seed: int = 0, config_dir: str | None = None) -> None:
    """Prints one sequence of a task with its targets, or statistics of several. Nothing is trained.

    Raises ValueError for an override that does not concern the task.
    """
    whole_number("--n", sequences)
    for override in parse(overrides):
        require(
            part_of(override.key_or_group) in ("task", "experiment", "size"),
            f"{override.key_or_group} has no effect: show prints an example of a task (task=…, task.length=…); "
            "`recall-lab list mixers` describes the mixers",
        )
    config = compose(overrides, config_dir)
    task = hydra.utils.instantiate(config.task)
    batch = task.sample(sequences, np.random.default_rng(seed))
    console = Console(highlight=False)
    settings = ", ".join(f"{key}={value}" for key, value in config.task.items() if not key.startswith("_"))
    console.print(f"{type(task).__name__}({settings})")
    if sequences == 1:
        (_vectors if task.continuous else _example)(task, batch, console)
    else:
        _distribution(batch, console)
    level = "normalised error of a guess" if task.continuous else "chance level"
    console.print(f"scored positions per sequence: {batch.scored.sum() / sequences:g}; {level}: {task.chance:.4g}")


def _example(task: Task, batch: Batch, console: Console) -> None:
    """Tokens coloured by role, each with its target below it, wrapped to the width of the terminal."""
    tokens, targets = batch.tokens[0], batch.targets[0]
    roles = task.roles(batch.tokens)[0]
    if tokens.ndim == 1:
        tokens, roles = tokens[:, None], roles[:, None]
    kinds = [role for role in dict.fromkeys(roles.ravel().tolist()) if role != "filler"]
    style = dict(zip(kinds, COLOURS, strict=False)) | {"filler": "bright_black"}
    width = max(len(str(x)) for x in (*tokens.ravel(), *targets[targets != IGNORE])) + 1
    for start in range(0, len(tokens), max(1, (console.width - 8) // width)):
        part = slice(start, start + max(1, (console.width - 8) // width))
        for channel in range(tokens.shape[1]):
            line = Text("tokens " if channel == 0 else "       ")
            for token, role in zip(tokens[part, channel], roles[part, channel], strict=True):
                text = "." if role == "filler" else str(token)
                line.append(text.rjust(width), style=style.get(role, ""))
            console.print(line)
        marks = ["" if target == IGNORE else str(target) for target in targets[part]]
        console.print(Text("target " + "".join(mark.rjust(width) for mark in marks), style="bold"))
        console.print()
    legend = Text("roles: ")
    for role in [*kinds, *({"filler"} & set(roles.ravel().tolist()))]:
        legend.append(f"{role} " if role != "filler" else "filler (.) ", style=style.get(role, ""))
    console.print(legend)


def _vectors(task: Task, batch: Batch, console: Console) -> None:
    """One line per position: its role, its vector and, where it is scored, the target."""
    for position, (token, target, role) in enumerate(
        zip(batch.tokens[0], batch.targets[0], task.roles(batch.tokens)[0], strict=True)
    ):
        line = Text(f"{position:4} {role:<8}", style=COLOURS[0] if batch.scored[0, position] else COLOURS[1])
        line.append(" ".join(f"{x:4.1f}" if x % 1 else f"{x:4.0f}" for x in token), style="default")
        console.print(line)
        if batch.scored[0, position]:
            console.print(Text("     target  " + " ".join(f"{x:4.1f}" for x in target), style="bold"))
    console.print()


def _distribution(batch: Batch, console: Console) -> None:
    """Quantiles over the scored positions of every factor, and of the age (distance to the answer's source)."""
    scored = batch.scored
    factors = dict(batch.factors)
    if "source" in factors:
        factors["age"] = batch.age
    factors["scored per sequence"] = scored.sum(axis=1)
    table = Table("factor", "min", "10 %", "median", "90 %", "max", "mean")
    for name, values in factors.items():
        chosen = values[scored & (values != IGNORE)] if values.ndim == 2 else values
        numbers = [*np.quantile(chosen, [0, 0.1, 0.5, 0.9, 1]), chosen.mean()]
        table.add_row(name, *(f"{number:.4g}" for number in numbers))
    console.print(table)
