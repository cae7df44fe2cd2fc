"""`recall-lab show`: an example of a task, with its targets, roles and chance level; and what a mixer is: its equation,
shapes, options, parameters and state, and its weights on a random input."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import hydra
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recall_lab.checks import require, whole_number
from recall_lab.cli.base import compose, parse, part_of
from recall_lab.cli.check import makers
from recall_lab.task.base import IGNORE, Batch, Task

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_black")

LENGTH = 24
"""Positions of the random input that a mixer is shown on."""

LENGTHS = (16, 64, 256, 1024)
"""Lengths at which the size of a mixer's state is given."""

SHADES = "░▒▓█"
"""A weight up to a quarter of the largest of its row, up to a half, up to three quarters, and above."""

NOTHING = 0.01
"""Share of the largest weight of a row below which a weight is drawn as a dot."""


def show(overrides: list[str], sequences: int | None = None, seed: int = 0, config_dir: str | None = None) -> None:
    """Prints one sequence of a task with its targets, or statistics of several; and for a mixer its equation, shapes,
    options, parameters and state, and its weights on a random input. Nothing is trained.

    sequences  of the task; None: 1
    Raises ValueError for an override that concerns neither.
    """
    whole_number("--n", 1 if sequences is None else sequences)
    words = parse(overrides)
    mixer = any(part_of(word.key_or_group) == "mixer" for word in words)
    allowed = ("task", "experiment", "size", "mixer", *(["model"] if mixer else []))
    for word in words:
        key = word.key_or_group
        require(
            part_of(key) in allowed and (part_of(key) != "model" or key == "model.d_model"),
            f"{key} has no effect: show prints an example of a task (task=…, task.length=…), and what a mixer is "
            "(mixer=…, mixer.heads=…, model.d_model=…)",
        )
        require(not word.is_delete(), f"{word.input_line}: a setting cannot be removed; give it a value")
        require(not word.is_sweep_override(), f"{word.input_line}: show prints one at a time; give one value")
    task = not mixer or any(part_of(word.key_or_group) not in ("mixer", "model") for word in words)
    require(
        task or sequences is None, "--n has no effect: it is the number of sequences of a task; give task=… as well"
    )
    config = compose(overrides, config_dir)
    console = Console(highlight=False, markup=False)
    if task:
        _task(config.task, sequences or 1, seed, console)
    if mixer:
        for make in makers(config.mixer):
            _mixer(make, config.model.d_model, seed, console)


def _task(config: Any, sequences: int, seed: int, console: Console) -> None:
    task = hydra.utils.instantiate(config)
    batch = task.sample(sequences, np.random.default_rng(seed))
    settings = ", ".join(f"{key}={value}" for key, value in config.items() if not key.startswith("_"))
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


def _mixer(make: Callable[..., Any], d_model: int, seed: int, console: Console) -> None:
    """The mixer that `make` returns: its docstring, its tensors on a random input, options, parameters and state, and
    the weights of its first head."""
    from recall_lab.contract.mixer import built, draw

    mixer = built(make, d_model=d_model).requires_grad_(False)
    x = draw(mixer, LENGTH, batch=1, seed=seed)
    trace, y = mixer.trace(x, x.new_full((1, LENGTH), IGNORE).long(), 0)
    name = type(mixer).__name__
    text = inspect.getdoc(type(mixer)) or ""
    console.print(f"{name}, with d_model={d_model}\n", style="bold")
    # A dataclass without a docstring is given its signature for one.
    text = "It has no docstring." if not text or text.startswith(f"{name}(") else text
    console.print(f"{text}\n", soft_wrap=True)
    table = Table("tensor", "shape", "neutral value")
    for row in _tensors(mixer, trace, x, y):
        table.add_row(*row)
    console.print(table)
    options = {field.name: getattr(mixer, field.name) for field in fields(mixer) if field.name != "d_model"}
    console.print("options: " + ", ".join(f"{key}={_value(value)}" for key, value in options.items()))
    weights = {key: "×".join(map(str, weight.shape)) for key, weight in mixer.named_parameters()}
    count = sum(weight.numel() for weight in mixer.parameters())
    console.print(f"{count:,} parameters: " + ", ".join(f"{key} {shape}" for key, shape in weights.items()))
    sizes = {length: mixer.state_size(length) for length in LENGTHS}
    known = ", ".join(f"{size[0]:,} at n={length}" for length, size in sizes.items() if size)
    console.print(f"elements of the state: {known or 'not known'}\n")
    _weights(mixer, trace, console)


