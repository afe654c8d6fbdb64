"""`python -m cbrs` is the command `cbrs`."""

import signal
import sys


def main() -> int:
    """Runs the command; returns its exit code."""
    if sys.argv[1:2] == ["serve"]:
        # Until the command can reload: what it has not read yet needs none.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from cbrs.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
