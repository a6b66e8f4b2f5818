"""Training as hooks see it: backward passes, optimizer steps, and their times."""
