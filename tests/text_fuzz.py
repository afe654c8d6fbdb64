"""What the text fuzz draws from, and what must come out: said by others, or by plain Python."""

import codecs
import itertools
import json
import random
import re
import zlib

import tokenizers

from cbrs._core import Tokenizer

MAX_TOKENS = 48
"""Of one sequence."""


def metaspace_tokenizer():
    """A vocabulary of whole pieces with a word marker, as Unigram models of other families have.

    There is no byte fallback; several characters outside ASCII, pieces with more than one marker,
    and added tokens, special and not.
    """
    pieces = ["<unk>", "▁", "▁▁", "▁the", "▁a", "a", "b", "c", "ab", "bca", "▁ca", "é", "né", "日"]
    pieces += [
        "日本",
        "語",
        "😀",
        "👩‍🚀",
        "한",
        "▁한국",
        "\u0301",
        ".",
        ",",
        "\n",
        "▁.",
        "x▁y",
        "DEF",
        "\ufffd",
    ]
    added = {"<pad>": True, "<mask>": True, "‼": False, " spaced ": False, "▁odd": False}
    vocab = [[piece, -float(i)] for i, piece in enumerate(pieces)]
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": len(pieces) + i,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
            for i, (content, special) in enumerate(added.items())
        ],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab},
    }


codecs.register_error(
    "replace_bytes", lambda error: ("\ufffd" * (error.end - error.start), error.end)
)


class Fuzz:
    """One tokenizer, its twin of the `tokenizers` package, and a source of sequences."""

    def __init__(self, tokenizer_json, seed):
        self.choose = random.Random(zlib.crc32(tokenizer_json.encode()) + seed)
        self.tokenizer = Tokenizer(tokenizer_json)
        self.reference = tokenizers.Tokenizer.from_str(tokenizer_json)
        size = self.tokenizer.vocab_size
        texts = [self.tokenizer.id_to_token(token) for token in range(size)]
        self.ids = [token for token in range(size) if texts[token] is not None]
        added = json.loads(tokenizer_json)["added_tokens"]
        self.special = {token["id"] for token in added if token["special"]}
        self.has_byte_tokens = "<0x00>" in texts
        special = sorted(self.special)
        # Where a table of rare tokens hides in a large vocabulary, random ids would never meet it.
        partial = [t for t in self.ids if "\ufffd" in self.text_of([t], False)]
        short = [t for t in self.ids if len(texts[t]) <= 2]
        self.pools = [pool for pool in (self.ids, special, partial, short) if pool]

    def text_of(self, ids, skip_special_tokens):
        if self.has_byte_tokens and not self.is_valid(ids, skip_special_tokens):
            return self.sentencepiece_text(ids, skip_special_tokens)
        return self.reference.decode(ids, skip_special_tokens=skip_special_tokens)

    def runs(self, ids, skip_special_tokens):
        """Runs of byte tokens as bytes, other tokens as strings."""
        runs = []
        for token in ids:
            text = self.tokenizer.id_to_token(token)
            if skip_special_tokens and token in self.special:
                continue
            byte = re.fullmatch("<0x([0-9A-F]{2})>", text)
            if byte and runs and isinstance(runs[-1], bytes):
                runs[-1] += bytes.fromhex(byte[1])
            else:
                runs.append(bytes.fromhex(byte[1]) if byte else text)
        return runs

    def is_valid(self, ids, skip_special_tokens):
        runs = self.runs(ids, skip_special_tokens)
        return all(
            run == run.decode("utf-8", "ignore").encode() for run in runs if type(run) is bytes
        )

    def sentencepiece_text(self, ids, skip_special_tokens):
        """The text with byte runs that are no UTF-8: a replacement for each byte that is wrong.

        So SentencePiece decodes, and so a stream must: what came before is shown already. The
        `tokenizers` package replaces every byte of such a run, also those of whole characters.
        """
        text = ""
        for run in self.runs(ids, skip_special_tokens):
            text += (
                run.decode("utf-8", "replace_bytes")
                if type(run) is bytes
                else run.replace("▁", " ")
            )
        return text.removeprefix(" ")

    def sequence(self):
        """Ids of one kind for a while, then of another; every kind of byte and token meets."""
        ids = []
        for _ in range(self.choose.randint(1, 6)):
            pool = self.choose.choice(self.pools)
            if self.choose.random() < 0.3:
                pool = [self.choose.choice(pool)]
            ids += self.choose.choices(pool, k=self.choose.randint(0, 8))
        return ids[:MAX_TOKENS]

    def group(self):
        """The sequences of one request's choices, all as long as the longest."""
        group = [self.sequence() for _ in range(self.choose.choice([1, 1, 1, 2, 4]))]
        length = max(map(len, group))
        return [list(itertools.islice(itertools.cycle(ids or self.ids), length)) for ids in group]

    def stops(self, text):
        """Parts of the text, such parts with another ending, and what is not in it at all."""
        stops = []
        for _ in range(self.choose.choice([0, 1, 1, 2, 4, 16])):
            start = self.choose.randrange(len(text) + 1)
            stop = text[start : start + self.choose.randint(1, 9)]
            if self.choose.random() < 0.3:
                stop += self.choose.choice("aé日 \n\ufffd")
            stops.append(stop or "never")
        return stops


def cut_at_stop(text, stops, keeps_stop, searched_from=0):
    """The text up to the stop string that is complete first (the longest of such), and that one."""
    found = []
    for stop in stops:
        at = text.find(stop, searched_from)
        if at >= 0:
            found.append((at + len(stop), -len(stop), stop))
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if keeps_stop else end - len(stop)], stop


def held_back(text, stops):
    """Length of the longest end of `text` that is the beginning of a stop string."""
    longest = max(map(len, stops), default=0)
    return next(
        (
            n
            for n in range(min(longest, len(text)), 0, -1)
            if text.endswith(tuple(s[:n] for s in stops if len(s) > n))
        ),
        0,
    )
