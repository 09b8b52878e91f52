"""Fuzz targets for the parts of the native pump that handle packets of others, and what it takes to run them.

Each ``NAME.c`` makes packets out of its input and judges what the pump does with
them by rules told anew; clang's libFuzzer looks for input that breaks one, or
that AddressSanitizer or UndefinedBehaviorSanitizer objects to.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.support import ipv4, ipv6
from tests.support.offload import super_packet

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "backends" / "udp" / "native"
PARTS = ("coalesce", "packet", "routes", "segment")
FLAGS = (
    *("-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror"),
    *("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"),
)
LONGEST_INPUT_BYTES = 4096

TARGETS: Final[Mapping[str, int]] = {"segment": 6_000, "coalesce": 4_000, "icmp": 200_000, "lookup": 1_000}
"""By name how many inputs a short run tries: some seconds' worth."""


def build(target: str, directory: Path, native: Path = NATIVE) -> Path:
    """Compile a target; return the program."""
    program = directory / f"fuzz-{target}"
    sources = (HERE / f"{target}.c", *(native / f"{part}.c" for part in PARTS))
    subprocess.run(["clang", *FLAGS, f"-I{native}", *map(str, sources), "-o", str(program)], check=True)
    return program


def run(program: Path, corpus: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a target on its corpus, which grows; what it finds is written beside it."""
    found = f"-artifact_prefix={corpus}-"
    argv = [str(program), f"-max_len={LONGEST_INPUT_BYTES}", "-print_final_stats=1", found, *options, str(corpus)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def sow(target: str, corpus: Path) -> None:
    """Fill a corpus with inputs to start from."""
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[target]()):
        (corpus / f"seed-{number}").write_bytes(seed)


def _segment() -> Sequence[bytes]:
    """A repaired packet of five segments and more, one that says so itself, unfinished checksums."""
    tcp, payload = ipv4.Segment(flags=ipv4.ACK | ipv4.PSH | ipv4.CWR).packet(), bytes(range(250))
    options = ipv4.datagram(options=bytes([1] * 4))
    missing = ipv4.datagram(payload + bytes(2))[26:28]
    """With this at its end the datagram's checksum comes to 0, which UDP writes as 0xffff."""
    extension = ipv6.datagram(extension=bytes([17, 0, 1, 4, 0, 0, 0, 0]))
    whole = [
        super_packet(tcp, payload, 50, ecn=True),
        super_packet(ipv4.Segment(options=bytes([1] * 12)).packet(), payload, 60),
        super_packet(ipv4.datagram(), payload, 70),
        super_packet(options, payload, 70),
        super_packet(ipv4.datagram(), payload + missing, 1000),
        ipv6.super_packet(ipv6.segment(), payload, 50),
        ipv6.super_packet(ipv6.datagram(), payload, 70),
        ipv6.super_packet(extension, payload, 70, 48),
        ipv4.vnet(1, 0, 0, 0, 20, 16) + ipv4.Segment(payload).packet(),
        ipv4.vnet(1, 0, 0, 0, 20, 6) + ipv4.datagram(payload),
        ipv4.vnet(1, 0, 0, 0, 40, 6) + ipv6.datagram(payload),
    ]
    return [how + packet for how in (b"\0\0\0", b"\1\x20\0") for packet in whole]


def _coalesce() -> Sequence[bytes]:
    """Flows of both families and protocols: in a row, in turn, interrupted, damaged, more than are held back."""
    programs = []
    for flow in range(4):
        row = bytes([flow, 0, 0]) * 6
        programs += [row, row + bytes([flow, 8, 1]) + row, bytes([flow, 0, 5]) * 12]
        programs += [row + bytes([flow, special, 0, 0, 9, 7, 7, 7]) + row for special in (1, 3, 4, 16, 32, 64, 128)]
        header = 40 if flow & 1 else 20
        places = (1, 7, 8, *(header + field for field in (8, 12, 15, 18)))
        programs += [row + bytes([flow, 1, 0, 0, place, 1]) + row for place in places]
    programs.append(bytes(byte for flow in range(20) for byte in (flow, 0, 1)) * 4)
    programs.append(bytes([0, 0, 0, 2, 0, 0, 1, 0, 0, 3, 0, 0]) * 5)
    programs.append(bytes([0, 0, 1]) * 270)
    return [bytes([taken]) + program for taken in (3, 1, 0) for program in programs]


def _icmp() -> Sequence[bytes]:
    """Offenders that are answered and such that are not, whole and in part."""
    hop_by_hop = bytes([17, 2]) + bytes(22)
    offenders = [
        ipv4.datagram(b"payload" * 9),
        ipv4.datagram(bytes(1400)),
        ipv4.datagram(options=bytes([1] * 8)),
        ipv4.ip(b"\x08\0\0\0", ipv4.ICMP),
        ipv4.ip(b"\x03\0\0\0", ipv4.ICMP),
        ipv4.ip(b"later", fragment=0x2001),
        ipv4.datagram(destination="224.0.0.1"),
        ipv4.datagram(source="127.0.0.1"),
        ipv6.datagram(b"payload" * 9),
        ipv6.datagram(bytes(1400)),
        ipv6.datagram(extension=hop_by_hop),
        ipv6.ip(bytes([17, 0, 0, 1, 0, 0, 0, 0]) + bytes(8), 44),
        ipv6.icmp(128),
        ipv6.icmp(1),
        ipv6.icmp(137),
        ipv6.datagram(destination="ff02::1"),
    ]
    heads = [bytes([how, 0, 60, kind, 5, 0xDC]) + bytes(range(16)) for kind in range(3) for how in (0, 3)]
    return [head + offender for head in heads for offender in offenders]


def _lookup() -> Sequence[bytes]:
    """Neighbouring and nested prefixes, the whole address space, ranges, peers."""
    seeds = []
    for family, size in ((0, 4), (1, 16)):
        start = bytes([10, 5]) + bytes(size - 2)
        near = [bytes([10, 5, number]) + bytes(size - 3) for number in range(5)]
        free = 8 * size - 24
        seeds += [
            bytes([family, 5]) + b"".join(bytes([free]) + one for one in near) + b"".join(near),
            bytes([family, 3]) + b"".join(bytes([free + more]) + start for more in (0, 8, 16)) + b"".join(near),
            bytes([family, 2, 8 * size]) + bytes(size) + bytes([0]) + start + start,
            bytes([family | 2, 1]) + near[0] + near[1] + near[2] + b"".join(near),
            bytes([family | 4, 5]) + b"".join(near) + start,
        ]
    middle = [bytes(7) + bytes([number]) + bytes(8) for number in range(5)]
    seeds.append(bytes([1, 5]) + b"".join(bytes([64]) + one for one in middle) + b"".join(middle))
    return seeds


SEEDS: Final = {"segment": _segment, "coalesce": _coalesce, "icmp": _icmp, "lookup": _lookup}
