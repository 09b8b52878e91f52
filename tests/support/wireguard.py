"""What a host's WireGuard device holds, and how to spoil it, by other means than the daemon's.

The kernel's devices are read through pyroute2, those of ``wireguard-go`` at
their control socket, which the laboratory shows below the daemon's directory.
"""

from __future__ import annotations

import base64
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pyroute2 import WireGuard

from flanneld.ctl.lab.hosts import Host
from tests.conftest import IN_GUEST

NO_PSK = bytes(32)


@dataclass(frozen=True)
class Peer:
    """A peer; ``endpoint`` is address and port, empty if there is none, ``psk`` base64."""

    endpoint: str
    networks: tuple[str, ...]
    keepalive_s: int = 0
    psk: str = ""


@dataclass(frozen=True)
class Device:
    """Keys are base64; ``peers`` go by public key."""

    private_key: str
    port: int
    peers: dict[str, Peer]


def possible() -> bool:
    """Whether hosts of a laboratory can have such devices here."""
    return IN_GUEST or Path("/sys/module/wireguard").exists() or shutil.which("wireguard-go") is not None


def in_process(host: Host, device: str) -> bool:
    """Whether ``wireguard-go`` holds the device."""
    return _socket(host, device).is_socket()


def read(host: Host, device: str) -> Device | None:
    """Return what a device holds, None if it is not there."""
    if host.namespace.link(device) is None:
        return None
    if in_process(host, device):
        return _read_socket(host, device)
    return host.namespace.call(partial(_read_kernel, device))


def put_peer(host: Host, device: str, public_key: str, networks: Iterable[str] = (), psk: str = "") -> None:
    """Give a device a peer, or the one of that key other networks and another preshared key."""
    if in_process(host, device):
        lines = [f"public_key={_hex(public_key)}", *([f"preshared_key={_hex(psk)}"] if psk else [])]
        _ask(host, device, "set=1", *lines, *(f"allowed_ip={network}" for network in networks))
        return
    peer = {"public_key": public_key, "allowed_ips": list(networks), **({"preshared_key": psk} if psk else {})}
    host.namespace.call(partial(_set_kernel, device, peer=peer))


def remove_peer(host: Host, device: str, public_key: str) -> None:
    """Take a peer away from a device."""
    if in_process(host, device):
        _ask(host, device, "set=1", f"public_key={_hex(public_key)}", "remove=true")
        return
    host.namespace.call(partial(_set_kernel, device, peer={"public_key": public_key, "remove": True}))


def set_device(host: Host, device: str, private_key: str, port: int) -> None:
    """Give a device another private key and port."""
    if in_process(host, device):
        _ask(host, device, "set=1", f"private_key={_hex(private_key)}", f"listen_port={port}")
        return
    host.namespace.call(partial(_set_kernel, device, private_key=private_key, listen_port=port))


def _read_kernel(device: str) -> Device:
    with WireGuard() as reader:
        messages = list(reader.info(device))
    peers = {}
    for peer in (peer for message in messages for peer in message.get_attr("WGDEVICE_A_PEERS") or ()):
        endpoint, psk = peer.get_attr("WGPEER_A_ENDPOINT"), peer.get_attr("WGPEER_A_PRESHARED_KEY").decode()
        peers[peer.get_attr("WGPEER_A_PUBLIC_KEY").decode()] = Peer(
            f"{endpoint['addr']} {endpoint['port']}" if endpoint else "",
            tuple(sorted(str(entry["addr"]) for entry in peer.get_attr("WGPEER_A_ALLOWEDIPS") or ())),
            peer.get_attr("WGPEER_A_PERSISTENT_KEEPALIVE_INTERVAL"),
            "" if base64.b64decode(psk) == NO_PSK else psk,
        )
    first = messages[0]
    return Device(first.get_attr("WGDEVICE_A_PRIVATE_KEY").decode(), first.get_attr("WGDEVICE_A_LISTEN_PORT"), peers)


def _set_kernel(device: str, **values: Any) -> None:
    with WireGuard() as writer:
        writer.set(device, **values)


def _read_socket(host: Host, device: str) -> Device:
    private_key, port = "", 0
    sections: list[dict[str, list[str]]] = []
    for line in _ask(host, device, "get=1"):
        name, _, value = line.partition("=")
        if name == "private_key":
            private_key = _base64(value)
        elif name == "listen_port":
            port = int(value)
        elif name == "public_key":
            sections.append({name: [value]})
        elif sections:
            sections[-1].setdefault(name, []).append(value)
    return Device(private_key, port, {_base64(said["public_key"][0]): _peer(said) for said in sections})


def _peer(said: dict[str, list[str]]) -> Peer:
    address, _, port = said.get("endpoint", [""])[0].rpartition(":")
    psk = said.get("preshared_key", [NO_PSK.hex()])[0]
    return Peer(
        f"{address.strip('[]')} {port}" if address else "",
        tuple(sorted(said.get("allowed_ip", ()))),
        int(said.get("persistent_keepalive_interval", ["0"])[0]),
        "" if psk == NO_PSK.hex() else _base64(psk),
    )


def _ask(host: Host, device: str, *lines: str) -> list[str]:
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(10)
        channel.connect(str(_socket(host, device)))
        channel.sendall("".join(f"{line}\n" for line in (*lines, "")).encode())
        said = b""
        while not said.endswith(b"\n\n"):
            part = channel.recv(1 << 16)
            if not part:
                raise ConnectionError(f"wireguard-go of {host.name} hung up")
            said += part
    *answer, status = said.decode().strip().splitlines()
    if status != "errno=0":
        raise OSError(f"{host.name} {device}: {status}")
    return answer


def _socket(host: Host, device: str) -> Path:
    return host.daemon.directory / "run" / "wireguard" / f"{device}.sock"


def _hex(key: str) -> str:
    return base64.b64decode(key).hex()


def _base64(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text)).decode()
