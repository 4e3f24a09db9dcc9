"""A job with PyTorch's DDP where Horovod and TensorFlow are not installed; started by
test_torch_ddp.py under torchrun.
"""

import sys


class Without:
    """A finder that hides some packages."""

    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("horovod", "tensorflow", "keras", "tf_keras"):
            return None
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ddp_tools import Network, assert_equal_everywhere, distributed, loss_of  # noqa: E402

import deepreduce_hvd as dr  # noqa: E402


def main():
    dist.init_process_group("gloo")
    network = Network()
    alone = dr.Compressor(parameters=network.named_parameters())
    for use in (alone.state_dict, lambda: alone.compress(torch.zeros(3))):
        try:
            use()
        except dr.InvalidArgumentError as error:
            advice = (
                'call register(ddp_model) first, after fully_shard register(module, mesh["hosts"])'
            )
            assert str(error).endswith(advice), error
        else:
            raise AssertionError("expected a refusal")
    model, compressor = distributed(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
    assert_equal_everywhere(network.named_parameters(), "without Horovod")
    compressor.summary()
    loaded = [name for name in sys.modules if name.partition(".")[0] in ("horovod", "tensorflow")]
    assert not loaded, loaded
    print("trained without Horovod")


main()
