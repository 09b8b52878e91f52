"""Backend ``extension``: an operator's commands carry the overlay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from backends.api import Carrier, OnLink, Setting
from backends.dataplane.model import DesiredState, Link, LinkSpec
from backends.extension.carrier import ExtensionCarrier
from backends.extension.commands import CommandPlan, words
from subnet.errors import ConfigError
from subnet.model import Lease, LeaseAttrs, Subnets
from subnet.options import OptionReader

log = logging.getLogger(__name__)

TYPE = "extension"
COMMANDS = ("PreStartupCommand", "PostStartupCommand", "SubnetAddCommand", "SubnetRemoveCommand", "ShutdownCommand")
TIMEOUT_S = 30


class ExtensionBackend:
    """Commands at the start, per peer and at the end. Source: upstream pkg/backend/extension/extension.go."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._plan = plan_of(setting)
        self._carrier: ExtensionCarrier | None = None

    def carrier(self, earlier: Carrier | None, wake: Callable[[], None]) -> Carrier:
        """Return the earlier carrier while commands and own addresses are the same."""
        if isinstance(earlier, ExtensionCarrier) and earlier.plan == self._plan:
            self._carrier = earlier
        else:
            if earlier is not None:
                earlier.close()
            for name in self._plan.suspects():
                log.warning(
                    "Backend.%s looks like shell, but runs without one; ExtensionShell: true gives it one", name
                )
            self._carrier = ExtensionCarrier(self._plan, wake)
        return self._carrier

    def links(self, macs: Mapping[str, str], binding: bool) -> tuple[LinkSpec, ...]:
        """No device of ours; the commands make their own."""
        return ()

    def device_macs(self, attrs: LeaseAttrs) -> dict[str, str]:
        """No device, no MAC."""
        return {}

    def attrs(self, links: Mapping[str, Link]) -> LeaseAttrs:
        """The interface's own addresses, not the announced ones, and what PreStartupCommand printed."""
        plan = self._plan
        return LeaseAttrs(plan.v4, plan.v6, TYPE, self._carrier.output if self._carrier is not None else None)

    def mtu_bytes(self) -> int:
        """The external interface's MTU: what the commands add is not known."""
        return self._setting.interface.mtu_bytes

    def desired(self, own: Subnets, peers: Collection[Lease], on_link: OnLink) -> DesiredState:
        """Nothing, and nothing there is ours: routes of the commands look like those Go flannel leaves behind."""
        return DesiredState(frozenset(), self._setting.interface.name, frozenset())


def plan_of(setting: Setting) -> CommandPlan:
    """Read and check the options. Raises ConfigError."""
    config, interface = setting.config, setting.interface
    reader = OptionReader(config.backend)
    shell = reader.boolean("ExtensionShell", False)
    commands = {name: reader.text(name).strip() for name in COMMANDS}
    for name, command in commands.items():
        if not shell:
            try:
                words(command, {})
            except ValueError as error:
                raise ConfigError(f"Backend.{name} {command!r}: {error}") from error
    return CommandPlan(
        commands,
        shell,
        float(reader.integer("CommandTimeout", TIMEOUT_S, 1, 3600)),
        str(config.ipv4.network) if config.ipv4 is not None else "0.0.0.0/0",
        interface.v4 if 4 in config.families else None,
        interface.v6 if 6 in config.families else None,
    )


BACKEND = ExtensionBackend
