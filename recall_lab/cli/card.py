"""`recall-lab card`: the memory card of mechanisms, compared with the built-in ones."""

import hashlib
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pandas as pd
from omegaconf import OmegaConf

from recall_lab import card as cards
from recall_lab import fairness, folders, page, table_files
from recall_lab.card import Card, Part
from recall_lab.checks import require
from recall_lab.cli.base import GENERAL, STUDIED, compose, parse, read_rates
from recall_lab.cli.check import combinations, examined
from recall_lab.cli.experiments import Job, Measured, effective, measured, options, run_one
from recall_lab.cli.rates import GRID, best, validation_scores
from recall_lab.contract.base import Finding
from recall_lab.figure.emphasis import emphasis, emphasised
from recall_lab.files import replacing, use
from recall_lab.messages import counted, print_error, print_line
from recall_lab.page import attempt


@dataclass(frozen=True)
class Request:
    """The content of a command line."""

    mixers: list[str]
    options: list[str]
    """Settings of the mixers (mixer.heads=2)."""
    settings: list[str]
    """All other settings of the runs."""
    root: str
    config_dir: str | None

    @property
    def suffix(self) -> str:
        """What the options add to the name of a mixer, as a variant: /decay=0.9."""
        words = [word.partition("=") for word in self.options]
        return "/" + ",".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in words) if words else ""

    @property
    def about(self) -> list[str]:
        """The names of the mixers in figures and tables."""
        return [name + self.suffix for name in self.mixers]

    @property
    def folder(self) -> Path:
        """ROOT/card/NAME, with a hash in the name for settings that change results."""
        name = "+".join(self.mixers) + self.suffix
        changing = [word for word in self.settings if word.partition("=")[0] not in GENERAL]
        digest = "-" + hashlib.sha256("\n".join(sorted(changing)).encode()).hexdigest()[:4] if changing else ""
        return Path(self.root, "card", re.sub(r"[^\w.+-]+", "-", name).strip("-") + digest)


def request(words: Sequence[str], config_dir: str | None) -> Request:
    """Reads the words of the command line.

    Raises ValueError without mixer=…, and for several values of one of its options.
    """
    mixers: list[str] = []
    kinds: dict[str, list[str]] = {"options": [], "settings": []}
    root = "outputs"
    for override in parse(words):
        key, word = override.key_or_group, str(override.input_line)
        if key == "mixer":
            mixers = [chosen.partition("=")[2] for (chosen,) in combinations([override])]
        elif key == "root":
            root = str(override.value())
        else:
            require(key != "name", "name has no effect: a card's folder is named by its mixers")
            is_option = key.startswith("mixer.")
            require(
                not (is_option and override.is_sweep_override()),
                f"{word}: must be one value; make a card for each, or a yaml for each variant",
            )
            kinds["options" if is_option else "settings"].append(word)
    require(bool(mixers), "a card needs a mechanism: mixer=NAME, or mixer=ONE,OTHER")
    return Request(mixers, kinds["options"], kinds["settings"], root, config_dir)


def card(words: Sequence[str], config_dir: str | None = None) -> int:
    """Makes the memory card of the mixers named in `words`, and returns the exit status.

    words  mixer=NAME (or several), options of it (mixer.heads=2), and settings of the runs (device=cuda, size=large)

    Checks the contract of each mixer, runs the experiments of card.yaml in ROOT/card/NAME/EXPERIMENT, each once,
    and writes report.html, report.md, the table (the rows of all experiments), card.csv (the numbers) and figures
    in ROOT/card/NAME. Results of built-in mechanisms, from the package's table, are shown for comparison where their
    settings are the same. A mixer without a studied learning rate on a task is trained with the first seed at each rate
    of `rates.GRID`, in the first experiment with this task. The rate that is best on validation is used there with all
    seeds, and in the other experiments with this task.

    The exit status is 1 if a check, a run or a part of the card failed. Raises ValueError for settings that have no
    effect in any experiment.
    """
    if config_dir is not None:
        use(config_dir)
    asked = request(words, config_dir)
    spec = cards.read()
    settings = effective(spec.experiments, [*asked.options, *asked.settings], config_dir, [f"mixer={asked.mixers[0]}"])
    for mixer in asked.mixers:
        compose([f"mixer={mixer}", *asked.options], config_dir)  # raises for a name or an option that does not exist
    failed: list[str] = []
    contract = {title: found for mixer in asked.mixers
                for title, found in attempt(failed, f"check of {mixer}", _examined, mixer, asked)}  # fmt: skip
    failed += [f"check of {title}: {one.check}: {one.detail}" for title, found in contract.items()
               for one in found if one.failed]  # fmt: skip
    rates: dict[tuple[str, str], float] = {}
    for number, experiment in enumerate(spec.experiments, 1):
        print_line(f"experiment {number} of {len(spec.experiments)}: {experiment}")
        own = {override.key_or_group: str(override.input_line) for override in parse(spec.settings.get(experiment, []))}
        given = {override.key_or_group: str(override.input_line) for override in parse(settings[experiment])}
        failed += _run(experiment, {**own, **given}, asked, spec, rates)
    found: dict[str, Measured] = {}
    for name in spec.experiments:
        found |= attempt(failed, f"experiment {name}", _measured, name, asked, failed)
    require(bool(found), f"{asked.folder}: no experiment has results")
    command = shlex.join(["recall-lab", "card", *options(config_dir), *words])
    with emphasis(asked.about):
        return _write(spec, asked, contract, found, failed, command)


