import os

import pytest
import torch


def pytest_configure() -> None:
    # Two test processes on two cores: one thread each, or they wait for each other.
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
