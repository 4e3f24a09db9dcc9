"""Suggest how to write a stage, for error messages."""

#: calls that make an instance, for classes whose constructor needs an argument
_CALLS = {
    "ChunkTopK": "ChunkTopK(0.01)",
    "Codec": "Codec(TopK(0.01))",
    "Hierarchical": "Hierarchical(Allgather())",
    "RandomK": "RandomK(0.01)",
    "Threshold": "Threshold(0.01)",
    "TopK": "TopK(0.01)",
}


def article(kind):
    """Return the name of a class with its indefinite article."""
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"


def makes(value, kind):
    """Return whether a value is an instance of ``kind`` or a class of such instances."""
    return issubclass(value, kind) if isinstance(value, type) else isinstance(value, kind)


def written(value):
    """Return the expression for a stage: its repr, or for a class a call that makes one."""
    if not isinstance(value, type):
        return repr(value)
    return _CALLS.get(value.__name__, f"{value.__name__}()")


def called(text, kind):
    """Return the expression for the stage of ``kind`` that a text names, or None.

    Ignores case and all characters other than letters and digits: "random_k" names RandomK.
    """
    found = (one for one in _subclasses(kind) if _plain(one.__name__) == _plain(text))
    return next(map(written, found), None)


def _plain(name):
    return "".join(filter(str.isalnum, name)).lower()


def _subclasses(kind):
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)
