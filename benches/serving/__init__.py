"""Parts of `benches/frontend.py`: a server process of its own, and the loads on it."""
