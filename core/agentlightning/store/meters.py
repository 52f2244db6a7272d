"""What the server counts, as Prometheus reads it (its text format, version 0.0.4)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

BOUNDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0)
"""Seconds; waiting calls are counted, but not timed."""


class Meters:
    """Calls by method and status, and how long they took. The loop's thread only."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, int]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._within: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(BOUNDS) + 1))
        self.received = 0
        """Bytes of bodies."""
        self.left_out = 0
        """Spans of OpenTelemetry that name no attempt, or hold no number where a reward should be."""

    def count(self, method: str, status: int, seconds: float | None) -> None:
        self._calls[method, status] += 1
        if seconds is not None:
            self._seconds[method] += seconds
            self._within[method][sum(seconds > bound for bound in BOUNDS)] += 1

    def text(self, gauges: Mapping[str, float]) -> str:
        """`gauges`: name -> value, each with its own line."""
        lines = ["# TYPE agl_store_calls_total counter"]
        lines += [
            f'agl_store_calls_total{{method="{method}",status="{status}"}} {count}'
            for (method, status), count in sorted(self._calls.items())
        ]
        lines.append("# TYPE agl_store_call_seconds histogram")
        for method, counts in sorted(self._within.items()):
            total = 0
            for bound, count in zip((*BOUNDS, "+Inf"), counts, strict=True):
                total += count
                lines.append(f'agl_store_call_seconds_bucket{{method="{method}",le="{bound}"}} {total}')
            lines.append(f'agl_store_call_seconds_sum{{method="{method}"}} {self._seconds[method]:.6f}')
            lines.append(f'agl_store_call_seconds_count{{method="{method}"}} {total}')
        lines += ["# TYPE agl_store_received_bytes_total counter", f"agl_store_received_bytes_total {self.received}"]
        lines += ["# TYPE agl_otlp_spans_left_out_total counter", f"agl_otlp_spans_left_out_total {self.left_out}"]
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value:g}"]
        return "\n".join(lines) + "\n"
