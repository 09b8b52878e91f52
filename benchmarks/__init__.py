"""What the daemon costs, each figure beside a reference taken in the same round."""
