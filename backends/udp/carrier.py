"""Opens TUN and socket, runs a pump between them in a thread, and keeps all of it as wanted."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Final

from backends.api import Carrier
from backends.dataplane.model import KeptTun, Link
from backends.dataplane.ports import Kernel
from backends.kernel import fou
from backends.kernel.fdstore import FdStore, process_store
from backends.kernel.fou import FouPort
from backends.kernel.tun import Tun, adopt_tun, open_tun
from backends.udp import routes
from backends.udp.api import DEVICE_GONE, Forwarding, Pump, overlay_address
from backends.udp.options import carried
from backends.udp.pump import PythonPump
from backends.udp.wire import Wire, adopt_wire, open_wire, shown
from subnet.errors import KernelError
from subnet.model import Family, IPAddress, IPNetwork, Lease, Subnets

log = logging.getLogger(__name__)

HELD_PACKETS: Final = 10_000
"""How many packets wait at a TUN while the daemon restarts; by itself it would be 500."""
DEVICE_PATTERN: Final[Mapping[Family, str]] = {4: "flannel%d", 6: "flannel-v6.%d"}
END_WITHIN_S: Final = 1.0

MakePump = Callable[[Tun, Wire, int, int], Pump]
"""Makes a pump from TUN, socket, port and MTU."""


@dataclass(frozen=True, slots=True)
class CarrierSpec:
    """What makes a carrier: the local end, the port of every node, the TUN's MTU, and the cluster's network.

    IPv4 travels in IPv4, IPv6 in IPv6. ``allow_unknown``: what comes from an
    address that is no peer's is not dropped. ``kept``: the device outlives the process.
    """

    local: IPAddress
    port: int
    mtu_bytes: int
    network: IPNetwork
    allow_unknown: bool = False
    kept: bool = False

    @property
    def family(self) -> Family:
        """Return the address family of both."""
        return 4 if self.network.version == 4 else 6

    @property
    def pattern(self) -> str:
        """Return what the device is called."""
        return DEVICE_PATTERN[self.family]


class NativePump:
    """The pump in C (``backends/udp/native``); it runs without the interpreter's lock."""

    def __init__(self, tun: Tun, wire: Wire, port: int, mtu_bytes: int) -> None:
        from backends.udp import _pump  # noqa: PLC0415 - absent where no compiler was at hand

        self._pump = _pump.Pump(
            tun.fd,
            wire.socket.fileno(),
            vnet_hdr=tun.vnet_hdr,
            tso=tun.tso,
            uso=tun.uso,
            gso=wire.gso,
            port=port,
            mtu_bytes=mtu_bytes,
            version=wire.family,
        )
        self._family = wire.family
        self.run, self.stop, self.stats = self._pump.run, self._pump.stop, self._pump.stats

    def forward(self, forwarding: Forwarding) -> None:
        """Replace routes and addresses."""
        own, overlay = (_packed(number, self._family) for number in (forwarding.own, forwarding.overlay))
        peers = None if forwarding.peers is None else routes.pack_peers(forwarding.peers, self._family)
        self._pump.forward(routes.pack(forwarding.ranges, self._family), own, overlay, peers)


def _packed(address: int, family: Family) -> bytes:
    return address.to_bytes(4 if family == 4 else 16, "big") if address else b""


def native_available() -> bool:
    """Whether the native pump was built."""
    try:
        from backends.udp import _pump  # noqa: F401, PLC0415 - absent where no compiler was at hand
    except ImportError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Running:
    """What exists while packets are carried."""

    tun: Tun
    wire: Wire
    pump: Pump
    thread: threading.Thread
    index: int

    @property
    def works(self) -> bool:
        """Whether the pump runs, or waits to be started."""
        return self.thread.ident is None or self.thread.is_alive()


