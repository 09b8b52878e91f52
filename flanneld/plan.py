"""What the operator asked for, as far as the owner loop acts on it."""

from __future__ import annotations

from dataclasses import dataclass

from flanneld.extiface import Wish
from subnet.errors import FlannelError
from subnet.model import IPNetwork


class NotYet(FlannelError):
    """A step cannot be taken yet; the text is what people are told."""


class Told(NotYet):
    """The same, for a reason that whoever found it has logged already."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options that the loop acts on."""

    wish: Wish
    subnet_file: str
    ip_masq: bool = False
    forward_rules: bool = True
    random_fully: bool = True
    masq_exclude: tuple[IPNetwork, ...] = ()
    chain_prefix: str = "FLANNEL"
    table_prefix: str = "flannel"
    blackhole: bool = False
    vtep_filter: bool = False
    resync_s: float = 60.0
    startup_timeout_s: float = 0.0
    tunnel_checksum_offload: bool = True
