"""One tensor given for two arguments of the example must not tie the two."""

import torch

from relax_disc.frontend import capture_step
from tests.frontend.models import Llama, dims, token_batch
from tests.frontend.running import check_gradients


def test_two_arguments_may_be_one_tensor_in_the_example():
    torch.manual_seed(0)
    model = Llama(whole=False, tied=False, layers=1)
    ids, _ = token_batch(3, 12)
    batch, length = dims()
    shape = {0: batch, 1: length}
    captured = capture_step(model, None, (ids, ids), dynamic_shapes=(shape, shape))
    check_gradients(captured, model, [token_batch(2, 9)])
