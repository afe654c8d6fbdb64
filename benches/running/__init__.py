"""Parts of `benches/startup.py`, `cpu_threads.py` and `capacity.py`."""
