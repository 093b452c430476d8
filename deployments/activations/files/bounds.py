"""How many files clients may have kept, and how many bytes of them."""

from __future__ import annotations

from collections.abc import Collection

from deployments.errors import RequestError


def check_room(what: str, sizes: Collection[int], size: int, count: int, most: int, way: str, code: str) -> None:
    """Refuse one file more where there is no room for it.

    Args:
        what: What files are called, in the plural.
        sizes: Bytes of each that is there.
        size: Bytes of the new one.
        count: The most files.
        most: The most bytes of all together.
        way: The verb for bringing one.
        code: The refusal's.

    Raises:
        RequestError: They are too many, or too large together.
    """
    used = sum(sizes)
    if used + size > most or len(sizes) >= count:
        message = (
            f"{len(sizes)} {what} take {used} bytes, and there is room for {count} of {most} bytes together: "
            f"delete some before you {way} one of {size} bytes"
        )
        raise RequestError(message, None, code)
