"""Data path ``bpf``: programs in the kernel carry everyday packets, the pump whatever is left.

On the wire it is what the pumps send: one plain IPv4 packet per datagram. The
programs are byte code (``bytecode.py``), made of ``datapath.c``.
"""

from __future__ import annotations

from backends.api import Setting
from backends.udp.bpf.carrier import BpfCarrier, BpfSpec
from backends.udp.carrier import CarrierSpec, UdpCarrier
from backends.udp.user import UdpBackend
from subnet.errors import ConfigError


class BpfBackend(UdpBackend):
    """IPv4 through programs, beside a TUN device and a socket; IPv6 as data path ``user`` carries it."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        if 4 not in self._specs:
            raise ConfigError("Backend.DataPath 'bpf' is for IPv4, which the config does not enable")
        of, interface = self._specs[4], setting.interface
        self._specs[4] = BpfSpec(
            of.local,
            of.port,
            of.mtu_bytes,
            of.network,
            of.allow_unknown,
            kept=True,
            external=interface.name,
            external_index=interface.index,
        )

    def _made(self, spec: CarrierSpec) -> UdpCarrier:
        return BpfCarrier(spec) if isinstance(spec, BpfSpec) else super()._made(spec)
