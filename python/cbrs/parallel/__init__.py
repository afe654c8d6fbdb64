"""Tensor parallelism: one model on several GPUs, one process for each (`docs/architecture.md`).

The process of rank 0 is the user's: it holds the core, the scheduler and the sampler. The others
compute their part of every step that it sends them.
"""
