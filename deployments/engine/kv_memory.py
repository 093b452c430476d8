"""Pages of keys and values under one budget."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from deployments.model.batch import PAGE, Batch, SequenceKv, TokenSpan
from deployments.model.device_memory import Reservation, unreserved_bytes
from deployments.model.kv_cache import PagedCache
from deployments.model.model import Model
from deployments.model.states import KINDS as STATES
from deployments.model.states import NO_SLOT

STATES_PART = 0.5  # the most of the memory that states take, if there are pages
NO_PAGE = 0  # stays zero; fills a table at pages that are not held, because torch reads before it masks


class KvMemory:
    """Pages of keys and values: sequences take pages as they grow and share those of a common prefix.

    A full page is registered under the tokens up to its end and its owner. When no sequence holds it any more, it stays
    for later sequences with the same prefix until its memory is needed.

    If every layer has a window, sequences keep only the pages that their next rows read. All layers share a sequence's
    table of pages; if some layers attend to all tokens, as in Gemma 3, all pages are kept.

    Attributes:
        cache: The pages.
        pages: The number of pages.
        slots: The number of slots of states; 0 if the model's layers have none.
        slot_bytes: Bytes of a sequence's states.
        padding_page: A further page, which rows without a sequence write to.
        position_bytes: Bytes of one position over all layers.
        slides: Whether every layer has a window, so that `slide` has work to do.
    """

    def __init__(
        self, model: Model, max_running: int, kv_bytes: int | None = None, kv_fraction: float | None = None
    ) -> None:
        """Derive the number of pages from the size of one.

        Args:
            model: The model.
            max_running: The most sequences at once; limits the number of pages to what they can fill.
            kv_bytes: The budget.
            kv_fraction: The budget as a fraction of the free memory, used without `kv_bytes`; half by default. Pages
                that another model has reserved and not written to yet are not free.
        """
        probe, by_device, slot_by_device = _one_page(model)
        self.position_bytes, self.slot_bytes = by_device.total() // PAGE, slot_by_device.total()

        def fitting(sizes: Counter[torch.device], part: float, used: Counter[torch.device]) -> int:
            if kv_bytes:
                return int(kv_bytes * part - used.total()) // sizes.total()
            share = (kv_fraction or 0.5) * part
            free = {device: int(unreserved_bytes(device, model.name) * share) - used[device] for device in sizes}
            return min(free[device] // size for device, size in sizes.items())

        states, most = Counter[torch.device](), max_running * pages_for(model.context)
        if slot_by_device:
            slots = min(max_running, max(1, fitting(slot_by_device, STATES_PART if by_device else 1.0, states)))
            states = Counter({device: slots * size for device, size in slot_by_device.items()})
        self.pages = min(most, max(0, fitting(by_device, 1.0, states))) if by_device else most
        self.slots = slots if slot_by_device else 0
        self._free_slots = list(range(self.slots, NO_SLOT, -1))
        self.padding_page = self.pages + 1
        self.cache = model.new_cache(self.pages + 2, self.slots + 1, like=probe)
        self.cache.zero(NO_PAGE)
        self.slides = bool(probe.window)
        self._window = probe.window or model.context
        self._context = model.context
        self._device = model.device
        self._free = list(range(self.pages, NO_PAGE, -1))  # the lowest are taken first
        self._holders: Counter[int] = Counter()  # page -> number of sequences that hold it
        self._known: dict[tuple[Hashable, tuple[int, ...]], tuple[int, int]] = {}  # key -> number, page
        self._names: dict[int, tuple[Hashable, tuple[int, ...]]] = {}  # page -> its key in `_known`
        self._idle: OrderedDict[int, None] = OrderedDict()  # known pages that no sequence holds, oldest first
        self._numbers = itertools.count(1)
        self._cpu_page_bytes = sum(size for device, size in by_device.items() if device.type == "cpu")
        self._reservation = Reservation(model.name)
        self._touch_up_to(NO_PAGE)

    @property
    def budget_bytes(self) -> int:
        """The most bytes of all pages and states."""
        return self.pages * PAGE * self.position_bytes + self.slots * self.slot_bytes

    @property
    def bytes(self) -> int:
        """Bytes of the pages and states in use, including pages kept for later prompts."""
        states = (self.slots - len(self._free_slots)) * self.slot_bytes
        return (self.pages - len(self._free)) * PAGE * self.position_bytes + states

    @property
    def longest(self) -> int:
        """The most tokens of a single sequence."""
        return self._context if pages_for(self.most_held(self._context)) <= self.pages else self.pages * PAGE

    def most_held(self, tokens: int, chunk: int = PAGE) -> int:
        """The most positions for which a sequence of `tokens` tokens needs pages at once, in chunks of `chunk`."""
        return min(tokens, self._window + chunk + PAGE - 2)  # a window starts anywhere in a page

    @property
    def available(self) -> int:
        """The number of pages that a sequence can take now."""
        return len(self._free) + len(self._idle)

    def grow(self, kv: SequenceKv, tokens: int) -> bool:
        """Give a sequence pages for `tokens` tokens; if too few are available, change nothing and return false."""
        missing = pages_for(tokens) - len(kv.pages)
        if missing > self.available:
            return False
        if self.slots and kv.slot == NO_SLOT:
            kv.slot = self._free_slots.pop()  # there is one for each running sequence
        taken = [self._free.pop() if self._free else self._forget_oldest() for _ in range(missing)]
        kv.pages.extend(taken)
        self._holders.update(taken)
        if (last := max(taken, default=NO_PAGE)) > self._last_touched:
            self._touch_up_to(last)
        return True

    def _touch_up_to(self, page: int) -> None:
        """Note that pages after this one are not written to."""
        self._last_touched = page
        self._reservation.resize((self.pages - page) * self._cpu_page_bytes)

    def slide(self, kv: SequenceKv, start: int) -> None:
        """Release the pages of a sequence that none of its rows from `start` on reads in any layer."""
        passed = max(0, start + 1 - self._window) // PAGE
        if passed > kv.passed:
            self._leave(left := kv.pages[kv.passed : passed])
            for page in filter(self._idle.__contains__, left):  # the last is evicted first: it is useless alone
                self._idle.move_to_end(page, last=False)
            kv.pages[kv.passed : passed] = array("i", [NO_PAGE] * (passed - kv.passed))
            kv.passed = passed

    def release(self, kv: SequenceKv) -> None:
        """Release all pages and the states of a sequence."""
        if kv.slot != NO_SLOT:
            self._free_slots.append(kv.slot)
        kv.slot, kv.state_at = NO_SLOT, 0
        self._leave(kv.pages[kv.passed :])
        del kv.pages[:]
        kv.passed = kv.known = 0
        kv.lone = kv.chain = None

    def _leave(self, pages: Sequence[int]) -> None:
        """Count one holder less of each page; the last page is evicted first."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                if page in self._names:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    # ---- shared prefixes

    def share(self, kv: SequenceKv, tokens: Sequence[int], limit: int, owner: Hashable) -> int:
        """Give a sequence without pages the known pages of its prefix.

        Args:
            kv: The sequence's keys and values.
            tokens: Its tokens.
            limit: The first position that is not shared.
            owner: The owner whose pages it may share.

        Returns:
            The number of shared positions.
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
        """The number of pages of a sequence's prefix that others hold now; the arguments are those of `share`."""
        return sum(page in self._holders for page, _ in self._known_pages(tokens, limit, owner))

    def _known_pages(self, tokens: Sequence[int], limit: int, owner: Hashable) -> Iterator[tuple[int, Hashable]]:
        """The pages that hold a prefix, each with the chain key of the next page."""
        chain = owner
        for start in range(0, limit - PAGE + 1, PAGE):
            entry = self._known.get((chain, tuple(tokens[start : start + PAGE])))
            if entry is None:
                return
            chain, page = entry
            yield page, chain

    @staticmethod
    def next_page(kv: SequenceKv, tokens: Sequence[int], limit: int) -> Hashable:
        """The key of a sequence's first page that is not known yet; None if the page ends after `limit`."""
        start = kv.known * PAGE
        return (kv.chain, tuple(tokens[start : start + PAGE])) if start + PAGE <= limit else None

    def remember(self, kv: SequenceKv, tokens: Sequence[int], limit: int) -> None:
        """Register a sequence's full pages for reuse by others with the same tokens.

        Args:
            kv: The sequence's keys and values; `share` was called first.
            tokens: Its tokens.
            limit: The number of positions written with the values that any sequence with these tokens would have.
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

    def forget(self, kv: SequenceKv) -> None:
        """Share no page of a sequence any more: one value that is not finite may have spoiled its earlier ones."""
        for page in kv.pages[kv.passed : kv.known]:
            if key := self._names.pop(page, None):
                del self._known[key]

    def _forget_oldest(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._known[self._names.pop(page)]
        return page

    def trim(self) -> None:
        """Free the memory of unused pages, if the cache supports it."""
        while self._idle:
            self._free.append(self._forget_oldest())
        self._free.sort(reverse=True)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        last = max(self._holders, default=NO_PAGE)
        self.cache.release_from(last + 1)
        self._touch_up_to(last)


def pages_for(tokens: int) -> int:
    """The number of pages of `tokens` tokens."""
    return -(-tokens // PAGE)


@torch.inference_mode()
def _one_page(model: Model) -> tuple[PagedCache, Counter[torch.device], Counter[torch.device]]:
    """A cache of one page after the forward pass of a token, its bytes and those of the states on each device."""
    cache, kv = model.new_cache(), SequenceKv([0], 1)
    model.forward(Batch([1 % model.vocabulary], [TokenSpan(kv, 0, 1)], None, model.device), cache)
    sizes, of_states = cache.page_bytes, cache.states.slot_bytes
    layers: list[Any] = kv.lone.layers if kv.lone else []
    for layer in layers:
        for name, part in vars(layer).items():
            for tensor in part.values() if isinstance(part, dict) else [part]:
                if isinstance(tensor, torch.Tensor):
                    counted, count = (of_states, 1) if name in STATES else (sizes, PAGE)
                    counted[tensor.device] += count * tensor.nbytes
    return cache, sizes, of_states
