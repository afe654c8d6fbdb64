//! Scheduler: decides once per iteration which tokens of which requests run together.
//!
//! `step` reads as: take what other threads asked for, commit the last batch, plan the next.
//!
//! 1. A sequence is known by `num_tokens` and `num_computed_tokens`; a step schedules at least one token of the difference.
//!    Prefill, chunked prefill, a prefix hit and resumption after preemption are all this one rule.
//! 2. A block is published when the step that filled it has completed, never before.
//! 3. Each accepted request has exactly one terminal event; after it, it is in no structure and holds nothing.
//! 4. The same events give the same batches, bit by bit: no clock is read, no map is iterated.
//!
//! Scheduling by iteration instead of by request is Orca's idea (Yu et al., OSDI 2022); paged KV memory is PagedAttention's
//! (Kwon et al., SOSP 2023); a token budget shared by decodes and prompt chunks is Sarathi-Serve's (Agrawal et al., OSDI 2024).

mod admit;
mod aging;
mod budget;
mod choices;
mod commit;
mod control;
mod deadlines;
mod decode;
mod displace;
mod estimate;
mod filling;
mod flows;
mod invariants;
mod lanes;
mod lists;
mod plan;
mod preempt;
mod prompt_logprobs;
mod request;
mod rows;
mod sequence;
mod write;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::batch::{Batch, BlockTableUpdates, OutputSink, StepOutput, StepResult};
use crate::block::{BlockId, BlockPool, NONE};
use crate::config::{Policy, SchedulerConfig};
use crate::error::{Error, Result};
use crate::fault;
use crate::overload::Rates;
use crate::policy;
use crate::policy::{Admission, PolicyConfig};
use crate::stats::Stats;
use crate::submit::{Control, Shared, Submitter};
use crate::trace::{TraceKind, TraceRecord};
use admit::PassedBy;
use aging::Aging;
use budget::Pace;
use deadlines::Deadlines;
use decode::PlannedLanes;
use displace::MostHeld;
use estimate::Growth;
use filling::Filling;
use flows::Flows;
use lanes::Lanes;
use prompt_logprobs::PromptLogits;
use request::{Request, Requests};
use rows::Rows;
pub use rows::SamplingRows;
pub(crate) use sequence::MAX_PER_ROW;
use sequence::{Order, Sequence, Sequences};

/// A planned piece of a prompt: the next `num_tokens` tokens of the sequence in `row`.
///
/// The commit relies on these alone: the batch's arrays are lent to the caller, who may write to them.
#[derive(Debug, Clone, Copy)]
struct Planned {
    row: u32,
    num_tokens: u32,
    /// Rows of logits for prompt log-probabilities.
    num_prompt_logits: u16,
    /// Most likely ids that its request wants with its sample; -1 = nothing.
    num_logprobs: i8,
    /// Whether the batch has a sample for it: all known tokens are computed then.
    is_sampled: bool,
}

/// Computed blocks that a sequence need not compute again, first to last.
#[derive(Debug, Default)]
struct Hits {
    blocks: Vec<BlockId>,
    are_published: bool,
}

