"""Chat templates render as stock transformers renders them, inside bounds; tags are found where they are."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling import hf
from nestling import template as templates
from nestling.demo import reasoner
from nestling.request import TooLong
from nestling.template import NO_THINKING, THINKING, Template, find_tags, template_of
from nestling.think import Tags

# Constructs that templates in use are made of, each where a stock template has it.
HERMES = """{%- if tools %}
    {{- '<|user|># Tools\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools> answer in <tool_call></tool_call>" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}{%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if '</think>' in message.content %}
            {%- set thought = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|assistant|>' }}{% generation %}
        {%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
        {{- message.content.split('</think>')[-1] }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}{% endgeneration %}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
MISTRAL = """{{- bos_token }}
{%- set today = strftime_now("%Y") %}
{%- set found = dict(role='user') %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == found['role'] %}
        {{- '[INST]' + message['content'] + '[/INST]' }}
    {%- else %}
        {{- '[THINK]' + (message.reasoning_content or '') + '[/THINK]' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
CHAT = [
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": "3", "reasoning_content": '1 and 2 <are> "3"'},
    {"role": "user", "content": "And 3 + 4?"},
]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<two>"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds 'a' & b", "parameters": {}}}]
SOURCES = {"hermes": HERMES, "mistral": MISTRAL, "reasoner": (reasoner() / "chat_template.jinja").read_text()}


@pytest.fixture(scope="module")
def tokenizer():
    return hf.load_tokenizer(reasoner())


def stock(tokenizer, source: str, messages: list, **options) -> str:
    options = {"tokenize": False, "add_generation_prompt": True} | options
    return tokenizer.apply_chat_template(messages, chat_template=source, **options)


def ours(tokenizer, source: str, messages: list, **options) -> str:
    return Template(source, special=tokenizer.special_tokens_map).render(messages, **options)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_prompts_are_those_of_stock_transformers(tokenizer, source: str):
    if source == MISTRAL:
        tokenizer.bos_token = "<pad>"
    assert ours(tokenizer, source, CHAT) == stock(tokenizer, source, CHAT)
    assert ours(tokenizer, source, CHAT[:1]) == stock(tokenizer, source, CHAT[:1])


@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text(max_size=12)), min_size=1, max_size=5)
)
def test_any_chat_gives_the_prompt_of_stock_transformers(tokenizer, chat: list):
    messages = [{"role": role, "content": text} for role, text in chat]
    assert ours(tokenizer, HERMES, messages) == stock(tokenizer, HERMES, messages)


def test_tools_and_calls_give_the_prompt_of_stock_transformers(tokenizer):
    chat = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "7"}]
    assert ours(tokenizer, HERMES, chat, tools=TOOLS) == stock(tokenizer, HERMES, chat, tools=TOOLS)


def test_arguments_that_come_as_json_are_objects_to_the_template(tokenizer):
    spelled = json.loads(json.dumps(CALL))
    spelled["function"]["arguments"] = json.dumps(CALL["function"]["arguments"])
    one, other = ([*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}] for call in (CALL, spelled))
    assert ours(tokenizer, HERMES, one) == ours(tokenizer, HERMES, other)


def test_thinking_is_switched_off_by_the_templates_own_option(tokenizer):
    prompt = ours(tokenizer, HERMES, CHAT, options=NO_THINKING)
    assert prompt == stock(tokenizer, HERMES, CHAT, enable_thinking=False)
    assert prompt.endswith("</think>\n\n")
    assert ours(tokenizer, HERMES, CHAT, options=THINKING) == stock(tokenizer, HERMES, CHAT, enable_thinking=True)


@pytest.mark.parametrize("spelling", ["chat_template.jinja", "tokenizer_config.json", "a list of several"])
def test_a_template_is_found_under_each_of_its_spellings(tmp_path, spelling: str):
    folder = tmp_path / "nest"
    shutil.copytree(reasoner(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    expected = stock(hf.load_tokenizer(folder), None, CHAT)
    if spelling != "chat_template.jinja":
        source = (folder / "chat_template.jinja").read_text()
        (folder / "chat_template.jinja").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        listed = [{"name": "default", "template": source}, {"name": "tool_use", "template": "{{ tools | length }}"}]
        config["chat_template"] = listed if spelling == "a list of several" else source
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = template_of(hf.load_tokenizer(folder))
    assert found.render(CHAT) == expected
    assert found.tags == Tags(open="<think>", close="</think>")
    if spelling == "a list of several":
        assert found.render(CHAT, tools=TOOLS) == "1"


def test_it_is_known_whether_a_prompt_ends_in_the_opening_tag(tokenizer):
    found = template_of(tokenizer)
    prompt = found.render(CHAT)
    assert found.is_open(prompt)
    assert found.is_open(prompt + "\n")
    assert found.before_thoughts(prompt) == prompt.removesuffix("<think>")
    asked = Template(HERMES).render([{"role": "user", "content": "What does <think> mean?"}])
    assert not Template(HERMES).is_open(asked)
    assert Template(HERMES).before_thoughts(asked) == asked


@pytest.mark.parametrize("tags", templates.THOUGHTS, ids=lambda pair: ascii(pair[0]))
def test_every_pair_of_thought_tags_is_found_in_a_template_or_among_added_tokens(tags: tuple[str, str]):
    expected = Tags(open=tags[0], close=tags[1])
    assert find_tags(f"{{{{ '{tags[0]}' }}}} x {tags[1]}") == expected
    assert find_tags(f"split('{tags[1]}')") == expected
    assert find_tags("", tags) == expected


@pytest.mark.parametrize("tags", templates.TOOLS, ids=lambda pair: pair[0])
def test_every_pair_of_tool_tags_is_found(tags: tuple[str, str]):
    assert find_tags(" ".join(tags)) == Tags(tool_open=tags[0], tool_close=tags[1])
    assert find_tags("", [tag for tag in tags if tag]) == Tags(tool_open=tags[0], tool_close=tags[1])


def test_tags_that_template_and_tokenizer_both_name_come_first():
    added = ["<think>", "</think>", "[THINK]", "[/THINK]"]
    assert find_tags("a [THINK] b [/THINK]", added).open == "[THINK]"


def test_tags_may_be_given_by_hand(tokenizer):
    tags = Tags(open="{", close="}")
    assert template_of(tokenizer, tags=tags).tags is tags


def test_tags_may_be_given_in_the_folder(tmp_path):
    shutil.copytree(reasoner(), tmp_path / "nest", ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / "nest" / "tokenizer_config.json"
    for told in ({"open": "{", "close": "}"}, {"opening": "{"}):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"nestling_tags": told}))
        tokenizer = hf.load_tokenizer(tmp_path / "nest")
        if "open" in told:
            assert template_of(tokenizer).tags == Tags(**told)
        else:
            with pytest.raises(ValueError, match="nestling_tags"):
                template_of(tokenizer)


def test_content_may_be_a_list_of_text_parts(tokenizer):
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "1 + 2?"}]
    expected = ours(tokenizer, HERMES, [{"role": "user", "content": "What is\n1 + 2?"}])
    assert ours(tokenizer, HERMES, [{"role": "user", "content": parts}]) == expected


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "text": "x", "image_url": {"url": "http://example.com/a.png"}},
        {"type": "file", "file": {"path": "/etc/passwd"}},
        {"type": "text"},
        7,
    ],
)
def test_whatever_is_not_text_is_refused(part: object):
    with pytest.raises(ValueError, match=r"messages\[0\].content\[0\] is .*, not text. .* nothing is opened"):
        Template(HERMES).render([{"role": "user", "content": [part]}])


def test_a_model_without_a_template_says_so():
    assert not Template(None).is_known
    with pytest.raises(ValueError, match="no chat template"):
        Template(None).render(CHAT)


def test_what_the_template_refuses_is_the_clients_error():
    with pytest.raises(ValueError, match="roles must alternate"):
        Template(MISTRAL, special={"bos_token": "", "eos_token": ""}).render([*CHAT, *CHAT])


@pytest.mark.parametrize("messages", [[{"role": {"a": 1}, "content": "x"}], [{"content": "x"}], [{"role": 7}]])
def test_messages_that_the_template_cannot_read_are_the_clients_error(messages: list):
    source = "{{ messages[0].role + '|' + messages[0].content }}{{ messages[0].nothing.at_all }}"
    with pytest.raises(ValueError, match="does not take these messages"):
        Template(source).render(messages)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_options_cannot_replace_what_the_request_says(name: str):
    with pytest.raises(ValueError, match=f"'{name}' cannot be set"):
        Template(HERMES, special={"bos_token": "<s>"}).render(CHAT, options={name: []})


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * ['x'] }}",
        "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
        "{{ 2 ** 100000000 }}",
    ],
)
def test_a_template_that_writes_without_end_is_stopped(source: str):
    with pytest.raises(TooLong):
        Template(source).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.json }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_reach_into_python(source: str):
    with pytest.raises(ValueError, match="does not take these messages"):
        Template(source).render(CHAT)


def test_a_template_that_does_not_parse_says_where():
    with pytest.raises(ValueError, match="not valid, line 2"):
        Template("ok\n{% if %}")
