"""Tunnel policies and associations of IPsec in this network namespace, through netlink (linux/xfrm.h).

Sockets are short-lived: only one backend has such policies, and the others look
for what it may have left.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from backends.dataplane.model import Change, IpsecPolicy
from backends.kernel import xfrmnl
from backends.kernel.sockets import BATCH, NetlinkSocket, Refusal, kernel_error
from subnet.model import IPAddress

NETLINK_XFRM = 6
NO_IPSEC = "the kernel has no IPsec"
MISSING = frozenset({errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT})


def read_policies() -> frozenset[IpsecPolicy]:
    """Return the policies of the form that we make; none on a kernel without IPsec. Raises KernelError."""
    try:
        channel = NetlinkSocket(NETLINK_XFRM)
    except OSError as cause:
        if cause.errno in MISSING:
            return frozenset()
        raise kernel_error("read", "IPsec policies", cause.errno or 0) from cause
    with closing(channel):
        dump = channel.dump(xfrmnl.dump_policies(), "IPsec policies")
    decoded = (xfrmnl.decode(*part) for part in dump if part[1].kind == xfrmnl.XFRM_MSG_NEWPOLICY)
    return frozenset(policy for policy in decoded if policy is not None)


def remove_associations(local: IPAddress, peer: IPAddress | None = None) -> None:
    """Remove what was negotiated under our request id between two hosts, or with all peers. Raises KernelError.

    A charon that was killed leaves its associations in the kernel, and its successor knows nothing of them.
    """
    with closing(NetlinkSocket(NETLINK_XFRM)) as channel:
        dump = channel.dump(xfrmnl.dump_associations(), "IPsec associations")
        decoded = (xfrmnl.decode_association(*part) for part in dump if part[1].kind == xfrmnl.XFRM_MSG_NEWSA)
        stale = [found for found in decoded if found is not None and _between(found, local, peer)]
        for start in range(0, len(stale), BATCH):
            channel.request([partial(xfrmnl.delete_association, one) for one in stale[start : start + BATCH]])


def _between(found: xfrmnl.Association, local: IPAddress, peer: IPAddress | None) -> bool:
    ends = {found.source, found.destination}
    return local in ends and (peer is None or peer in ends)


def request_policies(changes: Sequence[tuple[Change, int]]) -> list[Refusal]:
    """Make the changes of policies, at most a batch; return those refused."""
    try:
        channel = NetlinkSocket(NETLINK_XFRM)
    except OSError as cause:
        return [(position, cause.errno or errno.EIO, NO_IPSEC) for position in range(len(changes))]
    with closing(channel):
        return channel.request([partial(xfrmnl.encode, change) for change, _ in changes])
