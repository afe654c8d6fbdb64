//! What must hold after every plan, whatever the policy.
//!
//! | rule | exception, since something stands above it |
//! | --- | --- |
//! | d: urgent decodes advance in every step, or in every `ceil(decodes / budget)` steps | no block was available |
//! | m: of running prompts of the highest class one gets a chunk in every m steps | no tokens were left |
//! | batch decodes pause at most `max_batch_pause_steps` steps | |
//! | K: so many later ones of its line start before a request | starts of aged ones; two plans in which it waits for a block in flight |
//! | a preempted choice is never overtaken in its line | |
//! | a shielded prompt gets a block, or `aged_share` of the tokens | no tokens were left; steps with a latency target |
//! | who is displaced makes way: somebody of a higher class or another tenant starts, in this plan or soon, and nobody else before | |
//! | a wait ends in time (if a test says how many more starts there may be) | |

use std::collections::{BTreeMap, BTreeSet};

use cbrs_core::policy::{Class, Fairness};

use crate::rig::{Changes, Choice, ChoiceId, Known, Rig};

/// Overtakes of a request that waits for a block in flight are bounded by this, in two plans.
const MAX_DEFERRED_OVERTAKES: u32 = 16;

/// Those that run may have grown into what a victim gave up: then it is kept until they end.
const MAX_KEPT_STEPS: u64 = 500;

/// What the checks remember.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    pub(crate) longest_batch_pause: u64,
    /// Steps in a row in which the prompts of a class, the highest one that waits, got nothing.
    without_prefill: [u32; 3],
    /// Displaced choices whose beneficiary has not started.
    pending: Vec<Pending>,
    /// How many more starts there may be before the end of a wait than the rule says; absent = not checked.
    pub(crate) start_slack: Option<u64>,
    /// How often rules were put to the test.
    pub(crate) num_kept_promises: Promises,
}

#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Promises {
    pub(crate) shielded_chunks: u64,
    pub(crate) due_chunks: u64,
    pub(crate) overtakes: u64,
    pub(crate) reservations: u64,
    pub(crate) aged_waits: u64,
    pub(crate) turns: u64,
}

/// A displaced choice whose beneficiary has not started.
#[derive(Debug, Clone)]
struct Pending {
    step_id: u64,
    victim: Known,
}

impl Rig {
    pub(crate) fn check_plan(&mut self, changes: &Changes) {
        let batch: BTreeMap<ChoiceId, usize> = self.batch.iter().copied().collect();
        self.check_decodes(&batch);
        self.check_caps(changes);
        self.check_order(changes);
        self.count_overtakes(changes);
        self.check_prompts(&batch);
        // Who gets too little in this plan could still be displaced before it was seen.
        self.check_displacements(changes);
        self.check_shielded(changes, &batch);
        self.check_waits(changes);
        self.check_progress();
        self.note_batch();
    }

    fn budget(&self) -> u64 {
        self.scheduler.config().max_num_batched_tokens as u64
    }

    fn live_choices(&self) -> impl Iterator<Item = (ChoiceId, &Known, &Choice)> {
        self.requests.iter().flat_map(|(&id, known)| {
            let choices = known.choices.iter().enumerate().filter(|(_, choice)| !choice.has_ended);
            choices.map(move |(at, choice)| ((id, at), known, choice))
        })
    }

    fn check_decodes(&mut self, batch: &BTreeMap<ChoiceId, usize>) {
        // Memory comes first: a decode without a block waits for those that are in the plan already.
        let is_memory_short = self.scheduler.pool().num_available() == 0;
        let (num_rows, budget) = (self.scheduler.config().max_num_seqs as u64, self.budget());
        let max_pause = u64::from(self.rules.max_batch_pause_steps);
        let (step_id, num_begun) = (self.step_id, self.num_decodes_begun);
        let mut forgiven = Vec::new();
        let (mut longest, mut num_turns) = (self.checks.longest_batch_pause, 0);
        for (id, known, choice) in self.live_choices() {
            if choice.row.is_none() || !choice.is_decoding || batch.contains_key(&id) {
                continue;
            }
            if is_memory_short {
                forgiven.push(id);
                continue;
            }
            let pause = step_id - choice.last_run_step;
            // Each that begins to decode meanwhile may stand before it.
            let num_before = num_rows + num_begun - choice.num_decodes_then;
            let in_turn = if budget < num_rows { num_before.div_ceil(budget) - 1 } else { 0 };
            num_turns += u64::from(in_turn > 0);
            if known.class == Class::Batch {
                longest = longest.max(pause);
                assert!(pause <= max_pause + in_turn, "batch decode {id:?} pauses for {pause} steps");
            } else {
                assert!(pause <= in_turn, "decode {id:?} has not advanced for {pause} steps");
            }
        }
        (self.checks.longest_batch_pause, self.checks.num_kept_promises.turns) =
            (longest, self.checks.num_kept_promises.turns + num_turns);
        for (id, at) in forgiven {
            let choice = &mut self.requests.get_mut(&id).expect("it lives").choices[at];
            (choice.last_run_step, choice.num_decodes_then) = (step_id, num_begun);
        }
    }

