"""Fixtures that every ring may use."""

import os
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import settings

pytest_plugins = ["tests.support.netns", "tests.support.etcd", "tests.support.kube"]

# Machines that run the tests are slow and busy; a deadline would fail for the weather, new examples for luck.
settings.register_profile("project", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("project")

IN_GUEST = os.environ.get("FLANNELD_GUEST") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave what needs a stock kernel to the guest."""
    if not IN_GUEST:
        for item in items:
            if item.get_closest_marker("vm"):
                item.add_marker(pytest.mark.skip(reason="needs a stock kernel: make test-vm"))


@pytest.fixture
def undisturbed() -> Iterator[None]:
    """What else the machine does is not to count: this thread, and all that it starts, go first (sched(7))."""
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    yield
    os.sched_setscheduler(0, policy, param)
