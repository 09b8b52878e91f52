from __future__ import annotations

import contextlib
import json
from ipaddress import ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.config import parse_network_config
from subnet.errors import ConfigError
from subnet.model import BackendConfig, NetworkConfig, Pool
from subnet.options import OptionReader

pytestmark = pytest.mark.pure

KEY = "/coreos.com/network/config"
NET = '"Network":"10.5.0.0/16"'
BACKEND = '"Backend":{"Type":"vxlan"}'


def parse(text: str | bytes, *, check_pools: bool = True) -> NetworkConfig:
    return parse_network_config(text, KEY, check_pools=check_pools)


def refusal(text: str | bytes, *, check_pools: bool = True) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, check_pools=check_pools)
    assert str(caught.value).startswith(f"{KEY}: ")
    return str(caught.value).removeprefix(f"{KEY}: ")


def v4_pool(**members: object) -> Pool:
    pool = parse(json.dumps(members)).ipv4
    assert pool is not None
    return pool


def v6_pool(**members: object) -> Pool:
    config = parse(json.dumps({"EnableIPv4": False, "EnableIPv6": True, **members}))
    assert config.ipv6 is not None
    assert config.ipv4 is None
    return config.ipv6


@pytest.mark.parametrize(
    ("network", "length", "first", "last"),
    [
        ("10.3.0.0/16", 24, "10.3.1.0", "10.3.255.0"),
        ("10.0.0.0/24", 26, "10.0.0.64", "10.0.0.192"),
        ("10.0.0.0/28", 30, "10.0.0.4", "10.0.0.12"),
    ],
)
def test_default_ipv4_pool(network: str, length: int, first: str, last: str) -> None:
    pool = v4_pool(Network=network)
    assert pool == Pool(ip_network(network), length, ip_network(f"{first}/{length}"), ip_network(f"{last}/{length}"))


@pytest.mark.parametrize(
    ("network", "length", "first", "last"),
    [
        ("fc00::/48", 64, "fc00:0:0:1::", "fc00:0:0:ffff::"),
        ("fc00::/63", 65, "fc00:0:0:0:8000::", "fc00:0:0:1:8000::"),
        ("fc00::/124", 126, "fc00::4", "fc00::c"),
    ],
)
def test_default_ipv6_pool(network: str, length: int, first: str, last: str) -> None:
    pool = v6_pool(IPv6Network=network)
    assert pool == Pool(ip_network(network), length, ip_network(f"{first}/{length}"), ip_network(f"{last}/{length}"))


@pytest.mark.parametrize(("prefix", "length"), [(16, 24), (22, 24), (23, 25), (24, 26), (27, 29), (28, 30)])
def test_C05_small_networks_are_quartered(prefix: int, length: int) -> None:
    pool = v4_pool(Network=f"10.0.0.0/{prefix}")
    assert pool.subnet_len == length
    assert pool.size == 2 ** (length - prefix) - 1


@pytest.mark.parametrize("prefix", [29, 30, 31, 32])
@pytest.mark.parametrize("length", ["", ',"SubnetLen":30'])
def test_C01_network_without_room_for_subnets(prefix: int, length: str) -> None:
    text = refusal(f'{{"Network":"10.0.0.0/{prefix}"{length}}}')
    assert text.startswith(f'Network "10.0.0.0/{prefix}": ')
    assert "28" in text


@pytest.mark.parametrize("prefix", [125, 126, 128])
def test_C01_ipv6_network_without_room_for_subnets(prefix: int) -> None:
    text = refusal(f'{{{NET},"EnableIPv6":true,"IPv6Network":"fd00::/{prefix}"}}')
    assert text.startswith(f'IPv6Network "fd00::/{prefix}": ')
    assert "124" in text


@pytest.mark.parametrize("value", ["-1", '"24"', "24.5", "24.0", "1e1", "true", "[]", "{}"])
@pytest.mark.parametrize("name", ["SubnetLen", "IPv6SubnetLen"])
@pytest.mark.parametrize("check_pools", [True, False])
def test_C01_length_must_be_a_plain_integer(value: str, name: str, check_pools: bool) -> None:
    text = refusal(f'{{{NET},"{name}":{value}}}', check_pools=check_pools)
    assert text.startswith(f"{name} {json.dumps(json.loads(value))}: must be a whole number")


@pytest.mark.parametrize(("value", "nearest"), [(0, 18), (17, 18), (31, 30), (32, 30), (33, 30), (10**30, 30)])
def test_C01_length_out_of_bounds(value: int, nearest: int) -> None:
    text = refusal(f'{{{NET},"SubnetLen":{value}}}')
    assert text.startswith(f"SubnetLen {value}: ")
    assert text.endswith(f"nearest legal value is {nearest}")