/// Decides which tokens of which requests run together.
///
/// ```
/// use cbrs_core::{RequestSpec, Scheduler, SchedulerConfig, StepResult};
/// let mut scheduler = Scheduler::new(SchedulerConfig::default()).unwrap();
/// let spec = RequestSpec { max_tokens: Some(2), ..RequestSpec::new(vec![5, 6, 7]) };
/// let id = scheduler.submitter().submit(spec).unwrap();
/// scheduler.step(None, 0).unwrap();
/// assert_eq!(scheduler.batch().token_ids, [5, 6, 7]);
/// scheduler.step(Some(&StepResult { token_ids: &[8], ..StepResult::default() }), 1).unwrap();
/// assert_eq!((scheduler.output().request_ids[0], scheduler.output().token_ids[0]), (id.as_u64(), 8));
/// assert_eq!((scheduler.batch().token_ids[0], scheduler.batch().seq_lens[0]), (8, 4));
/// ```
pub struct Scheduler {
    config: SchedulerConfig,
    shared: Arc<Shared>,
    pool: BlockPool,
    /// Live requests by slot.
    requests: Requests,
    /// Choices that have started and not ended.
    sequences: Sequences,
    rows: Rows,
    /// Running sequences that lack one token.
    lanes: Lanes,
    /// Rows of the other running sequences, by class, in order of arrival.
    prefilling: [Vec<u32>; 3],
    /// Whether some entry of `prefilling` has lost its sequence, or decodes now.
    prefilling_has_gaps: bool,
    /// Who waits: sequences without a row, and requests with choices that could start.
    flows: Flows,
    deadlines: Deadlines,
    /// Rhythm of the steps, and the model of what they cost.
    pace: Pace,
    /// Lengths of outputs, and the memory that they will take.
    growth: Box<Growth>,
    aging: Aging,
    /// For whom a sequence was displaced that has not started yet.
    reserved_flow: Option<u32>,
    /// Step in which a sequence was last displaced.
    displaced_in_step: u64,
    /// By class, what its largest tenant holds.
    most_held: [MostHeld; 3],
    /// Requests that hold blocks for choices that have not started, in the order of service.
    pinning: BTreeSet<(Order, u32)>,
    /// Running sequences by class.
    num_running_of: [usize; 3],
    /// Live requests that started because they were aged.
    num_shielded: usize,
    /// Who is passed in the plan being made, and for how many memory was looked for in vain: flows, and more requests of the same ones; which
    /// classes lack it, now and in the last plan.
    passed: Vec<PassedBy>,
    num_short_flows: usize,
    num_misfits: usize,
    /// Scratch: flows that are set aside while others are looked at.
    parked: Vec<flows::Turn>,
    lacks_memory: [bool; 3],
    lacked_memory: [bool; 3],
    rules: Rules,
    /// Choices of started requests that have not started.
    num_unstarted_choices: u64,
    /// Plan of the batch in flight, or being made: lanes, and pieces of prompts in no order (`in_batch_order`).
    planned_lanes: PlannedLanes,
    pieces: Vec<Planned>,
    /// Whether the current batch still awaits its result.
    in_flight: bool,
    /// What the result of this plan must say about prompts.
    prompt_logits: PromptLogits,
    step_id: u64,
    /// The arrays of two steps take turns, so that those of one stay readable while its result is committed.
    batches: [Batch; 2],
    current: usize,
    /// What the last `step` has told, and what the next one will.
    output: StepOutput,
    pending: StepOutput,
    /// Blocks exchanged by a commit: the first block table updates of the next plan.
    exchanged: BlockTableUpdates,
    /// Controls whose request is still on its way through the queue.
    late_controls: Vec<Control>,
    next_arrival: u64,
    rates: Rates,
    /// Time of this step.
    now_ns: u64,
    /// The decode that is served first when the budget does not reach all.
    rotation: Order,
    stats: Stats,
    sink: Option<Box<dyn OutputSink>>,
    is_finished: bool,
    filling: Filling,
    /// Scratch: lanes that need a look, and the tokens of those that go on.
    notable: Box<[u32]>,
    kept_tokens: Vec<i32>,
    /// Scratch: what was found for the sequence being admitted.
    hits: Hits,
    /// Arrays of events that grew too small: somebody may still look at them.
    retired_outputs: Vec<StepOutput>,
}

impl std::fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scheduler")
            .field("config", &self.config)
            .field("step_id", &self.step_id)
            .field("num_decoding", &self.lanes.num_live())
            .field("prefilling", &self.prefilling)
            .field("num_waiting", &self.flows.num_listed)
            .field("num_preempted", &self.flows.num_preempted)
            .field("pool", &format_args!("{} of {} blocks used", self.pool.num_used(), self.pool.num_blocks()))
            .finish_non_exhaustive()
    }
}

