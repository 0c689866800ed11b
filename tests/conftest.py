"""What tests share: where the cases outside the project are, when they are there."""
from pathlib import Path

import pytest

from histchrono.core.paths import root


@pytest.fixture(scope="session")
def shared() -> Path:
    "The folder of cases and reference data beside the checkout; tests that need it are skipped without it."
    p = root().parent / "shared"
    if not p.is_dir():
        pytest.skip("the reference data (../shared) are not beside this checkout")
    return p
