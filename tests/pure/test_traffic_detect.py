from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path

import pytest

from flanneld.traffic import commands
from flanneld.traffic.commands import CommandFirewall, Tools, explain
from flanneld.traffic.detect import Census, Evidence, census, choose, find_tools, parse_version
from flanneld.traffic.hostcheck import HostCheck
from flanneld.traffic.ports import Variant
from flanneld.traffic.render import Saved, TablePlan
from flanneld.traffic.rules import Pair, Rule, TrafficPolicy, decide
from flanneld.traffic.runner import Finished, Runner
from subnet.clock import SystemClock
from subnet.errors import RuleError
from subnet.model import Family

pytestmark = pytest.mark.pure

BOTH: frozenset[Variant] = frozenset({"nft", "legacy"})
NOTHING = Census()
SOME = Census(rules=3)
KUBE = Census(engine_chains=5, rules=9)


@pytest.mark.parametrize(
    ("default", "nft", "legacy", "expected"),
    [
        ("nft", NOTHING, NOTHING, "nft"),
        ("legacy", NOTHING, NOTHING, "legacy"),
        ("nft", NOTHING, SOME, "legacy"),
        ("legacy", SOME, NOTHING, "nft"),
        ("nft", Census(rules=100), KUBE, "legacy"),
        ("legacy", KUBE, Census(rules=100), "nft"),
        ("legacy", SOME, SOME, "legacy"),
        ("nft", KUBE, KUBE, "nft"),
    ],
)
def test_F09_the_variant_is_where_other_rules_live(
    default: Variant, nft: Census, legacy: Census, expected: Variant
) -> None:
    assert choose(Evidence(default, BOTH, {"nft": nft, "legacy": legacy}))[0] == expected


def test_F09_without_any_usable_variant_there_is_a_reason() -> None:
    with pytest.raises(RuleError, match="restore"):
        choose(Evidence("nft", frozenset()))


def test_F09_a_variant_without_its_programs_gives_way_to_the_other() -> None:
    variant, why = choose(Evidence("nft", frozenset({"nft"}), {"legacy": KUBE}))
    assert variant == "nft"
    assert "legacy" in why


def test_F09_our_own_rules_do_not_decide() -> None:
    saved = Saved(
        {
            "nat": {
                "POSTROUTING": (
                    '-m comment --comment "flanneld masq" -j FLANNEL-POSTRTG',
                    '-s 10.5.0.0/16 -d 10.5.0.0/16 -m comment --comment "flanneld masq" -j RETURN',
                    "-j KUBE-POSTROUTING",
                ),
                "FLANNEL-POSTRTG": ("-s 10.5.0.0/16 -j RETURN",),
                "KUBE-POSTROUTING": (),
                "DOCKER": ("-j RETURN",),
            }
        }
    )
    assert census(saved) == Census(engine_chains=2, rules=2)


@pytest.mark.parametrize(
    ("text", "version", "variant"),
    [
        ("iptables v1.8.9 (nf_tables)\n", (1, 8, 9), "nft"),
        ("iptables v1.8.9 (legacy)\n", (1, 8, 9), "legacy"),
        ("iptables v1.4.7\n", (1, 4, 7), "legacy"),
        ("iptables v1.6.2", (1, 6, 2), "legacy"),
    ],
)
def test_F10_version(text: str, version: tuple[int, ...], variant: Variant) -> None:
    assert parse_version(text) == (version, variant)


def test_F10_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(RuleError, match="segfault"):
        parse_version("segfault\n")


@pytest.mark.parametrize(
    ("version", "fully", "waits"),
    [((1, 4, 7), False, False), ((1, 6, 1), False, False), ((1, 6, 2), True, True), ((1, 8, 9), True, True)],
)
def test_F10_options_by_version(version: tuple[int, ...], fully: bool, waits: bool) -> None:
    tools = Tools("legacy", version)
    assert (tools.random_fully, tools.restore_waits) == (fully, waits)


def finder(*present: str) -> Runner:
    class Found(Runner):
        def find(self, *names: str) -> str | None:
            return next((f"/x/{name}" for name in names if name in present), None)

    return Found()


def test_programs_of_old_versions_have_plain_names() -> None:
    runner = finder("iptables-save", "iptables-restore", "iptables-legacy-save", "iptables-legacy-restore")
    tools = find_tools(runner.find, (1, 4, 7), "legacy", "legacy")
    assert (tools.save, tools.restore) == ({4: "/x/iptables-save"}, {4: "/x/iptables-restore"})
    assert not tools.covers(6)
    assert not find_tools(runner.find, (1, 4, 7), "legacy", "nft").save


def test_plain_names_belong_to_the_default_variant_only() -> None:
    runner = finder("iptables-save", "iptables-restore", "ip6tables-save", "ip6tables-restore")
    assert find_tools(runner.find, (1, 8, 9), "nft", "nft").covers(6)
    assert not find_tools(runner.find, (1, 8, 9), "nft", "legacy").covers(4)


