"""Echoes between containers: the one way in which tests wait for a network to carry both ways."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from flanneld.ctl.lab.hosts import Host
from tests.support.site import settle


def silent(hosts: Sequence[Host], *families: int) -> list[str]:
    """Return the ordered pairs of which the first one's container gets no answer from the second one's."""
    return [
        f"{source} gets no answer of {target} over IPv{family}"
        for source, target in itertools.permutations(hosts, 2)
        for family in families
        if source.pod.ping(target.pod, family, count=1)[0] != 1
    ]


def all_answer(hosts: Sequence[Host], *families: int, within_s: float = 60.0) -> None:
    """Wait until each container gets an answer from each other one; IPv4 unless families are named.

    A host that is ready knows the peers that were there before it. That a peer knows it as well takes
    another moment, so a packet sent at once may find no way back.
    """
    settle("echoes", lambda: silent(hosts, *(families or (4,))), within_s)
