"""What the specification wants in a vxlan host's kernel, and what ip(8) and bridge(8) find there, in one vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from flanneld.ctl.lab.hosts import Host

Facts: TypeAlias = frozenset[str]


def wanted(leases: Mapping[str, Mapping[str, Any]], own: str, device: str = "flannel.1") -> Facts:
    """Return the entries for all leases (by the last part of their key) but the own subnet, and the own address."""
    facts = {f"addr {own.partition('/')[0]}/32 dev {device}"} if own else set()
    for key, value in leases.items():
        subnet = key.replace("-", "/")
        if subnet == own:
            continue
        base, mac = subnet.partition("/")[0], value["BackendData"]["VtepMAC"]
        facts |= {
            f"route {subnet} via {base} dev {device} proto boot onlink",
            f"neigh {base} lladdr {mac} dev {device} PERMANENT",
            f"fdb {mac} dst {value['PublicIP']} dev {device} self permanent",
        }
    return frozenset(facts)


def held(host: Host, device: str = "flannel.1") -> Facts:
    """Return the entries on a host's tunnel device."""
    namespace = host.namespace
    facts = {f"addr {address} dev {device}" for address in namespace.addresses(device) if ":" not in address}
    for route in namespace.show(f"route show table main dev {device}"):
        parts = [f"route {route['dst']}", f"via {route['gateway']}" if "gateway" in route else "", f"dev {device}"]
        parts += [f"proto {route.get('protocol')}", *route.get("flags", ()), _unusual(route)]
        facts.add(" ".join(p for p in parts if p))
    for n in namespace.show(f"-4 neigh show dev {device} nud all"):
        if n["dst"].startswith("224."):
            continue
        facts.add(f"neigh {n['dst']} lladdr {n.get('lladdr')} dev {device} {' '.join(n['state'])}")
    for e in namespace.fdb(device):
        facts.add(f"fdb {e['mac']} dst {e['dst']} dev {device} {' '.join(e['flags'])} {e['state']}")
    return frozenset(facts)


def direct_routes(host: Host) -> Facts:
    """Return the gateway routes on the external interface, the default route aside."""
    return frozenset(
        f"route {r['dst']} via {r['gateway']} dev eth0 proto {r['protocol']}"
        for r in host.namespace.show("route show table main dev eth0")
        if "gateway" in r and r["dst"] != "default"
    )


def device(host: Host, name: str = "flannel.1") -> dict[str, Any]:
    """Return name, MAC, MTU, index, flags and the vxlan attributes of a device, empty if there is none."""
    link = host.namespace.link(name)
    if link is None:
        return {}
    info = link.get("linkinfo", {})
    common = {
        "index": link["ifindex"],
        "mac": link["address"],
        "mtu": link["mtu"],
        "up": "UP" in link["flags"],
        "queue": link.get("txqlen", 0),
        "kind": info.get("info_kind"),
    }
    return common | {f"vxlan {k}": v for k, v in info.get("info_data", {}).items()}


def rules(host: Host) -> list[str]:
    """Return flannel's iptables rules and jumps in order, each after its table's name."""
    found, table = [], ""
    for line in host.namespace.iptables_save():
        if line.startswith("*"):
            table = line[1:]
        elif "FLANNEL-" in line:
            found.append(f"{table} {line}")
    return found


def _unusual(route: Mapping[str, Any]) -> str:
    odd = {k: route[k] for k in ("metric", "prefsrc", "scope", "type") if k in route}
    plain = {"scope": "global", "type": "unicast"}
    return " ".join(f"{k} {v}" for k, v in odd.items() if plain.get(k) != v)
