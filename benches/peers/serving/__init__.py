"""Engines that `benches/compare_serving.py` puts under the same load, one file each.

A file has one class `Peer`, made from `Settings`, with the methods of `harness.Peer`. The package
of a peer is imported only by its own file, in an interpreter that has it.
"""