class UdpCarrier(Carrier):
    """One TUN device, one socket, one pump.

    Where descriptors are kept (``FdStore``), device and socket outlive the
    process: what arrives meanwhile waits in them for the pump of the next.
    """

    def __init__(self, spec: CarrierSpec, *, native: bool | None = None, store: FdStore | None = None) -> None:
        self.spec = spec
        self._store = process_store() if store is None else store
        self._native = native_available() if native is None else native
        self._running: _Running | None = None
        self._told = False
        self._forwarding = Forwarding()

    @property
    def device(self) -> str:
        """Return the TUN's name. Raises KernelError while there is none."""
        if self._running is None:
            raise KernelError("use", f"device {self.spec.pattern}", 0, "it is not open")
        return self._running.tun.name

    def stats(self) -> Mapping[str, int]:
        """Return the pump's counters, none while there is no pump."""
        return self._running.pump.stats() if self._running is not None else {}

    def ensure(self, kernel: Kernel) -> dict[str, Link]:
        """Return the TUN by name, up and with its MTU; made anew if somebody deleted it. Raises KernelError."""
        links = kernel.links()
        running = self._running
        if running is not None and not self._intact(running, links):
            log.warning("device %s was deleted; it is made anew", running.tun.name)
            self._let_go()
            self._end()
        if self._running is None:
            self._running = self._open(links)
            self._start()
            links = kernel.links()
        link = links[self.device]
        if not link.up or link.mtu_bytes != self.spec.mtu_bytes:
            kernel.set_link(link.name, up=True, mtu_bytes=self.spec.mtu_bytes)
            link = kernel.links()[link.name]
        return {link.name: link}

    def carry(self, own: Subnets, peers: Collection[Lease], complete: bool = True) -> None:
        """Tell the pump which subnet is behind which address."""
        family = self.spec.family
        subnet = own.of(family)
        if subnet is None:
            return
        table = next_hops(peers, family)
        forwarding = Forwarding(
            routes.ranges(table),
            int(subnet.network_address),
            int(overlay_address(self.spec.network, subnet)),
            None if self.spec.allow_unknown else frozenset(int(public) for public in table.values()),
        )
        if forwarding != self._forwarding:
            self._forwarding = forwarding
            if self._running is not None:
                self._running.pump.forward(forwarding)
        self._told = True
        self._start()

    def discard(self) -> None:
        """End the pump for good; device, addresses and routes go with it."""
        self._let_go()
        self.close()

    def close(self) -> None:
        """End the pump; device, addresses and routes go with it unless they or their descriptors are kept."""
        self._end()

    def _let_go(self) -> None:
        """Have nobody keep descriptors or device any more."""
        for name in self._names():
            self._store.forget(name)
        if self._running is not None and self.spec.kept:
            with suppress(KernelError):
                self._running.tun.keep(False)

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        running.pump.stop()
        if running.thread.ident is not None:
            running.thread.join(END_WITHIN_S)
        if running.thread.is_alive():
            # Its descriptors must not be given to others while it may still use them.
            log.error("the pump of %s does not end; its device stays until the process ends", running.tun.name)
            return
        counted = running.pump.stats()
        log.debug("pump of %s ended: %s", running.tun.name, " ".join(f"{k}={v}" for k, v in counted.items() if v))
        running.wire.socket.close()
        with suppress(OSError):
            running.tun.close()

    def _intact(self, running: _Running, links: Mapping[str, Link]) -> bool:
        link = links.get(running.tun.name)
        return link is not None and link.index == running.index and running.works

    def _open(self, links: Mapping[str, Link]) -> _Running:
        spec = self.spec
        adopted = self._adopt()
        tun, wire = adopted or self._create(_left(links, spec.pattern))
        tun.keep(spec.kept)
        for name, fd in zip(self._names(), (tun.fd, wire.socket.fileno()), strict=True):
            self._store.keep(name, fd)
        make: MakePump = NativePump if self._native else PythonPump
        pump = make(tun, wire, spec.port, spec.mtu_bytes)
        pump.forward(self._forwarding)
        thread = threading.Thread(target=_run, args=(pump, tun.name), name="udp-pump", daemon=True)
        where = f"udp {shown(spec.local, spec.port)} mtu {spec.mtu_bytes}"
        verb = "taken over" if adopted or tun.name in links else "created"
        log.info("device %s %s: %s, %s", tun.name, verb, where, self._how(tun, wire))
        return _Running(tun, wire, pump, thread, tun.index())

    def _start(self) -> None:
        """Start the pump once peers were told: what waits for one that knows none would be for nobody."""
        if self._told and self._running is not None and self._running.thread.ident is None:
            self._running.thread.start()

    def _names(self) -> tuple[str, str]:
        """Return what TUN and socket are kept under."""
        return f"flannel-tun-{self.spec.family}", f"flannel-udp-{self.spec.family}"

    def _adopt(self) -> tuple[Tun, Wire] | None:
        """Return what the run before left with the service manager, if it fits; what does not is closed."""
        fds = [self._store.take(name) for name in self._names()]
        tun = adopt_tun(fds[0], offloads=self._native) if fds[0] is not None else None
        where = self.spec.local, self.spec.port
        wire = adopt_wire(fds[1], *where, gro=not self.spec.kept) if fds[1] is not None else None
        if tun is not None and wire is not None:
            return tun, wire
        if wire is not None:
            wire.socket.detach()
        for name, fd in zip(self._names(), fds, strict=True):
            if fd is not None:
                self._store.forget(name)
                os.close(fd)
        return None

    def _create(self, pattern: str) -> tuple[Tun, Wire]:
        wire = self._bind()
        try:
            tun = open_tun(pattern, offloads=self._native)
        except KernelError:
            wire.socket.close()
            raise
        with suppress(OSError):
            tun.hold(HELD_PACKETS)
        return tun, wire

    def _bind(self) -> Wire:
        # Where programs take datagrams one by one, those that do not come that way keep their order only alone, too.
        spec, gro = self.spec, not self.spec.kept
        try:
            return open_wire(spec.local, spec.port, gro=gro)
        except KernelError as error:
            if error.errno != errno.EADDRINUSE or not _close_kernels_port(spec):
                raise
        return open_wire(spec.local, spec.port, gro=gro)

    def _how(self, tun: Tun, wire: Wire) -> str:
        features = {"TSO": tun.tso, "USO": tun.uso} if self._native else {}
        features |= {"UDP GSO": wire.gso, "UDP GRO": wire.gro}
        have = ", ".join(name for name, there in features.items() if there) or "no offload"
        lack = ", ".join(name for name, there in features.items() if not there)
        pump = "native pump" if self._native else "pump in Python (the native one was not built)"
        return f"{pump} with {have}" + (f", without {lack}" if lack else "")


