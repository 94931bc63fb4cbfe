"""Environments beside the run."""