def _examined(mixer: str, asked: Request) -> Iterator[tuple[str, list[Finding]]]:
    """Yields a description of what is checked, and the findings."""
    for title, findings in examined([f"mixer={mixer}", *asked.options], asked.config_dir):
        yield title, list(findings)


def collect(paths: Sequence[str], words: Sequence[str] = ()) -> int:
    """Writes the package's table of built-in mechanisms from finished results (see `card.collect`); returns 0."""
    require(not words, f"{' '.join(words)}: has no effect with --collect")
    spec = cards.read()
    table = cards.collect(paths, [name for name in spec.experiments if name not in spec.here])
    table_files.write(table, cards.TABLE)
    for experiment, part in table.groupby("experiment"):
        runs, mixers = counted(part["run"].nunique(), "run"), sorted(part["mixer"].unique())
        print_line(f"{experiment}: {runs} of {', '.join(mixers)}")
    print_line(f"{cards.TABLE}: {cards.TABLE.stat().st_size / 2**20:.1f} MiB")
    return 0


def _run(
    experiment: str, settings: dict[str, str], asked: Request, spec: Card, rates: dict[tuple[str, str], float]
) -> list[str]:
    """Runs an experiment for all mixers. Returns one line for each command that failed.

    rates  task and mixer → the learning rate that an experiment before this one has found; what this one finds is added
    """

    def launched(mixers: Sequence[str], words: dict[str, str]) -> list[str]:
        job = Job(experiment, experiment, [f"mixer={','.join(mixers)}", *words.values()])
        return run_one(job, asked.folder, asked.config_dir) if mixers else []

    others = {key: word for key, word in settings.items() if not key.startswith("mixer.")}
    sizes = [word for key, word in others.items() if key == "size"]
    config = compose([f"experiment={experiment}", *sizes], asked.config_dir, with_hydra=True)
    params = config.hydra.sweeper.params or {}
    rate = str(params.get("train.lr") or OmegaConf.select(config, "train.lr"))
    studied = rate == STUDIED and "train.lr" not in others
    tasks = _values(others.get("task", f"task={params.get('task', config.hydra.runtime.choices.task)}"))
    new = [name for name in asked.mixers if studied and not all(_has_rate(task, name) for task in tasks)]
    failed = launched([name for name in asked.mixers if name not in new], settings)
    failed += launched([name for name in spec.here.get(experiment, ()) if name not in asked.mixers], others)
    tried = [name for name in new if any((task, name) not in rates for task in tasks)]
    seed = _values(others.get("seed", f"seed={params.get('seed', config.seed)}"))[0]
    grid = "train.lr=" + ",".join(f"{rate:g}" for rate in GRID)
    failed += launched(tried, {**settings, "seed": f"seed={seed}", "train.lr": grid})
    found = dict(attempt(failed, f"rates of {experiment}", _scores, asked.folder / experiment, seed)) if tried else {}
    for pair in product(tasks, new):
        if pair in found:
            rates.setdefault(pair, best(found[pair]))
        if pair in rates:
            own = {"task": f"task={pair[0]}", "train.lr": f"train.lr={rates[pair]:g}"}
            failed += launched(pair[1:], {**settings, **own})
    return failed


def _values(word: str) -> list[str]:
    """The values that an override KEY=VALUES takes in a sweep."""
    return [one.partition("=")[2] for (one,) in combinations(parse([word]))]


def _has_rate(task: str, mixer: str) -> bool:
    """Whether rates.yaml has a rate of the mixer, or of its mechanism, on the task."""
    return bool({mixer, mixer.partition("/")[0]} & set(read_rates().get(task, {})))


