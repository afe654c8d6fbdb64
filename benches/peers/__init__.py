"""Schedulers that `benches/compare_schedulers.py` puts under the same load, one file each.

A file has one class `Peer`, made from `Limits`, with the methods of `harness.Peer`. The package of
a peer is imported only by its own file, in an interpreter that has it.
"""
