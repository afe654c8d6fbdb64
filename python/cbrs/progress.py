"""The progress bar of `LLM.generate`: tqdm on stderr, if it is installed and stderr a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(num_requests: int, is_wanted: bool) -> Iterator[Callable[[int], object] | None]:
    """Gives a function that takes the number of finished requests, or None if no bar is wanted."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        is_wanted = False
    if not is_wanted or num_requests == 0:
        yield None
        return
    # disable=None: no bar where stderr is not a terminal.
    with tqdm(total=num_requests, desc="Requests", unit="", disable=None) as bar:
        yield lambda num_finished: bar.update(num_finished - bar.n)
