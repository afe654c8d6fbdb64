"""`cbrs serve` with a model that takes for ever to load; the first line out says that it does."""

import sys
import time
import types


class Slow:
    """In place of a model."""

    def __init__(self, **options: object) -> None:
        print("loading", flush=True)
        time.sleep(600)


# The real one would load torch, which is nothing to wait for here.
module = types.ModuleType("cbrs.async_llm")
module.AsyncLLM = Slow  # type: ignore[attr-defined]
sys.modules[module.__name__] = module

from cbrs.cli import main  # noqa: E402

sys.exit(main(["serve", "null", "--port", "0"]))
