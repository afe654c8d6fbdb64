"""Chat templates as Python sees them; bounds and helpers are tested in `rust/text/tests`."""

import json
import subprocess
import sys
import textwrap

import kit
import pytest

from cbrs._core import Tokenizer
from cbrs.errors import InvalidRequestError

BYTE_JSON = json.dumps(kit.byte_tokenizer())
HELLO = [{"role": "user", "content": "Hello"}]


# Renders what stdin says; prints the refusal, the seconds and the growth of the peak memory in KiB.
MEASURE = textwrap.dedent("""
    import json, re, sys, time
    from pathlib import Path
    from cbrs._core import Tokenizer
    from cbrs.errors import InvalidRequestError

    def peak_kib():
        return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

    tokenizer_json, template, messages = json.load(sys.stdin)
    before_kib, start = peak_kib(), time.monotonic()
    try:
        message = Tokenizer(tokenizer_json, chat_template=template).apply_chat_template(messages)
    except InvalidRequestError as error:
        message = str(error)
    print(json.dumps([message, time.monotonic() - start, peak_kib() - before_kib]))
""")


def with_template(template, **options):
    return Tokenizer(BYTE_JSON, chat_template=template, **options)


def vectors(cbrs_data):
    lines = (cbrs_data / "conformance/chat_template_vectors.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_every_shared_vector_renders_to_the_same_text(cbrs_data):
    templates = json.loads((cbrs_data / "conformance/chat_templates.json").read_text("utf-8"))
    rows = vectors(cbrs_data)
    assert len(rows) > 60
    assert sum(bool(row["tools"] or row["extra"]) for row in rows) == 10
    for row in rows:
        source = templates[row["template"]]["chat_template"]
        options = {"bos_token": row["bos_token"], "eos_token": row["eos_token"]}
        tokenizer = with_template(source, **options)
        arguments = row["messages"], row["add_generation_prompt"], row["tools"], row["extra"]
        if "rendered" in row:
            assert tokenizer.apply_chat_template(*arguments) == row["rendered"]
        else:
            with pytest.raises(InvalidRequestError, match="chat template"):
                tokenizer.apply_chat_template(*arguments)


def test_tools_and_variables_reach_the_template():
    tokenizer = with_template(
        "{% for tool in tools or [] %}[{{ tool['name'] }}]{% endfor %}"
        "{{ 'thinks' if enable_thinking else 'answers' }} {{ level|default('low') }}"
    )
    assert tokenizer.apply_chat_template(HELLO) == "answers low"
    assert tokenizer.apply_chat_template(HELLO, tools=[]) == "answers low"
    text = tokenizer.apply_chat_template(
        HELLO,
        tools=[{"name": "search"}, {"name": "né"}],
        variables={"enable_thinking": True, "level": "high"},
    )
    assert text == "[search][né]thinks high"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tools": {"name": "search"}}, "tools must be a list, not a map"),
        ({"tools": "search"}, "tools must be a list, not a string"),
        ({"variables": ["x"]}, "variables cannot be read"),
        ({"variables": {"x": float("nan")}}, "variables cannot be read"),
        ({"variables": {"messages": []}}, "the variable '?\"messages\"'? is set by the engine"),
        ({"variables": {"bos_token": "x"}}, "the variable .*bos_token.* is set by the engine"),
        ({"variables": {"raise_exception": 1}}, "raise_exception.* is set by the engine"),
    ],
)
def test_wrong_tools_and_variables_are_a_clear_error(options, match):
    with pytest.raises(InvalidRequestError, match=match):
        with_template("x").apply_chat_template(HELLO, **options)


def test_the_prompt_of_the_answer_is_optional():
    tokenizer = with_template(kit.CHAT_TEMPLATE)
    assert tokenizer.apply_chat_template(HELLO) == "<user>Hello</s><assistant>"
    assert tokenizer.apply_chat_template(HELLO, add_generation_prompt=False) == "<user>Hello</s>"


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([*HELLO, {"role": "user", "content": None}], r"messages\[1\] has no content"),
        ([{"content": "x"}], r"messages\[0\] needs a role"),
        ([{"role": "user", "content": 7}], "must be a string, not a number"),
        (["Hello"], "must be a map, not a string"),
        ({"role": "user"}, "messages must be a list"),
        ([{"role": "user", "content": "\ud800"}], "messages cannot be read"),
    ],
)
def test_an_incomplete_message_is_a_clear_error(messages, match):
    with pytest.raises(InvalidRequestError, match=match) as caught:
        with_template(kit.CHAT_TEMPLATE).apply_chat_template(messages)
    assert caught.value.param == "messages"


def test_a_model_without_a_template_says_so():
    with pytest.raises(InvalidRequestError, match="has no chat template; give a prompt"):
        Tokenizer(BYTE_JSON).apply_chat_template(HELLO)


def test_a_template_may_refuse_with_its_own_words():
    tokenizer = with_template("{{ raise_exception('only cats may speak') }}")
    with pytest.raises(InvalidRequestError, match="only cats may speak"):
        tokenizer.apply_chat_template(HELLO)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson(indent=1000000000000000000) }}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'x' * 1000000000 }}",
        "{% for a in range(1000000000) %}x{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}{{ ns.x }}",
    ],
)
def test_i20_a_hostile_template_ends_in_an_error_within_a_second_and_64_mib(template):
    # In a process of its own: the peak of this one is that of all tests before.
    result = subprocess.run(
        [sys.executable, "-c", MEASURE],
        input=json.dumps([BYTE_JSON, template, HELLO]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    message, seconds, grown_kib = json.loads(result.stdout)
    assert "chat template" in message
    assert seconds < 1.0
    assert grown_kib < 64 * 1024