    /// No more run than may; where a cap was lowered, no more than before.
    fn check_caps(&self, changes: &Changes) {
        let mut running: BTreeMap<(Class, Option<&str>), [usize; 2]> = BTreeMap::new();
        for (id, known, choice) in self.live_choices() {
            let counts = running.entry((known.class, known.tenant.as_deref())).or_default();
            counts[0] += usize::from(choice.row.is_some());
            counts[1] += usize::from(changes.running_before.contains(&id));
        }
        for class in Class::ALL {
            let of_class = running.iter().filter(|((other, _), _)| *other == class).map(|(_, counts)| counts);
            let [count, before] = of_class.fold([0, 0], |sums, counts| [sums[0] + counts[0], sums[1] + counts[1]]);
            let cap = self.rules.classes[class as usize].max_num_seqs.unwrap_or(usize::MAX);
            assert!(count <= cap.max(before), "{count} of {class:?} run");
        }
        for ((_, tenant), [count, before]) in running {
            let cap = self.rules.tenant(tenant).max_num_seqs.unwrap_or(usize::MAX);
            assert!(count <= cap.max(before), "{count} of {tenant:?} run");
        }
    }

    /// A preempted choice is never overtaken within its line.
    fn check_order(&self, changes: &Changes) {
        let waits = |&(id, _, choice): &(ChoiceId, &Known, &Choice)| {
            choice.was_preempted && !changes.running_before.contains(&id)
        };
        let waiting: Vec<_> = self.live_choices().filter(waits).collect();
        for &(id, at) in &changes.started {
            let new = &self.requests[&id];
            for &(other, known, _) in &waiting {
                let arrival = |known: &Known, at| (known.place.1, at);
                let is_resumed = changes.resumed.contains(&(id, at));
                let is_before = !is_resumed || arrival(known, other.1) < arrival(new, at);
                assert!(
                    !(is_before && self.is_same_flow(known, new)),
                    "{:?} starts before {other:?}, which was preempted",
                    (id, at)
                );
            }
        }
    }

    /// K: later ones of its line that start before a request.
    fn count_overtakes(&mut self, changes: &Changes) {
        let is_first = |&&(id, at): &&ChoiceId| at == 0 && !changes.resumed.contains(&(id, at));
        let new: Vec<u64> = changes.started.iter().filter(is_first).map(|&(id, _)| id).collect();
        let num_aged = self.submitter().stats().num_aged_starts - changes.stats_before.num_aged_starts;
        let mut overtakes = Vec::new();
        for (&id, known) in self.requests.iter().filter(|(_, known)| known.end.is_none() && !known.is_started) {
            let is_later = |id: &&u64| {
                let other = &self.requests[*id];
                self.is_same_flow(known, other) && known.place < other.place
            };
            let count = new.iter().filter(is_later).count() as u64;
            // It is by age, and not by their line, that aged ones start.
            let count = count.saturating_sub(num_aged) as u32;
            if count > 0 {
                overtakes.push((id, count));
            }
        }
        let limit = u32::from(self.rules.max_overtakes);
        let may_be_deferred = self.scheduler.config().enable_prefix_caching;
        for (id, count) in overtakes {
            self.checks.num_kept_promises.overtakes += u64::from(count);
            let known = self.requests.get_mut(&id).expect("it lives");
            known.overtakes.push(count);
            known.overtakes.sort_unstable();
            let total: u32 = known.overtakes.iter().sum();
            if may_be_deferred {
                let deferred: u32 = known.overtakes.iter().rev().take(2).sum();
                assert!(total <= limit.max(MAX_DEFERRED_OVERTAKES), "{id} was overtaken {total} times");
                assert!(total - deferred <= limit, "{id} was overtaken {total} times, K = {limit}");
            } else {
                assert!(total <= limit, "{id} was overtaken {total} times, K = {limit}");
            }
        }
    }

