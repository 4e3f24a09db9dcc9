"""Test that warnings show the line of the program."""

import inspect
import threading
import warnings

from deepreduce_hvd import user_warnings


def caught(function, *arguments):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function(*arguments)
    return found


def through(module, function, file="<string>"):
    """Return a function of another module that calls ``function``."""
    space = {"__name__": module, "function": function}
    text = "def call(*arguments):\n    function(*arguments)"
    exec(compile(text, file, "exec"), space)
    return space["call"]


def assert_shows(warning, function, text):
    lines, first = inspect.getsourcelines(function)
    assert warning.filename == __file__
    assert text in lines[warning.lineno - first]


def test_wrappers_of_frameworks_are_skipped():
    def step():
        optimizer("something")

    optimizer = through("torch.optim.optimizer", through("horovod.torch", user_warnings.warn))
    (warning,) = caught(through("keras.src.trainers", step))
    assert_shows(warning, step, 'optimizer("something")')


def test_copies_that_autograph_makes_are_skipped():
    def step():
        copy("something")

    copy = through("__main__", user_warnings.warn, "/tmp/__autograph_generated_filea1b2.py")
    (warning,) = caught(through("tensorflow.python.eager", step))
    assert_shows(warning, step, 'copy("something")')


def test_a_module_of_the_program_is_not_taken_for_a_framework():
    call = through("torch_model", user_warnings.warn)
    (warning,) = caught(through("torch", call), "something")
    assert warning.filename == "<string>"


def test_a_thread_of_a_framework_shows_where_the_package_warns():
    def run():
        thread = threading.Thread(target=through("torch.autograd", user_warnings.warn), args=["x"])
        thread.start()
        thread.join()

    (warning,) = caught(run)
    assert (warning.filename, str(warning.message)) == ("<string>", "deepreduce_hvd: x")
