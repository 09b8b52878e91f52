"""Tables of flanneld's nftables mode, to be removed where iptables mode is used."""

from __future__ import annotations

import logging

from flanneld.traffic.runner import Runner
from subnet.errors import RuleError

log = logging.getLogger(__name__)

NFT_TABLES = ("ip flannel-ipv4", "ip6 flannel-ipv6")
"""Family and name, as upstream (pkg/trafficmngr/nftables) makes them."""


def remove_nft_tables(runner: Runner) -> None:
    """Delete the tables that exist; nothing to do where nft is not installed. Raises RuleError."""
    nft = runner.find("nft")
    if nft is None:
        return
    listed = runner.run([nft, "list", "tables"]).out.splitlines()
    for table in NFT_TABLES:
        if f"table {table}" not in listed:
            continue
        done = runner.run([nft, "delete", "table", *table.split()])
        if done.rc:
            raise RuleError(f"nft delete table {table} failed ({done.rc}): {' '.join(done.err.split())}")
        log.info("removed nft table %s of an earlier run", table)
