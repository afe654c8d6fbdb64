"""Random token sequences: whatever way text is made and cut, it is exactly the same text.

Each sequence goes through the detokenizer token by token, and with stop strings through the output
processor, as a choice of a request among others, streamed or as a whole. What must come out is said
by other code: the `tokenizers` package for whole texts, a search in plain Python for stop strings.
A short form runs always; `make soak` runs 10^5 sequences.
"""

import gzip
import json
import os

import kit
import numpy as np
import pytest
from text_fuzz import MAX_TOKENS, Fuzz, cut_at_stop, held_back, metaspace_tokenizer

from cbrs import Scheduler, SchedulerConfig
from cbrs._core import GgufFile, IncrementalDetokenizer, OutputChannel, OutputProcessor

NUM_SEQUENCES = 2_000
"""Of each tokenizer, in the short form."""
NUM_SOAK_SEQUENCES = 100_000
"""Of all tokenizers that need no shared data, together."""
NUM_STREAMS = 64
"""Sequences that go through the output processor at once."""


BUILT = {
    "byte": kit.byte_tokenizer,
    "spm": kit.spm_tokenizer,
    "metaspace": metaspace_tokenizer,
}
SHARED = {
    "gpt-2": "tokenizers/gpt2_tokenizer.json.gz",
    "qwen2": "tokenizers/qwen2_tokenizer.json.gz",
    "stories260k": "models/stories260K/tokenizer.json",
}


@pytest.fixture(scope="module", params=[*BUILT, "smollm2", *SHARED])
def tokenizer_json(request):
    name = request.param
    if name in BUILT:
        return json.dumps(BUILT[name]())
    if name == "smollm2":
        return GgufFile(request.getfixturevalue("smollm2_gguf")).tokenizer_json()
    path = request.getfixturevalue("cbrs_data") / SHARED[name]
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")


def check_pieces(fuzz, ids, skip_special_tokens):
    """Token by token without stop strings: the same text, and each character as soon as it is."""
    whole = fuzz.tokenizer.decode(ids, skip_special_tokens)
    assert whole == fuzz.text_of(ids, skip_special_tokens)
    stream = IncrementalDetokenizer(fuzz.tokenizer, skip_special_tokens=skip_special_tokens)
    pieces = [stream.push(token) for token in ids]
    rest = stream.finish()
    assert "".join(pieces) + rest == whole
    assert not rest.strip("\ufffd"), "only what is no character may come with the end"
    at = fuzz.choose.randrange(len(ids) + 1)
    until_now = fuzz.tokenizer.decode(ids[:at], skip_special_tokens)
    shown = "".join(pieces[:at])
    assert until_now.startswith(shown)
    assert not until_now[len(shown) :].strip("\ufffd"), "a whole character was held back"
    return pieces, whole


def check_stops(fuzz, ids, pieces, whole):
    """Token by token with stop strings: nothing of one is shown, and nothing else is held back."""
    stops = fuzz.stops(whole)
    keeps_stop = fuzz.choose.random() < 0.3
    stream = IncrementalDetokenizer(
        fuzz.tokenizer, stop=stops, include_stop_str_in_output=keeps_stop
    )
    expected, stop = cut_at_stop(whole, stops, keeps_stop)
    shown = made = ""
    for token, piece in zip(ids, pieces, strict=True):
        shown += stream.push(token)
        made += piece
        if stream.stopped is None:
            assert shown == made[: len(made) - (0 if keeps_stop else held_back(made, stops))]
    shown += stream.finish()
    assert (shown, stream.stopped) == (expected, stop)


class Processor:
    """An output processor whose scheduler is fed with scripts: many sequences at once."""

    def __init__(self, fuzz):
        config = SchedulerConfig(
            max_num_seqs=NUM_STREAMS,
            max_num_batched_tokens=4 * NUM_STREAMS,
            num_blocks=8 * NUM_STREAMS,
            max_model_len=2 * MAX_TOKENS,
            vocab_size=fuzz.tokenizer.vocab_size,
        )
        self.prompt = [fuzz.ids[0]]
        self.scheduler = Scheduler(config)
        self.processor = OutputProcessor(self.scheduler, fuzz.tokenizer)
        self.channel = OutputChannel()

    def submit(self, index, **parameters):
        """Streamed for even numbers, as a whole for odd ones."""
        channel = self.channel if index % 2 == 0 else None
        return self.processor.submit(self.prompt, index=index, channel=channel, **parameters)

    def run(self, scripts):
        """Answers every sample with the script of its request and choice until all have ended.

        Returns text, tokens and stop reason by index and choice.
        """
        batch = self.scheduler.step()
        while self.processor.num_live:
            rows = zip(batch.row_ids.tolist(), batch.request_ids.tolist(), strict=True)
            request_of = dict(rows)
            samples = zip(
                batch.sample_rows.tolist(),
                batch.sample_choices.tolist(),
                batch.sample_positions.tolist(),
                strict=True,
            )
            tokens = [scripts[request_of[row]][choice][at] for row, choice, at in samples]
            batch = self.scheduler.step(np.array(tokens, np.int32) if tokens else None)
        told = self.streamed()
        for result in self.processor.take_finished():
            for output in result.outputs:
                text, tokens = output.text, output.token_ids.tolist()
                told[result.index, output.index] = (text, tokens, output.stop_reason)
        return told

    def streamed(self):
        told = {}
        for update in self.channel.take():
            key = update.index, update.choice
            text, tokens, _ = told.get(key, ("", [], None))
            told[key] = (text + update.text, tokens + update.token_ids, update.stop_reason)
        return told


