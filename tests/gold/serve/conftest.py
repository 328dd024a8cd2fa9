"""A server over a tiny random model with a byte-level tokenizer, in a thread of this process."""

import contextlib
import threading
import time

import pytest
import torch
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.chat import ChatTemplate
from trapline.gold.decoder.config import from_dict
from trapline.gold.decoder.engine import Engine
from trapline.gold.serve.app import Service
from trapline.gold.serve.server import Server, bound

SHAPE = {
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "eos_token_id": 256,
}
CHAT = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The decoder, loaded from its checkpoint."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    decoder = Decoder(from_dict(SHAPE)).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
        decoder.head.weight[256] = 0.0  # greedy decoding never ends
    decoder.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Rust(models.BPE(vocab={one: i for i, one in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>", "<pad>"])
    made.save(str(folder / "tokenizer.json"))
    loaded = Decoder.from_pretrained(folder).requires_grad_(False)
    loaded.tokenizer.chat_template = ChatTemplate(CHAT)
    return loaded


@contextlib.contextmanager
def serving(decoder, *, rows=8, pages=1024, **options):
    """The service and its address while it runs."""
    engine = Engine(decoder, rows=rows, pages=pages, share_prefixes=True)
    service = Service(decoder, engine, name="tiny", **options)
    server = Server(service, grace=5)
    with bound("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            until(lambda: server.started)
            yield service, f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=30)
    assert not thread.is_alive()
    assert not service.worker.is_alive


def until(holds, seconds=20.0):
    """Waits until a condition holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def served(tiny):
    with serving(tiny) as found:
        yield found


@pytest.fixture
def started():
    """Starts another server: `with started(decoder, …) as (service, url)`."""
    return serving


@pytest.fixture
def eventually():
    return until