def test_an_error_of_restore_shows_the_line_it_names() -> None:
    text = "*nat\n-A POSTROUTING -j NOWHERE\nCOMMIT\n"
    assert explain("iptables-restore: line 2 failed\n", text) == (
        "iptables-restore: line 2 failed; line 2 is: -A POSTROUTING -j NOWHERE"
    )
    said = 'unknown option "--x"\nError occurred at line: 2\nTry `iptables-restore -h\' for more information.\n'
    assert explain(said, text).endswith("at line: 2; line 2 is: -A POSTROUTING -j NOWHERE")
    assert explain("", text) == "no message"
    assert explain("line 77 failed", text) == "line 77 failed"


def test_restore_waits_for_the_lock_only_if_it_can() -> None:
    seen: list[list[str]] = []

    class Recorder(Runner):
        def run(self, argv: Sequence[str], text: str = "") -> Finished:
            seen.append([*argv[1:], text])
            return Finished(0, "", "")

    plan = TablePlan("nat", add=(("POSTROUTING", None, Rule("X")),), summary=("x",))
    for tools in (
        Tools("legacy", (1, 8, 9), {4: "save"}, {4: "restore"}),
        Tools("nft", (1, 8, 9), {4: "save"}, {4: "restore"}),
    ):
        CommandFirewall(tools, Recorder(), SystemClock()).apply(4, [plan])
    text = "*nat\n-A POSTROUTING -j X\nCOMMIT\n"
    assert seen == [["--noflush", "--wait=1", text], ["--noflush", text]]


def test_the_program_is_asked_until_our_rules_could_be_read_and_again_after_it_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []
    asked: list[bool] = []

    class Recorder(Runner):
        def run(self, argv: Sequence[str], text: str = "") -> Finished:
            ran.append(argv[0])
            return Finished(0, "", "")

    wanted = decide(TrafficPolicy(Pair(ip_network("10.5.0.0/16"), ip_network("10.5.7.0/24"))), 4)
    answers: list[Saved | None] = [None, Saved(), Saved({"filter": {"FLANNEL-FWD": ("-j ACCEPT",)}}), Saved(), Saved()]

    def read(*_: object, understood: bool) -> Saved | None:
        asked.append(understood)
        return answers.pop(0)

    monkeypatch.setattr(commands, "read_chains", read)
    firewall = CommandFirewall(Tools("nft", (1, 8, 9), {4: "save"}, {4: "restore"}), Recorder(), SystemClock())
    for _ in range(4):
        firewall.look(4, wanted)
    firewall.apply(4, [])
    firewall.look(4, wanted)
    assert ran == ["save", "restore"]
    assert asked == [False, False, False, True, False]


BRIDGE = "net/bridge/bridge-nf-call-iptables"
FORWARD = "net/ipv4/ip_forward"
FORWARD6 = "net/ipv6/conf/all/forwarding"
REVERSE_PATH = "net/ipv4/conf/all/rp_filter"


def write(root: Path, values: Mapping[str, str]) -> None:
    for name, value in values.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n")


def findings(check: HostCheck, families: Sequence[Family] = (4,), *, iptables: bool = True) -> list[str]:
    return [finding.name for finding in check.findings(families, iptables=iptables)]


def test_F08_absent_bridge_filter_is_said_and_survived(tmp_path: Path) -> None:
    write(tmp_path, {FORWARD: "1"})
    (finding,) = HostCheck(finder(), sysctl=tmp_path).findings([4], iptables=True)
    assert "br_netfilter" in finding.text


def test_F08_nftables_mode_needs_no_bridge_filter(tmp_path: Path) -> None:
    write(tmp_path, {FORWARD: "1"})
    assert findings(HostCheck(finder(), sysctl=tmp_path), iptables=False) == []


def test_F08_the_value_counts_too(tmp_path: Path) -> None:
    check = HostCheck(finder(), sysctl=tmp_path)
    write(tmp_path, {FORWARD: "0", BRIDGE: "0"})
    assert findings(check) == ["net.bridge.bridge-nf-call-iptables", "net.ipv4.ip_forward"]
    write(tmp_path, {FORWARD: "1", BRIDGE: "1"})
    assert findings(check) == []


def test_F08_the_module_is_tried_once(tmp_path: Path) -> None:
    class Loads(Runner):
        tried = 0

        def find(self, *names: str) -> str | None:
            return f"/sbin/{names[0]}"

        def run(self, argv: Sequence[str], text: str = "") -> Finished:
            assert argv == ["/sbin/modprobe", "br_netfilter"]
            Loads.tried += 1
            return Finished(1, "", "")

    write(tmp_path, {FORWARD: "1"})
    check = HostCheck(Loads(), sysctl=tmp_path)
    assert findings(check) == findings(check) != []
    assert Loads.tried == 1


def test_managed_settings_are_set_and_others_stay(tmp_path: Path) -> None:
    write(tmp_path, {FORWARD: "0", BRIDGE: "0", FORWARD6: "0", REVERSE_PATH: "1"})
    assert findings(HostCheck(finder(), manage=True, sysctl=tmp_path)) == ["net.ipv4.conf.all.rp_filter"]
    assert [(tmp_path / name).read_text() for name in (FORWARD, BRIDGE, FORWARD6)] == ["1", "1", "0\n"]
    assert (tmp_path / REVERSE_PATH).read_text() == "1\n"
