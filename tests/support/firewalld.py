"""Debian's firewalld in a namespace: its own bus, its own /run, and nothing of the machine's."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Literal

from tests.support.netns import Namespace

UNPACKED = Path(os.environ.get("FIREWALLD", "/var/cache/flanneld-test-firewalld")) / "tree"
"""Where scripts/install-debian unpacks it; a firewalld that is installed is not used: it would be another one."""

PYTHON = "/usr/bin/python3"
DEADLINE_S = 30.0

BUS = """\
<busconfig>
  <type>system</type>
  <listen>unix:path={socket}</listen>
  <policy context="default">
    <allow send_destination="*" eavesdrop="true"/>
    <allow eavesdrop="true"/>
    <allow own="*"/>
  </policy>
</busconfig>
"""


def missing() -> str:
    """Return what firewalld lacks here, '' if nothing."""
    if not (UNPACKED / "usr/sbin/firewalld").exists():
        return f"needs firewalld unpacked in {UNPACKED}"
    return "" if shutil.which("dbus-daemon") else "needs dbus-daemon"


class Firewalld:
    """A running firewalld. A context manager. With ``legacy``, ``iptables`` is the legacy variant for it."""

    def __init__(
        self, namespace: Namespace, directory: Path, backend: Literal["iptables", "nftables"], *, legacy: bool = False
    ) -> None:
        self.namespace, self.directory = namespace, directory
        libraries = str(next((UNPACKED / "usr/lib").glob("*-linux-gnu*")))
        socket = directory / "bus"
        self.env = os.environ | {
            "PYTHONPATH": str(UNPACKED / "usr/lib/python3/dist-packages"),
            "LD_LIBRARY_PATH": libraries,
            "GI_TYPELIB_PATH": f"{libraries}/girepository-1.0",
            "DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={socket}",
        }
        (directory / "bus.conf").write_text(BUS.format(socket=socket))
        shutil.copytree(UNPACKED / "etc/firewalld", directory / "etc")
        config = directory / "etc/firewalld.conf"
        config.write_text(config.read_text().replace("FirewallBackend=nftables", f"FirewallBackend={backend}"))
        assert f"\nFirewallBackend={backend}\n" in config.read_text()
        self._log = (directory / "log").open("wb")
        self._bus = self._start("dbus-daemon", f"--config-file={directory}/bus.conf", "--nofork", "--nopidfile")
        self._daemon = self._start(*namespace.argv("unshare", "-m", "sh", "-ec", self._script(legacy)))

    def __enter__(self) -> Firewalld:
        try:
            self._await_running()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def command(self, *options: str, check: bool = True) -> str:
        """Run firewall-cmd and return what it printed; it ends when the daemon has done what it was told."""
        argv = [PYTHON, str(UNPACKED / "usr/bin/firewall-cmd"), *options]
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
        assert not check or done.returncode == 0, f"{options}: {done.stdout}{done.stderr}{self.log()}"
        return done.stdout.strip()

    def stop(self) -> None:
        """End the daemon, which removes its rules."""
        self._daemon.terminate()
        self._daemon.wait(DEADLINE_S)

    def close(self) -> None:
        """End whatever still runs."""
        for process in (self._daemon, self._bus):
            process.terminate()
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()

    def log(self) -> str:
        """Return what the processes have said."""
        return (self.directory / "log").read_text(errors="replace")

    def _script(self, legacy: bool) -> str:
        firewalld = f"{PYTHON} {UNPACKED}/usr/sbin/firewalld --nofork --nopid --log-target console"
        lines = ["mount --make-rprivate /", "mount -t tmpfs none /run"]
        if legacy:
            nft, other = (Path(path).resolve() for path in ("/usr/sbin/iptables-nft", "/usr/sbin/iptables-legacy"))
            lines.append(f"mount --bind {other} {nft}")
        config = f"--system-config {self.directory}/etc --default-config {UNPACKED}/usr/lib/firewalld"
        return "\n".join([*lines, f"exec {firewalld} {config}"])

    def _start(self, *argv: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv, env=self.env, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )

    def _await_running(self) -> None:
        end = time.monotonic() + DEADLINE_S
        while self.command("--state", check=False) != "running":
            assert self._daemon.poll() is None, self.log()
            assert time.monotonic() < end, self.log()
            time.sleep(0.1)
