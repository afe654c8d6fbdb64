"""Model architectures: the registry from a checkpoint's architecture name to its class."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbrs.models.llama import LlamaForCausalLM


def model_class(architecture: str) -> "type[LlamaForCausalLM]":
    """Return the class that runs `architecture`, one of `cbrs.models.config.ARCHITECTURES`.

    torch is loaded here and not before, so that a config can be read without it.
    """
    from cbrs.models.llama import LlamaForCausalLM

    return {
        "LlamaForCausalLM": LlamaForCausalLM,
        "MistralForCausalLM": LlamaForCausalLM,
    }[architecture]
