import os
from pathlib import Path

import pytest
import torch

END_TO_END = {"browser", "cli", "distributed", "faults", "workflows"}  # directories of tests of whole commands


def pytest_configure() -> None:
    # Two test processes on two cores: one thread each, and for the processes they start, or they wait for each other.
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave end-to-end tests out of `make quick`."""
    for item in items:
        if END_TO_END & set(Path(item.nodeid.partition("::")[0]).parts):
            item.add_marker(pytest.mark.medium)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
