#!/usr/bin/python3 -ISB
"""CNI plugin ``flannel``: turns subnet.env into a configuration for ``bridge``, or another plugin, and runs that.

A file of its own, for any host that has Python 3.8 or later: nothing but the
standard library, and little of it, because every container waits for it.
Source: CNI specification 1.0.0; upstream flannel-io/cni-plugin, flannel.go, flannel_linux.go.
"""

from __future__ import annotations

import json
import os
import sys
from ipaddress import ip_network

TYPE_CHECKING = False
if TYPE_CHECKING:  # what module typing calls so; importing it would add a third to the time to start
    from typing import Any

VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0")
SUBNET_FILE = "/run/flannel/subnet.env"
DATA_DIR = "/var/lib/cni/flannel"
DIR_MODE, FILE_MODE = 0o700, 0o600

# Well-known error codes of the specification, and one of our own.
BAD_VERSION, BAD_ENVIRONMENT, IO_FAILURE, NOT_JSON, BAD_CONFIG, TRY_LATER = 1, 4, 5, 6, 7, 11
NO_PLUGIN = 100

# A container id names a file: CNI specification, "Container ID".
FIRST_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
ID_CHARS = FIRST_CHARS | frozenset("_.-")


class PluginError(Exception):
    """What is wrong, in words for whoever reads the container runtime's log."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def read_subnet_env(path: str) -> dict[str, str]:
    """Return the assignments of subnet.env as they stand there. Raises PluginError."""
    try:
        with open(path, encoding="utf-8") as file:
            pairs = [line.split("=", 1) for line in file.read().splitlines() if "=" in line]
    except FileNotFoundError as error:
        raise PluginError(
            TRY_LATER, f"{path} does not exist: flanneld is not ready on this host; see its log or /readyz?verbose"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise PluginError(IO_FAILURE, f"{path} cannot be read: {error}") from error
    found = dict(pairs)
    missing = [
        " or ".join(either)
        for either in (
            ("FLANNEL_NETWORK", "FLANNEL_IPV6_NETWORK"),
            ("FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET"),
            ("FLANNEL_MTU",),
            ("FLANNEL_IPMASQ",),
        )
        if not any(found.get(name) for name in either)
    ]
    if missing:
        raise PluginError(TRY_LATER, f"{path} is missing {', '.join(missing)}")
    return found


def networks(env: dict[str, str], names: tuple[str, ...], path: str) -> list[str]:
    """Return networks, IPv4 first, from assignments that may be lists. Raises PluginError."""
    found: list[str] = []
    for name in names:
        for text in filter(None, env.get(name, "").split(",")):
            try:
                found.append(str(ip_network(text, strict=False)))
            except ValueError as error:
                raise PluginError(BAD_CONFIG, f"{path}: {name}={env[name]}: {error}") from error
    return found


def delegate_config(conf: dict[str, Any], env: dict[str, str], path: str) -> dict[str, Any]:
    """Return the configuration for the plugin that does the work. Raises PluginError.

    ``conf`` is our own, ``env`` the content of subnet.env at ``path``.
    """
    delegate = conf.get("delegate") or {}
    if not isinstance(delegate, dict):
        raise PluginError(BAD_CONFIG, "delegate must be an object")
    for key in ("name", "ipam"):
        if key in delegate:
            raise PluginError(BAD_CONFIG, f"delegate must not have {key!r}: it is set by flannel")
    kind = delegate.get("type", "bridge")
    if not isinstance(kind, str) or not kind or "/" in kind:
        raise PluginError(BAD_CONFIG, "delegate type must be the name of a plugin")
    try:
        mtu_bytes = int(env["FLANNEL_MTU"])
    except ValueError as error:
        raise PluginError(BAD_CONFIG, f"{path}: FLANNEL_MTU={env['FLANNEL_MTU']} is not a number") from error
    made = {"ipMasq": env["FLANNEL_IPMASQ"] != "true", "mtu": mtu_bytes, **delegate, "type": kind}
    made["name"] = conf.get("name", "")
    if kind == "bridge":
        made.setdefault("isGateway", True)
    made.update({key: conf[key] for key in ("cniVersion", "runtimeConfig") if conf.get(key)})
    made["ipam"] = _ipam(conf, env, path)
    return made


def _ipam(conf: dict[str, Any], env: dict[str, str], path: str) -> dict[str, Any]:
    ipam = conf.get("ipam") or {}
    routes = ipam.get("routes") if isinstance(ipam, dict) else None
    if not isinstance(ipam, dict) or not isinstance(routes or [], list):
        raise PluginError(BAD_CONFIG, "ipam must be an object, and its routes a list")
    subnets = networks(env, ("FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET"), path)
    clusters = networks(env, ("FLANNEL_NETWORK", "FLANNEL_IPV6_NETWORK"), path)
    return {
        "type": "host-local",
        **ipam,
        "ranges": [[{"subnet": subnet}] for subnet in subnets],
        "routes": [*(routes or []), *({"dst": network} for network in clusters)],
    }


def state_path(conf: dict[str, Any], container: str) -> str:
    """Return where the container's delegate configuration is kept. Raises PluginError."""
    if not container or container[0] not in FIRST_CHARS or not ID_CHARS.issuperset(container):
        raise PluginError(BAD_ENVIRONMENT, f"CNI_CONTAINERID {container!r} is not a container id")
    return os.path.join(conf.get("dataDir") or DATA_DIR, container)


