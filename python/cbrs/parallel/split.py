"""Which part of a model each rank has.

Queries, keys, values, gate and up are split by outputs, so that a rank has whole heads; the outputs
of attention and of the MLP by inputs, so that the ranks' products are summed; the head by rows of
the vocabulary. The rest is the same everywhere: norms are small, and a split embedding would cost
one more exchange a step to save `vocab_size * hidden_size` numbers a GPU, which a tied head, a part
of the same table, takes none of.

This is the division of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cbrs.models.config import ModelConfig
    from cbrs.models.layers import Group


class Part(NamedTuple):
    """Indices of one dimension of a tensor."""

    dimension: int
    begin: int
    end: int


def check_split(config: ModelConfig, size: int) -> None:
    """Refuses a number of ranks by which the model cannot be divided.

    Raises:
        ValueError: names the number, what it does not divide, and the numbers that do.
    """
    reason = _misfit(config, size)
    if reason is None:
        return
    fitting = [number for number in range(1, config.num_heads + 1) if not _misfit(config, number)]
    raise ValueError(
        f"tensor_parallel_size is {size}, which {reason};"
        f" give one of {', '.join(map(str, fitting))}"
    )


def _misfit(config: ModelConfig, size: int) -> str | None:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % size:
        return f"does not divide the model's {heads} attention heads"
    if kv_heads % size and size % kv_heads:
        return f"neither divides the model's {kv_heads} key and value heads nor is a multiple"
    if config.intermediate_size % size:
        return f"does not divide the model's intermediate size of {config.intermediate_size}"
    return None


@dataclass(frozen=True)
class Shard:
    """One rank's part of the model `config`, which `check_split` has accepted."""

    config: ModelConfig
    group: Group

    @property
    def local_config(self) -> ModelConfig:
        """The shape that this rank computes: fewer heads and a narrower MLP."""
        size, config = self.group.size, self.config
        return replace(
            config,
            num_heads=config.num_heads // size,
            # With more ranks than heads, neighbours have the same one.
            num_kv_heads=max(1, config.num_kv_heads // size),
            intermediate_size=config.intermediate_size // size,
        )

    def parts(self, name: str, shape: tuple[int, ...]) -> list[Part]:
        """Returns what of the tensor `name` this rank has, in order; nothing means all of it.

        Several parts belong one behind the other along their dimension.
        """
        *_, module, kind = f".{name}".rsplit(".", 2)
        if module in ("o_proj", "down_proj"):
            # Its bias is added once, to the sum.
            return [self._own(1, 0, shape[1])] if kind == "weight" else []
        if module == "q_proj":
            return [self._own(0, 0, shape[0])]
        if module in ("k_proj", "v_proj"):
            return [self._own_kv(0)]
        if module == "qkv_proj":
            queries = self.config.num_heads * self.config.head_dim
            keys = self.config.num_kv_heads * self.config.head_dim
            own = self._own(0, 0, queries)
            return [own, self._own_kv(queries), self._own_kv(queries + keys)]
        if module in ("gate_proj", "up_proj"):
            return [self._own(0, 0, shape[0])]
        if module == "gate_up_proj":
            half = shape[0] // 2
            return [self._own(0, 0, half), self._own(0, half, half)]
        if module == "lm_head":
            begin, end = vocab_part(shape[0], self.group)
            return [Part(0, begin, end)]
        return []

    def _own(self, dimension: int, first: int, count: int) -> Part:
        """This rank's of `count` indices from `first` on."""
        each = count // self.group.size
        begin = first + self.group.rank * each
        return Part(dimension, begin, begin + each)

    def _own_kv(self, first: int) -> Part:
        """The rows of this rank's key or value heads, the first of which begin at row `first`."""
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        begin = self.group.rank * heads // self.group.size
        count = max(1, heads // self.group.size)
        return Part(0, first + begin * dim, first + (begin + count) * dim)


def vocab_part(vocab_size: int, group: Group) -> tuple[int, int]:
    """Returns the rows of the head that a rank has; the last ranks may have fewer than others."""
    each = rows_of_head(vocab_size, group.size)
    return min(group.rank * each, vocab_size), min((group.rank + 1) * each, vocab_size)


def rows_of_head(vocab_size: int, size: int) -> int:
    """Returns the rows that a rank computes, those that are no tokens' included."""
    return -(-vocab_size // size)
