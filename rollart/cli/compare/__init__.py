"""Commands that compare: two runs, or a run with changes of itself."""
