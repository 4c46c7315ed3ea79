"""Chat templates: the text that transformers renders, in a sandbox, with errors that a client can read."""

from pathlib import Path

import pytest

from common.model.chat_template import ChatTemplate
from common.model.tokenizer import load_tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Héllo <b>{{ 1 + 1 }}</b>"},
    {"role": "assistant", "content": "日本"},
    {"role": "user", "content": "More?"},
]
LLAMA3 = (
    "{%- set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start|>' + "
    "message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
INDENTED = """
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {% continue %}
    {%- endif %}
    {% if loop.last %}
last:
    {% endif %}
    {% generation %}
    {{ message | tojson }}
    {%- endgeneration %}
{% endfor %}
{{ tools | tojson(indent=2) if tools else 'no tools' }}{{ eos_token }}"""


def rendered(source: str, **variables: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(TALK, add_generation_prompt=True, **variables)


@pytest.mark.parametrize("source", [LLAMA3, INDENTED])
@pytest.mark.parametrize("tools", [None, [{"name": "é", "n": 1}]])
def test_the_text_is_what_transformers_renders(source: str, tools: list[object] | None) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template(
        [TALK],
        chat_template=source,
        tools=tools,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert rendered(source, tools=tools) == theirs[0]


def test_the_demo_template_opens_the_assistants_turn(demo_gguf: Path) -> None:
    template = load_tokenizer(demo_gguf).chat_template
    assert template is not None
    talk = [{"role": "user", "content": "Hi"}]
    system = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    )
    turn = "<|im_start|>user\nHi<|im_end|>\n"
    assert template.render(talk, add_generation_prompt=False) == system + turn
    assert template.render(talk, add_generation_prompt=True) == system + turn + "<|im_start|>assistant\n"


def test_variables_reach_the_template() -> None:
    assert rendered("{{ thinking }}|{{ missing }}", thinking="on") == "on|"


def test_the_clock_is_the_templates_own() -> None:
    assert rendered("{{ strftime_now('%Y')|length }}") == "4"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ messages[0].content + 1 }}", "^TypeError: "),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "too big"),
    ],
)
def test_what_goes_wrong_in_a_template_is_a_value_error(source: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rendered(source)


def test_a_template_that_does_not_compile_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="chat template does not compile"):
        ChatTemplate("{% if %}", {})


def test_rendering_leaves_the_messages_alone() -> None:
    talk = [{"role": "user", "content": "a"}]
    template = ChatTemplate("{% set m = messages[0] %}{{ m.update({'content': 'b'}) }}", {})
    with pytest.raises(ValueError, match="unsafe"):
        template.render(talk, add_generation_prompt=True)
    assert talk == [{"role": "user", "content": "a"}]
