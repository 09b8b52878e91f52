"""The CNI plugin from exec to exit: alone, with a delegate that does nothing, and with ``bridge``."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from flanneld.ctl.install_cni import install_plugin
from flanneld.ctl.lab import Lab

PLUGINS = Path("/usr/lib/cni")
CALLS = 5
ENV = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
IDLE = '#!/bin/sh\nread -r _\necho \'{"cniVersion":"0.3.1"}\'\n'


class Plugins:
    """The plugin in a directory, and a host and a container to call it for."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.host, self.pod = lab.namespace("cni"), lab.namespace("cnipod")
        self.directory = directory
        install_plugin(directory)
        (directory / "idle").write_text(IDLE)
        (directory / "idle").chmod(0o755)
        (directory / "subnet.env").write_text(ENV)

    def conf(self, delegate: str) -> dict[str, Any]:
        """Return a configuration as it stands in /etc/cni/net.d."""
        return {
            "name": "cbr0",
            "cniVersion": "0.3.1",
            "type": "flannel",
            "subnetFile": str(self.directory / "subnet.env"),
            "dataDir": str(self.directory / "state"),
            "ipam": {"dataDir": str(self.directory / "ipam")},
            "delegate": {"type": delegate, "isDefaultGateway": True},
        }

    def seconds(self, plugin: Path, command: str, conf: dict[str, Any]) -> float:
        """Return how long a call took. Raises AssertionError if it failed."""
        env = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": "c1",
            "CNI_NETNS": f"/run/netns/{self.pod.name}",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": f"{self.directory}:{PLUGINS}",
        }
        return self._timed([str(plugin)], env, json.dumps(conf))

    def interpreter_s(self) -> float:
        """Return how long the plugin's interpreter takes to start and end."""
        return self._timed(["/usr/bin/python3", "-ISB", "-c", "pass"], {}, "")

    def _timed(self, command: Sequence[str], env: dict[str, str], stdin: str) -> float:
        def call() -> float:
            began = time.monotonic()
            done = subprocess.run(command, input=stdin, env=env, capture_output=True, text=True, check=False)
            took_s = time.monotonic() - began
            if done.returncode:
                raise AssertionError(f"{command}: {done.stdout}{done.stderr}")
            return took_s

        return self.host.call(call)

    def figures(self) -> dict[str, float]:
        """Return the median of some calls of each kind."""
        calls = [self._calls() for _ in range(CALLS)]
        return {name: median(call[name] for call in calls) for name in calls[0]}

    def _calls(self) -> dict[str, float]:
        flannel, idle, bridge = self.directory / "flannel", self.directory / "idle", PLUGINS / "bridge"
        found = {
            "cni interpreter s": self.interpreter_s(),
            "cni version s": self.seconds(flannel, "VERSION", self.conf("idle")),
            "cni idle s": self.seconds(flannel, "ADD", self.conf("idle")),
            "cni idle alone s": self.seconds(idle, "ADD", self.conf("idle")),
        }
        if not bridge.exists():
            return found
        found["cni add s"] = self.seconds(flannel, "ADD", self.conf("bridge"))
        delegated = json.loads((self.directory / "state" / "c1").read_text())
        found["cni del s"] = self.seconds(flannel, "DEL", self.conf("bridge"))
        found["cni add alone s"] = self.seconds(bridge, "ADD", delegated)
        found["cni del alone s"] = self.seconds(bridge, "DEL", delegated)
        return found