impl Scheduler {
    /// Builds a scheduler with all its memory.
    ///
    /// # Errors
    /// What `SchedulerConfig::validate` refuses; `OutOfMemory` if the machine does not give what the limits need.
    pub fn new(config: SchedulerConfig) -> Result<Self> {
        let config = config.validate()?;
        check_memory(&config)?;
        let shared = Arc::new(Shared::new(&config));
        // More when displaced requests need them (`enter`).
        let num_slots = config.queue_capacity + config.max_num_seqs;
        let batch =
            || Batch::with_capacity(config.max_num_seqs, config.max_num_batched_tokens, config.max_prompt_logits);
        // One event in one step for each request that waits or runs; more if displaced ones, or several choices of each, end at once.
        let output = || StepOutput::with_capacity(num_slots, config.max_num_seqs);
        let has_accounts = config.rules().counts_service() || config.rules().admission == Admission::Estimated;
        Ok(Self {
            pool: BlockPool::new(config.num_blocks, config.block_size),
            requests: Requests::new(num_slots),
            rows: Rows::new(config.max_num_seqs, config.max_blocks_per_seq(), config.block_size, has_accounts),
            lanes: Lanes::new(config.max_num_seqs),
            prefilling: [Vec::new(), Vec::with_capacity(config.max_num_seqs), Vec::new()],
            prefilling_has_gaps: false,
            sequences: Sequences::new(config.max_num_seqs),
            flows: Flows::new(config.rules(), num_slots),
            deadlines: Deadlines::default(),
            pace: Pace::default(),
            growth: Box::default(),
            aging: Aging::default(),
            reserved_flow: None,
            displaced_in_step: 0,
            most_held: [MostHeld::default(); 3],
            pinning: BTreeSet::new(),
            num_running_of: [0; 3],
            num_shielded: 0,
            passed: Vec::new(),
            num_short_flows: 0,
            num_misfits: 0,
            parked: Vec::new(),
            lacks_memory: [false; 3],
            lacked_memory: [false; 3],
            rules: Rules::new(config.rules()),
            num_unstarted_choices: 0,
            planned_lanes: PlannedLanes::default(),
            pieces: Vec::with_capacity(config.max_num_seqs),
            in_flight: false,
            prompt_logits: PromptLogits::default(),
            step_id: 0,
            batches: [batch(), batch()],
            current: 0,
            output: output(),
            pending: output(),
            exchanged: BlockTableUpdates::default(),
            late_controls: Vec::new(),
            next_arrival: 0,
            rates: Rates::default(),
            now_ns: 0,
            rotation: Order::default(),
            stats: Stats::default(),
            sink: None,
            is_finished: false,
            filling: Filling::default(),
            notable: vec![0; config.max_num_seqs + 1].into_boxed_slice(),
            kept_tokens: Vec::new(),
            hits: Hits::default(),
            retired_outputs: Vec::new(),
            config,
            shared,
        })
    }

    /// The effective configuration.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// The face towards other threads.
    pub fn submitter(&self) -> Submitter {
        Submitter { shared: Arc::clone(&self.shared) }
    }

    /// Sends every later step's output there as well.
    pub fn set_output_sink(&mut self, sink: Option<Box<dyn OutputSink>>) {
        self.sink = sink;
    }

    /// Commits the result of the last batch and plans the next; `now_ns` is the time of this step (at least that of the last one).
    ///
    /// Afterwards `batch` is what to run (empty if nothing can run) and `output` what to tell.
    ///
    /// # Errors
    /// `WrongStep`, `NoBatchInFlight`, `MissingResult`, `ResultLength`, `ResultToken`, `ResultTokenStart`: nothing changed, call again
    /// with the right result. `Closed`: the step after `close` has ended all requests.
    pub fn step(&mut self, result: Option<&StepResult<'_>>, now_ns: u64) -> Result<()> {
        self.step_in_parts(result, now_ns, || {})
    }

