"""Token ids in, token ids out: ragged prompts in one batch, streamed or whole.

`Decoder.generate` adds text, beams and speculation; both run the same `Engine`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from trapline.gold import checks
from trapline.gold.arithmetic import cdiv
from trapline.gold.decoder.engine import Engine, Token
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.sampling import Sampling, sampling_per_prompt
from trapline.gold.decoder.text import Decode
from trapline.gold.errors import DTypeError, RangeError

#: Positions a page.
PAGE = 16


def generate(
    decoder: Network,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampling: Sampling | Sequence[Sampling] | None = None,
    batch: int = 32,
    **unknown: Any,
) -> list[list[int]]:
    """The new tokens of each prompt, including its stop token.

    One `Sampling` for several prompts draws prompt i with seed + i. A prompt whose logits are NaN
    raises; `Decoder.generate` reports it in that prompt's answer instead.
    """
    checks.refuse_options("generate", unknown)
    _check_prompts(prompts)
    answers: list[list[int]] = [[] for _ in prompts]
    for token in stream(
        decoder,
        prompts,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        sampling=sampling,
        batch=batch,
    ):
        answers[token.request].append(token.token)
    return answers


def stream(
    decoder: Network,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampling: Sampling | Sequence[Sampling] | None = None,
    batch: int = 32,
    decode: Decode | None = None,
    stop_texts: Sequence[str] = (),
) -> Iterator[Token]:
    """Yields tokens as they come, stop tokens included; at most `batch` prompts run at once.

    With `decode`, tokens carry the text that is final so far; it ends before a stop string.
    """
    engine = filled_engine(
        decoder,
        prompts,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        sampling=sampling,
        batch=batch,
        decode=decode,
        stop_texts=stop_texts,
    )
    while engine.is_busy:
        yield from engine.step()


def filled_engine(
    decoder: Network,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    sampling: Sampling | Sequence[Sampling] | None,
    batch: int,
    decode: Decode | None,
    stop_texts: Sequence[str],
    logprobs: int | None = None,
) -> Engine:
    """An engine that holds these prompts as requests 0, 1, …; nothing runs yet."""
    checks.integers(max_new_tokens=max_new_tokens, batch=batch)
    if max_new_tokens < 1 or batch < 1:
        raise RangeError("max_new_tokens and batch must be at least 1")
    _check_prompts(prompts)
    settings = sampling_per_prompt(sampling, len(prompts))
    # As many pages as the longest prompts need that may run together. `Engine.add` refuses prompts
    # beyond the context, so no memory is reserved for them.
    context, rows = decoder.config.context, min(batch, max(len(prompts), 1))
    lengths = (min(len(prompt) + max_new_tokens, context) for prompt in prompts)
    pages = sorted((cdiv(length, PAGE) for length in lengths), reverse=True)
    engine = Engine(decoder, rows=rows, pages=max(sum(pages[:rows]), 1), page_size=PAGE)
    for number, (prompt, setting) in enumerate(zip(prompts, settings, strict=True)):
        try:
            engine.add(
                prompt,
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
                sampling=setting,
                decode=decode,
                stop_texts=stop_texts,
                logprobs=logprobs,
            )
        except (RangeError, DTypeError) as error:
            raise type(error)(f"prompt {number}: {error}") from None
    return engine


def _check_prompts(prompts: Any) -> None:
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        raise DTypeError(
            f"prompts must be a list of lists of token ids, got {prompts!r}; "
            "Decoder.generate takes text"
        )
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
            raise DTypeError(
                f"prompt {number} must be a list of token ids, got {prompt!r}; "
                "write one prompt as [[5, 6]], or give text to Decoder.generate"
            )
