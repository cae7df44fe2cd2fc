"""The sweeper hydra/sweeper=optuna, found by Hydra in this folder, where it looks for plugins.

Whatever Hydra app is started in this environment imports this file; what a search needs is imported by its methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import IntervalSweep, Override

if TYPE_CHECKING:
    from recall_lab.cli.plan import Job
    from recall_lab.search import Interval, Search
    from recall_lab.sweep import Sweep


class Optuna(BasicSweeper):
    """Searches intervals of settings for the lowest validation loss (see `recall_lab.search`).

    Lists of values are not searched: each of their combinations has a search of its own, and the loss of a trial is the
    mean over the values of seed and data_seed. All searches go on together, in batches of trials.
    """

    def __init__(self, trials: int, batch: int, seed: int, params: dict[str, str] | None = None) -> None:
        super().__init__(None, params)
        self.trials, self.batch, self.seed = trials, batch, seed
        self.launched = 0
        self.earlier: list[Job] = []

    def sweep(self, arguments: list[str]) -> None:
        """Does the runs of all trials that are not finished.

        Exits with `--dry-run`, and where a run of the first batch is impossible. Raises ValueError for settings that
        cannot be searched.
        """
        from recall_lab import folders, search
        from recall_lab.checks import whole_number
        from recall_lab.cli import plan
        from recall_lab.cli.base import parse, sweep_folder
        from recall_lab.cli.run import Preflight

        assert self.hydra_context is not None
        assert self.config is not None
        search.check()
        for name, least in (("trials", 1), ("batch", 1), ("seed", 0)):
            whole_number(f"hydra.sweeper.{name}", getattr(self, name), least)
        searches, seeds = self._searches(parse([*self._parse_config(), *arguments]))
        select = dict.fromkeys([*map(str, self.config.select), *searches[0].intervals])
        for first in range(0, self.trials, self.batch):
            count = min(self.batch, self.trials - first)
            every = [
                [*own.words, *(f"{name}={value}" for name, value in values.items()), *seed]
                for own in searches
                for values in own.ask(count)
                for seed in seeds
            ]
            found = self._jobs(every)
            if Preflight.sweep is not None:
                code = plan.refuse_impossible(found, first > 0 or bool(self.config.skip_invalid))
                if code:
                    raise SystemExit(code)
                folders.claim(sweep_folder(self.config), list(select))
                self._launch(found, Preflight.sweep)
            elif all(each.state in ("finished", "failed") for each in found):
                self.earlier += [each for each in found if each.state == "failed"]
            else:
                raise SystemExit(self._show([*self.earlier, *found], first, count, len(searches)))
            self._tell(searches, found, len(seeds))
        if Preflight.sweep is None:
            code = plan.show(self.earlier, self.config) if self.earlier else 0
            for own in searches:
                self._print(own, searches)
            raise SystemExit(code)

    def _searches(self, overrides: list[Override]) -> tuple[list["Search"], list[list[str]]]:
        """A search for each combination of the listed values, and the words of each combination of seeds."""
        from recall_lab.checks import require
        from recall_lab.folders import CIRCUMSTANCES, REPLICATES
        from recall_lab.search import Search

        intervals: dict[str, Interval] = {}
        others: list[Override] = []
        seeds: list[Override] = []
        for override in overrides:
            name = override.get_key_element()
            value = override.value()
            if isinstance(value, IntervalSweep):
                require(name not in REPLICATES, f"{override.input_line}: a seed is not searched; give a list of seeds")
                require(name not in CIRCUMSTANCES, f"{override.input_line}: no result depends on {name}")
                intervals[name] = _interval(name, value)
            else:
                intervals.pop(name, None)  # the last one given counts, as in any sweep
                (seeds if name in REPLICATES else others).append(override)
        require(bool(intervals), "hydra/sweeper=optuna searches intervals, and none is given: "
                "'train.lr=tag(log, interval(1e-4, 1e-1))'")  # fmt: skip
        others = [override for override in others if override.get_key_element() not in intervals]
        (combinations,), (replicates,) = (self.split_arguments(part, None) for part in (others, seeds))
        return [Search(words, intervals, self.seed, self.batch) for words in combinations], replicates

    def _jobs(self, every: Sequence[Sequence[str]]) -> list["Job"]:
        """The jobs of a batch. Raises ValueError where their settings are not known, or nothing is trained."""
        from recall_lab.checks import require
        from recall_lab.cli import plan

        assert self.hydra_context is not None
        assert self.config is not None
        found = plan.jobs(self.hydra_context.config_loader, self.config, every)
        for each in found:
            require(each.settings is not None, "hydra/sweeper=optuna: settings cannot depend on ${hydra:job.num}")
            require("train" in (each.settings or {}), "hydra/sweeper=optuna: a run that trains nothing has no loss")
        return found

    def _launch(self, found: list["Job"], sweep: "Sweep") -> None:
        """Does the runs of a batch, and waits for those that another process works on."""
        from recall_lab.cli import plan
        from recall_lab.messages import print_line

        assert self.launcher is not None
        while True:
            words = [list(each) for each in plan.start([*self.earlier, *found], sweep)]
            if words:
                self.launcher.launch(words, initial_job_idx=self.launched)
                self.launched += len(words)
            if sweep.asked_to_stop():
                raise KeyboardInterrupt
            elsewhere = sweep.elsewhere()
            if not elsewhere:
                break
            print_line(f"waiting   for other processes to end their runs: {len(elsewhere)}")
            sweep.wait(elsewhere)
            found = self._jobs([each.words for each in found])
        self.earlier += found

    def _tell(self, searches: list["Search"], found: list["Job"], seeds: int) -> None:
        """Tells each search the losses of its trials, and keeps and prints the best so far unless this is --dry-run."""
        from recall_lab.cli.base import sweep_folder
        from recall_lab.cli.run import Preflight
        from recall_lab.search import mean_loss

        assert self.config is not None
        folder = sweep_folder(self.config)
        each = len(found) // len(searches)
        for number, own in enumerate(searches):
            settings = [job.settings or {} for job in found[number * each : (number + 1) * each]]
            own.tell([mean_loss(folder, settings[first : first + seeds]) for first in range(0, each, seeds)])
            if Preflight.sweep is not None:
                own.write(folder, settings[:seeds])
                self._print(own, searches)

    def _print(self, own: "Search", searches: list["Search"]) -> None:
        """Prints the best trial of a search so far, with the words in which it differs from the others."""
        from recall_lab.messages import print_line

        common = set.intersection(*(set(each.words) for each in searches))
        named = "".join(f"{word} " for word in own.words if word not in common)
        print_line(f"search    {named}{own.describe()} after {len(own.losses)} of {self.trials} trials")

    def _show(self, found: list["Job"], first: int, count: int, searches: int) -> int:
        """Prints the failed jobs of the first trials and those of the next batch, for --dry-run. Returns the exit
        status."""
        from recall_lab.cli import plan
        from recall_lab.messages import print_line

        assert self.config is not None
        code = plan.show(found, self.config)
        print_line(
            f"{searches} × {self.trials} trials: of each search {first} are done, {count} are next; the values of the "
            f"other {self.trials - first - count} depend on the losses of these"
        )
        return code


def _interval(name: str, value: IntervalSweep) -> "Interval":
    from recall_lab.checks import require
    from recall_lab.search import Interval

    require(set(value.tags) <= {"log"}, f"{name}: an interval may have the tag log only, not {', '.join(value.tags)}")
    low, high = value.start, value.end
    assert low is not None
    assert high is not None
    try:
        return Interval(low, high, "log" in value.tags, isinstance(low, int) and isinstance(high, int))
    except ValueError as error:
        raise ValueError(f"{name}={error}") from error


@dataclass
class OptunaConf:
    """The options of the sweeper. A search with other values of batch or seed has other trials."""

    _target_: str = f"{__name__}.{Optuna.__name__}"
    trials: int = 20
    """The number of trials of each search; a later command with more of them continues the search."""
    batch: int = 4
    """How many trials of each search are chosen at a time, from the losses of those before."""
    seed: int = 0
    """Seed of the choice of trials."""
    params: dict[str, str] = field(default_factory=dict)
    """Settings of the sweep that an experiment gives."""


ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=OptunaConf, provider="recall_lab")
