"""Generation: batched prompts of different lengths, streamed or whole; finished rows make room."""

from collections.abc import Callable, Iterator, Sequence

from trapline.gold import checks
from trapline.gold.arithmetic import cdiv
from trapline.gold.decoder.engine import Engine, Token
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.sampling import Sampling
from trapline.gold.errors import DTypeError, RangeError

#: Positions a page.
PAGE = 16


def stream(
    decoder: Network,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampling: Sampling | Sequence[Sampling] | None = None,
    batch: int = 32,
    decode: Callable[[list[int]], str] | None = None,
    stop_texts: Sequence[str] = (),
) -> Iterator[Token]:
    """Yields tokens as they come. At most `batch` prompts run at once; others wait their turn.

    Stop tokens are yielded too. With a `decode` function tokens carry the text that can be shown,
    which ends before a stop string, wherever in the tokens it lies.
    """
    checks.integers(max_new_tokens=max_new_tokens, batch=batch)
    if max_new_tokens < 1 or batch < 1:
        raise RangeError("max_new_tokens and batch must be at least 1")
    ways = _per_prompt(sampling or Sampling(), len(prompts))
    engine = _engine(decoder, prompts, max_new_tokens, batch)
    for number, (prompt, way) in enumerate(zip(prompts, ways, strict=True)):
        try:
            engine.add(
                prompt,
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
                sampling=way,
                decode=decode,
                stop_texts=stop_texts,
            )
        except (RangeError, DTypeError) as error:
            raise type(error)(f"prompt {number}: {error}") from None
    while engine.is_busy:
        yield from engine.step()


def generate(
    decoder: Network,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampling: Sampling | Sequence[Sampling] | None = None,
    batch: int = 32,
) -> list[list[int]]:
    """The new tokens of each prompt, its stop token included."""
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


def _engine(decoder: Network, prompts: Sequence[Sequence[int]], new: int, batch: int) -> Engine:
    """As many pages as the longest prompts need that may run together.

    More than the context is refused when a prompt is added: no memory is taken for it before.
    """
    lengths = (min(len(prompt) + new, decoder.config.context) for prompt in prompts)
    pages = sorted((cdiv(length, PAGE) for length in lengths), reverse=True)
    rows = min(batch, max(len(prompts), 1))
    return Engine(decoder, rows=rows, pages=max(sum(pages[:rows]), 1), page_size=PAGE)


def _per_prompt(sampling: Sampling | Sequence[Sampling], count: int) -> list[Sampling]:
    ways = [sampling] * count if isinstance(sampling, Sampling) else list(sampling)
    if len(ways) != count:
        raise RangeError(f"{len(ways)} samplings for {count} prompts")
    return ways
