"""A node that does just enough to stand in for flanneld: one subnet by host number, vxlan, iproute2."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

PREFIX = "/coreos.com/network/subnets/"
DEVICE = "flannel.1"


def etcd(url: str, method: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"{url}/v3/{method}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=5) as answer:
        return json.load(answer)


def text64(text: str) -> str:
    return b64encode(text.encode()).decode()


def peers(url: str) -> dict[str, dict[str, Any]]:
    found = etcd(url, "kv/range", {"key": text64(PREFIX), "range_end": text64(PREFIX[:-1] + "0")})
    leases = {b64decode(kv["key"]).decode()[len(PREFIX) :]: kv["value"] for kv in found.get("kvs", ())}
    return {key.split("-")[0]: json.loads(b64decode(value)) for key, value in leases.items()}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:] if "=" in word)
    shown = json.loads(subprocess.check_output(["ip", "-j", "-4", "addr", "show", "dev", flags["iface"]]))
    own_ip = shown[0]["addr_info"][0]["local"]
    number = own_ip.split(".")[-1]
    subnet, mac = f"10.5.{number}.0", f"02:00:00:00:01:{int(number):02x}"
    if not Path(f"/sys/class/net/{DEVICE}").exists():
        ip(
            "link",
            "add",
            DEVICE,
            "address",
            mac,
            "mtu",
            "1450",
            *("type", "vxlan", "id", "1", "dstport", "8472"),
            "local",
            own_ip,
            "nolearning",
        )
        ip("addr", "add", f"{subnet}/32", "dev", DEVICE)
        ip("link", "set", DEVICE, "up")
    value = {"PublicIP": own_ip, "PublicIPv6": None, "BackendType": "vxlan", "BackendData": {"VNI": 1, "VtepMAC": mac}}
    url = flags["etcd-endpoints"]
    etcd(url, "kv/put", {"key": text64(f"{PREFIX}{subnet}-24"), "value": text64(json.dumps(value))})
    Path(flags["subnet-file"]).write_text(
        f"FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.{number}.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n"
    )
    print(f"{own_ip} has {subnet}/24", flush=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.sendto(b"READY=1\nSTATUS=up", os.environ["NOTIFY_SOCKET"])
    while True:
        for network, lease in peers(url).items():
            if network != subnet:
                far = lease["BackendData"]["VtepMAC"]
                ip("neigh", "replace", network, "lladdr", far, "dev", DEVICE, "nud", "permanent")
                subprocess.run(
                    ["bridge", "fdb", "replace", far, "dev", DEVICE, "dst", lease["PublicIP"], "self", "permanent"],
                    check=True,
                )
                ip("route", "replace", f"{network}/24", "via", network, "dev", DEVICE, "onlink")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
