"""What every benchmark prints: a table for people and, as the last line, one JSON object for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence


def report(name: str, metrics: Mapping[str, float], rows: Sequence[Sequence[object]]) -> None:
    """Prints `rows` (the first is the heading) as a table, then `{"benchmark": name, "metrics": {...}}`.

    Raises ValueError for a metric that is no finite number: a missing measurement must not look like a result.
    """
    unmeasured = [key for key, value in metrics.items() if not math.isfinite(value)]
    if unmeasured:
        raise ValueError(f"{name} measured no finite {', '.join(unmeasured)}; mend the benchmark, do not report it.")
    print(table(rows))
    print(json.dumps({"benchmark": name, "metrics": dict(metrics)}), flush=True)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell, numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(_pad(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cell(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def _pad(cell: str, width: int) -> str:
    return cell.rjust(width) if cell[:1].isdigit() or cell[:1] in "-+." else cell.ljust(width)
