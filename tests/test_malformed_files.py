"""Malformed model files: one ModelLoadError each, naming file and field, within stated bounds.

All files are opened in one fresh process, so that its peak memory shows what they cost.
"""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

MAX_SECONDS = 2.0
MAX_BYTES = 64 << 20

PROBE = """
import json, sys, time
from cbrs import _core

def use_gguf(path):
    file = _core.GgufFile(path)
    for name in file.tensor_names:
        file.tensor(name)
    file.metadata
    file.tokenizer_json()

def use_safetensors(path):
    checkpoint = _core.SafetensorsCheckpoint(path)
    for name in checkpoint.tensor_names:
        checkpoint.tensor(name)

def peak():
    # Not getrusage: its maximum starts with the memory of the process that started this one.
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

baseline = peak()
for line in sys.stdin:
    path = line.rstrip("\\n")
    use = use_gguf if path.endswith(".gguf") else use_safetensors
    start, error = time.perf_counter(), None
    try:
        use(path)
    except _core.ModelLoadError as refused:
        error = {"message": str(refused), "file": refused.file, "field": refused.field}
    seconds = time.perf_counter() - start
    print(json.dumps({"error": error, "seconds": seconds, "grown": peak() - baseline}))
"""


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def array(element: int, length: int, elements: bytes) -> bytes:
    return u32(element) + u64(length) + elements


def texts(*items: str) -> bytes:
    return array(8, len(items), b"".join(map(text, items)))


def ints(*items: int) -> bytes:
    return array(5, len(items), struct.pack(f"<{len(items)}i", *items))


@dataclass
class Gguf:
    """A small GGUF file of which every part can be replaced."""

    head: bytes = b"GGUF" + u32(3)
    num_tensors: int | None = None
    num_entries: int | None = None
    tensors: list[bytes] = field(default_factory=list)
    data: bytes = b""
    extra: list[bytes] = field(default_factory=list)
    entries: dict[str, bytes] = field(
        default_factory=lambda: {
            "general.architecture": u32(8) + text("llama"),
            "llama.attention.head_count": u32(4, 2),
            "tokenizer.ggml.model": u32(8) + text("gpt2"),
            "tokenizer.ggml.pre": u32(8) + text("smollm"),
            "tokenizer.ggml.tokens": u32(9) + texts("<s>", "a", "b", "ab"),
            "tokenizer.ggml.token_type": u32(9) + ints(3, 1, 1, 1),
            "tokenizer.ggml.merges": u32(9) + texts("a b"),
        }
    )

    def build(self) -> bytes:
        entries = [text(key) + value for key, value in self.entries.items() if value] + self.extra
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_entries = len(entries) if self.num_entries is None else self.num_entries
        header = self.head + u64(num_tensors, num_entries) + b"".join(entries + self.tensors)
        return header + bytes(-len(header) % 32) + self.data


def with_entry(key: str, value: bytes) -> bytes:
    file = Gguf()
    file.entries[key] = value
    return file.build()


