"""Calls CNI plugins as a container runtime does (CNI specification 1.0.0, sections 1 to 3)."""

from __future__ import annotations

import json
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

from flanneld.ctl.lab.hosts import Host, Pod
from flanneld.ctl.lab.netns import Namespace

PLUGINS = Path("/usr/lib/cni")
Object = dict[str, Any]


class Runtime:
    """The runtime of a host, with the list of plugins from its ``/etc/cni/net.d``.

    Hosts of a laboratory share their files: what the plugins keep goes to a directory of the host.
    """

    def __init__(self, host: Host, conf: Path, plugins: Path) -> None:
        self.host, self.plugins = host, plugins
        self.directory = host.daemon.directory / "cni"
        self.list: Object = json.loads(conf.read_text())
        self.list["plugins"][0] |= {
            "subnetFile": str(host.daemon.subnet_file),
            "dataDir": str(self.directory / "flannel"),
            "ipam": {"dataDir": str(self.directory / "networks")},
        }

    def add(self, namespace: Namespace, **capabilities: Any) -> Pod:
        """Set a container's network up by the whole chain; ``capabilities`` are arguments such as portMappings."""
        result: Object = {}
        for plugin in self.list["plugins"]:
            result = self._call("ADD", plugin, namespace, result, capabilities)
        link = namespace.link("eth0") or {}
        return Pod(namespace, self.host, [ip_interface(entry["address"]) for entry in result["ips"]], link["mtu"])

    def delete(self, namespace: Namespace, **capabilities: Any) -> None:
        """Take it down again, in reverse."""
        for plugin in reversed(self.list["plugins"]):
            self._call("DEL", plugin, namespace, {}, capabilities)

    def _call(self, command: str, plugin: Object, namespace: Namespace, before: Object, capabilities: Object) -> Object:
        wanted = plugin.get("capabilities", {})
        conf = {"name": self.list["name"], "cniVersion": self.list["cniVersion"], **plugin}
        conf |= {"prevResult": before} if before else {}
        given = {name: value for name, value in capabilities.items() if wanted.get(name)}
        conf |= {"runtimeConfig": given} if given else {}
        variables = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": namespace.name,
            "CNI_NETNS": f"/run/netns/{namespace.name}",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": f"{self.plugins}:{PLUGINS}",
        }
        binary = next(path for path in (self.plugins / plugin["type"], PLUGINS / plugin["type"]) if path.exists())
        arguments = [f"{name}={text}" for name, text in variables.items()]
        out = self.host.namespace.run("env", *arguments, str(binary), stdin=json.dumps(conf))
        found: Object = json.loads(out) if out.strip() else {}
        return found
