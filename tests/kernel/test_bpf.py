"""Maps and programs of bpf(2): what the kernel refuses and in which words, writing in batches, capabilities."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import subprocess
import sys
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from backends.kernel import bpf
from backends.kernel.bpf import Bytecode, Map, MapKind
from backends.udp.bpf.programs import lease_entries
from subnet.errors import KernelError
from subnet.model import IPAddress, IPNetwork
from tests.conftest import IN_GUEST

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.stock,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

ROOT = Path(__file__).parents[2]


def test_a_refused_program_is_refused_with_the_verifiers_words() -> None:
    leaves_nothing = Bytecode(bytes.fromhex("9500000000000000"), {}, {})
    with pytest.raises(KernelError, match=r"load bpf program empty: .*the verifier says: .*R0 !read_ok"):
        bpf.load("empty", leaves_nothing, ())


def entries(held: Map, keys: list[bytes]) -> list[bytes]:
    """Return the values of keys, as another tool would read them."""
    found = []
    for key in keys:
        holder, value = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(4)
        where = ctypes.addressof(holder), ctypes.addressof(value)
        bpf._bpf(bpf.MAP_LOOKUP_ELEM, struct.pack("=IxxxxQQQ", held.fd, *where, 0))
        found.append(value.raw)
    return found


@pytest.mark.parametrize("batches", [True, False], ids=["together", "one by one"])
def test_many_leases_are_written_together_where_the_kernel_can(monkeypatch: pytest.MonkeyPatch, batches: bool) -> None:
    table: dict[IPNetwork, IPAddress] = {
        IPv4Network((0x0A000000 + (n << 8), 24)): IPv4Address(0xC0000200 + n) for n in range(10_000)
    }
    wanted = lease_entries(table)
    call, calls = bpf._bpf, list[int]()

    def counted(command: int, attributes: bytes) -> int:
        calls.append(command)
        if command == bpf.MAP_UPDATE_BATCH and not batches:
            raise OSError(errno.EINVAL, "Invalid argument")
        return call(command, attributes)

    monkeypatch.setattr(bpf, "_bpf", counted)
    held = Map("leases", MapKind.LPM_TRIE, (8, 4), 1 << 20, bpf.F_NO_PREALLOC)
    try:
        held.put(wanted)
        assert len(calls) == 1 + (3 if batches else 1 + len(wanted))
        assert entries(held, list(wanted)) == list(wanted.values())
        held.remove(list(wanted)[1:])
        held.remove(list(wanted)[1:])
        with pytest.raises(OSError, match="No such file"):
            entries(held, list(wanted)[1:2])
    finally:
        held.close()


LOADS = """
import sys
sys.path.insert(0, sys.argv[1])
from ipaddress import IPv4Address
from backends.udp.bpf.programs import Programs, Settings
programs = Programs()
programs.load(Settings(IPv4Address("192.0.2.1"), 8285, 1, 1, 1472, False))
print("loaded")
"""
LOADED, NOT_PERMITTED, OLDER = "loaded\n", "CAP_BPF and CAP_NET_ADMIN", "CAP_PERFMON only if it is an older one"


@pytest.mark.parametrize(
    ("capabilities", "said"),
    [
        ("+bpf,+perfmon,+net_admin", LOADED),
        ("+bpf,+net_admin", OLDER if IN_GUEST else LOADED),  # the guest has Debian 12's 6.1
        ("+net_admin", NOT_PERMITTED),
        ("+bpf,+perfmon", NOT_PERMITTED),
    ],
)
def test_the_capabilities_it_takes_are_the_documented_ones(capabilities: str, said: str) -> None:
    argv = ["setpriv", "--bounding-set", f"-all,{capabilities}", sys.executable, "-c", LOADS, str(ROOT)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert said in done.stdout + done.stderr