def tensor(name: str, dimensions: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + u32(len(dimensions)) + u64(*dimensions) + u32(kind) + u64(offset)


def with_tensors(*tensors: bytes, data: int = 64) -> bytes:
    return Gguf(tensors=list(tensors), data=bytes(data)).build()


def one(*dimensions: int, kind: int = 0, offset: int = 0, data: int = 64) -> bytes:
    return with_tensors(tensor("w", dimensions, kind, offset), data=data)


def dimension_count(count: int) -> bytes:
    return with_tensors(text("w") + u32(count) + bytes(24))


GGUF_CASES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "file"),
    "four bytes": (lambda: b"GGUF", "version"),
    "wrong magic": (lambda: Gguf(head=b"GGJT" + u32(3)).build(), "magic"),
    "big-endian": (lambda: Gguf(head=b"GGUF\0\0\0\3").build(), "version"),
    "version 0": (lambda: Gguf(head=b"GGUF" + u32(0)).build(), "version"),
    "version 1": (lambda: Gguf(head=b"GGUF" + u32(1)).build(), "version"),
    "version 99": (lambda: Gguf(head=b"GGUF" + u32(99)).build(), "version"),
    "tensor count 2^63": (lambda: Gguf(num_tensors=1 << 63).build(), "tensor count"),
    "metadata count 2^63": (lambda: Gguf(num_entries=1 << 63).build(), "metadata count"),
    "key beyond the file": (
        lambda: Gguf(extra=[u64(1 << 40) + b"x" * 40]).build(),
        "metadata key 7",
    ),
    "key not UTF-8": (
        lambda: Gguf(extra=[text(b"\xff") + u32(0) + b"1"]).build(),
        "metadata key 7",
    ),
    "text beyond the file": (lambda: with_entry("x", u32(8) + u64(1 << 50)), "x"),
    "text not UTF-8": (lambda: with_entry("x", u32(8) + text(b"\xff")), "x"),
    "text array of 2^62": (lambda: with_entry("x", u32(9) + array(8, 1 << 62, b"")), "x"),
    "number array of 2^62": (lambda: with_entry("x", u32(9) + array(10, 1 << 62, b"")), "x"),
    "array of arrays": (lambda: with_entry("x", u32(9) + array(9, 1, ints(1))), "x"),
    "unknown value type": (lambda: with_entry("x", u32(13) + bytes(8)), "x"),
    "bool of 2": (lambda: with_entry("x", u32(7) + b"\2"), "x"),
    "duplicate key": (
        lambda: Gguf(extra=[text("general.architecture") + u32(4, 1)]).build(),
        "general.architecture",
    ),
    "shard of several": (lambda: with_entry("split.count", u32(4, 3)), "split.count"),
    "alignment 0": (lambda: with_entry("general.alignment", u32(4, 0)), "general.alignment"),
    "alignment 3": (lambda: with_entry("general.alignment", u32(4, 3)), "general.alignment"),
    "alignment 2^31": (
        lambda: with_entry("general.alignment", u32(4, 1 << 31)),
        "general.alignment",
    ),
    "dimension count 0": (lambda: dimension_count(0), "tensor w"),
    "dimension count 2^32-1": (lambda: dimension_count(2**32 - 1), "tensor w"),
    "dimension 0": (lambda: one(0, 4), "tensor w"),
    "negative dimension": (lambda: one(2**64 - 1, 4), "tensor w"),
    "element overflow": (lambda: one(1 << 40, 1 << 40), "tensor w"),
    "byte overflow": (lambda: one(1 << 62), "tensor w"),
    "quantised byte overflow": (lambda: one(1 << 31, 1 << 31, kind=8), "tensor w"),
    "part of a block": (lambda: one(16, kind=2), "tensor w"),
    "unknown tensor type": (lambda: one(16, kind=1000), "tensor w"),
    "tensor type not read": (lambda: one(256, kind=10), "tensor w"),
    "misaligned offset": (lambda: one(8, offset=4), "tensor w"),
    "offset beyond the end": (lambda: one(8, offset=1 << 20), "tensor w"),
    "offset sum overflow": (lambda: one(8, offset=2**64 - 32), "tensor w"),
    "overlap": (lambda: with_tensors(tensor("w", (8,), 0, 0), tensor("v", (8,), 0, 0)), "tensor v"),
    "duplicate tensor": (
        lambda: with_tensors(tensor("w", (8,), 0, 0), tensor("w", (8,), 0, 32)),
        "tensor w",
    ),
    "truncated data": (lambda: one(16)[:-1], "tensor w"),
    "heads do not divide": (
        lambda: with_tensors(tensor("blk.0.attn_q.weight", (4, 3), 0, 0)),
        "tensor blk.0.attn_q.weight",
    ),
    "token id beyond": (
        lambda: with_entry("tokenizer.ggml.eos_token_id", u32(4, 4)),
        "tokenizer.ggml.eos_token_id",
    ),
    "tokens are a text": (
        lambda: with_entry("tokenizer.ggml.tokens", u32(8) + text("a")),
        "tokenizer.ggml.tokens",
    ),
    "head count is a text": (
        lambda: with_entry("llama.attention.head_count", u32(8) + text("2")),
        "llama.attention.head_count",
    ),
    "too few token types": (
        lambda: with_entry("tokenizer.ggml.token_type", u32(9) + ints(3)),
        "tokenizer.ggml.token_type",
    ),
    "merge without token": (
        lambda: with_entry("tokenizer.ggml.merges", u32(9) + texts("a c")),
        "tokenizer.ggml.merges",
    ),
    "unknown pre-tokenizer": (
        lambda: with_entry("tokenizer.ggml.pre", u32(8) + text("x")),
        "tokenizer.ggml.pre",
    ),
    "unknown tokenizer": (
        lambda: with_entry("tokenizer.ggml.model", u32(8) + text("x")),
        "tokenizer.ggml.model",
    ),
    "no tokens": (lambda: with_entry("tokenizer.ggml.tokens", b""), "tokenizer.ggml.tokens"),
}


