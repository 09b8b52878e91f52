"""What the Kubernetes manager is told by flags and environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from subnet.errors import UsageError

SERVICE_VARIABLES = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")


@dataclass(frozen=True, slots=True)
class KubeSettings:
    """``prefix`` is complete, as annotation_prefix returns it.

    Without URL and kubeconfig the service account of the pod is used; a URL
    takes the place of the kubeconfig's; alone it means no credentials. The
    node's name is given or looked up in the pod's object.
    """

    api_url: str = ""
    kubeconfig_file: str = ""
    prefix: str = "flannel.alpha.coreos.com/"
    node_name: str = ""
    pod_name: str = ""
    pod_namespace: str = ""
    net_config_path: str = "/etc/kube-flannel/net-conf.json"
    set_network_condition: bool = True


def check(settings: KubeSettings, environ: Mapping[str, str]) -> None:
    """Raise UsageError for what waiting cannot cure."""
    if not settings.node_name and not (settings.pod_name and settings.pod_namespace):
        raise UsageError("--kube-subnet-mgr needs NODE_NAME, or both POD_NAME and POD_NAMESPACE, in the environment")
    if settings.api_url and not settings.api_url.startswith(("http://", "https://")):
        raise UsageError(f"--kube-api-url={settings.api_url}: must begin with http:// or https://")
    missing = [name for name in SERVICE_VARIABLES if not environ.get(name)]
    if missing and not settings.api_url and not settings.kubeconfig_file:
        raise UsageError(
            f"--kube-subnet-mgr: not in a pod ({' and '.join(missing)} not set); "
            "give --kubeconfig-file or --kube-api-url"
        )
    depth = environ.get("EVENT_QUEUE_DEPTH", "")
    if depth:
        try:
            int(depth)
        except ValueError as error:
            raise UsageError(f"EVENT_QUEUE_DEPTH: {depth!r} is not an integer") from error