def _scores(folder: Path, seed: str) -> Iterator[tuple[tuple[str, str], dict[float, float]]]:
    """Yields each task and mixer, and the validation scores with the seed by learning rate."""
    yield from validation_scores(folder, int(seed)).items()


def _measured(name: str, asked: Request, failed: list[str]) -> Iterator[tuple[str, Measured]]:
    own = measured(asked.folder / name, failed)
    if own is not None:
        yield name, own


@dataclass(frozen=True)
class Section:
    """One part of the page."""

    part: Part
    numbers: pd.DataFrame
    pictures: list[page.Picture]
    notes: list[str]
    """What limits the numbers and the comparison."""


def _write(
    spec: Card, asked: Request, contract: dict[str, list[Finding]], found: dict[str, Measured], failed: list[str],
    command: str,
) -> int:  # fmt: skip
    package = cards.package()
    tables: dict[str, pd.DataFrame] = {}
    for name, own in found.items():
        tables |= attempt(failed, f"experiment {name}", _combined, name, own, package, spec, asked)
    require(bool(tables), "; ".join(failed))
    sections, every = [], []
    for part in spec.parts:
        table = tables.get(part.experiment)
        if table is None:
            sections.append(Section(part, pd.DataFrame(), [], ["there are no results of this experiment"]))
            continue
        over = found[part.experiment].over
        numbers = next(attempt(failed, f"numbers of {part.title}", _numbers, part, table, over), pd.DataFrame())
        every += [numbers] if len(numbers) else []
        prefix = f"{part.experiment}-"
        pictures = list(page.pictures(asked.folder / "figure", table, table, failed, part.figures, prefix))
        notes = list(attempt(failed, f"notes on {part.title}", _notes, part, spec, table, found[part.experiment]))
        sections.append(Section(part, cards.grid(numbers, spec.beside, _about(numbers), part=False), pictures, notes))
    rows = pd.concat([table.assign(experiment=name) for name, table in tables.items()], ignore_index=True)
    table_files.save(rows, asked.folder)
    numbers = pd.concat(every, ignore_index=True) if every else cards.numbers(spec.parts[0], pd.DataFrame(), ())
    with replacing(asked.folder / "card.csv") as temporary:
        numbers.to_csv(temporary, index=False)
    checks = [(title, sum(one.holds is True for one in own), [one for one in own if one.failed])
              for title, own in contract.items()]  # fmt: skip
    grid = cards.grid(numbers, spec.beside, _about(numbers), intervals=False)
    path = page.write(
        asked.folder,
        "card",
        {
            "title": f"Memory card: {', '.join(asked.about)}",
            "command": command,
            "checks": checks,
            "mixers": asked.about,
            "own": len(_about(numbers)),
            "numbers": grid,
            "revisions": sorted(set(numbers.loc[numbers[cards.ORIGIN] == cards.PACKAGE, "git"])),
            "sections": sections,
            "commands": {name: list(attempt(failed, f"commands of {name}", folders.commands, own.folder))
                         for name, own in found.items()},
            "folder": asked.folder,
            "failed": failed,
        },
    )  # fmt: skip
    print_line(f"\n{grid.to_string()}\n\nreport: {path}")
    for failure in failed:
        print_error(failure)
    return 1 if failed else 0


def _combined(
    name: str, own: Measured, package: pd.DataFrame, spec: Card, asked: Request
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields the experiment's name, and the own rows, each mixer named with the options of the command, together with
    those of the package."""
    others = package[(package["experiment"] == name) & package["mixer"].isin(spec.beside)]
    others = others[:0] if name in spec.here else others.drop(columns="experiment")
    rows = own.chosen
    named = rows["mixer"].where(~rows["mixer"].isin(asked.mixers), rows["mixer"] + asked.suffix)
    yield name, cards.combined(rows.assign(mixer=named), others, own.over)


def _numbers(part: Part, table: pd.DataFrame, over: Sequence[str]) -> Iterator[pd.DataFrame]:
    yield cards.numbers(part, table, over)


def _notes(part: Part, spec: Card, table: pd.DataFrame, own: Measured) -> Iterator[str]:
    if part.experiment not in spec.here and spec.beside and not (table[cards.ORIGIN] == cards.PACKAGE).any():
        yield "the package has no results of built-in mechanisms with these settings"
    yield from fairness.notes(own.chosen, own.every)


def _about(numbers: pd.DataFrame) -> set[str]:
    """The series that the card is about, among those in the numbers."""
    return set(filter(emphasised, numbers["series"])) if len(numbers) else set()
