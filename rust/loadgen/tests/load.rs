//! Loads on small servers that behave well, badly, slowly, or not at all.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use cbrs_loadgen::{Config, Error, run};
use serde_json::json;

use support::{completion, load, pieces, serve, whole};

const NOW: Duration = Duration::ZERO;

fn at_once(text: String) -> Vec<(Duration, Option<Bytes>)> {
    vec![(NOW, Some(Bytes::from(text)))]
}

#[test]
fn a_closed_loop_keeps_its_clients_busy_and_no_more() {
    let most = Arc::new(AtomicUsize::new(0));
    let seen_most = Arc::clone(&most);
    let url = serve(move |seen| {
        seen_most.fetch_max(seen.num_in_flight, SeqCst);
        assert_eq!(seen.path, "/v1/completions");
        assert_eq!(seen.body["prompt"].as_array().unwrap().len(), 5);
        assert_eq!(seen.body["max_tokens"], json!(4));
        async {
            tokio::time::sleep(Duration::from_millis(2)).await;
            pieces(at_once(completion(4)))
        }
    });
    let report = load(&url, r#""concurrency": 6, "num_requests": 60, "warmup": 3"#).unwrap();
    assert_eq!((report.num_requests, report.num_failed, report.statuses[&200]), (60, 0, 60));
    assert_eq!((report.num_output_tokens, report.num_prompt_tokens, report.num_cached_tokens), (240, 660, 240));
    assert_eq!(most.load(SeqCst), 6);
    // Six at once; a connection is used again as soon as it is free.
    assert!(report.num_connections <= 6, "{report:?}");
    assert_eq!(report.num_reconnects, 0);
    assert!((report.requests_per_s * report.duration_s - 60.0).abs() < 1e-6);
    assert!((report.total_tokens_per_s * report.duration_s - 900.0).abs() < 1e-6);
    assert!(report.ttft_ms.unwrap().p50 >= 2.0);
    assert!(report.lag_ms.is_none() && report.refusal_ms.is_none());
}

#[test]
fn events_are_found_wherever_chunks_are_cut() {
    let url = serve(|seen| async move {
        let text = completion(9);
        // Every request is cut into chunks of another length.
        let chunks = text.as_bytes().chunks(1 + seen.number * 7);
        pieces(chunks.map(|chunk| (NOW, Some(Bytes::copy_from_slice(chunk)))).collect())
    });
    let report = load(&url, r#""concurrency": 1, "num_requests": 20"#).unwrap();
    assert_eq!((report.num_failed, report.num_output_tokens, report.num_events), (0, 180, 20 * 12));
}

#[test]
fn events_that_come_together_are_counted_as_one_read() {
    let url = serve(|_| async { pieces(at_once(completion(50))) });
    let report = load(&url, r#""concurrency": 1, "num_requests": 5"#).unwrap();
    assert_eq!(report.num_events, 5 * 53);
    // The events of a response fit into one buffer, and come in one segment or two.
    assert!(report.num_reads <= 10, "{report:?}");
    assert!(report.itl_ms.unwrap().p50 < 1.0);
    assert!(report.events_per_read.unwrap() > 25.0);
}

#[test]
fn a_slow_server_is_timed_token_by_token() {
    let url = serve(|_| async {
        let text = completion(3);
        let events = text.split_inclusive("\n\n").map(|event| Some(Bytes::copy_from_slice(event.as_bytes())));
        let pauses = [60, 30, 30, 0, 0, 0].map(Duration::from_millis);
        pieces(pauses.into_iter().zip(events).collect())
    });
    let report = load(&url, r#""concurrency": 2, "num_requests": 4"#).unwrap();
    assert_eq!(report.num_failed, 0, "{report:?}");
    let [ttft, itl, tpot, e2e] =
        [report.ttft_ms, report.itl_ms, report.tpot_ms, report.e2e_ms].map(|summary| summary.unwrap().p50);
    // A busy machine only makes it slower; a token cannot come before it is sent.
    assert!(ttft >= 59.0 && e2e >= ttft + 58.0, "{report:?}");
    assert!(itl >= 25.0 && tpot >= 25.0, "{report:?}");
}

#[test]
fn a_refusal_is_counted_and_the_rest_goes_on() {
    let url = serve(|seen| async move {
        if seen.number % 2 == 0 {
            return whole(429, r#"{"error": {"message": "too many"}}"#);
        }
        pieces(at_once(completion(4)))
    });
    let report = load(&url, r#""concurrency": 1, "num_requests": 10"#).unwrap();
    assert_eq!((report.num_requests, report.num_failed, report.num_retries), (10, 5, 0));
    assert_eq!((report.statuses[&200], report.statuses[&429]), (5, 5));
    assert_eq!(report.errors["429: too many"], 5);
    assert_eq!(report.num_output_tokens, 20);
    assert!(report.refusal_ms.is_some());
    assert_eq!(report.num_connections, 1);
}

#[test]
fn a_retry_waits_as_long_as_the_server_says() {
    let url = serve(|seen| async move {
        if seen.number == 0 {
            let mut refusal = whole(429, "{}");
            refusal.headers_mut().insert("retry-after", "1".parse().unwrap());
            return refusal;
        }
        pieces(at_once(completion(4)))
    });
    let report = load(&url, r#""concurrency": 1, "num_requests": 1, "retries": 2"#).unwrap();
    assert_eq!((report.num_failed, report.num_retries), (0, 1));
    assert_eq!((report.statuses[&200], report.statuses[&429]), (1, 1));
    assert!(report.ttft_ms.unwrap().p50 >= 990.0, "{report:?}");
}

#[test]
fn retries_end_and_other_errors_are_not_retried() {
    let url = serve(|seen| async move {
        let mut refusal = whole(if seen.body["max_tokens"] == 4 { 503 } else { 400 }, "no");
        refusal.headers_mut().insert("retry-after", "0".parse().unwrap());
        refusal
    });
    let report = load(&url, r#""concurrency": 1, "num_requests": 1, "retries": 3"#).unwrap();
    assert_eq!((report.num_failed, report.num_retries, report.statuses[&503]), (1, 3, 4));
    let more = r#""concurrency": 1, "num_requests": 1, "retries": 3, "extra_body": {"max_tokens": 9}"#;
    let report = load(&url, more).unwrap();
    assert_eq!((report.num_failed, report.num_retries, report.statuses[&400]), (1, 0, 1));
}

#[test]
fn broken_streams_fail_and_say_how() {
    let url = serve(|seen| async move {
        let token = Some(Bytes::from_static(b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n"));
        let error = Bytes::from_static(b"data: {\"error\":{\"message\":\"boom\"}}\n\ndata: [DONE]\n\n");
        pieces(match seen.number {
            0 => vec![(NOW, token), (Duration::from_millis(5), None)],
            1 => vec![(NOW, token)],
            2 => vec![(NOW, token), (NOW, Some(error))],
            _ => at_once(completion(4)),
        })
    });
    let report = load(&url, r#""concurrency": 1, "num_requests": 5"#).unwrap();
    assert_eq!((report.num_requests, report.num_failed, report.statuses[&200]), (5, 3, 5));
    assert_eq!(report.num_output_tokens, 8, "tokens of failed requests count nowhere");
    let errors: Vec<&str> = report.errors.keys().map(String::as_str).collect();
    assert_eq!(errors[0], "error in the stream: boom");
    assert!(errors[1].starts_with("the stream ended without [DONE]"), "{errors:?}");
    assert!(errors[2].starts_with("the stream was cut: "), "{errors:?}");
}

#[test]
fn a_request_without_end_is_given_up() {
    let url = serve(|_| async {
        tokio::time::sleep(Duration::from_secs(60)).await;
        whole(200, "")
    });
    let report = load(&url, r#""concurrency": 2, "num_requests": 4, "timeout_s": 0.05"#).unwrap();
    assert_eq!((report.num_failed, report.errors["no end after 0.05 s"]), (4, 4));
    assert_eq!(report.statuses[&0], 4);
}

#[test]
fn a_server_that_is_not_there_is_counted() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let report = load(&format!("http://{free}"), r#""concurrency": 2, "num_requests": 4"#).unwrap();
    assert_eq!((report.num_requests, report.num_failed, report.statuses[&0]), (4, 4, 4));
    let message = report.errors.keys().next().unwrap();
    assert!(message.starts_with("cannot connect: ") && message.contains("refused"), "{message}");
}

#[test]
fn a_connection_that_the_server_closes_is_replaced() {
    let url = serve(|_| async {
        let mut response = whole(200, r#"{"usage": {"prompt_tokens": 5, "completion_tokens": 4}}"#);
        response.headers_mut().insert("connection", "close".parse().unwrap());
        response
    });
    let report = load(&url, r#""concurrency": 1, "num_requests": 6, "stream": false"#).unwrap();
    assert_eq!((report.num_failed, report.num_connections, report.num_output_tokens), (0, 6, 24));
}

#[test]
fn chat_without_streaming_has_no_time_to_first_token() {
    let url = serve(|seen| async move {
        assert_eq!(seen.path, "/v1/chat/completions");
        assert_eq!(seen.authorization.as_deref(), Some("Bearer sesame"));
        assert_eq!(seen.body["messages"][0]["role"], "user");
        whole(
            200,
            r#"{"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}"#,
        )
    });
    let more = r#""endpoint": "chat", "stream": false, "api_key": "sesame", "num_requests": 3"#;
    let report = load(&url, more).unwrap();
    assert_eq!((report.num_failed, report.num_output_tokens), (0, 9), "{report:?}");
    assert!(report.ttft_ms.is_none() && report.itl_ms.is_none() && report.e2e_ms.is_some());
}

#[test]
fn an_open_loop_does_not_wait_for_answers() {
    let url = serve(|_| async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        pieces(at_once(completion(4)))
    });
    // 100 requests of 0.3 s each: 30 s for one client, about 0.8 s at this rate.
    let report = load(&url, r#""rate": 200, "num_requests": 100, "seed": 5"#).unwrap();
    assert_eq!((report.num_requests, report.num_failed), (100, 0));
    assert!(report.duration_s < 10.0, "{report:?}");
    assert!(report.num_connections > 20, "{report:?}");
    assert!(report.lag_ms.is_some());
}

#[test]
fn a_trace_gives_times_and_lengths() {
    let arrivals = Arc::new(Mutex::new(Vec::new()));
    let seen_arrivals = Arc::clone(&arrivals);
    let start = Instant::now();
    let url = serve(move |seen| {
        let lengths = (seen.body["prompt"].as_array().unwrap().len(), seen.body["max_tokens"].as_u64().unwrap());
        seen_arrivals.lock().unwrap().push((start.elapsed(), lengths));
        async { pieces(at_once(completion(1))) }
    });
    let mut trace = tempfile::NamedTempFile::new().unwrap();
    for (time, input, output) in [(0, 3, 9), (50, 4, 2), (250, 400, 3)] {
        let row = json!({"timestamp_ms": time, "input_length": input, "output_length": output});
        std::io::Write::write_all(&mut trace, format!("{row}\n").as_bytes()).unwrap();
    }
    // `load` sets prompt_tokens and output_tokens, which bound the lengths of a trace: 5 and 4.
    let report = load(&url, &format!(r#""trace": {}"#, json!(trace.path()))).unwrap();
    assert_eq!((report.num_requests, report.num_failed), (3, 0));
    let arrivals = arrivals.lock().unwrap();
    let lengths: Vec<_> = arrivals.iter().map(|arrival| arrival.1).collect();
    assert_eq!(lengths, [(3, 4), (4, 2), (5, 3)]);
    assert!(report.duration_s >= 0.25, "{report:?}");
}

#[test]
fn a_duration_ends_a_closed_loop() {
    let url = serve(|_| async {
        tokio::time::sleep(Duration::from_millis(1)).await;
        pieces(at_once(completion(4)))
    });
    let report = load(&url, r#""concurrency": 4, "duration_s": 0.3, "threads": 2"#).unwrap();
    assert_eq!((report.num_failed, report.client.threads), (0, 2));
    assert!(report.num_requests >= 8, "{report:?}");
    assert!(report.duration_s >= 0.29, "{report:?}");
}

#[test]
fn a_thousand_connections_lose_no_request() {
    let url = serve(|_| async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        pieces(at_once(completion(4)))
    });
    let report = load(&url, r#""concurrency": 1024, "num_requests": 2048"#).unwrap();
    assert_eq!((report.num_requests, report.num_failed), (2048, 0), "{:?}", report.errors);
    assert_eq!(report.num_output_tokens, 4 * 2048);
}

#[test]
fn the_callback_sees_the_progress_and_ends_the_run() {
    let url = serve(|_| async {
        tokio::time::sleep(Duration::from_secs(60)).await;
        whole(200, "")
    });
    let config: Config = support::config(&url, r#""concurrency": 3, "num_requests": 9"#);
    let mut seen = None;
    let result = run(&config, |progress| {
        seen = Some(*progress);
        false
    });
    assert!(matches!(result, Err(Error::Interrupted)));
    let progress = seen.unwrap();
    assert_eq!((progress.num_started, progress.num_succeeded, progress.num_requests), (3, 0, Some(9)));
    assert!(progress.elapsed_s.unwrap() > 0.1);
}
