"""A real systemd for one host of the lab, and the unit that this project ships as its service.

The service manager is process 1 of a process namespace of its own. Network and
containers are the host's. Its root file system is the machine's, read only; what it
writes to is its own: /run, /tmp, /var/lib, and the control groups. Of /proc/sys
only the network's part can be written, for all else is not the host's alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.tools import environment, poll, run

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "systemd" / "flanneld.service"
MANAGER = Path("/lib/systemd/systemd")
TARGETS = ("basic", "multi-user", "network-online", "shutdown", "sysinit")
"""Units that every service refers to; here they want nothing."""

_ENTER = 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"'
_BOOT = """
set -e
shared=$1 tree=$2 prefix=$3
mount --make-rprivate /
mount --bind /proc/sys /proc/sys
mount --bind /proc/sys/net /proc/sys/net
mount -o remount,bind,ro /proc/sys
mount -t tmpfs srv /srv
mkdir /srv/tree /srv/prefix /srv/shared
mount --bind "$tree" /srv/tree
mount --bind "$prefix" /srv/prefix
mount --bind "$shared" /srv/shared
for own in /tmp /var/tmp /var/lib /run; do mount -t tmpfs own "$own"; done
mkdir /run/flannel /run/generators
mount --bind /srv/shared/run /run/flannel
mount --bind /run/generators /lib/systemd/system-generators
mount -t cgroup2 cgroup /sys/fs/cgroup
mount -o remount,bind,ro /
export container=lab SYSTEMD_UNIT_PATH=/srv/shared/units
exec /lib/systemd/systemd --system --unit=basic.target --show-status=no --log-target=null
"""
_DROP_IN = """\
[Service]
EnvironmentFile=
EnvironmentFile=/srv/shared/environment
ExecStart=
ExecStart=/srv/prefix/bin/python -m flanneld $FLANNEL_OPTIONS
StandardOutput=append:/srv/shared/log
StandardError=inherit
"""


def groups() -> Path | None:
    """Return where control groups of version 2 are mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    return None


needs_systemd = pytest.mark.skipif(
    not MANAGER.exists() or shutil.which("systemctl") is None or groups() is None,
    reason="needs systemd, and control groups of version 2",
)


class Service:
    """The unit ``flanneld.service`` on a host; ``shared`` is what systemd, the unit and the test all see."""

    def __init__(self, host: Host, shared: Path, process: subprocess.Popen[bytes]) -> None:
        self.host, self.shared, self._process = host, shared, process

    def systemctl(self, *words: str, check: bool = True, timeout_s: float = 60.0) -> str:
        """Run systemctl beside that systemd."""
        return run(
            "nsenter", f"--target={self._manager()}", "--all", "systemctl", *words, check=check, timeout_s=timeout_s
        )

    def start(self) -> None:
        """Start the service; returns once systemd says that it is ready."""
        self.systemctl("start", "flanneld")

    def shows(self, name: str) -> str:
        """Return a property of the service."""
        return self.systemctl("show", "--value", f"--property={name}", "flanneld").strip()

    @property
    def pid(self) -> int:
        """The daemon's process id as the test sees it."""
        inside = self.shows("MainPID")
        for status in Path("/proc").glob("[0-9]*/status"):
            with suppress(FileNotFoundError, ProcessLookupError):
                ids = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:")).split()[1:]
                if len(ids) > 1 and ids[-1] == inside and self._inside(int(ids[0])):
                    return int(ids[0])
        raise AssertionError(f"no process {inside}:\n{self.log()}")

    def configure(self, drop_in: str = "", **variables: str) -> None:
        """Write the service's environment and a drop-in besides the one that it needs here; for its next start."""
        (self.shared / "environment").write_text("".join(f'{k}="{v}"\n' for k, v in variables.items()))
        (self.shared / "units" / "flanneld.service.d" / "20-test.conf").write_text(drop_in)
        if self._process.poll() is None and self._ready():
            self.systemctl("daemon-reload")

    def log(self) -> str:
        """Return what the daemon has said since the first start."""
        with suppress(FileNotFoundError):
            return (self.shared / "log").read_text()
        return ""

    def _manager(self) -> int:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    def _inside(self, pid: int) -> bool:
        return Path(f"/proc/{pid}/ns/pid").samefile(f"/proc/{self._manager()}/ns/pid")

    def _ready(self) -> bool:
        try:
            return self.systemctl("is-active", "basic.target", check=False).strip() == "active"
        except (FileNotFoundError, IndexError):
            return False


@contextmanager
def booted(host: Host) -> Iterator[Service]:
    """Boot a systemd on a host, whose ``daemon`` is left alone but for the place of its subnet.env."""
    shared = host.daemon.directory / "systemd"
    drop_ins = shared / "units" / "flanneld.service.d"
    drop_ins.mkdir(parents=True)
    (shared / "run").mkdir()
    host.daemon.subnet_file = shared / "run" / "subnet.env"
    shutil.copy(UNIT, shared / "units")
    (drop_ins / "10-lab.conf").write_text(_DROP_IN)
    for name in TARGETS:
        (shared / "units" / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    place = groups()
    assert place is not None
    group = place / f"{host.namespace.name}-systemd"
    group.mkdir()
    inside = host.namespace.argv("unshare", "-fpmCiu", "--mount-proc", "--kill-child")
    boot = ("sh", "-c", _BOOT, "sh", str(shared), str(ROOT), sys.prefix)
    with (shared / "manager").open("wb") as output:
        process = subprocess.Popen(
            ("sh", "-c", _ENTER, "sh", str(group), *inside, *boot),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
    try:
        service = Service(host, shared, process)
        poll("systemd", service._ready, timeout_s=30)
        yield service
    finally:
        process.kill()  # and with it all that runs under this systemd
        process.wait()
        poll("no process", lambda: _removed(group), timeout_s=10)


def _removed(group: Path) -> bool:
    """Remove a control group and those below; whether that was possible: a process that is ending still counts."""
    try:
        for path in sorted(group.rglob("*/"), reverse=True):
            path.rmdir()
        group.rmdir()
    except OSError:
        return not group.exists()
    return True


def settings(host: Host, etcd: str, **more: str) -> Mapping[str, str]:
    """Return the variables that a host of the lab needs."""
    return {
        "FLANNELD_ETCD_ENDPOINTS": etcd,
        "FLANNELD_IFACE": "eth0",
        "FLANNELD_HEALTHZ_PORT": "8081",
        "FLANNELD_HEALTHZ_IP": "127.0.0.1",
        "PYTHONPATH": "/srv/tree",
        "PYTHONDONTWRITEBYTECODE": "1",
        **more,
    }
