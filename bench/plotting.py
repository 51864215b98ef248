"""matplotlib, which only plots need: the optional dependency `s2moe[bench]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class PlottingError(Exception):
    """No plot can be drawn here; the message says what is missing and how to get it."""


def load_pyplot() -> Any:
    """matplotlib.pyplot, drawing to files and the same bytes each time. Raises PlottingError."""
    try:
        import matplotlib
    except ImportError as error:
        raise PlottingError(
            f"plots need matplotlib ({error}): `.venv/bin/pip install -e '.[bench]'`, or leave out --plots"
        ) from error
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "s2moe", "font.size": 9, "legend.fontsize": 8})
    matplotlib.rcParams.update({"axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3})
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, path: Path) -> Path:
    """Writes it in the format of the path's ending and closes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, bbox_inches="tight", metadata=metadata)
    load_pyplot().close(figure)
    return path
