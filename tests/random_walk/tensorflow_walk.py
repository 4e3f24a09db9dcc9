"""Run a random walk over the API for TensorFlow, under horovodrun.

    export PYTHONPATH=tests/support
    horovodrun -np 2 python tests/random_walk/tensorflow_walk.py --seeds 17
    horovodrun -np 3 python tests/random_walk/tensorflow_walk.py --seeds 0-99

A seed determines a program (tensorflow_program.py). After each step, every rank compares all ranks
with an oracle that knows all gradients (tensorflow_oracle.py). It checks the results, every memory
and step counter, that replicas are equal bit for bit, that no mass is lost, and that nothing else
has changed. A program that fails is printed with its step. One that hangs ends with the stacks of
all threads, below the line with its seed.
"""

import argparse
import faulthandler
import gc
import os
import pathlib
import sys
import tempfile
import time
import traceback

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Horovod's Keras optimizers need Keras 2
os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow_generator import Generator, process_sets
from tensorflow_trainer import Failed, Trainer, shortened

SECONDS_A_SEED = 60


def _seeds(text):
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _run(seed, sets, directory, show):
    """Run one seed; return "ran", "refused" or "failed"."""
    program = Generator(seed, hvd.size()).program()
    trainer = Trainer(program, sets, directory)
    # if a job hangs, this is the last line before the stacks of all threads
    if hvd.rank() == 0:
        print(program if show else f"seed {seed}", flush=True)
    faulthandler.dump_traceback_later(SECONDS_A_SEED, exit=True)
    try:
        return trainer.run()
    except Exception as error:
        if hvd.rank() == 0 or not isinstance(error, Failed):
            text = str(error) if isinstance(error, Failed) else traceback.format_exc()
            print(
                f"seed {seed} failed in {trainer.where}\n{program}\n{shortened(text)}", flush=True
            )
        return "failed"
    finally:
        faulthandler.cancel_dump_traceback_later()


def _is_over(seed, seconds):
    """Return whether any rank has used up its time. So all ranks end after the same seed."""
    over = tf.constant(float(seconds < 0))
    return bool(hvd.allreduce(over, op=hvd.Max, name=f"walk.over.{seed}"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=_seeds, default=range(20), help="one number, or first-last")
    parser.add_argument("--show", action="store_true", help="print every program before it runs")
    parser.add_argument("--seconds", type=float, help="start no seed after so many")
    arguments = parser.parse_args()
    hvd.init()
    tf.get_logger().setLevel("ERROR")  # functions are traced repeatedly on purpose
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    added = [ranks for ranks in process_sets(hvd.size()) if ranks is not None]
    sets = {ranks: hvd.add_process_set(list(ranks)) for ranks in added}
    sets[None] = hvd.global_process_set
    outcomes, started = {}, time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        for seed in arguments.seeds:
            outcomes[seed] = _run(seed, sets, pathlib.Path(directory), arguments.show)
            tf.keras.backend.clear_session()
            gc.collect()
            seconds = time.monotonic() - started
            last = seed == arguments.seeds[-1]
            if arguments.seconds is not None:
                last = last or _is_over(seed, arguments.seconds - seconds)
            if hvd.rank() == 0 and (len(outcomes) % 10 == 0 or last):
                found = list(outcomes.values())
                counts = ", ".join(f"{found.count(one)} {one}" for one in sorted(set(found)))
                print(f"{len(found)} seeds in {seconds:.0f} s: {counts}", flush=True)
            if last:
                break
    failed = [seed for seed, outcome in outcomes.items() if outcome == "failed"]
    if failed:
        print(f"rank {hvd.rank()}: seeds {failed} failed", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
