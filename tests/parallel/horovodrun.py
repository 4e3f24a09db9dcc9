"""Horovod's launcher, without its check of how Horovod was built.

``horovodrun`` imports TensorFlow in two processes to find out that Horovod was built with Gloo and
without MPI. This takes 10 s of processor time per job, more than most jobs of the tests. Set-up has
checked the same. The tests of examples and of several hosts start ``horovodrun`` itself.
"""

# Horovod's processes import this file too
if __name__ == "__main__":
    from horovod.runner import launch

    launch.gloo_built = lambda verbose=False: True
    launch.mpi_built = lambda verbose=False: False
    launch.run_commandline()
