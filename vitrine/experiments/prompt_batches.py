"""Prompts, and their grouping into requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vitrine.server_error import ServerError

Chat = Sequence[Mapping[str, Any]]  # messages, each with `role` and `content`
Prompt = str | Chat

PROMPTS_PER_REQUEST = 64  # prompts in a request: as many as share a forward pass of the server by default
MOST_CHARACTERS = 1 << 15  # of a request's prompts together, so that its activations stay within limits


def is_chat(prompt: Any) -> bool:
    """Whether it is a single chat rather than a text or a list of prompts."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return is_list and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def route(prompt: Prompt | Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The route for a text, a list of texts or a chat, and the field that contains it."""
    if is_chat(prompt):
        return "/chat/completions", {"messages": prompt}
    return "/completions", {"prompt": prompt}


def requests(prompts: Sequence[Prompt]) -> list[list[int]]:
    """The indices of each request's prompts: texts of similar length together, each chat alone."""
    groups: list[list[int]] = []
    left = 0  # characters that still fit into the last request
    for place in sorted(range(len(prompts)), key=lambda place: (is_chat(prompts[place]), len(prompts[place]))):
        size = MOST_CHARACTERS if is_chat(prompts[place]) else max(1, len(prompts[place]))
        if size > left or len(groups[-1]) >= PROMPTS_PER_REQUEST:
            groups.append([])
            left = MOST_CHARACTERS
        groups[-1].append(place)
        left -= size
    return groups


def asked(prompts: Sequence[Prompt], group: Sequence[int]) -> Any:
    """The prompts of one request: one chat, or a list of texts."""
    first = prompts[group[0]]
    return first if is_chat(first) else [prompts[place] for place in group]


@contextmanager
def named_by(group: Sequence[int]) -> Iterator[None]:
    """Make errors of a request name the prompt by its index in the caller's list.

    Raises:
        ServerError: The block's error.
    """
    try:
        yield
    except ServerError as error:
        message = re.sub(r"\bprompt\[(\d+)\]", lambda match: f"prompt[{group[int(match[1])]}]", error.message)
        raise ServerError(message, error.status, error.param, error.code) from error


def check_one(prompt: Any, name: str) -> None:
    """Check that a value is one prompt.

    Raises:
        ValueError: It is not; the message starts with `name`.
    """
    if not isinstance(prompt, str) and not is_chat(prompt):
        raise ValueError(f"{name}: give one prompt, a text or a list of messages, not {prompt!r:.60}")


def check(prompts: Sequence[Prompt], name: str) -> None:
    """Check that a value is a list of prompts.

    Raises:
        ValueError: It is a single prompt, empty, or contains something else; the message starts with `name`.
    """
    if isinstance(prompts, str) or is_chat(prompts) or not len(prompts):
        raise ValueError(f"{name}: give a list of prompts, with at least one")
    for place, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not is_chat(prompt):
            raise ValueError(f"{name}[{place}]: {prompt!r:.60} is neither a text nor a list of messages")
