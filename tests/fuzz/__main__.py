"""``python -m tests.fuzz [SECONDS [TARGET...]]``: fuzz the native pump for long; corpora stay in build/fuzz."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.fuzz import TARGETS, build, run, sow

KEPT = Path("build/fuzz")


def main(arguments: list[str]) -> int:
    """Run the targets in turn; return 1 as soon as one finds something."""
    seconds, targets = int(arguments[0]) if arguments else 300, arguments[1:] or list(TARGETS)
    for target in targets:
        corpus = KEPT / target
        sow(target, corpus)
        print(f"{target}: {seconds} s", flush=True)
        done = run(build(target, KEPT), corpus, f"-max_total_time={seconds}")
        lines = done.stderr.splitlines()
        if done.returncode:
            print("\n".join(lines[-80:]))
            return 1
        print("\n".join(line for line in lines if "DONE" in line or "executed_units" in line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
