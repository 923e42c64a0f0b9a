"""Recipes are the fields of their papers' formulas. The engine's tests compare the numbers."""

import pytest

from cfg_core import GuidanceParams, recipes


@pytest.mark.parametrize(
    ("recipe", "weights", "fields"),
    [
        (recipes.cfg(), (1.5, -0.5), {"guidance_scale": 1.5}),
        (recipes.cfg("u", 3), (3, -2), {"guidance_scale": 3.0, "negative_prompt": "u"}),
        (
            recipes.cfg([1, 2], 3),
            (3, -2),
            {"guidance_scale": 3.0, "negative_prompt_token_ids": [1, 2]},
        ),
        (
            recipes.cad("u", 0.5),
            (1.5, -0.5),
            {"guidance_streams": [{"weight": -0.5, "prompt": "u"}]},
        ),
        (
            recipes.preadd([7], -2),
            (3, -2),
            {"guidance_streams": [{"weight": -2.0, "token_ids": [7]}]},
        ),
        (
            recipes.adacad("u", 0.5),
            (1, 0),
            {"guidance_rule": {"name": "adacad", "offset": 0.5}, "negative_prompt": "u"},
        ),
        (
            recipes.arr([7]),
            (1, 0),
            {"guidance_rule": {"name": "arr"}, "negative_prompt_token_ids": [7]},
        ),
        (
            recipes.dexperts("good", "bad", 2),
            (1, 2, -2),
            {
                "guidance_streams": [
                    {"weight": 2.0, "lora": "good"},
                    {"weight": -2.0, "lora": "bad"},
                ]
            },
        ),
    ],
)
def test_recipes(recipe, weights, fields):
    assert recipe.weights == weights
    assert recipe.to_extra_args() == fields
    assert GuidanceParams.from_fields(fields) == recipe
