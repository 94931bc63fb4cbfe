"""`rollart rewards`: write, test, deploy and operate reward functions."""
