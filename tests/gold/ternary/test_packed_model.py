"""Packed weights at work: the numbers of unpacked ones, never a dense copy, files that load."""

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trapline.gold.atomic_write import write_file
from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import from_dict, read_config
from trapline.gold.decoder.text import end_ids
from trapline.gold.errors import DTypeError, RangeError, ShapeError, UnsupportedError
from trapline.gold.ternary import oracle
from trapline.gold.ternary import packed_linear as fast
from trapline.gold.ternary.cpu import packed_linear as native
from trapline.gold.ternary.export import export, packed
from trapline.gold.ternary.gguf_decoder import to_gguf
from trapline.gold.ternary.layers import assert_all_ternary, convert, coverage, dequantized
from trapline.gold.ternary.packed_model import (
    PackedLinear,
    load_packed,
    pack_model,
    packed_bytes,
    save_packed,
)
from trapline.gold.ternary.training.data import read_documents
from trapline.gold.ternary.training.model import DecoderLM, Shape
from trapline.gold.ternary.training.run import Job
from trapline.gold.ternary.training.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from trapline.gold.ternary.training.trainer import Recipe, Trainer

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


def decoder(tied=True):
    torch.manual_seed(5)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = {"model_type": "qwen3", "vocab_size": 20, "hidden_size": 48, "intermediate_size": 136}
    rest = {"max_position_embeddings": 32, "tie_word_embeddings": tied}
    made = Decoder(from_dict({**shape, **sizes, **rest})).eval()
    convert(made)
    return made


def matrix(rows, columns, group=128):
    rng = np.random.default_rng(rows + columns)
    codes, scales = oracle.ternarize(rng.standard_normal((rows, columns)), group)
    weights = oracle.dequantize(codes, scales, group).astype(np.float64)
    return torch.from_numpy(oracle.pack(codes)), torch.from_numpy(scales), weights


