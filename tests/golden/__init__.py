"""Values worked out by hand or from the papers' formulas; see `formulas.py`."""

import json
from pathlib import Path
from typing import Any


def cases(table: str) -> list[dict[str, Any]]:
    """The rows of a table."""
    path = Path(__file__).parent / f"{table}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def name(case: dict[str, Any]) -> str:
    """A short name for a test's id."""
    kept = {key: value for key, value in case.items() if key not in ("expected", "log_w", "answers", "weights")}
    return json.dumps(kept, separators=(",", ":"))[:90]
