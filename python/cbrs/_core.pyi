"""Types of the native module; implemented in `rust/python`, where every item has its full documentation."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, SupportsIndex, TypeAlias, final

import numpy as np
import numpy.typing as npt

__all__ = [
    "Batch",
    "CbrsError",
    "CpuKernels",
    "DeadlineExceededError",
    "EngineClosedError",
    "EngineDeadError",
    "FinishedRequest",
    "GgufFile",
    "IncrementalDetokenizer",
    "InvalidRequestError",
    "ModelLoadError",
    "OutputProcessor",
    "OverloadedError",
    "PromptTooLongError",
    "SafetensorsCheckpoint",
    "Scheduler",
    "SchedulerConfig",
    "StepError",
    "StepOutput",
    "StepResult",
    "Tokenizer",
    "__version__",
    "cpu_features",
]

__version__: str

Int32Array: TypeAlias = npt.NDArray[np.int32]
TokenIds: TypeAlias = npt.NDArray[np.integer[Any]] | Iterable[SupportsIndex]

class CbrsError(Exception):
    """Base of every error that cbrs raises."""

class InvalidRequestError(CbrsError, ValueError):
    """A request parameter is wrong. `param` names it (None = the request as a whole)."""

    param: str | None

class PromptTooLongError(InvalidRequestError):
    """Prompt plus output exceed max_model_len."""

class OverloadedError(CbrsError):
    """The queue is full. `retry_after_s` says when to try again (None = unknown)."""

    retry_after_s: float | None

class DeadlineExceededError(CbrsError):
    """The deadline of a request passed while it waited."""

class EngineClosedError(CbrsError):
    """The engine was closed, or belongs to another process."""

class EngineDeadError(CbrsError):
    """The engine broke and cannot go on; create a new one."""

class ModelLoadError(CbrsError):
    """A model cannot be loaded. `file` and `field` say what is wrong where."""

    file: str
    field: str

class StepError(CbrsError, ValueError):
    """step() or fail() was called with the wrong result, or while another step was running; nothing changed."""

@final
class SchedulerConfig:
    """Limits and policy of one scheduler. Checked at construction; a wrong field raises `ValueError` naming it.

    `max_model_len` is lowered to what the pool holds; read it back from here.
    """

    def __new__(
        cls,
        *,
        max_num_seqs: SupportsIndex,
        max_num_batched_tokens: SupportsIndex,
        num_blocks: SupportsIndex,
        max_model_len: SupportsIndex,
        block_size: SupportsIndex | None = None,
        vocab_size: SupportsIndex | None = None,
        eos_token_ids: TokenIds | None = None,
        enable_prefix_caching: bool = True,
        queue_capacity: SupportsIndex | None = None,
        max_queued_tokens: SupportsIndex | None = None,
        max_prefill_chunk_tokens: SupportsIndex | None = None,
        policy: str = "fcfs",
        clock: str = "monotonic",
        seed: int | None = None,
    ) -> SchedulerConfig: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def max_model_len(self) -> int:
        """Effective limit on prompt plus output, in tokens."""
    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> list[int]: ...
    @property
    def enable_prefix_caching(self) -> bool: ...
    @property
    def queue_capacity(self) -> int: ...
    @property
    def max_queued_tokens(self) -> int | None: ...
    @property
    def max_prefill_chunk_tokens(self) -> int | None: ...
    @property
    def policy(self) -> str: ...
    @property
    def clock(self) -> str: ...
    @property
    def seed(self) -> int:
        """Source of the seeds of requests that have none."""

@final
class Batch:
    """What runs in one step, as flat arrays. `T` tokens, `S` sequences, `L` logits rows, `R` samples.

    Arrays belong to the scheduler and stay valid until the `step` that commits this batch returns;
    do not write to them.
    """

    @property
    def step_id(self) -> int:
        """Number of this step; the result must name it if it names one."""
    @property
    def num_seqs(self) -> int:
        """Sequences in this batch; 0 = nothing to run."""
    @property
    def num_decodes(self) -> int:
        """Leading sequences with exactly one query token."""
    @property
    def num_tokens(self) -> int:
        """Query tokens in this batch."""
    @property
    def max_query_len(self) -> int:
        """Most query tokens of one sequence."""
    @property
    def max_seq_len(self) -> int:
        """Longest context after this step."""
    @property
    def token_ids(self) -> Int32Array:
        """int32 `[T]`: tokens to run."""
    @property
    def positions(self) -> Int32Array:
        """int32 `[T]`: position of each token in its sequence."""
    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """int64 `[T]`: where K and V go, `block * block_size + offset`; -1 = do not write."""
    @property
    def query_start(self) -> Int32Array:
        """int32 `[S+1]`: prefix sums of query tokens per sequence."""
    @property
    def seq_lens(self) -> Int32Array:
        """int32 `[S]`: context length after this step."""
    @property
    def row_ids(self) -> Int32Array:
        """int32 `[S]`: row of each sequence."""
    @property
    def request_ids(self) -> npt.NDArray[np.uint64]:
        """uint64 `[S]`: request of each sequence."""
    @property
    def choice_ids(self) -> Int32Array:
        """int32 `[S]`: choice of each sequence within its request."""
    @property
    def logits_index(self) -> Int32Array:
        """int32 `[L]`: indices into `T` whose logits are needed."""
    @property
    def sample_index(self) -> Int32Array:
        """int32 `[R]`: indices into `logits_index` that are sampled; the result has one token for each."""
    @property
    def sample_rows(self) -> Int32Array:
        """int32 `[R]`: row of each sample."""
    @property
    def sample_positions(self) -> Int32Array:
        """int32 `[R]`: index of the output token to be sampled, 0 for the first."""
    @property
    def new_rows(self) -> Int32Array:
        """int32: rows that were given to a sequence by this plan (after `freed_rows`)."""
    @property
    def freed_rows(self) -> Int32Array:
        """int32: rows that lost their sequence since the last plan."""
    @property
    def block_tables(self) -> Int32Array:
        """int32 `[max_num_seqs, max_blocks]`: block ids by row; columns past a sequence's blocks are stale."""
    @property
    def block_table_updates(self) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
        """What changed in `block_tables` since the last plan: `(rows [U], first_columns [U], start [U+1], ids)`.

        Run `i` writes `ids[start[i]:start[i + 1]]` to row `rows[i]` from column `first_columns[i]`.
        """
    @property
    def temperature(self) -> npt.NDArray[np.float32]:
        """float32 `[max_num_seqs]`, by row; 0 = greedy."""
    @property
    def top_k(self) -> Int32Array:
        """int32 `[max_num_seqs]`, by row; 0 or -1 = all."""
    @property
    def top_p(self) -> npt.NDArray[np.float32]:
        """float32 `[max_num_seqs]`, by row."""
    @property
    def min_p(self) -> npt.NDArray[np.float32]:
        """float32 `[max_num_seqs]`, by row."""
    @property
    def seeds(self) -> npt.NDArray[np.uint64]:
        """uint64 `[max_num_seqs]`, by row: key of the random numbers."""
    @property
    def outputs(self) -> StepOutput:
        """What the `step` that returned this batch has to tell."""

