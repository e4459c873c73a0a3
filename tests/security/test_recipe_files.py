"""A stranger's recipe may not say where to write, what to fetch, where to send results, or how timm builds models."""

import pytest

from inline_attention.engine.config import ConfigError, TrainConfig, check_recipe_file
from inline_attention.engine.config.reading import from_yaml, to_yaml

REFUSED = {
    "run.output": "run: {output: /etc/cron.d}",
    "run.experiment": "run: {experiment: ../../x}",
    "run.resume": "run: {resume: /home/someone/run}",
    "data.dataset": "data: {dataset: hfds/someone/pictures}",
    "data.allow_outside_files": "data: {allow_outside_files: true}",
    "logging.wandb": "logging: {wandb: true, wandb_project: x}",
    "model.name": "model: {name: 'hf-hub:someone/model'}",
    "model.arguments.pretrained": "model: {name: inline_deit_tiny, arguments: {pretrained: true}}",
    "model.arguments.cache_dir": "model: {name: resnet18, arguments: {cache_dir: .}}",
    "model.arguments.depth": "model: {name: inline_deit_tiny, arguments: {depth: 1000000000}}",
}


@pytest.mark.parametrize("path", REFUSED)
def test_refused_in_a_file_but_not_on_the_command_line(path):
    config = from_yaml(REFUSED[path])
    with pytest.raises(ConfigError) as caught:
        check_recipe_file(config, [], "recipe.yaml")
    assert [problem.path for problem in caught.value.problems] == [path]
    check_recipe_file(config, [f"{path}=anything"], "recipe.yaml")


def test_all_problems_are_named_at_once():
    text = "run: {output: /x, resume: y}\nmodel: {name: inline_deit_tiny, arguments: {pretrained: true, depth: -1}}"
    with pytest.raises(ConfigError) as caught:
        check_recipe_file(from_yaml(text), [], "recipe.yaml")
    assert len(caught.value.problems) == 4


def test_the_defaults_may_be_written_to_a_file_and_read_back():
    check_recipe_file(from_yaml(to_yaml(TrainConfig())), [], "recipe.yaml")