@pytest.fixture(scope="module")
def for_other_cpus(tmp_path_factory):
    """The C source, compiled without what it has for this CPU."""
    source = tmp_path_factory.mktemp("plain") / "plain.c"
    source.write_text(f"#define PLAIN\n{native.SOURCE.read_text()}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "SOURCE", source)
        return native._library.__wrapped__()


@pytest.fixture(params=["compiled", "compiled for other CPUs", "torch"])
def path(request, monkeypatch, for_other_cpus):
    """Every CPU path; a machine without a compiler takes torch's thrice."""
    if request.param == "torch":
        monkeypatch.setattr(native, "unavailable", lambda: "switched off")
    if request.param == "compiled for other CPUs":
        monkeypatch.setattr(native, "_library", lambda: for_other_cpus)
    return request.param


@pytest.mark.parametrize("shape", [(37, 256), (5, 300), (9, 16), (3, 1), (130, 1040), (0, 8)])
@pytest.mark.parametrize("rows", [1, 2, 3, 20])
def test_products_agree_with_the_oracle(path, shape, rows):
    plane, scales, weights = matrix(*shape)
    x = torch.randn(2, rows, shape[1], dtype=torch.float64).float()
    y = fast.packed_linear(x, plane, scales)
    wanted = x.double().numpy() @ weights.T
    assert y.shape == (2, rows, shape[0])
    np.testing.assert_allclose(y.numpy(), wanted, rtol=0, atol=3e-6 * np.abs(wanted).max(initial=1))


@pytest.mark.parametrize("group", [32, 256])
def test_other_group_sizes_agree_with_the_oracle(path, group):
    plane, scales, weights = matrix(11, 512, group)
    x = torch.randn(1, 512)
    y = fast.packed_linear(x, plane, scales, group)
    np.testing.assert_allclose(y.numpy(), x.double().numpy() @ weights.T, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("columns", "group"), [(252, 128), (384, 128), (256, 64)])
def test_mismatched_width_raises(path, columns, group):
    """Memory beyond a matrix is never read."""
    plane, scales, _ = matrix(8, 256)
    with pytest.raises(ShapeError, match="do not fit"):
        fast.packed_linear(torch.ones(1, columns), plane, scales, group)


def test_layer_rejects_another_width_of_equal_bytes():
    """255 columns fill as many bytes and groups as 256: only the layer can tell them apart."""
    plane, scales, _ = matrix(8, 256)
    layer = PackedLinear(plane, scales, 256, 128)
    with pytest.raises(ShapeError, match="x has 255 columns, this layer takes 256"):
        layer(torch.ones(1, 255))
    with pytest.raises(ShapeError, match="x has no columns, this layer takes 256"):
        layer(torch.tensor(1.0))
    with pytest.raises(DTypeError, match="x must be a torch tensor, got list"):
        layer([1.0] * 256)


def test_integer_activations_raise():
    plane, scales, _ = matrix(8, 256)
    with pytest.raises(DTypeError, match=r"floating-point x .* got torch\.int64"):
        PackedLinear(plane, scales, 256, 128)(torch.ones(1, 256, dtype=torch.int64))


def test_kernels_reject_unsupported_groups():
    from trapline.gold.ternary.triton import packed_matmul as kernels

    plane, scales, _ = matrix(8, 256, 32)
    with pytest.raises(UnsupportedError, match="multiples of 128, not 32"):
        kernels.packed_matmul(torch.ones(1, 256), plane, scales, 32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_kernels_reject_unsupported_dtypes(dtype):
    from trapline.gold.ternary.triton import packed_matmul as kernels

    plane, scales, _ = matrix(8, 256)
    with pytest.raises(DTypeError, match="16 or 32 bits"):
        kernels.packed_matmul(torch.ones(1, 256, dtype=dtype), plane, scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_reject_scales_other_than_float16(dtype):
    from trapline.gold.ternary.triton import packed_matmul as kernels

    plane, scales, _ = matrix(8, 256)
    with pytest.raises(DTypeError, match="float16 scales"):
        kernels.packed_matmul(torch.ones(1, 256), plane, scales.to(dtype))


def test_kernels_launch_on_the_device_of_their_tensors(entered, monkeypatch):
    from trapline.gold.ternary.triton import packed_matmul as kernels

    plane, scales, _ = matrix(8, 256)
    where = []
    monkeypatch.setattr(kernels, "_gemm", lambda x, *_: where.append([t is x for t in entered]))
    kernels.packed_matmul(torch.ones(5, 256), plane, scales)
    assert where == [[True]]


def test_failed_compilation_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "SOURCE", tmp_path / "absent.c")
    native._library.cache_clear()
    try:
        assert "failed" in fast.backend() or "no C compiler" in fast.backend()
        plane, scales, weights = matrix(4, 128)
        y = fast.packed_linear(torch.ones(1, 128), plane, scales)
        np.testing.assert_allclose(y.numpy()[0], weights.sum(1), atol=1e-4)
    finally:
        native._library.cache_clear()


def test_several_threads_share_the_rows(monkeypatch):
    if (reason := native.unavailable()) is not None:
        assert reason in fast.backend()
        return
    monkeypatch.setattr(native, "_WEIGHTS_PER_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    plane, scales, weights = matrix(200, 256)
    x = torch.randn(2, 256)
    y = native.product(x, plane, scales)
    np.testing.assert_allclose(y.numpy(), x.double().numpy() @ weights.T, rtol=0, atol=1e-4)


def test_extreme_activations(path):
    """Zeros stay zero, large and tiny rows keep their size, NaN and infinity are not hidden."""
    plane, scales, weights = matrix(8, 256)
    for factor in (0.0, 1e30, 1e-30):
        x = torch.full((1, 256), factor)
        wanted = x.double().numpy() @ weights.T
        y = fast.packed_linear(x, plane, scales).double().numpy()
        np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    for bad in (float("nan"), float("inf")):
        x = torch.ones(1, 256)
        x[0, 3] = bad
        assert not torch.isfinite(fast.packed_linear(x, plane, scales)).any()


def test_negative_and_non_finite_scales(path):
    """Every kind of float16: a file of others may hold negative scales, a damaged one worse."""
    plane, _, _ = matrix(1, 128)
    plane = plane.expand(8, -1).contiguous()
    least = 2.0**-24
    scales = torch.tensor([0.5, -0.5, -0.0, -least, 65504, torch.inf, -torch.inf, torch.nan])
    scales = scales.half()[:, None]
    y = fast.packed_linear(torch.ones(1, 128), plane, scales)[0]
    sums = fast.unpacked(plane[:1], torch.ones(1, 1).half(), 128, 128).sum()
    np.testing.assert_allclose(y[:5], sums * scales[:5, 0].float(), rtol=1e-6)
    assert not torch.isfinite(y[5:]).any()


@pytest.mark.parametrize("largest", [1e-33, 1e-37, 1e-41])
def test_tiny_activations_keep_precision(path, largest):
    """As far as the result has any; rows beside them are as they were."""
    plane, scales, weights = matrix(8, 384)
    scales, weights = (scales * 64).half(), weights * 64
    x = torch.randn(3, 384)
    x[1] *= largest
    x[1, 128:256] *= 2.0**-6
    wanted = x.double().numpy() @ weights.T
    y = fast.packed_linear(x, plane, scales).double().numpy()
    for got, want in zip(y, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max() + 2e-45)


@pytest.mark.parametrize("rows", [2, 100])
def test_gradients_of_packed_products(path, rows):
    plane, scales, weights = matrix(37, 300)
    x = torch.randn(3, rows, 300, requires_grad=True)
    y = fast.packed_linear(x, plane, scales)
    given = torch.randn(3, rows, 37)
    (found,) = torch.autograd.grad(y, x, given)
    np.testing.assert_allclose(found.numpy(), given.double().numpy() @ weights, rtol=0, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(fast.packed_linear(x, plane, scales), y)


def test_training_packed_scales_raises(path):
    plane, scales, _ = matrix(4, 128)
    with pytest.raises(UnsupportedError, match="TernaryLinear"):
        fast.packed_linear(torch.ones(1, 128), plane, scales.float().requires_grad_())


def test_missing_compiler_is_reported(monkeypatch):
    monkeypatch.setattr("trapline.gold.c_library.shutil.which", lambda name: None)
    native._library.cache_clear()
    try:
        assert "no C compiler" in fast.backend()
        plane, scales, weights = matrix(4, 128)
        y = fast.packed_linear(torch.ones(1, 128), plane, scales)
        np.testing.assert_allclose(y.numpy()[0], weights.sum(1), atol=1e-4)
    finally:
        native._library.cache_clear()


@pytest.mark.parametrize("tied", [True, False])
def test_packed_decoder_gives_the_same_logits(path, tied, tmp_path):
    latent = decoder(tied)
    dense = dequantized(latent)
    small = pack_model(decoder(tied))
    assert not [n for n, p in small.named_parameters() if p.ndim > 1]
    assert packed_bytes(small) < packed_bytes(dense) / 6
    with torch.no_grad():
        wanted = dense(IDS)
        assert torch.equal(latent(IDS), wanted)
        assert torch.allclose(small(IDS), wanted, atol=1e-4)
    save_packed(small, tmp_path / "packed")
    loaded = Decoder.from_pretrained(tmp_path / "packed")
    for (name, mine), theirs in zip(
        loaded.state_dict().items(), small.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    with torch.no_grad():
        assert torch.equal(loaded(IDS), small(IDS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_a_model_keeps_its_scales(dtype):
    small = pack_model(decoder())
    before = {name: value.clone() for name, value in small.named_buffers() if "scales" in name}
    small = small.to(dtype)
    assert before
    for name, value in before.items():
        assert torch.equal(small.get_buffer(name), value), name
        assert small.get_buffer(name).dtype == torch.float16
    with torch.no_grad():
        assert small(IDS).dtype == dtype


def test_packing_dense_weights_raises(tmp_path):
    with pytest.raises(RangeError, match="train it first"):
        packed(Decoder(decoder().config))
    with pytest.raises(RangeError, match="no packed weights"):
        save_packed(decoder(), tmp_path)
    with pytest.raises(RangeError, match="must be one of packed"):
        export(decoder(), tmp_path, "zip")
    export(dequantized(decoder()), tmp_path / "again", "packed")
    with torch.no_grad():
        got, want = Decoder.from_pretrained(tmp_path / "again")(IDS), decoder()(IDS)
    assert torch.allclose(got, want, atol=1e-4)


def test_export_over_its_source_raises(tmp_path):
    """Packed onto itself it would be gone, and a folder of shards would still be read as such."""
    dense = dequantized(decoder())
    dense.save_pretrained(tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    with pytest.raises(RangeError, match="is the checkpoint itself"):
        export(dense, tmp_path / "model", "packed", source=tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    dense.save_pretrained(tmp_path / "shards", shard_bytes=3000)
    with pytest.raises(RangeError, match="several files"):
        export(dense, tmp_path / "shards", "packed")


@pytest.mark.parametrize("ends", [3, [3, 4]])
def test_packed_model_keeps_the_end_tokens(tmp_path, ends):
    dense = dequantized(decoder())
    dense.save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": ends}))
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    export(dense, tmp_path / "small", "packed", source=tmp_path / "model")
    assert end_ids(tmp_path / "small") == end_ids(tmp_path / "model")
    assert (tmp_path / "small" / "tokenizer.json").is_file()


def other(folder):
    """Another model in `folder`, packed, with its words and its end."""
    save_packed(pack_model(decoder(tied=False)), folder)
    (folder / "tokenizer.json").write_text("the other's")
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_full_disk_leaves_the_previous_model(tmp_path, monkeypatch):
    """Not its words beside our weights."""
    dense, before = dequantized(decoder()), other(tmp_path / "small")
    dense.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")

    def full(_source, target):
        target.write_text("")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        export(dense, tmp_path / "small", "packed", source=tmp_path / "model")
    assert {path.name: path.read_bytes() for path in (tmp_path / "small").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "small"]


def test_export_removes_the_previous_tokeniser(tmp_path):
    dense = dequantized(decoder())
    dense.save_pretrained(tmp_path / "model")
    other(tmp_path / "small")
    (tmp_path / "link").symlink_to("small")
    export(dense, tmp_path / "link", "packed", source=tmp_path / "model")
    found = sorted(path.name for path in (tmp_path / "small").iterdir())
    assert found == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "model", "small"]


def test_folder_with_other_files_is_not_replaced(tmp_path, monkeypatch):
    """What takes its place would take its notes away as well."""
    other(tmp_path / "small")
    (tmp_path / "small" / "notes.txt").write_text("kept")
    with pytest.raises(RangeError, match=r"holds notes\.txt"):
        export(dequantized(decoder()), tmp_path / "small", "packed")
    assert (tmp_path / "small" / "notes.txt").read_text() == "kept"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(RangeError, match="work in"):
        export(dequantized(decoder()), Path(), "packed")


def test_dense_model_is_not_replaced(tmp_path):
    """Its files have the names that a packed one's have."""
    dense = dequantized(decoder())
    dense.save_pretrained(tmp_path / "dense")
    (tmp_path / "notes").write_text("kept")
    before = {path.name: path.read_bytes() for path in (tmp_path / "dense").iterdir()}
    with pytest.raises(RangeError, match="dense holds no packed model"):
        export(dense, tmp_path / "dense", "packed")
    assert {path.name: path.read_bytes() for path in (tmp_path / "dense").iterdir()} == before
    with pytest.raises(RangeError, match="notes is a file"):
        export(dense, tmp_path / "notes", "packed")
    (tmp_path / "empty").mkdir()
    export(dense, tmp_path / "empty", "packed")
    export(dense, tmp_path / "empty", "packed")


def test_failed_move_is_rolled_back(tmp_path, monkeypatch):
    """Also when nobody could take it back then; folders that others call old are theirs."""
    before, moved = other(tmp_path / "small"), os.replace
    (tmp_path / "small.old").mkdir()

    def refuse(source, target):
        if target == tmp_path / "small" and "partial" in str(source):
            raise OSError(5, "Input/output error")
        moved(source, target)

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="Input/output"):
        export(dequantized(decoder()), tmp_path / "small", "packed")
    assert {path.name: path.read_bytes() for path in (tmp_path / "small").iterdir()} == before
    moved(tmp_path / "small", tmp_path / "small.trapline.old")
    with pytest.raises(OSError, match="Input/output"):
        export(dequantized(decoder()), tmp_path / "small", "packed")
    assert {path.name: path.read_bytes() for path in (tmp_path / "small").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small", "small.old"]


def test_files_respect_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        save_packed(pack_model(decoder()), tmp_path / "packed")
        dequantized(decoder()).save_pretrained(tmp_path / "dense", shard_bytes=3000)
    finally:
        os.umask(before)
    files = [*tmp_path.glob("*/*")]
    assert len(files) > 4
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o640}


def test_full_disk_raises_os_error(tmp_path, monkeypatch):
    small = pack_model(decoder())
    save_packed(small, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(*_args, **_settings):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="could not be written whole: No space left"):
        save_packed(small, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_damaged_packed_checkpoint_raises(tmp_path):
    save_packed(pack_model(decoder()), tmp_path)
    config = tmp_path / "config.json"
    good = config.read_text()
    for wrong in ({}, {"group_size": 0}, {"group_size": "128"}):
        said = {"quant_method": "trapline-ternary", **wrong}
        config.write_text(json.dumps({**json.loads(good), "quantization_config": said}))
        with pytest.raises(RangeError, match="group_size of the packed weights"):
            load_packed(tmp_path, model=Decoder)
    config.write_text(json.dumps({**json.loads(good), "hidden_size": 52}))
    with pytest.raises(ShapeError, match="expected"):
        load_packed(tmp_path, model=Decoder)
    config.write_text(json.dumps({**json.loads(good), "num_hidden_layers": 3}))
    with pytest.raises(ShapeError, match=r"has no layers\.2"):
        load_packed(tmp_path, model=Decoder)


SIZES = {
    "vocab_size": 20, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24,
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "family", [(LlamaConfig, LlamaForCausalLM), (Qwen3Config, Qwen3ForCausalLM)]
)
def test_hugging_face_models_convert(family, tied):
    config, kind = family
    torch.manual_seed(0)
    model = kind(config(**SIZES, tie_word_embeddings=tied, attn_implementation="eager")).eval()
    shares = convert(model)
    assert_all_ternary(model)
    dense = [share for share in shares if not share.ternary]
    assert all("norm" in share.name for share in dense)
    assert sum(share.share for share in shares) == pytest.approx(1.0)
    assert {share.name for share in coverage(model)} == {n for n, _ in model.named_parameters()}
    with torch.no_grad():
        wanted = dequantized(model)(IDS).logits
        assert torch.equal(model(IDS).logits, wanted)
        assert torch.allclose(pack_model(model)(IDS).logits, wanted, atol=1e-4)


def test_weights_are_settled_after_an_unchanged_call():
    """What was written, or put in their place, since the last call may still be on its way."""
    plane, scales, _ = matrix(4, 128)
    module = PackedLinear(plane, scales, 128, 128)
    assert [module.weights_settled() for _ in range(3)] == [False, True, True]
    module.scales.mul_(2)
    assert [module.weights_settled() for _ in range(2)] == [False, True]
    module.codes = plane.clone()
    assert [module.weights_settled() for _ in range(2)] == [False, True]
    with torch.inference_mode():
        module.codes = plane.clone()
    assert [module.weights_settled() for _ in range(2)] == [False, False]


def test_paths_may_be_strings(tmp_path):
    """Everywhere a file or folder is named, not only in `Decoder.from_pretrained`."""
    text = tmp_path / "text.txt"
    text.write_text("a b c d e\n\nf g h i j")
    documents = read_documents([str(text)])
    small = pack_model(decoder())
    save_packed(small, f"{tmp_path}/packed")
    loaded = load_packed(f"{tmp_path}/packed", model=Decoder)
    export(small, f"{tmp_path}/again", "packed", source=f"{tmp_path}/packed")
    to_gguf(small, f"{tmp_path}/model.gguf", "f16")
    tokenizer = train_tokenizer(documents, 257)
    save_tokenizer(tokenizer, f"{tmp_path}/packed")
    assert load_tokenizer(f"{tmp_path}/packed").get_vocab_size() == 257
    assert end_ids(f"{tmp_path}/packed") == [0]
    assert read_config(f"{tmp_path}/again") == loaded.config
    write_file(f"{tmp_path}/note", lambda place: place.write_text("kept"))
    assert (tmp_path / "note").read_text() == "kept"
    recipe = Recipe(steps=1, batch=1, evaluate_every=1)
    windows = np.arange(12).reshape(2, 6)
    trainer = Trainer(DecoderLM(decoder()), recipe, windows, windows)
    trainer.save(f"{tmp_path}/last.pt")
    trainer.load(f"{tmp_path}/last.pt")
    assert Job((str(text),), str(tmp_path), Shape(257, 8, 1, 1, 4), recipe).out == tmp_path