    /// m: prompts that run and get nothing although tokens are left lack time.
    fn check_prompts(&mut self, batch: &BTreeMap<ChoiceId, usize>) {
        let has_tokens_left = (batch.values().sum::<usize>() as u64) < self.budget();
        // The last token of a batch prompt is planned like a decode.
        let is_prompt = |known: &Known, choice: &Choice| {
            choice.row.is_some()
                && !choice.is_decoding
                && (known.class != Class::Batch || choice.num_remaining(known) > Some(1))
        };
        let is_unserved =
            |&(id, known, choice): &(ChoiceId, &Known, &Choice)| is_prompt(known, choice) && !batch.contains_key(&id);
        let unserved = self.live_choices().filter(is_unserved).map(|(_, known, _)| known.class).min();
        let is_served = |&(id, _, choice): &(ChoiceId, &Known, &Choice)| !choice.is_decoding && batch.contains_key(&id);
        let served = self.live_choices().filter(is_served).map(|(_, known, _)| known.class).min();
        let is_denied = has_tokens_left && unserved.is_some_and(|class| served.is_none_or(|served| served > class));
        let before = self.checks.without_prefill;
        self.checks.without_prefill = [0; 3];
        if let Some(class) = unserved.filter(|_| is_denied) {
            let num_steps = before[class as usize] + 1;
            self.checks.without_prefill[class as usize] = num_steps;
            assert!(num_steps < self.rules.max_prefill_interval, "no prompt of {class:?} in {num_steps} steps");
        }
        let was_due = before.iter().any(|&num_steps| num_steps > 0 && num_steps + 1 == self.rules.max_prefill_interval);
        self.checks.num_kept_promises.due_chunks += u64::from(was_due && !is_denied);
    }

    /// Whoever got nothing for so long that it is aged gets a share of the tokens from then on.
    fn check_shielded(&mut self, changes: &Changes, batch: &BTreeMap<ChoiceId, usize>) {
        let num_aged = self.submitter().stats().num_aged_starts - changes.stats_before.num_aged_starts;
        // The core counts in whole milliseconds.
        let (now_ns, aging_ns) = (self.now_ns, self.aging_ns() + 1_000_000);
        let mut wanted = 0;
        let mut given = 0;
        let started: BTreeSet<u64> = changes.started.iter().map(|&(id, _)| id).collect();
        for (&id, known) in self.requests.iter_mut().filter(|(_, known)| known.end.is_none()) {
            let age_ns = now_ns.saturating_sub(known.touched_ns);
            known.may_be_shielded |= num_aged > 0 && started.contains(&id) || age_ns + 2_000_000 >= aging_ns;
            let prompts: Vec<usize> = (0..known.choices.len())
                .filter(|&at| known.choices[at].row.is_some() && !known.choices[at].is_decoding)
                // The last token of a prompt is planned like a decode.
                .filter(|&at| known.choices[at].num_remaining(known) != Some(1))
                .collect();
            if known.class == Class::Interactive || prompts.is_empty() {
                continue;
            }
            known.is_shielded |= age_ns >= aging_ns && !started.contains(&id);
            if known.is_shielded || known.may_be_shielded {
                given += prompts.iter().filter_map(|&at| batch.get(&(id, at))).sum::<usize>();
            }
            if known.is_shielded {
                let remaining = prompts.iter().filter(|&&at| changes.running_before.contains(&(id, at)));
                let remaining = remaining.filter_map(|&at| known.choices[at].num_remaining(known));
                wanted += remaining.filter(|&count| count > 1).sum::<usize>();
            }
        }
        // The time for it may be short, and is not known here.
        let is_timed = self.live_choices().any(|(_, known, choice)| choice.row.is_some() && known.has_target);
        if is_timed || wanted == 0 {
            return;
        }
        let config = self.scheduler.config();
        let is_decode = |known: &Known, choice: &Choice| choice.is_decoding || choice.num_remaining(known) == Some(1);
        let num_decodes =
            self.live_choices().filter(|(id, known, choice)| is_decode(known, choice) && batch.contains_key(id));
        let num_left = config.max_num_batched_tokens - num_decodes.count();
        let share = ((num_left as f64 * self.rules.aged_share) as usize).max(config.block_size);
        let share = share.min(num_left).min(wanted).min(config.max_prefill_chunk_tokens.unwrap_or(usize::MAX));
        assert!(given >= share, "shielded prompts get {given} tokens, their share is {share}");
        self.checks.num_kept_promises.shielded_chunks += 1;
    }

