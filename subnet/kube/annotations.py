"""Node annotations: what this node says, and what others said.

Source: upstream pkg/subnet/kube/annotations.go, kube.go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address

from subnet.gojson import JsonError, dumps, loads, show
from subnet.iptext import parse_ip
from subnet.model import FAMILIES, Family, IPAddress, Json, LeaseAttrs

MANAGED = "kube-subnet-manager"
BACKEND_TYPE = "backend-type"
DATA: Mapping[Family, str] = {4: "backend-data", 6: "backend-v6-data"}
PUBLIC: Mapping[Family, str] = {4: "public-ip", 6: "public-ipv6"}
OVERWRITE: Mapping[Family, str] = {4: "public-ip-overwrite", 6: "public-ipv6-overwrite"}
NODE_PUBLIC: Mapping[Family, str] = {4: "node-public-ip", 6: "node-public-ipv6"}
OURS = (MANAGED, BACKEND_TYPE, *DATA.values(), *PUBLIC.values())
"""Suffixes of the annotations that the daemon writes; all others belong to operators."""

NO_DATA = "null"
_PREFIX = re.compile(r"(?:[a-z0-9_-]+\.)+[a-z0-9_-]+/(?:[a-z0-9_-]+-)?")
_LONGEST_DOMAIN = 253
_LONGEST_NAME = 63 - max(map(len, (*OURS, *OVERWRITE.values(), *NODE_PUBLIC.values())))
_UNSET_V4 = IPv4Address(0)

Annotations = Mapping[str, str]


def annotation_prefix(text: str) -> str:
    """Return the prefix as it stands before the suffixes: ``a.example.com/`` or ``a.example.com/x-``.

    Raises ValueError for what no annotation key can begin with. Limits of
    length: Kubernetes, "Labels and Selectors", syntax.
    """
    prefix = text if "/" in text else f"{text}/"
    if not prefix.endswith(("/", "-")):
        prefix += "-"
    domain, _, name = prefix.partition("/")
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(f"{text!r} must be a lower-case domain such as flannel.example.com, or a domain, / and a name")
    if len(domain) > _LONGEST_DOMAIN or len(name) > _LONGEST_NAME:
        raise ValueError(
            f"{text[:20]!r}... is too long: the domain has at most {_LONGEST_DOMAIN} characters, "
            f"the name at most {_LONGEST_NAME - 1}"
        )
    return prefix


def with_prefix(annotations: Annotations, prefix: str) -> dict[str, str]:
    """Return the annotations below the prefix, by suffix."""
    return {name[len(prefix) :]: value for name, value in annotations.items() if name.startswith(prefix)}


def read_address(ours: Annotations, suffix: str, family: Family) -> IPAddress | None:
    """Return the address of an annotation, None if it is absent or empty. Raises ValueError."""
    text = ours.get(suffix, "")
    if not text:
        return None
    try:
        address = parse_ip(text)
    except ValueError as error:
        raise ValueError(f"{suffix} {show(text)}: {error}") from error
    if address.version != family:
        raise ValueError(f"{suffix} {show(text)}: is not an IPv{family} address")
    # This is how Go nodes with IPv6 alone say that they have none.
    return None if address == _UNSET_V4 else address


def read_data(ours: Annotations, suffix: str) -> Json:
    """Return the decoded backend data, None if there is none. Raises ValueError."""
    text = ours.get(suffix, "")
    try:
        return loads(text) if text else None
    except JsonError as error:
        raise ValueError(f"{suffix}: {error}") from error


def read_attrs(ours: Annotations) -> tuple[LeaseAttrs, dict[Family, str]]:
    """Return what annotations, given by suffix, say, and the reason per family that cannot be used.

    Members of such a family are unset.
    """
    public: dict[Family, IPAddress | None] = {}
    data: dict[Family, Json] = {}
    problems: dict[Family, str] = {}
    for family in FAMILIES:
        try:
            public[family] = read_address(ours, PUBLIC[family], family)
            data[family] = read_data(ours, DATA[family])
        except ValueError as error:
            problems[family] = f"annotation {error}"
            public.pop(family, None)
    return make_attrs(public, ours.get(BACKEND_TYPE, ""), data), problems


def make_attrs(public: Mapping[Family, IPAddress | None], backend_type: str, data: Mapping[Family, Json]) -> LeaseAttrs:
    """Return attributes from members by family."""
    v4, v6 = public.get(4), public.get(6)
    return LeaseAttrs(
        v4 if isinstance(v4, IPv4Address) else None,
        v6 if isinstance(v6, IPv6Address) else None,
        backend_type,
        data.get(4),
        data.get(6),
    )


def wanted(attrs: LeaseAttrs, overwrite: Mapping[Family, str]) -> dict[str, str]:
    """Return our annotations by suffix; a family without announced address has none.

    ``overwrite`` has the addresses that operators want published instead.
    """
    found = {MANAGED: "true", BACKEND_TYPE: attrs.backend_type}
    for family in FAMILIES:
        public = attrs.public(family)
        if public is not None:
            found[DATA[family]] = _data_text(attrs.backend_type, attrs.data(family))
            found[PUBLIC[family]] = overwrite.get(family) or str(public)
    return found


def _data_text(backend_type: str, data: Json) -> str:
    if data is None:
        # An extension without PreStartupCommand has an empty value where all others have a null.
        return "" if backend_type == "extension" else NO_DATA
    return dumps(data).decode()


def changes(have: Annotations, want: Annotations) -> dict[str, str | None]:
    """Return, by suffix, what to write so that ``have`` becomes ``want``; None removes one of ours."""
    stale: dict[str, str | None] = {name: None for name in OURS if name in have and name not in want}
    return {name: value for name, value in want.items() if have.get(name) != value} | stale
