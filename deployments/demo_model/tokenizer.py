"""The demo model's tokenizer: a byte-level BPE in which each digit is a token of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from deployments.demo_model.template import CHAT_TEMPLATE, RESPONSE_TEMPLATE

VOCABULARY = 1024
CONTEXT = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# The head of a calculator call may become one token; digits and line ends never merge with anything,
# so that a turn's tokens do not depend on what follows it.
PIECES = "|".join(
    [
        r'\{"name": "calculator", "arguments": \{"expression": "',
        r"\p{N}",
        r"[\r\n]",
        r"'(?:[sdmt]|ll|ve|re)",
        r" ?\p{L}+",
        r" ?[^\s\p{L}\p{N}]+",
        r"[^\S\r\n]+(?!\S)",
        r"[^\S\r\n]+",
    ]
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer on rendered conversations and dress it with the two templates."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKERS),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    marker = re.compile("|".join(map(re.escape, SPECIAL + MARKERS)))
    tokenizer.train_from_iterator((marker.sub("\n", text) for text in texts), trainer)
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in MARKERS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