@pytest.mark.parametrize(("value", "nearest"), [(49, 50), (127, 126), (128, 126)])
def test_C01_ipv6_length_out_of_bounds(value: int, nearest: int) -> None:
    text = refusal(f'{{{NET},"EnableIPv6":true,"IPv6Network":"fd00::/48","IPv6SubnetLen":{value}}}')
    assert text.startswith(f"IPv6SubnetLen {value}: ")
    assert text.endswith(f"nearest legal value is {nearest}")


@pytest.mark.parametrize(
    ("members", "field", "nearest"),
    [
        ('"SubnetMin":"10.200.0.2"', 'SubnetMin "10.200.0.2"', "10.200.0.0"),
        ('"SubnetMin":"10.200.0.33"', 'SubnetMin "10.200.0.33"', "10.200.0.64"),
        ('"SubnetMin":"10.200.0.32"', 'SubnetMin "10.200.0.32"', "10.200.0.0"),
        ('"SubnetMax":"10.200.254.254"', 'SubnetMax "10.200.254.254"', "10.200.255.0"),
        ('"SubnetMax":"10.200.255.254"', 'SubnetMax "10.200.255.254"', "10.200.255.192"),
        ('"SubnetMin":"10.199.255.0"', 'SubnetMin "10.199.255.0"', "10.200.0.0"),
        ('"SubnetMax":"10.201.0.0"', 'SubnetMax "10.201.0.0"', "10.200.255.192"),
        ('"SubnetMax":"255.255.255.255"', 'SubnetMax "255.255.255.255"', "10.200.255.192"),
        ('"SubnetMin":"10.200.9.0","SubnetMax":"10.200.8.0"', 'SubnetMin "10.200.9.0"', "10.200.8.0"),
        ('"SubnetMax":"10.200.0.0"', 'SubnetMax "10.200.0.0"', "10.200.0.64"),
    ],
)
def test_C02_bounds_off_the_subnet_grid(members: str, field: str, nearest: str) -> None:
    text = refusal(f'{{"Network":"10.200.0.0/16","SubnetLen":26,{members}}}')
    assert text.startswith(f"{field}: is ")
    assert f"nearest legal value is {nearest}" in text


def test_C02_ipv6_bounds_off_the_subnet_grid() -> None:
    text = refusal(f'{{{NET},"EnableIPv6":true,"IPv6Network":"fd00::/48","IPv6SubnetMin":"fd00:0:0:2::1"}}')
    assert text.startswith('IPv6SubnetMin "fd00:0:0:2::1": ')
    assert text.endswith("nearest legal value is fd00:0:0:2::")


@given(
    prefix=st.integers(8, 28), extra=st.integers(2, 10), low=st.integers(0, 2**32 - 1), high=st.integers(0, 2**32 - 1)
)
@settings(max_examples=150, deadline=None)
def test_C02_every_proposed_bound_is_legal(prefix: int, extra: int, low: int, high: int) -> None:
    members: dict[str, object] = {"Network": f"10.0.0.0/{prefix}", "SubnetLen": min(prefix + extra, 30)}
    members["SubnetMin"], members["SubnetMax"] = (str(ip_network(value).network_address) for value in (low, high))
    for _ in range(4):
        try:
            pool = v4_pool(**members)
        except ConfigError as error:
            field = str(error).split()[1]
            members[field] = str(error).rpartition(" ")[2]
        else:
            assert int(pool.first.network_address) <= int(pool.last.network_address)
            return
    pytest.fail(f"still refused after following every proposal: {members}")


def test_bounds_may_use_the_first_subnet_and_be_equal() -> None:
    pool = v4_pool(Network="10.5.0.0/16", SubnetMin="10.5.0.0", SubnetMax="10.5.0.0")
    assert pool.first == pool.last == ip_network("10.5.0.0/24")


