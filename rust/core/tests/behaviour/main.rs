//! What the core must do, seen from outside: every test here drives a real `Scheduler` and believes nothing that it says of itself.
//!
//! | module | holds |
//! |---|---|
//! | `oracle` | a slow, simple model of what must be true; checks every operation of every test below |
//! | `ops`, `episode`, `shrink` | random operations, their replay, and the search for the shortest failing list |
//! | `model_based` | the random test: `CBRS_RANDOM_OPS` operations (default 1,000,000), first seed `CBRS_RANDOM_SEED` |
//! | `exhaustive` | every state that two requests on three blocks can reach |
//! | `kv_oracle` | that the fake KV memory really notices what it is there for |
//! | `cases` | faults that engines of this kind have had, each with the right behaviour |
//! | `limits` | bounds, at the limit and one above |
//! | `script`, `fake` | the model and the sampler that the tests run: tokens and log-probabilities known beforehand |
//! | `choices` | several choices of one prompt, number by number |
//! | `prompt_logprobs` | log-probabilities of prompts: which logits are asked for, and when they are told |
//! | `pause` | nothing starts while paused, and who waits for it |
//! | `textbook` | the examples with which continuous batching is explained, number by number |
//!
//! One test binary, so that the oracle is compiled once.

mod cases;
mod choices;
mod episode;
mod exhaustive;
mod fake;
mod kv_oracle;
mod limits;
mod model_based;
mod ops;
mod oracle;
mod pause;
mod prompt_logprobs;
mod rng;
mod script;
mod shrink;
mod textbook;
