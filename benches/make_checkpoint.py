"""Writes a model in the formats that other engines read, all from the same weights.

    python benches/make_checkpoint.py checkpoints
    python benches/make_checkpoint.py checkpoints --model model.gguf --only bf16 bf16.gguf

The source is a GGUF file of the llama architecture, by default that of SmolLM2-135M-Instruct (which
`cbrs pull smollm2-135m-instruct` fetches). Its weights are dequantised once, by the loader of cbrs:

  bf16       folder in the Hugging Face layout, rounded to bfloat16
  fp32       the same in float32, without any rounding
  bf16.gguf  GGUF file, matrices rounded to bfloat16; vectors in float32
  f16.gguf   the same in float16
  q8_0.gguf  the same in Q8_0, quantized by the package `gguf`
  q4_1.gguf  the same in Q4_1; matrices that the source has so are copied as they are

Each is then loaded again and held against the source, tensor by tensor. Needs the packages
`safetensors` and `gguf`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from policies.output import Report, at_most

if TYPE_CHECKING:
    from comparing.checkpoint import Source

DEFAULT_MODEL = "smollm2-135m-instruct"
FORMS = ("bf16", "fp32", "bf16.gguf", "f16.gguf", "q8_0.gguf", "q4_1.gguf")


def write(source: Source, form: str, target: Path) -> None:
    """Writes one of `FORMS`."""
    from comparing import checkpoint, gguf_copy

    if form.endswith(".gguf"):
        gguf_copy.write(source, target, form.removesuffix(".gguf"))
    else:
        checkpoint.write_folder(source, target, form)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where they are written; made if it is not there")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a known name or a .gguf file")
    parser.add_argument("--only", nargs="+", choices=FORMS, default=list(FORMS), metavar="FORM")
    parser.add_argument("--json", action="store_true", help="print only the JSON line to stdout")
    return parser.parse_args()


def paths(folder: Path, forms: list[str]) -> Iterator[tuple[str, Path]]:
    """Each form and where it is written."""
    for form in forms:
        yield form, folder / (f"model-{form}" if form.endswith(".gguf") else form)


def main() -> None:
    options = parse()
    from comparing import checkpoint

    from cbrs import hub

    file = hub.pull(options.model) if options.model in hub.KNOWN_MODELS else Path(options.model)
    options.plot = None
    report = Report("make_checkpoint", options)
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        source = checkpoint.Source(file)
        results = {}
        for form, target in paths(options.folder, options.only):
            write(source, form, target)
            different = checkpoint.different_tensors(source, target, form)
            size = sum(
                each.stat().st_size for each in [target, *target.glob("*")] if each.is_file()
            )
            results[form] = {"path": str(target), "bytes": size, "different": different}
            report.show(form, {"path": target, "MB": round(size / 1e6, 1)})
            report.checks.append(at_most(f"{form}: other tensors", len(different), "", 0))
    except ValueError as error:
        sys.exit(f"{file}: {error}")
    options.folder = str(options.folder)
    report.finish(results, lambda *_: None)


if __name__ == "__main__":
    main()