@pytest.mark.parametrize(
    ("text", "place", "excerpt"),
    [
        (r"{\"Network\": 10.5.0.0/16}", "line 1 column 2", r"Network"),
        ('{"Network": 10.5.0.0/16}', "line 1 column 17", "10.5.0.0/16"),
        ('{\n  "Network": "10.5.0.0/16",\n  "SubnetLen": x24\n}', "line 3 column 16", "x24"),
        ("{" + NET + ",}", "line 1 column 2", "10.5.0.0/16"),
        ("{" + NET + "} x", "line 1 column 27", "} x"),
        ("{" + NET + "}{}", "line 1 column 26", "}{}"),
        ("", "line 1 column 1", "the text is empty"),
        ("  \n", "line 2 column 1", "the text is empty"),
        ('{"Network":"10.5.0.0/16"', "line 1 column 25", "10.5.0.0/16"),
        ('{"Network":"10.5.0.0/16', "line 1 column 12", "10.5.0.0/16"),
        ('{"a":"NaN", "SubnetLen":NaN}', "line 1 column 25", "NaN"),
        ('{"SubnetLen":-Infinity}', "line 1 column 14", "-Infinity"),
        ('{"a":1.5,"b":1e999}', "line 1 column 14", "1e999"),
    ],
)
def test_C03_broken_json_is_located(text: str, place: str, excerpt: str) -> None:
    for variant in (text, text.encode()):
        message = refusal(variant)
        assert message.startswith("invalid JSON, ")
        assert place in message
        assert excerpt in message


def test_C03_excerpt_stays_short_and_on_its_line() -> None:
    message = refusal('{"a": 1,\n"b": 2 ' + "x" * 5000 + "\n}")
    assert len(message) < 200
    assert '"a"' not in message


def test_C03_excerpt_hides_secrets() -> None:
    for text in (
        '{"Backend":{"Type":"wireguard","PSK":"c2VjcmV0"  "Mode":"auto"}}',
        '{"Backend":{"psk" "c2VjcmV0"}}',
        '{"Backend":{\\"AccessKeySecret\\":\\"c2VjcmV0\\"}}',
    ):
        assert "c2VjcmV0" not in refusal(text)


def test_C03_invalid_utf8_and_deep_nesting_are_refusals() -> None:
    assert "invalid JSON" in refusal(b"\xff{}")
    assert "invalid JSON" in refusal("[" * 100_000)
    assert "invalid JSON" in refusal('{"SubnetLen":' + "1" * 5000 + "}")


@pytest.mark.parametrize("document", ["[]", "null", '"x"', "1", "true"])
def test_document_must_be_an_object(document: str) -> None:
    assert refusal(document) == f"must be a JSON object, not {document}"


@pytest.mark.parametrize(
    "value",
    [
        "10.5.0.0",
        "010.5.0.0/16",
        "",
        "fd00::/64",
        "10.5.0.0/",
        "10.5.0.0/33",
        "10.5.0.0/-1",
        "10.5.0.0/+8",
        "10.5.0.0/255.255.0.0",
        "10.5.0/16",
        " 10.5.0.0/16",
        "0x0a.5.0.0/16",
        "10.5.0.0/16/16",
        "10.5.0.0/٢",
        "x/16",
    ],
)
@pytest.mark.parametrize("check_pools", [True, False])
def test_network_must_be_an_ipv4_cidr(value: str, check_pools: bool) -> None:
    assert refusal(json.dumps({"Network": value}), check_pools=check_pools).startswith(f"Network {json.dumps(value)}: ")


@pytest.mark.parametrize("name", ["Network", "IPv6Network", "SubnetMin", "SubnetMax"])
@pytest.mark.parametrize("value", ["null", "1", "[]"])
def test_null_and_non_strings_are_refused(name: str, value: str) -> None:
    assert refusal(f'{{{NET},"{name}":{value}}}').startswith(f"{name} {value}: ")


@pytest.mark.parametrize("value", ["10.9.0.0/16", "::1", "fe80::%eth0/64", "fd00::/129", "fd00::g/64", ""])
def test_ipv6_network_is_checked_even_if_ipv6_is_off(value: str) -> None:
    assert refusal(f'{{{NET},"IPv6Network":"{value}"}}').startswith(f'IPv6Network "{value}": ')


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SubnetMin", "x"),
        ("SubnetMin", ""),
        ("SubnetMax", "fd00::1"),
        ("SubnetMin", "10.5.01.0"),
        ("IPv6SubnetMin", "10.5.1.0"),
        ("IPv6SubnetMax", "fd00::1%eth0"),
    ],
)
def test_bounds_must_be_addresses_of_their_family(name: str, value: str) -> None:
    assert refusal(f'{{{NET},"{name}":"{value}"}}').startswith(f'{name} "{value}": ')


