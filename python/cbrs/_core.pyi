"""Types of the native module; implemented in `rust/python`, where every item has its full
documentation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, ClassVar, Literal, SupportsIndex, TypeAlias, TypedDict, Unpack, final

import numpy as np
import numpy.typing as npt

__all__ = [
    "ApiKey",
    "Batch",
    "CbrsError",
    "CpuDecoder",
    "CpuKernels",
    "DeadlineExceededError",
    "DecoderLayer",
    "EngineClosedError",
    "EngineDeadError",
    "FinishedChoice",
    "FinishedRequest",
    "GgufFile",
    "HttpServer",
    "IncrementalDetokenizer",
    "InvalidRequestError",
    "LogWriter",
    "Logprobs",
    "ModelLoadError",
    "NewRowTables",
    "OutputChannel",
    "OutputProcessor",
    "OverloadedError",
    "PackedLinear",
    "PromptTooLongError",
    "SafetensorsCheckpoint",
    "Scheduler",
    "SchedulerConfig",
    "StepError",
    "StepOutput",
    "StepResult",
    "Tokenizer",
    "Update",
    "__version__",
    "cpu_features",
    "run_load",
]

__version__: str

Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]
TokenIds: TypeAlias = npt.NDArray[np.integer[Any]] | Iterable[SupportsIndex]
Priority: TypeAlias = Literal["interactive", "standard", "batch"]
FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]
LogprobArrays: TypeAlias = tuple[Int32Array, Float32Array, Int32Array]

class _SamplingParameters(TypedDict, total=False):
    """Parameters of a request that may be given by name only; None leaves a default in place."""

    n: SupportsIndex | None
    min_tokens: SupportsIndex | None
    temperature: float | None
    top_k: SupportsIndex | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: dict[int, float] | None
    bad_words_token_ids: Iterable[TokenIds] | None
    logprobs: SupportsIndex | None
    prompt_logprobs: SupportsIndex | None
    truncate_prompt_tokens: SupportsIndex | None
    priority: Priority | None
    ttft_deadline_ms: float | None
    deadline_ms: float | None
    target_itl_ms: float | None
    cache_key_extra: None
    draft_token_ids: None

class _ClassLimits(TypedDict, total=False):
    """Defaults and limits of one class; None = none."""

    target_itl_ms: float | None
    ttft_deadline_ms: float | None
    deadline_ms: float | None
    max_tokens: SupportsIndex | None
    max_num_seqs: SupportsIndex | None
    queue_share: float

class _TenantLimits(TypedDict, total=False):
    """Weight, defaults and limits of one tenant; None = none."""

    weight: float
    priority: Priority | None
    requests_per_min: float | None
    tokens_per_min: float | None
    max_tokens: SupportsIndex | None
    max_num_seqs: SupportsIndex | None
    target_itl_ms: float | None
    ttft_deadline_ms: float | None
    deadline_ms: float | None

class _PolicyRules(TypedDict, total=False):
    """The policy part by part; as a keyword argument, None leaves a part as `policy` says."""

    fairness: Literal["off", "weighted"] | None
    order: Literal["fcfs", "edf"] | None
    admission: Literal["prompt", "estimated", "guaranteed"] | None
    victim: Literal["newest", "cost"] | None
    max_overtakes: SupportsIndex | None
    max_preemptions: SupportsIndex | None
    max_prefill_interval: SupportsIndex | None
    max_batch_pause_steps: SupportsIndex | None
    aging_s: float | None
    aged_share: float | None
    target_itl_ms: float | None
    max_queue_s: float | None
    classes: Mapping[Priority, _ClassLimits] | None
    tenants: Mapping[str, _TenantLimits] | None
    default_tenant: _TenantLimits | None

class _RequestParameters(_SamplingParameters, total=False):
    """All parameters of a request with text."""

    max_tokens: SupportsIndex | None
    stop: str | Iterable[str] | None
    stop_token_ids: TokenIds | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    bad_words: str | Iterable[str] | None
    skip_special_tokens: bool | None
    detokenize: bool | None
    tenant: str | None
    cache_salt: str | None

class CbrsError(Exception):
    """Base of every error that cbrs raises."""

class InvalidRequestError(CbrsError, ValueError):
    """A request parameter is wrong. `param` names it (None = the request as a whole)."""

    param: str | None

class PromptTooLongError(InvalidRequestError):
    """Prompt plus output exceed max_model_len."""

class OverloadedError(CbrsError):
    """The request was refused because of load, a rate or a deadline.

    `retry_after_s` says after how many seconds to try again (None = that does not help: the
    deadline is too short whatever waits), `reason` what was short: the queue (its bounds in
    requests, tokens and seconds), the rate of the tenant, or the time until the deadline.
    """

    retry_after_s: float | None
    reason: Literal["queue", "rate", "deadline"]

class DeadlineExceededError(CbrsError):
    """The deadline of a request passed before it ended."""

class EngineClosedError(CbrsError):
    """The engine was closed, or belongs to another process."""

class EngineDeadError(CbrsError):
    """The engine broke and cannot go on; create a new one."""

class ModelLoadError(CbrsError):
    """A model cannot be loaded. `file` and `field` say what is wrong where."""

    file: str
    field: str

class StepError(CbrsError, ValueError):
    """step() or fail() was called with the wrong result, or while another step was running; nothing
    changed.
    """

@final
class ApiKey:
    """An API key of `HttpServer`: its name, the SHA-256 of its secret (32 bytes), what it may do.

    Its requests are those of `tenant` (None: of the tenant that they name), of class `priority` if
    they name none (None: as the policy says) and at most of class `max_priority`. `is_admin` may
    claim any tenant and class, and sees, cancels and reads the requests of all. Raises `ValueError`
    for a digest of another size and an unknown class.
    """

    def __new__(
        cls,
        name: str,
        digest: bytes,
        *,
        tenant: str | None = None,
        max_priority: Priority = "interactive",
        priority: Priority | None = None,
        is_admin: bool = False,
    ) -> ApiKey: ...
    @property
    def name(self) -> str:
        """What it is called where it is shown."""
    @property
    def tenant(self) -> str | None:
        """Whose requests its requests are; None = whose they say."""
    @property
    def max_priority(self) -> Priority:
        """The most urgent class that it may ask for."""
    @property
    def priority(self) -> Priority | None:
        """Class of its requests that name none; None = as the policy says."""
    @property
    def is_admin(self) -> bool:
        """Whether it may do everything."""

@final
class HttpServer:
    """An OpenAI-compatible HTTP server in front of a scheduler, on threads that never run Python.

    Somebody has to step the scheduler of `processor`. `port` 0 is one that is free; the first of
    `served_model_names` stands in answers. With `api_keys` all but `/health` and `/ready` needs one
    of them, with `open_metrics` not `/metrics` and `/stats` either; None lets everybody do
    everything. On loopback the `Host` header has to be a name of it or one of `allowed_hosts`.
    `settings` is what `/version` tells: JSON of the engine's settings, of what keys without all
    rights see of them, and of the server's. `limits_json` has the limits that are not the default.
    `access_log` writes a line for each request to the standard error output, by `log_writer` if
    there is one.
    Raises `ValueError` for an unusable limit or address, one that is not loopback without keys or
    `allow_public`, and unusable keys, and `OSError` if the address cannot be had.
    """

    def __new__(
        cls,
        processor: OutputProcessor,
        tokenizer: Tokenizer | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        served_model_names: list[str],
        worker_threads: int | None = None,
        allow_public: bool = False,
        api_keys: list[ApiKey] | None = None,
        open_metrics: bool = False,
        allowed_hosts: list[str] | None = None,
        settings: tuple[str, str, str] | None = None,
        limits_json: str | None = None,
        access_log: Literal["text", "json"] | None = None,
        log_writer: LogWriter | None = None,
    ) -> HttpServer: ...
    @property
    def host(self) -> str:
        """The address it listens on."""
    @property
    def port(self) -> int:
        """The port it listens on."""
    @property
    def num_active(self) -> int:
        """Requests and responses under way, until the last byte is with the system."""
    @property
    def worker_threads(self) -> int:
        """Threads that serve connections."""
    @property
    def limits_json(self) -> str:
        """The limits in effect, as JSON."""
    def set_api_keys(self, api_keys: list[ApiKey]) -> None:
        """Puts other keys in force for requests that come from now on; those under way go on.

        Raises `ValueError` for unusable keys, and then the old ones stay.
        """
    def set_settings(self, settings: tuple[str, str, str]) -> None:
        """Replaces what `/version` tells; as the constructor's `settings`."""
    def drain(self) -> None:
        """Refuses new requests from now on; `/ready` says so. What is under way goes on."""
    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nothing is under way, at most `timeout_s` seconds; returns whether so."""
    def cancel_all(self) -> None:
        """Ends every request that is under way; streams end with an error event."""
    def close(self) -> None:
        """Closes the socket and all connections and joins the threads."""

@final
class SchedulerConfig:
    """Limits and policy of one scheduler; a wrong field raises `ValueError` naming it.

    `max_model_len` is lowered to what the pool holds; read it back from here.

    `policy` is a built-in (None = "fcfs", or "fair" or "static"), the path of a `.toml` file, or a
    dict with the same keys, whose key `policy` names the built-in to start from (without it:
    "fair"). Every other key is a keyword too, and wins over the policy's value; of the tables
    (`classes`, `tenants`, `default_tenant`) those keys do that are given. "static" has no rules,
    and takes none.
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
        policy: str | PathLike[str] | dict[str, Any] | None = None,
        clock: str = "monotonic",
        seed: int | None = None,
        **rules: Unpack[_PolicyRules],
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
    def policy(self) -> str:
        """Name of the built-in that the policy started from."""
    @property
    def policy_settings(self) -> dict[str, Any]:
        """The whole policy in effect, as a new dict that `policy=` takes; of "static" only its
        name.
        """
    @property
    def fairness(self) -> str:
        """Whether tenants of a class share it by weight: "off" or "weighted"."""
    @property
    def order(self) -> str:
        """Who of a tenant comes first: "fcfs" (arrival) or "edf" (earliest deadline)."""
    @property
    def admission(self) -> str:
        """Memory that must be free before a request starts: "prompt", "estimated" or
        "guaranteed".
        """
    @property
    def victim(self) -> str:
        """Who gives up row and blocks: "newest" or "cost" (least to compute again)."""
    @property
    def max_overtakes(self) -> int:
        """Later arrivals of its class and tenant that may start before one that lacks memory."""
    @property
    def max_preemptions(self) -> int:
        """Preemptions after which a sequence is a victim only for memory safety."""
    @property
    def max_prefill_interval(self) -> int:
        """In every so many steps the highest waiting class gets a chunk of a prompt."""
    @property
    def max_batch_pause_steps(self) -> int:
        """Longest pause of a batch decode, in steps."""
    @property
    def aging_s(self) -> float:
        """Seconds of waiting after which a request is aged."""
    @property
    def aged_share(self) -> float:
        """Part of admissions that the oldest aged request is owed."""
    @property
    def target_itl_ms(self) -> float | None:
        """Longest time between two tokens, in milliseconds, of requests that set no other."""
    @property
    def max_queue_s(self) -> float | None:
        """Bound on the predicted seconds of waiting; None = none."""
    @property
    def clock(self) -> str: ...
    @property
    def seed(self) -> int:
        """Source of the seeds of requests that have none."""