    /// `step` for benchmarks: calls `between` after the commit and before the plan, since the core reads no clock.
    #[doc(hidden)]
    #[inline]
    pub fn step_in_parts(
        &mut self,
        result: Option<&StepResult<'_>>,
        now_ns: u64,
        between: impl FnOnce(),
    ) -> Result<()> {
        if self.is_finished {
            return Err(Error::Closed);
        }
        let is_closed = self.shared.queue.is_closed();
        if !is_closed {
            self.check_result(result)?;
        }
        // Time does not go back: what has been waited for stays.
        let now_ns = now_ns.max(self.now_ns);
        self.now_ns = now_ns;
        self.take_controls();
        self.rates.tick(now_ns, &self.shared.gate);
        if is_closed {
            self.end_all_requests();
        } else {
            fault::point("step: commit");
            self.commit(result, now_ns);
            self.expire(now_ns);
        }
        between();
        fault::point("step: plan");
        self.plan(now_ns);
        self.publish_service();
        self.report(now_ns);
        Ok(())
    }

    /// Fails what the batch in flight touched: those requests end with `message`, and nothing of the step is published.
    ///
    /// The events come with the next `step`. Blocks that the plan evicted stay evicted.
    ///
    /// # Errors
    /// `WrongStep` or `NoBatchInFlight`; nothing changed then.
    pub fn fail(&mut self, step_id: u64, message: &str) -> Result<()> {
        self.check_step_id(step_id)?;
        fault::point("fail");
        self.fail_batch(message);
        self.publish_stats();
        Ok(())
    }

    /// What to run now.
    pub fn batch(&self) -> &Batch {
        &self.batches[self.current]
    }

    /// What the last `step` has to tell.
    pub fn output(&self) -> &StepOutput {
        &self.output
    }

    /// `[max_num_seqs, max_blocks]` block ids by row, and `max_blocks`.
    pub fn block_tables(&self) -> (&[i32], usize) {
        (self.rows.tables.ids(), self.rows.tables.max_blocks())
    }

    /// The request and the choice of it that have this row now, to look at.
    pub fn choice_in_row(&self, row: u32) -> Option<(u64, u32)> {
        let sequence = self.rows.get(row).sequence;
        (sequence != NONE).then(|| {
            let sequence = &self.sequences[sequence];
            (self.request(sequence.slot).id.as_u64(), sequence.order.choice())
        })
    }

    /// Sampling parameters by row.
    pub fn sampling(&self) -> &SamplingRows {
        &self.rows.sampling
    }

    /// Whether the current batch awaits its result.
    pub fn is_in_flight(&self) -> bool {
        self.in_flight
    }

    /// Rough number of elementary operations that the next `step` has to do, to decide whether it counts as short.
    ///
    /// Cancels are not counted (each is O(1) for each choice, besides giving back its blocks).
    pub fn estimated_work(&self) -> usize {
        let num_queued = self.shared.queue.len();
        let num_waiting = self.flows.num_preempted + self.flows.num_listed + num_queued;
        let num_ended = if self.shared.queue.is_closed() { num_waiting } else { 0 };
        let num_admissible = num_waiting.min(self.rows.num_free() + self.num_running());
        let chunk_tokens = self.config.max_num_batched_tokens.min(64 * num_admissible);
        // Each further choice of a request copies its prompt and takes all its blocks.
        let num_forks = self.rows.num_free().min(usize::try_from(self.num_unstarted_choices).unwrap_or(usize::MAX));
        let fork_work = num_forks.saturating_mul(self.config.max_model_len / 16);
        // Once: what has come before service could be predicted gets its price.
        let num_unpriced = if self.pace.is_published { 0 } else { num_waiting };
        self.num_running() * 3 / 4 + chunk_tokens / 16 + 8 * (num_queued + num_ended + num_unpriced) + fork_work
    }

    /// The block pool, to look at.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Forgets every cached prefix, e.g. after the weights changed. Running sequences go on, but publish nothing more.
    pub fn reset_prefix_cache(&mut self) {
        fault::point("reset_prefix_cache");
        self.pool.reset_prefix_cache();
        self.rows.forbid_publishing();
        self.publish_stats();
    }

