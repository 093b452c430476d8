"""The writer of a directory: open segments, group commit, recovery, deletion and retention."""