@pytest.mark.parametrize("check_pools", [True, False])
@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{}", "Network is missing"),
        ('{"EnableIPv4":true}', "Network is missing"),
        (f'{{{NET},"EnableIPv6":true}}', "IPv6Network is missing"),
        ('{"Network":"0.0.0.0/0"}', 'Network "0.0.0.0/0": '),
        ('{"Network":"10.0.0.0/0"}', 'Network "0.0.0.0/0": '),
        (f'{{{NET},"EnableIPv6":true,"IPv6Network":"::/0"}}', 'IPv6Network "::/0": '),
        (f'{{{NET},"EnableIPv4":false}}', "EnableIPv4 false: "),
        (f'{{{NET},"EnableIPv4":1}}', "EnableIPv4 1: "),
        (f'{{{NET},"EnableIPv6":"true"}}', 'EnableIPv6 "true": '),
        (f'{{{NET},"EnableNFTables":0}}', "EnableNFTables 0: "),
        (f'{{{NET},"Backend":[]}}', "Backend []: "),
        (f'{{{NET},"Backend":"vxlan"}}', 'Backend "vxlan": '),
        (f'{{{NET},"Backend":{{"Type":1}}}}', "Backend.Type 1: "),
    ],
)
def test_refused_with_the_field_named(text: str, field: str, check_pools: bool) -> None:
    assert refusal(text, check_pools=check_pools).startswith(field)


def test_keys_match_in_any_case_and_host_bits_are_dropped() -> None:
    config = parse(
        '{"network":"10.5.3.4/16","SUBNETLEN":25,"subnetmin":"10.5.7.0","SubnetMax":"10.5.7.128","Unknown":1,'
        '"enablenftables":true,"backend":{"type":"HOST-GW","x":1}}'
    )
    assert config.ipv4 == Pool(ip_network("10.5.0.0/16"), 25, ip_network("10.5.7.0/25"), ip_network("10.5.7.128/25"))
    assert config.ipv6 is None
    assert config.enable_nftables
    assert config.backend == BackendConfig("host-gw", {"type": "HOST-GW", "x": 1})
    assert config.families == (4,)


@pytest.mark.parametrize(
    "text",
    [
        '{"Network":"10.4.0.0/16","Network":"10.5.0.0/16"}',
        '{"Network":"10.4.0.0/16","network":"10.5.0.0/16"}',
        '{"Network":"10.4.0.0/16","NETWORK":"10.6.0.0/16","Network":"10.5.0.0/16"}',
        '{"networ\\u212A":"10.5.0.0/16"}',
    ],
)
def test_later_duplicate_wins(text: str) -> None:
    pool = parse(text).ipv4
    assert pool is not None
    assert pool.network == ip_network("10.5.0.0/16")


def test_null_means_unset_where_upstream_says_so() -> None:
    names = (
        "EnableIPv4",
        "EnableIPv6",
        "EnableNFTables",
        "SubnetLen",
        "IPv6SubnetLen",
        "IPv6SubnetMin",
        "IPv6SubnetMax",
    )
    config = parse(json.dumps({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}} | dict.fromkeys(names)))
    assert config == parse(f"{{{NET},{BACKEND}}}")


def test_dual_stack() -> None:
    config = parse(f'{{{NET},"EnableIPv6":true,"IPv6Network":"fd00:5::1/48","IPv6SubnetMax":"fd00:5:0:9::",{BACKEND}}}')
    assert config.families == (4, 6)
    assert config.ipv6 is not None
    assert config.ipv6.network == ip_network("fd00:5::/48")
    assert config.ipv6.last == ip_network("fd00:5:0:9::/64")
    assert config.warnings == ()


def test_absent_backend_is_udp_with_a_warning() -> None:
    config = parse(f"{{{NET}}}")
    assert config.backend == BackendConfig("udp", {})
    assert len(config.warnings) == 1
    assert "udp" in config.warnings[0]


@pytest.mark.parametrize("backend", ["null", "{}", '{"Type":null}', '{"VNI":1}'])
def test_backend_without_type_is_left_to_the_caller(backend: str) -> None:
    assert parse(f'{{{NET},"Backend":{backend}}}').backend.type == ""


def test_C04_ranges_are_parsed_but_unused_with_kubernetes() -> None:
    text = f'{{{NET},"SubnetLen":20,"SubnetMin":"10.9.0.1","IPv6SubnetLen":null,{BACKEND}}}'
    config = parse(text, check_pools=False)
    network = ip_network("10.5.0.0/16")
    assert config.ipv4 == Pool(network, 16, network, network)
    (warning,) = config.warnings
    assert warning.startswith("SubnetLen, SubnetMin: ignored")
    assert "node-cidr-mask-size" in warning
    assert parse(f"{{{NET},{BACKEND}}}", check_pools=False).warnings == ()


