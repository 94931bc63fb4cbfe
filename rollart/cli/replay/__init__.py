"""`rollart bundle` and `rollart replay`: a training step as a file, and its repetition on any machine."""
