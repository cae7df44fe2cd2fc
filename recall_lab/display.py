"""What a command shows while it runs: on a terminal the running runs and the totals, renewed every second; elsewhere a
line of totals every minute."""

import sys
import threading

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from recall_lab import overview
from recall_lab.messages import print_line
from recall_lab.overview import Entry
from recall_lab.sweep import Sweep

MINUTE = 60.0
"""Seconds between two lines where there is no terminal."""


class Display:
    """The display of one command, from `start` to `stop`."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.ended: dict[str, Entry] = {}
        self.stopped = threading.Event()
        console = Console(stderr=True)
        self.live = Live(
            get_renderable=self.render,
            console=console,
            refresh_per_second=1,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        self.terminal = console.is_terminal
        self.thread = threading.Thread(target=self._lines, daemon=True)

    def start(self) -> None:
        """Starts to show the state of the command's runs."""
        if self.terminal:
            self.live.start()
        else:
            self.thread.start()

    def stop(self) -> None:
        """Removes the display."""
        self.stopped.set()
        if self.terminal:
            self.live.stop()
        else:
            self.thread.join()

    def render(self) -> Group:
        """The running runs, one line each, and the totals of a sweep."""
        found = overview.of_command(self.sweep, self.ended)
        rows = Table.grid(padding=(0, 2))
        for each in found:
            if each.state == "running":
                bar = ProgressBar(total=each.total or 1, completed=each.done, width=20)
                _, title, _, progress, accuracy, left = overview.line(each)
                rows.add_row(title, bar, progress or "starting", accuracy, left)
        return Group(overview.totals(found), rows) if len(found) > 1 else Group(rows)

    def _lines(self) -> None:
        while not self.stopped.wait(MINUTE):
            found = overview.of_command(self.sweep, self.ended)
            if found:
                print_line(f"progress  {overview.totals(found)}")