@final
class Batch:
    """What runs in one step, as flat arrays.

    `T` tokens, `S` sequences, `L` rows of logits, `R` samples, `P` prompt tokens whose
    log-probabilities are wanted.

    Arrays belong to the scheduler and stay valid until the `step` that commits this batch returns;
    do not write to them. A later batch may hold the same array objects, with what is true then.
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
        """int32 `[R]`: indices into `logits_index` that are sampled; the result has one token for
        each.
        """
    @property
    def sample_rows(self) -> Int32Array:
        """int32 `[R]`: row of each sample."""
    @property
    def sample_positions(self) -> Int32Array:
        """int32 `[R]`: index of the output token to be sampled, 0 for the first."""
    @property
    def sample_choices(self) -> Int32Array:
        """int32 `[R]`: choice of each sample within its request."""
    @property
    def prompt_logits_index(self) -> Int32Array:
        """int32 `[P]`: indices into `logits_index` of prompt tokens whose log-probabilities are
        wanted.
        """
    @property
    def prompt_target_ids(self) -> Int32Array:
        """int32 `[P]`: the token after each of them, whose log-probability it is."""
    @property
    def prompt_rows(self) -> Int32Array:
        """int32 `[P]`: row of each of them."""
    @property
    def num_prompt_logprobs(self) -> Int32Array:
        """int32 `[P]`: most likely ids wanted beside each of them."""
    @property
    def has_sampling_extras(self) -> bool:
        """Whether a sampled row has more parameters than temperature, top_k, top_p and min_p, or
        wants log-probabilities.
        """
    @property
    def new_row_tables(self) -> NewRowTables | None:
        """Ragged parameters of `new_rows`, handed over this once; None if none of them has any."""
    @property
    def new_rows(self) -> Int32Array:
        """int32: rows that were given to a sequence by this plan (after `freed_rows`)."""
    @property
    def freed_rows(self) -> Int32Array:
        """int32: rows that lost their sequence since the last plan."""
    @property
    def block_tables(self) -> Int32Array:
        """int32 `[max_num_seqs, max_blocks]`, read-only: block ids by row.

        Columns past a sequence's blocks are stale.
        """
    @property
    def block_table_updates(self) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
        """What changed in `block_tables` since the last plan.

        `(rows [U], first_columns [U], start [U+1], ids)`: run `i` writes `ids[start[i]:start[i +
        1]]` to row `rows[i]` from column `first_columns[i]`.
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
    def presence_penalty(self) -> Float32Array:
        """float32 `[max_num_seqs]`, by row; 0 = none."""
    @property
    def frequency_penalty(self) -> Float32Array:
        """float32 `[max_num_seqs]`, by row; 0 = none."""
    @property
    def repetition_penalty(self) -> Float32Array:
        """float32 `[max_num_seqs]`, by row; 1 = none."""
    @property
    def min_tokens(self) -> Int32Array:
        """int32 `[max_num_seqs]`, by row: output tokens before which `NewRowTables.banned_ids` must
        not come.
        """
    @property
    def num_logprobs(self) -> Int32Array:
        """int32 `[max_num_seqs]`, by row: most likely ids to report with each output token; -1 =
        nothing.
        """
    @property
    def outputs(self) -> StepOutput:
        """What the `step` that returned this batch has to tell."""

