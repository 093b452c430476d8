"""Files and directories: places, locks, atomic replacement, permissions.

Nothing here knows the format of segments, which is in `segments/`.
"""
