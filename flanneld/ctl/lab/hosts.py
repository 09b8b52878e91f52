"""Hosts, their daemons and their containers, as the lab's network namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Interface, IPv6Interface, ip_interface
from pathlib import Path
from typing import TypeAlias

import flanneld
from flanneld.ctl.lab.errors import LabError
from flanneld.ctl.lab.netns import Namespace
from flanneld.ctl.lab.notify import NotifyListener
from flanneld.ctl.lab.tools import environment

Interface: TypeAlias = IPv4Interface | IPv6Interface

OWN_COMMAND = (sys.executable, "-m", "flanneld")
"""The daemon beside the running interpreter."""


_COVER = 'mount --bind "$2" "$1" && shift 2 && exec "$@"'
"""ip-netns(8) runs every program in a mount namespace of its own."""
_GIVE = """
import os, sys
given = [int(fd) for fd in sys.argv[1].split(",") if fd]
aside = [os.dup2(fd, fd + 100) for fd in given]
for fd in given:
    os.close(fd)
for place, fd in enumerate(aside, 3):
    os.dup2(fd, place)
    os.close(fd)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Puts descriptors where sd_listen_fds(3) looks for them, and becomes the daemon."""


class Daemon:
    """The flanneld of one host: one process at a time, with its own run directory, log and notification socket.

    ``flags`` come after the ones the lab needs; ``env`` is added to the environment.
    ``own`` names directories that the daemon and what it starts see as their own: path to what is seen there.
    ``keeps_descriptors``: as under systemd, those that the daemon asks for are kept for its next run.
    """

    def __init__(
        self,
        namespace: Namespace,
        directory: Path,
        *,
        command: Sequence[str] = OWN_COMMAND,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        own: Mapping[Path, Path] | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.namespace, self.directory = namespace, directory
        for shown in (own or {}).values():
            shown.mkdir(parents=True, exist_ok=True)
        covers = [("sh", "-c", _COVER, "sh", str(path), str(shown)) for path, shown in (own or {}).items()]
        self.command = (*(word for words in covers for word in words), *command)
        self.flags, self.env = tuple(flags), dict(env or {})
        self.subnet_file = directory / "subnet.env"
        self.notify = NotifyListener(directory / "notify")
        self.runs = 0
        self.keeps_descriptors = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log_path(self) -> Path:
        """Return where the current run logs to."""
        return self.directory / f"log-{self.runs}"

    @property
    def pid(self) -> int | None:
        """Return the process id, None while nothing runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def exit_code(self) -> int | None:
        """Return how the last run ended, negative for a signal; None if it runs or never ran."""
        return self._process.poll() if self._process is not None else None

    def start(self, *flags: str) -> None:
        """Start a process with ``flags`` besides the usual ones; returns at once."""
        if self.pid is not None:
            raise LabError(f"{self.directory.name}: the daemon runs already")
        self.runs += 1
        self.notify.clear()
        source = str(Path(flanneld.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        env = environment(NOTIFY_SOCKET=str(self.notify.path), PYTHONPATH=path, PYTHONSAFEPATH="1") | self.env
        with self.log_path.open("wb") as log:
            argv = (*self.command, f"--subnet-file={self.subnet_file}", *self.flags, *flags)
            kept = dict(self.notify.kept) if self.keeps_descriptors else {}
            if self.keeps_descriptors:
                env |= {"FDSTORE": "4", "LISTEN_FDS": str(len(kept)), "LISTEN_FDNAMES": ":".join(kept)}
                argv = (sys.executable, "-c", _GIVE, ",".join(map(str, kept.values())), *argv)
            self._process = self.namespace.spawn(*argv, output=log, env=env, fds=tuple(kept.values()))

    def wait_ready(self, timeout_s: float = 30.0) -> float:
        """Return the monotonic time of READY=1; raises LabError with the log's end if it does not come."""
        while (at := self.notify.wait("READY", "1", min(timeout_s, 0.1))) is None:
            timeout_s -= 0.1
            if self.exit_code is not None:
                raise LabError(f"{self.directory.name}: the daemon ended with {self.exit_code}:{self.tail()}")
            if timeout_s <= 0:
                raise LabError(f"{self.directory.name}: the daemon is not ready: {self.notify.status}{self.tail()}")
        return at

    def signal(self, number: int) -> None:
        """Send a signal to the running process."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def wait_exit(self, timeout_s: float = 10.0) -> int:
        """Return the exit code once the process has ended; raises LabError if it does not."""
        if self._process is None:
            raise LabError(f"{self.directory.name}: the daemon was never started")
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as e:
            raise LabError(f"{self.directory.name}: the daemon still runs after {timeout_s:g} s:{self.tail()}") from e

    def stop(self, timeout_s: float = 10.0) -> int:
        """Send SIGTERM and return the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait_exit(timeout_s)

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        self.signal(signal.SIGKILL)
        self.wait_exit()

    def restart(self, *flags: str, timeout_s: float = 30.0) -> None:
        """Stop, start and wait until it is ready again; either may take ``timeout_s``."""
        self.stop(timeout_s)
        self.start(*flags)
        self.wait_ready(timeout_s)

    def log(self, *, all_runs: bool = False) -> str:
        """Return what the current run, or every run, has logged."""
        paths = [self.directory / f"log-{n}" for n in range(1 if all_runs else self.runs, self.runs + 1)]
        return "".join(p.read_text(errors="replace") for p in paths if p.exists())

    def tail(self, lines: int = 4) -> str:
        """Return the log's last lines, to be put behind an error message."""
        return "".join(f"\n  {line}" for line in self.log().strip().splitlines()[-lines:]) or "\n  (nothing logged)"

    def subnet_env(self) -> dict[str, str]:
        """Return the content of subnet.env, empty while there is none."""
        try:
            text = self.subnet_file.read_text()
        except FileNotFoundError:
            return {}
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def close(self) -> None:
        """End the process, if one runs, and the listener."""
        if self.pid is not None:
            self.kill()
        self.notify.close()


class Pod:
    """A container's network: a namespace with one address of its host's subnet per family."""

    def __init__(self, namespace: Namespace, host: Host, addresses: Sequence[Interface], mtu_bytes: int) -> None:
        self.namespace, self.host, self.mtu_bytes = namespace, host, mtu_bytes
        self.addresses = tuple(addresses)

    def address(self, family: int = 4) -> str:
        """Return the address of a family; raises LabError if the pod has none."""
        for a in self.addresses:
            if a.version == family:
                return str(a.ip)
        raise LabError(f"{self.namespace.name} has no IPv{family} address")

    def ping(self, other: Pod, family: int = 4, count: int = 3) -> tuple[int, float | None]:
        """Send packets of full size that must not be fragmented; return answers and mean round trip in ms."""
        headers = 28 if family == 4 else 48
        return self.namespace.ping(
            other.address(family), count=count, payload_bytes=self.mtu_bytes - headers, dont_fragment=True
        )


class Host:
    """A machine of the lab: a namespace with ``eth0`` on the common switch, a daemon and containers.

    ``v4`` and ``v6`` are its addresses there, None if it has none of that family.
    """

    def __init__(
        self, name: str, namespace: Namespace, daemon: Daemon, v4: IPv4Interface | None, v6: IPv6Interface | None
    ) -> None:
        self.name, self.namespace, self.daemon, self.v4, self.v6 = name, namespace, daemon, v4, v6
        self.pods: list[Pod] = []

    def __repr__(self) -> str:
        return f"Host({self.name})"

    @property
    def address(self) -> str:
        """Return the host's own address, IPv4 if it has one."""
        return str(self.addresses[0].ip)

    @property
    def pod(self) -> Pod:
        """Return the first container; raises LabError if there is none."""
        if not self.pods:
            raise LabError(f"{self.name} has no container")
        return self.pods[0]

    @property
    def addresses(self) -> list[Interface]:
        """Return the host's addresses on the switch, IPv4 first."""
        return [a for a in (self.v4, self.v6) if a is not None]

    def run(self, *argv: str, check: bool = True, timeout_s: float = 30.0) -> str:
        """Run a tool on the host and return its output; raises CommandError."""
        return self.namespace.run(*argv, check=check, timeout_s=timeout_s)

    def subnet_env(self) -> dict[str, str]:
        """Return the content of the host's subnet.env, empty while there is none."""
        return self.daemon.subnet_env()

    def gateways(self) -> list[Interface]:
        """Return the container bridge's addresses: those that subnet.env names, IPv4 first."""
        env = self.subnet_env()
        texts = (env.get("FLANNEL_SUBNET"), env.get("FLANNEL_IPV6_SUBNET"))
        return [ip_interface(text) for text in texts if text]

    def add_pod(self, namespace: Namespace) -> Pod:
        """Wire a container as a CNI plugin would: bridge cni0 with the subnet's first address, a veth pair."""
        gateways, mtu = self.gateways(), int(self.subnet_env().get("FLANNEL_MTU", "0"))
        if not gateways or not mtu:
            raise LabError(f"{self.name}: {self.daemon.subnet_file} names no subnet or MTU:{self.daemon.tail()}")
        if self.namespace.link("cni0") is None:
            # A fixed address, or the bridge would take over that of its lowest port and change it later.
            self.namespace.ip("link add cni0 address 02:00:00:00:00:01 type bridge")
            self.namespace.ip(
                f"link set cni0 mtu {mtu} up", *(f"addr replace {g} dev cni0 {_nodad(g)}" for g in gateways)
            )
        port = f"pod{len(self.pods)}"
        self.namespace.ip(
            f"link add {port} mtu {mtu} type veth peer name eth0 mtu {mtu} netns {namespace.name}",
            f"link set {port} master cni0 up",
        )
        own = [ip_interface(f"{g.network[2 + len(self.pods)]}/{g.network.prefixlen}") for g in gateways]
        namespace.ip(
            "link set eth0 up",
            *(f"addr add {a} dev eth0 {_nodad(a)}" for a in own),
            *(f"route add default via {g.ip}" for g in gateways),
        )
        pod = Pod(namespace, self, own, mtu)
        self.pods.append(pod)
        return pod


def _nodad(address: Interface) -> str:
    return "nodad" if address.version == 6 else ""