def st(header: str | bytes, data: int = 8) -> bytes:
    return text(header) + bytes(data)


def entry(dtype: str, shape: str, begin: int, end: int) -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'


def w(dtype: str, shape: str, begin: int, end: int) -> bytes:
    return st(f'{{"w":{entry(dtype, shape, begin, end)}}}')


def ab(a: tuple[int, int], b: tuple[int, int]) -> bytes:
    first, second = (entry("U8", f"[{end - begin}]", begin, end) for begin, end in (a, b))
    return st(f'{{"a":{first},"b":{second}}}')


DEEP = "[" * 100_000 + "]" * 100_000

SAFETENSORS_CASES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "file"),
    "seven bytes": (lambda: bytes(7), "header length"),
    "header length 0": (lambda: u64(0) + b"{}", "header"),
    "header beyond the file": (lambda: u64(100) + b"{}", "header length"),
    "header length 2^64-1": (lambda: u64(2**64 - 1) + b"{}", "header length"),
    "header over the limit": (lambda: st(" " * ((16 << 20) + 1), 0), "header length"),
    "header not UTF-8": (lambda: st(b'{"\xff":1}'), "header"),
    "header not JSON": (lambda: st("{w"), "header"),
    "header is a list": (lambda: st("[]"), "header"),
    "deep JSON": (lambda: st(DEEP), "header"),
    "deep JSON in a tensor": (lambda: st(f'{{"w":{DEEP}}}'), "tensor w"),
    "duplicate key": (lambda: st('{{"w":{0},"w":{0}}}'.format(entry("U8", "[8]", 0, 8))), "header"),
    "unknown dtype": (lambda: w("F33", "[2]", 0, 8), "tensor w"),
    "shape overflow": (lambda: w("U8", "[4294967296,4294967296]", 0, 8), "tensor w"),
    "bit overflow": (lambda: w("F64", "[4611686018427387904]", 0, 8), "tensor w"),
    "negative dimension": (lambda: w("U8", "[-8]", 0, 8), "tensor w"),
    "shape and offsets disagree": (lambda: w("F32", "[3]", 0, 8), "tensor w"),
    "begin after end": (lambda: w("F32", "[2]", 8, 0), "tensor w"),
    "overlap": (lambda: ab((0, 8), (4, 8)), "tensor b"),
    "hole": (lambda: ab((0, 2), (4, 8)), "tensor b"),
    "trailing bytes": (lambda: w("U8", "[4]", 0, 4), "data"),
    "beyond the end": (lambda: w("F32", "[4]", 0, 16), "tensor w"),
    "half a byte": (lambda: w("F4", "[3]", 0, 2), "tensor w"),
    "undecoded dtype": (lambda: w("I64", "[1]", 0, 8), "tensor w"),
}

INDEX = "model.safetensors.index.json"


