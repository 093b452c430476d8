"""Files and directories: places, locks, atomic replacement, permissions."""
