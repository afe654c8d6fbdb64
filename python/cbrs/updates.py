"""From the updates of one request to `RequestOutput`s, in the thread of the event loop that reads.

Nothing here runs on the step path, and log-probabilities are looked at only if they were asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cbrs.logprobs import Logprob, TokenTexts, to_dicts
from cbrs.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from cbrs._core import Update


class Choice:
    """What one choice has produced so far; of tokens and text only if `keeps_all`."""

    __slots__ = (
        "cumulative_logprob",
        "finish_reason",
        "index",
        "keeps_all",
        "last_token_time_s",
        "latencies_s",
        "logprobs",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(self, index: int, keeps_all: bool) -> None:
        """Starts with nothing; `whole` needs `keeps_all`."""
        self.index = index
        self.keeps_all = keeps_all
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None
        self.cumulative_logprob: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.latencies_s = array("d")
        self.last_token_time_s: float | None = None

    def add(self, update: Update, texts: TokenTexts) -> CompletionOutput:
        """Takes an update in and returns it as a delta."""
        token_ids = update.token_ids
        logprobs = None if update.logprobs is None else to_dicts(update.logprobs, texts)
        if logprobs is not None:
            self._add_logprobs(token_ids, logprobs)
        if self.keeps_all:
            self.text += update.text
            self.token_ids += token_ids
        if update.finish_reason is not None:
            self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        self._add_times(len(token_ids), update.time_s)
        return CompletionOutput(
            index=self.index,
            text=update.text,
            token_ids=token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
        )

    def whole(self) -> CompletionOutput:
        """Returns everything so far; what comes later does not change it."""
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=self.token_ids.copy(),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs.copy(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _add_logprobs(self, token_ids: list[int], logprobs: list[dict[int, Logprob]]) -> None:
        if self.keeps_all:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += logprobs
        new = (row[token].logprob for row, token in zip(logprobs, token_ids, strict=True))
        self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(new)

    def _add_times(self, num_tokens: int, time_s: float) -> None:
        for _ in range(num_tokens):
            if self.last_token_time_s is not None:
                self.latencies_s.append(time_s - self.last_token_time_s)
            self.last_token_time_s = time_s


class OutputAssembler:
    """Turns the updates of one request into its outputs."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        num_choices: int,
        texts: TokenTexts,
        *,
        keeps_all: bool,
    ) -> None:
        """Starts with nothing; `texts` gives the texts for log-probabilities.

        `delta` is for `keeps_all` False, `add` and `whole` are for True.
        """
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids: list[int] = []
        self._choices = [Choice(index, keeps_all) for index in range(num_choices)]
        self._first_token_time_s: float | None = None
        self._texts = texts
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._error: str | None = None

    def delta(self, updates: Sequence[Update]) -> RequestOutput:
        """Returns what the updates of one step bring: one or more, at most one per choice."""
        before = self._prompt_logprobs
        completions = [self.add(update) for update in updates]
        is_new = before is None and self._prompt_logprobs is not None
        return self._output(updates[-1], completions, self._prompt_logprobs if is_new else None)

    def whole(self, last: Update) -> RequestOutput:
        """Returns everything so far; `last` is the update that was added last."""
        completions = [choice.whole() for choice in self._choices]
        return self._output(last, completions, self._prompt_logprobs)

    def add(self, update: Update) -> CompletionOutput:
        """Takes an update in and returns it as a delta."""
        if update.prompt_token_ids is not None:
            self._prompt_token_ids = update.prompt_token_ids.tolist()
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = [None, *to_dicts(update.prompt_logprobs, self._texts)]
        self._error = self._error or update.error
        if self._first_token_time_s is None and len(update.token_ids) > 0:
            self._first_token_time_s = update.time_s
        return self._choices[update.choice].add(update, self._texts)

    def _output(
        self,
        last: Update,
        completions: list[CompletionOutput],
        prompt_logprobs: list[dict[int, Logprob] | None] | None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=completions,
            finished=last.is_last,
            num_cached_tokens=last.num_cached_tokens,
            metrics=self._metrics(last),
            error=self._error,
            prompt_logprobs=prompt_logprobs,
        )

    def _metrics(self, last: Update) -> RequestMetrics:
        latencies: list[float] = []
        if last.is_last:
            for choice in self._choices:
                latencies += choice.latencies_s
        return RequestMetrics.from_times(
            last.arrival_time_s,
            last.first_scheduled_time_s,
            self._first_token_time_s,
            last.time_s,
            latencies,
        )
