"""The demo's requests: short questions of very different answer lengths that arrive over time."""

import random
from dataclasses import dataclass

SYSTEM_PROMPT = (
    "You are the help desk of a small public library. You answer visitors politely, in plain words "
    "and without making things up. If you do not know something, say so and name the desk that "
    "can help. Keep to the question, and do not ask for personal data."
)

_NOTICE = (
    "Notice to all visitors. From Monday the reading room on the second floor is closed, because "
    "its windows are replaced. Newspapers and magazines are on the ground floor during that time, "
    "next to the return box. The quiet desks move to the seminar room, which opens at nine and "
    "closes at six; there are twenty places, and they cannot be reserved. The lift is out of use "
    "on Tuesday morning. We expect the work to take three weeks and thank you for your patience."
)

# (question, output tokens). The lengths are spread on purpose: with a fixed batch, the short ones
# wait for the long ones, and that waiting is what the picture shows. The last to arrive are short,
# so that neither policy ends with one long straggler.
_QUESTIONS: tuple[tuple[str, int], ...] = (
    ("When does the library open on Saturday?", 12),
    ("Explain to a ten-year-old what a library catalogue is.", 72),
    ("How do I renew a book?", 18),
    ("Write a short welcome for new members of the reading club.", 96),
    ("Is there a quiet room?", 8),
    ("Give three tips for reading aloud to small children.", 64),
    ("What does it cost to print a page?", 10),
    ("Describe how a book travels from the return box to its shelf.", 88),
    (f"Sum up this notice in one sentence. {_NOTICE}", 40),
    ("Can I bring my dog?", 9),
    ("Suggest a topic for a school report about the sea.", 30),
    ("Tell a very short story about a lost library card.", 100),
    ("Where do I find maps?", 14),
    ("Summarise what a public library is for in two sentences.", 44),
    ("How many books may I borrow?", 12),
    ("Explain the difference between a novel and a short story.", 80),
    (f"Where are the newspapers while this lasts? {_NOTICE}", 20),
    ("Write four lines of verse about rain on a library window.", 56),
    ("What is an audiobook?", 26),
    ("Plan a one-hour visit for a school class.", 84),
    ("Name five fruits, for a picture book.", 24),
    ("How do I use the scanner?", 34),
    ("Draft a friendly reminder for a book that is two weeks late.", 70),
    ("Is the library open on public holidays?", 11),
    ("Which books are good for learning to cook?", 48),
    ("Explain how to look up a word in a dictionary.", 60),
    ("What should I do if I damaged a book?", 28),
    (f"Rewrite this notice for children. {_NOTICE}", 52),
    ("Who decides which books are bought?", 36),
    ("Can I eat in the reading room?", 8),
    ("Describe the smell of old books in one sentence.", 32),
    ("Where is the lost property box?", 10),
    ("Do you have newspapers from last year?", 20),
    ("May I park my bicycle in the yard?", 16),
    ("Which desk helps with the computers?", 14),
    ("Say goodbye to a visitor in one line.", 12),
)

# Iterations between two arrivals after the first wave: a little faster than they can be served,
# so that there is nearly always somebody waiting for a free slot.
_MAX_ARRIVAL_GAP = 4


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request of the workload."""

    question: str
    num_output_tokens: int
    """At most so many: an answer may end earlier by itself, as a real one does."""
    arrival_iteration: int
    """It arrives before this iteration of the engine, under every policy."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat: all requests share the system prompt, so all but the first can reuse it."""
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": self.question},
        ]


def make_workload(*, max_num_seqs: int, seed: int) -> list[DemoRequest]:
    """The requests in order of arrival; `seed` decides the gaps between arrivals.

    The first `max_num_seqs` are there at once, so that both policies start with full slots.
    """
    gaps = random.Random(seed)
    arrival = 0
    workload = []
    for index, (question, num_output_tokens) in enumerate(_QUESTIONS):
        if index >= max_num_seqs:
            arrival += gaps.randint(1, _MAX_ARRIVAL_GAP)
        workload.append(DemoRequest(question, num_output_tokens, arrival))
    return workload
