"""Text of WireGuard's cross-platform control protocol, which ``wireguard-go`` speaks over a socket.

Pure encoding and decoding; keys are hexadecimal here. Source:
https://www.wireguard.com/xplatform/, section "Configuration Protocol".
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network

from backends import wgkeys
from backends.dataplane.model import Change, Endpoint, Wireguard, WireguardPeer
from backends.kernel.wgnl import PeerSeen, ordered
from subnet.model import IPNetwork

GET = b"get=1\n\n"
NO_KEY = "0" * 64
"""How an absent preshared key is written, and taken away."""


def _hexadecimal(key: str) -> str:
    return base64.b64decode(key).hex() if key else NO_KEY


def _base64(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text)).decode() if text != NO_KEY else ""


def _operation(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in ("set=1", *lines, "")).encode()


def set_device(wanted: Wireguard) -> bytes:
    """Give a device its private key and, unless it is 0, its port. Peers stay."""
    port = [f"listen_port={wanted.port}"] if wanted.port else []
    return _operation([f"private_key={_hexadecimal(wanted.private_key)}", *port])


def set_peer(change: Change, with_endpoint: bool = True) -> bytes:
    """Put or delete a peer. A put sets all there is, the endpoint only if asked to."""
    peer = change.target
    if not isinstance(peer, WireguardPeer):
        raise TypeError(f"no WireGuard message for {peer}")
    name = f"public_key={_hexadecimal(peer.public_key)}"
    if change.verb == "delete":
        return _operation([name, "remove=true"])
    return _operation(
        [
            name,
            f"preshared_key={_hexadecimal(peer.preshared_key)}",
            *([f"endpoint={peer.endpoint}"] if with_endpoint and peer.endpoint is not None else []),
            f"persistent_keepalive_interval={peer.keepalive_s}",
            "replace_allowed_ips=true",
            *(f"allowed_ip={network}" for network in peer.allowed),
        ]
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """What an operation was answered. ``errno`` 0: done. ``pairs`` are keys and values in the order given."""

    errno: int
    pairs: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def parse(text: str) -> Answer:
    """Read an answer without its empty last line. Raises ValueError for what is none."""
    pairs = [line.partition("=") for line in text.splitlines()]
    if not pairs or pairs[-1][0] != "errno" or not all(separator for _, separator, _ in pairs):
        raise ValueError("is not an answer of the WireGuard control protocol")
    return Answer(abs(int(pairs[-1][2])), tuple((name, value) for name, _, value in pairs[:-1]))


def device(answer: Answer) -> Wireguard:
    """Return what the device is set to; its public key follows from the private one."""
    found = dict(pair for pair in answer.pairs if pair[0] in {"private_key", "listen_port"})
    private = _base64(found.get("private_key", NO_KEY))
    return Wireguard(int(found.get("listen_port", "0")), private, wgkeys.public_key(private) if private else "")


def peers(answer: Answer, device: str) -> list[PeerSeen]:
    """Return the peers of a device."""
    return [_peer(list(pairs), device) for pairs in _sections(answer)]


def _sections(answer: Answer) -> Iterator[list[tuple[str, str]]]:
    """Yield what is said of each peer, which begins with its public key."""
    section: list[tuple[str, str]] = []
    for pair in answer.pairs:
        if pair[0] == "public_key":
            if section:
                yield section
            section = []
        if section or pair[0] == "public_key":
            section.append(pair)
    if section:
        yield section


def _peer(pairs: list[tuple[str, str]], device: str) -> PeerSeen:
    said = dict(pairs)
    networks: list[IPNetwork] = [ip_network(value) for name, value in pairs if name == "allowed_ip"]
    endpoint = said.get("endpoint")
    peer = WireguardPeer(
        device,
        _base64(said["public_key"]),
        _endpoint(endpoint) if endpoint else None,
        ordered(networks),
        int(said.get("persistent_keepalive_interval", "0")),
        _base64(said.get("preshared_key", NO_KEY)),
    )
    handshake_s = int(said.get("last_handshake_time_sec", "0")) + int(said.get("last_handshake_time_nsec", "0")) / 1e9
    return PeerSeen(peer, handshake_s, int(said.get("tx_bytes", "0")))


def _endpoint(text: str) -> Endpoint:
    """Read ``192.0.2.1:51820`` or ``[2001:db8::1%eth0]:51820``."""
    address, _, port = text.rpartition(":")
    return Endpoint(ip_address(address.strip("[]").partition("%")[0]), int(port))
