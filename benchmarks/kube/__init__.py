"""What Kubernetes mode and the CNI plugin cost."""
