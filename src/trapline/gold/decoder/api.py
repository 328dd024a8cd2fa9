"""`Decoder`: a language model with its checkpoint's tokenizer and end tokens, and generation."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self, overload

import torch

from trapline.gold import checks
from trapline.gold.atomic_write import update_folder
from trapline.gold.decoder import weights
from trapline.gold.decoder.answers import (
    Answer,
    Beams,
    Job,
    Piece,
    Prompts,
    prompt_ids,
    refuse_combination,
    sampling_per_answer,
)
from trapline.gold.decoder.config import DecoderConfig, read_config
from trapline.gold.decoder.engine import integers
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.sampling import Sampling
from trapline.gold.decoder.speculator import Speculator
from trapline.gold.decoder.text import Codec, Tokenizer, end_ids, save_ends, stop_strings
from trapline.gold.errors import DTypeError, RangeError
from trapline.gold.hub import local_model


class Decoder(Network):
    """A language model: `generate` for answers, `decoder(ids)` for logits.

    `stop_ids` are the tokens that end an answer, by default those that the checkpoint names.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.stop_ids = list(config.eos_ids)
        self._codec: Codec | None = None
        #: A tokenizer.json that is read when text is first needed.
        self._tokenizer_folder: Path | None = None

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        context: int | None = None,
    ) -> Self:
        """Loads a Hugging Face checkpoint: `config.json`, safetensors, `tokenizer.json`.

        `folder` may also be a GGUF file, or an id of the Hugging Face Hub, which is downloaded
        with `huggingface_hub`. The weights keep the checkpoint's dtype unless `dtype` is given;
        FP8 weights become dense in the dtype of the embedding, GGUF files in float32. `context`
        limits the length of sequences; with `longrope` it selects the short or the long factors.
        """
        kind = weights.checked_dtype(dtype)
        device = weights.checked_device(device)
        folder = local_model(folder)
        if folder.suffix == ".gguf":
            from trapline.gold.decoder.gguf_reader import read_gguf

            decoder = weights.from_tensors(cls, *read_gguf(folder, kind), kind, device)
            folder = folder.parent
        elif weights.quantisation(folder) == "trapline-ternary":
            from trapline.gold.ternary.packed_model import load_packed

            decoder = load_packed(folder, kind, device, model=cls)
            decoder.stop_ids = end_ids(folder)
        else:
            config, tensors = read_config(folder), weights.read_weights(folder, kind)
            decoder = weights.from_tensors(cls, config, tensors, kind, device)
            decoder.stop_ids = end_ids(folder)
        if context is not None:
            decoder.config = decoder.config.limited(context)
        if (folder / "tokenizer.json").is_file() and find_spec("tokenizers"):
            decoder._tokenizer_folder = folder.resolve()
        return decoder

    def save_pretrained(self, folder: str | Path, *, shard_bytes: int = 4 << 30) -> None:
        """Writes what `from_pretrained` reads; dense weights above `shard_bytes` are split.

        Packed weights are saved packed, ternary ones with latent weights as the dense weights that
        they stand for. Other files of the folder stay; a tokenizer is not copied. Nothing changes
        until all new files are complete.
        """
        from trapline.gold.ternary.layers import dequantized, latents
        from trapline.gold.ternary.packed_model import is_packed, save_packed

        folder = Path(folder)
        if is_packed(self):
            weights.check_shard_bytes(shard_bytes)
            files = None
        else:
            files = weights.files_of(dequantized(self) if latents(self) else self, shard_bytes)

        def write(place: Path) -> None:
            if files is None:
                save_packed(self, place)
            else:
                files.write(place)
            found = folder / "generation_config.json"
            said = end_ids(folder) if found.is_file() else list(self.config.eos_ids)
            if self.stop_ids != said:
                save_ends(place, self.stop_ids)

        weights.remove_stale(folder, update_folder(folder, write))

    @property
    def tokenizer(self) -> Codec | None:
        """Text to token ids and back; assign another object with `encode` and `decode`."""
        if self._codec is None and self._tokenizer_folder is not None:
            self._codec = Tokenizer(self._tokenizer_folder)
        return self._codec

    @tokenizer.setter
    def tokenizer(self, codec: Codec | None) -> None:
        self._codec, self._tokenizer_folder = codec, None

    @overload
    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        sampling: Sampling | Sequence[Sampling] | None = None,
        beams: int | Beams | None = None,
        speculate: Speculator | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] | None = None,
        stream: Literal[False] = False,
        n: int = 1,
        logprobs: int | None = None,
        batch: int = 32,
    ) -> list[Answer]: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        sampling: Sampling | Sequence[Sampling] | None = None,
        beams: None = None,
        speculate: Speculator | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] | None = None,
        stream: Literal[True],
        n: int = 1,
        logprobs: int | None = None,
        batch: int = 32,
    ) -> Iterator[Piece]: ...

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        sampling: Sampling | Sequence[Sampling] | None = None,
        beams: int | Beams | None = None,
        speculate: Speculator | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] | None = None,
        stream: bool = False,
        n: int = 1,
        logprobs: int | None = None,
        batch: int = 32,
        **unknown: Any,
    ) -> list[Answer] | Iterator[Piece]:
        """Continues prompts: text, chat messages or token ids, or a list of one kind of them.

        Chat messages go through the checkpoint's chat template; an answer continues the last
        message if that is the assistant's.

        Returns `n` `Answer`s a prompt in one list; with `stream=True`, an iterator of `Piece`s as
        they come. Greedy unless `sampling` is given; one `Sampling` for several answers draws
        answer i with seed + i. With `logprobs=k` each token has its log-probability and those of
        the k likeliest.

        An answer ends at `stop_ids` (the checkpoint's own by default), before a text of `stop`, or
        after `max_new_tokens`. `speculate` drafts tokens ahead and gives the same answers sooner,
        without logprobs. `beams` searches instead and composes with none of sampling, speculate,
        stop, stream, n and logprobs. At most `batch` answers run at once. A prompt that fails on
        the way gives an answer with finish_reason "error" and does not affect the others.
        """
        checks.refuse_options("Decoder.generate", unknown)
        checks.integers(max_new_tokens=max_new_tokens, batch=batch, n=n)
        if max_new_tokens < 1 or batch < 1 or n < 1:
            raise RangeError("max_new_tokens, batch and n must be at least 1")
        stops = stop_strings(stop)
        refuse_combination(
            *(beams, speculate),
            sampling=sampling,
            stop=stops,
            stream=stream,
            n=n,
            logprobs=logprobs,
        )
        codec = self.tokenizer
        if stops and codec is None:
            raise RangeError("stop strings need a tokenizer: this decoder has none; use stop_ids")
        ids = prompt_ids(prompts, codec)
        job = Job(
            self,
            [one for one in ids for _ in range(n)],
            codec,
            max_new_tokens,
            sampling_per_answer(sampling, len(ids), n, self.config.vocab),
            stops,
            tuple(integers("a stop token", self.stop_ids if stop_ids is None else stop_ids)),
            batch,
            n,
            logprobs,
        )
        if beams is not None:
            return job.search(beams if isinstance(beams, Beams) else Beams(beams))
        if speculate is not None and not hasattr(speculate, "stream"):
            raise DTypeError(f"speculate must be a Speculation, got {speculate!r}")
        return job.pieces(speculate) if stream else job.answers(speculate)