def save(path: str, text: str) -> None:
    """Write the state, whole or not at all. Raises PluginError."""
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.tmp")
    try:
        if not os.path.isdir(directory):
            os.makedirs(directory, exist_ok=True)
            os.chmod(directory, DIR_MODE)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        with open(handle, "w", encoding="utf-8") as file:
            os.fchmod(handle, FILE_MODE)
            file.write(text)
        os.rename(temporary, path)
    except OSError as error:
        raise PluginError(IO_FAILURE, f"state {path} cannot be written: {error}") from error


def load(path: str) -> str:
    """Return the state, empty if there is none that can be used. Raises PluginError."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise PluginError(IO_FAILURE, f"state {path} cannot be read: {error}") from error
    try:
        valid = isinstance(json.loads(text), dict)
    except ValueError:
        valid = False
    if not valid:
        # After a crash of the host, say. The containers of that time are gone; theirs must be deletable.
        sys.stderr.write(f"flannel: state {path} is damaged and is removed\n")
        remove(path)
    return text if valid else ""


def remove(path: str) -> None:
    """Remove the state; none is fine. Raises PluginError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise PluginError(IO_FAILURE, f"state {path} cannot be removed: {error}") from error


def find_plugin(kind: str) -> str:
    """Return the path of a plugin in CNI_PATH. Raises PluginError."""
    places = [place for place in os.environ.get("CNI_PATH", "").split(os.pathsep) if place]
    for place in places:
        path = os.path.join(place, kind)
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    raise PluginError(NO_PLUGIN, f"plugin {kind!r} is not in CNI_PATH ({', '.join(places) or 'empty'})")


def become(plugin: str, text: str) -> None:
    """Run the plugin in place of this process, with ``text`` as its input."""
    handle = os.memfd_create("netconf")
    os.write(handle, text.encode())
    os.lseek(handle, 0, os.SEEK_SET)
    os.dup2(handle, 0)
    try:
        os.execv(plugin, [plugin])  # noqa: S606
    except OSError as error:
        raise PluginError(NO_PLUGIN, f"plugin {plugin} cannot be run: {error}") from error


def run(plugin: str, text: str) -> int:
    """Run the plugin, with ``text`` as its input and our output as its own; return its exit code."""
    child = os.fork()
    if child == 0:
        try:
            become(plugin, text)
        except PluginError as error:
            report(error, {})
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def add(conf: dict[str, Any]) -> None:
    """Set a container's network up: the last step is done by the other plugin, which answers for us."""
    subnet_file = conf.get("subnetFile") or SUBNET_FILE
    delegate = delegate_config(conf, read_subnet_env(subnet_file), subnet_file)
    plugin = find_plugin(delegate["type"])
    text = json.dumps(delegate, separators=(",", ":"))
    save(state_path(conf, os.environ.get("CNI_CONTAINERID", "")), text)
    become(plugin, text)


def delete(conf: dict[str, Any]) -> int:
    """Take a container's network down as it was set up; nothing to do is success."""
    path = state_path(conf, os.environ.get("CNI_CONTAINERID", ""))
    text = load(path)
    if not text:
        return 0
    code = run(find_plugin(json.loads(text).get("type", "bridge")), text)
    if code == 0:
        remove(path)
    return code


def report(error: PluginError, conf: dict[str, Any]) -> None:
    """Print an error as the specification wants it."""
    told = {"cniVersion": conf.get("cniVersion") or "0.1.0", "code": error.code, "msg": f"flannel: {error}"}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def read_conf() -> dict[str, Any]:
    """Return our configuration from standard input. Raises PluginError."""
    try:
        conf = json.loads(sys.stdin.read())
    except ValueError as error:
        raise PluginError(NOT_JSON, f"the network configuration is not JSON: {error}") from error
    if not isinstance(conf, dict):
        raise PluginError(NOT_JSON, "the network configuration is not an object")
    return conf


def main() -> int:
    """Do what CNI_COMMAND says; return the exit code."""
    command = os.environ.get("CNI_COMMAND", "")
    conf: dict[str, Any] = {}
    try:
        if command not in ("ADD", "DEL", "CHECK", "VERSION"):
            raise PluginError(BAD_ENVIRONMENT, f"CNI_COMMAND {command!r} is not ADD, DEL, CHECK or VERSION")
        if command == "VERSION":
            sys.stdout.write(json.dumps({"cniVersion": VERSIONS[-1], "supportedVersions": VERSIONS}) + "\n")
            return 0
        conf = read_conf()
        version = conf.get("cniVersion") or VERSIONS[0]
        if version not in VERSIONS:
            raise PluginError(BAD_VERSION, f"cniVersion {version!r} is none of {', '.join(VERSIONS)}")
        if command == "ADD":
            add(conf)
        return delete(conf) if command == "DEL" else 0
    except PluginError as error:
        report(error, conf)
        return 1


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A container waits: taking the interpreter down in good order would cost a sixth of the whole.
    os._exit(exit_code)
