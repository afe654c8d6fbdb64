"""The parts of `benches/scheduler.py`: one file for each kind of load."""
