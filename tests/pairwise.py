"""Combinations of parameter values in which every pair of values occurs (pairwise testing).

Greedy: of some random candidates the one with most new pairs is taken, as AETG does (Cohen et al.,
"The AETG System", IEEE TSE 23(7), 1997).
"""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Combination = dict[str, Any]
Pair = tuple[str, int, str, int]


def pairs_of(chosen: Mapping[str, int]) -> set[Pair]:
    """The pairs of values (by index) that a combination covers."""
    return {(a, chosen[a], b, chosen[b]) for a, b in combinations(sorted(chosen), 2)}


def covering(values: Mapping[str, Sequence[Any]], count: int, seed: int) -> list[Combination]:
    """Return `count` combinations, the first of which cover every pair of values.

    Raises:
        ValueError: `count` is too small to cover all pairs.
    """
    choose = random.Random(seed)
    names = sorted(values)
    wanted: set[Pair] = set()
    for a, b in combinations(names, 2):
        wanted |= {(a, i, b, j) for i in range(len(values[a])) for j in range(len(values[b]))}
    found: list[Mapping[str, int]] = []
    while len(found) < count:
        best: Mapping[str, int] = {}
        for candidate in _candidates(values, names, wanted, choose):
            if not best or len(pairs_of(candidate) & wanted) > len(pairs_of(best) & wanted):
                best = candidate
        wanted -= pairs_of(best)
        found.append(best)
    if wanted:
        raise ValueError(f"{len(wanted)} pairs do not fit into {count} combinations")
    return [{name: values[name][index] for name, index in chosen.items()} for chosen in found]


def _candidates(
    values: Mapping[str, Sequence[Any]], names: list[str], wanted: set[Pair], choose: random.Random
) -> list[dict[str, int]]:
    """Random combinations, each built around a pair that is still wanted, if there is one."""
    found = []
    for _ in range(12 if wanted else 1):
        chosen = {name: choose.randrange(len(values[name])) for name in names}
        if wanted:
            a, i, b, j = min(wanted) if len(wanted) < 20 else choose.choice(sorted(wanted)[:400])
            chosen[a], chosen[b] = i, j
        found.append(chosen)
    return found