def test_C13_misspelt_keys_are_named_with_the_nearest_known_one() -> None:
    config = parse(
        f'{{{NET},"SubnetLenght":25,"zzz":1,"Backend":{{"Type":"vxlan","DirectRoutng":true,"vni":2,"PSK":"s3cret"}}}}'
    )
    assert config.warnings == (
        'unknown key "SubnetLenght" is ignored; the nearest known key is SubnetLen',
        'unknown key "zzz" is ignored',
        'unknown key "Backend.DirectRoutng" is ignored; the nearest known key is Backend.DirectRouting',
        'unknown key "Backend.PSK" is ignored',
    )


@pytest.mark.parametrize(
    ("backend", "known"),
    [
        ("vxlan", "VNI Port MTU GBP Learning DirectRouting MacPrefix Name"),
        ("host-gw", ""),
        ("ipip", "DirectRouting"),
        ("udp", "Port DataPath"),
        ("wireguard", "ListenPort ListenPortV6 MTU PSK PersistentKeepaliveInterval Mode"),
        ("ipsec", "PSK UDPEncap ESPProposal"),
        (
            "extension",
            "PreStartupCommand PostStartupCommand SubnetAddCommand SubnetRemoveCommand ShutdownCommand ExtensionShell",
        ),
        ("alloc", ""),
        ("tencent-vpc", "AccessKeyID AccessKeySecret"),
        ("unheard-of", "anything goes"),
    ],
)
def test_C13_known_backend_keys_raise_no_warning(backend: str, known: str) -> None:
    members = {"Type": backend} | dict.fromkeys(known.lower().split())
    assert parse(json.dumps({"Network": "10.5.0.0/16", "Backend": members})).warnings == ()
    if backend != "unheard-of":
        members["Bogus_"] = None
        assert len(parse(json.dumps({"Network": "10.5.0.0/16", "Backend": members})).warnings) == 1


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("10.5.0.0/16")


@given(st.dictionaries(st.sampled_from(["Network", "SubnetLen", "SubnetMin", "Backend", "EnableIPv4", "x"]), VALUES))
@settings(max_examples=150, deadline=None)
def test_any_document_is_a_config_or_a_refusal(document: dict[str, object]) -> None:
    with contextlib.suppress(ConfigError):
        assert parse(json.dumps(document)).families == (4,)


def test_values_of_the_wrong_shape_are_not_spilled() -> None:
    assert refusal('[{"Backend":{"PSK":"c2VjcmV0"}}]') == "must be a JSON object, not [...]"
    assert refusal(f'{{{NET},"Backend":[{{"PSK":"c2VjcmV0"}}]}}') == "Backend [...]: must be a JSON object"
    assert len(refusal(json.dumps({"Network": "x" * 5000}))) < 200


def options(**members: object) -> OptionReader:
    return OptionReader(BackendConfig("vxlan", members))


def test_options_are_read_in_any_case_with_defaults() -> None:
    reader = options(vni=7, PORT=None, gbp=True, mode="auto")
    assert reader.integer("VNI", 1, 0, 2**24 - 1) == 7
    assert reader.integer("Port", 8472, 0, 65535) == 8472
    assert reader.integer("MTU", 1500, 68, 65535) == 1500
    assert reader.boolean("GBP", False) is True
    assert reader.boolean("Learning", False) is False
    assert reader.text("Mode", "separate") == "auto"
    assert reader.text("Name") == ""


@pytest.mark.parametrize("value", ["x", "1", 1.0, 1.5, True, [], {}])
def test_options_integer_refuses_other_types(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        options(Port=value).integer("Port", 0, 0, 65535)
    assert str(caught.value).startswith(f"Backend.Port {json.dumps(value)}: ")


@pytest.mark.parametrize(("value", "nearest"), [(-1, 0), (65536, 65535)])
def test_options_integer_bounds(value: int, nearest: int) -> None:
    with pytest.raises(ConfigError, match=rf"^Backend\.Port {value}: .*nearest legal value is {nearest}$"):
        options(port=value).integer("Port", 0, 0, 65535)


def test_options_boolean_and_text_refuse_other_types() -> None:
    with pytest.raises(ConfigError, match=r"^Backend\.GBP 1: "):
        options(GBP=1).boolean("GBP", False)
    with pytest.raises(ConfigError, match=r"^Backend\.Mode false: "):
        options(Mode=False).text("Mode")


def test_options_never_show_a_secret() -> None:
    with pytest.raises(ConfigError, match=r"^Backend\.PSK") as caught:
        options(psk=[12345]).text("PSK")
    assert "12345" not in str(caught.value)
