"""Measurements that any user can repeat: peers and this project in turn, in one run."""
