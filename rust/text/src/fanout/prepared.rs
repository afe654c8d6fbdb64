//! `Prepared`: requests that the engine would take, and what will be made of their outputs.

use cbrs_core::fault;
use cbrs_core::{Error, RequestId, Reserved, Result};
use smallvec::SmallVec;

use super::live::{Draft, LiveRequest};
use super::{OutputChannel, OutputProcessor};

/// Requests that were checked and for which there is room. Submitting them takes no work that others could have to wait for; dropping them
/// gives everything back.
#[derive(Debug)]
pub struct Prepared<'a> {
    processor: &'a OutputProcessor,
    reserved: Reserved<'a>,
    drafts: SmallVec<[Draft; 1]>,
    channel: Option<&'a OutputChannel>,
}

impl<'a> Prepared<'a> {
    /// `draft` is what the requests have in common, with the index of the first.
    pub(super) fn new(
        processor: &'a OutputProcessor,
        reserved: Reserved<'a>,
        draft: &Draft,
        channel: Option<&'a OutputChannel>,
    ) -> Self {
        let drafts = reserved.prompts().zip(draft.index..).map(|(prompt, index)| draft.with(prompt.to_vec(), index));
        let drafts = drafts.collect();
        Self { processor, reserved, drafts, channel }
    }

    /// Ids of the requests, in the order of their prompts.
    pub fn ids(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.reserved.ids()
    }

    /// Lengths of the prompts, as far as they are kept.
    pub fn prompt_lens(&self) -> impl Iterator<Item = usize> + '_ {
        self.drafts.iter().map(|draft| draft.prompt_token_ids.len())
    }

    /// Hands them to the engine.
    ///
    /// # Errors
    /// `Closed` after `close` of the engine or the processor, and for a closed channel. Nothing stays behind.
    pub fn submit(self) -> Result<()> {
        let Self { processor, reserved, drafts, channel } = self;
        let shared = &processor.shared;
        let ids: SmallVec<[RequestId; 1]> = reserved.ids().collect();
        let mut live = shared.lock_live();
        if live.is_closed {
            return Err(Error::Closed);
        }
        fault::point("text: submit");
        // The consumer cannot look for these requests before they are registered: it needs the lock for that.
        for (&id, mut draft) in ids.iter().zip(drafts) {
            draft.channel = match channel.map(|channel| channel.attach(shared)).transpose() {
                Ok(channel) => channel,
                Err(error) => {
                    live.forget(&ids);
                    return Err(error);
                }
            };
            live.requests.insert(id.as_u64(), LiveRequest::new(id, draft));
        }
        reserved.submit().inspect_err(|_| live.forget(&ids))
    }
}
