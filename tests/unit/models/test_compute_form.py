"""Which forms of a network are timed, and which of them is chosen."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.configs.model import ModelConfig
from penstock.models.actions import Numbers, discrete
from penstock.models.compute_form import (
    ComputeForm,
    Options,
    UpdateSize,
    acting_forms,
    fastest,
    gains_by_bf16,
    training_forms,
)
from penstock.models.general import ActorCriticHeads, GeneralShape, Input
from penstock.models.layout import CnnShape, DenseShape, MlpShape, SingleHead

CNN = CnnShape(4, 84, 84, discrete(6), 1 / 255)
MLP = MlpShape(4, discrete(2), (64, 64), "tanh", 1.0)
WIDE = MlpShape(400, discrete(6), (128, 128), "relu", 1.0)
OPEN = Options("auto", "auto", None)


def general(**model: Any) -> GeneralShape[ActorCriticHeads]:
    frames = Input("obs", (4, 84, 84), "|u1", None, is_image=True)
    heads = ActorCriticHeads(discrete(6))
    cfg = ModelConfig.model_validate(model)
    return GeneralShape((frames,), None, heads, cfg, lambda shape: CNN.layout)


@pytest.mark.parametrize(
    ("shape", "gains"),
    [
        (CNN, True),
        (WIDE, True),
        (MLP, False),
        (MlpShape(400, Numbers((2,)), (128, 128), "relu", 1.0), False),
        (DenseShape(400, SingleHead(6), (128,), "relu", 1.0), False),
        (general(core="lstm"), True),
    ],
)
def test_bf16_is_tried_only_for_networks_that_learn_as_well_with_it(
    shape: Any, gains: bool
) -> None:
    assert gains_by_bf16(shape) is gains
    forms = training_forms(shape, OPEN, UpdateSize(256), has_bf16=True)
    assert ("bf16" in {form.precision for form in forms}) is gains
    slow = training_forms(shape, OPEN, UpdateSize(256), has_bf16=False)
    assert {form.precision for form in slow} == {"fp32"}


def test_first_form_is_the_default() -> None:
    assert training_forms(CNN, OPEN, UpdateSize(512), has_bf16=True)[0] == (
        "fp32",
        "channels_last",
        256,
    )
    assert acting_forms(CNN, OPEN, 8, has_bf16=True)[0] == ("fp32", "contiguous", 8)
    impala = general(kind="impala_cnn")
    assert acting_forms(impala, OPEN, 8, has_bf16=True)[0] == ("fp32", "channels_last", 8)


@pytest.mark.parametrize(
    ("shape", "update", "rows"),
    [
        (CNN, 64, {256}),  # a whole update is one pass
        (CNN, 100, {256, 50}),
        (CNN, 300, {256, 100, 60}),
        (CNN, 4096, {256, 128, 64}),
        (general(entry="nets:Mine"), 4096, {256, 128, 64}),  # of images, too
        (MLP, 256, {256}),
        (MLP, 2112, {256, 704, 2112}),
        (MLP, 9000, {256, 1000, 3000}),
    ],
)
def test_passes_of_an_update_are_equally_large(shape: Any, update: int, rows: set[int]) -> None:
    forms = training_forms(shape, OPEN, UpdateSize(update), has_bf16=True)
    assert {form.rows for form in forms} == rows
    assert len(set(forms)) == len(forms)


def test_no_pass_divides_an_unroll() -> None:
    update = UpdateSize(8 * 21, 21)  # eight environments
    rows = {form.rows for form in training_forms(CNN, OPEN, update, has_bf16=False)}
    assert rows == {256, 4 * 21, 3 * 21}


def test_options_reduce_the_forms_to_try() -> None:
    fixed = Options("bf16", "contiguous", 100)
    assert training_forms(CNN, fixed, UpdateSize(512), has_bf16=False) == [
        ("bf16", "contiguous", 100)
    ]
    assert acting_forms(CNN, fixed, 8, has_bf16=False) == [("bf16", "contiguous", 8)]
    some = training_forms(
        CNN, Options("auto", "channels_last", 100), UpdateSize(512), has_bf16=True
    )
    assert some == [("fp32", "channels_last", 100), ("bf16", "channels_last", 100)]


def test_network_without_images_has_no_memory_format() -> None:
    assert acting_forms(WIDE, OPEN, 8, has_bf16=True) == [("fp32", "auto", 8)]
    own = training_forms(general(entry="nets:Mine"), OPEN, UpdateSize(64), has_bf16=True)
    assert own == [("fp32", "auto", 256), ("bf16", "auto", 256)]


def test_slightly_faster_form_is_not_chosen() -> None:
    rule, half, other = (
        ComputeForm("fp32", "channels_last", 256),
        ComputeForm("bf16", "contiguous", 128),
        ComputeForm("bf16", "contiguous", 256),
    )
    assert fastest({rule: 1.0, half: 0.95, other: 0.92}, rule) == rule
    assert fastest({rule: 1.0, half: 0.74}, rule) == rule  # a small pass must gain more
    assert fastest({rule: 1.0, half: 0.50}, rule) == half
    assert fastest({rule: 1.0, half: 0.50, other: 0.68}, rule) == other  # differs less
    assert fastest({rule: 1.0, half: 0.50, other: 0.70}, rule) == half


@pytest.mark.parametrize(
    "value",
    [
        *(None, "fp32", [], ["fp32", "contiguous"], ["fp16", "contiguous", 256]),
        *(["fp32", "rows", 256], ["fp32", "contiguous", 0], ["fp32", "contiguous", True]),
        *(["fp32", "contiguous", 1 << 40], [["fp32"], {}, 256], ["fp32", "contiguous", 2.0]),
    ],
)
def test_invalid_form_description_is_read_as_none(value: Any) -> None:
    assert ComputeForm.read(value) is None
    assert ComputeForm.read(["bf16", "auto", 64]) == ("bf16", "auto", 64)
