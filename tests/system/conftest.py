from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import pytest

from flanneld.ctl.lab import Lab
from tests.support.drawn import CONFIG
from tests.support.site import Network, Site

FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if shutil.which("etcd") is None:
        pytest.skip("needs etcd")
    with Lab(1, start=False) as lab:
        yield Site(lab)


@pytest.fixture
def make_network(site: Site, request: pytest.FixtureRequest) -> Iterator[Callable[..., Network]]:
    made: list[Network] = []

    def make(config: Mapping[str, Any] | None = CONFIG) -> Network:
        made.append(site.network(config))
        return made[-1]

    yield make
    for network in made:
        if request.node.stash.get(FAILED, False):
            print(network.report())
        network.close()


@pytest.fixture
def network(make_network: Callable[..., Network]) -> Network:
    return make_network()
