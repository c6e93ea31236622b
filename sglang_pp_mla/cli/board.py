"""A row a stage, filled in as it boots: what `demo` and `preflight` show while an engine starts."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.live import Live
from rich.table import Table

from sglang_pp_mla.rehearsal import Progress
from sglang_pp_mla.stage import Stage


class Board:
    """A row a stage, filled in as it boots; plain lines where the output is no terminal."""

    def __init__(self, console: Console, stages: tuple[Stage, ...]) -> None:
        self._console = console
        self._stages = stages
        self._steps = {stage.rank: "starting" for stage in stages}
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._live = (
            Live(get_renderable=self._table, console=console, refresh_per_second=4) if console.is_terminal else None
        )

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, progress: Progress) -> None:
        """Take in what happened; called from the server's own threads."""
        if progress.kind != "stage" or progress.rank is None:
            return
        with self._lock:
            self._steps[progress.rank] = progress.text
        if self._live is None:
            self._console.print(f"{progress.seconds:6.1f} s  PP{progress.rank}  {progress.text}", style="dim")

    def _table(self) -> Table:
        table = Table(box=None, show_header=False)
        with self._lock:
            for stage in self._stages:
                table.add_row(str(stage), self._steps.get(stage.rank, ""))
        table.add_row("", f"[dim]{time.monotonic() - self._began:.0f} s[/dim]")
        return table