@final
class NewRowTables:
    """Ragged sampling parameters of the rows that a plan gave out, aligned with `Batch.new_rows`.

    Each table is offsets `[N+1]` (`N` rows) and the values of all rows. A resumed sequence has a
    new row and brings its history.
    """

    @property
    def history_start(self) -> Int32Array:
        """int32 `[N+1]`: offsets into `history_ids`."""
    @property
    def history_ids(self) -> Int32Array:
        """int32: prompt and generated tokens known by now; of rows with a penalty or bad words
        only.
        """
    @property
    def history_num_prompt(self) -> Int32Array:
        """int32 `[N]`: how many of a row's history are the prompt's."""
    @property
    def bias_start(self) -> Int32Array:
        """int32 `[N+1]`: offsets into `bias_ids` and `bias_values`."""
    @property
    def bias_ids(self) -> Int32Array:
        """int32: ids whose logits are changed; an id that comes twice counts with its last
        value.
        """
    @property
    def bias_values(self) -> Float32Array:
        """float32: what is added to them."""
    @property
    def banned_start(self) -> Int32Array:
        """int32 `[N+1]`: offsets into `banned_ids`."""
    @property
    def banned_ids(self) -> Int32Array:
        """int32: ids that must not come before `Batch.min_tokens` output tokens."""
    @property
    def bad_words_start(self) -> Int32Array:
        """int32 `[N+1]`: offsets into the words, which `bad_word_start` describes."""
    @property
    def bad_word_start(self) -> Int32Array:
        """int32 `[W+1]`: offsets of each word into `bad_word_ids`."""
    @property
    def bad_word_ids(self) -> Int32Array:
        """int32: tokens of all bad words."""
    def __len__(self) -> int:
        """Return len(self)."""

@final
class LogWriter:
    """Writes lines to the process's standard error output on a thread of its own.

    Nobody who logs waits for a reader of the log: while 1 MiB is pending, further texts are dropped
    and counted. The output is the one of the moment at which this is made. Raises `OSError` if the
    system has no file or thread to give.
    """

    def __new__(cls) -> LogWriter: ...
    def write(self, text: str) -> None:
        """Appends a text, which should end a line; never waits."""
    def flush(self, timeout_s: float) -> bool:
        """Waits until what was appended is written, at most `timeout_s` seconds; whether so."""
    @property
    def num_dropped(self) -> int:
        """Texts that were dropped because nobody read them fast enough."""