def check_together(fuzz, processor, groups):
    """Requests side by side, each with its own parameters: each choice is what it would be alone.

    A group is the sequences of one request's choices, as `(ids, pieces, whole)`, all as long.
    """
    scripts, expected = {}, {}
    for index, (skip_special_tokens, group) in enumerate(groups):
        num_tokens = len(group[0][0])
        stops = fuzz.stops(fuzz.choose.choice(group)[2])
        keeps_stop = fuzz.choose.random() < 0.3
        min_tokens = fuzz.choose.choice([0, 0, 0, fuzz.choose.randrange(num_tokens + 1)])
        request = processor.submit(
            index,
            n=len(group),
            max_tokens=num_tokens,
            stop=stops,
            include_stop_str_in_output=keeps_stop,
            min_tokens=min_tokens,
            skip_special_tokens=skip_special_tokens,
        )
        scripts[request] = [ids for ids, _, _ in group]
        for choice, (ids, pieces, whole) in enumerate(group):
            start = len("".join(pieces[:min_tokens])) if min_tokens < num_tokens else len(whole)
            text, stop = cut_at_stop(whole, stops, keeps_stop, start)
            tokens = ids[: num_tokens_until(pieces, stops, start)]
            expected[index, choice] = (text, tokens, stop)
    assert processor.run(scripts) == expected


def num_tokens_until(pieces, stops, searched_from):
    """Tokens up to the one that completes a stop string; all of them if none does.

    Bytes at the end that became no character, and that end a stop string, come with no token.
    """
    text = ""
    for count, piece in enumerate(pieces, 1):
        text += piece
        if any(text.find(stop, searched_from) >= 0 for stop in stops):
            return count
    return len(pieces)


def run_fuzz(tokenizer_json, num_sequences, seed=0):
    fuzz = Fuzz(tokenizer_json, seed)
    processor = Processor(fuzz)
    groups, num_streams = [], 0
    while num_sequences > 0:
        skip_special_tokens = fuzz.choose.random() < 0.7
        group = []
        for ids in fuzz.group():
            pieces, whole = check_pieces(fuzz, ids, skip_special_tokens)
            if skip_special_tokens:
                check_stops(fuzz, ids, pieces, whole)
            group.append((ids, pieces, whole))
        num_sequences -= len(group)
        if num_streams + len(group) > NUM_STREAMS:
            check_together(fuzz, processor, groups)
            groups, num_streams = [], 0
        if group[0][0]:
            groups.append((skip_special_tokens, group))
            num_streams += len(group)
    check_together(fuzz, processor, groups)
    processor.processor.close()


def test_any_way_to_make_and_cut_a_text_gives_the_same_text(tokenizer_json):
    run_fuzz(tokenizer_json, NUM_SEQUENCES)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_hundred_thousand_texts_are_the_same_however_they_are_made(tokenizer_json):
    count = int(os.environ.get("CBRS_SOAK_SEQUENCES", str(NUM_SOAK_SEQUENCES))) // (len(BUILT) + 1)
    run_fuzz(tokenizer_json, count, seed=1)


def test_the_search_in_plain_python_is_the_search_that_is_meant():
    """The oracle itself, on cases that are easy to see."""
    assert cut_at_stop("one two three", ["three", "two"], False) == ("one ", "two")
    assert cut_at_stop("say abc", ["bc", "abc"], True) == ("say abc", "abc")
    assert cut_at_stop("abcd", ["abc", "ab"], False) == ("", "ab")
    assert cut_at_stop("abab", ["ab"], False, searched_from=1) == ("ab", "ab")
    assert held_back("abcDE", ["DEFG", "EX"]) == 2
    assert held_back("abcDEFG", ["DEFG"]) == 0
