from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.pure

HEAVY = ("kubernetes", "urllib3", "yaml", "msgspec")


def loaded_by(code: str, *names: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*(n for n in {names!r} if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_other_modes_load_nothing_of_kubernetes() -> None:
    assert loaded_by("import flanneld.daemon, subnet.etcd.manager, backends.vxlan", *HEAVY) == set()


def test_kube_mode_loads_neither_models_nor_etcd() -> None:
    code = (
        "import flanneld.daemon\n"
        "from subnet.kube.manager import KubeManager, KubeSettings\n"
        "from subnet.kube.client import _open\n"
        "_open(KubeSettings(api_url='http://127.0.0.1:1'), None, print)"
    )
    unwanted = ("kubernetes.client.api.core_v1_api", "kubernetes.client.models.v1_node", "etcd3", "grpc")
    assert loaded_by(code, "kubernetes.client.rest", *unwanted) == {"kubernetes.client.rest"}


def test_other_backends_load_nothing_of_wireguard() -> None:
    unwanted = ("backends.kernel.wireguard", "backends.kernel.wireguard_go", "backends.wgkeys")
    assert loaded_by("import flanneld.daemon, subnet.etcd.manager, backends.vxlan", *unwanted) == set()
