"""Published figures beside simulated ones: `python -m benchmarks.papers`.

Each row sets up the conditions of a paper and plays them on virtual time, with the product's own control plane wherever
the row is about schedules. What was tuned is in `tuned`, once for all rows.
"""
