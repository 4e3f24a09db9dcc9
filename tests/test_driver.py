"""Test the thread that runs the exchanges of a compressor one after another."""

import threading
import time

import pytest

from deepreduce_hvd.communicators.driver import Driver
from deepreduce_hvd.errors import PeerFailedError


class Transport:
    """Records the errors that the other ranks would get."""

    def __init__(self):
        self.announced = []

    def announce(self, error):
        self.announced.append(error)


class Job:
    """Appends its name to a list when it runs."""

    def __init__(self, name, ran, *, seconds=0.0, raises=None):
        self.name, self.ran, self.seconds, self.raises = name, ran, seconds, raises
        self.ended = threading.Event()

    def run(self):
        time.sleep(self.seconds)
        if self.raises is not None:
            raise self.raises
        self.ran.append(self.name)

    def end(self, error):
        self.error = error
        self.ended.set()


def test_jobs_run_in_their_order_and_stop_waits_for_them():
    driver, ran = Driver(Transport()), []
    jobs = [Job(number, ran, seconds=0.02) for number in range(5)]
    for job in jobs:
        driver.put(job)
    driver.stop()
    assert ran == [0, 1, 2, 3, 4] and all(job.ended.is_set() for job in jobs)
    assert not any(thread.name == "deepreduce-driver" for thread in threading.enumerate())


def test_stop_does_not_wait_for_itself():
    driver, ran = Driver(Transport()), []
    job = Job("stops", ran)
    job.run = driver.stop
    driver.put(job)
    assert job.ended.wait(5) and job.error is None


def test_an_announcement_that_fails_ends_the_job():
    class Broken(Transport):
        def announce(self, error):
            super().announce(error)
            raise MemoryError("no memory for the text")

    driver, ran = Driver(Broken()), []
    error = KeyError("own")
    jobs = [Job("fails", ran, raises=error), Job("last", ran)]
    for job in jobs:
        driver.put(job)
    assert all(job.ended.wait(5) for job in jobs)
    assert [job.error for job in jobs] == [error, error] and not ran
    driver.stop()


@pytest.mark.parametrize(
    ("error", "told"), [(KeyError("own"), True), (PeerFailedError("of another rank"), False)]
)
def test_a_failure_ends_all_later_jobs(error, told):
    transport, ran = Transport(), []
    driver = Driver(transport)
    jobs = [Job("first", ran), Job("fails", ran, raises=error), Job("last", ran)]
    for job in jobs:
        driver.put(job)
    driver.stop()
    assert ran == ["first"] and [job.error for job in jobs] == [None, error, error]
    assert transport.announced == ([error] if told else [])
