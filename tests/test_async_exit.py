"""The program ends only after an ended `AsyncLLM` has freed its model, which is native code."""

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

PROGRAM = """
    import asyncio, time
    from cbrs import AsyncLLM, SamplingParams

    class Weights:
        def __del__(self):
            time.sleep(0.5)  # as native code does that frees memory without the GIL
            print("freed", flush=True)

    async def main():
        llm = AsyncLLM("null")
        llm.engine.weights = Weights()
        async for _ in llm.generate("a", SamplingParams(max_tokens=2)):
            pass
        {end}

    asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["await llm.aclose()", "del llm"], ids=["aclose", "dropped"])
def test_the_model_is_freed_before_the_program_ends(end: str) -> None:
    program = textwrap.dedent(PROGRAM.format(end=end))
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "freed\n", "")
