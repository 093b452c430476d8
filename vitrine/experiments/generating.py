"""Text generation."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar, overload

from vitrine.connection.transport import Transport, together
from vitrine.experiments.directions import Steer, operations
from vitrine.experiments.prompt_batches import Chat, Prompt, asked, check, is_chat, named_by, requests, route

MOST_VARIANTS = 64  # in one request
MOST_NUMBERS = 1 << 16  # of their vectors, of some 20 characters each: a body may have 2 MiB
_T = TypeVar("_T")


class GenerateMethods(Transport):
    """The part of `Server` that generates texts.

    Attributes:
        model: The id of the model.
    """

    model: str

    async def complete(self, /, prompt: Prompt | Sequence[str], **fields: Any) -> dict[str, Any]:
        """Send one request and return the response as JSON.

        Args:
            prompt: A text, a list of texts, or a chat: a list of messages.
            fields: Further fields of the request, OpenAI's and those of docs/http.md; None omits a field.

        Raises:
            ServerError: The server rejects the request.
            ConnectionError: The server does not respond.
            ValueError: `stream` is given.

        Examples:
            >>> answer = server.complete("Ann has 3 boxes", max_tokens=4, temperature=0)
            >>> answer["usage"]["completion_tokens"]
            4
        """
        if fields.get("stream"):
            raise ValueError("stream: complete gives whole answers; for streams use OpenAI's client")
        path, field = route(prompt)
        given = {name: value for name, value in fields.items() if value is not None}
        return await self.post(path, {"model": self.model, **field, **given}, _sequences(prompt, given))

    async def _variants(
        self,
        prompts: Sequence[Prompt],
        variants: Sequence[Sequence[Mapping[str, Any]]],
        unit: str,
        progress: bool | None,
        **fields: Any,
    ) -> list[dict[str, Any]]:
        """The choice for each prompt and list of interventions, prompt by prompt, with many lists per request."""
        groups: list[list[Sequence[Mapping[str, Any]]]] = []
        left = 0  # numbers that still fit into the last request
        for variant in variants:
            size = sum(len(part) for change in variant for part in change.values() if isinstance(part, list))
            if not groups or len(groups[-1]) == MOST_VARIANTS or size > left:
                groups.append([])
                left = MOST_NUMBERS
            groups[-1].append(variant)
            left -= size
        calls = [
            (len(group), self.complete(prompt, **fields, variants=group)) for prompt in prompts for group in groups
        ]
        answers = await gathered(calls, unit, progress)
        return [choice for answer in answers for choice in sorted(answer["choices"], key=itemgetter("index"))]

    @overload
    async def generate(self, /, prompt: str | Chat, **fields: Any) -> str: ...
    @overload
    async def generate(self, /, prompt: Sequence[str] | Sequence[Chat], **fields: Any) -> list[str]: ...
    async def generate(
        self,
        /,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = 64,
        temperature: float = 0,
        steer: Steer | Sequence[Steer] | None = None,
        interventions: Sequence[Mapping[str, Any]] | None = None,
        progress: bool | None = None,
        **fields: Any,
    ) -> str | list[str]:
        """Generate the text after a prompt; for a list of prompts, a list in its order.

        Args:
            prompt: A text or a chat (a list of messages), or a list of them.
            max_tokens: The most tokens of each text.
            temperature: 0 takes the likeliest token each time.
            steer: A vector to add, such as `direction.at(2) * 1.5`, or a list of them.
            interventions: Other interventions, as in docs/interventions.md.
            progress: Whether to show a progress bar; by default in terminals and notebooks, for several requests.
            fields: Further fields of the requests, OpenAI's and those of docs/http.md. For `n` and `stream`, use
                `complete` or OpenAI's client.

        Raises:
            ServerError: The server rejects the request.
            ConnectionError: The server does not respond.
            ValueError: A prompt is invalid, or `n` or `stream` is given.

        Examples:
            >>> question = [{"role": "user", "content": "Tom has 3 boxes of 12 pens. How many pens is that?"}]
            >>> print(server.generate(question))
            Now Tom has 3*12=36 pens.
            #### 36
            >>> len(server.generate(["Ann has", "Tom has"], max_tokens=4))
            2
        """
        if beyond := {"n", "stream"} & fields.keys():
            raise ValueError(
                f"generate returns one text for each prompt and cannot take {', '.join(beyond)}: use complete",
            )
        if "unit" in fields:
            raise ValueError("unit: set it on the vector, direction.at(layer, unit='residual_norm') * scale")
        fields |= {"max_tokens": max_tokens, "temperature": temperature}
        fields["interventions"] = operations(steer, interventions)
        is_one = isinstance(prompt, str) or is_chat(prompt)
        prompts: list[Any] = [prompt] if is_one else list(prompt)
        check(prompts, "prompt")
        groups = requests(prompts)

        async def part(group: list[int]) -> dict[str, Any]:
            with named_by(group):
                return await self.complete(asked(prompts, group), **fields)

        answers = await gathered([(len(group), part(group)) for group in groups], progress=progress)
        texts = {
            group[choice["index"]]: text_of(choice)
            for group, answer in zip(groups, answers, strict=True)
            for choice in answer["choices"]
        }
        return texts[0] if is_one else [texts[place] for place in range(len(prompts))]


def _sequences(prompt: Prompt | Sequence[str], fields: Mapping[str, Any]) -> int:
    """The number of sequences that the server runs for a request."""
    prompts = 1 if isinstance(prompt, str) or is_chat(prompt) else len(prompt)
    of_each = [fields.get("n"), fields.get("best_of"), len(fields.get("variants") or ())]
    return prompts * max(1, *(count for count in of_each if isinstance(count, int)))


def text_of(choice: Mapping[str, Any]) -> str:
    """The text of a choice of a completion or chat."""
    return choice["text"] if "text" in choice else choice["message"]["content"] or ""


async def gathered(
    calls: Sequence[tuple[int, Awaitable[_T]]], unit: str = "prompt", progress: bool | None = None
) -> list[_T]:
    """Await requests and return their results in order; the first failure cancels the others.

    Args:
        calls: The requests, each with its number of units.
        unit: The unit that the bar counts.
        progress: Whether to show a bar; by default in terminals and notebooks, for several requests.
    """
    with _bar(sum(count for count, _ in calls), unit, progress, len(calls) > 1) as bar:

        async def counted(count: int, call: Awaitable[_T]) -> _T:
            result = await call
            bar.update(count)
            return result

        return await together(counted(count, call) for count, call in calls)


def _bar(total: int, unit: str, progress: bool | None, is_long: bool) -> Any:
    from tqdm import tqdm

    is_seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(total=total, unit=unit, disable=not (is_long and is_seen if progress is None else progress))
