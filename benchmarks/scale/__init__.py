"""What thousands of peers cost: starts, bursts, restarts, memory, idleness, comparisons."""
