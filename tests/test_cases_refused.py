"""Faults in features that cbrs does not have yet: asking for one is a clear refusal, never silence.

The ids are those of faults that engines of this kind have really had. Each feature, once built,
replaces its refusal here by a test of the fault itself.
"""

import re

import kit
import numpy as np
import pytest
from scheduler_kit import make_scheduler

from cbrs.errors import InvalidRequestError, ModelLoadError
from cbrs.loading import load_model

PROMPT = [3] * 5


def assert_refused(scheduler, name, value, **others):
    """The refusal names the parameter, and nothing is queued."""
    with pytest.raises(InvalidRequestError, match=f"{name} is not supported") as caught:
        scheduler.submit(PROMPT, max_tokens=9, **{name: value}, **others)
    assert caught.value.param == name
    assert scheduler.stats()["num_waiting"] == 0
    assert scheduler.step().num_seqs == 0


def test_b01_prompt_logprobs_are_refused_with_and_without_a_prefix_hit():
    scheduler = make_scheduler()
    assert_refused(scheduler, "prompt_logprobs", 1)
    scheduler.submit(PROMPT, max_tokens=1)
    scheduler.step()
    assert scheduler.step(np.array([5], dtype=np.int32)).num_seqs == 0
    assert scheduler.stats()["num_cached_blocks"] > 0, "the prompt is now in the cache"
    assert_refused(scheduler, "prompt_logprobs", 1)


@pytest.mark.parametrize("name", ["self_attn.k_scale", "self_attn.attn.v_scale"])
def test_i15_a_kv_scale_tensor_is_refused(name, tmp_path):
    config = kit.tiny_config()
    scale = f"model.layers.1.{name}"
    tensors = {**kit.tensors_of(config), scale: np.ones(1, np.float32)}
    folder = kit.write_folder(tmp_path, config, tensors, kit.byte_tokenizer())
    with pytest.raises(ModelLoadError, match=re.escape(scale)) as caught:
        load_model(folder, device="cpu")
    assert caught.value.field == scale