    /// Hands the collected events to the readers of this step.
    fn report(&mut self, now_ns: u64) {
        self.output.clear();
        // A call that waits steps several times: what the caller's last batch told is not overwritten until there is something to return.
        if !self.pending.is_empty() {
            std::mem::swap(&mut self.output, &mut self.pending);
        }
        self.output.step_id = self.step_id;
        self.output.time_ns = now_ns;
        self.publish_stats();
        if let Some(sink) = self.sink.as_mut().filter(|_| !self.output.is_empty()) {
            sink.publish(&self.output);
        }
    }

    /// Makes sure that `num_events` more can be told: the arrays are lent to readers and must stay where they are.
    fn make_room_for_events(&mut self, num_events: usize) {
        if !self.pending.has_room(num_events) {
            let larger = self.pending.enlarged(num_events);
            let mut outgrown = std::mem::replace(&mut self.pending, larger);
            outgrown.clear();
            self.retired_outputs.push(outgrown);
        }
    }

    /// Writes down what happens to a sequence, if somebody wants to know.
    fn trace(&self, kind: TraceKind, sequence: u32, num_tokens: u32) {
        if let Some(trace) = self.shared.trace.get() {
            let Sequence { slot, order, .. } = self.sequences[sequence];
            let (request, choice) = (self.request(slot).id, order.choice() as u8);
            trace.push(TraceRecord { request, choice, kind, time_ns: self.now_ns, num_tokens });
        }
    }

    fn publish_stats(&mut self) {
        self.stats.num_running = self.num_running() as u64;
        self.stats.num_waiting = self.flows.num_preempted as u64 + self.num_unstarted_choices;
        self.stats.num_free_blocks = self.pool.num_free() as u64;
        self.stats.num_cached_blocks = self.pool.num_cached() as u64;
        self.stats.num_used_blocks = self.pool.num_used() as u64;
        self.stats.num_evicted_blocks = self.pool.num_evictions();
        self.stats.last_step_ns = self.pace.last_step_ns;
        self.stats.predicted_step_ns = self.pace.predicted_step_ns;
        self.stats.step_time_error = if self.pace.cost.is_ready() { self.pace.cost.relative_error() } else { 0.0 };
        self.stats.token_budget = self.pace.token_budget;
        self.shared.stats.publish(self.stats.to_numbers());
    }

    /// Sequences that have a row.
    fn num_running(&self) -> usize {
        self.config.max_num_seqs - self.rows.num_free()
    }

    /// Tokens of a running sequence that are computed.
    fn num_computed_tokens(&self, row: u32) -> u32 {
        let state = self.rows.get(row);
        if state.is_decoding {
            self.lanes.num_tokens[self.lanes.locate(self.order(row))] as u32 - 1
        } else {
            state.num_computed_tokens
        }
    }

    /// Tokens of a prefilling sequence that a step could compute now.
    fn num_remaining_tokens(&self, row: u32) -> usize {
        let state = self.rows.get(row);
        debug_assert!(state.is_prefilling(), "the lane knows");
        self.sequences[state.sequence].known().tokens.len() - state.num_computed_tokens as usize
    }

    fn num_prompt_tokens(&self, row: u32) -> u32 {
        self.request(self.sequences[self.rows.get(row).sequence].slot).num_prompt_tokens
    }

    /// Flow of a running sequence.
    fn flow_of(&self, row: u32) -> u32 {
        let of_slot = || self.flows.of(self.sequences[self.rows.get(row).sequence].slot);
        self.rows.flow(row).unwrap_or_else(of_slot)
    }

    /// Place of a running sequence in the order of service.
    fn order(&self, row: u32) -> Order {
        self.sequences[self.rows.get(row).sequence].order
    }

    /// Tokens of a sequence that are known.
    fn num_tokens(&self, sequence: u32) -> u32 {
        let sequence = &self.sequences[sequence];
        match &sequence.known {
            Some(known) => known.tokens.len() as u32,
            None => self.lanes.num_tokens[self.lanes.locate(sequence.order)] as u32,
        }
    }

