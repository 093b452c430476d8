"""Guided decoding with llguidance: the tokens that a grammar allows next."""

from __future__ import annotations

import functools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from deployments.errors import RequestError
from deployments.model.model import Model

MOST_CHARACTERS = 128 << 10  # of a grammar including its schemas
MOST_REASON = 400  # characters
CACHED_GRAMMARS = 16  # compiled grammars kept for later requests
# Lower than the library's own: finding the allowed tokens delays a step by a few milliseconds at most, and a grammar
# keeps at most some tens of MiB of lexer states.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=25_000,
    max_lexer_states=25_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


_compiling = ThreadPoolExecutor(1, "grammar")  # for sequences that no longer share a grammar


class GrammarState:
    """The state of one sequence in its grammar.

    It is kept when its sequence is preempted. All sequences of a grammar share its lexer states, which grow with use.
    When these reach the limit, each sequence continues with a grammar of its own, which another thread compiles.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.shared.deep_copy()
        self._shares = True  # shares the lexer states with the grammar's other sequences
        self._tokens: list[int] = []
        self._allowed: npt.NDArray[np.bool_] | None = None
        self._alone: Future[LLMatcher] | None = None  # until it is taken

    @property
    def error(self) -> str | None:
        """Why the grammar cannot continue; None while it can."""
        return _reason(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def compiles(self) -> bool:
        """Whether its grammar is being compiled again."""
        return self._alone is not None and not self._alone.done()

    def ready(self, then: Callable[[], None]) -> bool:
        """Whether `allowed` can return without waiting for a compilation.

        Args:
            then: Called on another thread when the compilation has finished.
        """
        if self._alone is None and self._allowed is None:
            self._find_allowed()
            if self._alone is not None:
                self._alone.add_done_callback(lambda _: then())
        return not self.compiles

    def close(self) -> None:
        """Cancel a pending compilation: the sequence has ended."""
        if self._alone is not None:
            self._alone.cancel()

    def allowed(self) -> npt.NDArray[np.bool_]:
        """[vocabulary] the tokens allowed next; end tokens exactly where the text may end."""
        while self._allowed is None:
            if self._alone is not None:
                self._matcher, self._alone = self._alone.result(), None
            self._find_allowed()
        return self._allowed

    def _find_allowed(self) -> None:
        """Find the tokens allowed next, or start to compile the grammar again."""
        mask = self._matcher.compute_bitmask()
        # The library reports this only in its message: the stop reason is the same for any failure.
        if self._shares and "too many states" in self._matcher.get_error():
            self._shares, self._grammar.worn = False, True
            self._alone = _compiling.submit(self._grammar.after, [*self._tokens])
            return
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._grammar.vocabulary, bitorder="little")
        broken, stopped = self._matcher.is_error(), self._matcher.is_stopped()  # stopped: nothing can follow
        allowed[self._grammar.eos] = not broken and (stopped or self._matcher.is_accepting())
        self._allowed = allowed.view(np.bool_)

    def allows_beside(self, tokens: Sequence[int]) -> bool:
        """Whether any token other than these is allowed next."""
        allowed = self.allowed()
        return bool(allowed.sum() > allowed[list(tokens)].sum())

    def add(self, token: int) -> None:
        """Add the sequence's next token, which is not an end token."""
        self._tokens.append(token)
        self._matcher.consume_token(token)
        self._allowed = None


class Grammar:
    """A compiled grammar for any number of sequences.

    Attributes:
        make: Compiles it again.
        eos: The model's end tokens.
        vocabulary: The number of logits in a row.
        shared: The initial state; copies of it share the lexer states.
        worn: The shared lexer states have reached the limit.
    """

    def __init__(self, make: Callable[[], LLMatcher], eos: list[int], vocabulary: int) -> None:
        """Compile a grammar.

        Raises:
            ValueError: It is not valid, not supported, or too complex to start with.
        """
        self.make = make
        self.eos = eos
        self.vocabulary = vocabulary
        self.shared = make()
        self.worn = False
        # The first two steps are taken now, where they delay no forward pass.
        first = self.begin()
        if first.error is None and not first.allowed().any():
            raise ValueError("no text can satisfy this schema or grammar")
        if first.error is None:
            first.add(int(first.allowed().argmax()))
            first.allowed()
        if first.error is not None:
            raise ValueError(first.error)

    def begin(self) -> GrammarState:
        """The state of a sequence at the start of its text."""
        return GrammarState(self)

    def after(self, tokens: Sequence[int]) -> LLMatcher:
        """Compile it again, and advance it by these tokens."""
        matcher = self.make()
        matcher.consume_tokens(list(tokens))
        return matcher


class GrammarCompiler:
    """Compiles grammars for one model. Call it outside the engine's thread, because it takes time."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._vocabulary: int = model.hf.get_output_embeddings().out_features
        self._eos = sorted(id for id in model.eos if id < self._vocabulary)
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()  # by their texts, the last used at the end

    def compile(self, source: str, field: str) -> Grammar:
        """Compile a grammar in llguidance's Lark.

        Args:
            source: The grammar's text.
            field: The field of the request that contains it.

        Raises:
            RequestError: It is too large, it or a schema in it is not valid or not supported, or the model's
                tokenizer does not define the bytes of its tokens.
        """
        if len(source) > MOST_CHARACTERS:
            message = f"as a grammar it has {len(source)} characters; the limit is {MOST_CHARACTERS}"
            raise RequestError(message, field)
        try:
            with self._lock:
                grammar = self._compiled.get(source)
            if grammar is None or grammar.worn:
                make = functools.partial(LLMatcher, self._tokenizer(), source, log_level=0, limits=LIMITS)
                grammar = Grammar(make, self._eos, self._vocabulary)
            with self._lock:
                self._compiled[source] = grammar
                self._compiled.move_to_end(source)
                if len(self._compiled) > CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
            return grammar
        except ValueError as error:
            raise RequestError(str(error), field) from error

    def _tokenizer(self) -> LLTokenizer:
        """The model's tokenizer for llguidance, made on first use: it takes a second for a large vocabulary."""
        with self._lock:
            if self._made is None:
                if not self._eos:
                    raise ValueError("this model has no end token, which response_format and tool_choice need")
                backend = self._model.tokenizer.backend_tokenizer
                size = max(self._vocabulary, backend.get_vocab_size(with_added_tokens=True))
                self._made = LLTokenizer(backend.to_str(), n_vocab=size, eos_token=self._eos[0])
            return self._made


def _reason(message: str) -> str:
    """The library's message, shortened, without its state and without generated grammar lines."""
    message = message.rpartition("failed to compile JSON schema: ")[2]
    reason = re.split(r"\n\s*\d+ \| |<state>|<non-verbose/>", message)[0]
    return " ".join(reason.split())[:MOST_REASON] or "the grammar cannot be followed"
