"""Tiny random models of transformers: the same answers with our attention as with its own."""

import copy

import pytest

from trapline.gold.errors import ShapeError, UnsupportedError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from trapline.gold.attention import huggingface  # noqa: E402 - needs both

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
#: Grouped heads; a window; a window in every other layer; soft caps and a scale of its own.
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Qwen3": {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    "Gemma2": {"sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5},
}
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module", autouse=True)
def registered():
    huggingface.register()


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    """The same weights twice: with transformers' plain attention, and with ours."""
    return make_pair(request.param)


def make_pair(name):
    config = getattr(transformers, f"{name}Config")(**SMALL, **MODELS[name])
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    plain = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    # Larger than they are at the start of training, so that attention matters.
    with torch.no_grad():
        for parameter in plain.model.layers.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
    ours = copy.deepcopy(plain)
    ours.set_attn_implementation("trapline")
    assert ours.config._attn_implementation == "trapline"
    return plain, ours


def draw(*shape):
    return torch.randint(2, 61, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_prefill(pair):
    ids = draw(2, 17)
    plain, ours = (model(ids).logits for model in pair)
    torch.testing.assert_close(ours, plain, **CLOSE)


@torch.no_grad()
def test_decoding_from_a_cache_in_steps_of_any_size(pair):
    ids = draw(2, 23)
    want = pair[0](ids).logits
    past, got = None, []
    for piece in ids.split([9, 1, 4, 1, 1, 7], dim=1):
        step = pair[1](piece, past_key_values=past, use_cache=True)
        past = step.past_key_values
        got.append(step.logits)
    torch.testing.assert_close(torch.cat(got, dim=1), want, **CLOSE)


def test_training_gives_the_same_loss_and_gradients(pair):
    ids = draw(2, 15)
    found = []
    for model in pair:
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (plain_loss, plain), (our_loss, ours) = found
    torch.testing.assert_close(our_loss, plain_loss, **CLOSE)
    for name, grad in plain.items():
        torch.testing.assert_close(ours[name], grad, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_at_either_end(pair, side):
    ids, mask = draw(3, 14), torch.ones(3, 14, dtype=torch.long)
    hidden = slice(0, 5) if side == "left" else slice(9, 14)
    mask[1, hidden] = 0
    plain, ours = (model(ids, attention_mask=mask).logits for model in pair)
    torch.testing.assert_close(ours[mask.bool()], plain[mask.bool()], **CLOSE)


@torch.no_grad()
def test_generate_with_a_padded_batch_and_with_beams(pair):
    ids, mask = draw(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    plain, ours = (model.generate(ids, **options) for model in pair)
    assert torch.equal(plain, ours)
    options |= {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
    plain, ours = (model.generate(ids, **options).sequences_scores for model in pair)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-4)


@torch.no_grad()
def test_static_cache(pair):
    ids = draw(2, 11)
    want = pair[0](ids).logits
    past = transformers.StaticCache(config=pair[1].config, max_cache_len=20)
    got = [pair[1](piece, past_key_values=past).logits for piece in ids.split([8, 1, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(got, dim=1), want, **CLOSE)


def test_packed_sequences_with_boundaries(pair):
    lengths = [5, 1, 8]
    ids = draw(1, sum(lengths))
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = torch.tensor([0, 5, 6, 14], dtype=torch.int32)
    packing = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 8, "max_length_k": 8}
    with torch.no_grad():
        want = torch.cat([pair[0](one).logits for one in ids.split(lengths, dim=1)], dim=1)
        got = pair[1](ids, position_ids=places, use_cache=False, **packing).logits
    torch.testing.assert_close(got, want, **CLOSE)
    with pytest.raises(UnsupportedError, match="cu_seq_lens_q"):
        pair[1](ids, position_ids=places, use_cache=False)
    with pytest.raises(ShapeError, match="batch of one"):
        pair[1](ids.expand(2, -1), position_ids=places, use_cache=False, **packing)


def test_mask_and_attention_compile_and_the_graph_asserts_the_mask():
    from transformers.masking_utils import and_masks, packed_sequence_mask_function
    from transformers.masking_utils import sliding_window_causal_mask_function as sliding

    module = torch.nn.Module()

    def attend(q, sequence):
        pattern = and_masks(sliding(3), packed_sequence_mask_function(sequence))
        sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6, "local_size": 3}
        mask = huggingface.token_mask(**sizes, mask_function=pattern)
        return huggingface.attention(module, q, q, q, mask, sliding_window=3)[0]

    q, one = torch.randn(2, 2, 6, 4), torch.zeros(2, 6, dtype=torch.long)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, one), attend(q, one))
    # Nobody can look at the positions while compiling: the graph itself asserts.
    with pytest.raises(RuntimeError, match="compiled for a causal mask"):
        compiled(q, one + (torch.arange(6) > 3))


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_compiled_without_graph_breaks(name):
    plain, ours = make_pair(name)
    ids, places = draw(2, 12), torch.arange(12).expand(2, 12)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = compiled(ids, position_ids=places, use_cache=False).logits
        torch.testing.assert_close(got, plain(ids).logits, **CLOSE)
        # Nobody can look at the positions while compiling: the graph itself asserts.
        with pytest.raises(RuntimeError, match="compiled for a causal mask"):
            compiled(ids, position_ids=places % 5, use_cache=False)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_mask_compiles_without_graph_breaks(side):
    torch._dynamo.reset()  # earlier tests compiled the same layers
    theirs, ours = make_pair("Llama")
    ids = torch.arange(2 * 9).reshape(2, 9) % 7 + 1
    mask = torch.ones_like(ids)
    mask[1, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for tokens in (mask, torch.ones_like(mask)):
            got = compiled(ids, attention_mask=tokens, use_cache=False).logits
            want = theirs(ids, attention_mask=tokens, use_cache=False).logits
            torch.testing.assert_close(got[tokens > 0], want[tokens > 0], rtol=1e-4, atol=1e-5)


def test_training_under_autocast(pair):
    """Rotated queries and keys are float32 there, values are not: attention needs one dtype."""
    ids, found = draw(2, 12), []
    for model in pair:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        found.append(loss.detach())
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(*found, rtol=2e-2, atol=0)


@pytest.fixture(scope="module")
def llama():
    return make_pair("Llama")


def test_other_masks_are_rejected(llama):
    ids = draw(1, 6)
    custom = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match=r"a mask of shape \(1, 1, 6, 6\)"):
        llama[1](ids, attention_mask=custom)


def test_holes_in_a_window_are_rejected():
    _, ours = make_pair("Mistral")
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, 5] = 0
    with pytest.raises(UnsupportedError, match="padding inside a sequence"):
        ours(draw(1, 12), attention_mask=mask)


