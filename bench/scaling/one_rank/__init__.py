"""One rank of many: what it does in a step, counted against a group that sends nothing."""
