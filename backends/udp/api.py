"""What a pump is: it carries packets between a TUN device and a UDP socket."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from backends.udp.routes import Range
from subnet.model import IPAddress, IPNetwork

DEVICE_GONE: Final = frozenset({errno.EBADFD, errno.EFAULT})
"""What a TUN descriptor answers once its device was deleted."""
SEND_WAIT_MS: Final = 20
"""How long a full socket buffer is waited for before a packet is dropped."""
ICMP_PER_SECOND: Final = 1000
"""Limit of ICMP errors, as the kernel's own (icmp_msgs_per_sec in ip-sysctl.rst)."""


@dataclass(frozen=True, slots=True)
class Forwarding:
    """Where packets go, and which addresses errors about them come from (numbers, 0: send none).

    ``own`` answers remote senders. ``overlay`` answers local ones: the kernel
    takes no packet from outside with an address of its own as source, so it
    has to be one that nobody here holds and that is reached through the TUN.
    Datagrams are taken from ``peers`` only, None: from everybody.
    """

    ranges: tuple[Range, ...] = ()
    own: int = 0
    overlay: int = 0
    peers: frozenset[int] | None = None


def overlay_address(network: IPNetwork, subnet: IPNetwork) -> IPAddress:
    """Return an address of the network outside the own subnet, the network's first if possible."""
    first: IPAddress = network.network_address
    return subnet.broadcast_address + 1 if first in subnet else first


class Pump(Protocol):
    """Carries packets until it is told to stop. All methods but ``run`` may be called from any thread."""

    def run(self) -> None:
        """Carry packets; return after ``stop``. Raises OSError, of DEVICE_GONE when somebody deleted the TUN."""
        ...

    def stop(self) -> None:
        """Let ``run`` return at once."""
        ...

    def forward(self, forwarding: Forwarding) -> None:
        """Replace routes and addresses; in force for the next packet."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Return counters since the start, by name."""
        ...


COUNTERS: Final = (
    "tx_packets",
    "tx_bytes",
    "tx_messages",
    "rx_packets",
    "rx_bytes",
    "rx_writes",
    "no_route",
    "ttl_exceeded",
    "too_big",
    "malformed",
    "icmp_sent",
    "tx_dropped",
    "rx_dropped",
    "unknown_sender",
)
"""What ``Pump.stats`` counts. ``tx`` is TUN to socket; a message or a write carries one packet or more."""
