"""`recall-lab show mixer=NAME`: what it prints of a mixer. tests/test_verbs.py has the examples of tasks."""

import inspect
import re
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from conftest import config, names
from hydra.utils import instantiate

from recall_lab.cli import show
from recall_lab.contract.mixer import built, draw
from recall_lab.mixer.base import Mixer
from recall_lab.mixer.softmax import Softmax

WIDTH = 8


def printed(capsys, *words: str, **options) -> str:
    show.show([*words, f"model.d_model={WIDTH}"], **options)
    return capsys.readouterr().out


def mixers(name: str) -> list:
    made = instantiate(config(f"mixer={name}").mixer, _convert_="all")
    return [built(make, d_model=WIDTH) for make in (made if isinstance(made, list) else [made])]


def picture(text: str) -> list[tuple[list[str], float]]:
    """Each row's cells of two characters, and its largest weight."""
    rows = re.findall(r"^ *(\d+) ((?:[░▒▓█][░▒▓█-]|· )+) *(\S+)$", text, re.M)
    assert [int(t) for t, *_ in rows] == list(range(show.LENGTH))
    return [(re.findall("..", cells), float(largest)) for _, cells, largest in rows]


@pytest.mark.parametrize("name", names("mixer"))
def test_every_mixer_is_described(name, capsys, monkeypatch):
    """Docstring, gates with their neutral values, options, number of parameters, sizes of the state."""
    monkeypatch.setattr(show, "LENGTH", 6)
    monkeypatch.setattr(show, "LENGTHS", (3, 40))
    text = printed(capsys, f"mixer={name}")
    for mixer in mixers(name):
        assert (inspect.getdoc(type(mixer)) or "missing") in text
        assert f"{sum(weight.numel() for weight in mixer.parameters()):,} parameters: " in text
        words = " ".join(text.split())
        assert all(f"{key} {'×'.join(map(str, w.shape))}" in words for key, w in mixer.named_parameters())
        assert f"{mixer.state_size(40)[0]:,} at n=40" in words
        if isinstance(mixer, Mixer):
            assert f"heads=1, d_key={mixer.d_key}, d_value={mixer.d_value}, short_conv=4" in words
            for gate in mixer.gates(draw(mixer, 1)):
                (neutral,) = re.findall(rf"│ gate {gate} +│ b × .*× t.* │ (\S.*?) +│", text)
                assert neutral == "not declared" or float(neutral) == mixer.neutral_gates[gate]
            assert ("effective attention A" in text) == mixer.linear_in_v or name == "hybrid"
            assert ("not linear in v: influence is ‖∂o_t/∂v_s‖" in text) != mixer.linear_in_v
        else:
            assert "no queries, keys and values: influence of inputs on outputs is" in text


def test_the_picture_shows_the_weights_that_the_recurrence_has(capsys):
    """Sign, quarter of the row's largest, and that itself, of A computed column by column from unit values."""
    (mixer,) = mixers("delta_rule")
    with torch.no_grad():
        q, k, _, gates, _ = mixer.project(draw(mixer, show.LENGTH, batch=1, seed=3))
        values = torch.eye(show.LENGTH)[:, None, :, None]  # s 1 t 1
        same = [x.expand(show.LENGTH, *x.shape[1:]) for x in (q, k, *gates.values())]
        o, _ = mixer.run_recurrence(same[0], same[1], values, dict(zip(gates, same[2:], strict=True)))
    weights = o[:, 0, :, 0].T  # t s
    rows = picture(printed(capsys, "mixer=delta_rule", seed=3))
    seen = set()
    for t, (cells, largest) in enumerate(rows):
        assert len(cells) == t + 1
        assert largest == pytest.approx(float(weights[t].abs().max()), rel=0.06)
        for cell, weight in zip(cells, weights[t, : t + 1].tolist(), strict=True):
            share = abs(weight) / float(weights[t].abs().max())
            assert (cell == "· ") == (share < 0.01)
            assert (cell[1] == "-") == (weight < 0 and share >= 0.01)
            assert cell == "· " or show.SHADES.index(cell[0]) == min(int(4 * share), 3)
            seen.add(cell[0])
    assert seen == {"·", *show.SHADES}


def test_the_picture_of_a_window_is_its_band(capsys):
    for t, (cells, _) in enumerate(picture(printed(capsys, "mixer=window", "mixer.budget=3"))):
        assert [s for s, cell in enumerate(cells) if cell != "· "] == list(range(max(0, t - 2), t + 1))


def test_a_row_of_zeros_has_no_weights():
    assert show._row(1, [0.0, 0.0, 0.0]).plain == "  1 · ·    0"


def test_shapes_are_those_of_the_heads(capsys):
    text = printed(capsys, "mixer=softmax", "mixer.heads=2", "mixer.d_value=3", "mixer.short_conv=0")
    assert re.search(r"│ q +│ b × 2 × t × 4 +│", text)
    assert re.search(r"│ v +│ b × 2 × t × 3 +│", text)
    assert re.search(r"│ state k after 24 tokens +│ b × 2 × 24 × 4 +│", text)
    assert "elements of the state: 224 at n=16" in text
    assert "of head 1 of 2" in text


def test_a_task_and_a_mixer(capsys):
    text = printed(capsys, "task=mqar", "mixer=linear", sequences=2)
    assert text.index("scored positions per sequence") < text.index("Linear, with d_model=8")
    assert "scored positions" not in printed(capsys, "mixer=linear")


def test_a_mixer_without_a_docstring(capsys):
    @dataclass(eq=False, repr=False, kw_only=True)
    class Bare(Softmax):
        pass

    show._mixer(partial(Bare, heads=2), WIDTH, 0, show.Console())
    assert "Bare, with d_model=8\n\nIt has no docstring.\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["train.steps=3"], {}, "train.steps has no effect: show prints an example of a task"),
        (["task=mqar", "model.d_model=8"], {}, "model.d_model has no effect"),
        (["mixer=softmax", "model.layers=1"], {}, "model.layers has no effect"),
        (["mixer=softmax"], {"sequences": 2}, "--n has no effect"),
        (["task=mqar"], {"sequences": 0}, "--n=0"),
        (["mixer=softmax,linear"], {}, "mixer=softmax,linear: show prints one at a time"),
        (["~mixer"], {}, "~mixer: a setting cannot be removed"),
        (["mixer.heads=3"], {}, "d_model=64 is not divisible by heads=3"),
        (["mixer._target_=os.getcwd"], {}, "mixer._target_=os.getcwd: must be a Layer"),
    ],
)
def test_what_has_no_effect_is_refused(words, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        show.show(words, **options)
