"""Bodies from a seed: valid ones, near-valid ones, and bytes of any kind."""

import json
import random
from collections.abc import Callable
from typing import Any

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
PATHS = (COMPLETIONS, COMPLETIONS, CHATS, CHATS, "/tokenize", "/detokenize")

TEXTS = ["", "One", "two words", "é😀", "\ud83d", "\0", "a" * 300, " fox", "{{ x }}", "<|im_end|>"]
NUMBERS: list[Any] = [0, 1, -1, 2, 0.5, 1.5, -2, 20, 129, 1e9, 2**31, 2**63, -(2**63), 2**64, 1e300]
ODD: list[Any] = [None, True, False, [], {}, [[]], [None], {"a": 1}, "1", "null"]

Choose = random.Random


def text(choose: Choose) -> str:
    return "".join(choose.choice(TEXTS) for _ in range(choose.randrange(4)))


def ids(choose: Choose) -> list[Any]:
    return [choose.randrange(200) for _ in range(choose.randrange(1, 12))]


def anything(choose: Choose, depth: int = 3) -> Any:
    """Any value that JSON has."""
    kind = choose.randrange(7 if depth else 5)
    if kind < 2:
        return choose.choice(NUMBERS)
    if kind < 4:
        return choose.choice(ODD)
    if kind == 4:
        return text(choose)
    size = choose.randrange(4)
    if kind == 5:
        return [anything(choose, depth - 1) for _ in range(size)]
    return {text(choose): anything(choose, depth - 1) for _ in range(size)}


def prompt(choose: Choose) -> Any:
    shapes: list[Callable[[], Any]] = [
        lambda: text(choose) + "x",
        lambda: ids(choose),
        lambda: [ids(choose) for _ in range(choose.randrange(1, 4))],
        lambda: [text(choose) + "x" for _ in range(choose.randrange(1, 4))],
    ]
    return choose.choice(shapes)()


def message(choose: Choose) -> dict[str, Any]:
    content: Any = text(choose)
    if choose.random() < 0.3:
        content = [{"type": "text", "text": text(choose)} for _ in range(choose.randrange(1, 3))]
    return {"role": choose.choice(["system", "developer", "user", "assistant"]), "content": content}


COMMON: dict[str, Callable[[Choose], Any]] = {
    "max_tokens": lambda choose: choose.randrange(1, 12),
    "n": lambda choose: choose.randrange(1, 4),
    "temperature": lambda choose: choose.random() * 2,
    "top_p": lambda choose: choose.random() * 0.9 + 0.1,
    "top_k": lambda choose: choose.randrange(-1, 50),
    "min_p": lambda choose: choose.random(),
    "seed": lambda choose: choose.randrange(-(2**63), 2**63),
    "presence_penalty": lambda choose: choose.random() * 4 - 2,
    "frequency_penalty": lambda choose: choose.random() * 4 - 2,
    "repetition_penalty": lambda choose: choose.random() + 0.5,
    "stop": lambda choose: choose.choice([" fox", ["a", "é"], [], ["x" * 256]]),
    "stop_token_ids": ids,
    "ignore_eos": lambda choose: choose.random() < 0.5,
    "min_tokens": lambda choose: choose.randrange(3),
    "logit_bias": lambda choose: {str(token): choose.random() for token in set(ids(choose))},
    "stream": lambda choose: choose.random() < 0.5,
    "return_token_ids": lambda choose: choose.random() < 0.5,
    "prompt_logprobs": lambda choose: choose.randrange(3),
    "truncate_prompt_tokens": lambda choose: choose.randrange(1, 9),
    "priority": lambda choose: choose.choice(["interactive", "standard", "batch"]),
    "cache_salt": lambda choose: choose.choice(["a", "b"]),
    "deadline_ms": lambda choose: choose.choice([0.01, 5.0, 60_000.0]),
    "metadata": lambda choose: {"a": text(choose)},
    "user": text,
}
OWN: dict[str, dict[str, Callable[[Choose], Any]]] = {
    COMPLETIONS: {
        "prompt": prompt,
        "echo": lambda choose: choose.random() < 0.5,
        "logprobs": lambda choose: choose.randrange(6),
        **COMMON,
    },
    CHATS: {
        "messages": lambda choose: [message(choose) for _ in range(choose.randrange(1, 4))],
        "logprobs": lambda _: True,
        "service_tier": lambda choose: choose.choice(["auto", "default", "flex", "priority"]),
        **COMMON,
    },
    "/tokenize": {"prompt": text, "add_special_tokens": lambda choose: choose.random() < 0.5},
    "/detokenize": {"tokens": ids},
}


def valid(choose: Choose, path: str) -> dict[str, Any]:
    """A body that is right, but for chance meetings of fields that exclude each other."""
    fields = OWN[path]
    first = next(iter(fields))
    body: dict[str, Any] = {"model": "null", first: fields[first](choose)}
    if "max_tokens" in fields:
        body["max_tokens"] = fields["max_tokens"](choose)
    for name in choose.sample(sorted(fields), choose.randrange(min(6, len(fields)))):
        body[name] = fields[name](choose)
    return body


def near_valid(choose: Choose, path: str) -> bytes:
    """A right body with one to three changes of fields, values or bytes."""
    body = valid(choose, path)
    for _ in range(choose.randrange(1, 4)):
        name = choose.choice([*body, *OWN[path], text(choose), "tools", "response_format"])
        if choose.random() < 0.2:
            body.pop(name, None)
        else:
            body[name] = anything(choose)
    data = bytearray(json.dumps(body).encode())
    if choose.random() < 0.4:
        at = choose.randrange(len(data))
        change = choose.randrange(4)
        if change == 0:
            del data[at:]
        elif change == 1:
            data[at] = choose.randrange(256)
        elif change == 2:
            data[at:at] = choose.choice([b"NaN", b"\0", b'"', b"{", b"]" * 3, b"[" * 70, b"1e400"])
        else:
            data += data[at:]
    return bytes(data)


def body(choose: Choose) -> tuple[str, bytes]:
    """A path and what is sent to it."""
    path = choose.choice(PATHS)
    kind = choose.random()
    if kind < 0.4:
        return path, json.dumps(valid(choose, path)).encode()
    if kind < 0.9:
        return path, near_valid(choose, path)
    return path, choose.randbytes(choose.randrange(200))