def test_holes_without_a_window_are_not_seen(llama):
    ids, mask = draw(1, 12), torch.ones(1, 12, dtype=torch.long)
    mask[0, 5] = 0
    with torch.no_grad():
        plain, ours = (model(ids, attention_mask=mask).logits for model in llama)
    torch.testing.assert_close(ours[mask.bool()], plain[mask.bool()], **CLOSE)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"dropout": 0.1}, "dropout of 0.1"),
        ({"output_attentions": True}, "attention weights"),
        ({"s_aux": torch.zeros(2)}, "attention sinks"),
        ({"position_bias": torch.zeros(1)}, "a bias on the scores"),
        ({"is_causal": False, "sliding_window": 3}, "a sliding window without causality"),
    ],
)
def test_unsupported_arguments_are_named(asked, named):
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedError, match=named):
        huggingface.attention(torch.nn.Module(), q, q, q, None, **asked)


def gpt2():
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_pdrop=0.0)).eval()


def bert():
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )
    config._attn_implementation = "eager"
    return transformers.BertModel(config).eval()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("make", [gpt2, bert, lambda: make_pair("Llama")[1]])
def test_attention_weights_are_rejected(make, compiled):
    """GPT-2 tells its layers nothing: what collects their weights would come back empty."""
    model = make()
    model.set_attn_implementation("trapline")
    call = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(UnsupportedError, match="attention weights"):
        call(draw(1, 6), output_attentions=True)
    assert len(call(draw(1, 6), output_hidden_states=True).hidden_states) == 3


def test_a_rejected_request_does_not_affect_later_calls():
    """Code made for a call that is refused serves calls that are not."""
    collector = huggingface._collector
    collects = torch.compile(huggingface._weights_collected, backend="eager")
    for wanted, refused in (("attentions", True), ("hidden_states", False), ("attentions", True)):
        token = collector.set({wanted: []})
        assert collects() is refused
        collector.reset(token)


