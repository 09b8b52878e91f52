"""Tables for people: leases, kernel state, reachability."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.measure import PINGS, Reach
from flanneld.ctl.lab.state import HostState

GOOD, BAD, FAINT = "green", "bold red", "dim"


def leases_table(leases: Mapping[str, Mapping[str, Any]], hosts: Iterable[Host]) -> Table:
    """Show every lease in the datastore and the host that holds it."""
    names = {str(a.ip): h.name for h in hosts for a in h.addresses}
    table = _table("Leases in etcd", "subnet", "public IP", "host", "backend", "data")
    for key, value in leases.items():
        public = [p for p in (value.get("PublicIP"), value.get("PublicIPv6")) if p and not ip_address(p).is_unspecified]
        data = [value[k] for k in ("BackendData", "BackendV6Data") if value.get(k) is not None]
        table.add_row(
            key.replace("-", "/").replace("&", "\n"),
            "\n".join(public),
            next((names[p] for p in public if p in names), "?"),
            value.get("BackendType") or Text("(none)", FAINT),
            "\n".join(_data(d) for d in data),
        )
    return table


def host_table(host: Host, state: HostState, missing: list[str]) -> Table:
    """Show what the kernel of one host holds for its peers, and what it lacks."""
    env = host.subnet_env()
    table = _table(f"Host {host.name}, {host.address}", "what", "state")
    table.columns[0].style = "bold"
    table.add_row("subnet.env", "\n".join(f"{k}={v}" for k, v in env.items()) or Text("missing", BAD))
    for name, link in state.devices.items():
        info = link.get("linkinfo", {})
        facts = [info.get("info_kind", ""), f"mtu {link.get('mtu')}", link.get("address", ""), _vxlan(info)]
        table.add_row("device", " ".join(filter(None, [name, *facts])))
        table.add_row("address", "\n".join(state.addresses.get(name, ())))
    _rows(table, "routes", [_route(r) for r in state.routes])
    _rows(table, "neighbours", sorted(f"{n['dst']} dev {n['dev']} lladdr {n.get('lladdr')}" for n in state.neighbours))
    _rows(table, "FDB", sorted(f"{e['mac']} dev {e['dev']} dst {e['dst']}" for e in state.fdb))
    if missing:
        table.add_row("missing", Text("\n".join(missing), BAD))
    return table


def reach_table(found: Iterable[Reach], throughput: Mapping[tuple[str, str], float | None]) -> Table:
    """Show the answers between all containers; ``throughput`` is in bits per second by names of hosts."""
    table = _table(
        "Containers, packets of full size, not to be fragmented", "from", "to", "size", "answers", "round trip"
    )
    if throughput:
        table.add_column("throughput", justify="right")
    for r in found:
        rate = throughput.get((r.source.name, r.target.name)) if r.family == r.target.pod.addresses[0].version else None
        table.add_row(
            f"{r.source.name} {r.source.pod.address(r.family)}",
            f"{r.target.name} {r.target.pod.address(r.family)}",
            f"{r.mtu_bytes} B",
            Text(f"{r.answers} of {PINGS}", GOOD if r.complete else BAD),
            "–" if r.round_trip_ms is None else f"{r.round_trip_ms:.2f} ms",
            *(("–" if rate is None else f"{rate / 1e9:.2f} Gbit/s",) if throughput else ()),
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _rows(table: Table, what: str, lines: list[str]) -> None:
    table.add_row(what, "\n".join(lines) if lines else Text("none", FAINT))


def _route(route: Mapping[str, Any]) -> str:
    kind = route.get("type", "unicast")
    text = route["dst"] if kind == "unicast" else f"{kind} {route['dst']}"
    for word, key in (("via", "gateway"), ("dev", "dev"), ("proto", "protocol"), ("src", "prefsrc")):
        if route.get(key):
            text += f" {word} {route[key]}"
    return text + "".join(f" {flag}" for flag in route.get("flags", ()) if flag == "onlink")


def _vxlan(info: Mapping[str, Any]) -> str:
    data = info.get("info_data", {})
    words = [f"id {data['id']}" if "id" in data else ""]
    local = data.get("local") or data.get("local6")
    words += [f"local {local}" if local else "", f"port {data['port']}" if "port" in data else ""]
    return " ".join(filter(None, words))


def _data(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k} {v}" for k, v in value.items())
    return json.dumps(value)
