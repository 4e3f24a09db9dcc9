"""Suggest how to write a stage, for error messages."""


def article(kind):
    """Return the name of a class with its indefinite article."""
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"


def makes(value, kind):
    """Return whether a value is an instance of ``kind`` or a class of such instances."""
    return issubclass(value, kind) if isinstance(value, type) else isinstance(value, kind)


def written(value):
    """Return the expression for a stage: its repr, or for a class a call that makes one.

    The class names the arguments of the call as ``example_arguments``.
    """
    if not isinstance(value, type):
        return repr(value)
    return f"{value.__name__}({getattr(value, 'example_arguments', '')})"


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
