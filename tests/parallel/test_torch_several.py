"""Several optimizers, hvd.allreduce alone, sparse gradients, costs: PyTorch on 2 and 3 ranks."""

from launch import scenario_tests

reports, test_scenario = scenario_tests("torch_several.py", slow_ranks=())
