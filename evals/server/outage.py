"""How long a server has been away, from the results of all requests of one client."""

import time
from collections.abc import Callable

Clock = Callable[[], float]


class Outage:
    """The time from the first sign of absence after the last answer of any request until the next answer.

    Attributes:
        limit_s: Seconds for which a server that is away is waited for.
    """

    def __init__(self, limit_s: float, clock: Clock = time.monotonic) -> None:
        """Initializes without an outage.

        Args:
            limit_s: Seconds for which a server that is away is waited for; 0 is not at all.
            clock: Tells seconds that only grow.
        """
        self.limit_s = limit_s
        self._clock = clock
        self._began: float | None = None
        self._number = 0

    def missed(self) -> int:
        """Take note that the server was not there.

        Returns:
            The number of this outage, from 1.
        """
        if self._began is None:
            self._began = self._clock()
            self._number += 1
        return self._number

    def met(self) -> None:
        """Take note that the server answered, whatever it said."""
        self._began = None

    def renewed(self) -> None:
        """Take note that the server was there, though it is not now: the time begins anew."""
        if self._began is not None:
            self._began = self._clock()

    @property
    def seconds(self) -> float:
        """For how long nothing has answered; 0 where none is under way."""
        return 0.0 if self._began is None else self._clock() - self._began

    @property
    def left_s(self) -> float:
        """For how long it is still waited for; 0 or less where no longer."""
        return self.limit_s - self.seconds

    def given_up(self, reason: str) -> str:
        """The error when the outage has lasted too long.

        Args:
            reason: what was met last.
        """
        waited = f"no usable answer for {self.seconds:.0f} s (max_outage {self.limit_s:g})"
        return f"{reason}; {waited}: --resume goes on when the server is back"
