"""``--save report.svg|report.html``: what a verb has printed, as a picture or a page."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

FORMATS = (".svg", ".html")


def check_path(path: Path | None) -> None:
    """Refuse, before any work is done, a file that cannot be written. Raises ``ValueError``, in one sentence."""
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise ValueError(f"--save {path} has no known format; end its name in {' or '.join(FORMATS)}.")
    if not path.parent.is_dir():
        raise ValueError(f"--save {path} names no folder that exists; make {path.parent} first.")


def save(console: Console, path: Path, title: str) -> None:
    """Write what a ``Console(record=True)`` has printed. Raises ``ValueError`` where the file cannot be written."""
    text = console.export_svg(title=title) if path.suffix == ".svg" else console.export_html()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--save {path} cannot be written ({error.strerror}); name another file.") from error