def _value(option: Any) -> str:
    """An option's value; of a class or function, possibly with some arguments given, its name."""
    made = getattr(option, "func", option)
    return getattr(made, "__name__", str(option)) if callable(option) else str(option)


def _tensors(mixer: Any, trace: Any, x: Any, y: Any) -> Iterator[tuple[str, str, str]]:
    """Name, shape (b, t: any number of sequences and positions) and neutral value of what a mixer computes with."""
    from recall_lab.mixer.base import Mixer

    if isinstance(mixer, Mixer):
        for name in ("q", "k", "v"):
            yield name, _shape(getattr(trace, name), 2), ""
        for name, gate in trace.gates.items():
            neutral = mixer.neutral_gates.get(name)
            # Further keys and values of a token are passed as gates, but are none.
            none = "" if name in ("more_k", "more_v") else "not declared"
            yield (name if not none else f"gate {name}"), _shape(gate, 2), none if neutral is None else f"{neutral:g}"
    else:
        yield "input", _shape(x, 1), ""
        yield "output", _shape(y, 1), ""
    for name, part in mixer(x)[1].items():
        yield f"state {name} after {LENGTH} tokens", _shape(part), ""


def _shape(tensor: Any, time: int | None = None) -> str:
    """The shape, with b for the first axis and t for the axis of time."""
    return " × ".join("b" if i == 0 else "t" if i == time else str(size) for i, size in enumerate(tensor.shape))


def _weights(mixer: Any, trace: Any, console: Console) -> None:
    """One line per position t: its weights on the positions s ≤ t, as shades, and the largest of their sizes."""
    from recall_lab.mixer.base import Mixer
    from recall_lab.probe.effective_attention import influence
    from recall_lab.probe.jacobian import influence_of_inputs

    signs = ""
    if not isinstance(mixer, Mixer):
        weights, symbol = influence_of_inputs(trace), "‖∂y_t/∂x_s‖_F/√d_model"
        console.print(f"no queries, keys and values: influence of inputs on outputs is {symbol}")
    elif mixer.linear_in_v:
        weights, symbol = mixer.effective_attention(trace.q, trace.k, trace.gates), "|A_ts|"
        console.print("effective attention A, with o = A v")
        signs = " A minus marks a negative weight."
    else:
        weights, symbol = influence(trace), "‖∂o_t/∂v_s‖_F/√d_value"
        console.print(f"not linear in v: influence is {symbol}")
    console.print(
        f"of head 1 of {weights.shape[1]}, for a random input and weights before training. Rows t, columns s ≤ t. "
        f"Shades: {symbol} as a share of the largest of its row, which is on the right: "
        f"· under {100 * NOTHING:g} %, ░ under 25 %, ▒ under 50 %, ▓ under 75 %, █ the rest.{signs}"
    )
    for t, row in enumerate(weights[0, 0].tolist()):
        console.print(_row(t, row))
    console.print()


def _row(t: int, row: list[float]) -> Text:
    """A line of the picture: t, two characters for each of the positions up to t, and the largest size."""
    seen = row[: t + 1]
    largest = max(map(abs, seen))
    line = Text(f"{t:3} ")
    for weight in seen:
        share = abs(weight) / largest if largest else 0.0
        shade = SHADES[min(int(share * len(SHADES)), len(SHADES) - 1)]
        if share < NOTHING:
            line.append("· ", style="bright_black")
        elif weight < 0:
            line.append(f"{shade}-", style="red")
        else:
            line.append(shade * 2)
    line.append(" " * (2 * (len(row) - len(seen)) + 1) + f"{largest:.2g}", style="bright_black")
    return line
