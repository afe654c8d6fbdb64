//! The page: which figure has which name. Those that vLLM has too have its names, with another prefix.

use cbrs_core::{FinishReason, Stats};
use cbrs_text::Timings;

use super::text::Page;
use crate::app::App;

/// Nanoseconds in a second.
const SECOND: f64 = 1e9;

/// All figures in Prometheus' text format.
pub(crate) fn write_page(app: &App) -> Vec<u8> {
    let mut page = Page::new(app.model());
    let stats = app.engine.submitter.stats();
    let timings = app.engine.processor.timings();
    write_load(&mut page, app, &stats);
    write_memory(&mut page, &stats);
    write_requests(&mut page, app, &stats, timings);
    write_times(&mut page, app, timings);
    write_steps(&mut page, app, &stats);
    write_connections(&mut page, app);
    page.into_bytes()
}

fn write_load(page: &mut Page, app: &App, stats: &Stats) {
    page.gauge("num_requests_running", "Sequences that have a row of the batch.", stats.num_running as f64);
    page.gauge(
        "num_requests_waiting",
        "Requests that have not started, and choices of started ones that have no row.",
        stats.num_waiting as f64,
    );
    page.gauge("max_num_seqs", "Rows of the batch.", app.engine.submitter.max_num_seqs() as f64);
    page.gauge("num_queued_tokens", "Prompt tokens of requests that have not started.", stats.num_queued_tokens as f64);
    page.gauge(
        "queued_service_seconds",
        "Predicted seconds of service of requests that have not started.",
        stats.queued_service_s,
    );
    page.gauge("request_arrival_rate", "Requests per second that came lately.", stats.arrival_rate);
    page.gauge(
        "request_service_rate",
        "Requests like these that could be served per second; 0 = unknown.",
        stats.service_rate,
    );
    page.gauge("load", "Seconds of service that arrive per second; above 1 the queue grows.", stats.load);
    page.gauge("is_refusing", "1 while requests are refused because of load.", stats.is_refusing as f64);
    page.gauge("is_paused", "1 while no request may start.", stats.is_paused as f64);
}

fn write_memory(page: &mut Page, stats: &Stats) {
    let Stats { num_free_blocks: free, num_cached_blocks: cached, num_used_blocks: used, .. } = *stats;
    let usage = used as f64 / (free + cached + used).max(1) as f64;
    page.gauge("kv_cache_usage_perc", "Part of the KV blocks that are held; 1 = all.", usage);
    page.gauges("num_kv_blocks", "KV blocks by state.", "state", [("free", free), ("cached", cached), ("used", used)]);
    page.counter(
        "prefix_cache_queries_total",
        "Prompt tokens looked for in the prefix cache.",
        stats.num_prompt_tokens,
    );
    page.counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", stats.num_cached_prompt_tokens);
    page.counter("num_evicted_blocks_total", "Cached blocks reused for other content.", stats.num_evicted_blocks);
    page.counter("num_preemptions_total", "Sequences that lost their blocks to others.", stats.num_preemptions);
    page.counter(
        "num_displacements_total",
        "Preemptions for a higher class or for a tenant below its share.",
        stats.num_displacements,
    );
    page.counter(
        "num_recomputed_tokens_total",
        "Tokens computed again after preemptions.",
        stats.num_recomputed_tokens,
    );
}

fn write_requests(page: &mut Page, app: &App, stats: &Stats, timings: &Timings) {
    page.counter("num_accepted_requests_total", "Requests let in at the door.", stats.num_accepted_requests);
    page.counter(
        "prompt_tokens_total",
        "Prompt tokens of started requests, cached ones included.",
        stats.num_prompt_tokens,
    );
    page.counter("generation_tokens_total", "Output tokens.", timings.num_output_tokens());
    page.counters(
        "request_success_total",
        "Choices that ended, by how.",
        &["finished_reason"],
        timings.num_ends().map(|(reason, number)| ([finished_reason(reason)], number)),
    );
    page.counters(
        "num_refusals_total",
        "Requests refused at the door, by class and reason.",
        &["class", "reason"],
        app.engine.submitter.refusals().map(|(class, reason, number)| ([class.name(), reason.name()], number)),
    );
    page.counter("num_expired_requests_total", "Requests ended at a deadline.", stats.num_expired_requests);
    page.counter(
        "num_aged_starts_total",
        "Starts given to the request that had waited longest.",
        stats.num_aged_starts,
    );
    page.histogram(
        "request_prompt_tokens",
        "Prompt tokens of requests that ended by themselves.",
        &timings.prompt_tokens,
        1.0,
    );
    page.histogram(
        "request_generation_tokens",
        "Output tokens of choices that ended by themselves.",
        &timings.output_tokens,
        1.0,
    );
}

/// vLLM's name for an end.
fn finished_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Cancelled => "abort",
        other => other.as_str(),
    }
}

fn write_times(page: &mut Page, app: &App, timings: &Timings) {
    let rows = [
        ("time_to_first_token_seconds", "From submission to a request's first token.", &timings.first_token),
        ("inter_token_latency_seconds", "From one token of a choice to the next.", &timings.inter_token),
        (
            "e2e_request_latency_seconds",
            "From submission to the end of requests that ended by themselves.",
            &timings.end_to_end,
        ),
        ("request_queue_time_seconds", "From submission to the first row.", &timings.queue),
        ("request_prefill_time_seconds", "From the first row to the first token.", &timings.prefill),
        (
            "request_decode_time_seconds",
            "From the first token to the end of requests that ended by themselves.",
            &timings.decode,
        ),
        ("step_time_seconds", "One iteration: planning, the model, sampling.", app.engine.submitter.step_times()),
    ];
    for (name, help, histogram) in rows {
        page.histogram(name, help, histogram, SECOND);
    }
}

fn write_steps(page: &mut Page, app: &App, stats: &Stats) {
    page.counter("num_steps_total", "Iterations that ran something.", stats.num_steps);
    page.counter(
        "num_scheduled_tokens_total",
        "Tokens computed in iterations, recomputed ones included.",
        stats.num_scheduled_tokens,
    );
    page.gauge(
        "max_num_batched_tokens",
        "Most tokens of an iteration.",
        app.engine.submitter.max_num_batched_tokens() as f64,
    );
    page.gauge(
        "token_budget",
        "Tokens that the last iteration might have had: fewer than the most for a latency target.",
        stats.token_budget as f64,
    );
    page.gauge(
        "predicted_step_seconds",
        "Predicted time of the iteration under way; 0 = unknown.",
        stats.predicted_step_ns as f64 / SECOND,
    );
    page.gauge(
        "step_time_error_ratio",
        "Usual error of these predictions, as a part of the time.",
        stats.step_time_error,
    );
}

fn write_connections(page: &mut Page, app: &App) {
    page.counters(
        "http_responses_total",
        "Responses by status; 499 = the client went away before one.",
        &["status"],
        app.metrics.responses().map(|(status, number)| ([status], number)),
    );
    page.gauge("num_open_connections", "Open connections.", app.metrics.num_connections() as f64);
    page.gauge("num_active_responses", "Requests and responses under way.", app.lifecycle.num_active() as f64);
    let num_dropped = app.log_writer.as_ref().map_or(0, |log| log.num_dropped());
    page.counter(
        "num_dropped_log_lines_total",
        "Lines of the log dropped because nobody read them fast enough.",
        num_dropped,
    );
}