def index(a: str, b: str) -> str:
    return json.dumps({"weight_map": {"a": a, "b": b}})


FOLDER_CASES: dict[str, tuple[str, str, str]] = {
    "no weights": ("", ".", "model.safetensors"),
    "missing shard": (index("a.safetensors", "c.safetensors"), "c.safetensors", "file"),
    "parent folder": (index("a.safetensors", "../b.safetensors"), INDEX, "weight_map"),
    "absolute path": (index("a.safetensors", "/b.safetensors"), INDEX, "weight_map"),
    "pickle": (index("a.safetensors", "b.bin"), INDEX, "weight_map"),
    "tensor twice in the index": (
        '{"weight_map":{"a":"a.safetensors","a":"b.safetensors"}}',
        INDEX,
        "weight_map",
    ),
    "tensor in two shards": (
        index("a.safetensors", "twin.safetensors"),
        "twin.safetensors",
        "tensor a",
    ),
    "link out of the folder": (
        index("a.safetensors", "link.safetensors"),
        "link.safetensors",
        "file",
    ),
    "index not JSON": ("{", INDEX, "weight_map"),
    "deep index": ('{"weight_map":' + DEEP + "}", INDEX, "weight_map"),
}


def write_folder(folder: Path, index_text: str) -> None:
    """Writes shards `a`, `b`, a twin of `a`, and a link out of the folder, listed by the index."""
    folder.mkdir()
    a, b = (st(f'{{"{name}":{entry("U8", "[8]", 0, 8)}}}') for name in "ab")
    shards = {"a": a, "b": b, "twin": a}
    for name, content in shards.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    outside = folder.with_name(f"{folder.name}-outside.safetensors")
    outside.write_bytes(b)
    (folder / "link.safetensors").symlink_to(outside)
    if index_text:
        (folder / INDEX).write_text(index_text)


@dataclass(frozen=True)
class Case:
    """What is opened, and which file and field the error has to name."""

    opened: Path
    file: Path
    field: str


def write_cases(root: Path) -> dict[str, Case]:
    cases = {}
    for prefix, suffix, table in [
        ("GGUF", "gguf", GGUF_CASES),
        ("safetensors", "safetensors", SAFETENSORS_CASES),
    ]:
        for number, (name, (content, at)) in enumerate(table.items()):
            path = root / f"{number}.{suffix}"
            path.write_bytes(content())
            cases[f"{prefix}: {name}"] = Case(path, path, at)
    for number, (name, (index_text, file, at)) in enumerate(FOLDER_CASES.items()):
        folder = root / f"folder-{number}"
        write_folder(folder, index_text)
        cases[f"folder: {name}"] = Case(folder, folder / file, at)
    return cases


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Case, dict[str, Any]]]:
    """Opens every file in one process, in the order of the tables."""
    cases = write_cases(tmp_path_factory.mktemp("malformed"))
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        input="".join(f"{case.opened}\n" for case in cases.values()),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answers = map(json.loads, done.stdout.splitlines())
    return {
        name: (case, answer) for (name, case), answer in zip(cases.items(), answers, strict=True)
    }


NAMES = (
    [f"GGUF: {name}" for name in GGUF_CASES]
    + [f"safetensors: {name}" for name in SAFETENSORS_CASES]
    + [f"folder: {name}" for name in FOLDER_CASES]
)


def test_there_are_more_than_sixty_malformed_files() -> None:
    assert len(NAMES) >= 60


@pytest.mark.parametrize("name", NAMES)
def test_a_malformed_file_is_refused_naming_file_and_field(
    results: dict[str, tuple[Case, dict[str, Any]]], name: str
) -> None:
    case, answer = results[name]
    error = answer["error"]
    assert error is not None, "the file was accepted"
    assert Path(error["file"]) == case.file
    assert case.field in error["field"]
    assert error["field"] in error["message"]
    assert "\n" not in error["message"]
    assert answer["seconds"] <= MAX_SECONDS
    assert answer["grown"] <= MAX_BYTES
