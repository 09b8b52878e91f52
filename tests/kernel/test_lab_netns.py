from __future__ import annotations

import os

import pytest

from flanneld.ctl.lab.netns import Namespace

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]


def test_a_route_with_an_outer_header_is_shown_under_its_own_destination() -> None:
    namespace = Namespace(f"fl-{os.getpid()}-encap")
    try:
        namespace.ip("route add fd05:0:0:2::/64 encap ip6 src 2001:db8::1 dst 2001:db8::2 dev lo")
        (route,) = (r for r in namespace.routes(6) if r.get("encap") == "ip6")
        assert route["dst"] == "fd05:0:0:2::/64"
    finally:
        namespace.delete()
