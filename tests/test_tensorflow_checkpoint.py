"""Test ``Compressor.trackable`` in checkpoints of TensorFlow.

A state is loaded as a whole, or nothing of it.
"""

import gc

import numpy as np
import pytest
from compressors_with_state import OnTensorFlow, assert_equal, snapshot

import deepreduce_hvd as dr
from deepreduce_hvd.schedule import Message, Plan


class TestCheckpoint:
    """Tests of ``Compressor.trackable`` for TensorFlow."""

    @pytest.fixture(autouse=True)
    def tf(self):
        return pytest.importorskip("tensorflow")

    @staticmethod
    def saved(tf, directory, owner):
        return tf.train.Checkpoint(compressor=owner.compressor.trackable).write(
            str(directory / "checkpoint")
        )

    def test_its_own(self, tf, tmp_path):
        source, target = OnTensorFlow(), OnTensorFlow()
        source.step(0)
        path = self.saved(tf, tmp_path, source)
        tf.train.Checkpoint(compressor=target.compressor.trackable).read(path).assert_consumed()
        assert_equal(snapshot(target.compressor), snapshot(source.compressor))

    def test_a_model_that_has_it_as_an_attribute_does_not_own_its_variables(self, tf, tmp_path):
        """A broadcast of the model's variables must leave the residuals as they are."""
        source, target = OnTensorFlow(), OnTensorFlow()
        source.step(0)
        models = [tf.Module(), tf.keras.Sequential([tf.keras.layers.Dense(2)])]
        for model in models:
            model.compressor_state = source.compressor.trackable
            assert not model.variables
        path = tf.train.Checkpoint(model=models[0]).write(str(tmp_path / "checkpoint"))
        models[0].compressor_state = target.compressor.trackable
        tf.train.Checkpoint(model=models[0]).read(path).assert_consumed()
        assert_equal(snapshot(target.compressor), snapshot(source.compressor))

    def test_mean_seconds_are_those_of_the_own_steps(self, tf, tmp_path):
        """Steps of the saved job are not timed here."""
        source, target = OnTensorFlow(), OnTensorFlow()
        for step in range(50):
            source.step(step)
        path = self.saved(tf, tmp_path, source)
        target.step(0)
        before = target.compressor.stats()
        tf.train.Checkpoint(compressor=target.compressor.trackable).read(path).assert_consumed()
        for name, row in target.compressor.stats().items():
            assert row["steps"] == source.compressor.stats()[name]["steps"] in (0, 50)
            for what in ("encode_seconds", "decode_seconds"):
                assert row[what] == pytest.approx(before[name][what]), (name, what)
        target.step(50)
        for name, slot in target.compressor.adapter.slots.items():
            assert slot.steps - slot.untimed_steps == 2 * (slot.steps > 0), name
        assert target.compressor.adapter.progress() == 51

    def test_a_compressor_that_only_the_checkpoint_holds(self, tf, tmp_path):
        source, target = OnTensorFlow(), OnTensorFlow()
        source.step(0)
        expected = snapshot(source.compressor)
        models = [source.named, target.named]  # a memory is freed with its variable
        saved, restored = (
            tf.train.Checkpoint(compressor=owner.compressor.trackable) for owner in (source, target)
        )
        source = target = None
        gc.collect()
        path = saved.write(str(tmp_path / "checkpoint"))
        restored.read(path).assert_consumed()
        for named, checkpoint in zip(models, (saved, restored)):
            for name, _ in named:
                slot = checkpoint.compressor.slots[name]
                assert slot.steps == expected[name][0]
                for kind, part in zip(slot.state_names, slot.state):
                    np.testing.assert_array_equal(part.numpy(), expected[name][2][kind])

    @pytest.mark.parametrize("deferred", [False, True])
    def test_of_another_configuration(self, tf, tmp_path, deferred):
        source, target = OnTensorFlow(), OnTensorFlow(seed=1)
        source.step(0)
        path = self.saved(tf, tmp_path, source)
        before = snapshot(target.compressor)
        with pytest.raises(
            dr.InvalidArgumentError,
            match="compressor checkpoint: seed: expected 1, as in this Compressor, got 0",
        ):
            if deferred:
                checkpoint = tf.train.Checkpoint()
                checkpoint.read(path)
                checkpoint.compressor = target.compressor.trackable
            else:
                tf.train.Checkpoint(compressor=target.compressor.trackable).read(path)
        assert_equal(snapshot(target.compressor), before)

    def test_of_a_plan_that_leaves_memories_out(self, tf, tmp_path):
        source = OnTensorFlow()
        source.step(0)
        path = self.saved(tf, tmp_path, source)
        messages = (Message(("first",), "codec", 0.1, "Allgather"), Message(("second",), "dense"))
        plan = Plan(messages, (), 0.0, "none", "none", 2, 1, "none")
        target = OnTensorFlow(schedule=plan)
        before = snapshot(target.compressor)
        with pytest.raises(
            dr.InvalidArgumentError, match="with memories of the same variables .* schedule="
        ):
            tf.train.Checkpoint(compressor=target.compressor.trackable).read(path)
        assert_equal(snapshot(target.compressor), before)

    def test_of_another_rank(self, tf, tmp_path, monkeypatch):
        source, target = OnTensorFlow(), OnTensorFlow()
        source.step(0)
        monkeypatch.setattr(type(source.compressor.adapter.transport), "rank", 1)
        monkeypatch.setattr(type(source.compressor.adapter.transport), "size", 2)
        path = self.saved(tf, tmp_path, source)
        monkeypatch.undo()
        before = snapshot(target.compressor)
        with pytest.raises(
            dr.InvalidArgumentError,
            match=(
                "checkpoint: expected the checkpoint of rank 0 of 1, got the checkpoint of "
                "rank 1 of 2; .* load_state_dict"
            ),
        ):
            tf.train.Checkpoint(compressor=target.compressor.trackable).read(path)
        assert_equal(snapshot(target.compressor), before)

    def test_of_a_rank_that_sends_no_more(self, tf, tmp_path, monkeypatch):
        """The hosts have different ranks from when the checkpoint was saved."""
        source, target = OnTensorFlow(), OnTensorFlow()
        source.step(0)
        for session, keeper in ((source.compressor.adapter, 3), (target.compressor.adapter, 0)):
            monkeypatch.setattr(session, "keeper_of", lambda rank, keeper=keeper: keeper)
        before = snapshot(target.compressor)
        path = self.saved(tf, tmp_path, source)
        message = (
            "checkpoint: expected the checkpoint of a rank whose memory is on rank 0, got one "
            ".* on rank 3; .* load_state_dict"
        )
        with pytest.raises(dr.InvalidArgumentError, match=message):
            tf.train.Checkpoint(compressor=target.compressor.trackable).read(path)
        assert_equal(snapshot(target.compressor), before)
        monkeypatch.setattr(target.compressor.adapter, "keeper_of", lambda rank: 3)
        tf.train.Checkpoint(compressor=target.compressor.trackable).read(path).assert_consumed()

    def test_in_a_graph_of_version_1(self, tf, tmp_path):
        paths, graphs = {}, {}
        for seed in (0, 1):
            graphs[seed] = tf.Graph()
            with graphs[seed].as_default():
                owner = OnTensorFlow(seed=seed)
                checkpoint = tf.train.Checkpoint(compressor=owner.compressor.trackable)
                with tf.compat.v1.Session() as session:
                    session.run(
                        [
                            tf.compat.v1.global_variables_initializer(),
                            tf.compat.v1.local_variables_initializer(),
                        ]
                    )
                    paths[seed] = checkpoint.write(str(tmp_path / f"graph{seed}"))
                    checkpoint.read(paths[seed]).assert_consumed().run_restore_ops(session)
                    if seed == 1:
                        with pytest.raises(
                            dr.InvalidArgumentError,
                            match="compressor checkpoint: seed: expected 1, as in this Compressor, got 0",
                        ):
                            checkpoint.read(paths[0])
