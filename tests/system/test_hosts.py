from __future__ import annotations

import os
import shutil

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.tools import poll

pytestmark = [
    pytest.mark.system,
    pytest.mark.stock,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]


@pytest.mark.parametrize("backend", ["vxlan", "host-gw"])
def test_containers_of_two_hosts_reach_each_other(backend: str) -> None:
    with Lab(2, backend=backend, flags=["--ip-masq"], ready_timeout_s=600) as lab:
        first, second = (host.pod for host in lab.hosts)
        assert first.mtu_bytes == {"vxlan": 1450, "host-gw": 1500}[backend]
        poll("answers to full packets", lambda: first.ping(second)[0] == 3, timeout_s=300)
        assert second.ping(first)[0] == 3
        for host in lab.hosts:
            assert host.daemon.stop(60) == 0
        assert first.ping(second)[0] == 3  # the kernel carries on
