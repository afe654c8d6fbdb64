"""A processor on a scheduler whose model follows a script, with its output streamed."""

import json
import select
import time

import kit
import numpy as np

from cbrs import Scheduler, SchedulerConfig
from cbrs._core import OutputChannel, OutputProcessor, StepResult, Tokenizer

BYTE = Tokenizer(json.dumps(kit.byte_tokenizer()))
TIMEOUT_S = 20.0


def byte_ids(text):
    """One token a byte: `kit.byte_tokenizer` has the bytes from id 2 on."""
    return [2 + byte for byte in (text if isinstance(text, bytes) else text.encode())]


class Rig:
    """A scheduler whose model says `script`, by output position, to every request."""

    def __init__(self, script, **options):
        defaults = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "num_blocks": 64,
            "max_model_len": 128,
            "vocab_size": kit.NUM_TOKENS,
            "eos_token_ids": (kit.EOS,),
        }
        self.script = script
        self.scheduler = Scheduler(SchedulerConfig(**(defaults | options)))
        self.processor = OutputProcessor(self.scheduler, BYTE)
        self.channel = OutputChannel()
        self.batch = self.scheduler.step()

    def submit(self, prompt=(2, 3), index=0, **parameters):
        return self.processor.submit(list(prompt), index=index, channel=self.channel, **parameters)

    def step(self):
        """Answers the batch; the logprob of token t is -t, and -9 that of token 7 beside it."""
        positions = self.batch.sample_positions
        tokens = np.array([self.script[i % len(self.script)] for i in positions], np.int32)
        others = np.full_like(tokens, 7)
        logprobs = (
            np.stack([tokens, others], axis=1),
            np.stack([-tokens.astype(np.float32), np.full(len(tokens), -9, np.float32)], axis=1),
            tokens + 1,
        )
        self.batch = self.scheduler.step(
            StepResult(self.batch.step_id, tokens, logprobs=logprobs) if len(tokens) else None
        )
        return self.batch.num_seqs > 0

    def run(self, num_requests=1):
        """Steps until so many streams have ended; returns all updates."""
        updates = self.channel.take()
        deadline = time.monotonic() + TIMEOUT_S
        while sum(update.is_last for update in updates) < num_requests:
            assert time.monotonic() < deadline, updates
            if not self.step():
                select.select([self.channel.fileno()], [], [], 0.01)
            updates += self.channel.take()
        return updates

    def settle(self):
        """Steps until everything has ended and the text thread has read it."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.processor.num_live:
            assert time.monotonic() < deadline
            self.step()


def text_of(updates):
    return "".join(update.text for update in updates)
