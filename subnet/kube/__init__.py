"""The Kubernetes subnet manager: subnets are the nodes' pod CIDRs, leases their annotations.

`client` speaks to the API server, and nothing else imports its library;
`records` decodes what the server says; `annotations` and `nodes` decide;
`reader` and `keeper` act, each in its own thread.
Source: upstream pkg/subnet/kube.
"""