@final
class StepOutput:
    """Tokens and ends of one step, as flat arrays with one entry per event. Valid as long as its batch."""

    STOP: ClassVar[int]
    LENGTH: ClassVar[int]
    CANCELLED: ClassVar[int]
    ERROR: ClassVar[int]

    @property
    def step_id(self) -> int: ...
    @property
    def time_ns(self) -> int:
        """Time of the step on the scheduler's clock."""
    @property
    def request_ids(self) -> npt.NDArray[np.uint64]:
        """uint64 `[E]`: request of each event."""
    @property
    def choice_ids(self) -> Int32Array:
        """int32 `[E]`: choice of each event within its request."""
    @property
    def token_ids(self) -> Int32Array:
        """int32 `[E]`: new token; -1 = the event brings none."""
    @property
    def finish_reasons(self) -> npt.NDArray[np.uint8]:
        """uint8 `[E]`: 0 = goes on, else `STOP`, `LENGTH`, `CANCELLED` or `ERROR`."""
    @property
    def stop_ids(self) -> Int32Array:
        """int32 `[E]`: stop token id that ended the choice; -1 = none."""
    @property
    def started_request_ids(self) -> npt.NDArray[np.uint64]:
        """uint64 `[A]`: requests admitted for the first time by this plan."""
    @property
    def started_num_cached_tokens(self) -> Int32Array:
        """int32 `[A]`: prompt tokens that each of them found in the prefix cache."""
    def finish_reason(self, index: SupportsIndex) -> str | None:
        """How event `index` ended its choice: `stop`, `length`, `cancelled`, `error`, or None if it goes on."""
    def stop_reason(self, index: SupportsIndex) -> int | str | None:
        """The stop token id, or the string given to `finish()`, that ended event `index`'s choice; else None."""
    def error(self, index: SupportsIndex) -> str | None:
        """Why event `index` ended with `error`; None for other events."""
    def __len__(self) -> int:
        """Return len(self)."""