@final
class Logprobs:
    """Log-probabilities of a list of tokens.

    Row `i` has the entries `start[i]:start[i + 1]`: the token itself, then the most likely ids,
    most likely first.
    """

    @property
    def start(self) -> Int32Array:
        """int32 `[N+1]`: offsets."""
    @property
    def token_ids(self) -> Int32Array:
        """int32: ids of all rows."""
    @property
    def values(self) -> Float32Array:
        """float32: natural logarithms of their probabilities."""
    @property
    def ranks(self) -> Int32Array:
        """int32 `[N]`: rank of each row's token; 1 = the most likely."""
    def __len__(self) -> int:
        """Return len(self)."""

@final
class StepOutput:
    """Tokens and ends of one step, as flat arrays with one entry per event.

    Valid as long as its batch.
    """

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
    def logprob_events(self) -> Int32Array:
        """int32 `[Q]`: indices of the events whose tokens have log-probabilities, ascending."""
    @property
    def logprobs(self) -> Logprobs | None:
        """`Q` rows of log-probabilities; None without any."""
    @property
    def prompt_logprob_requests(self) -> npt.NDArray[np.uint64]:
        """uint64 `[P]`: requests that the rows of `prompt_logprobs` belong to."""
    @property
    def prompt_logprob_positions(self) -> Int32Array:
        """int32 `[P]`: position of each row's token in the prompt, 1 or more."""
    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """`P` rows of log-probabilities of prompt tokens; None without any."""
    @property
    def started_request_ids(self) -> npt.NDArray[np.uint64]:
        """uint64 `[A]`: requests admitted for the first time by this plan."""
    @property
    def started_num_cached_tokens(self) -> Int32Array:
        """int32 `[A]`: prompt tokens that each of them found in the prefix cache."""
    def finish_reason(self, index: SupportsIndex) -> str | None:
        """How event `index` ended its choice: `stop`, `length`, `cancelled`, `error`, or None if it
        goes on.
        """
    def stop_reason(self, index: SupportsIndex) -> int | str | None:
        """The stop token id, or the string given to `finish()`, that ended event `index`'s choice;
        else None.
        """
    def error(self, index: SupportsIndex) -> str | None:
        """Why event `index` ended with `error`; None for other events."""
    def __len__(self) -> int:
        """Return len(self)."""

@final
class StepResult:
    """Sampled tokens of one batch, with what else may be said about them.

    `logprobs` is `(token_ids [R, 1 + K], values [R, 1 + K], ranks [R])`: the token itself, then the
    `K` most likely ids, where `K` is the largest `num_logprobs` of the batch; each row is read only
    as far as it asked. It is needed if a sampled row asked. `prompt_logprobs` is the same for the
    `P` prompt tokens of the batch. A row with a `row_error` gets no token and ends with an error:
    1 (or True) = its logits were unusable, 2 = its parameters exclude every token. `step_time_ns`
    is how long the step took, in nanoseconds; without it, the time from the `step` call that
    planned it to the one that commits it counts. `draft_token_ids` is part of the contract but not
    of this version: a value raises `InvalidRequestError`.
    """

    def __new__(
        cls,
        step_id: SupportsIndex,
        token_ids: TokenIds,
        token_start: TokenIds | None = None,
        row_error: Iterable[Any] | None = None,
        logprobs: LogprobArrays | None = None,
        prompt_logprobs: LogprobArrays | None = None,
        draft_token_ids: None = None,
        step_time_ns: SupportsIndex | None = None,
    ) -> StepResult: ...
    @property
    def step_id(self) -> int: ...
    @property
    def token_ids(self) -> Int32Array:
        """int32 `[R]`."""
    @property
    def step_time_ns(self) -> int | None:
        """How long the step took; None = the scheduler's clock says so."""

