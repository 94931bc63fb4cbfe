"""A function that does not load."""

import importlib

importlib.import_module("no_such_module")


def handler(sample):
    return 1.0
