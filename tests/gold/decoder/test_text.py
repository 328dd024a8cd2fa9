"""Streaming text: complete characters, stop strings across tokens, tokenizers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers

from trapline.gold.decoder.text import TextStream, Tokenizer, end_ids
from trapline.gold.errors import RangeError

WORDS = ["a", "b", "ab", "ba", "aba", " ", "END", "E", "ND", "x"]


def by_words(tokens):
    return "".join(WORDS[token] for token in tokens)


def by_bytes(tokens):
    return bytes(tokens).decode("utf-8", errors="replace")


def shown(stream, tokens):
    """Everything that is shown, and how many tokens it took to stop."""
    text, count = "", 0
    while count < len(tokens) and not stream.stopped:
        text += stream.push(tokens[count])
        count += 1
    return text + stream.finish(), count


@given(
    st.lists(st.integers(0, len(WORDS) - 1), max_size=12),
    st.lists(st.sampled_from(["ab", "aba", "END", " x", "bb"]), max_size=2),
)
def test_text_ends_before_the_first_stop_string(tokens, stops):
    whole = by_words(tokens)
    found = [at for stop in stops if (at := whole.find(stop)) >= 0]
    text, count = shown(TextStream(by_words, stops), tokens)
    # At the token where a stop string is complete; what that token adds may hold an earlier one.
    first = next(
        (n for n in range(1, len(tokens) + 1) if any(s in by_words(tokens[:n]) for s in stops)),
        len(tokens),
    )
    assert count == first
    until = by_words(tokens[:first])
    expected = min((at for s in stops if (at := until.find(s)) >= 0), default=len(until))
    assert text == until[:expected]
    assert bool(found) == (expected < len(until) or until[expected:] != "")


def test_a_possible_stop_string_is_held_back():
    stream = TextStream(by_words, ["END"])
    assert [stream.push(WORDS.index(word)) for word in ("a", "E", "ND")] == ["a", "", ""]
    assert stream.stopped
    other = TextStream(by_words, ["END"])
    assert [other.push(WORDS.index(word)) for word in ("a", "E", "x")] == ["a", "", "Ex"]
    assert TextStream(by_words, ["END"]).finish() == ""


def test_characters_are_shown_complete():
    stream = TextStream(by_bytes)
    pieces = [stream.push(byte) for byte in "aé€!".encode()]
    assert pieces == ["a", "", "é", "", "", "€", "!"]
    cut = TextStream(by_bytes)
    assert cut.push("é".encode()[0]) == ""
    assert cut.finish() == "\N{REPLACEMENT CHARACTER}"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RangeError, match="cannot be empty"):
        TextStream(by_words, [""])


def test_a_bare_stop_string_is_refused():
    for bare in ("abc", ""):
        with pytest.raises(RangeError, match="stop strings must be a list"):
            TextStream(by_words, bare)


@pytest.fixture
def spaced(tmp_path):
    """Like SentencePiece: a space before every word except the first."""
    made = Rust(models.BPE({"<unk>": 0, "▁Hello": 1, "▁world": 2}, [], unk_token="<unk>"))
    made.add_special_tokens(["<pad>"])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


@pytest.mark.parametrize("tokens", [[1, 3, 2], [1, 3, 3, 2], [3, 1, 2], [1, 2, 3, 3, 1, 3, 2]])
def test_a_word_keeps_its_space_after_tokens_without_text(spaced, tokens):
    assert shown(TextStream(spaced.decode), tokens)[0] == spaced.decode(tokens)


def test_a_stop_string_is_found_after_a_token_without_text(spaced):
    stream = TextStream(spaced.decode, [" world"])
    assert shown(stream, [1, 3, 2]) == ("Hello", 3)
    assert stream.stopped


@pytest.fixture
def folder(tmp_path):
    """A byte-level tokenizer with an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    made = Rust(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_encodes_and_decodes(folder):
    tokenizer = Tokenizer(folder)
    tokens = tokenizer.encode("naïve € text")
    assert tokenizer.decode(tokens) == "naïve € text"
    assert tokenizer.find("<end>") == 256
    stream = TextStream(tokenizer.decode, ["text"])
    assert shown(stream, tokens)[0] == "naïve € "
    with pytest.raises(RangeError, match="no token '</s>'"):
        tokenizer.find("</s>")
    with pytest.raises(RangeError, match="not valid UTF-8"):
        tokenizer.encode(b"\xff\xfe".decode(errors="surrogateescape"))


def test_end_ids_prefer_the_generation_config(tmp_path):
    assert end_ids(tmp_path) == []
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert end_ids(tmp_path) == [7]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert end_ids(tmp_path) == [3, 4]
    for wrong in ("end", [3, None], 2.5):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(RangeError, match="must be an integer or a list of integers"):
            end_ids(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(RangeError, match="not valid JSON"):
        end_ids(tmp_path)


def test_missing_and_broken_tokenizers_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RangeError, match="not a tokenizer file"):
        Tokenizer(tmp_path)
