"""What there is, read from the code and the configuration themselves: `recall-lab list` and `recall-lab show`."""

import ast
import importlib.util
from pathlib import Path

import hydra
import numpy as np
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recall_lab.messages import CONF
from recall_lab.run import compose
from recall_lab.task.base import IGNORE, Batch, Task

GROUPS = {"task": "tasks", "mixer": "mixers", "probe": "probes", "oracle": "oracles", "experiment": "experiments"}

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_black")


def listing(group: str | None = None) -> str:
    """The options of every group, each with the first line of its docstring; of one group, with the whole of it."""
    chosen = {name: word for name, word in GROUPS.items() if group in (None, name, word)}
    if not chosen:
        raise ValueError(f"there is nothing called {group!r} to list; there are {', '.join(GROUPS.values())}")
    lines = []
    for name, word in chosen.items():
        lines.append(f"{word} ({name}=…)")
        for path in sorted((CONF / name).rglob("*.yaml"), key=lambda path: path.with_suffix("")):
            option = path.relative_to(CONF / name).with_suffix("").as_posix()
            first, *rest = describe(path).splitlines() or [""]
            lines.append(f"  {option:<24} {first}")
            if group is not None:
                rest += facts(option) if name == "mixer" else []
                lines += [f"  {'':<24} {line}".rstrip() for line in rest] + [""]
        lines.append("")
    return "\n".join(lines).rstrip()


def facts(mixer: str) -> list[str]:
    """A mechanism's family (what it is built on) and the size of its state, counted by stepping."""
    config = compose([f"mixer={mixer}"])
    make = hydra.utils.instantiate(config.mixer, _convert_="all")
    if isinstance(make, list):
        return []
    made = make(d_model=config.model.d_model)
    kind = type(made)
    family = next(base.__module__.rpartition(".")[2] for base in kind.__mro__[1:] if base.__module__ != kind.__module__)
    family = {"matrix_memory": "matrix memory", "cache": "softmax over a cache"}.get(family, "of its own")
    elements, _ = made.state_size(512)
    return [f"Family: {family}. Carries {elements:,} numbers a layer at n=512 and d_model={config.model.d_model}."]


def describe(path: Path) -> str:
    """The docstring of what a yaml's `_target_` names, read without importing it; else the yaml's leading comment."""
    target = OmegaConf.load(path).get("_target_")
    if target is None:
        comments = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("# ")]
        return "\n".join(line for line in comments if not line.startswith("@package"))
    module, _, name = target.rpartition(".")
    source = importlib.util.find_spec(module)
    tree = ast.parse(Path(source.origin).read_text())
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name)
    return ast.get_docstring(node) or ""


def show(overrides: list[str], sequences: int = 1, seed: int = 0, config_dir: str | None = None) -> None:
    """Prints one sequence with its targets, or what many sequences have in common. Nothing is trained."""
    if sequences < 1:
        raise ValueError(f"--n {sequences}: at least 1")
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
    console.print(f"scored places a sequence: {batch.scored.sum() / sequences:g}; {level}: {task.chance:.4g}")


def _example(task: Task, batch: Batch, console: Console) -> None:
    """Tokens coloured by role, each with the target beneath it, wrapped to the width of the terminal."""
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
    """A place a line: its role, the vector that stands there, and the one that is asked."""
    for place, (token, target, role) in enumerate(
        zip(batch.tokens[0], batch.targets[0], task.roles(batch.tokens)[0], strict=True)
    ):
        line = Text(f"{place:4} {role:<8}", style=COLOURS[0] if batch.scored[0, place] else COLOURS[1])
        line.append(" ".join(f"{x:4.1f}" if x % 1 else f"{x:4.0f}" for x in token), style="default")
        console.print(line)
        if batch.scored[0, place]:
            console.print(Text("     target  " + " ".join(f"{x:4.1f}" for x in target), style="bold"))
    console.print()


def _distribution(batch: Batch, console: Console) -> None:
    """Quantiles over the scored places of every factor, and of the age (places between an answer and its source)."""
    scored = batch.scored
    factors = dict(batch.factors)
    if "source" in factors:
        factors["age"] = batch.age
    factors["scored a sequence"] = scored.sum(axis=1)
    table = Table("factor", "min", "10 %", "median", "90 %", "max", "mean")
    for name, values in factors.items():
        chosen = values[scored & (values != IGNORE)] if values.ndim == 2 else values
        numbers = [*np.quantile(chosen, [0, 0.1, 0.5, 0.9, 1]), chosen.mean()]
        table.add_row(name, *(f"{number:.4g}" for number in numbers))
    console.print(table)
