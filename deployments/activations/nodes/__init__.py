"""Writers on other nodes of a cluster, which share the store's directory."""
