//! A server that does nothing but send prepared bytes: what a load generator can reach at most.
//!
//! `trivial_server PORT NUM_EVENTS EVENTS_PER_WRITE`; without events it answers in one piece of JSON.

use std::env::args;
use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

fn main() -> io::Result<()> {
    let numbers: Vec<usize> = args().skip(1).filter_map(|text| text.parse().ok()).collect();
    let [port, num_events, events_per_write] = numbers[..] else {
        return Err(io::Error::other("give PORT NUM_EVENTS EVENTS_PER_WRITE"));
    };
    let writes: &'static [Vec<u8>] = response(num_events, events_per_write.max(1)).leak();
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let listener = TcpListener::bind(("127.0.0.1", port as u16)).await?;
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            tokio::spawn(async move {
                // A client that leaves is no concern of the others.
                let _ = answer(stream, writes).await;
            });
        }
    })
}

/// Reads requests by their `content-length` and answers each with the same writes.
async fn answer(mut stream: TcpStream, writes: &[Vec<u8>]) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 20];
    let mut filled = 0;
    loop {
        let num_read = stream.read(&mut buffer[filled..]).await?;
        if num_read == 0 {
            return Ok(());
        }
        filled += num_read;
        if !is_whole(&buffer[..filled]) {
            continue;
        }
        filled = 0;
        for bytes in writes {
            stream.write_all(bytes).await?;
            if writes.len() > 1 {
                // So that the connections take turns, as they do where each step has a token for each.
                tokio::task::yield_now().await;
            }
        }
    }
}

fn is_whole(request: &[u8]) -> bool {
    let Some(head) = memchr::memmem::find(request, b"\r\n\r\n") else { return false };
    let name = b"content-length: ";
    let length = memchr::memmem::find(&request[..head], name).and_then(|start| {
        let digits = &request[start + name.len()..head];
        let end = digits.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(digits.len());
        std::str::from_utf8(&digits[..end]).ok()?.parse::<usize>().ok()
    });
    request.len() >= head + 4 + length.unwrap_or(0)
}

fn response(num_events: usize, events_per_write: usize) -> Vec<Vec<u8>> {
    if num_events == 0 {
        let body = r#"{"choices":[{"index":0,"text":" x"}],"usage":{"prompt_tokens":32,"completion_tokens":16}}"#;
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ";
        return vec![format!("{head}{}\r\n\r\n{body}", body.len()).into_bytes()];
    }
    let event = "data: {\"id\":\"cmpl-0123456789abcdef\",\"object\":\"text_completion\",\"created\":1700000000,\
                 \"model\":\"trivial\",\"choices\":[{\"index\":0,\"text\":\" x\",\"logprobs\":null,\
                 \"finish_reason\":null}]}\n\n";
    let chunk = |data: &str| format!("{:x}\r\n{data}\r\n", data.len()).into_bytes();
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut writes = vec![head.as_bytes().to_vec()];
    for index in 0..num_events {
        if index > 0 && index % events_per_write == 0 {
            writes.push(Vec::new());
        }
        if let Some(write) = writes.last_mut() {
            write.extend(chunk(event));
        }
    }
    if let Some(write) = writes.last_mut() {
        write.extend(chunk("data: [DONE]\n\n"));
        write.extend(b"0\r\n\r\n");
    }
    writes
}
