import torch

from benchmarks.engine.lively_weights import SPREAD, fill


def test_layers_differ_and_norms_pass_everything_on() -> None:
    first, second, norm = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)
    assert fill("result", torch.nn.ModuleList([first, second, norm])) == "result"
    assert not torch.equal(first.weight, second.weight)
    assert torch.all(norm.weight == 1)
    assert SPREAD / 2 < float(first.weight.detach().std()) < 2 * SPREAD