    fn request(&self, slot: u32) -> &Request {
        self.requests[slot as usize].as_ref().expect("a listed slot has a request")
    }

    fn request_mut(&mut self, slot: u32) -> &mut Request {
        self.requests[slot as usize].as_mut().expect("a listed slot has a request")
    }

    fn is_static(&self) -> bool {
        self.config.policy == Policy::Static
    }
}

/// The rules of the policy that are looked at in every step.
#[derive(Debug, Clone)]
struct Rules {
    admission: Admission,
    victim: policy::Victim,
    orders_by_deadline: bool,
    /// Service is counted, for tenants' shares or for their rates.
    counts_service: bool,
    limits_token_rates: bool,
    max_overtakes: u8,
    max_preemptions: u8,
    max_prefill_interval: u32,
    /// Steps in which each batch decode runs at least once.
    batch_period: u32,
    aging_ns: u64,
    aged_share: f64,
    /// Starts of others after which the oldest aged request is next.
    aged_interval: u32,
    class_caps: [usize; 3],
}

impl Rules {
    fn new(policy: &PolicyConfig) -> Self {
        Self {
            admission: policy.admission,
            victim: policy.victim,
            orders_by_deadline: policy.order == policy::Order::Edf,
            counts_service: policy.counts_service(),
            limits_token_rates: policy.limits_token_rates(),
            max_overtakes: policy.max_overtakes,
            max_preemptions: policy.max_preemptions,
            max_prefill_interval: policy.max_prefill_interval,
            batch_period: (policy.max_batch_pause_steps - 1).max(1),
            aging_ns: (policy.aging_s * 1e9) as u64,
            aged_share: policy.aged_share,
            aged_interval: policy.aged_interval(),
            class_caps: policy.classes.each_ref().map(|class| class.max_num_seqs.unwrap_or(usize::MAX)),
        }
    }
}

impl Drop for Scheduler {
    /// Nobody will step again: submitters that outlive the scheduler are refused.
    fn drop(&mut self) {
        self.submitter().close();
    }
}

/// Tables from this size on are asked for before they are made.
const MIN_CHECKED_BYTES: usize = 64 << 20;

/// Refuses limits whose tables the machine cannot give: an allocation that fails later would end the process.
fn check_memory(config: &SchedulerConfig) -> Result<()> {
    let table_entries = config.max_num_seqs.saturating_mul(config.max_blocks_per_seq());
    let tail_entries = config.max_num_seqs.saturating_mul(config.block_size);
    let cache_entries = config.num_blocks.saturating_mul(config.block_size);
    let num_slots = config.queue_capacity.saturating_add(config.max_num_seqs);
    let request_entries = num_slots.saturating_mul(size_of::<Option<Request>>() / size_of::<i32>());
    let tables = [
        ("the block tables (max_num_seqs x max_model_len / block_size)", table_entries),
        ("the last blocks of running sequences (max_num_seqs x block_size)", tail_entries),
        ("the token store of the prefix cache (num_blocks x block_size)", cache_entries),
        ("the live requests (queue_capacity + max_num_seqs)", request_entries),
    ];
    // All at once, as they will be held; given back here, and made (and zeroed by the system) by their owners.
    let mut held = Vec::new();
    for (what, num_entries) in tables {
        let mut memory: Vec<i32> = Vec::new();
        // Smaller ones any machine gives. And glibc takes what is given back as a sign that memory of such sizes comes and goes: tables would
        // then lie in used memory, which has to be cleared, instead of new pages that come with their first use.
        if num_entries < MIN_CHECKED_BYTES / size_of::<i32>() {
            continue;
        }
        if memory.try_reserve_exact(num_entries).is_err() {
            let bytes = num_entries.saturating_mul(size_of::<i32>());
            return Err(Error::OutOfMemory { what, bytes });
        }
        held.push(memory);
    }
    Ok(())
}
