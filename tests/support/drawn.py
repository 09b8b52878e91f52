"""Which subnets hosts draw in tests, so that a lease which the test makes up never meets theirs.

Hosts draw at random. A made-up lease 10.5.N.0/24 has N below 100 or from 200
on, unless it is meant for a host that is to have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def drawn(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with 10.5.100.0 to 10.5.199.0 for the hosts; one without IPv4 as it is."""
    return {**config, **({"SubnetMin": "10.5.100.0", "SubnetMax": "10.5.199.0"} if "Network" in config else {})}


CONFIG: dict[str, Any] = drawn({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
"""What a test asks for that says no more."""