def next_hops(peers: Collection[Lease], family: Family) -> dict[IPNetwork, IPAddress]:
    """Return which subnet is behind which address."""
    table: dict[IPNetwork, IPAddress] = {}
    for lease in peers:
        theirs, public = lease.subnets.of(family), lease.attrs.public(family)
        if carried(lease) and theirs is not None and public is not None:
            table[theirs] = public
    return table


def _left(links: Mapping[str, Link], pattern: str) -> str:
    """Return the device that an earlier run left, else the pattern of a new one."""
    named = re.compile(re.escape(pattern).replace("%d", r"\d+"))
    kept = (name for name, link in links.items() if isinstance(link.tunnel, KeptTun) and named.fullmatch(name))
    return min(kept, default=pattern)


def _close_kernels_port(spec: CarrierSpec) -> bool:
    """Close the port that data path ``fou`` left open; whether there was one."""
    if not isinstance(spec.local, IPv4Address):
        return False
    left = FouPort(spec.local, spec.port)
    if left not in fou.ports():
        return False
    fou.remove(left)
    log.info("%s of an earlier configuration is removed", left)
    return True


def _run(pump: Pump, device: str) -> None:
    try:
        pump.run()
    except OSError as error:
        if error.errno not in DEVICE_GONE:
            raise
        log.debug("pump of %s ended: the device is gone", device)
