"""Writers on the cluster's other nodes: their directories, and their reports to the store."""
