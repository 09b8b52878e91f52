"""How the kernel carries the network: one module per backend type."""

from __future__ import annotations

import re
from importlib import import_module

from backends.api import Backend, BackendFactory, Setting
from subnet.errors import ConfigError

AVAILABLE = ("alloc", "extension", "host-gw", "ipip", "ipsec", "udp", "vxlan", "wireguard")
PLANNED = ("tencent-vpc",)
"""Types that flannel has and this version has not."""

_TYPE = re.compile(r"[a-z][a-z0-9-]*$")


def load_backend(setting: Setting) -> Backend:
    """Return the backend that the config names: type ``host-gw`` is module ``backends.host_gw``.

    Raises ConfigError for an unknown type or for options it cannot use.
    """
    name = setting.config.backend.type
    if name in PLANNED:
        raise ConfigError(f"Backend.Type {name!r} is not available in this version; it has {', '.join(AVAILABLE)}")
    if name not in AVAILABLE or not _TYPE.match(name):
        raise ConfigError(f"Backend.Type {name!r} is unknown; this version has {', '.join(AVAILABLE)}")
    factory: BackendFactory = import_module(f"backends.{name.replace('-', '_')}").BACKEND
    return factory(setting)
