"""Cache policies with the weights of trained softmax models, and layers of different mechanisms."""

import pytest
import torch
from conftest import config
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from recall_lab.model import Model


@pytest.mark.parametrize("policy", ["window", "sink_window", "heavy_hitter", "merging", "top_k", "paged", "random_k"])
def test_a_policy_can_use_the_weights_of_softmax(policy):
    trained = instantiate(config("mixer=softmax").mixer)(d_model=16, heads=2)
    x = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0))
    for budget in (48, 16):
        mixer = instantiate(config(f"mixer={policy}", f"mixer.budget={budget}").mixer)(d_model=16, heads=2)
        mixer.load_state_dict(trained.state_dict(), strict=True)
        y, _ = mixer(x)
        assert torch.allclose(y, trained(x)[0], atol=1e-6) == (budget >= 40)


def test_a_trained_model_with_another_policy():
    """The weights of a softmax model, loaded into models with other caches."""
    tokens = torch.randint(0, 8, (2, 40), generator=torch.Generator().manual_seed(0))

    def model(*overrides: str) -> Model:
        return Model(8, instantiate(config(*overrides).mixer, _convert_="all"), d_model=16, layers=2)

    trained = model("mixer=softmax")
    logits = trained(tokens)
    for overrides in (
        ["mixer=merging"],
        ["mixer=hybrid", "mixer@mixer.first=paged", "mixer@mixer.second=heavy_hitter"],
    ):
        other = model(*overrides)
        other.load_state_dict(trained.state_dict(), strict=True)
        assert torch.allclose(other(tokens), logits, atol=1e-5)


def layers(*overrides: str) -> list[str]:
    return [type(make(d_model=16)).__name__ for make in instantiate(config("mixer=hybrid", *overrides).mixer)]


def test_hybrid():
    assert layers() == ["DeltaRule", "Softmax"]
    assert layers("mixer@mixer.first=window", "mixer.pattern=[first,first,second]") == ["Window", "Window", "Softmax"]
    assert layers("+mixer@mixer.third=linear", "mixer.pattern=[third,first]") == ["Linear", "DeltaRule"]
    make = instantiate(config("mixer=hybrid", "mixer@mixer.first=window", "mixer.first.budget=16").mixer)[0]
    assert make(d_model=16).budget == 16
    for pattern in ("[first,sceond]", "[]", "[third]"):
        with pytest.raises(InstantiationException, match="must be a list of one or more of first, second"):
            layers(f"mixer.pattern={pattern}")