def test_encoder_with_padding():
    torch.manual_seed(0)
    plain = bert()
    ours = copy.deepcopy(plain)
    ours.set_attn_implementation("trapline")
    ids, mask = draw(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[1, 7:] = 0
    for given in (None, mask):
        with torch.no_grad():
            a, b = (m(ids, attention_mask=given).last_hidden_state for m in (plain, ours))
        kept = torch.ones(2, 10, dtype=torch.bool) if given is None else mask.bool()
        torch.testing.assert_close(b[kept], a[kept], **CLOSE)


def test_chunked_pattern_is_not_mistaken_for_a_window():
    """Chunks: a query sees back to the start of its chunk, which no window does."""
    from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function

    sizes = {"batch_size": 1, "q_length": 8, "kv_length": 8}
    chunked = chunked_causal_mask_function(4, torch.zeros(1, dtype=int))
    refused = huggingface.token_mask(**sizes, mask_function=chunked, local_size=4)
    assert refused.ndim == 1

    def with_a_prefix(row, head, query, key):
        return causal_mask_function(row, head, query, key) | ((query < 3) & (key < 3))

    def without_a_window(row, head, query, key):
        return causal_mask_function(row, head, query, key)

    assert huggingface.token_mask(**sizes, mask_function=with_a_prefix).ndim == 1
    assert huggingface.token_mask(**sizes, mask_function=without_a_window) is None
    claimed = huggingface.token_mask(**sizes, mask_function=without_a_window, local_size=4)
    assert claimed.ndim == 1
    assert huggingface.token_mask(**sizes, mask_function=causal_mask_function) is None
    # A custom function is rejected whatever it returns: it may differ where it is not evaluated.
    assert huggingface.token_mask(**sizes, mask_function=without_a_window, use_vmap=True).ndim == 1


def test_two_sided_window_is_rejected():
    from transformers.masking_utils import sliding_window_bidirectional_mask_function as sliding

    sizes = {"batch_size": 1, "q_length": 8, "kv_length": 8, "allow_is_bidirectional_skip": True}
    made = huggingface.token_mask(**sizes, mask_function=sliding(3), local_size=3)
    with pytest.raises(UnsupportedError, match="does not support this mask"):
        huggingface.attention(torch.nn.Module(), *torch.zeros(3, 1, 2, 8, 4), made, is_causal=False)


def test_mask_of_new_tokens_alone_is_rejected(llama):
    """transformers' own would hide everything behind the mask's end: surely not what is meant."""
    ids = draw(1, 9)
    past = llama[1](ids[:, :6], use_cache=True).past_key_values
    with pytest.raises(ShapeError, match="must cover all 9 keys, got 3 columns"):
        llama[1](ids[:, 6:], past_key_values=past, attention_mask=torch.ones(1, 3).long())


def test_queries_on_the_padded_keys_of_another_sequence():
    torch.manual_seed(2)
    q, k = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 6, 4)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    sizes = {"batch_size": 2, "q_length": 3, "kv_length": 6, "allow_is_bidirectional_skip": True}
    made = huggingface.token_mask(**sizes, attention_mask=mask)
    got, _ = huggingface.attention(torch.nn.Module(), q, k, k, made, is_causal=False)
    attend = torch.nn.functional.scaled_dot_product_attention
    want = attend(q, k, k, attn_mask=mask[:, None, None, :])
    torch.testing.assert_close(got.transpose(1, 2), want)
    assert huggingface.token_mask(**sizes, attention_mask=torch.ones_like(mask)) is None


@pytest.mark.needs_gpu
@pytest.mark.parametrize("name", MODELS)
def test_16_bit_error_on_a_gpu_is_that_of_transformers(name):
    plain, ours = (model.cuda() for model in make_pair(name))
    ids, mask = draw(3, 90).cuda(), torch.ones(3, 90, dtype=torch.long, device="cuda")
    mask[1, :20], mask[2, 70:] = 0, 0
    kept = mask.bool()
    with torch.no_grad():
        exact = plain(ids, attention_mask=mask).logits[kept]
        errors = [
            float((model.bfloat16()(ids, attention_mask=mask).logits[kept] - exact).norm())
            for model in (plain, ours)
        ]
    assert errors[1] <= 1.2 * errors[0]
