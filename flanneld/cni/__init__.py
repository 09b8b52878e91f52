"""The CNI plugin ``flannel``. Its module is copied alone to hosts and imports nothing of the project."""