@final
class StepResult:
    """Sampled tokens of one batch, with what else may be said about them.

    `logprobs`, `prompt_logprobs`, `draft_token_ids` and `step_time_ns` are part of the contract but not of
    this version: a value for one of them raises `InvalidRequestError`.
    """

    def __new__(
        cls,
        step_id: SupportsIndex,
        token_ids: TokenIds,
        token_start: TokenIds | None = None,
        row_error: Iterable[Any] | None = None,
        logprobs: None = None,
        prompt_logprobs: None = None,
        draft_token_ids: None = None,
        step_time_ns: None = None,
    ) -> StepResult: ...
    @property
    def step_id(self) -> int: ...
    @property
    def token_ids(self) -> Int32Array:
        """int32 `[R]`."""

@final
class Scheduler:
    """Decides which tokens of which requests run together, once per iteration.

    `submit`, `cancel`, `finish`, `close` and `stats` may be called from any thread, `step` and `fail` from
    one at a time.
    """

    def __new__(cls, config: SchedulerConfig) -> Scheduler: ...
    @property
    def config(self) -> SchedulerConfig:
        """The effective configuration."""
    def submit(
        self,
        prompt_token_ids: TokenIds,
        max_tokens: SupportsIndex | None = None,
        stop_token_ids: TokenIds | None = None,
        ignore_eos: bool = False,
        tenant: str | None = None,
        cache_salt: str | None = None,
        *,
        temperature: float = 1.0,
        top_k: SupportsIndex | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        **later: None,
    ) -> int:
        """Queues a request and returns its id. Any thread; never waits.

        An absent `max_tokens` means what fits `max_model_len`. Raises `InvalidRequestError`, `PromptTooLongError`,
        `OverloadedError` or `EngineClosedError`; nothing is queued then.
        """
    def step(self, result: StepResult | TokenIds | None = None, block: bool = False) -> Batch:
        """Commits the result of the last batch and plans the next, in one call.

        `result` has one token per entry of the last batch's `sample_index`; None if that batch had no samples.
        Returns the new batch, with `num_seqs == 0` if nothing can run; with `block=True` it then waits until
        there is something to run or to report. Raises `StepError` (nothing changed) or `EngineClosedError`.
        """
    def fail(self, step_id: SupportsIndex, message: str) -> None:
        """Fails what the batch in flight touched: those requests end with `message` as their error."""
    def cancel(self, request_id: SupportsIndex) -> bool:
        """Asks for the end of a request; returns whether this was the first cancel of a live request."""
    def finish(
        self, request_id: SupportsIndex, choice: SupportsIndex, num_tokens: SupportsIndex, stop_reason: str | None = None
    ) -> bool:
        """Ends a choice as `stop` after its first `num_tokens` output tokens; returns whether the request was live."""
    def set_time_ns(self, time_ns: SupportsIndex) -> None:
        """Sets the time of the following steps; only with `clock="manual"`."""
    def time_ns(self) -> int:
        """Time on the scheduler's clock, in nanoseconds."""
    def close(self) -> None:
        """Refuses further requests; the next `step` ends every live one as `cancelled`."""
    def stats(self) -> dict[str, int]:
        """Counters and gauges by name. Never waits for a step."""
    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; running sequences go on, but publish nothing more."""
    def check_invariants(self) -> None:
        """Checks every invariant of scheduler and block pool; a broken one raises `PanicException`."""