    /// Victims make way for somebody, who starts now or is the next one to start.
    fn check_displacements(&mut self, changes: &Changes) {
        let stats = self.submitter().stats();
        let before = &changes.stats_before;
        let num_displaced = stats.num_displacements - before.num_displacements;
        let is_fair = self.rules.fairness == Fairness::Weighted;
        let benefits = |new: &Known, victim: &Known| {
            new.class < victim.class || is_fair && new.class == victim.class && new.tenant != victim.tenant
        };
        let new =
            |victim: &Known| changes.started.iter().filter(|(id, _)| benefits(&self.requests[id], victim)).count();
        // An aged one may start in the place of a victim.
        let num_aged = stats.num_aged_starts - before.num_aged_starts;
        let mut pending = std::mem::take(&mut self.checks.pending);
        pending.retain(|pending| {
            let could_start = |(_, known, choice): (ChoiceId, &Known, &Choice)| {
                choice.row.is_none() && benefits(known, &pending.victim)
            };
            new(&pending.victim) == 0 && num_aged == 0 && !self.is_paused && self.live_choices().any(could_start)
        });
        for pending in &pending {
            let class = pending.victim.class;
            let takes = |&&(id, _): &&ChoiceId| {
                let other = &self.requests[&id];
                other.class > class || other.class == class && !benefits(other, &pending.victim)
            };
            let is_taken = changes.started.iter().any(|id| takes(&id));
            assert!(!is_taken, "what a displaced {class:?} gave up went to {:?}", changes.started);
            assert!(self.step_id - pending.step_id <= MAX_KEPT_STEPS, "displaced in vain");
        }
        // Otherwise some were preempted because memory ran out, and it is not known which.
        if num_displaced > 0 && changes.preempted.len() as u64 == num_displaced {
            for &(id, _) in &changes.preempted {
                let victim = &self.requests[&id];
                let limit = u32::from(self.rules.max_preemptions);
                assert!(victim.num_preemptions <= limit, "{id} was displaced after {limit} preemptions");
                assert!(!victim.is_shielded, "{id} was displaced though it is shielded");
                if new(victim) == 0 {
                    self.checks.num_kept_promises.reservations += 1;
                    pending.push(Pending { step_id: self.step_id, victim: victim.clone() });
                }
            }
        }
        self.checks.pending = pending;
    }

    /// W: an aged wait ends after `aged_interval` starts for itself and each that waits for longer.
    fn check_waits(&mut self, changes: &Changes) {
        let Some(slack) = self.checks.start_slack else { return };
        let interval = (1.0 / self.rules.aged_share).round() as u64;
        let (now_ns, aging_ns) = (self.now_ns, self.aging_ns() + 1_000_000);
        let places: BTreeSet<u64> =
            self.requests.values().filter_map(|known| known.wait).map(|wait| wait.place).collect();
        let num_others = self.requests.values().filter(|known| known.end.is_none() && known.choices.len() > 1).count();
        let (num_starts, num_before) = (self.num_starts, self.num_starts - changes.num_starts);
        for (id, known) in &mut self.requests {
            let Some(wait) = &mut known.wait else { continue };
            if wait.max_starts.is_none() && now_ns - wait.since_ns >= aging_ns {
                let num_older = (places.range(..wait.place).count() + num_others) as u64;
                wait.max_starts = Some(num_before + interval * (num_older + 1) + slack);
                self.checks.num_kept_promises.aged_waits += 1;
            }
            let is_late = wait.max_starts.is_some_and(|most| num_starts > most);
            assert!(!is_late, "{id} of {:?} waits though {num_starts} have started: {wait:?}", known.class);
        }
    }

    /// Whoever lives makes for a plan with something in it.
    fn check_progress(&self) {
        let may_run = |known: &Known| known.end.is_none() && (!self.is_paused || known.is_started);
        let is_stuck = self.batch.is_empty() && self.requests.values().any(may_run);
        assert!(!is_stuck, "nothing is planned though somebody waits: {:?}", self.scheduler);
    }

    fn note_batch(&mut self) {
        let (step_id, now_ns, num_begun) = (self.step_id, self.now_ns, self.num_decodes_begun);
        let seq_lens = &self.scheduler.batch().seq_lens;
        for (index, &((id, at), _)) in self.batch.iter().enumerate() {
            let known = self.requests.get_mut(&id).expect("it is in the batch");
            let choice = &mut known.choices[at];
            (choice.last_run_step, choice.num_decodes_then) = (step_id, num_begun);
            choice.num_computed = Some(seq_lens[index] as usize);
            if !choice.is_decoding {
                known.touched_ns = now_ns;
            }
        }
    }
}
