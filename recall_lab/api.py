"""recall_lab from Python: runs, results, trained models and figures.

A folder of the user's own, `config_dir`, is known during the call that it is given to.
"""

from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure

from recall_lab import checkpoint, files, folders, machine, page, results, runner, table_files
from recall_lab.building import build, check
from recall_lab.checks import require
from recall_lab.cli.base import compose, parse, refuse, resolved, sweep_folder
from recall_lab.messages import ERRORS, one_line
from recall_lab.mixer.layer import AnyTrace
from recall_lab.model import Model
from recall_lab.probe.base import trace_model
from recall_lab.task.base import Batch, Task
from recall_lab.workload import TrainAndTest


def train_and_test(*overrides: str, config_dir: str | None = None) -> pd.DataFrame:
    """Does one run and returns its rows as a table, as `recall-lab run OVERRIDES` would. The run is in outputs/NAME; if
    it exists there, it is resumed or reused. `train_and_test("mixer=delta_rule", "task.pairs=16")`.

    Raises ValueError for settings that are impossible or have no effect, RuntimeError where the run failed.
    """
    with files.using(config_dir):
        try:
            config = compose(overrides, with_hydra=True)
            refuse(config, parse(overrides))
            parent = sweep_folder(config)
            settings = resolved(config, dict(config.hydra.runtime.choices))
            if folders.status(parent / folders.identity(settings))["state"] != "finished":
                check(settings)
        except ERRORS as error:
            raise ValueError(one_line(error)) from error
        folders.claim(parent, [str(name) for name in config.select])
        runner.execute(settings, parent)
    path = parent / folders.identity(settings)
    run = folders.Run(path, folders.status(path))
    if not run.has_rows:
        reason = run.status.get("error", "another process is working on it")
        raise RuntimeError(f"{path} is {run.status['state']}: {reason}")
    table = pd.DataFrame(results.run_rows(run))
    return table.assign(series=results.series(table))


def load(*sweeps: str | Path) -> pd.DataFrame:
    """The table of all runs in the folders of one or several sweeps that have results (see `recall_lab.results`). A run
    that is in several counts once, the newer one. A single folder may also hold a report without runs, as that of
    claims or of several sweeps: then its table.parquet is read, with the settings beside it.

    Raises folders.ForeignFolder, a ValueError, where there are none.
    """
    paths = [*map(Path, sweeps)]
    without_runs = [path for path in paths if not (path / folders.MARK).exists() or not folders.runs(path)]
    if len(paths) == 1 and without_runs and (paths[0] / "table.parquet").exists():
        return table_files.read(paths[0])
    return results.collect(*paths)


class OpenRun:
    """A finished run, with its task and its trained model. Raises what `open_run` raises.

    config  the settings it used     task   the task it was trained on
    model   in evaluation mode       table  its rows
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = folders.read_config(self.path)
        workload = build(self.config)
        if not isinstance(workload, TrainAndTest):
            raise ValueError(f"{path}: must be a run that has trained a model")
        self.task: Task = workload.task
        device = machine.prepare(self.config["device"], self.config["threads"], self.config.get("deterministic", True))
        self.model: Model = workload.untrained().to(device)
        self.model.load_state_dict(checkpoint.load(self.path / "checkpoint.pt", device)["model"])
        self.model.eval()

    @property
    def table(self) -> pd.DataFrame:
        """The run's rows, with its settings as columns."""
        return pd.DataFrame(results.run_rows(folders.Run(self.path, folders.status(self.path))))

    def trace(self, batch: Batch) -> list[AnyTrace]:
        """The inputs and outputs of each layer's mixer on the batch."""
        return trace_model(self.model, batch)

    def logits(self, batch: Batch) -> torch.Tensor:
        """The model's logits, b t classes."""
        device = next(self.model.parameters()).device
        with torch.no_grad():
            return self.model(torch.from_numpy(batch.tokens).to(device))


def open_run(path: str | Path, config_dir: str | None = None) -> OpenRun:
    """Opens a run's folder. Raises ValueError where the run has trained no model, OSError where files are missing.

    config_dir  the folder with your own task or mixer, where the run has used one
    """
    with files.using(config_dir):
        return OpenRun(path)


def plot(name: str, table: pd.DataFrame, config_dir: str | None = None) -> dict[str, Figure]:
    """The figures that recall_lab/figure/NAME.py, or CONFIG_DIR/figure/NAME.py, draws from the table, by name; empty if
    the table lacks their metrics.

    Raises ValueError where there is no such figure, or where it cannot be imported.
    """
    failed: list[str] = []
    with files.using(config_dir):
        modules = dict(page.drawing_modules(failed))
        broken = "".join(f"; {line}" for line in failed)
        require(name in modules, f"there is no figure {name!r}; there are {', '.join(modules)}{broken}")
        return dict(modules[name].draw(table))


def save_figures(table: pd.DataFrame, folder: str | Path) -> list[Path]:
    """Draws every figure that the table allows into the folder, as png, svg and pdf; returns the paths of the png.

    Training curves are not in a table, so their figures are left out. Raises ValueError where a figure cannot be drawn.
    """
    failed: list[str] = []
    made = list(page.pictures(Path(folder), results.select(table), table, failed))
    require(not failed, "; ".join(failed))
    return [Path(folder, f"{picture.file}.png") for picture in made]
