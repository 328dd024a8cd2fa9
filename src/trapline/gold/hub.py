"""Models on the Hugging Face Hub: an id such as `Qwen/Qwen2.5-0.5B` becomes a local path.

Files come from the local cache of `huggingface_hub` or are downloaded into it. Only data is
fetched: JSON, safetensors and GGUF; no code of a repository runs.
"""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trapline.gold.errors import RangeError

#: What a checkpoint consists of; some repositories hold the weights twice.
_FILES = ["*.json", "*.safetensors", "*.jinja"]
_COPIES = ["consolidated*", "original/*", "onnx/*"]
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_GGUF_ID = re.compile(rf"({_ID.pattern})/([\w./-]+\.gguf)")


def is_hub_id(model: str | Path) -> bool:
    """Whether this is `owner/name` or `owner/name/file.gguf`, and no path of this machine."""
    text = str(model)
    known = _ID.fullmatch(text) or _GGUF_ID.fullmatch(text)
    return known is not None and not Path(model).exists()


def local_model(model: str | Path) -> Path:
    """The folder or GGUF file of a model: a path as it is, a Hub id downloaded."""
    if not is_hub_id(model):
        return Path(model)
    if file := _GGUF_ID.fullmatch(str(model)):
        return _fetched(file[1], lambda hub: hub.hf_hub_download(file[1], file[2]))
    return _fetched(
        str(model),
        lambda hub: hub.snapshot_download(
            str(model), allow_patterns=_FILES, ignore_patterns=_COPIES
        ),
    )


def local_config(model: str | Path) -> Path:
    """The folder of a model's `config.json`; of a Hub id, nothing else is downloaded."""
    if not is_hub_id(model):
        return Path(model)
    name = str(model)
    return _fetched(name, lambda hub: hub.hf_hub_download(name, "config.json")).parent


def _fetched(name: str, fetch: Callable[[Any], str]) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise FileNotFoundError(
            f"{name} is not a path of this machine; install huggingface_hub (trapline[hub]) to "
            "load it from the Hugging Face Hub"
        ) from None
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # its warnings of each attempt; the sentence below says it once
    try:
        return Path(fetch(huggingface_hub))
    except errors.GatedRepoError:
        raise RangeError(
            f"{name} is gated: accept its terms on the Hugging Face Hub, then log in with "
            "`hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise RangeError(
            f"{name} is neither a path of this machine nor a public model of the Hugging Face Hub"
        ) from None
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _unreachable(name) from None
        raise RangeError(f"{name} on the Hugging Face Hub has no such file: {error}") from None
    except errors.HfHubHTTPError as error:
        said = str(error).strip().splitlines()
        reason = said[0] if said else repr(error)
        raise RangeError(f"the Hugging Face Hub refused {name}: {reason}") from None
    except OSError:  # no network, or offline mode
        raise _unreachable(name) from None
    finally:
        log.setLevel(level)


def _unreachable(name: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"{name} is not a path of this machine and not in the cache of the Hugging Face Hub, "
        "which cannot be reached; give a folder, or try again with a network"
    )
