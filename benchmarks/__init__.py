"""Measurements that any user can repeat. Each runs this project and its peers in turn, in one run."""
