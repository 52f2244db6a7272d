"""What it costs to have us: time to import, size of the wheel, and what the core alone brings into an environment.

    python -m tests.benchmarks.bench_import

The wheel is built and installed into an empty virtual environment, so this needs what `pip install .` needs. Imports are timed
in this environment, beside those of other packages that a user has anyway, where they are installed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from statistics import median

from tests.benchmarks._bench import report

ROOT = Path(__file__).parents[2]
RUNS = 15
OURS = {"import agentlightning": "import agentlightning", "all its names": "from agentlightning import *"}
PEERS = ("httpx", "openai", "langgraph.graph", "torch")
NOT_OURS = {"pip", "setuptools", "wheel", "lightning"}

TIMED = "from time import perf_counter as now; began = now(); {}; print((now() - began) * 1e3)"
INSTALLED = "import json, importlib.metadata as m; print(json.dumps([d.name for d in m.distributions()]))"


def main() -> None:
    """Prints the table and the JSON line."""
    times = {name: import_ms(statement) for name, statement in OURS.items()}
    peers = {name: import_ms(f"import {name}") for name in PEERS if installed(name)}
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build_wheel(Path(scratch))
        wheel_kb = wheel.stat().st_size / 1e3
        dependencies, install_mb = install(wheel, Path(scratch, "core"))
    ours = times["import agentlightning"]
    metrics = {
        "import_ms": ours,
        "import_all_ms": times["all its names"],
        "wheel_kb": wheel_kb,
        "core_dependencies": float(len(dependencies)),
        "install_mb": install_mb,
        **{f"ratio_{name.partition('.')[0]}": peer / ours for name, peer in peers.items()},
    }
    rows: list[tuple[object, ...]] = [("what", "value", "unit", "times ours")]
    rows += [(name, ms, "ms", ms / ours) for name, ms in times.items()]
    rows += [(f"import {name}", ms, "ms", ms / ours) for name, ms in peers.items()]
    rows += [("wheel", wheel_kb, "kB", ""), ("core installed", install_mb, "MB", "")]
    rows += [("core dependencies", len(dependencies), "packages", "")]
    report("import", {key: round(value, 3) for key, value in metrics.items()}, rows)


def import_ms(statement: str) -> float:
    """Median over fresh interpreters, of the statement alone; a first run, which writes byte code, is not counted."""
    times = [float(run(sys.executable, "-c", TIMED.format(statement))) for _ in range(RUNS + 1)]
    return median(times[1:])


def installed(name: str) -> bool:
    return importlib.util.find_spec(name.partition(".")[0]) is not None


def build_wheel(folder: Path) -> Path:
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT))
    (wheel,) = folder.glob("lightning-*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> tuple[list[str], float]:
    """Names of what the core needs, and megabytes of all that was installed, ours included."""
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "-q", str(wheel))
    (site,) = {path for path in folder.rglob("site-packages") if path.is_dir() and not path.is_symlink()}
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file() and path.suffix != ".pyc")
    names = json.loads(run(str(python), "-c", INSTALLED))
    return [name for name in names if name.lower() not in NOT_OURS], size / 1e6


def run(*command: str) -> str:
    """Its standard output. Raises RuntimeError with what it said on standard error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
