"""Chat templates: what transformers renders, from the same files, in a sandbox."""

import copy
import json
import pickle

import pytest
import transformers
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers, processors

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.chat import ChatTemplate, read_templates
from trapline.gold.decoder.text import Tokenizer
from trapline.gold.errors import DTypeError, RangeError

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA = """{{ bos_token }}{% for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
[{{ m.role }}] {{ m.content }}{{ eos_token if m.role == 'assistant' }}
{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""
TOOLS = """{% set ns = namespace(count=0) %}
{% for tool in tools or [] %}{% set ns.count = ns.count + 1 %}{{ tool | tojson(indent=2) }}
{% endfor %}{{ ns.count }} tools
{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"""
PARTS = """{% for m in messages %}{{ m.role }}:{% for part in m.content %}
{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}"""
TALK = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Häagen < & > 'x'  "},
    {"role": "assistant", "content": "Ja "},
    {"role": "user", "content": "Why?"},
]
TOOL = {"type": "function", "function": {"name": "a<b", "parameters": {"ü": [1, None, True]}}}


def save_tokenizer(folder, **config):
    """A byte-level tokenizer that adds <s> to plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Rust(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**said, **config}))
    return folder


@pytest.mark.parametrize("template", [CHATML, LLAMA, TOOLS], ids=["chatml", "llama", "tools"])
@pytest.mark.parametrize("place", ["config", "file"])
def test_conversations_render_as_in_transformers(tmp_path, template, place):
    save_tokenizer(tmp_path, **({"chat_template": template} if place == "config" else {}))
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(tmp_path)
    for talk in (TALK[:2], TALK, TALK[1:3]):
        for tools in (None, [TOOL]):
            for begins in (True, False):
                expected = peer.apply_chat_template(
                    talk, tools=tools, add_generation_prompt=begins, tokenize=False
                )
                found = ours.chat_template(talk, tools=tools, add_generation_prompt=begins)
                assert found == expected
    ids = peer.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(TALK) == ids  # <s> only where the template writes it
    assert ours.encode("a")[0] == 256


@pytest.mark.parametrize("template", [CHATML, LLAMA], ids=["trims", "keeps"])
@pytest.mark.parametrize("said", ["Ja ", "Ja", " x\n\n"])
def test_last_message_of_the_assistant_is_continued(tmp_path, template, said):
    save_tokenizer(tmp_path, chat_template=template)
    talk = [*TALK[:2], {"role": "assistant", "content": said}]
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = peer.apply_chat_template(talk, continue_final_message=True, return_dict=False)
    assert Tokenizer(tmp_path).encode_chat(talk) == expected
    assert talk[-1]["content"] == said  # the caller's messages stay


def test_parts_of_text_are_rendered_and_continued():
    talk = [{"role": "a", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}]
    template = ChatTemplate(PARTS)
    assert template(talk) == "a:x;"
    whole = template(talk, add_generation_prompt=False, continue_final_message=True)
    assert whole == "a:x"


def test_named_templates_and_their_precedence(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    save_tokenizer(tmp_path, chat_template=named)
    template = read_templates(tmp_path)
    assert (template(TALK), template(TALK, tools=[TOOL])) == ("d", "t")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("extra")
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }} {{ shout }}")
    template = read_templates(tmp_path)
    assert template(TALK, shout="HO") == "file <s> HO"
    assert template(TALK, tools=[TOOL]) == "extra"
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert peer.apply_chat_template(TALK, tokenize=False, shout="HO") == "file <s> HO"


HOSTILE = [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{{ range(10 ** 9) | list }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_end_in_a_sentence(source):
    with pytest.raises(RangeError, match="the chat template re"):
        ChatTemplate(source)(TALK)


def test_bad_messages_and_templates_are_refused(tmp_path):
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(RangeError, match="at least one message"):
        template([])
    with pytest.raises(DTypeError, match="message 1 must be like"):
        template([TALK[0], {"content": "x"}])
    with pytest.raises(DTypeError, match="must be a list of messages, got str"):
        template("hello")
    with pytest.raises(DTypeError, match="JSON values, got object"):
        template([{"role": "user", "content": object()}])
    with pytest.raises(RangeError, match="not both"):
        template(TALK, continue_final_message=True)
    with pytest.raises(RangeError, match="no text to continue"):
        template([{"role": "x"}], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RangeError, match="leaves out the message"):
        template(TALK, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RangeError, match=r"not valid jinja \(line 1\)"):
        ChatTemplate("{% if %}")
    with pytest.raises(RangeError, match="no default chat template, only \\['tool_use'\\]"):
        ChatTemplate({"tool_use": "x"})(TALK)
    save_tokenizer(tmp_path)
    with pytest.raises(RangeError, match="has no chat template"):
        read_templates(tmp_path)
    for wrong in (5, [{"name": "x"}], [5]):
        save_tokenizer(tmp_path, chat_template=wrong)
        with pytest.raises(RangeError, match="a text or a list of named templates"):
            read_templates(tmp_path)


def test_generate_takes_conversations(make, tmp_path):
    make("llama", vocab_size=260, eos_token_id=257).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, chat_template=CHATML)
    decoder = Decoder.from_pretrained(tmp_path)
    short = [{"role": "u", "content": "a"}]
    ids = Tokenizer(tmp_path).encode_chat(short)
    (answer,) = decoder.generate(short, max_new_tokens=5)
    assert answer.tokens == decoder.generate(ids, max_new_tokens=5)[0].tokens
    first, second = decoder.generate([short, short[:1]], max_new_tokens=5)
    assert first == second == answer
    with pytest.raises(DTypeError, match="message 0 must be like"):
        decoder.generate([{"content": "a"}], max_new_tokens=5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_templates_can_be_copied_with_their_model(copied):
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
    assert copied(template)([{"role": "user", "content": "hi"}]) == "<s>hi"
