"""Pages of keys and values under one budget."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from deployments.engine.device_memory import free_bytes, release_cached
from deployments.model.kv_cache import PAGE, PagedCache, SequenceKv, TokenSpan
from deployments.model.model import Model

NO_PAGE = 0  # stays zero, and stands in a table for pages that are not held: torch's operations read before they mask


class KvMemory:
    """Pages of keys and values: sequences take them as they grow, and share those of a beginning they have in common.

    A page that is full is known by the tokens up to its end and by its owner. When no sequence holds it any more it
    stays, as long as there are others to take, for a sequence that begins with the same tokens.

    Where every layer has a window, sequences keep the pages that their next rows read, and no others. All layers share
    a sequence's table of pages: where some attend to all tokens, as in Gemma 3, all pages are kept.

    Attributes:
        cache: The pages.
        pages: How many there are.
        position_bytes: Bytes of one position over all layers.
    """

    def __init__(
        self, model: Model, max_running: int, kv_bytes: int | None = None, kv_fraction: float | None = None
    ) -> None:
        """Size the budget by one page of the model.

        Args:
            model: Whose keys and values they are.
            max_running: The most sequences at once: more pages than they can fill are not made.
            kv_bytes: The budget.
            kv_fraction: The budget as a part of what is free now, where `kv_bytes` is not given; by default
                half of it.
        """
        probe, by_device = _one_page(model)
        page_bytes = by_device.total()
        self.position_bytes = page_bytes // PAGE
        free = min(int(free_bytes(device) * (kv_fraction or 0.5)) // size for device, size in by_device.items())
        most = max_running * pages_for(model.context)
        self.pages = min(kv_bytes // page_bytes if kv_bytes else free, most)
        self.cache = PagedCache(self.pages + 1, like=probe)
        self.cache.zero(NO_PAGE)
        self._window = probe.window or model.context
        self._context = model.context
        self._device = model.device
        self._free = list(range(self.pages, NO_PAGE, -1))  # the lowest are taken first
        self._holders: Counter[int] = Counter()  # page -> sequences that hold it
        self._known: dict[tuple[Hashable, tuple[int, ...]], tuple[int, int]] = {}  # what a page has -> its number, page
        self._names: dict[int, tuple[Hashable, tuple[int, ...]]] = {}  # page -> its key in `_known`
        self._idle: OrderedDict[int, None] = OrderedDict()  # known pages that nobody holds, least lately used first
        self._numbers = itertools.count(1)

    @property
    def budget_bytes(self) -> int:
        """The most that all pages take."""
        return self.pages * PAGE * self.position_bytes

    @property
    def bytes(self) -> int:
        """What pages in use take, those that are kept for later prompts included."""
        return (self.pages - len(self._free)) * PAGE * self.position_bytes

    @property
    def longest(self) -> int:
        """The most tokens that a sequence may have by itself."""
        return self._context if pages_for(self.most_held(self._context)) <= self.pages else self.pages * PAGE

    def most_held(self, tokens: int, piece: int = PAGE) -> int:
        """The most positions for which a sequence of so many tokens needs pages at once, in pieces of so many."""
        return min(tokens, self._window + piece + PAGE - 2)  # these begin anywhere in a page

    @property
    def available(self) -> int:
        """Pages that a sequence could take now."""
        return len(self._free) + len(self._idle)

    def grow(self, kv: SequenceKv, tokens: int) -> bool:
        """Give a sequence pages for so many tokens; false, and nothing is changed, where there are too few."""
        missing = pages_for(tokens) - len(kv.pages)
        if missing > self.available:
            return False
        for _ in range(missing):
            page = self._free.pop() if self._free else self._forget_oldest()
            self._holders[page] = 1
            kv.pages.append(page)
        return True

    def slide(self, kv: SequenceKv, start: int) -> None:
        """Take the pages of a sequence that none of its rows from `start` on reads in any layer."""
        passed = max(0, start + 1 - self._window) // PAGE
        if passed > kv.passed:
            self._leave(left := kv.pages[kv.passed : passed])
            for page in filter(self._idle.__contains__, left):  # the last gives way first: it is of no use alone
                self._idle.move_to_end(page, last=False)
            kv.pages[kv.passed : passed] = [NO_PAGE] * (passed - kv.passed)
            kv.passed = passed

    def release(self, kv: SequenceKv) -> None:
        """Take all pages of a sequence."""
        self._leave(kv.pages[kv.passed :])
        kv.pages.clear()
        kv.passed = kv.known = 0
        kv.lone = kv.chain = None

    def _leave(self, pages: Sequence[int]) -> None:
        """Count one holder less of each of these; the last in order gives way first."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                if page in self._names:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    # ---- beginnings that sequences have in common

    def share(self, kv: SequenceKv, tokens: Sequence[int], limit: int, owner: Hashable) -> int:
        """Give a sequence without pages those that hold its beginning.

        Args:
            kv: The sequence's keys and values.
            tokens: Its tokens.
            limit: No position from this one on is taken from another sequence.
            owner: Whose pages it may share.

        Returns:
            How many positions they hold.
        """
        assert not kv.pages
        kv.chain = owner
        for page, kv.chain in self._known_pages(tokens, limit, owner):
            self._idle.pop(page, None)
            self._holders[page] += 1
            kv.pages.append(page)
        kv.known = len(kv.pages)
        return kv.known * PAGE

    def held(self, tokens: Sequence[int], limit: int, owner: Hashable) -> int:
        """How many pages of a sequence's beginning others hold now, so that it takes none for them.

        Args:
            tokens: Its tokens.
            limit: No position from this one on is taken from another sequence.
            owner: Whose pages it may share.
        """
        return sum(page in self._holders for page, _ in self._known_pages(tokens, limit, owner))

    def _known_pages(self, tokens: Sequence[int], limit: int, owner: Hashable) -> Iterator[tuple[int, Hashable]]:
        """The pages that hold a beginning, each with the key under which the next one is known."""
        chain = owner
        for start in range(0, limit - PAGE + 1, PAGE):
            found = self._known.get((chain, tuple(tokens[start : start + PAGE])))
            if found is None:
                return
            chain, page = found
            yield page, chain

    @staticmethod
    def next_page(kv: SequenceKv, tokens: Sequence[int], limit: int) -> Hashable:
        """The key of a sequence's first page that is not known yet; None where that is not below a limit."""
        start = kv.known * PAGE
        return (kv.chain, tuple(tokens[start : start + PAGE])) if start + PAGE <= limit else None

    def remember(self, kv: SequenceKv, tokens: Sequence[int], limit: int) -> None:
        """Know a sequence's full pages by their tokens.

        Args:
            kv: The sequence's keys and values, as `share` has begun them.
            tokens: Its tokens.
            limit: Positions that are written, and hold what any sequence with these tokens would write.
        """
        while (kv.known + 1) * PAGE <= limit:
            key = kv.chain, tuple(tokens[kv.known * PAGE : (kv.known + 1) * PAGE])
            if key not in self._known:
                page = kv.pages[kv.known]
                assert page != NO_PAGE, "a page is known before its sequence leaves it"
                self._known[key] = next(self._numbers), page
                self._names[page] = key
            kv.chain = self._known[key][0]
            kv.known += 1

    @staticmethod
    def completes_page(before: int, after: int) -> bool:
        """Whether a sequence that has grown so much has filled a page."""
        return after // PAGE > before // PAGE

    def _forget_oldest(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._known[self._names.pop(page)]
        return page

    def trim(self) -> None:
        """Give back to the system what no sequence holds, where it can be."""
        while self._idle:
            self._free.append(self._forget_oldest())
        self._free.sort(reverse=True)
        release_cached(self._device)
        self.cache.release_from(max(self._holders, default=NO_PAGE) + 1)


def pages_for(tokens: int) -> int:
    """Pages that so many tokens take."""
    return -(-tokens // PAGE)


@torch.inference_mode()
def _one_page(model: Model) -> tuple[PagedCache, Counter[torch.device]]:
    """A cache of one page that a token's forward has written to, and its bytes on each device."""
    cache, kv = PagedCache(), SequenceKv([0])
    model.forward([1 % model.vocabulary], [TokenSpan(kv, 0, 1)], [0], cache)
    sizes = cache.page_bytes
    layers: list[Any] = kv.lone.layers if kv.lone else []
    for layer in layers:
        sizes[layer.keys.device] += PAGE * (layer.keys.nbytes + layer.values.nbytes)
    return cache, sizes