@final
class Scheduler:
    """Decides which tokens of which requests run together, once per iteration.

    `submit`, `cancel`, `finish`, `pause`, `resume`, `close` and `stats` may be called from any
    thread, `step` and `fail` from one at a time.
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
        **parameters: Unpack[_SamplingParameters],
    ) -> int:
        """Queues a request and returns its id. Any thread; never waits.

        The parameters are those of `SamplingParams` that do not concern text, and
        `bad_words_token_ids`. An absent `max_tokens` means what fits `max_model_len`. Raises
        `InvalidRequestError`, `PromptTooLongError`, `OverloadedError` or `EngineClosedError`;
        nothing is queued then.
        """
    def step(self, result: StepResult | TokenIds | None = None, block: bool = False) -> Batch:
        """Commits the result of the last batch and plans the next, in one call.

        `result` has one token per entry of the last batch's `sample_index`; None if that batch had
        no samples.
        Returns the new batch, with `num_seqs == 0` if nothing can run; with `block=True` it then
        waits until there is something to run or to report, such as a deadline that passes. Raises
        `StepError` (nothing changed) or `EngineClosedError`.
        """
    def _time_step(self, result: TokenIds) -> list[int]: ...
    def fail(self, step_id: SupportsIndex, message: str) -> None:
        """Fails what the batch in flight touched: its requests end with `message`."""
    def cancel(self, request_id: SupportsIndex) -> bool:
        """Asks for the end of a request; returns whether this was the first cancel of a live
        request.
        """
    def finish(
        self,
        request_id: SupportsIndex,
        choice: SupportsIndex,
        num_tokens: SupportsIndex,
        stop_reason: str | None = None,
    ) -> bool:
        """Ends a choice as `stop` after its first `num_tokens` output tokens; returns whether the
        request was live.
        """
    def set_time_ns(self, time_ns: SupportsIndex) -> None:
        """Sets the time of the following steps; only with `clock="manual"`."""
    def time_ns(self) -> int:
        """Time on the scheduler's clock, in nanoseconds."""
    def close(self) -> None:
        """Refuses further requests; the next `step` ends every live one as `cancelled`."""
    def pause(self) -> None:
        """Starts no request any more; what has started goes on, with all its choices.

        Requests are still accepted, and wait. When it returns, `stats()` tells of every request
        that could start before: `num_running` is 0 once all of them have ended.
        """
    def resume(self) -> None:
        """Lets requests start again after `pause()`."""
    def is_paused(self) -> bool:
        """Whether `pause()` was called, and `resume()` not since."""
    @property
    def policy_settings(self) -> dict[str, Any]:
        """The whole policy in force, as a new dict that `policy=` takes; of "static" only its
        name.
        """
    def set_policy(
        self,
        policy: str | PathLike[str] | dict[str, Any] | None = None,
        **rules: Unpack[_PolicyRules],
    ) -> None:
        """Replaces the policy; `policy` and `rules` as in `SchedulerConfig`. Any thread.

        Class, deadlines, caps, rates and bounds of the queue hold for requests that come from now
        on; weights and bounds on what runs hold for all from the next step on. `fairness`, `order`
        and `admission` cannot change, nor anything of "static". An error (`ValueError`,
        `EngineClosedError`) names the setting, and then everything stays as it was.
        """
    def stats(self) -> dict[str, int | float]:
        """Counters and gauges by name. Never waits for a step."""
    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; running sequences go on, but publish nothing more."""
    def check_invariants(self) -> None:
        """Checks every invariant; a broken one raises `PanicException`. For tests."""

@final
class Tokenizer:
    """Turns text into token ids and back, and messages into prompts.

    Made from the text of a `tokenizer.json` and, for chats, the source of a Jinja template that may
    read `bos_token` and `eos_token`. With `add_bos_token` the BOS token is put before every text
    that
    is encoded with special tokens. Raises `InvalidRequestError` if one of them cannot be used.
    """

    def __new__(
        cls,
        tokenizer_json: str,
        *,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos_token: bool = False,
    ) -> Tokenizer: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Splits `text` into token ids; special tokens written out in it are always recognised."""
    def decode(self, ids: TokenIds, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; bytes that form no character become U+FFFD."""
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation: `messages` are dicts with a `role` and a `content`.

        `tools` are tool descriptions, `variables` what else the template reads, e.g.
        `enable_thinking`; both as they would stand in JSON.
        """
    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included: the highest id plus one."""
    def token_to_id(self, token: str) -> int | None:
        """Id of a token given by its exact text in the vocabulary."""
    def id_to_token(self, token_id: SupportsIndex) -> str | None:
        """Text of a token in the vocabulary (not what it decodes to)."""

@final
class IncrementalDetokenizer:
    """Turns token ids into text one at a time, up to a stop string.

    The pieces joined are the text of all ids. `prompt_token_ids` make the text a continuation: a
    leading space stays, and a character that the prompt left unfinished is completed. Stop strings
    are looked for after the first `min_tokens` tokens; the one that ends the text belongs to it
    only with `include_stop_str_in_output`.
    """

    def __new__(
        cls,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = ...,
        include_stop_str_in_output: bool = False,
        min_tokens: SupportsIndex = 0,
        skip_special_tokens: bool = True,
        prompt_token_ids: TokenIds | None = None,
    ) -> IncrementalDetokenizer: ...
    def push(self, token_id: SupportsIndex) -> str:
        """Reads the next token and returns the new text that may be shown.

        "" while a character, or what could become a stop string, is incomplete, and after a stop
        string.
        """
    def finish(self) -> str:
        """Ends the text and returns the rest of it; bytes that form no character become U+FFFD."""
    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""

@final
class FinishedRequest:
    """The result of one request. Times are seconds on the scheduler's clock."""

    @property
    def request_id(self) -> int:
        """Id that the scheduler gave."""
    @property
    def index(self) -> int:
        """Number given at submission."""
    @property
    def prompt_token_ids(self) -> Int32Array:
        """The prompt as it was run, int32."""
    @property
    def outputs(self) -> list[FinishedChoice]:
        """The outputs, by choice."""
    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """One row for each prompt token but the first; None without `prompt_logprobs`, or if the
        prompt was not read to its end.
        """
    @property
    def error(self) -> str | None:
        """Why the first failed choice failed; None if none did."""
    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache at the first admission."""
    @property
    def arrival_time_s(self) -> float:
        """When the request was submitted."""
    @property
    def first_scheduled_time_s(self) -> float | None:
        """When the request was first planned; None if it ended while it waited."""
    @property
    def first_token_time_s(self) -> float | None:
        """When the first token of any choice came; None without one."""
    @property
    def finished_time_s(self) -> float:
        """When the request ended."""

@final
class FinishedChoice:
    """One output of a request. Times are seconds on the scheduler's clock."""

    @property
    def index(self) -> int:
        """Number of the choice."""
    @property
    def token_ids(self) -> Int32Array:
        """The output with the token that ended it, int32."""
    @property
    def text(self) -> str:
        """The output as text: up to the stop string, without EOS or a stop token."""
    @property
    def finish_reason(self) -> FinishReason: ...
    @property
    def stop_reason(self) -> int | str | None:
        """The stop token id or stop string that ended the output; None for EOS and other ends."""
    @property
    def error(self) -> str | None:
        """Why the output failed; None unless `finish_reason` is "error"."""
    @property
    def first_token_time_s(self) -> float | None:
        """When the first token came; None without one."""
    @property
    def inter_token_latencies_s(self) -> Float32Array:
        """Seconds between one output token and the next, float32; one fewer than tokens."""
    @property
    def logprobs(self) -> Logprobs | None:
        """One row for each of `token_ids`; None without `num_logprobs`."""
    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' own log-probabilities; None without `num_logprobs`."""
    @property
    def num_logprobs(self) -> int | None:
        """Most likely ids that were asked for with each token; None = nothing was."""

@final
class OutputChannel:
    """Output as it comes, for one reader such as an event loop.

    Pass it to `OutputProcessor.submit`; its `fileno()` is readable while there is something to
    `take()`. A reader that is slow costs the memory of what it has not taken, and nobody's time.
    Dropping a channel closes it.
    """

    def __new__(cls) -> OutputChannel: ...
    def fileno(self) -> int:
        """The file descriptor to wait for; it stays the channel's: do not read or close it.

        Raises `ValueError` after `close` and in a forked child.
        """
    def take(self) -> list[Update]:
        """Takes all updates in the order in which they came; [] if there are none. Never waits."""
    def close(self) -> None:
        """Drops what was not taken and cancels the requests that would have sent more."""
    @property
    def is_closed(self) -> bool:
        """Whether nothing will come any more: it was closed, or this is a forked child."""

@final
class Update:
    """What is new about one choice of a request. Times are seconds on the scheduler's clock.

    The updates of a choice joined are what its `FinishedChoice` would say.
    """

    @property
    def request_id(self) -> int:
        """Id that the scheduler gave."""
    @property
    def index(self) -> int:
        """Number given at submission."""
    @property
    def choice(self) -> int:
        """Number of the choice."""
    @property
    def text(self) -> str:
        """New text: "" while a character, or what could become a stop string, is incomplete."""
    @property
    def token_ids(self) -> list[int]:
        """New tokens; [] if the choice has only ended."""
    @property
    def logprobs(self) -> Logprobs | None:
        """One row for each of `token_ids`; None without `logprobs`."""
    @property
    def finish_reason(self) -> FinishReason | None:
        """How the choice ended; None while it goes on."""
    @property
    def stop_reason(self) -> int | str | None:
        """The stop token id or stop string that ended the choice; None for EOS and other ends."""
    @property
    def error(self) -> str | None:
        """Why the choice failed; None unless `finish_reason` is "error"."""
    @property
    def prompt_token_ids(self) -> Int32Array | None:
        """The prompt, int32, with the request's first update; otherwise None."""
    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """One row for each prompt token but the first, with the request's first update; None
        without `prompt_logprobs`.
        """
    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache at the first admission."""
    @property
    def arrival_time_s(self) -> float:
        """When the request was submitted."""
    @property
    def first_scheduled_time_s(self) -> float | None:
        """When the request was first planned; None if it ended while it waited."""
    @property
    def time_s(self) -> float:
        """When this came."""
    @property
    def is_last(self) -> bool:
        """Whether this is the last update of its request."""

@final
class OutputProcessor:
    """Submits requests and turns the scheduler's outputs into results, on its own thread."""

    def __new__(cls, scheduler: Scheduler, tokenizer: Tokenizer | None) -> OutputProcessor: ...
    def submit(
        self,
        prompt_token_ids: TokenIds,
        *,
        index: int,
        channel: OutputChannel | None = None,
        **parameters: Unpack[_RequestParameters],
    ) -> int:
        """Queues a request and returns its id; `index` comes back with the result.

        With a `channel` its output goes there as it comes, otherwise it is kept as one
        `FinishedRequest`. The parameters are those of `SamplingParams`. Raises what
        `Scheduler.submit` raises, `InvalidRequestError` for text parameters out of bounds or
        without the tokenizer that they need, and `EngineClosedError` for a closed channel; nothing
        is queued then.
        """
    def submit_text(
        self,
        prompt: str,
        *,
        index: int,
        channel: OutputChannel | None = None,
        **parameters: Unpack[_RequestParameters],
    ) -> int:
        """As `submit`, for a text: tokenized by this thread, without the GIL."""
    def take_finished(self, max: SupportsIndex = 0) -> list[FinishedRequest]:
        """Takes finished requests in the order in which they finished; at most `max`, 0 = all."""
    def wait_finished(self, timeout_s: float) -> list[FinishedRequest]:
        """Takes all finished requests, waiting for the first one up to `timeout_s` seconds."""
    @property
    def num_live(self) -> int:
        """Requests that are submitted and not finished."""
    def close(self) -> None:
        """Ends what is still live as cancelled, and ends the thread. Results stay."""

@final
class GgufFile:
    """A validated, memory-mapped GGUF file. Every error is a `ModelLoadError`."""

    def __new__(cls, path: str | PathLike[str]) -> GgufFile: ...
    @property
    def metadata(self) -> dict[str, Any]:
        """All metadata by key, without arrays of more than 1,024 elements."""
    @property
    def tensor_names(self) -> list[str]:
        """The names of all tensors, in the order of the file."""
    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, row-major: `[out, in]`."""
    def tensor_type(self, name: str) -> str:
        """How a tensor is stored, for example `"Q4_1"`."""
    def tensor(
        self, name: str, dtype: str = "float32", part: tuple[int, int, int] | None = None
    ) -> npt.NDArray[Any]:
        """A tensor as float32, or as the bits of bfloat16 in uint16 (rounded to nearest even).

        Query and key rows of the llama architecture come in the order of Hugging Face models.
        `part` is `(dimension, begin, end)`: only these indices of it are read, of a vector or a
        matrix; `ValueError` if they are outside.
        """
    def tokenizer_json(self) -> str:
        """The tokenizer of the file as the text of a Hugging Face `tokenizer.json`."""
    @property
    def chat_template(self) -> str | None: ...
    @property
    def special_token_ids(self) -> dict[str, int]:
        """Ids of the special tokens that the file names: `bos`, `eos`, `eot`, `unk`, `pad`, ..."""
    @property
    def add_bos_token(self) -> bool:
        """Whether prompts start with the BOS token."""

@final
class SafetensorsCheckpoint:
    """A validated, memory-mapped model of one or several safetensors files."""

    def __new__(cls, path: str | PathLike[str]) -> SafetensorsCheckpoint: ...
    @property
    def tensor_names(self) -> list[str]:
        """The names of all tensors, sorted."""
    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
    def tensor_dtype(self, name: str) -> str:
        """The stored type of a tensor, for example `"BF16"`."""
    def tensor(
        self, name: str, dtype: str = "float32", part: tuple[int, int, int] | None = None
    ) -> npt.NDArray[Any]:
        """A tensor of type F32, F16 or BF16 as float32, or as the bits of bfloat16 in uint16.

        `part` is `(dimension, begin, end)`: only these indices of it are read, of a vector or a
        matrix; `ValueError` if they are outside.
        """

@final
class CpuKernels:
    """Products, KV write, attention and sampling on the CPU, on threads that sleep without work.

    Caches are C-contiguous arrays `[num_blocks, num_kv_heads, block_size, head_dim]` of float32, or
    of uint16 that holds bf16 bits, or `[num_blocks, num_kv_heads, block_size, head_dim + 2]` of
    int8: in each block and head the numbers of all its tokens, then a bf16 factor for each token.
    Methods may be called from any thread and release the GIL.
    """

    def __new__(cls, num_threads: SupportsIndex) -> CpuKernels: ...
    @property
    def num_threads(self) -> int:
        """Threads that work on a call, the calling one included."""
    def pack(
        self,
        weight: npt.NDArray[np.float32] | npt.NDArray[np.uint16],
        num_parts: SupportsIndex = 1,
        int8: bool = False,
    ) -> PackedLinear:
        """Packs weights `[out_features, in_features]`, float32 or uint16 that holds bf16 bits.

        `num_parts=2` is for gate and up projection in one matrix. With `int8` the weights are
        rounded to 8-bit integers, with a bf16 scale for each group of 32 inputs of an output; a
        product then rounds its input in the same way. The array is not kept. Raises ValueError for
        a bad shape or dtype.
        """
    def linear(
        self,
        out: npt.NDArray[np.float32],
        input: npt.NDArray[np.float32],
        weight: PackedLinear,
        bias: npt.NDArray[np.float32] | None = None,
        add: bool = False,
    ) -> None:
        """Multiplies `input` `[num_rows, in_features]` with packed weights.

        Fills `out` `[num_rows, out_features]`, or adds to it. Each row's result depends on that row
        only, bit for bit. Raises ValueError for a bad shape or dtype before anything is written.
        """
    def measure_rates(self, repeat: SupportsIndex) -> tuple[float, float]:
        """Measures floating-point operations and bytes read a second that the threads reach.

        Takes 512 MiB and some tens of milliseconds per repetition; the medians are returned.
        """
    def write_kv(
        self,
        key: npt.NDArray[np.float32],
        value: npt.NDArray[np.float32],
        key_cache: npt.NDArray[Any],
        value_cache: npt.NDArray[Any],
        slot_mapping: npt.NDArray[np.int64],
    ) -> None:
        """Writes keys and values to their slots of the caches.

        `key` and `value` are `[num_tokens, num_kv_heads, head_dim]`, `slot_mapping` is
        `[num_tokens]`.
        A slot of -1 is not written. Raises ValueError for a bad shape, dtype or slot before
        anything is
        written.
        """
    def paged_attention(
        self,
        out: npt.NDArray[np.float32],
        query: npt.NDArray[np.float32],
        key_cache: npt.NDArray[Any],
        value_cache: npt.NDArray[Any],
        block_tables: Int32Array,
        row_ids: Int32Array,
        query_start: Int32Array,
        seq_lens: Int32Array,
        scale: float,
        sliding_window: SupportsIndex | None = None,
    ) -> None:
        """Attends causally over the paged caches, the whole batch in one call; fills `out`.

        `out` and `query` are `[num_tokens, num_heads, head_dim]`; the other arrays are those of a
        `Batch`. With `sliding_window=w` the query at position `i` sees the keys `j` with `i - w < j
        <= i`.
        Raises ValueError for a bad shape, dtype or index before anything is read or written.
        """

    def sample(
        self,
        logits: npt.NDArray[np.float32],
        vocab_size: SupportsIndex,
        logits_index: Int32Array,
        rows: Int32Array,
        uniform: npt.NDArray[np.float64],
        parameters: tuple[
            npt.NDArray[np.float32], Int32Array, npt.NDArray[np.float32], npt.NDArray[np.float32]
        ],
        penalties: tuple[
            npt.NDArray[np.float32],
            npt.NDArray[np.float32],
            npt.NDArray[np.float32],
            Int32Array,
            npt.NDArray[np.int64],
            npt.NDArray[np.int64],
            npt.NDArray[np.int64],
        ]
        | None = None,
        bias: tuple[
            Int32Array, npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int64]
        ]
        | None = None,
        bans: tuple[npt.NDArray[np.int64], Int32Array] | None = None,
    ) -> tuple[Int32Array, npt.NDArray[np.uint8]]:
        """Draws a token for each of `R` samples; returns tokens `[R]` and their errors `[R]`.

        `logits` is `[num_logits, padded_vocab]`, of which ids below `vocab_size` count;
        `logits_index`, `rows` and `uniform` (in [0, 1)) are `[R]`. By row (`[max_num_seqs]`) are
        `parameters` `(temperature, top_k, top_p, min_p)`; `penalties` `(presence, frequency,
        repetition, history_ids, start, length, num_prompt)`, where the history of row `r` is
        `history_ids[start[r]:start[r] + length[r]]`, its first `num_prompt[r]` tokens the prompt;
        `bias` `(ids, values, start, length)` likewise. `bans` is `(start [R+1], ids)`, by sample.
        Errors: 0 = none, 1 = unusable logits, 2 = every token is excluded. Raises ValueError for
        a bad shape, dtype or index before anything is read.
        """
    def logprobs(
        self,
        logits: npt.NDArray[np.float32],
        vocab_size: SupportsIndex,
        logits_index: Int32Array,
        targets: Int32Array,
        num_logprobs: Int32Array,
    ) -> LogprobArrays:
        """Says how likely the tokens `targets` `[N]` are, and which ids are the most likely.

        `num_logprobs` `[N]` is how many of the latter each row wants; -1 = the row is left out.
        Returns ids and log-probabilities `[N, 1 + K]` and ranks `[N]`, where `K` is the largest of
        `num_logprobs`. Raises ValueError for a bad shape, dtype or index before anything is read.
        """

@final
class PackedLinear:
    """Weights of a linear layer in the order in which the CPU kernels read them."""

    @property
    def out_features(self) -> int:
        """Outputs of a product."""
    @property
    def in_features(self) -> int:
        """Inputs of a product."""
    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
    def rows(self, out: npt.NDArray[np.float32], ids: Int32Array) -> None:
        """Writes the weights of the output features `ids` to `out` `[len(ids), in_features]`.

        Such as the embeddings of tokens. Raises ValueError for a bad shape, dtype or id.
        """

@final
class DecoderLayer:
    """One layer of a `CpuDecoder`: its weights, norms and kind of positions."""

    def __new__(
        cls,
        *,
        qkv: tuple[PackedLinear, npt.NDArray[np.float32] | None],
        out: tuple[PackedLinear, npt.NDArray[np.float32] | None],
        gate_up: tuple[PackedLinear, npt.NDArray[np.float32] | None],
        down: tuple[PackedLinear, npt.NDArray[np.float32] | None],
        attention_norm: npt.NDArray[np.float32],
        mlp_norm: npt.NDArray[np.float32],
        after_attention: npt.NDArray[np.float32] | None = None,
        after_mlp: npt.NDArray[np.float32] | None = None,
        head_norms: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None = None,
        rotary: SupportsIndex | None = None,
        sliding_window: SupportsIndex | None = None,
    ) -> DecoderLayer: ...

@final
class CpuDecoder:
    """A decoder model with its KV cache: a batch's tokens to logits in one call.

    Weights and caches may be float32, bf16 or int8; everything between is float32, but for the
    rounded inputs of int8 products. A token's result depends on its own sequence only, bit for bit.
    One call runs at a time.
    """

    def __new__(
        cls,
        kernels: CpuKernels,
        *,
        embedding: PackedLinear,
        head: PackedLinear,
        final_norm: npt.NDArray[np.float32],
        layers: Sequence[DecoderLayer],
        rotaries: Sequence[tuple[npt.NDArray[np.float32], float]],
        key_caches: Sequence[npt.NDArray[np.float32] | npt.NDArray[np.uint16]],
        value_caches: Sequence[npt.NDArray[np.float32] | npt.NDArray[np.uint16]],
        num_heads: SupportsIndex,
        num_kv_heads: SupportsIndex,
        head_dim: SupportsIndex,
        attention_scale: float,
        norm_eps: float,
        embedding_scale: float,
        activation: str,
    ) -> CpuDecoder: ...
    @property
    def weight_bytes(self) -> int:
        """Bytes of all packed weights."""
    def forward(
        self,
        logits: npt.NDArray[np.float32],
        token_ids: Int32Array,
        positions: Int32Array,
        logits_index: Int32Array,
        slot_mapping: npt.NDArray[np.int64],
        block_tables: Int32Array,
        row_ids: Int32Array,
        query_start: Int32Array,
        seq_lens: Int32Array,
    ) -> None:
        """Runs a batch; fills `logits` `[len(logits_index), vocab_size]`.

        The other arrays are those of a `Batch`. Raises ValueError for a bad shape, dtype or index
        before anything is written.
        """
    def take_times(self) -> tuple[int, float, float, float]:
        """Returns where the time of the steps since the last call went.

        The number of steps, then seconds of linear layers, of attention, and of the rest.
        """

def cpu_features() -> dict[str, bool | str]:
    """Which instruction sets this CPU has (of those with a kernel), the kernel chosen for
    heads of 64, and what multiplies int8 weights."""

def run_load(
    config: dict[str, Any], on_progress: Callable[[dict[str, Any]], object] | None = None
) -> dict[str, Any]:
    """Sends a load to a server and measures it. `config` has the fields of `cbrs_loadgen::Config`;
    the result has those of its `Report`.

    `on_progress` is called about twice a second, with a dict of `elapsed_s` (None during the
    warm-up), `num_started`, `num_succeeded`, `num_failed`, `num_tokens` and `num_requests` (None if
    the duration decides); what it raises ends the run and is raised here. Runs without the GIL;
    signals are handled as often.

    Raises ValueError for a configuration, an address or a file that cannot be used. What goes wrong
    with single requests is counted in the result.
    """
