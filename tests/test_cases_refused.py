"""Faults in features that cbrs does not have yet: asking for one is a clear refusal, never silence.

The ids are those of `docs/cases.md`. Each feature, once built, replaces its refusal here by a test
of the fault itself.
"""

import re

import kit
import numpy as np
import pytest
from scheduler_kit import make_scheduler

from cbrs import StepResult
from cbrs.errors import InvalidRequestError, ModelLoadError
from cbrs.loading import load_model


def test_j01_drafts_of_a_speculation_are_refused():
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError, match="draft_token_ids is not supported") as caught:
        scheduler.submit([3] * 5, max_tokens=9, draft_token_ids=[4, 5])
    assert caught.value.param == "draft_token_ids"
    assert scheduler.stats()["num_waiting"] == 0
    with pytest.raises(InvalidRequestError, match="draft_token_ids is not supported"):
        StepResult(1, [5], draft_token_ids=[4])


@pytest.mark.parametrize("name", ["self_attn.k_scale", "self_attn.attn.v_scale"])
def test_i15_a_kv_scale_tensor_is_refused(name, tmp_path):
    config = kit.tiny_config()
    scale = f"model.layers.1.{name}"
    tensors = {**kit.tensors_of(config), scale: np.ones(1, np.float32)}
    folder = kit.write_folder(tmp_path, config, tensors, kit.byte_tokenizer())
    with pytest.raises(ModelLoadError, match=re.escape(scale)) as caught:
        load_model(folder, device="cpu")
    assert caught.value.field == scale
