import os

import pytest
import torch


def pytest_configure() -> None:
    # Two test processes on two cores: one thread each, and for the processes they start, or they wait for each other.
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
