"""Use of devices over the run."""
