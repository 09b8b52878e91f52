"""What the network is: configuration, leases and the datastore that holds them."""
