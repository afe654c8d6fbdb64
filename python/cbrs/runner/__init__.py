"""Runs a model on the batches of the scheduler: KV cache, attention back ends, runner, sampler."""
