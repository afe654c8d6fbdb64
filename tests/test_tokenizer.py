"""`Tokenizer`: encoding and decoding as Python sees them, against vectors and the reference."""

import gzip
import json

import kit
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from cbrs._core import Tokenizer
from cbrs.errors import InvalidRequestError

SHARED = {
    "gpt-2": "tokenizers/gpt2_tokenizer.json.gz",
    "qwen2": "tokenizers/qwen2_tokenizer.json.gz",
    "smollm2": "tokenizers/smollm2_tokenizer.json.gz",
    "stories260k": "models/stories260K/tokenizer.json",
}

BYTE_JSON = json.dumps(kit.byte_tokenizer())
BYTE = Tokenizer(BYTE_JSON)
SPM = Tokenizer(json.dumps(kit.spm_tokenizer()))


def read_json(path):
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")


@pytest.mark.parametrize("name", SHARED)
def test_every_shared_vector_encodes_to_the_same_ids(cbrs_data, name):
    tokenizer = Tokenizer(read_json(cbrs_data / SHARED[name]))
    lines = (cbrs_data / "conformance/tokenizer_vectors.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["tokenizer"] == name]
    assert len(rows) >= 10
    wrong = [row["text"] for row in rows if tokenizer.encode(row["text"], False) != row["ids"]]
    assert not wrong


def test_digits_of_smollm2_stand_alone_also_after_spaces(cbrs_data):
    """The pre-tokenizer splits digits before anything else, whatever white space comes first."""
    tokenizer = Tokenizer(read_json(cbrs_data / SHARED["smollm2"]))
    tokens = [tokenizer.id_to_token(token) for token in tokenizer.encode("\n\n\n 12")]
    assert tokens[-2:] == ["1", "2"]
    assert tokenizer.decode(tokenizer.encode("\n\n\n 12")) == "\n\n\n 12"


@settings(deadline=None)
@given(st.lists(st.integers(0, kit.NUM_TOKENS - 1), max_size=40), st.booleans())
def test_byte_level_ids_decode_as_the_reference_does(ids, skip_special_tokens):
    reference = tokenizers.Tokenizer.from_str(BYTE_JSON)
    expected = reference.decode(ids, skip_special_tokens=skip_special_tokens)
    assert BYTE.decode(ids, skip_special_tokens) == expected


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_back_from_its_ids(text):
    assert BYTE.decode(BYTE.encode(text), False) == text


def test_bos_is_added_once_and_only_with_special_tokens():
    tokenizer = Tokenizer(BYTE_JSON, bos_token="<s>", add_bos_token=True)
    plain = BYTE.encode("hello")
    assert tokenizer.encode("hello") == [kit.BOS, *plain]
    assert tokenizer.encode("hello", False) == plain
    assert tokenizer.encode("<s>hello") == [kit.BOS, *plain]


def test_tokens_are_found_by_text_and_by_id():
    assert BYTE.vocab_size == kit.NUM_TOKENS
    assert BYTE.token_to_id("</s>") == kit.EOS
    assert BYTE.id_to_token(kit.EOS) == "</s>"
    assert BYTE.token_to_id("nowhere") is None
    for outside in (-1, kit.NUM_TOKENS, 2**40):
        assert BYTE.id_to_token(outside) is None


def test_ids_may_be_an_array_and_ids_without_a_token_add_nothing():
    ids = BYTE.encode("hello")
    assert BYTE.decode(np.array(ids, dtype=np.int32)) == "hello"
    assert BYTE.decode([*ids, 5000, -1]) == "hello"
    with pytest.raises(TypeError, match="ids must be"):
        BYTE.decode(1.5)


@pytest.mark.parametrize(
    ("text", "options", "match"),
    [
        ("", {}, "not a tokenizer.json"),
        ("{", {}, "not a tokenizer.json"),
        ('{"version": "1.0"}', {}, "tokenizer"),
        (BYTE_JSON, {"add_bos_token": True}, "is not in the vocabulary"),
        (BYTE_JSON, {"add_bos_token": True, "bos_token": "<bos>"}, "'?<bos>"),
        (BYTE_JSON, {"chat_template": "{{"}, "chat template: syntax error"),
        (BYTE_JSON.replace('"ByteLevel"', '"CTC"'), {}, "tokenizer"),
    ],
)
def test_what_cannot_be_used_is_one_clear_error(text, options, match):
    with pytest.raises(InvalidRequestError, match=match):
        Tokenizer(text, **options)


def test_sentencepiece_spaces_survive_encoding_and_decoding():
    text = "the  king.   is    "
    assert SPM.decode(SPM.encode(text)) == text
