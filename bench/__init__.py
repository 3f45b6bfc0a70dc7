"""`penstock bench`: measurements that need a machine's own devices, such as its network."""
