"""Writers on the cluster's other nodes: their own directories, and how the store hears of their runs."""
