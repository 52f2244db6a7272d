"""What every test may use."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public data sets beside the checkout; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("AGL_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder}; set AGL_SHARED_DATA to their folder")
    return folder
