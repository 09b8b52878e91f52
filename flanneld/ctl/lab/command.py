"""``flannelctl lab``: builds, measures, prints, removes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, cast

from rich.console import Console
from rich.status import Status

from flanneld.ctl.lab import measure, report, traces
from flanneld.ctl.lab.errors import LabError
from flanneld.ctl.lab.hosts import OWN_COMMAND
from flanneld.ctl.lab.lab import FamilyChoice, Lab, network_config
from flanneld.ctl.lab.state import HostState, missing, observe, peer_leases

_PLAIN_WIDTH = 140
_SETTLE_S = 10.0
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asked for.

    ``options`` are further keys of the config's ``Backend``. ``seconds`` is
    the length of each throughput test, 0 for none. An empty ``daemon`` is the one beside the running interpreter.
    """

    hosts: int
    backend: str
    options: Mapping[str, Any]
    family: str
    seconds: int
    timeout_s: float
    daemon: tuple[str, ...]
    keep: bool


def backend_options(words: Sequence[str]) -> dict[str, Any]:
    """Return what ``KEY=VALUE`` words say; a value that is no JSON is text. Raises ValueError for other words."""
    found: dict[str, Any] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not key or not sign:
            raise ValueError(f"{word!r} is not KEY=VALUE")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


class InterruptedLab(BaseException):
    """A signal asked for the end."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


def clean() -> int:
    """Remove every lab whose owner is gone; return the exit code."""
    removed = traces.sweep(kept=True)
    for prefix in removed:
        print(f"removed {prefix}")
    if not removed:
        print("nothing to remove")
    return 0


def show(wish: Wish) -> int:
    """Build a lab, print what it does, remove it; return the exit code.

    0: everything works. 1: something does not. 128 + N: ended by signal N.
    """
    console = Console(width=None if Console().is_terminal else _PLAIN_WIDTH, highlight=False)
    if wish.family != "v4":
        console.print("The config asks for IPv6; what of it is carried is the daemon's decision.")
    with _progress(console) as say, _interruptible():
        try:
            faults = _faults(wish, console, say)
        except LabError as e:
            first, *rest = str(e).splitlines()
            console.print(f"The lab failed: {first}", style=report.BAD, markup=False, soft_wrap=True)
            console.print("\n".join(rest), markup=False, soft_wrap=True)
            return 1
        except InterruptedLab as e:
            console.print(f"Ended by {e}; the lab is removed.", style=report.BAD)
            return 128 + e.number
    if faults:
        console.print(f"{len(faults)} fault(s):", style=report.BAD)
        for fault in faults:
            console.print(f"  {fault}", markup=False)
        return 1
    console.print("Every container reaches every other; no entry is missing.", style=report.GOOD)
    return 0


def _faults(wish: Wish, console: Console, say: Callable[[str], None]) -> list[str]:
    """Build, examine and remove or keep the lab; an interrupted one is never kept. Raises LabError."""
    keep, family = wish.keep, cast(FamilyChoice, wish.family)
    config = network_config(wish.backend, family)
    with Lab(
        wish.hosts,
        family=family,
        config=config | {"Backend": config["Backend"] | wish.options},
        command=wish.daemon or OWN_COMMAND,
        ready_timeout_s=wish.timeout_s,
        start=False,
        say=say,
    ) as lab:
        try:
            lab.start()
            return _examine(lab, wish, console, say)
        except InterruptedLab:
            keep = False
            raise
        finally:
            _ignore_endings()
            if keep:
                lab.keep()
                _explain(lab, console)


def _examine(lab: Lab, wish: Wish, console: Console, say: Callable[[str], None]) -> list[str]:
    """Print leases, state and reachability; return the faults."""
    say("pinging")
    found = list(measure.reach(lab, _SETTLE_S))
    throughput: dict[tuple[str, str], float | None] = {}
    if wish.seconds and measure.can_measure():
        for source, target in measure.measured_pairs(lab):
            say(f"throughput {source.name} to {target.name}")
            throughput[source.name, target.name] = measure.throughput_bps(source.pod, target.pod, wish.seconds)
    say("reading state")
    values = lab.etcd.leases()
    leases, faults = peer_leases(values), []
    console.print(report.leases_table(values, lab.hosts))
    for host in lab.hosts:
        state: HostState = observe(host)
        gaps = missing(state, frozenset(g.network for g in host.gateways()), leases)
        faults += [f"{host.name} lacks {gap}" for gap in gaps]
        console.print(report.host_table(host, state, gaps))
    if found:
        console.print(report.reach_table(found, throughput))
    if wish.seconds and not measure.can_measure():
        console.print("Throughput was not measured: iperf3 is not installed.")
    faults += [
        f"{r.source.name} to {r.target.name}, IPv{r.family}: {r.answers} of {measure.PINGS} answers"
        for r in found
        if not r.complete
    ]
    if len(values) < len(lab.hosts):
        faults.append(f"{len(lab.hosts)} hosts, but {len(values)} lease(s)")
    return faults


def _explain(lab: Lab, console: Console) -> None:
    """Say what can be done with a lab that stays."""
    console.print("\nThe lab stays up.", style="bold")
    for host in lab.hosts:
        console.print(f"  {host.name}             ip netns exec {host.namespace.name} bash", soft_wrap=True)
        for pod in host.pods:
            console.print(f"  its container  ip netns exec {pod.namespace.name} bash", soft_wrap=True)
        console.print(f"  its log        {host.daemon.log_path}", soft_wrap=True)
    etcdctl = f"ip netns exec {lab.switch.name} env ETCDCTL_API=3 etcdctl get --prefix {lab.etcd.prefix}"
    console.print(f"  datastore      {etcdctl}", soft_wrap=True)
    console.print("  remove it      flannelctl lab --clean\n", soft_wrap=True)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Give a function that tells what is being done: in place on a terminal, line by line elsewhere."""
    if not console.is_terminal:
        yield lambda text: console.print(f"- {text}", markup=False)
        return
    with Status("lab", console=console) as status:
        yield status.update


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn the first signal that asks for the end into InterruptedLab; further ones do not disturb the removal."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        del frame
        _ignore_endings()
        raise InterruptedLab(number)

    before = {number: signal.signal(number, interrupt) for number in _ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_endings() -> None:
    for number in _ENDINGS:
        signal.signal(number, signal.SIG_IGN)
