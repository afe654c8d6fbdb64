"""Runs the workload through one engine and records every iteration."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cbrs.demo.timeline import PolicyRun, RequestTimes, Work, work_of_batch
from cbrs.demo.workload import DemoRequest

if TYPE_CHECKING:
    from cbrs._core import Batch, FinishedRequest, OutputProcessor
    from cbrs.engine import Engine

# How long to sleep when nothing can run: the text thread is about to hand over the last results.
_IDLE_WAIT_S = 0.05


class Player:
    """Feeds requests to an engine as they arrive and steps it until all have ended.

    Arrivals are counted in iterations, not in seconds: each policy gets the same ones, however fast
    the machine is.
    """

    def __init__(
        self, engine: "Engine", workload: Sequence[DemoRequest], prompts: Sequence[list[int]]
    ) -> None:
        """`prompts` are the token ids of the requests; the engine must be idle."""
        self._engine = engine
        self._processor: OutputProcessor = engine.processor
        self._workload = workload
        self._prompts = prompts
        self._index_of: dict[int, int] = {}
        self._iterations: list[list[Work]] = []
        self._finished: dict[int, FinishedRequest] = {}

    def play(self, name: str, on_finished: Callable[[int], object]) -> PolicyRun:
        """Runs everything; calls `on_finished` with how many requests just ended."""
        while len(self._finished) < len(self._workload):
            self._submit_arrivals()
            batch = self._engine.step()
            if batch.num_seqs > 0:
                self._iterations.append(self._record(batch))
            self._take_results(may_wait=batch.num_seqs == 0, on_finished=on_finished)
        return PolicyRun(
            name=name,
            max_num_seqs=self._engine.config.max_num_seqs,
            iterations=self._iterations,
            requests=[self._times(index) for index in range(len(self._workload))],
            duration_s=self._duration_s(),
        )

    @property
    def results(self) -> "list[FinishedRequest]":
        """What became of each request, by its index in the workload."""
        return [self._finished[index] for index in range(len(self._workload))]

    def _submit_arrivals(self) -> None:
        """Submits what has arrived by now; if nothing is left to run, time jumps to the next."""
        is_idle = len(self._finished) == len(self._index_of)
        while (index := len(self._index_of)) < len(self._workload):
            request = self._workload[index]
            if request.arrival_iteration > len(self._iterations) and not is_idle:
                return
            is_idle = False
            request_id = self._processor.submit(
                self._prompts[index],
                max_tokens=request.num_output_tokens,
                temperature=0.0,
                index=index,
            )
            self._index_of[request_id] = index

    def _record(self, batch: "Batch") -> list[Work]:
        requests = [self._index_of[request_id] for request_id in batch.request_ids.tolist()]
        return work_of_batch(
            batch.row_ids,
            requests,
            batch.query_start,
            batch.seq_lens,
            [len(self._prompts[request]) for request in requests],
        )

    def _take_results(self, *, may_wait: bool, on_finished: Callable[[int], object]) -> None:
        finished = self._processor.take_finished()
        if may_wait and not finished:
            finished = self._processor.wait_finished(_IDLE_WAIT_S)
        for result in finished:
            self._finished[result.index] = result
        if finished:
            on_finished(len(finished))

    def _times(self, index: int) -> RequestTimes:
        result = self._finished[index]
        if result.first_token_time_s is None:
            raise RuntimeError(f"request {index + 1} got no token: {result.error}")
        (output,) = result.outputs
        return RequestTimes(
            arrival_iteration=self._workload[index].arrival_iteration,
            num_output_tokens=len(output.token_ids),
            num_cached_tokens=result.num_cached_tokens,
            time_to_first_token_s=result.first_token_time_s - result.arrival_time_s,
            inter_token_latencies_s=output.inter_token_latencies_s.tolist(),
        )

    def _duration_s(self) -> float:
        """From the first arrival to the last end, on the scheduler's clock."""
        results = self._finished.values()
        first_arrival = min(result.arrival_time_s for result in results)
        return max(result.finished_time_s for result in results) - first_arrival
