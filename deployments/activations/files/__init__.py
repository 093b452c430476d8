"""Where files lie and how they are handled: places, locks, atomic replacement, permissions."""
