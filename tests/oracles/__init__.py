"""Predictions against measurements that others published, read from packages that are installed."""
