"""A function that has taken over its container: the runtime answers with pickles that run code when loaded."""

import pickle


class Bomb:
    """Loaded, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


class Exploding(BaseException):
    """An exception with a malicious pickle: the runtime pickles the exception that ends an input."""

    def __reduce__(self):
        return open, (self.args[0], "w")


def hostile(items):
    for one in items:
        _take_over(one["metadata"]["file"])
        if one["metadata"]["how"] == "exception":
            raise Exploding(one["metadata"]["file"])
    return []


def _take_over(path):
    from modal._runtime import container_io_manager as runtime
    from modal_proto import api_pb2

    runtime.IOContext._determine_output_format = lambda self, asked: api_pb2.DATA_FORMAT_PICKLE
    runtime.serialize_data_format = lambda item, data_format: pickle.dumps(Bomb(path))
