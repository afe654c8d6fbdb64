"""`tokenizer=`: another tokenizer than the model's."""

import json
from pathlib import Path

import kit
import pytest

from cbrs import LLM, SamplingParams
from cbrs.cli import main
from cbrs.errors import ModelLoadError
from cbrs.loading import load_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer and nothing else."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(kit.byte_tokenizer()))
    return folder


def test_null_speaks_with_the_tokenizer_that_was_given(folder: Path) -> None:
    with LLM("null", tokenizer=folder, max_model_len=64, num_threads=1) as llm:
        assert llm.tokenizer.vocab_size == kit.NUM_TOKENS
        (output,) = llm.generate("hello", SamplingParams(max_tokens=3), use_tqdm=False)
        assert output.prompt_token_ids == llm.encode("hello")
        assert output.outputs[0].text == llm.decode(output.outputs[0].token_ids)


def test_a_model_gets_the_tokenizer_that_was_given(tmp_path: Path, folder: Path) -> None:
    model = kit.tiny(tmp_path / "model")
    (model / "tokenizer.json").unlink(missing_ok=True)
    assert load_model(model, device="cpu", num_threads=1).tokenizer is None
    loaded = load_model(model, device="cpu", num_threads=1, tokenizer=folder)
    assert loaded.tokenizer is not None
    assert loaded.vocab_size == min(kit.NUM_TOKENS, loaded.config.vocab_size)


def test_a_tokenizer_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, part in ((tmp_path / "none", "none"), (tmp_path, "tokenizer.json")):
        with pytest.raises(ModelLoadError, match=part):
            load_model("null", tokenizer=path)
    assert main(["generate", "null", "--tokenizer", str(tmp_path / "none"), "--prompt", "x"]) == 2
    assert "tokenizer" in capsys.readouterr().err
