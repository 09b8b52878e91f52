"""The command line of flannelctl."""

from __future__ import annotations

import shlex
import sys

import click

from flanneld import __version__

CONTEXT = {"help_option_names": ["-h", "--help"]}


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="flannelctl", message="%(prog)s %(version)s")
def main() -> None:
    """Tools for operators of flanneld."""


# The flags of docker-opts are those of mk-docker-opts.sh: click only carries them.
@main.command(
    "docker-opts",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Write Docker's options from subnet.env, as mk-docker-opts.sh does.",
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def docker_opts(args: tuple[str, ...]) -> None:
    """Write Docker's options from subnet.env."""
    from flanneld.ctl import docker_opts as command  # noqa: PLC0415 - each command loads only what it needs

    sys.exit(command.main(args))


@main.command("install-cni", short_help="Install CNI configuration and plugin, each in one step.")
@click.option("--plugin", metavar="DIRECTORY", default="", help="Install the plugin there, as flannel.")
@click.argument("config", nargs=-1, metavar="[SOURCE TARGET]")
@click.pass_context
def install_cni(context: click.Context, *, plugin: str, config: tuple[str, ...]) -> None:
    """Install a CNI configuration, the CNI plugin, or both.

    SOURCE is written beside TARGET and renamed, so that a container runtime
    sees the old file or the new one. Exits 1 if that cannot be done, or with
    other than two arguments. The plugin is one file and needs /usr/bin/python3.
    """
    from flanneld.ctl import install_cni as command  # noqa: PLC0415 - each command loads only what it needs

    if len(config) != (0 if plugin and not config else 2):
        click.echo(context.get_usage(), err=True)
        sys.exit(1)
    sys.exit(command.main(config, plugin))


@main.command("lab", short_help="Build a network of namespaces on this machine and show that it works.")
@click.option("--hosts", default=3, show_default=True, type=click.IntRange(1, 200), help="How many hosts.")
@click.option("--backend", default="vxlan", show_default=True, metavar="TYPE", help="The config's Backend.Type.")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Another key of the config's Backend, such as DirectRouting=true; the value is JSON or text. Repeatable.",
)
@click.option(
    "--family",
    default="v4",
    show_default=True,
    type=click.Choice(["v4", "v6", "dual"]),
    help="Address families of the config. What is carried is the daemon's decision.",
)
@click.option(
    "--seconds", default=1, show_default=True, type=click.IntRange(0), help="Length of each throughput test; 0: none."
)
@click.option("--timeout", default=60, show_default=True, type=click.IntRange(1), help="Seconds to wait for readiness.")
@click.option("--daemon", metavar="COMMAND", help="Run this instead of the flanneld beside flannelctl.")
@click.option("--keep", is_flag=True, help="Leave the lab up; --clean removes it.")
@click.option("--clean", is_flag=True, help="Only remove labs that were kept or left behind by a crash.")
def lab(
    *,
    hosts: int,
    backend: str,
    options: tuple[str, ...],
    family: str,
    seconds: int,
    timeout: int,
    daemon: str | None,
    keep: bool,
    clean: bool,
) -> None:
    """Build a flannel network in network namespaces and show that it works.

    N hosts with one real flanneld and one container each, a switch, a real
    etcd. Prints the leases, each host's devices, routes, neighbours and
    forwarding entries, and what the containers reach. Exits 0 only if every
    container reaches every other and no entry is missing. Needs root; touches
    nothing outside its namespaces and removes them at the end.
    """
    from flanneld.ctl.lab import command  # noqa: PLC0415 - each command loads only what it needs

    if clean:
        sys.exit(command.clean())
    try:
        chosen = command.backend_options(options)
    except ValueError as e:
        raise click.BadParameter(str(e), param_hint="--option") from e
    wish = command.Wish(
        hosts=hosts,
        backend=backend,
        options=chosen,
        family=family,
        seconds=seconds,
        timeout_s=timeout,
        daemon=tuple(shlex.split(daemon or "")),
        keep=keep,
    )
    sys.exit(command.show(wish))


def run() -> None:
    """Entry point of the console script."""
    main(prog_name="flannelctl")


if __name__ == "__main__":
    run()
