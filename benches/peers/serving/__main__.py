"""Runs one engine: see `harness`."""

from .harness import main

main()
