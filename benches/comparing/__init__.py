"""Parts of `benches/compare_serving.py`, `serving.py` and `make_checkpoint.py`."""
